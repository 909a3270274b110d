"""Print the dependencies in pyproject.toml, with those of the given extras, for a layer without the package itself."""

import sys
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

project = tomllib.loads((Path(__file__).parent / "pyproject.toml").read_text())["project"]
extras = [line for extra in sys.argv[1:] for line in project["optional-dependencies"][extra]]
print("\n".join([*project["dependencies"], *extras]))

"""The compile Job: compile a model to a folder where no output is yet. An output that is there is never changed.

Arguments: the folder or URI of the output, and the instance type that will serve. Beside this file are
`compile.properties` with the model, and `serve.properties` with the output in its place.
"""

import sys
from pathlib import Path

from djl_python_neuronx import cli
from djl_python_neuronx.artifacts import fetch, manifest
from djl_python_neuronx.artifacts.folder import parse_object
from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.config.resolve import read_settings
from djl_python_neuronx.config.sources import environment
from djl_python_neuronx.errors import ServingError

SETTINGS = Path(__file__).parent
SOURCE = ("model_id", "revision")
"""The options that name a model."""


def finished(output: str) -> manifest.Manifest | None:
    """The output's manifest, which is written last; None only if it is known that no output was finished there.

    Raises:
        ServingError: it is not known.
        OSError: likewise.
    """
    try:
        if fetch.uri_scheme(output):
            content = fetch.s3_module(output).read(output, manifest.FILE_NAME, environment())
        else:
            content = (Path(output) / manifest.FILE_NAME).read_bytes()
    except FileNotFoundError:
        return None
    found = parse_object(content, f"{output}/{manifest.FILE_NAME}")
    return None if manifest.is_unfinished(found) else manifest.parse(found, output)


def compile_once(output: str, instance: str) -> int:
    """Compile, or check that the output is whole and suits the settings; the exit status.

    Raises:
        ServingError: it cannot be known what is there.
    """
    compiled, settings = finished(output), str(SETTINGS / "compile.properties")
    if compiled is None:
        return cli.main(["compile", settings, "--output", output, "--instance", instance])
    given = read_settings(None, None, environment(), Problems(), file=settings).options
    source, wanted = (
        [options.get(name) for name in SOURCE]
        for options in (compiled.effective_options, given.model_dump())
    )
    advice = "Nothing was changed, as pods may read it: name another folder in `compiled`"
    if source != wanted:
        what = " and ".join(SOURCE)
        sys.exit(
            f"{output} was compiled from another model ({what} {source}, now {wanted}). {advice}"
        )
    if cli.main(["check", str(SETTINGS / "serve.properties"), "--instance", instance]):
        sys.exit(f"{output} cannot be served, see the errors above. {advice}, or mend the cause")
    print(f"{output}: nothing to compile")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(compile_once(*sys.argv[1:]))
    except ServingError as error:
        sys.exit(str(error))

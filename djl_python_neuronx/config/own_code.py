"""Code that a model folder brings along: formatters in `model.py`, and `requirements.txt`. It is read here, never run.

Source: djl-serving 0.29 to 0.36, python_sync_engine.py, service_loader.py, PyEnv.java installDependency.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from djl_python_neuronx import links
from djl_python_neuronx.config.findings import Finding
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.values import join_words, shortened
from djl_python_neuronx.errors import ArtifactError

FILE_NAME = "model.py"
KINDS = READS, WRITES = "input_formatter", "output_formatter"
"""The decorators of formatters, also the names of the functions in DJL Serving's first call."""
MAX_FILE_BYTES = 2**20
MAX_LINES = 1000
"""Lines of `requirements.txt` that are judged: each takes a fraction of a millisecond."""


def formatters(folder: Path) -> list[str]:
    """The decorators that `model.py` names.

    Raises:
        OSError: it cannot be read.
        ArtifactError: it is a link out of the folder, or no file.
    """
    text = _text(folder / FILE_NAME)
    return [kind for kind in KINDS if kind in text]


def missing(folder: Path) -> list[str]:
    """What `requirements.txt` names and this environment lacks. Lines that are pip's options or files are left out.

    Raises:
        OSError: it cannot be read.
        ArtifactError: it is a link out of the folder, or no file.
    """
    lines = _text(folder / "requirements.txt").splitlines()[:MAX_LINES]
    return [lacking for line in lines if (lacking := _lacking(line.partition(" #")[0]))]


def _lacking(line: str) -> str:
    try:
        needed = Requirement(line)
        if needed.marker is not None and not needed.marker.evaluate():
            return ""
        version = metadata.version(needed.name)
        met = needed.specifier.contains(version, prereleases=True)
    except ValueError:  # of the line or its marker
        return ""
    except metadata.PackageNotFoundError:
        return f"{shortened(str(needed))}"
    return "" if met else f"{shortened(str(needed))} (here {version})"


def findings(options: ServingOptions) -> Iterator[Finding]:
    """What the folder of the settings would have run or installed. Warnings where a start runs it, else notes."""
    folder, trusts = options.model_dir, ("trust_remote_code",)
    if folder is None:
        return
    try:
        found, lacking = formatters(folder), missing(folder)
    except (OSError, ArtifactError) as error:
        yield Finding((), f"the folder's code is not judged: {error}", "warning")
        return
    if found:
        problem = (
            f"{FILE_NAME} has {join_words(found)}: DJL Serving runs the file at each start, the embedded server "
            "with trust_remote_code=true; remove it unless you trust who wrote it"
        )
        yield Finding(trusts, problem, "warning")
    if WRITES in found and options.output_formatter is not None:
        problem = f"takes the place of the {WRITES} of {FILE_NAME}, which is not called"
        yield Finding((WRITES,), problem, "note")
    if lacking:
        problem = (
            f"requirements.txt names what is not installed here: {join_words(lacking)}. DJL Serving installs it at a "
            f"start, the embedded server installs nothing: run pip install -r {folder / 'requirements.txt'}"
        )
        yield Finding(trusts, problem, "warning" if options.trust_remote_code else "note")


def _text(path: Path) -> str:
    if not path.exists():
        return ""
    with links.opened(path, path.parent) as file:
        return file.read(MAX_FILE_BYTES).decode(errors="replace")

"""Code that a model folder brings along: formatters in `model.py`, and `requirements.txt`. It is read here, never run.

Source: djl-serving 0.29 to 0.36, python_sync_engine.py, service_loader.py, PyEnv.java installDependency.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from djl_python_neuronx import links
from djl_python_neuronx.config.findings import Finding
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.values import join_words
from djl_python_neuronx.errors import ArtifactError

FILE_NAME = "model.py"
KINDS = READS, WRITES = "input_formatter", "output_formatter"
"""The decorators of formatters, also the names of the functions in DJL Serving's first call."""
MAX_FILE_BYTES = 2**20


def formatters(folder: Path) -> list[str]:
    """The decorators that `model.py` names.

    Raises:
        OSError: it cannot be read.
        ArtifactError: it is a link out of the folder, or no file.
    """
    if not (folder / FILE_NAME).exists():
        return []
    with links.opened(folder / FILE_NAME, folder) as file:
        text = file.read(MAX_FILE_BYTES).decode(errors="replace")
    return [kind for kind in KINDS if kind in text]


def findings(options: ServingOptions) -> Iterator[Finding]:
    """Findings about code that the model folder brings: warnings where a start runs or installs it, else notes."""
    folder = options.model_dir
    if folder is None:
        return
    try:
        found = formatters(folder)
    except (OSError, ArtifactError) as error:
        yield Finding((), f"the folder's code is not judged: {error}", "warning")
        return
    if found:
        problem = (
            f"{FILE_NAME} has {join_words(found)}: DJL Serving runs the file at each start, the embedded server "
            "with trust_remote_code=true; remove it unless you trust who wrote it"
        )
        yield Finding(("trust_remote_code",), problem, "warning")
    if WRITES in found and options.output_formatter is not None:
        problem = f"takes the place of the {WRITES} of {FILE_NAME}, which is not called"
        yield Finding((WRITES,), problem, "note")
    if (folder / "requirements.txt").exists():
        problem = "DJL Serving installs requirements.txt at a start; the embedded server installs nothing of it"
        yield Finding((), problem, "warning" if options.trust_remote_code else "note")

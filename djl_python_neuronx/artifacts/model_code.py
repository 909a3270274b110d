"""Source of a model that lies outside its library, in a folder as in `contrib/models` of NxD Inference. Nothing is run.

What is hashed is in memory, and is what a backend imports: a file that is exchanged meanwhile changes neither.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from djl_python_neuronx import links
from djl_python_neuronx.artifacts.folder import Selection, file_names, reading
from djl_python_neuronx.config.values import join_words
from djl_python_neuronx.errors import ArtifactError, ArtifactNotFoundError

SOURCE = "src"
"""The folder of the code in the model's folder."""
MAX_BYTES = 4 * 2**20
"""Most bytes of all files: the largest folder of NxD Inference 0.9 has 0.3 MB."""
_MODULE = re.compile(r"modeling_\w+\.py")
_NAME = re.compile(r"[\w./-]+")
"""Of files that `sha256sum` writes as they are, and `xargs` passes on."""
PYTHON = Selection(
    "code",
    lambda names: [
        name for name in names if name.startswith(f"{SOURCE}/") and name.endswith(".py")
    ],
)
"""The files that `read` reads."""


@dataclass(frozen=True)
class ModelCode:
    """All Python files below `src` of a folder."""

    folder: Path
    files: Mapping[str, bytes]
    """Path below `src`, with `/`, to the content; in ascending order."""

    @property
    def digest(self) -> str:
        """The SHA-256 of what `sha256sum` writes for the files, in ascending order of their bytes' names.

        In `src`: ``find * -name '*.py' | LC_ALL=C sort | xargs sha256sum | sha256sum``.
        """
        lines = (
            f"{hashlib.sha256(content).hexdigest()}  {name}\n"
            for name, content in self.files.items()
        )
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @property
    def modules(self) -> list[str]:
        """The names of the modules `src/modeling_*.py`."""
        return [name.removesuffix(".py") for name in self.files if _MODULE.fullmatch(name)]

    def defines(self, name: str) -> bool:
        """True if one of the modules has the text of a class of this name."""
        text = re.compile(rb"\bclass\s+%s\b" % re.escape(name.encode()))
        return any(text.search(self.files[f"{module}.py"]) for module in self.modules)


def read(folder: Path) -> ModelCode:
    """Read the code in a folder.

    Raises:
        ArtifactNotFoundError: there is no `src/modeling_*.py`.
        ArtifactAccessError: a file cannot be read, or is a link out of the folder.
        ArtifactError: there is more than any model has, or a name that cannot be hashed.
    """
    source, files = folder / SOURCE, {}
    with reading(folder):
        names = file_names(source) if source.is_dir() else set()
        for name in sorted(name for name in names if name.endswith(".py")):
            if not _NAME.fullmatch(name):
                msg = f"{source} has a file {name!a}; expected names of letters, digits, _, - and . alone. Rename it"
                raise ArtifactError(msg)
            with links.opened(source / name, folder) as file:
                files[name] = file.read(MAX_BYTES)
            if sum(map(len, files.values())) >= MAX_BYTES:
                msg = f"{source} has more than {MAX_BYTES >> 20} MiB of Python; expected the code of one model"
                raise ArtifactError(msg)
    code = ModelCode(folder, files)
    if not code.modules:
        held = join_words([*files]) if files else "no Python"
        msg = (
            f"{source} has {held}; expected modeling_*.py, as in the folders of contrib/models in NxD Inference's "
            "repository. Name such a folder"
        )
        raise ArtifactNotFoundError(msg)
    return code


def read_as(folder: Path, digest: str) -> ModelCode:
    """Read the code in a folder that was hashed before.

    Raises:
        ArtifactError: it has another digest now, or cannot be read.
    """
    code = read(folder)
    if code.digest != digest:
        msg = (
            f"the code in {folder} has changed: its SHA-256 was {digest}, and is {code.digest} now. Check the model "
            "again, and compile it for the new code"
        )
        raise ArtifactError(msg)
    return code


def copy(folder: Path, digest: str, target: Path) -> None:
    """Write the code in a folder, which has this digest, to the new folder `target`.

    Raises:
        ArtifactError: see `read_as`.
        OSError: a file cannot be written.
    """
    for name, content in read_as(folder, digest).files.items():
        path = target / SOURCE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

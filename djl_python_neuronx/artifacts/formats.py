"""What is in a model folder. Only looks: no weight is read, nothing is written.

A format is one class in `FORMATS`. Each says for itself, from names and small JSON files, whether a folder is one of
its own, and of which other formats it is a special case; so a new format never edits another. A folder that two of
them claim is an error, not a race.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from djl_python_neuronx.artifacts.layouts.artifact import Artifact, read_config, read_eos_ids
from djl_python_neuronx.artifacts.layouts.compiled_nxd import Nxdi, OptimumNxd
from djl_python_neuronx.artifacts.layouts.compiled_tnx import (
    CompileOnly,
    LmiAot,
    NeffCache,
    OptimumTnx,
    Presharded,
)
from djl_python_neuronx.artifacts.layouts.folder import Folder, read_json, some
from djl_python_neuronx.artifacts.layouts.own_output import OwnOutput
from djl_python_neuronx.artifacts.layouts.weights import is_split, read_whole
from djl_python_neuronx.errors import (
    ArtifactAccessError,
    ArtifactError,
    ArtifactNotFoundError,
    UnknownFormatError,
)

__all__ = ["FORMATS", "Artifact", "Format", "HuggingFace", "Split", "detect", "read_json"]


class Format(Protocol):
    """One way to lay out a model folder."""

    name: str
    looks_for: str
    """What makes a folder one of these, for the message when nothing fits."""
    over: frozenset[str]
    """Names of formats that it is a special case of: where both fit, this one is meant."""

    def matches(self, folder: Folder) -> bool:
        """True if a folder is meant to be of this format, complete or not.

        Raises:
            ArtifactError: a JSON file that tells cannot be read.
        """

    def read(self, folder: Folder) -> Artifact:
        """The facts of a folder that matches.

        Raises:
            ArtifactError: a file is missing, unreadable, malformed, cut off or hostile.
        """


class HuggingFace:
    """config.json beside whole weights, as `save_pretrained` writes them and the hub stores them."""

    name = "huggingface"
    looks_for = "config.json (a Hugging Face model)"
    over: frozenset[str] = frozenset()

    backend: str | None = None

    def matches(self, folder: Folder) -> bool:
        """True if there is a config.json."""
        return "config.json" in folder.names

    def read(self, folder: Folder) -> Artifact:
        """Configuration, and the weight files checked as far as their headers and indexes go."""
        config = read_config(folder)
        return Artifact(
            path=folder.path,
            format=self.name,
            backend=self.backend,
            config=config,
            eos_ids=read_eos_ids(folder, config),
            weights=(read_whole(folder, config),),
        )


class Split(HuggingFace):
    """`save_pretrained_split` of transformers-neuronx: one file per tensor in a folder `pytorch_model.bin`."""

    name = "split"
    looks_for = "pytorch_model.bin/key_to_filename.json (split by transformers-neuronx)"
    over = frozenset({"huggingface"})

    backend = "tnx"

    def matches(self, folder: Folder) -> bool:
        """True if the libraries would take the split weights; safetensors beside them come first."""
        return is_split(folder)


_LAYOUTS: tuple[Format, ...] = (
    HuggingFace(),
    Split(),
    Presharded(),
    CompileOnly(),
    LmiAot(),
    OptimumTnx(),
    OptimumNxd(),
    Nxdi(),
    NeffCache(),
)
FORMATS: tuple[Format, ...] = (*_LAYOUTS, OwnOutput({one.name: one.read for one in _LAYOUTS}))


def detect(folder: Path, *, origin: str = "option.model_id") -> Artifact:
    """The artifact in a local folder. `origin` tells in messages where the path came from.

    Raises:
        ArtifactNotFoundError: no such folder, or files of the model are missing.
        ArtifactAccessError: something in it cannot be read, or is a link that leaves it (see `folder`).
        UnknownFormatError: nothing that this package can serve.
        ArtifactError: two formats fit, or a file is malformed, cut off or holds code.
    """
    content = _open(folder, origin)
    fitting = [candidate for candidate in FORMATS if candidate.matches(content)]
    covered = frozenset[str]().union(*(one.over for one in fitting))
    meant = [one for one in fitting if one.name not in covered]
    if not meant:
        msg = (
            f"the folder {folder} (from {origin}) is in no known format: looked for "
            f"{' or '.join(known.looks_for for known in FORMATS)}; found {some(sorted(content.names))}. "
            "Point to the folder that holds the model itself."
        )
        raise UnknownFormatError(msg)
    if len(meant) > 1:
        listed = " and ".join(f"{one.name} ({one.looks_for})" for one in meant)
        msg = f"the folder {folder} (from {origin}) fits several formats: {listed}. Keep one model per folder."
        raise ArtifactError(msg)
    return meant[0].read(content)


def _open(folder: Path, origin: str) -> Folder:
    try:
        return Folder.open(folder)
    except ArtifactError:
        raise  # some are OSErrors too
    except (FileNotFoundError, NotADirectoryError) as error:
        what = "is a file" if isinstance(error, NotADirectoryError) else "does not exist"
        msg = f"the model folder {folder} (from {origin}) {what}; expected a folder. Correct {origin}, or mount it."
        raise ArtifactNotFoundError(msg) from error
    except OSError as error:
        msg = f"the model folder {folder} (from {origin}) cannot be read: {error.strerror}. Give this user access."
        raise ArtifactAccessError(msg) from error

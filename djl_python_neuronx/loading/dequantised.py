"""A quantised checkpoint in bfloat16, made once in a process that ends with this one, and found again by key."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from djl_python_neuronx.artifacts.artifact import WHOLE, Artifact
from djl_python_neuronx.artifacts.atomic import hold_lock
from djl_python_neuronx.artifacts.dequantise import dequantised
from djl_python_neuronx.artifacts.fetch import download_root
from djl_python_neuronx.artifacts.folder import Folder
from djl_python_neuronx.artifacts.manifest import contents_digest
from djl_python_neuronx.artifacts.output import KEPT_SUFFIXES
from djl_python_neuronx.artifacts.tensor_files import Tensor, read_header
from djl_python_neuronx.artifacts.weights import whole_file_names
from djl_python_neuronx.errors import ArtifactError
from djl_python_neuronx.loading.guarded_job import do_job, run_guarded

logger = logging.getLogger(__name__)

_VERSION = "1"
"""Of the formulas: a change makes all again."""


def place_of(model: Artifact, environ: Mapping[str, str]) -> Path:
    """Return the folder of the dequantised model, which exists when it is whole.

    Its name is a digest of all bytes of the weights and of the files that are copied.

    Raises:
        ArtifactError: a file cannot be read.
    """
    folder = Folder.open(model.path)
    copied = {one for one in folder.names - folder.folders if one.endswith(KEPT_SUFFIXES)}
    weights = model.weights_for("dequantising", WHOLE).names
    digest = contents_digest(model.path, copied.union(weights))
    return download_root(environ) / "dequantized" / f"{_VERSION}-{digest[:32]}"


def check_headers(artifact: Artifact) -> None:
    """Refuse by the headers of its weights what `dequantise` refuses; pickled weights have none.

    Raises:
        ArtifactError: the checkpoint cannot be dequantised.
    """
    weights = artifact.weights_for("dequantising", WHOLE)
    if weights.kind == "safetensors":
        folder = Folder.open(weights.folder)
        paths = [folder.path / name for name in whole_file_names(folder)]
        tensors = {
            name: Tensor(entry.dtype, entry.shape, entry.end - entry.begin, _unread, path)
            for path in paths
            for name, entry in read_header(path).items()
        }
        dequantised(artifact, tensors)


def _unread() -> NoReturn:
    raise NotImplementedError


def dequantise(model: Path, place: Path, environ: Mapping[str, str]) -> None:
    """Make the dequantised model, unless it is there: whole or not at all. One process makes it, others wait.

    Raises:
        ArtifactError: the checkpoint cannot be dequantised, or there is no room for it.
    """
    with hold_lock(place.parent / ".locks" / place.name, what=f"dequantise {model}"):
        if not place.exists():
            logger.info("dequantising model=%s place=%s", model, place)
            job = f"{model}\0{place}".encode()
            run_guarded(__name__, job, environ, lambda status: _failure(f"status {status}"))


def _failure(reason: object) -> ArtifactError:
    return ArtifactError(f"the checkpoint could not be dequantised: {reason}. See the output above")


def main() -> None:
    """Dequantise a model in its process."""
    do_job(_convert, _failure)


def _convert(job: bytes) -> bytes:
    # Not at the top: it imports torch, which the other process does not.
    from djl_python_neuronx.artifacts.convert import convert

    source, place = map(Path, job.decode().split("\0"))
    convert(source, place, "safetensors", dequantize=True)
    return b""

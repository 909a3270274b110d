"""A quantised checkpoint in bfloat16, made once in a process that ends with this one, and found again by key."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

from djl_python_neuronx.artifacts.atomic import hold_lock
from djl_python_neuronx.artifacts.fetch import download_root
from djl_python_neuronx.artifacts.folder import Folder
from djl_python_neuronx.artifacts.manifest import artifact_digest, sha256_of
from djl_python_neuronx.artifacts.output import KEPT_SUFFIXES
from djl_python_neuronx.errors import ArtifactError
from djl_python_neuronx.loading.guarded_job import do_job, run_guarded

logger = logging.getLogger(__name__)

_VERSION = "1"
"""Of the formulas: a change makes all again."""


def place_of(model: Path, environ: Mapping[str, str]) -> Path:
    """Return the folder of the dequantised model, which exists when it is whole.

    Its name is a digest of the weights' samples and of the files that are copied.
    """
    folder, digest = Folder.open(model), hashlib.sha256(artifact_digest(model).encode())
    for name in sorted(folder.names - folder.folders):
        if name.endswith(KEPT_SUFFIXES):
            digest.update(f"{name}\0{sha256_of(folder.path / name, folder.root)}".encode())
    return download_root(environ) / "dequantized" / f"{_VERSION}-{digest.hexdigest()[:32]}"


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

"""Digests: of a file, of all files of a folder, and of the model that a folder holds."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from djl_python_neuronx.artifacts.layouts.folder import unreadable
from djl_python_neuronx.artifacts.layouts.safetensors_header import read_header

_BLOCK_BYTES = 2**20
_SAMPLE_BYTES = 4096
_SAMPLES_PER_FILE = 64
_MAX_THREADS = 8

# The first kind that is there is the model's, as for the libraries; a download that took both changes nothing.
_WEIGHT_KINDS = (("*.safetensors",), ("pytorch_model*.bin", "pytorch_model.bin/p*"))
_SMALL_FILES = ("config.json", "*.py")


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content; other threads run meanwhile."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        # Not hashlib.file_digest, which Python 3.10 lacks.
        buffer = memoryview(bytearray(_BLOCK_BYTES))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def sha256_of_each(paths: Iterable[Path]) -> list[str]:
    """As `sha256_of` for each path, on several cores."""
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(sha256_of, paths))


def artifact_digest(folder: Path) -> str:
    """What names the model in a folder: `sampled:<hex>`.

    It reads a few MiB of any model: config.json and the model's own code whole; of each weight file its name
    and size, a safetensors file's tensors (name, dtype, shape, place) and 4 KiB from the middle of each, of any other
    file 64 such samples. Names and times of other files do not count, nor does where the folder lies.

    Equal digests prove: the same configuration, and tensors of the same names, types and shapes; so a graph
    without weights fits. They make it all but certain that no tensor was trained further, which changes values
    everywhere in it. They do not prove that single rows (an added token's embedding) are the same.

    Raises:
        ArtifactAccessError: a file cannot be read.
        ArtifactError: a safetensors file is damaged.
    """
    digest = hashlib.sha256()
    for path in _sorted(folder, _SMALL_FILES):
        _feed(digest, _name(folder, path), sha256_of_readable(path))
    for path in _weights(folder):
        _feed(digest, _name(folder, path), _sample(path))
    return f"sampled:{digest.hexdigest()}"


def sha256_of_readable(path: Path) -> str:
    """As `sha256_of`, for files of a model folder.

    Raises:
        ArtifactAccessError: it cannot be read.
    """
    try:
        return sha256_of(path)
    except OSError as error:
        raise unreadable(path, error) from error


def _name(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def _feed(digest: hashlib._Hash, *parts: str) -> None:
    # A NUL ends each part: no file name holds one, so no two lists of parts give the same bytes.
    for part in parts:
        digest.update(part.encode("utf-8", "surrogateescape") + b"\0")


def _weights(folder: Path) -> list[Path]:
    return next((found for kind in _WEIGHT_KINDS if (found := _sorted(folder, kind))), [])


def _sorted(folder: Path, patterns: Iterable[str]) -> list[Path]:
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _sample(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        size = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            digest.update(f"{size}\0".encode())
            for middle in _middles(path, size, digest):
                digest.update(_around(file, middle, size))
    except OSError as error:
        raise unreadable(path, error) from error
    return digest.hexdigest()


def _middles(path: Path, size: int, digest: hashlib._Hash) -> Iterator[int]:
    """Where to take samples, in bytes from the start of the file."""
    if path.suffix != ".safetensors":
        yield from ((2 * i + 1) * size // (2 * _SAMPLES_PER_FILE) for i in range(_SAMPLES_PER_FILE))
        return
    header = read_header(path)
    start = size - max((entry.end for entry in header.values()), default=0)
    for name, entry in sorted(header.items()):
        _feed(digest, name, entry.dtype, str(entry.shape), str(entry.begin), str(entry.end))
        yield start + (entry.begin + entry.end) // 2


def _around(file: BinaryIO, middle: int, size: int) -> bytes:
    file.seek(max(0, min(middle - _SAMPLE_BYTES // 2, size - _SAMPLE_BYTES)))
    return file.read(_SAMPLE_BYTES)

"""The one rule for links in a model folder, and the way to open its files.

A file of a model is in the model's folder, or in the blobs of the Hugging Face cache that this folder is a part of:
each file of a snapshot is a link there. Any other place is refused: folders come from archives and buckets that others
fill, and their files are copied and uploaded with the model, and quoted in messages. The folder itself may be a link.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from djl_python_neuronx.errors import ArtifactAccessError, ArtifactNotFoundError

AGAIN = "Copy or download the model again."


def check(path: Path, root: Path, *, is_file: bool = False) -> None:
    """Refuse what is neither a file nor (unless it `is_file`) a folder of the model in `root`. Opens nothing.

    Raises:
        ArtifactNotFoundError: it is a link that leads nowhere.
        ArtifactAccessError: it leads out of the model, cannot be followed, or is a special file.
    """
    try:
        target = path.resolve(strict=True)
        mode = target.stat().st_mode
    except FileNotFoundError as error:
        msg = f"{path} is a link to a file that is gone, {path.resolve()}. {AGAIN}"
        raise ArtifactNotFoundError(msg) from error
    except (OSError, RuntimeError) as error:
        msg = f"{path} is a link that cannot be followed: {error}. {AGAIN}"
        raise ArtifactAccessError(msg) from error
    _judge(path, target, mode, root, is_file=is_file)


@contextmanager
def opened(path: Path, root: Path) -> Iterator[BinaryIO]:
    """A file of the model in the folder `root`, open for reading.

    The open file is judged too, because another one can take its name at any time.

    Raises:
        OSError: it cannot be opened.
        ArtifactError: see `check`.
    """
    check(path, root, is_file=True)
    # A pipe would block without the flag.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123
        try:
            target = Path(os.readlink(f"/proc/self/fd/{file.fileno()}"))  # noqa: PTH115
        except FileNotFoundError:
            target = path.resolve()  # no /proc, outside Linux
        _judge(path, target, os.fstat(file.fileno()).st_mode, root, is_file=True)
        yield file


def _judge(path: Path, target: Path, mode: int, root: Path, *, is_file: bool) -> None:
    root = root.resolve()
    # Source: huggingface_hub, the guide "Understand caching": models--<organisation>--<name>/snapshots/<commit> links
    # to its blobs/<digest>; 2.4, _shared_blobs.py: that one to the cache's own blobs/<two digits>/<digest>.
    cache = next((one for one in root.parents if one.name.startswith("models--")), None)
    is_blob = cache is not None and (
        target.parent == cache / "blobs" or target.parent.parent == cache.parent / "blobs"
    )
    if not is_blob and not target.is_relative_to(root):
        msg = (
            f"{path} is a link out of the model's folder, to {target}; expected a file of the model, or of the blobs "
            "beside its snapshot in a Hugging Face cache. If you trust it, put a copy in its place (cp -L)."
        )
        raise ArtifactAccessError(msg)
    if not stat.S_ISREG(mode) and (is_file or not stat.S_ISDIR(mode)):
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
        msg = f"{path} is {what}; expected a file. Remove it, or put a copy in its place."
        raise ArtifactAccessError(msg)

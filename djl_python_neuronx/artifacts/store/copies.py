"""Writable copies of folders that cannot be written."""

from __future__ import annotations

import hashlib
import logging
import shutil
import uuid
from pathlib import Path

from djl_python_neuronx.artifacts.remote.locks import held
from djl_python_neuronx.artifacts.store.publish import replace_folder, storing

logger = logging.getLogger(__name__)


def copy_once(source: Path, root: Path) -> Path:
    """A copy of the folder `source` below `root`, to be written to; the same one for every process, until it changes.

    For a compiler's cache on a read-only disk. The copy is named
    after the source's path and the names and sizes of its files. It appears whole; what was written into it stays.

    Raises:
        ArtifactAccessError: the source cannot be read, there is no room, or `root` cannot be written.
    """
    with storing(f"a writable copy of {source}", root):
        place = root / f"{source.name}-{_listing(source)}"
        if place.is_dir():
            return place
        (root / ".locks").mkdir(parents=True, exist_ok=True)
        with held(root / ".locks" / place.name, what=f"copy of {source}"):
            if place.is_dir():
                return place
            partial = root / ".partial" / place.name
            shutil.rmtree(partial, ignore_errors=True)  # of a killed process, as the lock is ours
            partial.parent.mkdir(exist_ok=True)
            # Content only: the modes of a read-only source are what this is to get rid of.
            shutil.copytree(source, partial, copy_function=shutil.copyfile)
            for folder in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
                folder.chmod(0o755)
            replace_folder(partial, place, root / ".trash" / uuid.uuid4().hex)
    logger.info("copied_for_writing source=%s into=%s", source, place)
    return place


def _listing(source: Path) -> str:
    digest = hashlib.sha256(str(source.resolve()).encode("utf-8", "surrogateescape"))
    for path in sorted(source.rglob("*")):
        if path.is_file():
            name = path.relative_to(source).as_posix()
            digest.update(f"\0{name}\0{path.stat().st_size}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]

"""Whether a model in the hub's cache is all there: offline, a download that was cut off looks like any other."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from djl_python_neuronx.artifacts.layouts.folder import some
from djl_python_neuronx.artifacts.remote.selection import Selection
from djl_python_neuronx.errors import ArtifactAccessError

_UNREAD = ("LICENSE", "NOTICE", "USE_POLICY")
"""How names of files start that nothing here or in the libraries opens."""
_INDEX = ".index.json"
_UNFINISHED = ".incomplete"


def check_whole(folder: Path, selection: Selection) -> None:
    """Refuse a snapshot, `<cache>/models--<owner>--<name>/snapshots/<commit>`, that lacks selected files.

    Newer versions of the hub's library keep the list of a commit's files beside it, and that decides. Without it
    these tell: links whose file is gone, shards that an index names, and files in the making.

    Raises:
        ArtifactAccessError: the files that are missing, and what to do.
    """
    listed = _listed(folder)
    if listed is None:
        missing = _seen_missing(folder, selection) or _in_the_making(folder)
    else:
        wanted = sorted(selection.choose(listed))
        missing = [name for name in wanted if not (folder / name).is_file() and _is_read(name)]
    if missing:
        msg = (
            f"the model in {folder} is not whole, its download was cut off or left files out: {some(missing)} missing. "
            "Start once without HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE to load the rest, or name that folder in "
            "option.model_id to serve what is there."
        )
        raise ArtifactAccessError(msg)


def _listed(folder: Path) -> set[str] | None:
    """All files of the commit; None: nobody noted them.

    Source: huggingface_hub 2.4, _tree_cache.py: `trees/<commit>.json`, format_version 1.
    """
    content = _object(folder.parents[1] / "trees" / f"{folder.name}.json")
    files = content.get("files")
    return set(files) if content.get("format_version") == 1 and isinstance(files, dict) else None


def _seen_missing(folder: Path, selection: Selection) -> list[str]:
    """Links to nothing, and shards that are not there, of the selected files."""
    found = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }
    chosen = sorted(selection.choose(found.keys()))
    missing = {name for name in chosen if not found[name].exists() and _is_read(name)}
    for name in chosen:
        if name.endswith(_INDEX):
            shards = _object(found[name]).get("weight_map")
            beside = PurePosixPath(name).parent
            named = set(shards.values()) if isinstance(shards, dict) else set()
            missing |= {str(beside / shard) for shard in named if str(beside / shard) not in found}
    return sorted(missing)


def _in_the_making(folder: Path) -> list[str]:
    """Paths of blobs that are not whole. Nothing tells which file, or commit, they belong to.

    Source: huggingface_hub 0.25 to 2.4, file_download.py: `blobs/<etag>.incomplete`, `<etag>.<random>.incomplete`.
    """
    blobs = folder.parents[1] / "blobs"
    return sorted(
        str(path)
        for path in blobs.glob(f"*{_UNFINISHED}")
        if not (blobs / path.name.partition(".")[0]).exists()
    )


def _is_read(name: str) -> bool:
    return not PurePosixPath(name).name.startswith(_UNREAD)


def _object(path: Path) -> dict[str, Any]:
    """A JSON object; {} for a file that is none: whoever needs its content says what is wrong with it."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}

"""Whether a model in the hub's cache is all there: offline, a download that was cut off looks like any other."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from djl_python_neuronx.artifacts.layouts.folder import some
from djl_python_neuronx.artifacts.layouts.own_output import WEIGHT_SUFFIXES
from djl_python_neuronx.artifacts.remote.selection import Selection
from djl_python_neuronx.artifacts.vocabulary import has_vocabulary
from djl_python_neuronx.errors import ArtifactAccessError

logger = logging.getLogger(__name__)

_UNREAD = ("LICENSE", "NOTICE", "USE_POLICY")
"""How names of files start that nothing here or in the libraries opens."""
_INDEX = ".index.json"
_CONFIG = "config.json"
_SHARD = re.compile(r".*-\d+-of-\d+\.(safetensors|bin)")
"""A part of the weights, which only an index makes whole."""
_UNFINISHED = ".incomplete"


def check_whole(folder: Path, selection: Selection) -> None:
    """Refuse a snapshot, `<cache>/models--<owner>--<name>/snapshots/<commit>`, that lacks selected files.

    Newer versions of the hub's library keep the list of a commit's files beside it, and that decides. Without it
    these tell: links whose file is gone, shards that an index names, and what every model has, if a file of it or of
    another commit is in the making.

    Raises:
        ArtifactAccessError: the files that are missing, and what to do.
    """
    listed = _listed(folder)
    if listed is None:
        found = _found(folder)
        chosen = sorted(selection.choose(found.keys()))
        missing = _seen_missing(found, chosen) or _in_the_making(folder, chosen)
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


def _found(folder: Path) -> dict[str, Path]:
    """The files that are there, by name, and links to nothing."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def _seen_missing(found: Mapping[str, Path], chosen: Collection[str]) -> list[str]:
    """Links to nothing, and shards that are not there, of the chosen files."""
    missing = {name for name in chosen if not found[name].exists() and _is_read(name)}
    for name in chosen:
        if name.endswith(_INDEX):
            shards = _object(found[name]).get("weight_map")
            named = shards.values() if isinstance(shards, dict) else ()
            # What is no name is told by who reads the index.
            beside = {
                str(PurePosixPath(name).parent / one) for one in named if isinstance(one, str)
            }
            missing |= beside - found.keys()
    return sorted(missing)


def _in_the_making(folder: Path, chosen: Collection[str]) -> list[str]:
    """What every model has and this one lacks, if a download is not at its end; with the paths of its unfinished blobs.

    Nothing tells which file, or commit, those belong to: alone they are no reason to refuse a model.
    Source: huggingface_hub 0.25 to 2.4, file_download.py: `blobs/<etag>.incomplete`, `<etag>.<random>.incomplete`.
    """
    blobs = folder.parents[1] / "blobs"
    making = sorted(
        str(path)
        for path in blobs.glob(f"*{_UNFINISHED}")
        if not (blobs / path.name.partition(".")[0]).exists()
    )
    if not making:
        return []
    if lacking := _lacking(chosen):
        return [f"{' and '.join(lacking)} (begun: {some(making)})"]
    logger.warning("hub_download_unfinished folder=%s blobs=%r", folder, some(making))
    return []


def _lacking(names: Collection[str]) -> list[str]:
    tops = {name.split("/")[0] for name in names}
    weights = [name for name in tops if name.endswith(WEIGHT_SUFFIXES) and not _SHARD.match(name)]
    there = {_CONFIG: _CONFIG in tops, "weights": weights, "tokenizer": has_vocabulary(tops)}
    return [what for what, is_there in there.items() if not is_there]


def _is_read(name: str) -> bool:
    return not PurePosixPath(name).name.startswith(_UNREAD)


def _object(path: Path) -> dict[str, Any]:
    """A JSON object; {} for a file that is none: whoever needs its content says what is wrong with it."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}

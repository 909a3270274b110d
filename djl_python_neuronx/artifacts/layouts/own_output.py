"""The folder that this package's own compilation writes: a known layout and a manifest that vouches for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from djl_python_neuronx.artifacts.layouts.artifact import Artifact
from djl_python_neuronx.artifacts.layouts.folder import (
    AGAIN,
    Folder,
    is_plain_name,
    some,
    unreadable,
)
from djl_python_neuronx.artifacts.remote.selection import SERVING
from djl_python_neuronx.errors import ArtifactError, ArtifactNotFoundError

MANIFEST = "manifest.json"
MANIFEST_FORMAT = "djl_python_neuronx"
MANIFEST_VERSION = 1
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".index.json")
"""Of weights beside config.json; a folder `pytorch_model.bin` holds them too."""


def unfinished(files: Iterable[str]) -> dict[str, Any]:
    """What stands in the manifest's place while an output is written.

    `files`: all that may be found there, of this output and of the one that it replaces: whoever writes the next one
    knows from it what to clear away.
    """
    marker = {"format": MANIFEST_FORMAT, "version": MANIFEST_VERSION, "unfinished": True}
    return {**marker, "files": {name: {} for name in sorted(files)}}


def is_unfinished(manifest: object) -> bool:
    """True for what `unfinished` gives."""
    return (
        isinstance(manifest, dict)
        and manifest.get("format") == MANIFEST_FORMAT
        and manifest.get("unfinished") is True
    )


def listed_files(raw: bytes) -> set[str]:
    """The paths that a manifest of ours lists, unfinished or not; none if it is another's or damaged."""
    try:
        manifest = json.loads(raw)
    except (ValueError, RecursionError):
        return set()
    if not isinstance(manifest, dict) or manifest.get("format") != MANIFEST_FORMAT:
        return set()
    files = manifest.get("files")
    return set(files) if isinstance(files, dict) else set()


class OwnOutput:
    """`manifest.json`, written last, over a folder in another layout.

    Read of it: `format` (`MANIFEST_FORMAT`), `version`, `layout` (name of the other format), `compiled_for` (as in
    `Artifact`), `backend` (may be missing: the layout's) and `files`, relative path → {"bytes": size}. Graphs lie
    where the layout has them, else in `compiled/`. Digests are checked where the folder is fetched or
    copied, not at each start.
    """

    name = "djl_neuronx"
    looks_for = "manifest.json (compiled by djl-neuronx)"

    def __init__(self, layouts: Mapping[str, Callable[[Folder], Artifact]]) -> None:
        self._layouts = dict(layouts)
        self.over = frozenset(layouts)

    def matches(self, folder: Folder) -> bool:
        """True if there is a manifest of ours; others use that file name too."""
        return folder.json(MANIFEST).get("format") == MANIFEST_FORMAT

    def read(self, folder: Folder) -> Artifact:
        """The other layout's facts, with what the manifest adds."""
        path, manifest = folder.path / MANIFEST, folder.json(MANIFEST)
        layout, compiled_for = manifest.get("layout"), manifest.get("compiled_for")
        if is_unfinished(manifest):
            msg = (
                f"{folder.path} is an unfinished output: what wrote it there was interrupted, or is still at work. "
                "Wait for it, or compile to that place again."
            )
            raise ArtifactError(msg)
        if manifest.get("version") != MANIFEST_VERSION:
            msg = (
                f"{path} has version {manifest.get('version')!r}; expected {MANIFEST_VERSION}. "
                "Compile the model with this version of djl-neuronx, or serve it with the one that compiled it."
            )
            raise ArtifactError(msg)
        if layout not in self._layouts or not isinstance(compiled_for, dict):
            msg = (
                f"{path} gives layout {layout!r} and {type(compiled_for).__name__} as compiled_for; expected a layout "
                f"of {', '.join(sorted(self._layouts))} and an object. Copy or compile it again."
            )
            raise ArtifactError(msg)
        _check_files(folder, manifest.get("files"))
        artifact = self._layouts[layout](folder)
        recorded = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in compiled_for.items()
        }
        graphs = folder.path / "compiled" if "compiled" in folder.folders else None
        backend = manifest.get("backend")
        return replace(
            artifact,
            format=self.name,
            backend=backend if isinstance(backend, str) else artifact.backend,
            compiled=artifact.compiled or graphs,
            compiled_for={**artifact.compiled_for, **recorded},
        )


def _check_files(folder: Folder, files: Any) -> None:  # noqa: ANN401
    path = folder.path / MANIFEST
    if not isinstance(files, dict) or not files:
        msg = f"{path} lists no files; expected relative paths with their sizes. Copy or compile it again."
        raise ArtifactError(msg)
    missing = []
    for name, facts in files.items():
        size = facts.get("bytes") if isinstance(facts, dict) else None
        if not all(map(is_plain_name, name.split("/"))) or type(size) is not int:
            msg = f"{path} lists {name!r} as {facts!r}; expected a path inside the folder with its size in bytes."
            raise ArtifactError(msg)
        actual = _size(folder, name)
        if actual is None:
            missing.append(name)
        elif actual != size:
            msg = f"{folder.path / name} has {actual} bytes, {MANIFEST} has {size}: it was cut off or changed. {AGAIN}"
            raise ArtifactError(msg)
    if missing:
        msg = f"{len(missing)} of {len(files)} files that {path} lists are missing: {some(sorted(missing))}. {AGAIN}"
        raise ArtifactNotFoundError(msg)
    _check_unlisted(folder, files)


def _check_unlisted(folder: Folder, files: Mapping[str, Any]) -> None:
    """Refuse weights that another output or model left: they could be loaded in place of the manifest's.

    Where the manifest lists none, they were left out on purpose and added by hand.
    """
    listed = {name.split("/")[0] for name in files if _is_weight(name.split("/")[0])}
    if not listed:
        return
    # What only other libraries read does no harm; DJL's partition copies every *.json of its source beside ours.
    plain = SERVING.choose([*listed, *(folder.names - folder.folders)])
    found = {name for name in {*plain, *folder.folders} if _is_weight(name)}
    if extra := found - listed:
        msg = (
            f"{folder.path} holds weights that its {MANIFEST} does not list: {some(sorted(extra))}; expected its own "
            "only, as these may be of another model. Remove them, or compile to an empty folder."
        )
        raise ArtifactError(msg)


def _is_weight(name: str) -> bool:
    return name.endswith(WEIGHT_SUFFIXES)


def _size(folder: Folder, name: str) -> int | None:
    """Bytes of a file below the folder; None: it is missing. Its links are checked where it is read."""
    try:
        return (folder.path / name).stat().st_size
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(folder.path / name, error) from error

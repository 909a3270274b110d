"""The folder that this package's own compilation writes: a known layout and a manifest that vouches for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from djl_python_neuronx.errors import ArtifactError, ArtifactNotFoundError

MANIFEST = "manifest.json"
MANIFEST_FORMAT = "djl_python_neuronx"
MANIFEST_VERSION = 1


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


def _size(folder: Folder, name: str) -> int | None:
    """Bytes of a file below the folder; None: it is missing. Its links are checked where it is read."""
    try:
        return (folder.path / name).stat().st_size
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(folder.path / name, error) from error

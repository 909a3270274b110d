"""What is in a model folder. Only looks: no weight is read, nothing is written.

A format is one class in `FORMATS`. Each says for itself, from names and small JSON files, whether a folder is one of
its own, and of which other formats it is a special case; so a new format never edits another. A folder that two of
them claim is an error, not a race.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from djl_python_neuronx.artifacts.artifact import Artifact, read_config, read_eos_ids
from djl_python_neuronx.artifacts.compiled_formats import (
    CompileOnly,
    LmiAot,
    NeffCache,
    Nxdi,
    OptimumNxd,
    OptimumTnx,
    Presharded,
)
from djl_python_neuronx.artifacts.folder import (
    AGAIN,
    SERVING,
    WEIGHT_SUFFIXES,
    Folder,
    is_plain_name,
    read_json,
    some,
    unreadable,
)
from djl_python_neuronx.artifacts.manifest import FILE_NAME, FORMAT, VERSION, is_unfinished
from djl_python_neuronx.artifacts.weights import is_split, read_whole
from djl_python_neuronx.errors import (
    ArtifactAccessError,
    ArtifactError,
    ArtifactNotFoundError,
    UnknownFormatError,
)


class OwnOutput:
    """`manifest.json`, written last, over a folder in another layout.

    Read of it: `format` (`FORMAT`), `version`, `layout` (name of the other format), `compiled_for` (as in
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
        return folder.json(FILE_NAME).get("format") == FORMAT

    def read(self, folder: Folder) -> Artifact:
        """The other layout's facts, with what the manifest adds."""
        path, manifest = folder.path / FILE_NAME, folder.json(FILE_NAME)
        layout, compiled_for = manifest.get("layout"), manifest.get("compiled_for")
        if is_unfinished(manifest):
            msg = (
                f"{folder.path} is an unfinished output: what wrote it there was interrupted, or is still at work. "
                "Wait for it, or compile to that place again."
            )
            raise ArtifactError(msg)
        if manifest.get("version") != VERSION:
            msg = (
                f"{path} has version {manifest.get('version')!r}; expected {VERSION}. "
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
    path = folder.path / FILE_NAME
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
            msg = f"{folder.path / name} has {actual} bytes, {FILE_NAME} has {size}: it was cut off or changed. {AGAIN}"
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
            f"{folder.path} holds weights that its {FILE_NAME} does not list: {some(sorted(extra))}; expected its own "
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

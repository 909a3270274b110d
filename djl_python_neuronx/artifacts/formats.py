"""Detection of a model folder's format. Reads names, small JSON files and headers; writes nothing.

A format is one class in `FORMATS`. Each recognises its own folders, and names the formats
that it is a special case of; so a new format never edits another. A folder that two of them claim is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from djl_python_neuronx.artifacts import manifest as manifests
from djl_python_neuronx.artifacts.artifact import Artifact, Format, read_config
from djl_python_neuronx.artifacts.compiled_formats import (
    CompileOnly,
    LmiAot,
    NeffCache,
    Nxdi,
    NxdiBeside,
    OptimumNxd,
    OptimumTnx,
    Presharded,
)
from djl_python_neuronx.artifacts.folder import SERVING, TEMPLATES, WEIGHT_SUFFIXES, Folder, some
from djl_python_neuronx.artifacts.weights import SPLIT_FOLDER, is_split, read_whole
from djl_python_neuronx.errors import (
    ArtifactAccessError,
    ArtifactError,
    ArtifactNotFoundError,
    UnknownFormatError,
)

COPIED_FOLDERS = frozenset({"adapters", TEMPLATES, SPLIT_FOLDER})
"""Folders of a model that an output gets as a whole."""


class HuggingFace(Format):
    """config.json beside whole weights, as `save_pretrained` writes them and the Hub stores them."""

    name = "huggingface"
    looks_for = "config.json (a Hugging Face model)"
    over = frozenset()

    def matches(self, folder: Folder) -> bool:
        """True if there is a config.json."""
        return "config.json" in folder.names

    def read(self, folder: Folder) -> Artifact:
        """Configuration, and the weight files checked as far as their headers and indexes go."""
        config = read_config(folder)
        return self.artifact(folder, config, (read_whole(folder, config),))


class Split(HuggingFace):
    """`save_pretrained_split` of transformers-neuronx: one file per tensor in a folder `pytorch_model.bin`."""

    name = "split"
    looks_for = "pytorch_model.bin/key_to_filename.json (split by transformers-neuronx)"
    over = frozenset({"huggingface"})
    backend = "tnx"

    def matches(self, folder: Folder) -> bool:
        """True if the libraries would read the split weights; safetensors beside them come first."""
        return is_split(folder)


_LAYOUTS: dict[str, Format] = {
    layout.name: layout
    for layout in (
        HuggingFace(),
        Split(),
        Presharded(),
        CompileOnly(),
        LmiAot(),
        OptimumTnx(),
        OptimumNxd(),
        Nxdi(),
        NxdiBeside(),
        NeffCache(),
    )
}


class OwnOutput(Format):
    """The output of this package's own compilation: another layout and a `manifest.json` over it.

    Graphs are where the layout has them, else in `compiled/`. Sizes of all files, hashes of all but the weights and
    samples of these are checked, links followed. An output of DJL's partition script does not list
    `serving.properties`, which that script writes last.
    """

    name = "djl_neuronx"
    looks_for = "manifest.json (compiled by djl-neuronx)"
    over = frozenset(_LAYOUTS)

    def matches(self, folder: Folder) -> bool:
        """True if there is a manifest of this package; others use that file name too."""
        return folder.json(manifests.FILE_NAME).get("format") == manifests.FORMAT

    def read(self, folder: Folder) -> Artifact:
        """The other layout's facts, with what the manifest adds."""
        path = folder.path / manifests.FILE_NAME
        manifest = manifests.parse(folder.json(manifests.FILE_NAME), str(path))
        if manifest.layout is None and manifest.files:
            msg = (
                f"{folder.path} holds compiled graphs and no model: it is one compile of a store, or the folder "
                "compiled/ of an output. Serve that output, or serve the model and set "
                f"option.compiled_graph_path={folder.path}"
            )
            raise ArtifactError(msg)
        if manifest.layout not in _LAYOUTS or not manifest.files:
            msg = (
                f"{path} gives layout {manifest.layout!r} and {len(manifest.files)} files; expected a layout of "
                f"{', '.join(sorted(_LAYOUTS))} and the folder's files. Copy or compile it again."
            )
            raise ArtifactError(msg)
        manifests.verify(folder.path, manifest, hashes="without weights", exact=False)
        _check_unlisted(folder, manifest.files)
        artifact = _LAYOUTS[manifest.layout].read(folder)
        graphs = folder.path / "compiled" if "compiled" in folder.folders else None
        return _recorded(artifact, manifest, artifact.compiled or graphs)


def _recorded(artifact: Artifact, manifest: manifests.Manifest, graphs: Path | None) -> Artifact:
    """Return an artifact with the facts of the manifest beside it."""
    recorded = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in manifest.compiled_for.items()
    }
    backend = manifest.effective_options.get("model_loader")
    return replace(
        artifact,
        format=OwnOutput.name,
        backend=backend if isinstance(backend, str) else artifact.backend,
        compiled=graphs,
        # The manifest has the options themselves; NxD Inference's own record follows from them, and Optimum Neuron's is
        # of the graphs that the model had before.
        compiled_for=recorded
        if artifact.neuron_config or artifact.format == OptimumTnx.name
        else {**artifact.compiled_for, **recorded},
        unused="",
        manifest=manifest,
    )


def _check_unlisted(folder: Folder, files: Collection[str]) -> None:
    """Refuse weights of another output or model: they could be loaded in place of the manifest's.

    Where the manifest lists none, they were left out on purpose and added by hand.
    """
    listed = {top for top in (name.split("/")[0] for name in files) if _is_weight(top)}
    if not listed:
        return
    # What only other libraries read does no harm; DJL's partition copies every *.json of its source beside ours.
    plain = SERVING.choose([*listed, *(folder.names - folder.folders)])
    found = {name for name in {*plain, *folder.folders} if _is_weight(name)}
    if extra := found - listed:
        msg = (
            f"{folder.path} holds weights that its {manifests.FILE_NAME} does not list: {some(sorted(extra))}; "
            "expected its own only, as these may be of another model. Remove them, or compile to an empty folder."
        )
        raise ArtifactError(msg)


def _is_weight(name: str) -> bool:
    return name.endswith(WEIGHT_SUFFIXES)


FORMATS: tuple[Format, ...] = (*_LAYOUTS.values(), OwnOutput())


def detect(path: Path, *, origin: str = "option.model_id") -> Artifact:
    """The artifact in a local folder. `origin` names, for messages, where the path came from.

    Raises:
        ArtifactNotFoundError: no such folder, or files of the model are missing.
        ArtifactAccessError: something in it cannot be read, or is a link that leaves it (see `folder`).
        UnknownFormatError: no format that this package can serve.
        ArtifactError: two formats match, or a file is malformed, cut off or holds code.
    """
    folder = _open(path, origin)
    matching = [candidate for candidate in FORMATS if candidate.matches(folder)]
    covered = frozenset[str]().union(*(one.over for one in matching))
    meant = [one for one in matching if one.name not in covered]
    if not meant:
        msg = (
            f"the folder {path} (from {origin}) is in no known format: looked for "
            f"{' or '.join(known.looks_for for known in FORMATS)}; found {some(sorted(folder.names))}. "
            "Point to the folder that holds the model itself."
        )
        raise UnknownFormatError(msg)
    if len(meant) > 1:
        listed = " and ".join(f"{one.name} ({one.looks_for})" for one in meant)
        msg = f"the folder {path} (from {origin}) matches several formats: {listed}. Keep one model per folder."
        raise ArtifactError(msg)
    return meant[0].read(folder)


def read_configuration(path: Path, *, origin: str = "option.model_id") -> Artifact:
    """The artifact in a local folder without its weights and graphs, which may be absent.

    Raises:
        ArtifactNotFoundError: no such folder, or there is no config.json.
        ArtifactError: see `detect`.
    """
    folder = _open(path, origin)
    return HuggingFace().artifact(folder, read_config(folder), ())


def of_remote(place: Path, config: Mapping[str, Any], manifest: Mapping[str, Any]) -> Artifact:
    """The artifact in a remote folder of which only `config.json` and `manifest.json` (may be empty) were read.

    Raises:
        ArtifactError: the manifest is one of this package, and malformed.
    """
    artifact = Artifact(place, HuggingFace.name, None, config, ())
    if manifest.get("format") != manifests.FORMAT:
        return artifact
    read = manifests.parse(manifest, str(place / manifests.FILE_NAME))
    graphs = any(name.startswith("compiled/") or name.endswith(".pt") for name in read.files)
    return _recorded(artifact, read, place if graphs else None)


def is_configuration(path: Path) -> bool:
    """True for a configuration without anything to load: no weights, no part of them, no graphs.

    Raises:
        ArtifactError: see `detect`.
    """
    folder = _open(path, "option.model_id")
    matching = [candidate.name for candidate in FORMATS if candidate.matches(folder)]
    return matching == [HuggingFace.name] and not any(map(_is_weight, folder.names))


def _open(path: Path, origin: str) -> Folder:
    try:
        if path.is_dir():
            folder = Folder.open(path)
            for name in sorted(COPIED_FOLDERS & folder.folders):
                folder.check_tree(name)
            return folder
        what = "is a file" if path.exists() else "does not exist"
        msg = (
            f"the model folder {path} (from {origin}) {what}; expected a folder. Correct {origin}, mount it, or set "
            "option.model_id to a Hugging Face id, a folder or s3://bucket/key."
        )
        raise ArtifactNotFoundError(msg)
    except ArtifactError:
        raise  # some are OSErrors too
    except OSError as error:
        msg = f"the model folder {path} (from {origin}) cannot be read: {error.strerror}. Give this user access."
        raise ArtifactAccessError(msg) from error

"""The output of an ahead-of-time compile: a folder that can be served anywhere as it is."""

from __future__ import annotations

import io
import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import javaproperties

from djl_python_neuronx.artifacts import manifest as manifests
from djl_python_neuronx.artifacts.atomic import (
    flock,
    link_or_copy,
    remove,
    replace_folder,
    storing,
    sync_tree,
    whole_file,
)
from djl_python_neuronx.artifacts.folder import (
    SERVING,
    WEIGHT_SUFFIXES,
    Folder,
    file_names,
    read_json,
    some,
)
from djl_python_neuronx.artifacts.manifest import CompileFacts, Manifest, is_unfinished, unfinished
from djl_python_neuronx.config.djl_serving import ARGUMENTS
from djl_python_neuronx.config.options import names_where
from djl_python_neuronx.config.sources import FILE_NAME as PROPERTIES
from djl_python_neuronx.config.sources import from_file
from djl_python_neuronx.errors import ArtifactError, ArtifactNotFoundError

COMPILED = "compiled"
"""The folder of compiled files in an output. Source: the last LMI Neuron container's partition wrote it so."""
DRAFT = "draft"
"""The folder of the draft model in an output, itself an output."""

WeightsInOutput = Literal["none", "link", "copy"]

_SPLIT_WEIGHTS = "pytorch_model.bin"
_ADAPTERS = "adapters"
_KEPT_SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py")
"""Configuration, tokenizer, chat template, the model's own code, requirements."""
_KEPT_STEMS = ("LICENSE", "NOTICE", "USE_POLICY")
# Paths that are valid on the machine that compiled, not on those that serve.
_LOCAL_OPTIONS = names_where(lambda marker: marker.output == "local")


def write_output(
    source: Path,
    destination: Path,
    *,
    facts: CompileFacts,
    options: Mapping[str, object],
    packages: Mapping[str, str],
    layout: str,
    compiled: Path | None = None,
    draft: Path | None = None,
    weights: WeightsInOutput = "link",
    entry_point: str = "djl_python_neuronx.handler",
    overwrite: bool = False,
) -> Manifest:
    """Write the model in `source` with its compiled files to `destination`, which appears whole or not at all.

    It gets the source's configuration, tokenizer, templates, code and adapters byte for byte, `compiled` as the
    folder `compiled`, the output of its draft model as `draft`, and a `serving.properties` that pins every one of
    `options` that is not None, except those that are only valid on this machine (`model_id` ...). `layout` is the name
    of its format in `formats`. Weights are left out, copied, or linked (a hard link where the file system supports it,
    else a copy): a linked file changes with its source.

    Raises:
        ConfigError: the source's `serving.properties` cannot be read.
        ArtifactError: `destination` holds anything but an unchanged output, and `overwrite` is false; or it and
            `source` overlap.
        ArtifactNotFoundError: `source` is not a model folder.
        ArtifactAccessError: a file cannot be read or written, or the disk is full.
    """
    model = _open(source)
    arguments = {one.name: str(one.value) for one in from_file(source) if not one.by_user}
    _check_destination(model.root, destination.resolve(), overwrite=overwrite)
    with storing(f"the compiled model {destination}", destination.parent):
        destination.parent.mkdir(parents=True, exist_ok=True)
        # A mounted folder cannot be replaced by a rename: the files go in one by one, the manifest last.
        mounted = destination.is_mount()
        with _staging(destination if mounted else destination.parent, destination.name) as staging:
            new = staging / "new"
            new.mkdir()
            _fill(new, model, compiled, weights)
            if draft is not None:
                _copy_tree(draft, new / DRAFT, link_or_copy)
            (new / PROPERTIES).write_bytes(properties_file(options, entry_point, arguments))
            made = Manifest.of(
                new, facts, effective_options=options, packages=packages, layout=layout
            )
            sync_tree(new)
            manifests.write(new, made)
            if mounted:
                _move_into(new, destination, besides=staging)
            else:
                replace_folder(new, destination, staging / "old")
    return made


def properties_file(
    options: Mapping[str, object],
    entry_point: str,
    arguments: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """A `serving.properties` with these options, as `config.sources.from_file` and Java read it.

    `arguments` are keys without `option.`, which DJL Serving reads itself. They override the advised ones.
    """
    pinned = {
        f"option.{name}": _text(value)
        for name, value in sorted(options.items())
        if value is not None and name not in _LOCAL_OPTIONS | {"entryPoint"}
    }
    lines = {
        **ARGUMENTS,
        **arguments,
        "engine": "Python",
        "option.entryPoint": entry_point,
        **pinned,
    }
    buffer = io.StringIO()
    javaproperties.dump(lines, buffer, timestamp=False)
    return buffer.getvalue().encode("ascii")


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return json.dumps(dict(value), sort_keys=True)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(_text, value))
    return str(value)


def _open(source: Path) -> Folder:
    with storing("the model folder's listing", source):
        if not (source / "config.json").is_file():
            msg = f"{source} has no config.json; expected a model folder. Point to the one that holds the model itself."
            raise ArtifactNotFoundError(msg)
        return Folder.open(source)


def _check_destination(source: Path, destination: Path, *, overwrite: bool) -> None:
    if source.is_relative_to(destination) or destination.is_relative_to(source):
        msg = (
            f"the output {destination} and the model {source} overlap; expected separate folders. "
            "Name another output."
        )
        raise ArtifactError(msg)
    names = sorted(path.name for path in destination.iterdir()) if destination.is_dir() else []
    is_free = not destination.exists() or (destination.is_dir() and not names)
    if overwrite or is_free:
        return
    try:
        if _is_interrupted(destination):
            return
        manifests.verify(destination, manifests.read(destination), hashes="none")
    except ArtifactError as error:
        found = some(names) if names else "a file"
        msg = (
            f"the output {destination} exists and is not an unchanged output of this package (it holds {found}); "
            f"expected an empty folder, or none. Name another, or add --overwrite. The cause: {error}"
        )
        raise ArtifactError(msg) from error


def _is_interrupted(destination: Path) -> bool:
    """True if `_move_into` was interrupted and nothing was added since."""
    manifest = destination / manifests.FILE_NAME
    marker = read_json(manifest) if manifest.is_file() else {}
    if not is_unfinished(marker):
        return False
    staged = f".{destination.name}.output-"
    known = {manifests.FILE_NAME, *marker.get("files", ())}
    return all(name in known or name.startswith(staged) for name in file_names(destination))


@contextmanager
def _staging(parent: Path, name: str) -> Iterator[Path]:
    """A temporary folder; removes those that killed processes left for `name`."""
    for left in parent.glob(f".{name}.output-*"):
        with suppress(OSError), flock(left):
            shutil.rmtree(left, ignore_errors=True)
    staging = parent / f".{name}.output-{uuid.uuid4().hex[:12]}"
    staging.mkdir()
    try:
        with flock(staging):
            yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _fill(target: Path, model: Folder, compiled: Path | None, weights: WeightsInOutput) -> None:
    place: Callable[[str, str], object] = shutil.copyfile if weights == "copy" else link_or_copy
    # The files that a server fetches from S3: a manifest that lists more would be refused there as incomplete.
    files = set(SERVING.choose(model.names - model.folders))
    cut = {name for name in files if name.endswith(WEIGHT_SUFFIXES)}
    small = {
        name
        for name in files - cut - {PROPERTIES, manifests.FILE_NAME}
        if name.endswith(_KEPT_SUFFIXES) or name.startswith(_KEPT_STEMS)
    }
    for name in small:
        shutil.copyfile(model.path / name, target / name)
    if weights != "none":
        for name in cut:
            place(str(model.path / name), str(target / name))
        if _SPLIT_WEIGHTS in model.folders:
            _copy_tree(model.sub(_SPLIT_WEIGHTS).path, target / _SPLIT_WEIGHTS, place)
    if _ADAPTERS in model.folders:
        _copy_tree(model.sub(_ADAPTERS).path, target / _ADAPTERS, shutil.copyfile)
    if compiled is not None:
        _copy_tree(compiled, target / COMPILED, link_or_copy)


def _copy_tree(source: Path, target: Path, place: Callable[[str, str], object]) -> None:
    # Folders get this user's usual rights, whatever a read-only source has.
    target.mkdir()
    names = {name for name in file_names(source) if (source / name).is_file()}
    for name in sorted(SERVING.choose(names)):
        copied = target / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        place(str(source / name), str(copied))


def _move_into(new: Path, destination: Path, *, besides: Path) -> None:
    """Replace the content of a mounted folder; its manifest is an `unfinished` one until everything is there."""
    manifest = destination / manifests.FILE_NAME
    staged = f"{besides.name}/"
    there = {name for name in file_names(destination) if not name.startswith(staged)}
    with whole_file(manifest) as temporary:
        temporary.write_text(json.dumps(unfinished(there | file_names(new))), encoding="utf-8")
    for path in destination.iterdir():
        if path not in {besides, manifest}:
            remove(path)
    for path in sorted(new.iterdir(), key=lambda path: path.name == manifests.FILE_NAME):
        if path.name == manifests.FILE_NAME:
            sync_tree(destination)
        path.rename(destination / path.name)
    sync_tree(destination)

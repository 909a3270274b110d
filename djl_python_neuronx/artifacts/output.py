"""The output of an ahead-of-time compile: a folder that can be served anywhere as it is."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import javaproperties

from djl_python_neuronx.artifacts import manifest as manifests
from djl_python_neuronx.artifacts.atomic import (
    remove,
    remove_abandoned,
    replace_folder,
    staging,
    storing,
    sync,
    sync_tree,
    temporary_folder,
)
from djl_python_neuronx.artifacts.folder import (
    LEGAL_STEMS,
    SERVING,
    WEIGHT_SUFFIXES,
    Folder,
    copy_file,
    copy_tree,
    file_names,
    read_json,
    reading,
    some,
)
from djl_python_neuronx.artifacts.formats import COPIED_FOLDERS
from djl_python_neuronx.artifacts.manifest import CompileFacts, Manifest, is_unfinished, unfinished
from djl_python_neuronx.artifacts.weights import SPLIT_FOLDER
from djl_python_neuronx.config.djl_serving import ARGUMENTS
from djl_python_neuronx.config.options import names_where
from djl_python_neuronx.config.sources import FILE_NAME as PROPERTIES
from djl_python_neuronx.errors import ArtifactError

COMPILED = "compiled"
"""The folder of compiled files in an output. Source: the last LMI Neuron container's partition wrote it so."""
DRAFT = "draft"
"""The folder of the draft model in an output, itself an output."""
CODE = "model_code"
"""The folder of the code that takes the place of the library's class."""

WeightsInOutput = Literal["none", "link", "copy", "presharded"]

KEPT_SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py")
"""Configuration, tokenizer, chat template, the model's own code, requirements."""
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
    writers: Mapping[str, Callable[[Path], object]] = MappingProxyType({}),
    weights: WeightsInOutput = "link",
    for_djl: Mapping[str, str] = MappingProxyType({}),
    own_properties: bool = True,
    overwrite: bool = False,
) -> Manifest:
    """Write the model in `source` with its compiled files to `destination`, which appears whole or not at all.

    It gets the source's configuration, tokenizer, templates, code and adapters byte for byte, `compiled` as the
    folder `compiled`, what each of the `writers` writes into the folder of its name, and a `serving.properties`, see
    `properties_file`. The manifest lists that file unless another program replaces it (`own_properties`). `layout` is
    the name of its format in `formats`. Weights are left out, copied, or linked (a hard link where the file system
    supports it, else a copy): a linked file changes with its source. With ``presharded`` a writer adds them to the
    folder `compiled`, whose files are then copies.

    Raises:
        ArtifactError: `destination` holds anything but an unchanged output, and `overwrite` is false; or it and
            `source` overlap.
        ArtifactAccessError: a file cannot be read or written, or the disk is full.
    """
    with reading(source):
        model = Folder.open(source)
    check_free(source, destination, overwrite=overwrite)
    with (
        storing(f"the compiled model {destination}", destination.parent),
        temporary_folder(*staging(destination)) as beside,
    ):
        new = beside / "new"
        new.mkdir()
        _fill(new, model, compiled, weights)
        for name, write in writers.items():
            write(new / name)
        (new / PROPERTIES).write_bytes(properties_file(options, for_djl))
        made = Manifest.of(new, facts, effective_options=options, packages=packages, layout=layout)
        if not own_properties:
            del made.files[PROPERTIES]
        sync_tree(new)
        manifests.write(new, made)
        # A mounted folder cannot be replaced by a rename: the files go in one by one, the manifest last.
        if destination.is_mount():
            _move_into(new, destination, besides=beside)
        else:
            replace_folder(new, destination, beside / "old")
    return made


def properties_file(
    options: Mapping[str, object], for_djl: Mapping[str, str] = MappingProxyType({})
) -> bytes:
    """A `serving.properties` with these options, as `config.sources.from_file` and Java read it.

    Options that are None or only valid on this machine (`model_id` ...) are left out. `for_djl` are the keys that DJL
    Serving reads itself. They override the advised ones.
    """
    pinned = {
        f"option.{name}": _text(value)
        for name, value in sorted(options.items())
        if value is not None and name not in _LOCAL_OPTIONS | {"entryPoint"}
    }
    lines = {
        **ARGUMENTS,
        **for_djl,
        "engine": "Python",
        "option.entryPoint": "djl_python_neuronx.handler",
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
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # DJL Serving reads whole seconds only, and 2400.0 is none
    return str(value)


def check_free(source: Path, destination: Path, *, overwrite: bool) -> None:
    """Refuse to write the output of the model in `source` to `destination`; removes what killed writers left there.

    Raises:
        ArtifactError: see `write_output`.
    """
    remove_abandoned(*staging(destination))
    source, destination = source.resolve(), destination.resolve()
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
    staged = staging(destination)[1]
    known = {manifests.FILE_NAME, *marker.get("files", ())}
    return all(name in known or name.startswith(staged) for name in file_names(destination))


def _fill(target: Path, model: Folder, compiled: Path | None, weights: WeightsInOutput) -> None:
    choose, link = SERVING.choose, weights == "link"
    # The files that a server fetches from S3: a manifest that lists more would be refused there as incomplete.
    files = set(choose(model.names - model.folders))
    cut = {name for name in files if name.endswith(WEIGHT_SUFFIXES)}
    small = {
        name
        for name in files - cut - {PROPERTIES, manifests.FILE_NAME}
        if name.endswith(KEPT_SUFFIXES) or name.startswith(LEGAL_STEMS)
    }
    for name in small:
        copy_file(model.path / name, target / name, model.root)
    folders = COPIED_FOLDERS & model.folders
    if weights in {"none", "presharded"}:
        folders -= {SPLIT_FOLDER}
    else:
        for name in cut:
            copy_file(model.path / name, target / name, model.root, link=link)
    for name in folders:
        inner, linked = model.path / name, link and name == SPLIT_FOLDER
        copy_tree(inner, target / name, model.root, link=linked, choose=choose)
    if compiled is not None:
        # A library that writes beside its graphs rewrites them, into the compile store if they were links.
        copy_tree(compiled, target / COMPILED, link=weights != "presharded", choose=choose)


def _move_into(new: Path, destination: Path, *, besides: Path) -> None:
    """Replace the content of a mounted folder; its manifest is an `unfinished` one until everything is there."""
    manifest = destination / manifests.FILE_NAME
    staged = f"{besides.name}/"
    there = {name for name in file_names(destination) if not name.startswith(staged)}
    marker = besides / "unfinished"
    marker.write_text(json.dumps(unfinished(there | file_names(new))), encoding="utf-8")
    sync(marker)
    marker.replace(manifest)
    sync(destination)
    for path in destination.iterdir():
        if path not in {besides, manifest}:
            remove(path)
    for path in sorted(new.iterdir(), key=lambda path: path.name == manifests.FILE_NAME):
        if path.name == manifests.FILE_NAME:
            sync_tree(destination)
        path.rename(destination / path.name)
    sync_tree(destination)

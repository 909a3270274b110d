"""Compiling ahead of time: a folder, or a place in S3, that is served as it is and compiles nothing."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from djl_python_neuronx.artifacts import fetch
from djl_python_neuronx.artifacts import manifest as manifests
from djl_python_neuronx.artifacts.atomic import storing
from djl_python_neuronx.artifacts.formats import OwnOutput
from djl_python_neuronx.artifacts.manifest import Manifest
from djl_python_neuronx.artifacts.output import DRAFT, WeightsInOutput, write_output
from djl_python_neuronx.config.options import names_where
from djl_python_neuronx.config.sources import FILE_NAME as PROPERTIES
from djl_python_neuronx.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    InvalidOptionError,
)
from djl_python_neuronx.loading.compiled import obtain
from djl_python_neuronx.loading.prepare import SILENT, LoadProgress, Prepared, prepare_or_raise
from djl_python_neuronx.planning.graph_facts import graph_options
from djl_python_neuronx.planning.machines import DeviceInfo
from djl_python_neuronx.types import Tokenizer

logger = logging.getLogger(__name__)

_DRAFT_OPTION = "speculative_draft_model"
_HANDOVER = names_where(lambda marker: marker.djl.overrules)
"""How DJL Serving hands over requests: it may overrule these options."""


def compile_model(
    model: str,
    output: str,
    *,
    environ: Mapping[str, str],
    overrides: Mapping[str, str] = MappingProxyType({}),
    machine: DeviceInfo | None = None,
    weights: WeightsInOutput = "link",
    overwrite: bool = False,
    progress: LoadProgress = SILENT,
) -> Manifest:
    """Compile the model folder, hub id or URI `model` and write what is served to `output`, a folder or ``s3://…``.

    `machine`: the one that will serve; None: this one. A killed compile goes on at the next graph when it is started
    again. For the cpu backend, which compiles nothing, the output has the manifest and the options only.

    Raises:
        ServingError: what is wrong with the settings, the model, the machine or the output.
    """
    model_dir = fetch.local_folder(model, None)
    if model_dir is None:
        overrides = {"model_id": model, **overrides}
    prepared = prepare_or_raise(
        None,
        model_dir,
        environ=environ,
        overrides=overrides,
        machine=machine,
        progress=progress.transfer,
    )
    tokenizer = prepared.load_tokenizer()
    return _write(prepared, tokenizer, output, environ, weights, progress, overwrite=overwrite)


def partition(properties: Mapping[str, Any], *, environ: Mapping[str, str]) -> Manifest:
    """As `compile_model`, with the options that DJL's partition script passes.

    Raises:
        ServingError: what is wrong with the settings, the model, the machine or the output.
    """
    prepared = prepare_or_raise(properties, Path(properties["model_dir"]), environ=environ)
    options = prepared.options
    if options.save_mp_checkpoint_path is None:
        raise InvalidOptionError(
            name="save_mp_checkpoint_path",
            value=None,
            origin="nobody",
            allowed="the folder or s3://bucket/key that the compiled model is to be written to",
        )
    schema = options.partition_schema or "safetensors"
    held = prepared.weights
    if schema == "safetensors" and held and held.kind not in {"safetensors", "presharded", "ranks"}:
        msg = (
            f"partition_schema is safetensors, and the weights in {held.folder} are not ({held.kind}): neither "
            "library writes them anew. Run `djl-neuronx convert` first, or set option.partition_schema=compile_only"
        )
        raise ArtifactError(msg)
    weights: WeightsInOutput = "none" if schema == "compile_only" else "link"
    return _write(
        prepared,
        prepared.load_tokenizer(),
        options.save_mp_checkpoint_path,
        environ,
        weights,
        SILENT,
        overwrite=False,
        own_properties=False,
    )


def _write(
    prepared: Prepared,
    tokenizer: Tokenizer,
    output: str,
    environ: Mapping[str, str],
    weights: WeightsInOutput,
    progress: LoadProgress,
    *,
    overwrite: bool,
    own_properties: bool = True,
) -> Manifest:
    started_s = time.monotonic()
    if prepared.artifact.format == OwnOutput.name:
        layout = manifests.read(prepared.artifact.path).layout or "huggingface"
    else:
        layout = prepared.artifact.format
    to_s3 = _check_s3_output(prepared, output, environ, overwrite=overwrite)
    draft = prepared.draft
    # What is served elsewhere needs the draft model's weights too, or neither's.
    included = draft is not None and weights != "none"
    options = {**pinned(prepared), **({_DRAFT_OPTION: DRAFT} if included else {})}
    compiled = obtain(
        prepared, tokenizer, environ=environ, listener=progress.compile, required=True
    )

    def write(destination: Path) -> Manifest:
        with tempfile.TemporaryDirectory(prefix="djl-neuronx-draft-") as beside:
            finished = Path(beside, DRAFT)
            if draft is not None and included:
                _write(draft, tokenizer, str(finished), environ, weights, progress, overwrite=False)
            made = write_output(
                _source(prepared),
                destination,
                facts=compiled.facts,
                options=options,
                packages=compiled.packages,
                layout=layout,
                compiled=compiled.folder,
                draft=finished if included else None,
                weights=weights,
                overwrite=overwrite,
            )
        if not own_properties:
            # DJL's script writes another one over it: the manifest must not vouch for ours.
            files = {name: entry for name, entry in made.files.items() if name != PROPERTIES}
            made = made.model_copy(update={"files": files})
            manifests.write(destination, made)
        return made

    if not to_s3:
        made = write(Path(output).expanduser().absolute())
    else:
        from djl_python_neuronx.artifacts import s3

        root = fetch.download_root(environ)
        with storing("the compiled model", root):
            root.mkdir(parents=True, exist_ok=True)
        # Beside the downloads, so that weights are links and take no room.
        with tempfile.TemporaryDirectory(dir=root, prefix="output-") as temporary:
            made = write(Path(temporary, "output"))
            s3.upload(Path(temporary, "output"), output, environ, progress=progress.transfer)
    logger.info(
        "compiled_ahead output=%s files=%d bytes=%d seconds=%.1f",
        output, len(made.files), sum(entry.bytes for entry in made.files.values()),
        time.monotonic() - started_s,
    )  # fmt: skip
    return made


def _check_s3_output(
    prepared: Prepared, output: str, environ: Mapping[str, str], *, overwrite: bool
) -> bool:
    """Check that an output in S3 may be written; False for a local folder, which `write_output` checks."""
    scheme = fetch.uri_scheme(output)
    if scheme is None:
        return False
    if scheme != "s3":
        msg = f"{output!r} cannot be written: expected a folder or s3://bucket/folder. Name another output"
        raise ArtifactError(msg)
    s3 = fetch.s3_module(output)
    source = prepared.options.model_id
    if source is not None and fetch.uri_scheme(source) == "s3":
        s3.check_apart(output, source)
    if not overwrite:
        s3.check_free(output, environ)
    return True


def pinned(prepared: Prepared) -> dict[str, object]:
    """The options that an output is served with: those that somebody set or that followed from model and machine.

    The backend is named too, and a way for DJL Serving to hand over requests, as recent versions choose the slow one.
    """
    options, origins = prepared.options, prepared.resolved.origins
    values = options.model_dump(mode="json")
    names = {*origins, *graph_options(options, prepared.loader)} & {*values} - {"model_dir"}
    found = {name: _text(values[name]) for name in sorted(names) if values[name] is not None}
    found["model_loader"] = prepared.loader
    if _HANDOVER.isdisjoint(origins):
        found["async_mode"] = True
    return found


def _text(value: object) -> object:
    """Nested lists as JSON: a properties file has commas for the outer ones only."""
    nested = isinstance(value, list) and any(isinstance(entry, (list, dict)) for entry in value)
    return json.dumps(value) if nested else value


def _source(prepared: Prepared) -> Path:
    model, weights = prepared.artifact.path, prepared.weights
    if weights is not None and weights.folder != model:
        msg = (
            f"the model in {model} has its weights in {weights.folder.name}/; expected them beside config.json. "
            "Compile the checkpoint that it was made from"
        )
        raise ArtifactNotFoundError(msg)
    return model

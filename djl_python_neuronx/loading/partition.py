"""Compile ahead of time, into a folder or S3 prefix that starts without compiling."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from djl_python_neuronx.artifacts import fetch, model_code
from djl_python_neuronx.artifacts import manifest as manifests
from djl_python_neuronx.artifacts.atomic import storing, temporary_folder
from djl_python_neuronx.artifacts.output import (
    CODE,
    COMPILED,
    DRAFT,
    WeightsInOutput,
    check_free,
    write_output,
)
from djl_python_neuronx.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    InvalidOptionError,
)
from djl_python_neuronx.loading.compile_facts import compile_facts, package_versions
from djl_python_neuronx.loading.compiled import Compiled, obtain
from djl_python_neuronx.loading.output_weights import (
    check_presharded,
    layout,
    preshard,
    usual_weights,
)
from djl_python_neuronx.loading.own_model import OPTION
from djl_python_neuronx.loading.pinned import for_djl, log_left_out, pinned
from djl_python_neuronx.loading.prepare import prepare_or_raise
from djl_python_neuronx.loading.prepared import Prepared
from djl_python_neuronx.loading.situation import SILENT, LoadProgress, Purpose
from djl_python_neuronx.loading.targets import find_target
from djl_python_neuronx.planning.machines import DeviceInfo
from djl_python_neuronx.types import Tokenizer

logger = logging.getLogger(__name__)

_DRAFT_OPTION = "speculative_draft_model"


def compile_model(
    model: str,
    output: str,
    *,
    environ: Mapping[str, str],
    overrides: Mapping[str, str] = MappingProxyType({}),
    machine: DeviceInfo | None = None,
    weights: WeightsInOutput | None = None,
    overwrite: bool = False,
    progress: LoadProgress = SILENT,
) -> manifests.Manifest:
    """Compile the model folder, properties file, hub id or URI `model` to `output`, a folder or ``s3://…``.

    `machine`: the one that will serve; None: this one. `weights`: None for what the backend loads fastest, cut weights
    with nxdi and links with the others. A killed compile resumes at the next graph. For the cpu backend, which compiles
    nothing, the output adds a manifest and the options to the model.

    Raises:
        ServingError: the settings, the model, the machine or the output do not allow it.
    """
    found = find_target(model, environ)
    overrides = {**found.overrides, **overrides}
    if weights == "presharded":
        overrides = {**overrides, "on_device_embedding": "true"}  # the library stores no other
    prepared = prepare_or_raise(
        None,
        found.folder,
        environ=environ,
        overrides=overrides,
        file=found.file,
        content=found.content,
        machine=machine,
        purpose=Purpose.COMPILE,
        progress=progress,
    )
    weights = weights or usual_weights(prepared)
    if weights == "presharded":
        check_presharded(prepared)
    return _Writer(prepared.load_tokenizer(), weights, overwrite, progress=progress).write(
        prepared, output
    )


def partition(properties: Mapping[str, Any], *, environ: Mapping[str, str]) -> manifests.Manifest:
    """Compile with the options that DJL's partition script passes; otherwise like `compile_model`.

    Raises:
        ServingError: the settings, the model, the machine or the output do not allow it.
    """
    prepared = prepare_or_raise(
        properties, Path(properties["model_dir"]), environ=environ, purpose=Purpose.COMPILE
    )
    options = prepared.options
    if options.save_mp_checkpoint_path is None:
        name = "save_mp_checkpoint_path"
        allowed = "the folder or s3://bucket/key that the compiled model is to be written to"
        raise InvalidOptionError(name, None, "default", allowed)
    schema = options.partition_schema or "safetensors"
    held = prepared.weights
    if schema == "safetensors" and held and held.kind not in {"safetensors", "presharded", "ranks"}:
        msg = (
            f"partition_schema is safetensors, and the weights in {held.folder} are not ({held.kind}): neither "
            "library writes them. Run `djl-neuronx convert` first, or set option.partition_schema=compile_only"
        )
        raise ArtifactError(msg)
    weights = "none" if schema == "compile_only" else usual_weights(prepared)
    writer = _Writer(prepared.load_tokenizer(), weights, own_properties=False)
    return writer.write(prepared, options.save_mp_checkpoint_path)


@dataclass(frozen=True)
class _Writer:
    """How one output is written."""

    tokenizer: Tokenizer
    weights: WeightsInOutput
    overwrite: bool = False
    own_properties: bool = True
    """False: another program writes `serving.properties` later, which the manifest then must not list."""
    progress: LoadProgress = SILENT

    def write(self, prepared: Prepared, output: str) -> manifests.Manifest:
        """Compile a model and write it to a folder or to S3."""
        started_s, source = time.monotonic(), _source(prepared)
        to_s3 = self._check_s3(prepared, output)
        with ExitStack() as stack:
            if to_s3:
                # Beside the downloads, so that weights are links and take no room.
                root = fetch.download_root(prepared.environ)
                with storing("the compiled model", root):
                    beside = stack.enter_context(temporary_folder(root, "output-"))
                folder = beside / "output"
            else:
                folder = Path(output).expanduser().absolute()
                check_free(source, folder, overwrite=self.overwrite)
            compiled = obtain(prepared, lambda: self.tokenizer, self.progress)
            made = self._write_folder(prepared, compiled, folder)
            if to_s3:
                fetch.s3_module(output).upload(
                    folder, output, prepared.environ, progress=self.progress.transfer
                )
        log_left_out(prepared, source)
        num_bytes = sum(entry.bytes for entry in made.files.values())
        logger.info(
            "compiled_ahead output=%s files=%d bytes=%d seconds=%.1f",
            output, len(made.files), num_bytes, time.monotonic() - started_s,
        )  # fmt: skip
        return made

    def _check_s3(self, prepared: Prepared, output: str) -> bool:
        """Check that an output in S3 may be written. Returns False for a folder."""
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
        if not self.overwrite:
            s3.check_free(output, prepared.environ)
        return True

    def _write_folder(
        self, prepared: Prepared, compiled: Compiled, destination: Path
    ) -> manifests.Manifest:
        options, writers = pinned(prepared), dict[str, Callable[[Path], object]]()
        if self.weights == "presharded":
            writers[COMPILED] = partial(preshard, prepared, compiled)
        if (code := prepared.case.code) is not None:
            writers[CODE] = partial(model_code.copy, code.folder, code.digest)
            options[OPTION] = f"./{CODE}"
        # An output without weights has none of a draft model either.
        if (draft := prepared.draft) is not None and self.weights != "none":
            if prepared.case.fused:
                facts = compile_facts(draft, draft.artifact.path)
                compiled_draft = replace(compiled, folder=None, facts=facts)
            else:
                compiled_draft = obtain(draft, lambda: self.tokenizer, self.progress)
            # A draft model is small: its weights stay whole.
            whole: WeightsInOutput = "link" if self.weights == "presharded" else self.weights
            writer = replace(self, own_properties=True, weights=whole)
            writers[DRAFT] = partial(writer._write_folder, draft, compiled_draft)
            options[_DRAFT_OPTION] = DRAFT
        return write_output(
            _source(prepared),
            destination,
            facts=compiled.facts,
            options=options,
            packages=package_versions(),
            layout=layout(prepared, cut=self.weights == "presharded"),
            compiled=compiled.folder,
            writers=writers,
            weights=self.weights,
            for_djl=for_djl(prepared),
            own_properties=self.own_properties,
            overwrite=self.overwrite,
        )


def _source(prepared: Prepared) -> Path:
    model, weights = prepared.artifact.path, prepared.weights
    if weights is not None and weights.folder != model:
        msg = (
            f"the model in {model} has its weights in {weights.folder.name}/; expected them beside config.json. "
            "Compile the checkpoint that it was made from"
        )
        raise ArtifactNotFoundError(msg)
    return model

"""From a target and its options to the outcome of a verification: checks, the copy of the first layers, graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any

from djl_python_neuronx.artifacts.artifact import WHOLE
from djl_python_neuronx.artifacts.atomic import require_space, temporary_folder
from djl_python_neuronx.artifacts.fetch import download_root, fetch
from djl_python_neuronx.artifacts.formats import detect
from djl_python_neuronx.artifacts.weights import Weights
from djl_python_neuronx.config.values import as_property
from djl_python_neuronx.errors import ConfigError
from djl_python_neuronx.loading.compiled import obtain
from djl_python_neuronx.loading.engine_process import ModelJob
from djl_python_neuronx.loading.load_plan import load_plan
from djl_python_neuronx.loading.pinned import pinned
from djl_python_neuronx.loading.prepare import prepare_or_raise
from djl_python_neuronx.loading.prepared import Prepared
from djl_python_neuronx.loading.situation import LoadProgress
from djl_python_neuronx.loading.targets import find_target
from djl_python_neuronx.planning.cores import place
from djl_python_neuronx.planning.machines import GIB, available_memory, with_cores
from djl_python_neuronx.planning.memory import float32_bytes
from djl_python_neuronx.planning.nxdi.fields import other_fields
from djl_python_neuronx.planning.rules import OPEN
from djl_python_neuronx.telemetry import log_settings
from djl_python_neuronx.verify.process import Job, verify_guarded
from djl_python_neuronx.verify.report import make_report
from djl_python_neuronx.verify.scenarios import most_outputs

_NO_TOKENIZER: Any = SimpleNamespace(eos_id=None)


def verify_model(
    target: str,
    *,
    environ: Mapping[str, str],
    overrides: Mapping[str, str],
    layers: int | None,
    checkpoint: str | None,
    quick: bool,
    progress: LoadProgress,
) -> dict[str, Any]:
    """Verify a model as `serve` would load it, and return the report.

    `layers`: of its first layers alone. `checkpoint`: the place of the reference's weights, if not the model's own.

    Raises:
        ConfigError: the reference does not fit into memory, or cannot be compared with these options.
        ServingError: the model or its reference cannot be prepared, compiled or loaded.
    """
    found = find_target(target, environ)
    prepare = partial(
        prepare_or_raise,
        None,
        found.folder,
        environ=environ,
        file=found.file,
        content=found.content,
        progress=progress,
    )
    elsewhere = found.folder is not None and "model_id" in overrides
    overrides = {**found.overrides, **overrides}
    prepared = prepare(overrides=overrides)
    total = prepared.case.model.num_layers
    if (obstacle := next(_obstacles(prepared, layers, checkpoint), None)) is not None:
        raise ConfigError(obstacle)
    _check_host(prepared, layers, () if checkpoint else range(1, total or 0))
    whole = checkpoint and _find_checkpoint(checkpoint, prepared, progress)
    with ExitStack() as stack:
        if layers is not None:
            copy = (
                stack.enter_context(temporary_folder(download_root(environ), "verify-")) / "model"
            )
            _copy(prepared, layers, copy)
            # As the whole model is served: its defaults are not those of a small one.
            kept = {name: as_property(value) for name, value in pinned(prepared).items()}
            overrides = {**kept, **overrides, "model_id": str(copy)}
            prepared = prepare(overrides=overrides)
        cores = place([prepared.need], prepared.case.device)[0][0]
        prepared = replace(prepared, environ=with_cores(prepared.environ, cores))
        compiled = obtain(prepared, lambda: _NO_TOKENIZER, progress)
        model, reference = ModelJob(prepared.backend, compiled.plan, compiled.folder), compiled.plan
        if whole:
            reference = replace(reference, model_dir=whole.folder, kind=whole.kind)
        job = Job(model, reference, quick, log_settings())
        outcome = verify_guarded(job, prepared.environ)
    if elsewhere:
        outcome["left_out"].append("any weights in the folder itself: option.model_id names others")
    return make_report(prepared, outcome, layers, total)


def _obstacles(prepared: Prepared, layers: int | None, checkpoint: str | None) -> Iterator[str]:
    """Yield the reasons for which a model cannot be compared, before anything is compiled."""
    options, model, weights = prepared.options, prepared.case.model, prepared.weights
    if options.simulated:
        yield "model_loader=sim: no model runs, so there is nothing to compare; choose another"
    if prepared.case.on_cpu and options.model_loader in OPEN:
        yield (
            f"no chip would be verified: model_loader=auto takes the cpu backend here ({prepared.machine.seen}). Give "
            "the devices /dev/neuron* to this process or container, name a backend, or verify the CPU with "
            "-o model_loader=cpu"
        )
    if options.quantize or options.kv_cache_quantize:
        yield "quantize, kv_cache_quantize: transformers gives no bounds for quantised weights; verify without them"
    if prepared.case.on_cpu and model.config.get("quantization_config"):
        yield "config.json has quantization_config: quantised weights have no bounds; verify the original checkpoint"
    if layers is not None and checkpoint is not None:
        yield "--layers compiles the first layers of a checkpoint; name that as the model, or leave out --layers"
    if checkpoint is None and (weights is None or weights.kind not in WHOLE):
        yield (
            f"transformers does not read the weights in {prepared.artifact.path}, which are cut or split for a Neuron "
            "library; name the model that was compiled in --checkpoint: a folder, a Hugging Face id or an s3:// URI"
        )
    total = model.num_layers or 0
    if layers is not None and not 0 < layers <= total:
        yield f"--layers is {layers}, and the model has {total}; expected 1 to all of them, or leave it out for all"


def _check_host(prepared: Prepared, layers: int | None, fewer: Sequence[int]) -> None:
    """Check that this host holds the outputs and the reference. `fewer`: numbers of layers that --layers may name.

    Raises:
        ConfigError: not its memory.
        ArtifactAccessError: not the disk of temporary files.
    """
    model = prepared.case.model
    widths = {graph.batch for graph in prepared.planned.graphs if graph.kind == "decode"}
    outputs = most_outputs(load_plan(prepared, lambda: _NO_TOKENIZER), len(widths) or 1)
    size = 2 * 4 * outputs * (model.vocab_size or 0)  # float32 of the device and of the reference
    remedy = "name a folder on a larger disk in TMPDIR, or serve fewer slots"
    require_space("the comparison of logits", Path(gettempdir()), size, remedy)
    needed, there = float32_bytes(model, layers), available_memory()
    if there is not None and needed > there:
        fits = [n for n in fewer if float32_bytes(model, n) <= there]
        fix = f"give --layers {fits[-1]}, or" if fits else "take"
        msg = (
            f"the reference takes {needed / GIB:.1f} GiB of the host's memory in float32, and {there / GIB:.1f} can be "
            f"taken; {fix} a machine with more memory"
        )
        raise ConfigError(msg)


def _find_checkpoint(place: str, prepared: Prepared, progress: LoadProgress) -> Weights:
    """Return the whole weights of the checkpoint that a prepared model was compiled from.

    Raises:
        ConfigError: it is another model's.
        ArtifactError: it cannot be fetched or read, or has no whole weights.
    """
    environ, origin = prepared.environ, "--checkpoint"
    root = download_root(environ)
    folder = fetch(place, environ=environ, root=root, progress=progress.transfer, origin=origin)
    artifact = detect(folder, origin=origin)
    if different := other_fields(prepared.artifact.config, artifact.config):
        msg = (
            f"{prepared.artifact.path} is of another model than {place} (from {origin}): it has "
            f"{', '.join(different)}; name the model that was compiled"
        )
        raise ConfigError(msg)
    return artifact.weights_for("cpu", WHOLE)


def _copy(prepared: Prepared, layers: int, folder: Path) -> None:
    try:
        from djl_python_neuronx.artifacts.convert import write_first_layers
    except ModuleNotFoundError as error:
        msg = f"verify needs {error.name}; install it: pip install 'djl-python-neuronx[cpu]'"
        raise ConfigError(msg) from error
    assert prepared.weights is not None  # noqa: S101  (checked)
    write_first_layers(prepared.artifact, prepared.weights, layers, folder)

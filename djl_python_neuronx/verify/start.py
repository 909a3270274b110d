"""From a target and its options to the outcome of a verification: checks, the copy of the first layers, graphs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any

from djl_python_neuronx.artifacts.atomic import require_space, temporary_folder
from djl_python_neuronx.artifacts.fetch import download_root
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
    quick: bool,
    progress: LoadProgress,
) -> dict[str, Any]:
    """Verify a model as `serve` would load it, and return the report. `layers`: of its first layers alone.

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
    overrides = {**found.overrides, **overrides}
    prepared = prepare(overrides=overrides)
    total = prepared.case.model.num_layers
    _check(prepared, layers)
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
        model = ModelJob(prepared.backend, compiled.plan, compiled.folder)
        outcome = verify_guarded(Job(model, quick, log_settings()), prepared.environ)
    return make_report(prepared, outcome, layers, total)


def _check(prepared: Prepared, layers: int | None) -> None:
    """Refuse what cannot be compared before anything is compiled.

    Raises:
        ConfigError: the first reason.
        ArtifactAccessError: the disk of temporary files has no room for the outputs.
    """
    options, model, weights = prepared.options, prepared.case.model, prepared.weights
    if options.simulated:
        msg = "model_loader=sim: no model runs, so there is nothing to compare; choose another"
        raise ConfigError(msg)
    if options.quantize or options.kv_cache_quantize:
        msg = "quantize, kv_cache_quantize: transformers gives no bounds for quantised weights; verify without them"
        raise ConfigError(msg)
    if prepared.case.on_cpu and model.config.get("quantization_config"):
        msg = "config.json has quantization_config: quantised weights have no bounds; verify the original checkpoint"
        raise ConfigError(msg)
    if weights is None or weights.kind not in {"safetensors", "pickle"}:
        kind = "missing" if weights is None else weights.kind
        msg = f"the weights are {kind}, which transformers does not read; verify the original checkpoint"
        raise ConfigError(msg)
    total = model.num_layers or 0
    if layers is not None and not 0 < layers <= total:
        msg = f"--layers is {layers}, and the model has {total}; expected 1 to all of them, or leave it out for all"
        raise ConfigError(msg)
    widths = {graph.batch for graph in prepared.planned.graphs if graph.kind == "decode"}
    outputs = most_outputs(load_plan(prepared, lambda: _NO_TOKENIZER), len(widths) or 1)
    size = 2 * 4 * outputs * (model.vocab_size or 0)  # float32 of the device and of the reference
    remedy = "name a folder on a larger disk in TMPDIR, or serve fewer slots"
    require_space("the comparison of logits", Path(gettempdir()), size, remedy)
    needed, there = float32_bytes(model, layers), available_memory()
    if there is not None and needed > there:
        fits = [n for n in range(1, total) if float32_bytes(model, n) <= there]
        fix = f"give --layers {fits[-1]}, or" if fits else "take"
        msg = (
            f"the reference takes {needed / GIB:.1f} GiB of the host's memory in float32, and {there / GIB:.1f} can be "
            f"taken; {fix} a machine with more memory"
        )
        raise ConfigError(msg)


def _copy(prepared: Prepared, layers: int, folder: Path) -> None:
    try:
        from djl_python_neuronx.artifacts.convert import write_first_layers
    except ModuleNotFoundError as error:
        msg = f"verify needs {error.name}; install it: pip install 'djl-python-neuronx[cpu]'"
        raise ConfigError(msg) from error
    assert prepared.weights is not None  # noqa: S101  (checked)
    write_first_layers(prepared.artifact, prepared.weights, layers, folder)

"""transformers-neuronx: continuous batching for llama, mistral and mixtral, static batches for older architectures."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from djl_python_neuronx.backends import env
from djl_python_neuronx.backends.base import Backend
from djl_python_neuronx.backends.neuron import compiler_version, limit_threads, translated
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.backends.tnx.model import (
    CACHE_CALL,
    CLASSES,
    construct,
    model_type_of,
)
from djl_python_neuronx.errors import BackendError

__all__ = ["compile", "compiler_version", "load", "uncompilable"]

logger = logging.getLogger(__name__)

_CONFIG = "config.json"
_UNSAVED = frozenset({"gpt_neox", "gptj"})
_PRESHARDED = "is_presharded_checkpoint"


def uncompilable(config: Mapping[str, Any]) -> str | None:
    """Return why the graphs of a model with this `config.json` cannot be stored apart from it; None if they can."""
    model_type = config.get("model_type")
    if model_type in _UNSAVED:
        return (
            f"{CLASSES[model_type]} of transformers-neuronx cannot store its compiled graphs; the compiler's own cache "
            "(compiled_graph_path) keeps them"
        )
    return None


def compile(plan: LoadPlan, target: Path) -> None:
    """Write the compiled graphs of a plan into `target`, an existing folder. Takes minutes, and needs a device.

    With `presharded` the weights too, which leave no embedding for the host: `on_device_embedding` is set. Graphs of
    the plan that are there are used.

    Raises:
        BackendUnavailableError: the library or its cores are missing.
        CompileError: the compiler failed.
        BackendError: anything else; gpt_neox and gptj cannot store their graphs.
    """
    if reason := uncompilable({"model_type": model_type_of(plan.model_dir)}):
        raise BackendError(reason)
    workers = {"compilation_worker_count": plan.compile_workers} if plan.compile_workers else {}
    neuron_config = {**workers, **plan.arguments.neuron_config}
    plan = replace(plan, arguments=replace(plan.arguments, neuron_config=neuron_config))
    stored = plan.presharded and any(target.glob("*.neff"))
    model = _on_device(plan, target if stored else None)
    with translated(plan):
        model.save(str(target), sharded_weights=plan.presharded)
    if plan.presharded:
        # The library writes a configuration that it cannot read back: its own fields without the model's type.
        config = json.loads((plan.model_dir / _CONFIG).read_text())
        (target / _CONFIG).write_text(json.dumps({**config, _PRESHARDED: True}, indent=2))


def load(plan: LoadPlan, compiled: Path | None = None) -> Backend:
    """Load a model. `compiled`: the folder that `compile` has filled for the same plan; nothing is compiled then.

    Raises:
        BackendUnavailableError: the library or its cores are missing.
        ArtifactError: the model's files cannot be used, or `compiled` was compiled for another plan.
        DeviceMemoryError: the model does not fit.
        BackendError: anything else.
    """
    began = time.monotonic()
    model = _on_device(plan, compiled)
    # Not at the top: these modules import torch, and check must not.
    from djl_python_neuronx.backends.tnx.base import TnxBackend
    from djl_python_neuronx.backends.tnx.continuous import ContinuousBackend
    from djl_python_neuronx.backends.tnx.paged import PagedBackend
    from djl_python_neuronx.backends.tnx.static import StaticBackend

    mode: type[TnxBackend] = StaticBackend
    if "continuous_batching" in plan.arguments.neuron_config:
        mode = PagedBackend if CACHE_CALL in plan.arguments.calls else ContinuousBackend
    with translated(plan):
        backend = mode(model, plan)
        backend.find_nan_token()
    logger.info(
        "loaded backend=tnx model=%s joins=%s mixed_steps=%s tp_degree=%d seconds=%.1f",
        type(model).__name__,
        backend.spec.joins,
        backend.spec.mixed_steps,
        plan.tensor_parallel_degree,
        time.monotonic() - began,
    )
    return backend


def _on_device(plan: LoadPlan, compiled: Path | None) -> Any:  # noqa: ANN401
    cores = max(plan.tensor_parallel_degree, plan.process_cores)
    with translated(plan), env.applied(plan.arguments, cores):
        model = construct(_weights_of(plan, compiled))
        limit_threads()
        for method, keywords in plan.arguments.calls.items():
            if method == "to_neuron" and compiled is not None:
                model.load(str(compiled))
            if method != CACHE_CALL:
                getattr(model, method)(**keywords)
    return model


def _weights_of(plan: LoadPlan, compiled: Path | None) -> LoadPlan:
    """Return the plan; its weights are those in `compiled` if they are stored there for each core."""
    if compiled is None or not (compiled / _CONFIG).is_file():
        return plan
    divided = json.loads((compiled / _CONFIG).read_text()).get(_PRESHARDED)
    return replace(plan, model_dir=compiled) if divided else plan

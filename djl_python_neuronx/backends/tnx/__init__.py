"""transformers-neuronx: continuous batching for llama, mistral and mixtral, static batches for older architectures."""

from __future__ import annotations

import importlib
import json
import logging
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from djl_python_neuronx.backends import env
from djl_python_neuronx.backends.base import Backend
from djl_python_neuronx.backends.env import count_cores
from djl_python_neuronx.backends.plan import LoadPlan, ModelFacts
from djl_python_neuronx.backends.tnx.errors import of_load
from djl_python_neuronx.backends.tnx.model import (
    CACHE_CALL,
    CLASSES,
    construct,
    import_library,
    model_type_of,
    refusal,
)
from djl_python_neuronx.errors import BackendError, IncompatibleOptionsError

logger = logging.getLogger(__name__)

_CONFIG = "config.json"
_UNSAVED = frozenset({"gpt_neox", "gptj"})
_PRESHARDED = "is_presharded_checkpoint"


def supports(artifact: ModelFacts) -> str | None:
    """Why a model cannot be served; None: it can, as far as its `config.json` tells."""
    return refusal(artifact.config.get("model_type"))


def compiler_version() -> str:
    """The compiler's version as its package tells it; what one version compiled is no other's.

    Raises:
        BackendUnavailableError: the library is missing.
    """
    import_library()
    try:
        return metadata.version("neuronx-cc")
    except metadata.PackageNotFoundError:
        return str(importlib.import_module("neuronxcc").__version__)


def uncompilable(plan: LoadPlan) -> str | None:
    """Why the programs of a plan cannot be stored apart from the model; None: they can."""
    model_type = model_type_of(plan.model_dir)
    if model_type in _UNSAVED:
        return (
            f"{CLASSES[model_type]} of transformers-neuronx has no way to store its compiled programs; the compiler's "
            "own cache keeps them"
        )
    return None


def compile(plan: LoadPlan, target: Path) -> None:
    """Write the compiled programs of a plan into `target`, an existing folder; takes minutes, and a device.

    Raises:
        IncompatibleOptionsError: `presharded` without `on_device_embedding`.
        BackendUnavailableError: the library or its cores are missing.
        CompileError: the compiler failed.
        BackendError: anything else; gpt_neox and gptj cannot be stored by themselves.
    """
    if plan.presharded and not plan.arguments.neuron_config.get("on_device_embedding"):
        message = "divided weights leave no embedding for the host; set on_device_embedding=true"
        raise IncompatibleOptionsError(message)
    model = _on_device(plan, None)
    if not hasattr(model, "save"):
        message = (
            f"{type(model).__name__} has no compiled programs to store apart; "
            "set compiled_graph_path, whose cache keeps them"
        )
        raise BackendError(message)
    try:
        model.save(str(target), sharded_weights=plan.presharded)
    except Exception as error:
        raise of_load(error, f"{type(model).__name__} in {plan.model_dir}") from error
    if plan.presharded:
        # The library writes a configuration that it does not read back: its own fields without the model's type.
        config = json.loads((plan.model_dir / _CONFIG).read_text())
        (target / _CONFIG).write_text(json.dumps({**config, _PRESHARDED: True}, indent=2))


def load(plan: LoadPlan, compiled: Path | None = None) -> Backend:
    """A loaded model. `compiled`: a folder that `compile` has filled for the same plan; nothing is compiled then.

    Raises:
        BackendUnavailableError: the library or its cores are missing.
        ArtifactError: files of the model cannot be used, or `compiled` was made for another plan.
        DeviceMemoryError: the model does not fit.
        BackendError: anything else.
    """
    began = time.monotonic()
    model = _on_device(plan, compiled)
    # Only now: these modules need torch, which the registry does without.
    from djl_python_neuronx.backends.tnx.base import TnxBackend
    from djl_python_neuronx.backends.tnx.continuous import ContinuousBackend
    from djl_python_neuronx.backends.tnx.paged import PagedBackend
    from djl_python_neuronx.backends.tnx.static import StaticBackend

    mode: type[TnxBackend] = StaticBackend
    if "continuous_batching" in plan.arguments.neuron_config:
        mode = PagedBackend if CACHE_CALL in plan.arguments.calls else ContinuousBackend
    try:
        backend = mode(model, plan)
        backend.find_nan_token()
    except Exception as error:
        raise of_load(error, f"the model in {plan.model_dir}") from error
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
    what = f"the model in {plan.model_dir}"
    try:
        with env.applied(plan.arguments, max(plan.tensor_parallel_degree, plan.process_cores)):
            model = construct(_weights_of(plan, compiled))
            _limit_threads()
            for method, keywords in plan.arguments.calls.items():
                if method == "to_neuron" and compiled is not None:
                    model.load(str(compiled))
                if method != CACHE_CALL:
                    getattr(model, method)(**keywords)
    except Exception as error:
        raise of_load(error, what) from error
    return model


def _limit_threads() -> None:
    """Keep torch within the cores that the process is granted, whatever OMP_NUM_THREADS and the host say.

    Threads that wait for a core are waited for: handing over 8 rows of 128 256 logits takes 0.2 to 0.4 ms with 1 or 2
    threads on 2 vCPU, 1.1 to 1.5 with 4 or 8 (torch 2.13, 2026-11-22).
    """
    torch = importlib.import_module("torch")
    torch.set_num_threads(min(torch.get_num_threads(), count_cores()))


def _weights_of(plan: LoadPlan, compiled: Path | None) -> LoadPlan:
    """The plan, its model read from `compiled` if the weights lie divided there."""
    if compiled is None or not (compiled / _CONFIG).is_file():
        return plan
    divided = json.loads((compiled / _CONFIG).read_text()).get(_PRESHARDED)
    return replace(plan, model_dir=compiled) if divided else plan

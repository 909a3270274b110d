"""NxD Inference: continuous batching, and static batches where the options ask for them."""

from __future__ import annotations

import copy
import logging
import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from djl_python_neuronx.artifacts.atomic import sync_tree
from djl_python_neuronx.backends import env
from djl_python_neuronx.backends.base import Backend
from djl_python_neuronx.backends.neuron import compiler_version, limit_threads, translated
from djl_python_neuronx.backends.nxdi.contrib import VARIABLE
from djl_python_neuronx.backends.nxdi.model import (
    GRAPHS,
    QUANTISED,
    RANKS,
    construct,
    unmanaged,
)
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.errors import ArtifactNotFoundError

__all__ = ["compile", "compiler_version", "load", "uncompilable"]

logger = logging.getLogger(__name__)

_WORK = "work"
_WORK_VARIABLE = "BASE_COMPILE_WORK_DIR"
_WHOLE = ("*.safetensors", "*.bin")


def uncompilable(config: Mapping[str, Any]) -> str | None:  # noqa: ARG001
    """Return None: the library stores the graphs of every architecture."""
    return None


def compile(plan: LoadPlan, target: Path) -> None:
    """Write the compiled graphs of a plan into `target`, an existing folder. Takes minutes, and needs no device.

    With `presharded` the weights too; graphs of the plan that are there are used.

    Raises:
        BackendUnavailableError: the library or its compiler is missing.
        IncompatibleOptionsError: the installed library has no keyword that the options need.
        ArtifactError: the model's files cannot be used.
        CompileError: the compiler failed.
        BackendError: anything else.
    """
    # The library empties its work folder when a compile begins, and its default is one for all.
    work = target / _WORK
    try:
        with translated(plan, work), _environment(plan, {_WORK_VARIABLE: f"{work}/"}):
            application = construct(plan, target, save_sharded_checkpoint=plan.presharded)
            if plan.arguments.neuron_config.get("quantized"):
                _quantise(application, plan, target / QUANTISED)
            if plan.presharded and (target / GRAPHS).is_file():
                application.config.save(str(target))
                application.shard_weights(str(target), pre_shard_weights_hook=unmanaged)
            else:
                with _limited_threads(plan.compile_workers):
                    application.compile(str(target), pre_shard_weights_hook=unmanaged)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if plan.presharded:
        # The cores' parts are made of it.
        shutil.rmtree(target / QUANTISED, ignore_errors=True)


def _quantise(application: Any, plan: LoadPlan, folder: Path) -> None:  # noqa: ANN401
    """Write the weights in 8 bits, unless a compile before this one has: the folder appears when it is whole."""
    if folder.exists():
        return
    made = folder.with_suffix(".partial")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    config = copy.deepcopy(application.config)
    config.neuron_config.quantized_checkpoints_path = str(made)
    application.save_quantized_state_dict(str(plan.model_dir), config)
    sync_tree(made)
    made.rename(folder)


def load(plan: LoadPlan, compiled: Path | None = None) -> Backend:
    """Load a model. `compiled`: the folder that `compile` has filled for the same plan; nothing is compiled then.

    Raises:
        BackendUnavailableError: the library or its cores are missing.
        IncompatibleOptionsError: the installed library has no keyword that the options need.
        ArtifactError: graphs or weights are absent or cannot be used.
        DeviceMemoryError: the model does not fit.
        BackendError: anything else.
    """
    if compiled is None:
        with tempfile.TemporaryDirectory(prefix="nxdi-") as made:
            compile(plan, Path(made))
            return load(plan, Path(made))
    began = time.monotonic()
    _check_files(plan, compiled)
    presharded = plan.kind == "ranks"
    with translated(plan):
        with _environment(plan):
            application = construct(plan, compiled, save_sharded_checkpoint=presharded)
            limit_threads()
            unmanaged(application)
            # The engine's own warm-up runs every graph, and its errors count.
            application.load(str(compiled), skip_warmup=True)
        # Not at the top: it imports torch, and check must not.
        from djl_python_neuronx.backends.nxdi.batching import ContinuousBackend, StaticBackend
        from djl_python_neuronx.backends.nxdi.paged import PagedBackend

        config = application.neuron_config
        continuous = config.is_continuous_batching or plan.num_slots == 1
        kind = PagedBackend if config.is_prefix_caching else ContinuousBackend
        backend = (kind if continuous else StaticBackend)(application, plan)
        for place, folder in enumerate(plan.lora.adapters if plan.lora else (), 1):
            backend.set_adapter(place, folder)
    logger.info(
        "loaded backend=nxdi model=%s joins=%s presharded=%s tp_degree=%d seconds=%.1f",
        type(application).__name__,
        backend.spec.joins,
        presharded,
        plan.tensor_parallel_degree,
        time.monotonic() - began,
    )
    return backend


@contextmanager
def _limited_threads(most: int) -> Iterator[None]:
    """Limit pools of threads that name no number to `most`; 0: not at all.

    The library starts a compiler in each thread of such a pool, as many as the host has CPUs, and 4 more. Source:
    neuronx-distributed 0.13 to 0.18, model_builder.py `trace`.
    """
    pool = futures.ThreadPoolExecutor

    class Limited(pool):  # type: ignore[misc, valid-type]
        def __init__(self, max_workers: int | None = None, **more: Any) -> None:  # noqa: ANN401
            super().__init__(max_workers or most, **more)

    futures.ThreadPoolExecutor = Limited if most else pool  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        futures.ThreadPoolExecutor = pool  # type: ignore[misc]


def _check_files(plan: LoadPlan, compiled: Path) -> None:
    """Refuse a folder without graphs, and graphs without weights, before the device is touched.

    Raises:
        ArtifactNotFoundError: graphs or weights are absent.
    """
    if not (compiled / GRAPHS).is_file():
        message = f"there is no {GRAPHS} in {compiled}; expected what NxD Inference has compiled. Compile it again"
        raise ArtifactNotFoundError(message)
    folder = compiled / RANKS
    if plan.kind != "ranks":
        if any(any(plan.model_dir.glob(pattern)) for pattern in _WHOLE):
            return
        message = (
            f"the graphs in {compiled} have no weights: {plan.model_dir} has no checkpoint. Put the model's "
            "safetensors files there, or compile it again with its weights"
        )
        raise ArtifactNotFoundError(message)
    names = [f"tp{rank}_sharded_checkpoint.safetensors" for rank in range(_world(plan))]
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        message = f"{folder} lacks {', '.join(absent)}; expected a file for each core. Compile or copy it again"
        raise ArtifactNotFoundError(message)


def _world(plan: LoadPlan) -> int:
    """Return the number of ranks, each of which takes a core."""
    degrees = plan.arguments.neuron_config
    return math.prod(int(degrees.get(f"{kind}_degree", 1)) for kind in ("tp", "pp", "ep"))


@contextmanager
def _environment(plan: LoadPlan, more: Mapping[str, str] = {}) -> Iterator[None]:
    arguments = plan.arguments
    own = {} if plan.code is None else {VARIABLE: str(plan.code.folder)}
    arguments = replace(arguments, environment={**arguments.environment, **more, **own})
    with env.applied(arguments, max(_world(plan), plan.process_cores)):
        yield

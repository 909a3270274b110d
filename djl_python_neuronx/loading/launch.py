"""From a prepared model to its copies, ready to be started: cores, graphs and jobs. No server is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from djl_python_neuronx.backends.env import count_cores
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.engine.loop import Host
from djl_python_neuronx.engine.worker import EngineThread, WorkerSettings
from djl_python_neuronx.loading.compiled import Compiled, obtain
from djl_python_neuronx.loading.engine_process import EngineJob, EngineProcess, ModelJob
from djl_python_neuronx.loading.load_memory import LOAD_MEMORY
from djl_python_neuronx.loading.prepared import Prepared
from djl_python_neuronx.loading.situation import SILENT, LoadProgress
from djl_python_neuronx.loading.tokenizer_process import TokenizerProcess
from djl_python_neuronx.planning.cores import place
from djl_python_neuronx.planning.machines import with_cores
from djl_python_neuronx.protocol.parameters import default_parameters
from djl_python_neuronx.telemetry import log_settings


@dataclass(frozen=True)
class Launch:
    """A model whose copies can be started."""

    prepared: Prepared
    cores: Sequence[str]
    """The NeuronCores of each copy, see `cores.place`."""
    graphs: Sequence[Compiled]
    """Those of the model, and those of its draft model."""
    job: EngineJob
    """The job of each copy."""
    tokenizer: Callable[[], TokenizerProcess]
    """Waits until the tokenizer is loaded, and returns it."""

    @property
    def defaults(self) -> dict[str, Any]:
        """Parameters of OpenAI's requests that set none, by the model's author."""
        is_used = self.prepared.options.generation_config == "auto"
        return default_parameters(self.prepared.artifact.generation) if is_used else {}

    @property
    def adapters(self) -> Mapping[str, Path]:
        """The folders of the adapters that every copy loads, by name, in the places from 1 on."""
        return {one.name: one.folder for one in self.prepared.adapters}

    def room(self) -> AbstractContextManager[None]:
        """Wait until the host has memory for a copy; see `LoopSettings`."""
        return LOAD_MEMORY.of(self.prepared.host_bytes)

    @property
    def starts(self) -> list[Callable[[], Host]]:
        """A function for each copy that starts its engine."""
        if not self.prepared.options.engine_process:
            return [partial(EngineThread, self.job.load, self.job.worker)]
        environ = self.prepared.environ
        return [
            partial(EngineProcess, replace(self.job, copy=i), with_cores(environ, cores))
            for i, cores in enumerate(self.cores)
        ]


def make_launch(
    prepared: Prepared, placed: Sequence[str] = (), progress: LoadProgress = SILENT
) -> Launch:
    """Place the copies of a model, begin to load its tokenizer, and find or compile its graphs.

    `placed`: the cores of each copy, from `cores.place`; by default this model has the machine to itself.

    Raises:
        ServingError: the cores do not hold the copies; see also `obtain`.
    """
    options = prepared.options
    placed = placed or place([prepared.need], prepared.case.device)[0]
    # All copies load the graphs that are compiled here, on the cores of the first one.
    models = [
        replace(model, environ=with_cores(model.environ, placed[0])) for model in prepared.models
    ]
    tokenizer = ThreadPoolExecutor(1).submit(prepared.start_tokenizer).result
    # All before any is loaded: a compilation needs the cores that a loaded model holds.
    graphs = [obtain(model, tokenizer, progress) for model in models]
    job = EngineJob(
        tuple(
            ModelJob(
                model.backend, _with_threads(model, compiled.plan, len(placed)), compiled.folder
            )
            for model, compiled in zip(models, graphs, strict=True)
        ),
        ngram_prompt_lookup_max=options.ngram_prompt_lookup_max or 1,
        decode_interleave=options.decode_interleave,
        max_join_wait_s=options.join_wait_s,
        native_sampling=options.native_sampling,
        sampling_threads=options.sampling_threads or _num_sampling_threads(len(placed)),
        worker=WorkerSettings(
            options.queue_timeout or options.predict_timeout,
            warm_up=not options.skip_warmup,
            num_adapters=len(prepared.adapters),
        ),
        logging=log_settings(),
    )
    return Launch(prepared, placed, graphs, job, tokenizer)


def _num_sampling_threads(num_copies: int) -> int:
    """A quarter of the host's cores, divided among the copies, at most 4: front and library have work, too."""
    return min(4, max(1, count_cores() // (4 * num_copies)))


def _with_threads(prepared: Prepared, plan: LoadPlan, num_copies: int) -> LoadPlan:
    """Return the plan of a copy: on a CPU the copies share the threads that one alone would take."""
    if not prepared.case.on_cpu or plan.num_threads is not None or num_copies == 1:
        return plan
    return replace(plan, num_threads=max(1, (count_cores() - 1) // num_copies))

"""What the cpu loader cannot do, and what its machine cannot hold."""

from __future__ import annotations

from collections.abc import Iterator

from djl_python_neuronx.config.findings import Finding, asked
from djl_python_neuronx.config.options import ServingOptions, option
from djl_python_neuronx.planning import memory
from djl_python_neuronx.planning.machines import GIB, DeviceInfo
from djl_python_neuronx.planning.memory import Load
from djl_python_neuronx.planning.model import ModelFacts

_MOST_THREADS_PER_CPU = 4
"""Some thousand threads exhaust the process's limit, and torch then crashes."""


def findings(
    options: ServingOptions, facts: ModelFacts, device: DeviceInfo, draft: ModelFacts | None = None
) -> Iterator[Finding]:
    """What is to be said of the cpu loader; `options` are filled in, `draft` the facts of the draft model."""
    yield from _useless(options)
    yield from _threads(options, device)
    yield from _memory(options, facts, device, draft)


def _useless(options: ServingOptions) -> Iterator[Finding]:
    left = tuple(
        name
        for name in ServingOptions.model_fields
        if option(name).to and not option(name).cpu and asked(options, name)
    )
    if options.tensor_parallel_degree == 1:
        # What a CPU is filled in with.
        left = tuple(name for name in left if name != "tensor_parallel_degree")
    if left:
        problem = (
            "of no use to the cpu loader, which compiles no graph and uses no NeuronCore; left out"
        )
        yield Finding(left, problem, "note")
    if options.enable_eagle_speculation:
        problem = (
            "the cpu loader runs no EAGLE model, whose drafts need the hidden states of the large one; leave it out, "
            "and give a draft model that drafts by itself"
        )
        yield Finding(("enable_eagle_speculation",), problem)


def _threads(options: ServingOptions, device: DeviceInfo) -> Iterator[Finding]:
    threads = options.cpu_threads or 0
    if threads > _MOST_THREADS_PER_CPU * device.cpus > 0:
        problem = f"there are {device.cpus} CPUs, and more threads only wait for each other; set at most that"
        yield Finding(("cpu_threads",), problem)


def _memory(
    options: ServingOptions, facts: ModelFacts, device: DeviceInfo, draft: ModelFacts | None
) -> Iterator[Finding]:
    """Whether the machine's memory suffices. A Neuron machine tells its devices' memory, not its own."""
    if facts.num_parameters is None or device.has_neuron or not device.memory_bytes:
        return
    load = Load.of(options, "cpu", draft)
    size = memory.needed(facts, load, degree=1, core_memory_bytes=device.memory_bytes, loader="cpu")
    if not size.fits:
        problem = (
            f"does not fit: needs {size.needed / GIB:.2f} GiB, and this machine has {size.capacity / GIB:.2f} GiB; set "
            "less, or take a machine with more memory"
        )
        yield Finding(("n_positions", "max_rolling_batch_size"), problem)

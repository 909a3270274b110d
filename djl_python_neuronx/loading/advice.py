"""Advice about a plan that is possible: sizes that are not known, memory of the host, timeouts of DJL Serving."""

from __future__ import annotations

import math
from collections.abc import Iterator

from djl_python_neuronx.config import djl_serving
from djl_python_neuronx.config.findings import Finding
from djl_python_neuronx.config.resolve import Resolved
from djl_python_neuronx.loading.prepared import Prepared
from djl_python_neuronx.planning import machines
from djl_python_neuronx.planning.machines import GIB


def advice(settings: Resolved, prepared: Prepared) -> Iterator[Finding]:
    """Yield what a check advises beyond the findings of a start. `settings`: as they are set."""
    yield from _size(prepared)
    yield from _one_core_each(settings, prepared)
    yield from _long_answers(prepared)


def _size(prepared: Prepared) -> Iterator[Finding]:
    """Warn of a model of unknown size."""
    unknown = prepared.case.on_cpu and prepared.case.model.num_parameters is None
    if unknown and not prepared.options.simulated:
        kind = prepared.case.model.model_type or "(config.json names none)"
        doubt = "only a load shows whether transformers supports it and what it needs"
        problem = f"the size of this model, of model_type {kind}, is not known here: {doubt}"
        yield Finding((), problem, "warning")


def _one_core_each(settings: Resolved, prepared: Prepared) -> Iterator[Finding]:
    """Warn that DJL Serving would start other processes than this plan's, because it reads no degree.

    Source: djl-serving d21927c, ModelInfo.java getLoadOnDevices, Connection.java.
    """
    degree = prepared.case.degree
    unset = settings.written_for_djl and settings.options.tensor_parallel_degree is None
    unset = unset and "tensor_parallel_degree" not in settings.refused
    if unset and not prepared.case.on_cpu and degree > 1:
        problem = (
            "option.tensor_parallel_degree is not set: DJL Serving would start a process for each NeuronCore, with "
            f"that core alone, instead of one with {degree}; write option.tensor_parallel_degree={degree}"
        )
        yield Finding(("tensor_parallel_degree",), problem, "warning")


def small_host(prepared: Prepared) -> Iterator[Finding]:
    """Warn that a load takes more host memory at its peak than the instance type has."""
    instance, taken = machines.known(prepared.machine.instance_type), prepared.host_bytes or 0
    if instance is not None and taken > instance.host_memory_gib * GIB:
        problem = (
            f"a load takes up to {taken / GIB:.1f} GiB of the host's memory, and {instance.name} has "
            f"{instance.host_memory_gib} GiB: the kernel may end it; add swap space, use a larger machine, or with "
            "NxD Inference serve what `djl-neuronx compile --weights presharded` has written on one"
        )
        yield Finding((), problem, "warning")


def _long_answers(prepared: Prepared) -> Iterator[Finding]:
    """Note that DJL Serving would wait too long for the longest answer, at the least time of a step with full slots.

    Nothing where that is not known, or for settings that are not DJL Serving's. Llama-2-70b with 8 slots of 8192 tokens
    on inf2.48xlarge: 22 ms, 33 to 35 ms measured by AWS with SDK 2.18.
    """
    options, memory, speed = (
        prepared.options,
        prepared.planned.memory,
        prepared.machine.core_bytes_per_s,
    )
    together = options.async_mode or options.rolling_batch in {"tnx", "vllm"}
    if not together or prepared.case.on_cpu or not speed or memory is None:
        return
    if prepared.case.model.num_experts > 1 or options.speculating or options.max_model_len is None:
        return  # a token reads a part of the weights, or a step gives several
    step_s = memory.read / speed
    answer_s = options.max_model_len * step_s
    timeout_s = djl_serving.chunked_read_timeout_s(prepared.environ)
    if answer_s > timeout_s:
        problem = (
            f"n_positions={options.max_model_len}: beside full slots the longest answer takes at least {answer_s:.0f} "
            f"s, {1000 * step_s:.1f} ms for each token, and AWS measured two to seven times that. DJL Serving waits "
            f"{timeout_s} s for the next bytes of an answer (chunked_read_timeout). A late JSON answer begins with "
            "blanks and status 200, and a later error is in its body. Set SERVING_CHUNKED_READ_TIMEOUT to "
            f"{2 * math.ceil(answer_s)}, request streams, or lower n_positions"
        )
        yield Finding(("n_positions",), problem, "note")

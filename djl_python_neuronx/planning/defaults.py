"""Default option values, derived from the model and the machine, and the options of a draft model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from math import lcm

from djl_python_neuronx.config.device_sampling import OnDeviceGeneration
from djl_python_neuronx.config.options import ServingOptions, option
from djl_python_neuronx.config.values import SMALLEST_BUCKET, make_buckets
from djl_python_neuronx.planning import memory
from djl_python_neuronx.planning.arguments import graph_lengths
from djl_python_neuronx.planning.case import Case, Filled
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.machines import legal_degrees

MAX_ROLLING_BATCH_SIZE = 32
"""DJL Serving sends at most this many rows by default, so fewer slots would leave rows waiting."""
_MOST_SLOTS = 128
"""Most slots that are tried one by one."""
MAX_POSITIONS = 4096
MAX_POSITIONS_CPU = 2048
DRAFT_ORIGIN = "as the model that it drafts for"
"""Origin of a draft model's options."""


def fill(case: Case) -> Filled:
    """Return a value for every option that is None, `auto` or `max` and follows from the model and the machine.

    In this order, each within the limits of those before: dtype, tensor_parallel_degree, n_positions,
    max_rolling_batch_size, context_length_estimate. If nothing fits in memory the values are the smallest, and
    `placement` reports an error. on_device_generation is limited to the vocabulary, which the libraries' graphs assume.
    """
    filled: Filled = {}
    options = case.options
    limited_by = "the model's limit"
    draft_limit = (case.draft and case.draft.max_positions) or sys.maxsize
    if draft_limit < (case.model.max_positions or sys.maxsize):
        # Both models read the same sequence.
        limited_by = f"the limit of the draft model ({options.speculative_draft_model})"
        case = replace(case, model=replace(case.model, max_positions=draft_limit))
    dtype, why = _dtype(case)
    if dtype != options.dtype:
        filled["dtype"] = dtype, why
    room = _Room(case.with_options(dtype=dtype))
    wanted = _wanted_positions(case, limited_by)
    degree = options.tensor_parallel_degree
    if not isinstance(degree, int):
        degree, why = _degree(room, wanted[0], largest=degree == "max")
        filled["tensor_parallel_degree"] = degree, why
    positions = options.max_model_len
    if positions is None:
        positions, why = _positions(room, degree, *wanted)
        filled["n_positions"] = positions, why
    slots = options.max_rolling_batch_size
    if slots is None:
        slots, why = _slots(room, degree, positions)
        filled["max_rolling_batch_size"] = slots, why
    if options.context_length_estimate is None and (buckets := _buckets(case, positions, slots)):
        filled["context_length_estimate"] = buckets
    filled.update(_of_library(case, positions, slots))
    if generation := _generation(case):
        filled["on_device_generation"] = generation
    return filled


class _Room:
    """The memory that lengths and slots are chosen for."""

    def __init__(self, case: Case) -> None:
        self.case = case

    @property
    def known(self) -> bool:
        """True if sizes of the model and the machine are known, and a model runs."""
        model, device = self.case.model, self.case.device
        if self.case.options.simulated:
            return False
        if self.case.on_cpu:
            return bool(self.case.host_memory and model.cache_values_per_token)
        return model.num_parameters is not None and device.core_memory_bytes > 0

    def on_core(self, degree: int, positions: int, slots: int) -> memory.CoreMemory:
        """Return the memory of one NeuronCore, whether there are as many or not; only if sizes are known."""
        found = memory.core_memory(
            self.case.with_options(
                tensor_parallel_degree=degree, n_positions=positions, max_rolling_batch_size=slots
            )
        )
        assert found is not None  # noqa: S101  (see `known`)
        return replace(found, possible=True)

    def fits(self, degree: int, positions: int, slots: int) -> bool:
        """Return whether it fits with memory to spare, or sizes are not known."""
        if not self.known:
            return True
        if self.case.on_cpu:
            return self._fits_on_host(positions, slots)
        return self.on_core(degree, positions, slots).roomy

    def unfit(self, degree: int, positions: int, slots: int) -> str:
        """Return what is wrong with sizes that do not fit with memory to spare, as a predicate."""
        if not self.case.on_cpu and self.on_core(degree, positions, slots).fits:
            return f"leaves less than 1/{memory.SPARE} of the memory free"
        return "does not fit in memory"

    def cost(self, degree: int, positions: int) -> tuple[bool, int, int]:
        """Return the order of preference: whether it cannot hold the model, what a step reads on each core, degree."""
        slots, least = self.case.options.max_rolling_batch_size, min(positions, SMALLEST_BUCKET)
        read = self.on_core(degree, positions, slots or MAX_ROLLING_BATCH_SIZE).read
        return not self.fits(degree, least, slots or 1), read, degree

    def slots_per_core(self, degree: int, positions: int) -> float:
        """Return how many slots of this length each core makes possible; only if sizes are known."""
        slots = self.case.options.max_rolling_batch_size or _slots(self, degree, positions)[0]
        return slots / degree if self.fits(degree, positions, slots) else 0.0

    def _fits_on_host(self, positions: int, slots: int) -> bool:
        """Return whether the cache takes at most half of the memory, and fits beside the weights."""
        case = self.case.with_options(n_positions=positions, max_rolling_batch_size=slots)
        left = case.host_memory - memory.weight_bytes(case) - memory.HEADROOM_BYTES
        return memory.cache_bytes(case) <= min(case.host_memory // 2, left)


def _dtype(case: Case) -> tuple[str, str]:
    asked, stored = case.options.dtype, case.model.dtype
    if case.on_cpu and asked == "float16":
        return "float32", "in which the cpu backend computes float16"
    if asked != "auto":
        return asked, ""
    # No float16 on a CPU, no float32 on a Neuron device.
    slow, instead = ("float16", "float32") if case.on_cpu else ("float32", "bfloat16")
    dtype = stored or "float32"
    dtype = instead if dtype == slow else dtype
    if dtype == stored:
        return dtype, "the checkpoint's"
    reason = f"the checkpoint's is {stored}" if stored else "the checkpoint does not say"
    if not case.on_cpu:
        return dtype, f"{reason}; float32 would take twice the memory"
    return dtype, f"{reason}; CPUs are slow at float16" if stored else reason


def _degree(room: _Room, positions: int, *, largest: bool) -> tuple[int, str]:
    """Return the documented degree with the shortest estimated decode step, of those that hold the model.

    The estimate is what a core reads (`CoreMemory.read`). With several models or copies it is the degree with the most
    slots per core, of equals the smallest. With the `largest`, or if sizes are not known, the largest.
    """
    case = room.case
    if case.on_cpu:
        return 1, "a CPU"
    family, cores = case.device.family, case.device.visible_cores // case.worlds
    legal = legal_degrees(family, cores)
    degrees = [degree for degree in legal if not case.indivisible(degree)]
    if not degrees:
        return 1, "no other cores are known"
    why = f"the largest documented for {family or 'any family'} within {cores} cores"
    if wanted := case.indivisible(legal[-1]):
        why += f" and that the library takes: {legal[-1]} is not {wanted}"
    chosen = degrees[-1]
    slots = {degree: room.slots_per_core(degree, positions) for degree in degrees if room.known}
    if case.shares_cores and not largest and any(slots.values()):
        chosen = max(slots, key=lambda degree: slots[degree])
        each = round(slots[chosen] * chosen)
        return chosen, (
            f"the most slots per core for several models or copies: {each} of {positions} tokens on {chosen}"
        )
    if not largest and room.known:
        chosen = min(degrees, key=lambda degree: room.cost(degree, positions))
        padded = f"{degrees[-1]} would pad the heads so much that each core reads more in a step"
        why = padded if chosen != degrees[-1] else f"the shortest estimated step, and {why}"
    if chosen < cores:
        why += f"; {cores - chosen} of {cores} cores are left over"
        used = set(legal_degrees(family, cores, used=True)).difference(legal)
        larger = [n for n in used if n > chosen and case.takes(n)]
        if larger:
            why += f"; guides use a larger degree: {max(larger)} is accepted with a note"
    return chosen, why


def _wanted_positions(case: Case, limited_by: str) -> tuple[int, str]:
    """Return the tokens per slot before memory is considered, and the reason."""
    options, model = case.options, case.model
    if options.max_model_len is not None:
        return options.max_model_len, ""
    cap = MAX_POSITIONS_CPU if case.on_cpu else MAX_POSITIONS
    limit = model.max_positions or cap
    prompt = _longest_prompt(options)
    if prompt > min(limit, cap):
        why = f"the longest of context_length_estimate, within {limited_by}"
        return min(prompt, model.max_positions or prompt), why
    if limit < cap:
        return limit, limited_by
    return cap, f"{limited_by}, but by default at most {cap}"


def _longest_prompt(options: ServingOptions) -> int:
    return (options.context_length_estimate or (0,))[-1]


def _positions(room: _Room, degree: int, wanted: int, why: str) -> tuple[int, str]:
    """Return the tokens per slot: halved until the requested slots, or one, fit."""
    slots = room.case.slots
    least = min(max(SMALLEST_BUCKET, _longest_prompt(room.case.options)), wanted)
    positions = wanted
    while positions > least and not room.fits(degree, positions, slots):
        positions = max(positions // 2, least)
    if not room.fits(degree, positions, slots):
        unfit = room.unfit(degree, positions, slots)
        return positions, f"the least, and even this {unfit} (wanted: {wanted})"
    if positions < wanted:
        plural = "slot" if slots == 1 else "slots"
        why = f"halved from {wanted} until {slots} {plural} fitted in memory"
    return positions, why


def _slots(room: _Room, degree: int, positions: int) -> tuple[int, str]:
    options = room.case.options
    if room.case.collected:
        return options.batch_size, "batch_size, which DJL Serving collects without a rolling batch"
    slots = MAX_ROLLING_BATCH_SIZE
    while slots > 1 and not room.fits(degree, positions, slots):
        slots //= 2
    if not room.fits(degree, positions, slots):
        unfit = room.unfit(degree, positions, slots)
        return slots, f"the least, and even one slot of {positions} tokens {unfit}"
    if slots < MAX_ROLLING_BATCH_SIZE:
        return slots, f"the largest power of two whose KV caches fit ({positions} tokens per slot)"
    if not (room.known or options.simulated):
        return slots, "the most that DJL Serving sends; whether it fits in memory is not known"
    return slots, "the most that DJL Serving sends"


def _of_library(case: Case, positions: int, slots: int) -> Filled:
    return {} if case.neuron is None else case.neuron.fill(case, positions, slots)


def _buckets(case: Case, positions: int, slots: int) -> tuple[tuple[int, ...], str] | None:
    if case.capability is not None and not case.capability.context_buckets:
        return None
    if case.options.enable_chunked_prefill:
        why = "tokens of a step: one for each slot, and with chunks of prompts beside them"
        return make_steps(slots, positions), why
    if not case.on_cpu and case.effective.cache_layout == "BSH":
        return (positions,), "cache_layout=BSH takes a single length"
    least = case.with_options(n_positions=positions).shortest_prompt_graph
    limit = " longer than a step with drafts" if case.lookahead else " from the sliding window"
    why = f"powers of two{limit * (least > 1)} up to n_positions"
    lengths = tuple(length for length in make_buckets(positions) if length >= least)
    return lengths or (positions,), why


def make_steps(num_slots: int, max_len: int) -> tuple[int, ...]:
    """Return the tokens of a step without chunks of prompts, and of one with them; at most `max_len`.

    128 tokens are what one pass of a NeuronCore's 128 x 128 array takes, and cost hardly more than reading the weights.
    The first is the power of two that holds a token of each slot, and 2 at least: a graph of one token is no prompt's.
    """
    alone = 1 << max(num_slots - 1, 1).bit_length()
    return tuple(sorted({min(alone, max_len), min(max(SMALLEST_BUCKET, 2 * alone), max_len)}))


def others(name: str, case: Case, *, largest: bool = False) -> Iterator[object]:
    """Yield other values for an option that the user left open, where a rule refuses its default; the best first.

    `largest`: the user wants the largest degree.
    """
    options, limit = case.options, case.options.max_model_len or 0
    match name:
        case "tensor_parallel_degree":
            degrees = legal_degrees(case.device.family, case.device.visible_cores)
            yield from degrees if case.shares_cores and not largest else reversed(degrees)
        case "max_rolling_batch_size":
            yield from range(case.slots - 1, 0, -1)
            yield from (*range(case.slots + 1, _MOST_SLOTS + 1), 2 * _MOST_SLOTS, 4 * _MOST_SLOTS)
        case "n_positions":
            prompt, most = _longest_prompt(options), case.model.max_positions or MAX_POSITIONS
            yield from (prompt, (prompt,)) if prompt else ()
            yield from filter(None, (case.code and case.code.row.most_tokens(case.model),))
            yield from ((limit,), min(2 * limit, most), most)
        case "context_length_estimate":
            prompts = options.context_length_estimate or ()
            unit = lcm(case.degree, options.windowed_context_encoding_size or 1)
            yield tuple(sorted({min(-(-n // unit), limit // unit) * unit for n in prompts}))
            yield from (prompts[:end] for end in range(len(prompts) - 1, 0, -1))
        case "speculative_length":
            yield from range(options.speculative_length - 1, 0, -1)
        case "rolling_batch_strategy":
            yield from ("continuous_batching", "naive_rolling_batch")
        case "cast_type" | "attn_kernel_enabled":
            yield "as-declared" if name == "cast_type" else False


def _generation(case: Case) -> tuple[OnDeviceGeneration, str] | None:
    """Return on-device sampling limited to the vocabulary; None if there is none or it is within the vocabulary."""
    sampled, tokens = case.options.on_device_generation, case.model.vocab_size
    if sampled is None or tokens is None or max(sampled.top_k, sampled.global_top_k or 0) <= tokens:
        return None
    candidates = sampled.global_top_k and min(sampled.global_top_k, tokens)
    changes = {"top_k": min(sampled.top_k, tokens), "global_top_k": candidates}
    return sampled.model_copy(update=changes), f"the vocabulary has only {tokens} tokens"


def draft_settings(options: ServingOptions, backend: str, model: str) -> dict[str, str]:
    """Return the options of a draft model, as text, from the filled-in options of the model it drafts for.

    Options that do not concern it (sampling on the device, layouts, quantisation) are left out. Known defects are
    accepted: a wrong draft costs time and changes no text.
    """
    slots = options.max_rolling_batch_size
    prompts, lengths = graph_lengths(options)
    fields = ServingOptions.model_fields
    same = {name: getattr(options, name) for name in fields if option(name).draft == "same"}
    wanted = {
        **same,
        "model_id": model,
        "model_loader": backend,
        "tensor_parallel_degree": options.draft_model_tp_size or options.tensor_parallel_degree,
        "n_positions": ",".join(map(str, lengths)),
        "context_length_estimate": ",".join(map(str, prompts)),
        "allow_known_defects": True,
        "compiled_graph_path": options.place("draft_model_compiled_path")
        or options.place("compiled_graph_path"),
        # Even with a single slot it is driven as the large model is, whose slots have their own positions.
        "rolling_batch_strategy": (
            "continuous_batching" if backend in NEURON_BACKENDS and slots == 1 else None
        ),
    }
    return {name: str(value) for name, value in wanted.items() if value is not None}


def as_draft_model(options: ServingOptions) -> ServingOptions:
    """Return a folder's options with those reset that a draft model is served without."""
    fields = ServingOptions.model_fields
    off = {name: entry.default for name, entry in fields.items() if option(name).draft == "off"}
    return options.model_copy(update=off)

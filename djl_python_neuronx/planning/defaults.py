"""Values for options that nobody set: pure functions of the model's and the machine's facts."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from djl_python_neuronx.config.options import OnDeviceGeneration, ServingOptions
from djl_python_neuronx.planning import division, memory
from djl_python_neuronx.planning.capabilities import capability_of
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.intent import honoured
from djl_python_neuronx.planning.machines import DeviceInfo, legal_degrees
from djl_python_neuronx.planning.memory import CoreMemory, Load
from djl_python_neuronx.planning.model import ModelFacts

MAX_ROLLING_BATCH_SIZE = 32
"""DJL Serving sends at most this many rows unless it is told another number, so fewer slots would lock rows out."""
MAX_POSITIONS = 4096
MAX_POSITIONS_CPU = 2048
SMALLEST_BUCKET = 128
MOST_BLOCKS = 256
"""transformers-neuronx unrolls a loop over all blocks: 48 instructions for each, where a layer has 154 (seen, tp 1).
Large blocks cost little, for none is shared: the last of a sequence lies half empty, and is read all the same."""

Filled = dict[str, tuple[object, str]]
"""Option name to its value and the reason for it."""


def fill(case: Case) -> Filled:
    """A value for every option that is still None, `auto` or `max` and follows from facts.

    In this order, each within what the ones before leave: dtype, tensor_parallel_degree, n_positions,
    max_rolling_batch_size, context_length_estimate. Where nothing fits they are the smallest; `suitability` says so.
    What the device chooses among is no more than the vocabulary, which the libraries' graphs take for granted.
    """
    filled: Filled = {}
    options, facts, device, loader, draft = (
        case.options,
        case.model,
        case.device,
        case.backend,
        case.draft,
    )
    whose = "the model's limit"
    if draft and draft.max_positions and draft.max_positions < (facts.max_positions or sys.maxsize):
        # Both models read the same sequence.
        whose = f"the limit of the draft model ({options.speculative_draft_model})"
        facts = replace(facts, max_positions=draft.max_positions)
    dtype, why = _dtype(options, facts, loader)
    if dtype != options.dtype:
        filled["dtype"] = dtype, why
    room = _Room.of(options, facts, device, loader, dtype, draft)
    wanted = _wanted_positions(options, facts, loader, whose)
    degree = options.tensor_parallel_degree
    if not isinstance(degree, int):
        degree, why = _degree(degree == "max", room, wanted[0])
        filled["tensor_parallel_degree"] = degree, why
    positions = options.max_model_len
    if positions is None:
        positions, why = _positions(options, room, degree, *wanted)
        filled["n_positions"] = positions, why
    slots = options.max_rolling_batch_size
    if slots is None:
        slots, why = _slots(options, room, degree, positions)
        filled["max_rolling_batch_size"] = slots, why
    if options.context_length_estimate is None and (
        buckets := _buckets(options, facts, loader, positions, slots)
    ):
        filled["context_length_estimate"] = buckets
    filled.update(_blocks(options, facts, loader, positions, slots))
    if generation := _generation(options, facts):
        filled["on_device_generation"] = generation
    return filled


@dataclass(frozen=True)
class _Room:
    """What is there to be filled, and with what."""

    facts: ModelFacts
    device: DeviceInfo
    loader: str
    load: Load
    """Everything but lengths and slots, which are tried."""

    @classmethod
    def of(
        cls,
        options: ServingOptions,
        facts: ModelFacts,
        device: DeviceInfo,
        loader: str,
        dtype: str,
        draft: ModelFacts | None,
    ) -> _Room:
        known = {"dtype": dtype, "n_positions": 1, "max_rolling_batch_size": 1}
        capability = capability_of(loader, facts.model_type)
        options = honoured(options.model_copy(update=known), capability)
        return cls(facts, device, loader, Load.of(options, loader, draft))

    @property
    def judged(self) -> bool:
        """Whether model and machine tell enough to say what fits."""
        facts, device = self.facts, self.device
        if self.loader == "cpu":
            return not device.has_neuron and bool(
                device.memory_bytes and facts.cache_values_per_token
            )
        return facts.num_parameters is not None and device.core_memory_bytes > 0

    def on_core(self, degree: int, positions: int, slots: int) -> CoreMemory:
        """Memory of one Neuron core; only where it is judged."""
        return memory.needed(
            self.facts,
            replace(self.load, max_model_len=positions, num_slots=slots),
            degree=degree,
            core_memory_bytes=self.device.core_memory_bytes,
            loader=self.loader,
        )

    def fits(self, degree: int, positions: int, slots: int) -> bool:
        """Whether there is memory to spare for it, or nothing that tells."""
        if not self.judged:
            return True
        if self.loader == "cpu":
            return self._fits_on_host(positions, slots)
        return self.on_core(degree, positions, slots).roomy

    def _fits_on_host(self, positions: int, slots: int) -> bool:
        """The cache within half of the memory and within what the weights leave of it."""
        load = replace(self.load, max_model_len=positions, num_slots=slots)
        host = self.device.memory_bytes
        left = host - memory.weight_bytes(self.facts, load) - memory.HEADROOM_BYTES
        return memory.cache_bytes(self.facts, load) <= min(host // 2, left)


def _dtype(options: ServingOptions, facts: ModelFacts, loader: str) -> tuple[str, str]:
    if loader == "cpu" and options.dtype == "float16":
        return "float32", "what the cpu loader computes float16 in"
    if options.dtype != "auto":
        return options.dtype, ""
    dtype = dtype_of(facts, loader)
    if dtype == facts.dtype:
        return dtype, "the checkpoint's"
    stored = f"the checkpoint's is {facts.dtype}" if facts.dtype else "the checkpoint does not say"
    if loader != "cpu":
        return dtype, f"{stored}; float32 would take twice the memory"
    return dtype, f"{stored}; CPUs are slow at float16" if facts.dtype else stored


def _degree(most: bool, room: _Room, positions: int) -> tuple[int, str]:
    """The largest documented degree that the library takes; unasked, only if no smaller one needs less memory."""
    if room.loader == "cpu":
        return 1, "a CPU"
    cores = room.device.visible_cores // (room.load.stages * room.load.expert_groups)
    legal = legal_degrees(room.device.family, cores)
    degrees = [degree for degree in legal if division.takes(room.facts, degree, room.loader)]
    if not degrees:
        return 1, "no more cores are known of"
    why = f"the largest that {room.device.family or 'any family'} documents within {cores} cores"
    if what := division.undivided(room.facts, legal[-1], room.loader):
        why += f" and that the library takes: {legal[-1]} does not divide {what}"
    chosen = degrees[-1]
    if not most and room.judged:
        slots = MAX_ROLLING_BATCH_SIZE
        chosen = min(
            degrees, key=lambda degree: (room.on_core(degree, positions, slots).needed, -degree)
        )
        if chosen != degrees[-1]:
            why = f"{degrees[-1]} would pad the heads so much that each core needs more memory"
    if chosen < cores:
        why += f"; {cores - chosen} of {cores} cores are left over"
        unofficial = [
            degree
            for degree in legal_degrees(room.device.family, cores, used=True)
            if degree > chosen
            and degree not in legal
            and division.takes(room.facts, degree, room.loader)
        ]
        if unofficial:
            why += f", of which guides use more: {unofficial[-1]} is taken with a note"
    return chosen, why


def _wanted_positions(
    options: ServingOptions, facts: ModelFacts, loader: str, whose: str
) -> tuple[int, str]:
    """Tokens per slot before memory is looked at; `whose` says whose limit `facts` have."""
    if options.max_model_len is not None:
        return options.max_model_len, ""
    cap = MAX_POSITIONS_CPU if loader == "cpu" else MAX_POSITIONS
    limit = facts.max_positions or cap
    prompt = (options.context_length_estimate or (0,))[-1]
    if prompt > min(limit, cap):
        why = f"what context_length_estimate asks for, within {whose}"
        return min(prompt, facts.max_positions or prompt), why
    if limit < cap:
        return limit, whose
    return cap, f"{whose}, but unasked at most {cap}"


def _positions(
    options: ServingOptions, room: _Room, degree: int, wanted: int, why: str
) -> tuple[int, str]:
    """Tokens per slot: halved until the slots that were asked for, or one, fit."""
    slots = options.max_rolling_batch_size or 1
    prompt = (options.context_length_estimate or (0,))[-1]
    least = min(max(SMALLEST_BUCKET, prompt), wanted)
    positions = wanted
    while positions > least and not room.fits(degree, positions, slots):
        positions = max(positions // 2, least)
    if not room.fits(degree, positions, slots):
        return (
            positions,
            f"the least, for which there is not enough memory either (wanted: {wanted})",
        )
    if positions < wanted:
        why = f"halved from {wanted} until {_count(slots, 'slot')} had room in memory"
    return positions, why


def _slots(options: ServingOptions, room: _Room, degree: int, positions: int) -> tuple[int, str]:
    if options.rolling_batch == "disable" and not options.async_mode and options.batch_size > 1:
        return options.batch_size, "batch_size, which DJL Serving collects without a rolling batch"
    slots = MAX_ROLLING_BATCH_SIZE
    while slots > 1 and not room.fits(degree, positions, slots):
        slots //= 2
    if not room.fits(degree, positions, slots):
        return (
            slots,
            f"the least, and there is no memory for the {positions} tokens of even one slot",
        )
    if slots < MAX_ROLLING_BATCH_SIZE:
        return slots, f"the most, doubling from 1, whose caches of {positions} tokens have room"
    if not room.judged:
        return slots, "what DJL Serving sends at most; nothing tells whether memory suffices"
    return slots, "what DJL Serving sends at most"


def _buckets(
    options: ServingOptions, facts: ModelFacts, loader: str, positions: int, slots: int
) -> tuple[tuple[int, ...], str] | None:
    capability = capability_of(loader, facts.model_type)
    if capability is not None and not capability.context_buckets:
        return None
    if options.enable_chunked_prefill:
        why = "tokens of a step: room for one of each slot, and for chunks of prompts beside them"
        return make_steps(slots, positions), why
    if loader == "tnx" and options.cache_layout == "BSH":
        return (positions,), "cache_layout=BSH takes a single length"
    return make_buckets(positions), "powers of two up to n_positions"


def _blocks(
    options: ServingOptions, facts: ModelFacts, loader: str, positions: int, slots: int
) -> Filled:
    """Layout and size of the blocks of a cache, where transformers-neuronx encodes prompts in chunks."""
    filled: Filled = {}
    capability = capability_of(loader, facts.model_type)
    if loader != "tnx" or not honoured(options, capability).enable_chunked_prefill:
        return filled
    if options.cache_layout is None:
        filled["cache_layout"] = "BSH", "how blocks of the KV cache are laid out"
    if options.pa_block_size is None:
        size, below = SMALLEST_BUCKET, 1 << (max(positions - 1, 1).bit_length() - 1)
        while size * MOST_BLOCKS < positions * slots:
            size *= 2
        why = f"a power of two below n_positions, from {SMALLEST_BUCKET} on, for at most {MOST_BLOCKS} blocks"
        filled["pa_block_size"] = min(size, below), why
    return filled


def make_buckets(max_len: int, smallest: int = SMALLEST_BUCKET) -> tuple[int, ...]:
    """Doubling lengths from `smallest`, ending with `max_len` itself.

    At most half of a padded row is padding, for six graphs up to 4096 and one more for each doubling. Steps of four
    would save two graphs, some minutes of compiling once, and let a row be three quarters padding at every request;
    below `smallest` a prompt costs what reading the weights costs, however short it is.

    Raises:
        ValueError: a length is not positive.
    """
    if max_len < 1 or smallest < 1:
        message = f"buckets from {smallest} to {max_len} do not exist; expected positive lengths"
        raise ValueError(message)
    doubling = (smallest << power for power in range(max_len.bit_length()))
    return (*(length for length in doubling if length < max_len), max_len)


def make_steps(num_slots: int, max_len: int) -> tuple[int, ...]:
    """Tokens of a step without chunks of prompts, and of one with them; at most `max_len`.

    128 tokens are what one pass of a NeuronCore's 128 x 128 array takes, and cost hardly more than reading the weights.
    The first is the power of two that holds a token of each slot, and 2 at least: a graph of one token is no prompt's.
    """
    alone = 1 << max(num_slots - 1, 1).bit_length()
    return tuple(sorted({min(alone, max_len), min(max(SMALLEST_BUCKET, 2 * alone), max_len)}))


def dtype_of(facts: ModelFacts, loader: str) -> str:
    """What `auto` computes in: the checkpoint's type, but no float16 on a CPU and no float32 on a Neuron device."""
    dtype = facts.dtype or "float32"
    if loader == "cpu":
        return "float32" if dtype == "float16" else dtype
    return "bfloat16" if dtype == "float32" else dtype


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _generation(
    options: ServingOptions, facts: ModelFacts
) -> tuple[OnDeviceGeneration, str] | None:
    """Sampling on the device with no more candidates than there are tokens; None: it has none."""
    sampled, tokens = options.on_device_generation, facts.vocab_size
    if sampled is None or tokens is None or max(sampled.top_k, sampled.global_top_k or 0) <= tokens:
        return None
    candidates = sampled.global_top_k and min(sampled.global_top_k, tokens)
    changes = {"top_k": min(sampled.top_k, tokens), "global_top_k": candidates}
    return sampled.model_copy(update=changes), f"the vocabulary has {tokens} tokens and no more"

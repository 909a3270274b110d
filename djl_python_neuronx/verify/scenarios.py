"""The scenarios of a verification: lengths, slots, rows, joins, sampling."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain
from typing import Any

from djl_python_neuronx.backends.base import Backend, Want
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.limits import check, longest_prompt, sampled_on_host
from djl_python_neuronx.errors import BackendError, UnsupportedParameterError
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.types import GenerationRequest
from djl_python_neuronx.verify.drive import GREEDY, Driver
from djl_python_neuronx.verify.record import Draws, Finding, Record, Seen

logger = logging.getLogger(__name__)

_SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 8},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.8},
)
"""Sampling parameters whose distributions are tested, unless some are compiled into the graphs."""
_DRAWS, _FEW_DRAWS = 256, 100
_DEEP, _SHALLOW = 64, (1, 2, 3, 5)
"""Tokens of prompts in slots that are used again, and of the others and the next ones."""
_FAR = 64
"""Decode steps up to the end of a graph, of which --quick leaves out more."""
_EVERY = 64
"""Of a long run of decode steps, one in so many is compared."""
_NEW, _MOST_REQUESTS = 4, 16
"""Tokens of a request that the engine runs greedily, and most of these requests."""


def run_scenarios(backend: Backend, *, quick: bool = False) -> Record:
    """Run every scenario on a backend with empty slots. A step that fails ends its scenario, and is recorded.

    If the backend is lost, it is the last one.
    """
    driver = Driver(backend, quick=quick)
    for scenario in (_prompts, _lengths, _slots, _together, _prefix, _columns, _draws, _requests):
        driver.scenario = scenario.__name__.strip("_")
        logger.info("verifying scenario=%s", driver.scenario)
        try:
            scenario(driver)
        except BackendError as error:
            logger.warning("step_failed scenario=%s", driver.scenario, exc_info=True)
            rows = [
                (row.slots.tolist(), row.starts.tolist(), row.lens.tolist())
                for _, row in driver.step.parts
            ]
            # Of the error its class alone: its message may hold paths.
            problem = f"{type(error).__name__}; the last step had slots, starts and tokens {rows}"
            driver.record.failures.append(Finding(f"scenario {driver.scenario}", problem))
            if error.fatal:
                driver.record.left_out.append(f"what follows {driver.scenario}: the device is lost")
                break
        driver.leave(*driver.live)
    if driver.spec.num_adapters:
        driver.record.left_out.append("LoRA adapters")
    return driver.record


def most_outputs(plan: LoadPlan, widths: int) -> int:
    """Return an upper bound of the outputs recorded. `widths`: numbers of slots that decode graphs exist for."""
    graphs = len(plan.prefill_buckets) + widths * max(1, len(plan.token_buckets))
    far = widths * plan.max_model_len // _EVERY
    return 20 * plan.num_slots + 20 * graphs + far + 3 * _DEEP


def _prompts(driver: Driver) -> None:
    """Prompts at both ends of each prefill graph, in one slot after another, beside one that decodes."""
    spec, longest = driver.spec, longest_prompt(driver.spec)
    edges = {bucket + more for bucket in spec.prefill_buckets for more in (-1, 0, 1)}
    beside = 1 if spec.num_slots > 1 and not spec.mixed_steps else 0
    for i, length in enumerate(sorted({1, longest, *(n for n in edges if 0 < n < longest)})):
        if beside and not driver.live:
            driver.join({0: (1, min(3, longest))})
        slot = beside + i % (spec.num_slots - beside)
        driver.join({slot: (0, length)})
        driver.decode()
        driver.decode()
        driver.leave(*({slot} & driver.live.keys()))


def _lengths(driver: Driver) -> None:
    """The ends of each decode graph, up to the last position of a slot."""
    spec, longest = driver.spec, longest_prompt(driver.spec)
    for count in spec.decode_slots or (spec.num_slots,):
        filled = 0
        for end in spec.token_buckets or (spec.max_model_len,):
            first = max(1, min(longest, end - 2))
            if filled < first:
                driver.leave(*driver.live)
                driver.join({count - 1: (0, first)})
                filled = first
            if driver.quick and end - filled > _FAR:
                driver.record.left_out.append(f"ends of decode graphs from {end} tokens on (quick)")
                break
            while filled < min(end + 1, spec.max_model_len):
                driver.decode(keep=filled >= end - 2 or filled < first + 2 or filled % _EVERY == 0)
                filled += 1
        driver.leave(*driver.live)


def _slots(driver: Driver) -> None:
    """All slots join one after another, so that each number of rows decodes; every second one is used again.

    It gets a shorter text, of which no other slot has any, while the others decode.
    """
    count = driver.spec.num_slots
    longest = max(1, min(longest_prompt(driver.spec), driver.spec.max_model_len - 2 * count - 4))
    lengths = [min(longest, length) for length in _SHALLOW]
    for slot in range(count):
        deep = min(longest, _DEEP)
        driver.join({slot: (slot + 1, lengths[slot // 2 % len(lengths)] if slot % 2 else deep)})
        driver.decode()
    again = [slot for slot in range(0, count, 2) if slot in driver.live]
    texts = [count + 1, *(slot + 1 for slot in again)]
    driver.leave(*again)
    driver.decode()
    for i, slot in enumerate(again):
        driver.join({slot: (texts[i], lengths[i % len(lengths)])})
        driver.decode()
    driver.leave(*driver.live)
    driver.join({count - 1: (1, lengths[-1])})  # alone in the last slot
    driver.decode()


def _together(driver: Driver) -> None:
    """Prompts of different lengths in one call."""
    spec, longest = driver.spec, longest_prompt(driver.spec)
    if spec.max_prefill_batch > 1 and not spec.mixed_steps:
        lengths = [min(longest, length) for length in (*_SHALLOW, _DEEP)]
        slots = range(min(spec.num_slots, spec.max_prefill_batch))
        driver.join({slot: (slot + 1, lengths[slot % len(lengths)]) for slot in slots})
        driver.decode()


def _prefix(driver: Driver) -> None:
    """A prompt whose first half is in the cache, of the same slot or of another one."""
    spec, texts = driver.spec, driver.record.texts
    length = min(longest_prompt(spec), max(2 * spec.prefix_block, 24), spec.max_model_len - 4)
    if spec.prefix_block and length > 1:
        texts.append([*texts[1][: -(-length // 2)], *texts[2][-(-length // 2) :]])
        driver.join({0: (1, length)}, salt="prefix")
        driver.decode()
        if spec.num_slots == 1:
            driver.leave(0)
        driver.join({spec.num_slots - 1: (len(texts) - 1, length)}, salt="prefix")
        driver.decode()


def _columns(driver: Driver) -> None:
    """Steps that give the logits of every column: prompts that are scored, drafts that are verified."""
    spec = driver.spec
    if length := min(spec.score_columns, longest_prompt(spec), _DEEP):
        driver.join({0: (1, length)}, Want.ALL_LOGITS)
        driver.leave(0)
    if spec.num_speculative_tokens:
        for slot in range(min(spec.num_slots, 2)):
            driver.join({slot: (slot + 1, slot + 1)})
        for _ in range(2):
            driver.decode(width=spec.num_speculative_tokens + 1, wants=Want.ALL_LOGITS)
        driver.record.left_out.append("the draft model, whose tokens change no answer")


def _draws(driver: Driver) -> None:
    """One prompt again and again, with each of some sampling parameters, through the engine."""
    spec, record, settings = driver.spec, driver.record, _SETTINGS
    length = min(3, longest_prompt(spec))
    driver.join({0: (1, length)})
    driver.leave(0)
    seen, prompt = record.seen[-1], record.texts[1][:length]
    if spec.fixed_sampling is not None and spec.fixed_sampling != GREEDY:
        names = ("top_k", "top_p", "temperature")
        compiled = dict(zip(names, spec.fixed_sampling, strict=True))
        settings = (*settings, {**compiled, "top_k": int(compiled["top_k"])})
    for given in settings:
        sampling = SamplingParams(**given)
        requests = [
            GenerationRequest(str(n), prompt, sampling, max_new_tokens=1, ignore_eos=True, seed=n)
            for n in range(_FEW_DRAWS if driver.quick else _DRAWS)
        ]
        if found := _generate(driver, requests, f"draws with {given}"):
            place = "host" if sampled_on_host(requests[0], spec) else "device"
            record.draws.append(Draws(given, place, list(chain(*found.values())), seen))


def _requests(driver: Driver) -> None:
    """More greedy requests than slots, through the engine; the texts with its tokens are judged afterwards."""
    spec, record = driver.spec, driver.record
    room = min(longest_prompt(spec), spec.max_model_len - _NEW)
    requests = [
        GenerationRequest(
            str(i),
            record.texts[i % (spec.num_slots + 2)][: min(room, 1 + 3 * i)],
            max_new_tokens=_NEW,
        )
        for i in range(min(2 * spec.num_slots, _MOST_REQUESTS) if room > 0 else 0)
    ]
    prompts = {request.request_id: request.prompt_ids for request in requests}
    for name, tokens in _generate(driver, requests, "greedy requests").items():
        record.texts.append([*prompts[name], *tokens])
        for position, token in enumerate(tokens, len(prompts[name]) - 1):
            seen = Seen(driver.scenario, None, -1, -1, len(record.texts) - 1, position, token=token)
            record.seen.append(seen)
            if not 0 <= token < spec.vocab_size:
                break  # nothing has a meaning behind it


def _generate(
    driver: Driver, requests: Sequence[GenerationRequest], name: str
) -> dict[str, list[int]]:
    """Return the tokens of each request; of none if the model refuses their parameters.

    Raises:
        ServingError: one failed.
    """
    engine, found = Engine(driver.backend), dict[str, list[int]]()
    for request in requests:
        try:
            check(request, driver.spec)
        except UnsupportedParameterError:
            driver.record.left_out.append(f"{name}, which this model refuses")
            return {}
        engine.add(request)
    while engine.has_work:
        for output in engine.step().outputs:
            if output.error is not None:
                raise output.error
            found.setdefault(output.request_id, []).extend(output.token_ids)
    if engine.dead is not None:
        raise engine.dead
    return found

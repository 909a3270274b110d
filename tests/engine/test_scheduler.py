"""Who runs next: order, caps, slots."""

from __future__ import annotations

from dataclasses import replace

import pytest

from djl_python_neuronx.engine.scheduler import ScheduledDecode, ScheduledPrefill, Scheduler
from djl_python_neuronx.engine.sequence import Sequence
from djl_python_neuronx.engine.slots import SlotPool
from djl_python_neuronx.types import GenerationRequest
from tests.toy_backend import TOY_SPEC


def sequence(name: str, prompt_len: int) -> Sequence:
    request = GenerationRequest(name, [1] * prompt_len)
    return Sequence(request, max_model_len=128, eos_ids=frozenset(), seed=0)


def names(scheduled: ScheduledPrefill | ScheduledDecode | None) -> list[str]:
    assert scheduled is not None
    return [s.request_id for s in scheduled.sequences]


def test_slots_are_lowest_first_and_never_held_twice() -> None:
    pool = SlotPool(3)
    assert [pool.take(), pool.take()] == [0, 1]
    pool.give_back(0)
    assert pool.take() == 0
    assert (pool.num_free, pool.num_taken) == (1, 2)
    pool.give_back(1)
    with pytest.raises(KeyError):
        pool.give_back(1)


def test_first_come_first_served_one_prefill_at_a_time() -> None:
    scheduler = Scheduler(TOY_SPEC)
    for name in "abc":
        scheduler.add(sequence(name, 4))
    assert names(scheduler.schedule()) == ["a"]
    decode = scheduler.schedule()
    assert isinstance(decode, ScheduledDecode)
    assert names(decode) == ["a"]
    assert names(scheduler.schedule()) == ["b"]
    assert names(scheduler.schedule()) == ["a", "b"]


@pytest.mark.parametrize("interleave", [1, 2, 5])
def test_running_streams_get_their_decodes_between_prefills(interleave: int) -> None:
    scheduler = Scheduler(replace(TOY_SPEC, num_slots=16), decode_interleave=interleave)
    for i in range(6):
        scheduler.add(sequence(str(i), 4))
    kinds = "".join(
        "P" if isinstance(scheduler.schedule(), ScheduledPrefill) else "d" for _ in range(20)
    )
    assert kinds.startswith(("P" + "d" * interleave) * 3)


def test_prompts_of_one_bucket_share_a_call() -> None:
    scheduler = Scheduler(replace(TOY_SPEC, num_slots=8, max_prefill_batch=4))
    for name, length in (("a", 5), ("b", 20), ("c", 8), ("d", 7)):
        scheduler.add(sequence(name, length))
    prefill = scheduler.schedule()
    assert isinstance(prefill, ScheduledPrefill)
    assert names(prefill) == ["a", "c", "d"]
    assert [s.slot for s in prefill.sequences] == [0, 1, 2]


def test_nobody_loses_a_slot_to_those_behind() -> None:
    scheduler = Scheduler(replace(TOY_SPEC, num_slots=2, max_prefill_batch=4))
    for name, length in (("a", 5), ("b", 20), ("c", 5)):
        scheduler.add(sequence(name, length))
    assert names(scheduler.schedule()) == ["a"]
    scheduler.schedule()
    assert names(scheduler.schedule()) == ["b"]


def test_rows_ascend_by_slot_and_the_list_changes_with_the_batch() -> None:
    scheduler = Scheduler(TOY_SPEC)
    sequences = [sequence(name, 4) for name in "abc"]
    for s in sequences:
        scheduler.add(s)
    for _ in range(6):
        scheduler.schedule()
    before = scheduler.running
    scheduler.remove(sequences[0])
    assert scheduler.running is not before
    late = sequence("d", 4)
    scheduler.add(late)
    scheduler.schedule()
    assert late.slot == 0
    assert [s.slot for s in scheduler.running] == [0, 1, 2]
    assert names(scheduler.schedule()) == ["d", "b", "c"]


def test_removing_a_waiting_sequence_frees_nothing() -> None:
    scheduler = Scheduler(TOY_SPEC)
    waiting = sequence("a", 4)
    scheduler.add(waiting)
    scheduler.remove(waiting)
    assert scheduler.schedule() is None
    assert scheduler.slots.num_free == TOY_SPEC.num_slots

"""Who runs next: order, caps, slots."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from djl_python_neuronx.engine.scheduler import (
    Batch,
    ChunkScheduler,
    Scheduler,
    SlotPool,
    WaitingQueue,
)
from djl_python_neuronx.engine.sequence import Sequence
from djl_python_neuronx.types import GenerationRequest
from tests.doubles.toy_backend import TOY_SPEC
from tests.effort import examples


def sequence(name: str, prompt_len: int, arrived_s: float = 0.0, **fields: object) -> Sequence:
    request = GenerationRequest(name, [1] * prompt_len, **fields)  # type: ignore[arg-type]
    spec = replace(TOY_SPEC, max_model_len=128, eos_ids=frozenset())
    return Sequence(request, spec, arrived_s=arrived_s)


class Gathering:
    """A scheduler of static batches and the clock that it goes by."""

    def __init__(self, num_slots: int, max_join_wait_s: float, interleave: int = 1) -> None:
        self.now_s = 100.0
        spec = replace(
            TOY_SPEC, num_slots=num_slots, max_prefill_batch=num_slots, joins="reprefill"
        )
        self.scheduler = Scheduler(
            spec,
            decode_interleave=interleave,
            max_join_wait_s=max_join_wait_s,
            clock=lambda: self.now_s,
        )

    def add(self, name: str, prompt_len: int = 4) -> None:
        self.scheduler.add(sequence(name, prompt_len, self.now_s))

    def next(self) -> tuple[str, list[str]]:
        batch = run(self.scheduler)
        assert batch
        return "prefill" if batch.chunks else "decode", names(batch)


def run(scheduler: Scheduler) -> Batch:
    """One device call."""
    batch = scheduler.schedule()
    assert not batch.chunks or not batch.decoding
    assert batch.entering == [chunk.sequence for chunk in batch.chunks if chunk.is_last]
    scheduler.advance(batch)
    return batch


def names(batch: Batch) -> list[str]:
    return [s.request_id for s in batch.sequences]


@pytest.mark.parametrize("running", [False, True])
def test_prompts_enter_between_the_chunks_of_one_that_is_scored(running: bool) -> None:
    spec = replace(TOY_SPEC, eos_ids=frozenset(), score_columns=4)

    def scored(name: str, count: int) -> Sequence:
        return Sequence(GenerationRequest(name, [1] * count, scores_prompt=0), spec, arrived_s=0.0)

    scheduler, ran = Scheduler(spec), list[str]()
    if running:
        scheduler.add(sequence("r", 3))
        run(scheduler)
    scheduler.add(scored("a", 18))
    for name, one in {"b": sequence("b", 3), "c": scored("c", 9)}.items():
        scheduler.add(one)
        assert one.request_id == name
    while scheduler.waiting or scheduler._entered:
        batch = scheduler.schedule()
        assert len(batch.chunks) <= 1
        scheduler.advance(batch)
        ran += names(batch) if batch.chunks else []
    # Then nothing waits. A prompt that is scored has its slot until its end.
    assert ran == ["a", "a", "b", "a", "c", "a", "a", "c", "c"]


def test_free_slots_ascend_and_none_is_held_twice() -> None:
    pool = SlotPool(3)
    pool.take(0)
    pool.take(1)
    pool.give_back(0)
    assert pool.free == [0, 2]
    with pytest.raises(ValueError, match="not in list"):
        pool.take(1)
    pool.take(0)
    assert (pool.num_free, pool.num_taken) == (1, 2)
    pool.give_back(1)
    with pytest.raises(KeyError):
        pool.give_back(1)


def test_first_come_first_served_one_prefill_at_a_time() -> None:
    scheduler = Scheduler(TOY_SPEC)
    for name in "abc":
        scheduler.add(sequence(name, 4))
    assert names(run(scheduler)) == ["a"]
    decode = run(scheduler)
    assert not decode.chunks
    assert names(decode) == ["a"]
    assert names(run(scheduler)) == ["b"]
    assert names(run(scheduler)) == ["a", "b"]


def owners(one: Sequence) -> tuple[tuple[int | str, ...], ...]:
    """Those who take turns over a sequence: its client, and its request."""
    of_client = (one.request.priority, one.request.client)
    return of_client, (*of_client, one.request.group)


def turns(waiting: list[Sequence], since: dict[tuple[int | str, ...], int]) -> list[Sequence]:
    """The order of slots: each goes to the lowest priority, then to the client, then to the request that came, or had
    its last turn, longest ago (`since`)."""
    left, since, order = waiting.copy(), since.copy(), list[Sequence]()
    while left:
        order.append(
            min(left, key=lambda one: (one.request.priority, *map(since.get, owners(one))))
        )
        left.remove(order[-1])
        since.update(dict.fromkeys(owners(order[-1]), 1000 + len(order)))
    return order


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_clients_and_requests_take_turns_over_their_sequences(data: st.DataObject) -> None:
    """A sequence that leaves without a slot takes nobody's turn."""
    queue, waiting, since = WaitingQueue(), list[Sequence](), dict[tuple[int | str, ...], int]()
    for i in range(30):
        action = data.draw(st.sampled_from(["add", "add", "take", "remove"]), "action")
        if action == "add":
            name = data.draw(st.sampled_from("abcdef"), "request")
            one = sequence(
                f"{name}.{i}", 4, client="x" if name in "ab" else "", priority=int(name in "ef")
            )
            queue.add(one)
            waiting.append(one)
            for owner in owners(one):
                since.setdefault(owner, i)
        elif waiting:
            one = queue.head if action == "take" else data.draw(st.sampled_from(waiting))
            getattr(queue, action)(one)
            waiting.remove(one)
            if action == "take":
                since.update(dict.fromkeys(owners(one), i))
            since = {owner: since[owner] for each in waiting for owner in owners(each)}
        assert list(queue) == turns(waiting, since)
        assert len(queue) == len(waiting)


@pytest.mark.parametrize("mixed", [False, True])
def test_six_requests_of_many_sequences_do_not_starve_the_seventh(mixed: bool) -> None:
    spec = replace(TOY_SPEC, num_slots=4, prefill_buckets=(8,), mixed_steps=mixed)
    scheduler = (ChunkScheduler if mixed else Scheduler)(spec)
    for request in "abcdef":
        for i in range(128):
            scheduler.add(sequence(f"{request}.{i}" if i else request, 4))
    entered: list[str] = []
    while "seventh" not in entered:
        batch = scheduler.schedule()
        entered += [one.request_id for one in batch.entering]
        scheduler.advance(batch)
        if len(entered) == 40:
            scheduler.add(sequence("seventh", 4))
        if not scheduler.slots.num_free:
            scheduler.remove(scheduler.running[0])
        assert len(entered) < 50
    assert len(scheduler.waiting) > 700


@pytest.mark.parametrize("interleave", [1, 2, 5])
def test_running_streams_get_their_decodes_between_prefills(interleave: int) -> None:
    scheduler = Scheduler(replace(TOY_SPEC, num_slots=16), decode_interleave=interleave)
    for i in range(6):
        scheduler.add(sequence(str(i), 4))
    kinds = "".join("P" if run(scheduler).chunks else "d" for _ in range(20))
    assert kinds.startswith(("P" + "d" * interleave) * 3)


def test_prompts_of_one_bucket_share_a_call() -> None:
    scheduler = Scheduler(replace(TOY_SPEC, num_slots=8, max_prefill_batch=4))
    for name, length in (("a", 5), ("b", 20), ("c", 8), ("d", 7)):
        scheduler.add(sequence(name, length))
    prefill = run(scheduler)
    assert len(prefill.chunks) == 3
    assert names(prefill) == ["a", "c", "d"]
    assert [s.slot for s in prefill.sequences] == [0, 1, 2]


def test_tokens_in_the_cache_take_no_room_of_a_bucket() -> None:
    known = {"b": 13}
    scheduler = Scheduler(
        replace(TOY_SPEC, num_slots=8, max_prefill_batch=4),
        cached=lambda one: known.get(one.request_id, 0),
    )
    for name, length in (("a", 5), ("b", 20), ("c", 20)):
        scheduler.add(sequence(name, length))
    assert names(run(scheduler)) == ["a", "b"], "7 tokens of b, 20 of c"


def test_nobody_loses_a_slot_to_those_behind() -> None:
    scheduler = Scheduler(replace(TOY_SPEC, num_slots=2, max_prefill_batch=4))
    for name, length in (("a", 5), ("b", 20), ("c", 5)):
        scheduler.add(sequence(name, length))
    assert names(run(scheduler)) == ["a"]
    run(scheduler)
    assert names(run(scheduler)) == ["b"]


def test_rows_ascend_by_slot_and_the_list_changes_with_the_batch() -> None:
    scheduler = Scheduler(TOY_SPEC)
    sequences = [sequence(name, 4) for name in "abc"]
    for s in sequences:
        scheduler.add(s)
    for _ in range(6):
        run(scheduler)
    before = scheduler.running
    scheduler.remove(sequences[0])
    assert scheduler.running is not before
    late = sequence("d", 4)
    scheduler.add(late)
    run(scheduler)
    assert late.slot == 0
    assert [s.slot for s in scheduler.running] == [0, 1, 2]
    assert names(run(scheduler)) == ["d", "b", "c"]


def test_removing_a_waiting_sequence_frees_nothing() -> None:
    scheduler = Scheduler(TOY_SPEC)
    waiting = sequence("a", 4)
    scheduler.add(waiting)
    scheduler.remove(waiting)
    assert not scheduler.schedule()
    assert scheduler.slots.num_free == TOY_SPEC.num_slots


def test_joiners_of_a_static_batch_gather_while_others_run() -> None:
    batch = Gathering(4, max_join_wait_s=0.1)
    batch.add("a")
    assert batch.next() == ("prefill", ["a"])  # nobody runs
    batch.next()
    batch.add("b", 20)
    batch.now_s += 0.09
    assert batch.next() == ("decode", ["a"])
    batch.add("c", 60)
    assert batch.next() == ("decode", ["a"])
    batch.now_s += 0.02  # 0.11 s after b, 0.02 s after c
    assert batch.next() == ("prefill", ["b", "c"])


def test_those_who_can_fill_the_free_slots_wait_for_nobody() -> None:
    batch = Gathering(3, max_join_wait_s=1000.0)
    batch.add("a")
    batch.next()
    batch.next()
    batch.add("b", 5)
    assert batch.next() == ("decode", ["a"])
    batch.add("c", 40)
    assert batch.next() == ("prefill", ["b", "c"])


def test_a_repeated_decode_counts_among_those_that_are_owed() -> None:
    scheduler = Scheduler(replace(TOY_SPEC, num_slots=2), decode_interleave=3)
    scheduler.add(sequence("a", 4))
    assert run(scheduler).chunks
    assert not run(scheduler).chunks
    assert scheduler.repeat()
    scheduler.add(sequence("b", 4))
    assert not scheduler.repeat(), "b joins"
    assert not run(scheduler).chunks, "the third"
    assert run(scheduler).chunks


def test_decodes_are_owed_when_the_wait_is_over_too() -> None:
    batch = Gathering(4, max_join_wait_s=0.1, interleave=3)
    batch.add("a")
    batch.next()
    batch.add("b")
    batch.now_s += 1.0
    kinds = [batch.next()[0] for _ in range(4)]
    assert kinds == ["decode", "decode", "decode", "prefill"]


def test_where_joining_is_free_nobody_gathers() -> None:
    scheduler = Scheduler(TOY_SPEC, max_join_wait_s=1000.0, clock=lambda: 0.0)
    scheduler.add(sequence("a", 4))
    run(scheduler)
    run(scheduler)
    scheduler.add(sequence("b", 4))
    assert names(run(scheduler)) == ["b"]


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_nobody_waits_longer_than_the_limit_or_is_overtaken(data: st.DataObject) -> None:
    num_slots = data.draw(st.integers(1, 6), "slots")
    limit_s = data.draw(st.sampled_from([0.0, 0.5, 3.0]), "limit")
    interleave = data.draw(st.integers(1, 3), "interleave")
    batch = Gathering(num_slots, limit_s, interleave)
    scheduler = batch.scheduler
    joined: list[int] = []
    gone: set[int] = set()
    arrived = decodes = 0
    for _ in range(60):
        batch.now_s += data.draw(st.sampled_from([0.0, 0.25, 1.0]), "passes")
        for _ in range(data.draw(st.sampled_from([0, 0, 0, 1, 2, 5]), "arrive")):
            batch.add(str(arrived), data.draw(st.integers(1, 64), "length"))
            arrived += 1
        everyone = [*scheduler.running, *scheduler.waiting]
        if everyone and data.draw(st.booleans(), "leaves"):
            leaver = data.draw(st.sampled_from(everyone), "who")
            scheduler.remove(leaver)
            gone.add(int(leaver.request_id))
        running, waiting = len(scheduler.running), list(scheduler.waiting)
        room = min(num_slots - running, len(waiting))
        scheduled = run(scheduler)
        if not scheduled:
            assert not running
            assert not waiting
        elif scheduled.chunks:
            assert scheduled.sequences == waiting[:room]
            assert not running or decodes >= interleave
            waited_s = batch.now_s - waiting[0].arrived_s
            assert not running or waited_s >= limit_s or running + room == num_slots
            joined += [int(s.request_id) for s in scheduled.sequences]
            decodes = 0
        else:
            assert len(scheduled.sequences) == running
            if room and decodes >= interleave:
                assert batch.now_s - waiting[0].arrived_s < limit_s
                assert running + room < num_slots
            decodes += 1
    assert joined == sorted(joined)
    assert set(range(max(joined, default=-1))) <= {*joined} | gone

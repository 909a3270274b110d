"""The copy that a prompt goes to where prefixes are reused: one that may have its beginning in its cache."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from djl_python_neuronx.engine.streams import BLOCK_TOKENS, BlockingQueue
from djl_python_neuronx.types import FinishReason, TokenOutput
from tests.engine.loops import LONG, Parts, Rig, request, rig
from tests.processes import PATIENCE_S, wait_until

SLOTS = 4
BEGINNING = [5, 6] * BLOCK_TOKENS
TURN = [*BEGINNING, *[7] * 30]
OTHER = [9]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Three copies: the first has a short request, the second one that has `BEGINNING`, the third none."""
    spec = replace(LONG, num_slots=SLOTS, prefill_buckets=(4096,), prefix_block=8)
    monkeypatch.setattr(Parts, "spec", replace(spec, num_adapters=2, changes_adapters=True))
    with rig(3, restarts=5) as made:
        assert [put(made, "short", OTHER), put(made, "first", BEGINNING)] == [0, 1]
        yield made


def put(copies: Rig, names: str, *prompts: list[int], **fields: Any) -> int:
    """Submit prompts that are answered together; returns their copy. In a tie it is the lowest."""
    pairs = zip(names.split(), prompts, strict=True)
    group = [request(name, prompt, **fields) for name, prompt in pairs]
    copies.loop.submit_all(copies.loop.prepare(*group), BlockingQueue())
    return copies.where(*names.split())


def leave(copies: Rig, i: int, *names: str) -> None:
    for name in names:
        copies.loop.abort(name)
        assert copies.hosts[i][-1].receive("abort") == name


def test_a_prompt_goes_to_the_copy_that_has_its_beginning_until_that_is_full(copies: Rig) -> None:
    assert [put(copies, name, TURN) for name in "abc"] == [1, 1, 1]
    assert put(copies, "d", TURN) == 2, "the one with the fewest"
    leave(copies, 1, "a", "first")
    assert put(copies, "e", TURN) == 2, "of two that have it, the one with fewer"
    leave(copies, 0, "short")
    assert put(copies, "f", [9, *TURN]) == 0, "the same tokens, but no beginning"


def test_the_part_that_is_had_is_weighed_against_the_slots_in_use(copies: Rig) -> None:
    rest = len(BEGINNING)
    assert put(copies, "half", [*BEGINNING, *[7] * rest]) == 1
    leave(copies, 1, "half")
    assert put(copies, "fifth", [*BEGINNING, *[8] * 4 * rest]) == 2, "one request is a fourth"


def test_only_those_who_share_prefixes_are_alike(copies: Rig) -> None:
    assert put(copies, "salted", TURN, cache_salt="a") == 2
    assert put(copies, "more", TURN, cache_salt="a") == 2
    assert put(copies, "plain", TURN) == 1
    assert put(copies, "adapted", TURN, adapter=1) == 0
    assert put(copies, "other", OTHER) == 0
    assert put(copies, "again", TURN, adapter=1) == 0
    assert put(copies, "second", TURN, adapter=2) == 1


def test_an_adapter_that_changes_is_forgotten_and_no_other(copies: Rig) -> None:
    assert put(copies, "adapted", TURN, adapter=1) == 2
    leave(copies, 2, "adapted")
    change = threading.Thread(target=copies.loop.set_adapter, args=(1, Path("/adapter")))
    change.start()
    for hosts in copies.hosts:
        assert hosts[0].receive("adapter") == [1, "/adapter"]
        hosts[0].engine.send("adapter", None)
    change.join(PATIENCE_S)
    assert put(copies, "other", OTHER) == 2
    leave(copies, 0, "short")
    assert put(copies, "new", TURN, adapter=1) == 0
    assert put(copies, "base", TURN) == 1


def test_what_is_answered_together_needs_a_slot_for_each_and_each_prompt_counts(
    copies: Rig,
) -> None:
    assert put(copies, "a b c", TURN, OTHER, TURN) == 1
    leave(copies, 1, "a", "b", "c")
    assert put(copies, "d e f g", TURN, TURN, TURN, TURN) == 2
    leave(copies, 2, "d", "e", "f", "g")
    last = [11] * len(BEGINNING)
    assert put(copies, "h i", OTHER, last) == 2
    assert put(copies, "j", [*last, 9]) == 2


def test_the_answer_belongs_to_the_beginning_of_the_next_turn(copies: Rig) -> None:
    prompt, answer = [12] * 9, [13] * 2 * BLOCK_TOKENS
    assert put(copies, "a", prompt) == 2
    copies.hosts[2][0].step(TokenOutput("a", tuple(answer), FinishReason.LENGTH), running=0)
    wait_until(lambda: not copies.owners("a"))
    assert put(copies, "other", OTHER) == 2
    assert put(copies, "next", [*prompt, *answer, 14]) == 2


def test_an_engine_that_starts_again_has_no_beginnings_and_the_next_has_what_it_takes_over(
    copies: Rig,
) -> None:
    copies.kill(1)
    wait_until(lambda: copies.owners("first") == [2])
    assert copies.where("first") == 2
    wait_until(lambda: copies.loop.copies[1].alive)
    assert put(copies, "turn", TURN) == 2
    assert put(copies, "other", OTHER) == 1


def test_a_copy_that_is_retired_leaves_its_beginnings_to_the_next(copies: Rig) -> None:
    retiring = threading.Thread(target=copies.loop.retire, args=(1,))
    retiring.start()
    wait_until(lambda: copies.owners("first") == [2])
    assert copies.where("first") == 2
    copies.hosts[1][0].ended.set()
    retiring.join(PATIENCE_S)
    copies.loop.start(1)
    assert put(copies, "turn", TURN) == 2
    assert put(copies, "other", OTHER) == 1


def test_no_more_is_remembered_than_the_cache_holds_and_ends_are_forgotten_first(
    copies: Rig,
) -> None:
    draw, most = random.Random(0), SLOTS * LONG.max_model_len // BLOCK_TOKENS
    prompts = [draw.choices(range(3, 90), k=3000) for _ in range(12)]
    for i, prompt in enumerate(prompts):
        assert put(copies, str(i), prompt) == 2
        leave(copies, 2, str(i))
    assert len(copies.loop.copies[2].loop.streams._digests) == most
    assert put(copies, "other", OTHER) == 2
    oldest = 12 - most // (3000 // BLOCK_TOKENS) - 1
    assert put(copies, "whole", [*prompts[oldest + 1], 9]) == 2
    assert put(copies, "gone", [*prompts[0], 9]) == 0


def test_without_prefixes_requests_alone_count(
    copies: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Parts, "spec", replace(Parts.spec, prefix_block=0))
    with rig(3) as others:
        assert [put(others, name, TURN) for name in "abcdef"] == [0, 1, 2, 0, 1, 2]

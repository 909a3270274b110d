"""Conversations on an engine whose backend reuses prefixes: what it must not run again, and the text of each turn."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from djl_python_neuronx.backends.base import Backend
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.limits import longest_prompt
from djl_python_neuronx.types import GenerationRequest

MOST_AGAIN = 8
"""Tokens that a turn may run again beside what is new."""


@dataclass
class Talk:
    """A conversation: its tokens so far, and those with whom it shares them."""

    salt: str
    history: list[int] = field(default_factory=list)
    others_since: int = 0
    """Other prompts that ran beside its last turn or after it."""


@dataclass
class Turn:
    """A prompt that runs, and its answer so far."""

    talk: Talk
    prompt: list[int]
    num_new: int
    reusable: bool
    answer: list[int] = field(default_factory=list)


def converse(
    backend: Backend, judge: Callable[[Sequence[int], list[int]], None], seed: int, turns: int = 60
) -> Counter[str]:
    """Run the turns of five conversations, up to three at once; several may go on from the same history, or a part.

    `judge` gets each prompt with its answer. Returns how many turns came after no other, in time, and too late.
    """
    draw, engine, seen = random.Random(seed), Engine(backend), Counter[str]()
    talks = [Talk(draw.choice(("", "a", "b"))) for _ in range(5)]
    spec = backend.spec
    for number in range(turns):
        present = draw.choices(talks, k=draw.randint(1, 3))
        goes_back = draw.random() < 0.5
        running: dict[str, Turn] = {}
        for i, talk in enumerate(present):
            if len(talk.history) > min(longest_prompt(spec), spec.max_model_len - 5) - 5:
                talk.history.clear()
            new = draw.choices(range(3, 90), k=draw.randint(2, 5))
            history = talk.history[: len(talk.history) - (draw.randint(0, 7) if goes_back else 0)]
            # A slot keeps its tokens until all others have been taken, or a turn that goes back overwrites them.
            kept = talk.others_since + len(present) - 1 < spec.num_slots
            kept &= not goes_back or present.count(talk) == 1
            running[f"{number}-{i}"] = Turn(
                talk, history + new, len(new), bool(talk.history) and kept
            )
            seen["first" if not talk.history else "kept" if kept else "late"] += 1
        for name, turn in running.items():
            engine.add(
                GenerationRequest(
                    name,
                    turn.prompt,
                    max_new_tokens=draw.randint(1, 5),
                    ignore_eos=True,
                    cache_salt=turn.talk.salt,
                )
            )
        for talk in talks:
            talk.others_since += len(present)
        while engine.has_work:
            outputs, info = engine.step()
            assert info is not None
            for name, count in info.cached.items():
                turn = running[name]
                assert count < len(turn.prompt)
                if turn.reusable:
                    assert len(turn.prompt) - count <= turn.num_new + MOST_AGAIN, (name, count)
                seen["tokens reused"] += count
            for output in outputs:
                assert output.error is None, output.error
                running[output.request_id].answer += output.token_ids
        for turn in running.values():
            judge(turn.prompt, turn.answer)
            turn.talk.history = turn.prompt + turn.answer
            turn.talk.others_since = len(present) - 1
    return seen


def assert_answers_of_one_prompt(backend: Backend) -> None:
    """Sequences with one prompt run it once, and besides as little as blocks allow; one that is short, all at once."""
    for num_tokens in (21, 5):
        engine, count, block = Engine(backend), backend.spec.num_slots, backend.spec.prefix_block
        names = ["r", *(f"r.{i}" for i in range(1, count))]
        for name in names:
            engine.add(
                GenerationRequest(
                    name,
                    [5 + i for i in range(num_tokens)],
                    max_new_tokens=4,
                    ignore_eos=True,
                    cache_salt=str(num_tokens),
                )
            )
        entered: list[dict[str, int]] = []
        answers: dict[str, list[int]] = {name: [] for name in names}
        while engine.has_work:
            outputs, info = engine.step()
            assert info is not None
            entered += [dict(info.cached)] if info.cached else []
            for output in outputs:
                answers[output.request_id] += output.token_ids
        assert all(answer == answers["r"] for answer in answers.values())
        if num_tokens > MOST_AGAIN:
            assert entered[0] == {"r": 0}
            assert len(entered) == 2
            assert entered[1].keys() == {*names[1:]}
            reused = (num_tokens - 1) // block * block
            assert reused - MOST_AGAIN < min(entered[1].values())
            assert max(entered[1].values()) <= reused
        else:
            assert entered == [dict.fromkeys(names, 0)]

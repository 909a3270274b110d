"""Masks of grammars against languages of which all texts are listed."""

from __future__ import annotations

import json
import random
import re
import time
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("llguidance", reason="makes the masks")

from djl_python_neuronx.engine.grammars import Grammar, Grammars
from djl_python_neuronx.errors import RequestError
from djl_python_neuronx.grammar import checked
from djl_python_neuronx.types import EngineRequest
from tests.doubles.toy_backend import TOY_SPEC

PIECES = [
    *(b"<pad>", b"<s>", b"</s>"),
    *(
        b"a",
        b"ab",
        b"b",
        b"c",
        b"bc",
        b'"',
        b'"a',
        b"",
        b"\xc3",
        b"\xa9",
        "é".encode(),
        b"ca",
        b"a",
        b"aab",
        b"\xff",
    ),
    *(b"bc\xc3", b"cab", b"<|end|>"),
]
SPECIAL, EOS, STOP = {0, 1, 2, 20}, {2, 35}, 5
"""One of the ends is beyond the tokenizer's tokens, and one special token is none. `STOP` is "b" where it is no end."""
SPEC = replace(TOY_SPEC, vocab_size=37, eos_ids=frozenset(EOS))


def asked(kind: str, value: object, **fields: object) -> EngineRequest:
    grammar = checked(kind, json.dumps([value, None]))
    return EngineRequest("a", [1], grammar=grammar, **fields)  # type: ignore[arg-type]


def mask(grammar: Grammar, output_ids: list[int]) -> set[int]:
    bits = np.full(2, 0xFFFFFFFF, np.uint32)
    grammar.narrow(bits, output_ids)
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def expected(words: list[str], output_ids: list[int], fields: dict[str, object]) -> set[int]:
    """The tokens with which the output is the beginning of a word, and the ends where it is one."""
    text = b"".join(PIECES[i] for i in output_ids)
    texts = [word.encode() for word in words]
    ends = set() if fields.get("ignore_eos") else set(EOS)
    ends |= fields.get("stop_token_ids", set())  # type: ignore[arg-type]
    others = {
        i
        for i, piece in enumerate(PIECES)
        if piece
        and i not in SPECIAL | ends
        and any(word.startswith(text + piece) for word in texts)
    }
    if text not in texts:
        return others
    return others | ends or set(EOS)


def test_a_mask_has_the_tokens_that_may_follow() -> None:
    """Along random texts of random languages; a grammar that reads the whole output at once has the same mask."""
    rng = random.Random(4)
    grammars = Grammars([piece.decode("latin-1") for piece in PIECES], [*SPECIAL], SPEC)
    wrong = []
    for turn in range(120):
        letters = rng.choice(["ab", "abc", 'a"', "aé", "cab"])
        sizes = [rng.randrange(0 if turn % 9 else 1, 7) for _ in range(rng.randrange(1, 12))]
        words = ["".join(rng.choices(letters, k=size)) for size in sizes]
        fields: dict[str, object] = [{}, {"ignore_eos": True}, {"stop_token_ids": frozenset({20})}][
            turn % 3
        ]
        if turn % 2 and any(words):
            words = [word for word in words if word]
            one = asked("regex", "|".join(map(re.escape, words)), **fields)
        else:
            one = asked("choice", words, **fields)
        grammar, output_ids = Grammar(grammars, one), list[int]()
        while True:
            found, wanted = mask(grammar, output_ids), expected(words, output_ids, fields)
            if found != wanted or mask(Grammar(grammars, one), output_ids) != wanted:
                wrong.append((words, fields, output_ids, found, wanted))
                break
            following = sorted(wanted - EOS - {20})
            if not following:
                break
            output_ids = [*output_ids, rng.choice(following)]
    assert wrong == []


def test_a_stop_token_comes_where_the_grammar_may_end() -> None:
    grammars = Grammars([piece.decode("latin-1") for piece in PIECES], [*SPECIAL], SPEC)
    grammar = Grammar(grammars, asked("choice", ["ab", "abc"], stop_token_ids=frozenset({STOP})))
    assert mask(grammar, []) == {3, 4, 15}, "a, ab and the other a"
    assert mask(grammar, [4]) == {6, 2, 35, STOP}
    other = Grammar(grammars, asked("choice", ["ab"], stop_token_ids=frozenset({STOP})))
    assert mask(other, [3]) == set(), "b is an end, and the text is no whole one"


def test_what_no_tokens_can_write_is_refused() -> None:
    grammars = Grammars([piece.decode("latin-1") for piece in PIECES], [*SPECIAL], SPEC)
    with pytest.raises(RequestError, match="cannot be fulfilled by this model's tokens"):
        Grammar(grammars, asked("choice", ["xyz"]))


def test_a_grammar_that_exceeds_its_limits_later_has_an_error() -> None:
    schema = {"type": "object", "properties": {f"a{i}": {} for i in range(700)}}
    lark = f'%llguidance {{"no_forcing": true}}\nstart: "a" | "b" %json {json.dumps(schema)}'
    spec = replace(SPEC, vocab_size=256)
    one = Grammar(
        Grammars([chr(i) for i in range(256)], [], spec), EngineRequest("a", [1], grammar=lark)
    )
    bits = np.zeros(8, np.uint32)
    one.narrow(bits, [])
    assert bits.any()
    with pytest.raises(RequestError, match="the grammar exceeds its limits"):
        one.narrow(bits, [ord(letter) for letter in 'b{"a'])


def test_masks_that_take_long_end_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """On average, or one of them, after tokens that were read at once as after others; some slow ones may be."""
    clock = SimpleNamespace(now_s=0.0)

    def thread_time() -> float:
        """The time of a mask passes between two calls."""
        clock.now_s += next(clock.steps)
        return clock.now_s

    monkeypatch.setattr(time, "thread_time", thread_time)
    spec = replace(SPEC, vocab_size=256)
    grammars = Grammars([chr(i) for i in range(256)], [], spec)
    cases: list[tuple[str, list[float], int, int | None]] = [
        ("usual", [0.0019] * 300, 0, None),
        ("slow", [0.0031] * 300, 0, 90),
        ("slow after quick ones", [0.0] * 200 + [0.0031] * 300, 0, 290),
        ("one", [0.001] * 100 + [0.11], 0, 100),
        ("some", ([0.03] + [0.0] * 20) * 10, 0, None),
        ("of a resumed request", [0.5, 0.001], 300, None),
    ]
    for _, seconds, given, wanted in cases:
        grammar = Grammar(grammars, asked("regex", "a*"))
        clock.steps = chain.from_iterable((0.0, one) for one in seconds)
        for i in range(len(seconds) if wanted is None else wanted):
            grammar.narrow(np.zeros(8, np.uint32), [ord("a")] * (given + i))
        if wanted is not None:
            with pytest.raises(RequestError, match="its masks take more than 2 ms"):
                grammar.narrow(np.zeros(8, np.uint32), [ord("a")] * (given + wanted))


def test_a_panic_where_text_is_forced_costs_no_step() -> None:
    class Panic(BaseException):
        pass

    def fails() -> None:
        raise Panic

    spec = replace(SPEC, vocab_size=256, num_speculative_tokens=3)
    grammars = Grammars([chr(i) for i in range(256)], [], spec)
    one = Grammar(grammars, asked("choice", ["abc"]))
    one.narrow(np.zeros(8, np.uint32), [])
    assert one.forced(2) == [ord("a"), ord("b")]
    one._forcing = SimpleNamespace(deep_copy=fails)
    assert one.forced(2) == []
    one.narrow(np.zeros(8, np.uint32), [ord("a")])
    assert one.forced(2) == []


def test_a_grammar_that_explodes_ends_before_it_costs_its_neighbours_a_step() -> None:
    """At once in the front, or, behind a text that hides it there, at the first mask that takes long."""
    exploding = 's\ns: s s s | s s | "a"'
    with pytest.raises(RequestError, match="cannot be enforced"):
        checked("grammar", json.dumps([f"start: {exploding}", None]))
    hidden = checked("grammar", json.dumps([f'start: "b"{{150}} {exploding}', None]))
    spec = replace(SPEC, vocab_size=256)
    grammar = Grammar(
        Grammars([chr(i) for i in range(256)], [], spec), EngineRequest("a", [1], grammar=hidden)
    )
    bits, count = np.zeros(8, np.uint32), 0
    with pytest.raises(RequestError, match="the grammar exceeds its limits"):  # noqa: PT012
        for count in range(400):
            grammar.narrow(bits, [ord("b")] * min(count, 150) + [ord("a")] * max(0, count - 150))
    assert count > 150

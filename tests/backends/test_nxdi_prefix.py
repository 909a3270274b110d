"""Prefix caching of NxD Inference: the same tokens as without it, whatever blocks are shared, taken and evicted.

The rig's own attention to a prefix is not used here: `rig_fixes` has the library's, as the graphs are compiled.
"""

from __future__ import annotations

import random
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch", reason="the nxdi backend needs torch")

from djl_python_neuronx.backends.base import Backend
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.warmup import warm_up
from djl_python_neuronx.types import FinishReason, GenerationRequest
from tests.backends.conversations import converse
from tests.backends.nxdi_plans import loaded, log_lines, nxdi_plan, obtained, save_variant
from tests.backends.tnx_engine import assert_greedy
from tests.doubles.tiny_models import load_reference, poison

pytestmark = pytest.mark.nxdi

SLOTS, LIMIT, PROMPTS, PREFIXES, SIZE = 4, 384, (128, 256), (64, 128), 8
CACHING = {"enable_prefix_caching": True, "pa_block_size": SIZE, "prefix_buckets": PREFIXES}
GREEDY = {"on_device_generation": {"do_sample": False}}
PLACES: dict[str, dict[str, Any]] = {
    "host": {},
    "device": GREEDY,
    "device ahead": {**GREEDY, "async_execution": True},
    "both ahead": {"on_device_generation": True, "output_logits": True, "async_execution": True},
}
POISON = 95
"""This token's embedding is not a number in the tests with NaN."""


def saved(name: str, tmp_path: Path) -> Path:
    return save_variant(name, tmp_path / "model", max_position_embeddings=LIMIT)


def plan_of(folder: Path, **more: Any) -> Any:
    return nxdi_plan(folder, SLOTS, LIMIT, PROMPTS, (256, LIMIT), **more)


class Answer(NamedTuple):
    prompt: list[int]
    tokens: list[int]
    cached: int


EDGES = (1, 2, *(length + more for length in PROMPTS for more in (-1, 0, 1)))
"""One token looks like a decode; around a graph's length another one begins."""


def traffic(backend: Backend, seed: int, count: int = 45) -> dict[str, Answer]:
    """Requests whose prompts begin alike for longer or shorter, with salts, that join, leave and are given up."""
    draw, engine = random.Random(seed), Engine(backend)
    histories = [draw.choices(range(3, 90), k=length) for length in (256, 249, 130, 129, 20)]
    requests = []
    for i in range(count):
        begun = draw.choice(histories)
        begun = begun[: draw.choice((len(begun), *EDGES, draw.randint(0, len(begun))))]
        prompt = (begun + draw.choices(range(3, 90), k=draw.randint(0, 9)))[: PROMPTS[-1]] or [7]
        requests.append(
            GenerationRequest(
                str(i),
                prompt,
                max_new_tokens=draw.randint(1, 12),
                ignore_eos=True,
                cache_salt=draw.choice(("", "", "a")),
            )
        )
    arrivals = [draw.randint(0, 8 * count) for _ in requests]
    aborts = {i: arrivals[i] + draw.randint(1, 20) for i in range(3, count, 9)}
    tokens: dict[str, list[int]] = defaultdict(list)
    cached: dict[str, int] = {}
    for turn in range(30 * count):
        for i, request in enumerate(requests):
            if arrivals[i] == turn:
                engine.add(request)
            if aborts.get(i) == turn:
                engine.abort(request.request_id)
        if turn > max(arrivals) and not engine.has_work:
            break
        outputs, info = engine.step()
        cached |= {} if info is None else info.cached
        for output in outputs:
            assert output.error is None, output.error
            tokens[output.request_id] += output.token_ids
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    return {
        one.request_id: Answer([*one.prompt_ids], tokens[one.request_id], cached[one.request_id])
        for one in requests
        if one.request_id in cached
    }


@pytest.mark.parametrize(
    ("name", "tp", "place", "spare"),
    [
        ("llama", 1, "host", 0),
        ("qwen2", 2, "device ahead", 40),
        pytest.param("llama-mha", 2, "host", 7, marks=pytest.mark.nightly),
        pytest.param("mistral", 1, "both ahead", 0, marks=pytest.mark.nightly),
        pytest.param("qwen3", 2, "device", 3, marks=pytest.mark.nightly),
        pytest.param("mixtral", 1, "device", 0, marks=pytest.mark.nightly),
        pytest.param("llama3-rope", 1, "both ahead", 90, marks=pytest.mark.nightly),
    ],
)
def test_tokens_are_those_without_it_and_those_of_transformers(
    tmp_path: Path, name: str, tp: int, place: str, spare: int
) -> None:
    """With as few blocks as a plan has, so that most prefixes are evicted, and with some more."""
    folder, more = saved(name, tmp_path), {"tp": tp, **PLACES[place]}
    model = load_reference(folder)
    with loaded(plan_of(folder, **more)) as backend:
        plain = traffic(backend, seed=tp)
        assert not sum(answer.cached for answer in plain.values())
    blocks = SLOTS * LIMIT // SIZE + 1 + spare
    with loaded(plan_of(folder, **more, **CACHING, pa_num_blocks=blocks)) as backend:
        answers = traffic(backend, seed=tp)
        assert {key: one.tokens for key, one in answers.items()} == {
            key: one.tokens for key, one in plain.items()
        }
        assert all(
            not one.cached % SIZE and one.cached < len(one.prompt) for one in answers.values()
        )
        assert sum(one.cached for one in answers.values()) > 1000
        for one in answers.values():
            assert_greedy(model, one.prompt, one.tokens)
        if place == "host":  # all tokens are known to be numbers, so each that it can reuse is
            seen = converse(backend, partial(assert_greedy, model), seed=tp, turns=15)
            assert seen["tokens reused"] > 150


def test_each_graph_is_warm_and_a_second_turn_encodes_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a start does: options, planning, the store; the second turn in another slot than the first."""
    log, folder = tmp_path / "rig.log", saved("llama", tmp_path)
    monkeypatch.setenv("NXDI_RIG_LOG", str(log))
    made = obtained(
        folder,
        tmp_path,
        n_positions=f"256,{LIMIT}",
        context_length_estimate="128,256",
        enable_prefix_caching="true",
    )
    config = made.plan.arguments.neuron_config
    assert (config["pa_block_size"], config["prefix_buckets"]) == (32, [128])
    assert config["pa_num_blocks"] == SLOTS * LIMIT // 32 + 1
    compiled = {(line["model"], line["bucket"]) for line in log_lines(log, "compile")}
    assert len(compiled) == 2 * 2 + 2
    with loaded(made.plan, made.folder) as backend:
        engine = Engine(backend)
        assert warm_up(engine) == ()
        assert {(line["model"], line["bucket"]) for line in log_lines(log, "run")} == compiled
        model, prompt = load_reference(folder), random.Random(1).choices(range(3, 90), k=200)
        # One takes the first slot before the second turn.
        for name, length in (("first", 20), ("busy", 60), ("second", 4)):
            request = GenerationRequest(name, prompt, max_new_tokens=length, ignore_eos=True)
            if name == "busy":
                request = GenerationRequest(name, [5], max_new_tokens=length, ignore_eos=True)
            engine.add(request)
            tokens: dict[str, list[int]] = defaultdict(list)
            while name == "busy" or engine.has_work:
                outputs, info = engine.step()
                for output in outputs:
                    tokens[output.request_id] += output.token_ids
                if info is not None and name in info.cached:
                    known = info.cached[name]
                if name == "busy" or (tokens[name][-1:] and len(tokens[name]) == length):
                    break
            if name != "busy":
                assert known == {"first": 0, "second": (len(prompt) - 1) // 32 * 32}[name]
                assert_greedy(model, prompt, tokens[name])
                prompt = prompt + tokens[name] + [11, 12, 13]
        assert len(prompt) == 230


@pytest.mark.parametrize("place", ["host", "device", "both ahead"])
def test_what_is_not_a_number_stays_with_its_sequence(tmp_path: Path, place: str) -> None:
    """Beside and after sequences that become NaN, with their prompts' beginnings and in their blocks."""
    folder = saved("llama", tmp_path)
    model, draw = load_reference(folder), random.Random(3)
    poison(folder / "model.safetensors", POISON)
    shared = draw.choices(range(3, 90), k=100)
    with loaded(plan_of(folder, **PLACES[place], **CACHING)) as backend:
        engine = Engine(backend)
        prompts: dict[str, list[int]] = {}
        found: dict[str, list[int]] = defaultdict(list)
        for i in range(60):
            bad = [POISON] if i % 3 == 0 else []
            rest = draw.choices(range(3, 90), k=draw.randint(1, 60))
            prompts[str(i)] = shared[: draw.randint(0, 100)] + bad + rest
            engine.add(
                GenerationRequest(
                    str(i), prompts[str(i)], max_new_tokens=draw.randint(1, 40), ignore_eos=True
                )
            )
            for _ in range(draw.randint(1, 8)):
                for output in engine.step().outputs:
                    found[output.request_id] += output.token_ids
        while engine.has_work:
            for output in engine.step().outputs:
                found[output.request_id] += output.token_ids
        for name, prompt in prompts.items():
            tokens = [*found[name], POISON]
            if POISON not in prompt:
                # The model may choose it, too; what follows is that sequence's own loss.
                tokens = tokens[: tokens.index(POISON)]
                assert_greedy(model, prompt, tokens)
                assert tokens


def test_a_step_that_fails_leaves_no_prefix_and_no_block(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    model = load_reference(folder)
    with loaded(plan_of(folder, **CACHING)) as backend:
        engine, draw = Engine(backend), random.Random(5)
        application: Any = backend._model
        call, history = application._call, draw.choices(range(3, 90), k=90)

        def run(name: str, max_new_tokens: int) -> tuple[list[int], int, Any]:
            engine.add(
                GenerationRequest(name, history, max_new_tokens=max_new_tokens, ignore_eos=True)
            )
            tokens, known, error = [], -1, None
            while engine.has_work:
                outputs, info = engine.step()
                known = known if info is None else info.cached.get(name, known)
                for output in outputs:
                    tokens += output.token_ids
                    error = output.error
                    reason = output.finish_reason
            assert (reason is FinishReason.ERROR) == (error is not None)
            return tokens, known, error

        def fail_once(*arguments: Any, **more: Any) -> Any:
            application._call = call
            call(*arguments, **more)
            raise RuntimeError("the device failed")

        application._call = fail_once
        assert run("fails", 3)[2] is not None
        tokens, known, error = run("again", 9)
        assert (known, error) == (0, None)
        assert_greedy(model, history, tokens)
        assert run("shares", 9)[:2] == (tokens, 88)
        assert not any(backend._blocks._sharers)  # type: ignore[attr-defined]

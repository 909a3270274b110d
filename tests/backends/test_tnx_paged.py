"""Prompts in chunks beside decodes on transformers-neuronx, against transformers: same weights, same tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the tnx backend needs torch")

import numpy as np  # noqa: E402

from djl_python_neuronx import backends  # noqa: E402
from djl_python_neuronx.backends.base import Step, Want  # noqa: E402
from djl_python_neuronx.engine.core import Engine  # noqa: E402
from djl_python_neuronx.engine.warmup import warm_up  # noqa: E402
from djl_python_neuronx.types import GenerationRequest  # noqa: E402
from tests.backends.conversations import assert_answers_of_one_prompt, converse  # noqa: E402
from tests.backends.tnx_engine import assert_greedy, assert_like_alone, reference  # noqa: E402
from tests.backends.tnx_plans import VARIANTS, tnx_plan  # noqa: E402
from tests.doubles.device_driver import Text, assert_same, make_rows  # noqa: E402
from tests.doubles.mixed_driver import MixedDriver, assert_like_alone_in_chunks  # noqa: E402
from tests.doubles.tiny_models import load_reference, poison, save_tiny_model  # noqa: E402

pytestmark = pytest.mark.tnx

POISON = 96
"""This token's embedding is not a number; no prompt of the tests has it by chance."""


@torch.no_grad()
def best_of(model: Any, prompt: list[int], tokens: list[int]) -> Text:
    """The best token of a transformers model after a prompt and after each beginning of what follows."""
    text = Text(prompt)
    if tokens:
        for row in model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]:
            text.add(row.numpy())
    return text


@pytest.mark.parametrize(
    ("name", "tp", "block_size"),
    [("llama", 1, 8), ("llama", 2, 2), ("llama-mha", 2, 32), ("llama3-rope", 1, 16)],
)
def test_any_chunks_give_what_transformers_gives(
    tmp_path: Path, name: str, tp: int, block_size: int
) -> None:
    model_type, settings = VARIANTS[name]
    save_tiny_model(model_type, tmp_path, **settings)
    backend = backends.get("tnx").load(tnx_plan(tmp_path, tp=tp, block_size=block_size))
    try:
        assert backend.spec.mixed_steps
        best = partial(best_of, load_reference(tmp_path))
        assert assert_like_alone_in_chunks(backend, best, seed=tp) > 100
    finally:
        backend.close()


@pytest.mark.parametrize(("tp", "block_size"), [(1, 8), (2, 4)])
def test_the_blocks_of_a_prefix_are_not_run_again(tmp_path: Path, tp: int, block_size: int) -> None:
    save_tiny_model("llama", tmp_path)
    plan = replace(tnx_plan(tmp_path, tp=tp, block_size=block_size), prefix_caching=True)
    backend, model = backends.get("tnx").load(plan), load_reference(tmp_path)
    try:
        assert_answers_of_one_prompt(backend)
        seen = converse(backend, partial(assert_greedy, model), seed=tp)
        assert min(seen["first"], seen["kept"], seen["late"]) >= 5, seen
        assert seen["tokens reused"] > 500
    finally:
        backend.close()


def test_a_block_that_another_sequence_reads_is_not_written_again(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    plan = replace(tnx_plan(tmp_path, block_size=8), prefix_caching=True)
    backend, model = backends.get("tnx").load(plan), load_reference(tmp_path)
    engine, history = Engine(backend), [*range(20, 44)]
    # One ends in the slot of the history, and the other goes on with its three blocks.
    prompts = {"first": history, "ends": [*history, 5], "goes on": [*history, 6]}
    prompts["from the third block"] = [*history[:20], 7, 8, 9]
    answers: dict[str, list[int]] = {name: [] for name in prompts}

    def step() -> None:
        for output in engine.step().outputs:
            assert output.error is None
            answers[output.request_id] += output.token_ids

    def add(name: str, max_new_tokens: int) -> None:
        request = GenerationRequest(name, prompts[name], max_new_tokens=max_new_tokens)
        engine.add(replace(request, ignore_eos=True))

    add("first", 1)
    while engine.has_work:
        step()
    add("ends", 1)
    add("goes on", 20)
    while not answers["ends"]:
        step()
    add("from the third block", 4)
    while engine.has_work:
        step()
    for name, prompt in prompts.items():
        assert_greedy(model, prompt, answers[name])
    backend.close()


def test_what_is_not_a_number_stays_with_its_sequence(tmp_path: Path) -> None:
    """The library lets all sequences of a step attend to one another, with weights of 0."""
    save_tiny_model("llama", tmp_path)
    good, long, model = [5, 6, 7], list(range(10, 40)), load_reference(tmp_path)
    wanted, wanted_long = reference(model, good, 20), reference(model, long[:15], 8)
    poison(tmp_path / "model.safetensors", POISON)
    backend = backends.get("tnx").load(tnx_plan(tmp_path, block_size=8))
    driver = MixedDriver(backend)
    driver.join({0: good})
    driver.begin(1, [8, POISON, *long])
    driver.begin(2, long[:15])
    driver.run({1: 9, 2: 9})  # a chunk that is not the last has no answer, and spoils all the same
    driver.run({1: 1})
    driver.run({1: 9, 2: 6})
    driver.decode()
    driver.leave(1)
    for _ in range(5):
        driver.decode()
    assert np.isfinite(driver.live[0].gaps).all()
    assert_same(driver.leave(0), wanted)
    assert_same(driver.leave(2), wanted_long)
    for slot in range(4):
        assert_same(driver.alone(good, 20, slot), wanted)
    backend.close()


def test_so_it_does_where_the_device_samples(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    wanted = reference(load_reference(tmp_path), [5, 6, 7], 8).tokens
    poison(tmp_path / "model.safetensors", POISON)
    plan = tnx_plan(tmp_path, block_size=8, on_device_generation={"do_sample": False})
    backend = backends.get("tnx").load(plan)

    def tokens_beside(*others: int) -> list[int]:
        """Slot 0's, while slot 1 has these in its prompt, or without a slot 1."""
        ids = {0: [5, 6, 7], 1: [8, *others]} if others else {0: [5, 6, 7]}
        starts = dict.fromkeys(ids, 0)
        for slot in ids:
            backend.acquire(slot, ids[slot], 0)
        found: list[int] = []
        for _ in range(8):
            rows = make_rows(ids, starts, Want.TOKENS)
            output = backend.run(Step(decode=rows) if found else Step(prefill=rows))
            assert output.ids is not None
            found.append(int(output.ids[0, 0]))
            starts = {slot: starts[slot] + len(ids[slot]) for slot in ids}
            ids = {slot: [found[-1]] for slot in ids}
        backend.release(list(ids))
        return found

    assert tokens_beside() == wanted
    assert tokens_beside(POISON, 9) == wanted
    assert tokens_beside(9, 10) == wanted
    backend.close()


def test_the_blocks_of_others_are_never_read(tmp_path: Path) -> None:
    """Whatever is left in them, and in the one for padding."""
    from transformers_neuronx import ops

    save_tiny_model("llama", tmp_path)
    backend: Any = backends.get("tnx").load(tnx_plan(tmp_path, tp=2, block_size=8))
    driver = MixedDriver(backend)
    wanted = reference(load_reference(tmp_path), [5, 6, 7], 20)
    for layer in backend._model.decoder_lm_head.layers:
        for caches in (layer.attn_k_cache, layer.attn_v_cache):
            for cache in caches.values():
                shards = [torch.full_like(shard, float("nan")) for shard in ops.parallel_cpu(cache)]
                ops.parallel_write(cache, shards)
    for slot in (0, 3):
        assert_same(driver.alone([5, 6, 7], 20, slot), wanted)
    backend.close()


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"attention_layout": "BSH", "fuse_qkv": True}, {}),
        ({"group_query_attention": "replicated-heads", "on_device_embedding": True}, {}),
        ({"sequence_parallel": True, "sequence_parallel_norm_threshold": 8}, {}),
        ({"on_device_generation": {"do_sample": False}}, {}),
        ({}, {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}),
    ],
    ids=str,
)
def test_any_traffic_gives_what_transformers_gives(
    tmp_path: Path, options: dict[str, Any], settings: dict[str, Any]
) -> None:
    """The engine's own steps, and features that change the graph."""
    save_tiny_model("llama", tmp_path, **settings)
    backend = backends.get("tnx").load(tnx_plan(tmp_path, tp=2, block_size=8, **options))
    try:
        assert assert_like_alone(backend, load_reference(tmp_path), seed=5) > 100
    finally:
        backend.close()


@pytest.mark.parametrize("options", [{}, {"on_device_generation": {"do_sample": False}}], ids=str)
def test_warm_up_runs_every_program(tmp_path: Path, options: dict[str, Any]) -> None:
    """Those that the library tells apart by blocks in use, too; and it leaves nothing behind."""
    save_tiny_model("llama", tmp_path)
    backend: Any = backends.get("tnx").load(tnx_plan(tmp_path, block_size=8, **options))
    programs = backend._model.decoder_lm_head_for_context
    ran = set()
    for key, program in programs.items():
        program.register_forward_pre_hook(lambda *_, key=key: ran.add(key))
    assert warm_up(Engine(backend)) == ()
    assert ran == set(programs)
    assert assert_like_alone(backend, load_reference(tmp_path), seed=3) > 100
    backend.close()

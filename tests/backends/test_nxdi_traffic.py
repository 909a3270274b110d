"""NxD Inference through the whole engine against transformers: same weights, same tokens, any traffic."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the nxdi backend needs torch")

import torch

from djl_python_neuronx.backends.base import Backend, ModelSpec, Step, StepOutput, Want
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.types import GenerationRequest
from tests.backends.nxdi_plans import VARIANTS, loaded, log_lines, obtained, save_variant
from tests.backends.tnx_engine import assert_greedy, assert_like_alone
from tests.doubles.tiny_models import load_reference

pytestmark = pytest.mark.nxdi

WAYS = {"continuous": {}, "static": {"rolling_batch_strategy": "naive_rolling_batch"}}
# A window as wide as those of published models, and heads that are no share of the hidden size.
CHANGES = {"mistral": {"sliding_window": 4096}, "qwen3": {"head_dim": 16}}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", VARIANTS)
def test_any_traffic_gives_what_transformers_gives(
    tmp_path: Path, name: str, way: str, tp: int
) -> None:
    folder = save_variant(name, tmp_path / "model", **CHANGES.get(name, {}))
    made = obtained(folder, tmp_path, tensor_parallel_degree=str(tp), **WAYS[way])
    with loaded(made.plan, made.folder) as backend:
        assert backend.spec.joins == ("reprefill" if way == "static" else "free")
        assert assert_like_alone(backend, load_reference(folder), seed=tp, num_requests=20) > 200


@pytest.mark.parametrize("more", [{}, {"async_execution": "true"}], ids=["one by one", "ahead"])
def test_tokens_that_the_device_chooses_are_transformers_too(
    tmp_path: Path, more: dict[str, str]
) -> None:
    folder = save_variant("llama", tmp_path / "model")
    made = obtained(
        folder, tmp_path, tensor_parallel_degree="2", on_device_generation="true", **more
    )
    with loaded(made.plan, made.folder) as backend:
        assert backend.spec.outputs == Want.TOKENS
        assert assert_like_alone(backend, load_reference(folder), seed=5, num_requests=40) > 400


RING: dict[str, Any] = {
    "sliding_window": 24,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "max_position_embeddings": 160,
}
"""A mistral whose cache is a ring: what a step writes lies over a key that the same step, repeated, has to read."""
LENGTHS = {
    "far": ("64,160", "32,128"),
    # as Mistral 7B v0.1: a window of 4096, served with 8192
    "twice": ("48", "24,48"),
}


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_variant("mistral", tmp_path_factory.mktemp("ring") / "model", **RING)


PLACES: dict[str, dict[str, str]] = {
    "host": {},
    "device": {"on_device_generation": "true"},
    "both": {"on_device_generation": "true", "output_logits": "true"},
    "device ahead": {"on_device_generation": "true", "async_execution": "true"},
    "both ahead": {
        "on_device_generation": "true",
        "output_logits": "true",
        "async_execution": "true",
    },
}


@cache
def generated(folder: Path, limit: int, longest: int) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what transformers generates: of every other one until a token comes twice."""
    model, draw, wanted = load_reference(folder), random.Random(24), []
    sizes = [
        draw.choice([draw.randint(1, longest - 1), draw.randint(20, min(30, longest - 1))])
        for _ in range(64)
    ]
    prompts = [draw.choices(range(3, 90), k=size) for size in sizes]
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    columns, lens = torch.arange(longest), torch.tensor(sizes)[:, None]
    ids = model.generate(
        padded,
        attention_mask=(columns >= longest - lens).int(),
        max_new_tokens=limit,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    doubled = 0
    for number, (prompt, row) in enumerate(zip(prompts, ids[:, longest:].tolist(), strict=True)):
        answer = row[: limit - len(prompt)]
        twice = [i for i in range(1, len(answer)) if answer[i] == answer[i - 1]]
        end = draw.randint(1, len(answer))
        if number % 2 and twice:
            end, doubled = draw.choice(twice) + 1, doubled + 1
        assert_greedy(model, prompt, answer)
        wanted.append((prompt, answer[:end]))
    assert doubled > 15
    return wanted


@pytest.mark.nightly
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_sequences_that_outgrow_a_sliding_window_get_what_transformers_generates(
    tmp_path: Path, ring: Path, lengths: str, way: str, place: str
) -> None:
    """Joins, slots that are taken again, aborts, and rows for the host where both places sample."""
    positions, prompts = LENGTHS[lengths]
    made = obtained(
        ring,
        tmp_path,
        n_positions=positions,
        context_length_estimate=prompts,
        **WAYS[way],
        **PLACES[place],
    )
    wanted = generated(ring, *(int(text.split(",")[-1]) for text in LENGTHS[lengths]))
    draw, found = random.Random(7), defaultdict[str, list[int]](list)
    arrivals = [draw.randint(0, 10 * len(wanted)) for _ in wanted]
    aborts = {i: arrivals[i] + draw.randint(1, 60) for i in range(3, len(wanted), 8)}
    with loaded(made.plan, made.folder) as backend:
        engine = Engine(backend)
        for turn in range(20_000):
            for i, (prompt, answer) in enumerate(wanted):
                if arrivals[i] == turn:
                    on_host = "both" in place and i % 5 == 0
                    engine.add(
                        GenerationRequest(
                            str(i),
                            prompt,
                            max_new_tokens=len(answer),
                            ignore_eos=True,
                            logprobs=on_host,
                        )
                    )
                if aborts.get(i) == turn:
                    engine.abort(str(i))
            if turn > max(arrivals) and not engine.has_work:
                break
            for output in engine.step().outputs:
                assert output.error is None, output.error
                found[output.request_id] += output.token_ids
    for i, (_, answer) in enumerate(wanted):
        got = found[str(i)]
        assert got == (answer[: len(got)] if i in aborts else answer), i


@dataclass
class Call:
    """A call of the device that a step needs."""

    live: dict[int, int]
    """Slot → the position that its next token will have, of all sequences whose prompt is in the cache."""
    prompt: tuple[int, int] | None = None
    """Slot and tokens of the prompt that the call prefills; None: it decodes."""


class Recorder:
    """A backend that notes the device calls that its steps need, from the steps and the slots alone."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._live: dict[int, int] = {}
        self.calls: list[Call] = []

    @property
    def spec(self) -> ModelSpec:
        return self._backend.spec

    def cached(self, prompt_ids: Sequence[int], adapter: int, salt: str = "") -> int:
        return self._backend.cached(prompt_ids, adapter, salt)

    def place(
        self, free: Sequence[int], prompt_ids: Sequence[int], adapter: int, salt: str = ""
    ) -> int:
        return self._backend.place(free, prompt_ids, adapter, salt)

    def acquire(self, slot: int, prompt_ids: Sequence[int], adapter: int, salt: str = "") -> int:
        assert slot not in self._live
        return self._backend.acquire(slot, prompt_ids, adapter, salt)

    def run(self, step: Step) -> StepOutput:
        output = self._backend.run(step)
        [(kind, rows)] = step.parts
        ends = dict(zip(rows.slots.tolist(), (rows.starts + rows.lens).tolist(), strict=True))
        if kind == "decode":
            self.calls.append(Call(dict(self._live)))
        else:
            self.calls += [Call(dict(self._live), prompt) for prompt in ends.items()]
        self._live |= ends
        return output

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._live.pop(slot, None)
        self._backend.release(slots)


def test_the_library_runs_what_the_slots_need_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every live slot in each decode, nothing written into another's, and the smallest graph that holds them."""
    log, batches, lengths, prompts = tmp_path / "rig.log", (1, 2, 4), (24, 48), (8, 20)
    folder = save_variant("llama", tmp_path / "model")
    made = obtained(folder, tmp_path, token_generation_batches="1,2")
    with loaded(made.plan, made.folder) as backend:
        recorder: Any = Recorder(backend)
        monkeypatch.setenv("NXDI_RIG_LOG", str(log))
        assert assert_like_alone(recorder, load_reference(folder), 7, num_requests=500) > 5000
    used: Counter[tuple[str, int, int]] = Counter()
    for call, line in zip(recorder.calls, log_lines(log, "run"), strict=True):
        rows, length = line["shapes"][1]
        used[line["model"], rows, length] += 1
        if call.prompt is not None:
            slot, tokens = call.prompt
            assert (line["model"], line["seq_ids"]) == ("context_encoding_model", [slot])
            assert length == min(bucket for bucket in prompts if tokens <= bucket)
            continue
        assert line["model"] == "token_generation_model"
        slots = line["seq_ids"]
        assert (
            len(set(slots)) == len(slots) == rows == min(n for n in batches if max(call.live) < n)
        )
        positions = dict(zip(slots, (row[0] for row in line["pos"]), strict=True))
        assert call.live.items() <= positions.items()
        assert length == min(bucket for bucket in lengths if max(call.live.values()) < bucket)
    assert {key for key in used if key[0] == "context_encoding_model"} == {
        ("context_encoding_model", 1, length) for length in prompts
    }
    assert {key[1:] for key in used if key[0] == "token_generation_model"} == {
        (rows, length) for rows in batches for length in lengths
    }


def test_two_compiles_at_once_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's work folder is one for all, and each compile begins by emptying it."""
    log = tmp_path / "rig.log"
    monkeypatch.setenv("NXDI_RIG_LOG", str(log))
    monkeypatch.setenv("NXDI_RIG_COMPILE_SECONDS", "1")
    names = ("llama", "qwen2")
    folders = [save_variant(name, tmp_path / name) for name in names]
    with ThreadPoolExecutor(len(names)) as threads:
        both = list(threads.map(lambda folder: obtained(folder, tmp_path, here=False), folders))
    assert len(log_lines(log, "compile")) == 8
    for folder, made in zip(folders, both, strict=True):
        assert made.cache_hit is False
        again = obtained(folder, tmp_path, here=False)
        assert (again.cache_hit, again.folder) == (True, made.folder)
        with loaded(made.plan, made.folder) as backend:
            assert assert_like_alone(backend, load_reference(folder), seed=9) > 100
    assert len(log_lines(log, "compile")) == 8

"""Tokens that the device itself chooses: greedily, or with parameters of each slot's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the tnx backend needs torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from djl_python_neuronx import backends  # noqa: E402
from djl_python_neuronx.backends.base import Step, Want  # noqa: E402
from djl_python_neuronx.config.options import ServingOptions  # noqa: E402
from djl_python_neuronx.engine.core import Engine  # noqa: E402
from djl_python_neuronx.errors import StepError  # noqa: E402
from djl_python_neuronx.planning.case import Case  # noqa: E402
from djl_python_neuronx.planning.defaults import fill  # noqa: E402
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS  # noqa: E402
from djl_python_neuronx.planning.machines import named  # noqa: E402
from djl_python_neuronx.planning.model import ModelFacts  # noqa: E402
from djl_python_neuronx.sampling import SamplingParams  # noqa: E402
from djl_python_neuronx.types import GenerationRequest  # noqa: E402
from tests.backends.tnx_engine import assert_like_alone  # noqa: E402
from tests.backends.tnx_plans import VARIANTS, tnx_plan  # noqa: E402
from tests.distributions import assert_followed, hugging_face  # noqa: E402
from tests.doubles.device_driver import make_rows  # noqa: E402
from tests.doubles.tiny_models import load_reference, poison, save_tiny_model  # noqa: E402

pytestmark = pytest.mark.tnx

GREEDY: Mapping[str, Any] = {"do_sample": False, "top_k": 1}
DYNAMIC: Mapping[str, Any] = {
    "do_sample": True,
    "dynamic": True,
    "global_top_k": 16,
    "top_k": 16,
}


@pytest.mark.parametrize("generation", [GREEDY, DYNAMIC], ids=["greedy", "dynamic"])
@pytest.mark.parametrize(
    ("name", "continuous"),
    [("llama", True), ("mixtral", True), ("opt", False), ("gpt_bigcode", False)],
)
def test_a_greedy_request_gets_the_best_tokens(
    tmp_path: Path, name: str, continuous: bool, generation: Mapping[str, Any]
) -> None:
    model_type, settings = VARIANTS[name]
    save_tiny_model(model_type, tmp_path, **settings)
    plan = tnx_plan(tmp_path, tp=2, continuous=continuous, on_device_generation=generation)
    backend = backends.get("tnx").load(plan)
    try:
        assert backend.spec.outputs == Want.TOKENS
        assert assert_like_alone(backend, load_reference(tmp_path), seed=5) > 100
    finally:
        backend.close()


ROWS = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    for temperature, top_k, top_p in product((0.7, 4.0), (3, 16), (1.0, 0.9, 0.5))
]


def test_each_slot_samples_with_its_own_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slot 0 is greedy, the others draw; the parameters are sent when they have changed."""
    save_tiny_model("llama", tmp_path)
    backend: Any = backends.get("tnx").load(tnx_plan(tmp_path, on_device_generation=DYNAMIC))
    assert (backend.spec.largest_top_k, backend.spec.fixed_sampling) == (16, None)
    with torch.no_grad():
        logits = load_reference(tmp_path)(torch.tensor([[5, 6, 7, 9]])).logits[0, -1]
    slots = range(4)
    rows = make_rows({slot: [9] for slot in slots}, dict.fromkeys(slots, 3), Want.TOKENS)
    for slot in slots:
        backend.acquire(slot, [5, 6, 7], 0)
        backend.run(Step(prefill=make_rows({slot: [5, 6, 7]}, wants=Want.TOKENS)))
    sent, update = [], backend._model.update_generation_config
    monkeypatch.setattr(
        backend._model, "update_generation_config", lambda new: (sent.append(new), update(new))
    )
    draws = {}
    for start in range(0, len(ROWS), 3):
        three = ROWS[start : start + 3]
        rows.sampling[1:] = [(one.top_k, one.top_p, one.temperature) for one in three]
        ids = np.array([backend.run(Step(decode=rows)).ids for _ in range(900)])
        assert (ids.dtype, ids.shape) == (np.int32, (900, 4, 1))
        assert (ids[:, 0] == int(logits.argmax())).all()
        for slot, one in enumerate(three, 1):
            draws[one] = ids[:, slot, 0], hugging_face(logits, one)
    assert_followed(draws)
    assert len(sent) == len(ROWS) / 3
    rows.sampling[1, 0] = 17
    with pytest.raises(StepError, match="1 to 16"):
        backend.run(Step(decode=rows))
    backend.close()


def test_the_lowest_temperature_draws_no_token_outside_top_k(tmp_path: Path) -> None:
    """All logits are below -70, as gpt2's are: at 0.002 the library draws from all that it has dropped."""
    save_tiny_model("gpt2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["transformer.ln_f.bias"][0] = 10
    tensors["transformer.wte.weight"][:, 0] = -9
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with torch.no_grad():
        logits = load_reference(tmp_path)(torch.tensor([[5, 6, 7]])).logits[0, -1]
    assert logits.max() < -70
    plan = tnx_plan(tmp_path, continuous=False, on_device_generation=DYNAMIC)
    backend: Any = backends.get("tnx").load(plan)
    backend.acquire(0, [5, 6, 7], 0)
    rows = make_rows({0: [5, 6, 7]}, wants=Want.TOKENS)
    rows.sampling[0] = (3, 1.0, backend.spec.temperatures[0])
    found = {backend.run(Step(prefill=rows)).ids.item() for _ in range(20)}
    backend.close()
    assert found <= set(logits.topk(3).indices.tolist())


def test_a_vocabulary_below_the_librarys_256_candidates(tmp_path: Path) -> None:
    """`on_device_generation=true` on 97 tokens; a row without top_k chooses among all of them."""
    save_tiny_model("llama", tmp_path)
    facts = ModelFacts.from_config(json.loads((tmp_path / "config.json").read_text()))
    options = ServingOptions(max_rolling_batch_size=4, on_device_generation=True)
    value, _ = fill(Case(options, facts, named("inf2.xlarge"), NEURON_BACKENDS["tnx"]))[
        "on_device_generation"
    ]
    plan = tnx_plan(tmp_path, tp=2, on_device_generation=value)
    backend: Any = backends.get("tnx").load(replace(plan, default_top_k="global_top_k"))
    assert (backend.spec.largest_top_k, backend.spec.default_top_k) == (97, 97)
    engine, prompt = Engine(backend), [5, 6, 7]
    sampling = SamplingParams(temperature=1e4)  # so hot that all tokens are as likely
    found = set()
    for name in map(str, range(40)):
        engine.add(GenerationRequest(name, prompt, sampling, 20, ignore_eos=True))
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.error is None, output.error
            found.update(output.token_ids)
    # Of 800 draws each token is missed with a chance of 1 in 4000.
    assert len(found) > 90
    assert found <= set(range(97))
    backend.close()


FIXED: Mapping[str, Any] = {"do_sample": True, "top_k": 2, "top_p": 0.9, "temperature": 2.0}
POISON = 96


def tokens_of(backend: Any, slot: int, prompt: list[int], fed: list[int]) -> list[int]:
    """One greedy request whose decodes are fed these tokens: what the device makes of each, -1 where nothing."""
    backend.acquire(slot, prompt, 0)
    found = (
        backend.run(Step(prefill=make_rows({slot: prompt}, wants=Want.TOKENS))).ids.ravel().tolist()
    )
    for start, token_id in enumerate(fed, len(prompt)):
        rows = make_rows({slot: [token_id]}, {slot: start}, Want.TOKENS)
        found += backend.run(Step(decode=rows)).ids.ravel().tolist()
    backend.release([slot])
    return found


@pytest.mark.parametrize("generation", [GREEDY, DYNAMIC], ids=["greedy", "dynamic"])
@pytest.mark.parametrize(
    ("continuous", "tp", "options"),
    [
        (True, 1, {}),
        (True, 2, {}),
        (False, 2, {}),
        (True, 2, {"cache_layout": "BSH"}),
        (True, 2, {"kv_cache_quant": {"quant_dtype": "f8e4m3fn", "dequant_dtype": "f32"}}),
    ],
    ids=["1 core", "2 cores", "static", "BSH", "fp8"],
)
def test_a_slot_recovers_from_what_is_not_a_number(
    tmp_path: Path,
    continuous: bool,
    tp: int,
    options: dict[str, Any],
    generation: Mapping[str, Any],
) -> None:
    """Beyond the next prompt's bucket: NaN at position 15, of a prompt or a decode, and buckets of 8 and 20."""
    save_tiny_model("llama", tmp_path)
    poison(tmp_path / "model.safetensors", POISON)
    lengths = ((48,), (48,)) if "cache_layout" in options else ((8, 20), (24, 48))
    plan = tnx_plan(
        tmp_path,
        4,
        48,
        *lengths,
        tp=tp,
        continuous=continuous,
        on_device_generation=generation,
        **options,
    )
    backend: Any = backends.get("tnx").load(plan)
    fed = [3 + i * i % 83 for i in range(25)]
    wanted = tokens_of(backend, 1, [5, 6, 7], fed)
    assert len(set(wanted)) > 3
    bad = [*fed[:15], POISON, *fed[16:18]]
    for prompt, rest in ((bad, []), (bad, fed[:3]), ([5, 6, 7], bad)):
        spoiled = tokens_of(backend, 1, prompt, rest)
        assert len(set(spoiled[-1 - len(rest[16:]) :])) == 1
        assert tokens_of(backend, 1, [5, 6, 7], fed) == wanted
    backend.close()


@pytest.mark.parametrize("generation", [GREEDY, DYNAMIC, FIXED], ids=["greedy", "dynamic", "fixed"])
@pytest.mark.parametrize("name", ["mixtral", "gpt2", "gpt_bigcode", "opt", "bloom"])
def test_what_is_sampled_from_nan_is_known(
    tmp_path: Path, name: str, generation: Mapping[str, Any]
) -> None:
    model_type, settings = VARIANTS[name]
    save_tiny_model(model_type, tmp_path, **settings)
    continuous = model_type == "mixtral"
    plan = tnx_plan(tmp_path, tp=2, continuous=continuous, on_device_generation=generation)
    backend: Any = backends.get("tnx").load(plan)
    assert backend._nan_token is not None
    assert backend._nan_token in {0, 96, 97}
    backend.close()


def test_a_token_of_the_padding_is_none(tmp_path: Path) -> None:
    """97 tokens on 2 cores are 98; the greedy choice among NaN is the last one."""
    save_tiny_model("llama", tmp_path)
    poison(tmp_path / "model.safetensors", POISON)
    backend: Any = backends.get("tnx").load(tnx_plan(tmp_path, tp=2, on_device_generation=GREEDY))
    assert tokens_of(backend, 0, [5, POISON, 6], [7]) == [-1, -1]
    backend.close()

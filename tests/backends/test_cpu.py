"""The CPU backend against transformers itself: same weights, same tokens, on every architecture."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the cpu backend needs torch")
transformers = pytest.importorskip(
    "transformers", "4.57", reason="the cpu backend needs transformers 4.57 or newer"
)

from safetensors.torch import load_file, save_file  # noqa: E402

from djl_python_neuronx import backends  # noqa: E402
from djl_python_neuronx.artifacts.formats import detect  # noqa: E402
from djl_python_neuronx.backends.base import Float32Array, Step, Want  # noqa: E402
from djl_python_neuronx.backends.cpu.backend import CpuBackend  # noqa: E402
from djl_python_neuronx.backends.cpu.model import SlotModel  # noqa: E402
from djl_python_neuronx.backends.env import count_cores  # noqa: E402
from djl_python_neuronx.engine.core import Engine  # noqa: E402
from djl_python_neuronx.errors import (  # noqa: E402
    ArtifactError,
    ArtifactNotFoundError,
    BackendError,
    BackendUnavailableError,
    DeviceMemoryError,
    IncompatibleOptionsError,
    StepError,
)
from djl_python_neuronx.types import EngineRequest, TokenOutput  # noqa: E402
from tests.backends.conversations import assert_answers_of_one_prompt, converse  # noqa: E402
from tests.backends.tnx_engine import assert_greedy  # noqa: E402
from tests.doubles.device_driver import Driver, Text, assert_same, logits_of, make_rows  # noqa: E402
from tests.doubles.tiny_models import (  # noqa: E402
    CONFIGS,
    MAX_POSITIONS,
    VOCAB_SIZE,
    load_reference,
    poison,
    save_tiny_model,
)
from tests.engine.steps import across_the_border  # noqa: E402

EOS_ID = 1
SHORT: Any = {"prefill_buckets": (4, 8)}
LLAMA: Any = transformers.LlamaForCausalLM


def plan_for(directory: Path, **changes: Any) -> backends.LoadPlan:
    plan = backends.LoadPlan(
        directory, 4, MAX_POSITIONS, (4, 8, 40), (16, 32, MAX_POSITIONS), num_threads=1
    )
    return replace(plan, **changes)


@pytest.fixture(autouse=True, scope="module")
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = save_tiny_model(model_type, tmp_path_factory.mktemp(model_type))
        return made[model_type]

    return get


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A checkpoint that the test may damage."""
    return save_tiny_model("llama", tmp_path / "llama")


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    choose = random.Random(seed)
    return [choose.choices(range(2, VOCAB_SIZE), k=length) for length in lengths]


def generate(model: Any, prompt: list[int], num_tokens: int) -> Text:
    """The greedy text of transformers."""
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    text = Text(prompt)
    for logits in found.logits:
        text.add(logits[0].numpy())
    assert text.tokens == found.sequences[0, len(prompt) :].tolist()
    return text


def plain_logits(model: Any, ids: list[int]) -> Float32Array:
    """float32[len(ids), V] of one forward pass without a cache."""
    with torch.inference_mode():
        values: Float32Array = model(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()
    return values


@pytest.mark.parametrize("model_type", list(CONFIGS))
def test_greedy_is_generate(model_type: str, checkpoint: Callable[[str], Path]) -> None:
    """Prompts of mixed lengths join and leave at random; each slot is used several times."""
    directory = checkpoint(model_type)
    reference = load_reference(directory)
    driver = Driver(backends.get("cpu").load(plan_for(directory)))
    choose = random.Random(model_type)
    waiting = prompts_of(1, 2, 4, 5, 8, 9, 17, 31, 40, 3, 12)
    done: list[Text] = []
    while waiting or driver.live:
        slots = choose.sample(driver.free, min(len(waiting), choose.randint(0, len(driver.free))))
        if slots:
            driver.join({slot: waiting.pop() for slot in slots})
        driver.decode()
        long = {slot for slot, text in driver.live.items() if len(text.tokens) >= 20}
        leaving = {slot for slot in driver.live if choose.random() < 0.05} | long
        done += [driver.leave(slot) for slot in leaving]
    ties = 0
    for text in done:
        wanted = generate(reference, text.prompt, len(text.tokens))
        if EOS_ID not in wanted.tokens:
            assert len(wanted.tokens) == len(text.tokens)
        ties += assert_same(text, wanted)
    assert ties <= 1


@pytest.mark.parametrize("model_type", list(CONFIGS))
def test_bfloat16_logits_are_those_of_the_model_in_bfloat16(
    model_type: str, checkpoint: Callable[[str], Path]
) -> None:
    directory = checkpoint(model_type)
    reference = load_reference(directory).to(torch.bfloat16)
    backend = backends.get("cpu").load(plan_for(directory, dtype="bfloat16"))
    prompt = prompts_of(24)[0]
    wanted = plain_logits(reference, prompt)
    found = [
        logits_of(backend, Step(prefill=make_rows({2: prompt[:16]}, wants=Want.ALL_LOGITS)))[0]
    ]
    for i in range(16, 24):
        rows = make_rows({2: prompt[i : i + 1]}, {2: i})
        found.append(logits_of(backend, Step(decode=rows))[0])
    # A median: in a mixture of experts rounding sends a token to another expert now and then.
    difference = np.median(np.abs(np.concatenate(found) - wanted).max(axis=1))
    assert difference < 0.1 * wanted.std()
    assert found[0].dtype == np.float32


@pytest.mark.parametrize("model_type", list(CONFIGS))
def test_every_way_to_the_same_logits(model_type: str, checkpoint: Callable[[str], Path]) -> None:
    """Whole or in chunks, verified or decoded, last column or all: always the plain logits."""
    directory = checkpoint(model_type)
    reference = load_reference(directory)
    backend = backends.get("cpu").load(plan_for(directory, num_speculative_tokens=2))
    short, long = prompts_of(5, 23)
    wanted = {0: plain_logits(reference, short), 3: plain_logits(reference, long)}

    rows = make_rows({0: short, 3: long}, wants=Want.ALL_LOGITS)
    every = logits_of(backend, Step(prefill=rows))
    assert every.shape == (2, 23, VOCAB_SIZE)
    np.testing.assert_allclose(every[0, :5], wanted[0], atol=1e-4)
    np.testing.assert_allclose(every[1], wanted[3], atol=1e-4)

    last = logits_of(backend, Step(prefill=make_rows({0: short, 3: long})))
    assert last.shape == (2, 1, VOCAB_SIZE)
    np.testing.assert_allclose(last[0, 0], wanted[0][-1], atol=1e-4)
    np.testing.assert_allclose(last[1, 0], wanted[3][-1], atol=1e-4)

    nothing = make_rows({0: short[:2], 3: long[:9]}, wants=Want.NOTHING)
    assert logits_of(backend, Step(prefill=nothing)).shape == (2, 0, VOCAB_SIZE)
    chunk = make_rows({0: short[2:], 3: long[9:20]}, {0: 2, 3: 9}, Want.ALL_LOGITS)
    found = logits_of(backend, Step(prefill=chunk))
    np.testing.assert_allclose(found[0, :3], wanted[0][2:], atol=1e-4)
    np.testing.assert_allclose(found[1], wanted[3][9:20], atol=1e-4)

    # Two drafts verified in one decode; the first try was wrong and is overwritten.
    for drafts in ([9, 9, 9], long[20:23]):
        verified = make_rows({3: drafts}, {3: 20}, Want.ALL_LOGITS)
        found = logits_of(backend, Step(decode=verified))
    np.testing.assert_allclose(found[0], wanted[3][20:], atol=1e-4)


@pytest.mark.parametrize("mixed_steps", [False, True])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_scores_are_log_softmax_of_the_models_own_logits(
    model_type: str, mixed_steps: bool, checkpoint: Callable[[str], Path]
) -> None:
    """In chunks or by decode steps, also of prompts beyond every bucket, beside streams whose tokens stay the same."""
    folder = checkpoint(model_type)
    reference = load_reference(folder)
    backend = backends.get("cpu").load(plan_for(folder, mixed_steps=mixed_steps, **SHORT))
    engine = Engine(backend)
    streams = {f"s{i}": generate(reference, one, 9) for i, one in enumerate(prompts_of(3, 7))}
    for name, text in streams.items():
        engine.add(EngineRequest(name, text.prompt, max_new_tokens=9, ignore_eos=True))
    prompts = prompts_of(1, 2, 8, 9, 30, seed=1)
    for i, prompt in enumerate(prompts):
        engine.add(EngineRequest(f"p{i}", prompt, max_new_tokens=i % 2, scores_prompt=2))
    found: dict[str, list[TokenOutput]] = defaultdict(list)
    while engine.has_work:
        for output in engine.step().outputs:
            found[output.request_id].append(across_the_border(output))
    backend.close()
    for name, text in streams.items():
        tokens = [one for output in found[name] for one in output.token_ids]
        assert_same(Text(text.prompt, tokens), text)
    for i, prompt in enumerate(prompts):
        outputs = found[f"p{i}"]
        with torch.inference_mode():
            exact = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert sum(len(output.token_ids) for output in outputs) == i % 2
        scored = [output for output in outputs if output.scored is not None]
        scores = [score for output in scored for score in output.logprobs or ()]
        chosen = [float(exact[place, one]) for place, one in enumerate(prompt[1:])]
        assert scores == pytest.approx(chosen, abs=1e-4)
        likeliest = [top[0][1] for output in scored for top in output.top or ()]
        assert likeliest == pytest.approx(exact[:-1].max(-1).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("model_type", list(CONFIGS))
def test_padding_may_reach_beyond_the_last_position(
    model_type: str, checkpoint: Callable[[str], Path]
) -> None:
    backend = backends.get("cpu").load(plan_for(checkpoint(model_type)))
    prompt = prompts_of(MAX_POSITIONS)[0]
    wanted = plain_logits(load_reference(checkpoint(model_type)), prompt)
    backend.run(Step(prefill=make_rows({1: prompt[:40]}, wants=Want.NOTHING)))
    backend.run(Step(prefill=make_rows({1: prompt[40:59]}, {1: 40}, Want.NOTHING)))
    found = logits_of(backend, Step(prefill=make_rows({1: prompt[59:]}, {1: 59}, Want.ALL_LOGITS)))
    np.testing.assert_allclose(found[0], wanted[59:], atol=1e-4)


def test_more_than_one_thread_gives_the_same(checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint("llama")
    prompt = prompts_of(30)[0]
    wanted = generate(load_reference(directory), prompt, 20)
    for threads in (1, 2):
        driver = Driver(backends.get("cpu").load(plan_for(directory, num_threads=threads)))
        assert_same(driver.alone(prompt, 20), wanted)


@pytest.mark.parametrize(
    ("step", "named"),
    [
        (Step(prefill=make_rows({slot: [5] for slot in range(5)})), "5 rows.* 1 to 4"),
        (Step(prefill=make_rows({0: [5] * 41})), "41 tokens.* 40"),
        (Step(prefill=make_rows({4: [5]})), r"\[4\].* 0 to 3"),
        (Step(decode=make_rows({0: [5]}, {0: 64})), "64.* 0 to 63"),
        (Step(decode=make_rows({2: [5]})), r"\[2\].* hold a prompt"),
        (Step(decode=make_rows({1: [5]}, {1: 3})), r"\[3\].* \[0\]"),
        (Step(decode=make_rows({0: [5]}, {0: 2}, Want.TOKENS)), "TOKENS.*LOGITS"),
        (Step(prefill=make_rows({0: [VOCAB_SIZE]})), "prefill step of 1 rows failed"),
    ],
)
def test_refusals_name_value_and_limit(
    step: Step, named: str, checkpoint: Callable[[str], Path]
) -> None:
    backend = backends.get("cpu").load(plan_for(checkpoint("llama")))
    backend.run(Step(prefill=make_rows({0: [5, 6]})))
    with pytest.raises(StepError, match=named):
        backend.run(step)


def test_a_slot_longer_than_the_models_positions_is_refused(llama: Path) -> None:
    plan = plan_for(llama, max_model_len=65, token_buckets=())
    with pytest.raises(IncompatibleOptionsError, match=r"65.* 64"):
        backends.get("cpu").load(plan)


def test_one_position_is_enough(llama: Path) -> None:
    backend = backends.get("cpu").load(backends.LoadPlan(llama, 1, 1, (1,)))
    reference = load_reference(llama)
    found = logits_of(backend, Step(prefill=make_rows({0: [7]})))
    np.testing.assert_allclose(found[0], plain_logits(reference, [7]), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ignored", ["position_ids", "attention_mask"])
def test_an_architecture_that_ignores_what_it_is_told_is_refused(
    ignored: str,
    dtype: Any,
    llama: Path,
) -> None:
    class Deaf(LLAMA):  # type: ignore[misc]
        def forward(self, input_ids: Any, position_ids: Any = None, **named: Any) -> Any:
            named["position_ids"] = position_ids
            if "past_key_values" in named:
                named[ignored] = None
            if ignored == "attention_mask" and "past_key_values" in named:
                reach = named["past_key_values"].get_max_cache_shape()
                shape = (len(input_ids), 1, input_ids.shape[1], reach)
                named[ignored] = torch.zeros(shape, dtype=dtype)
            return super().forward(input_ids, **named)

    model = Deaf.from_pretrained(llama, dtype=dtype)
    with pytest.raises(BackendError, match="Deaf gives other logits"):
        SlotModel(model, 4, MAX_POSITIONS)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    ],
)
def test_architectures_without_positions_or_keys_are_refused(
    model_type: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    config = transformers.AutoConfig.for_model(model_type, vocab_size=VOCAB_SIZE, **settings)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(BackendError, match=r"position_ids|keys, values and a mask"):
        backends.get("cpu").load(plan_for(tmp_path))


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt2", "bloom"])
@pytest.mark.parametrize("mixed", [False, True])
def test_what_a_slot_holds_of_a_prompt_is_not_run_again(
    model_type: str, mixed: bool, checkpoint: Callable[[str], Path]
) -> None:
    directory = checkpoint(model_type)
    plan = plan_for(directory, prefix_caching=True, mixed_steps=mixed)
    if mixed:
        plan = replace(plan, prefill_buckets=(4, 8, 16))
    backend, model = backends.get("cpu").load(plan), load_reference(directory)
    assert_answers_of_one_prompt(backend)
    seen = converse(backend, partial(assert_greedy, model), seed=int(mixed))
    assert min(seen["first"], seen["kept"], seen["late"]) >= 5, seen
    assert seen["tokens reused"] > 500


def test_a_prefix_that_is_not_a_number_is_run_again(llama: Path) -> None:
    """Keys that hold NaN would fail every prompt that begins with them."""
    prompt = [*range(5, 15)]
    clean = generate(load_reference(llama), [*prompt, 8], 4)
    backend = backends.get("cpu").load(plan_for(llama, prefix_caching=True))
    backend.acquire(0, prompt, 0)
    backend.run(Step(prefill=make_rows({0: prompt})))
    assert backend.cached([*prompt, 8], 0) == 10
    with torch.inference_mode():
        for layer in backend._model._cache._layers[-1]:
            layer[0, :, 1] = float("nan")
    assert np.isnan(logits_of(backend, Step(decode=make_rows({0: [8]}, {0: 10})))).all()
    backend.release([0])
    assert [backend.cached([*prompt, 8], 0), backend.acquire(1, [*prompt, 8], 0)] == [0, 0]
    backend.release([1])
    assert_same(Driver(backend).alone([*prompt, 8], 4, 1), clean)


def test_what_a_failed_step_may_have_overwritten_is_run_again(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(llama, prefix_caching=True, num_speculative_tokens=2)
    backend, prompt = backends.get("cpu").load(plan), [*range(5, 15)]
    backend.acquire(0, prompt, 0)
    backend.run(Step(prefill=make_rows({0: prompt})))
    backend.run(Step(decode=make_rows({0: [20, 21, 22]}, {0: 10}, Want.ALL_LOGITS)))
    assert backend.cached([*prompt, 20, 21, 22, 23], 0) == 13
    with monkeypatch.context() as broken:
        broken.setattr(backend._model, "forward", None)
        with pytest.raises(StepError):
            backend.run(Step(decode=make_rows({0: [30]}, {0: 11})))
    assert backend.cached([*prompt, 20, 21, 22, 23], 0) == 11


def test_a_prompt_takes_the_slot_that_was_left_longest_ago(llama: Path) -> None:
    backend = backends.get("cpu").load(plan_for(llama, prefix_caching=True))
    prompts = {slot: [10 + slot] * 12 for slot in range(4)}
    for slot, prompt in prompts.items():
        backend.acquire(slot, prompt, 0)
        backend.run(Step(prefill=make_rows({slot: prompt})))
    for slot in (2, 0, 3):
        backend.release([slot])
    assert backend.place([0, 2, 3], [5] * 9, 0) == 2
    assert backend.place([0, 2, 3], [*prompts[3], 5], 0) == 3, "it has the prefix"
    assert backend.place([0, 2, 3], [*prompts[3][:8], 5], 0) == 3, "and little else"
    assert backend.place([0, 2, 3], [*prompts[1], 5], 0) == 2, "copied from the running one"


def test_who_must_not_share_a_prefix_runs_it_again(llama: Path) -> None:
    backend = backends.get("cpu").load(plan_for(llama, prefix_caching=True))
    prompt = [*range(5, 15)]
    backend.acquire(0, prompt, 0, "a")
    backend.run(Step(prefill=make_rows({0: prompt})))
    found = {
        (salt, adapter): backend.cached([*prompt, 8], adapter, salt)
        for salt in ("a", "b", "")
        for adapter in (0, 1)
    }
    assert found.pop(("a", 0)) == 10
    assert set(found.values()) == {0}
    assert backend.cached(prompt, 0, "a") == 9, "the last token gives the first new one"


LONGROPE = {
    "original_max_position_embeddings": 16,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 3.0, 4.0, 8.0],
    },
}


def test_longrope_ends_where_rows_would_change_each_other(tmp_path: Path) -> None:
    save_tiny_model("phi3", tmp_path, **LONGROPE)
    with pytest.raises(IncompatibleOptionsError, match=r"n_positions is 17.* 16 .*longrope"):
        backends.get("cpu").load(plan_for(tmp_path, max_model_len=17, **SHORT, token_buckets=()))
    plan = plan_for(tmp_path, max_model_len=16, **SHORT, token_buckets=(16,))
    short, long = prompts_of(3, 8)
    driver = Driver(backends.get("cpu").load(plan))
    driver.join({0: short, 1: long})
    for _ in range(8):
        driver.decode()
    assert_same(driver.leave(0), generate(load_reference(tmp_path), short, 9))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["llama", "gpt_neox", "mistral"])
def test_a_window_counts_where_the_model_has_one(
    model_type: str, dtype: Any, tmp_path: Path
) -> None:
    """Whatever config.json says: llama and gpt_neox ignore it, mistral does not."""
    save_tiny_model(model_type, tmp_path, sliding_window=12)
    backend = backends.get("cpu").load(plan_for(tmp_path, dtype=dtype))
    prompt = prompts_of(30)[0]
    reference = load_reference(tmp_path)
    wanted = plain_logits(reference.to(getattr(torch, dtype)), prompt)
    found = logits_of(backend, Step(prefill=make_rows({1: prompt}, wants=Want.ALL_LOGITS)))[0]
    assert np.abs(found - wanted).max() < (1e-4 if dtype == "float32" else 0.2) * wanted.std()
    reference.config.sliding_window = 29
    longer = np.abs(plain_logits(reference, prompt) - wanted).max() > 0.5 * wanted.std()
    assert longer == (model_type == "mistral"), "the test would not notice"


def test_a_window_that_is_not_used_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model("llama", tmp_path, sliding_window=12)
    backends.get("cpu").load(plan_for(tmp_path))
    assert [r.getMessage().split()[:2] for r in caplog.records if r.levelname == "WARNING"] == [
        ["window_unused", "model=LlamaForCausalLM"]
    ]


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_what_is_not_a_number_stays_where_it_is(model_type: str, tmp_path: Path) -> None:
    """Token 96 and the padding give NaN: a rejected draft, a failed prompt and padding harm nobody."""
    save_tiny_model(model_type, tmp_path)
    wanted = generate(load_reference(tmp_path), [5, 6, 7], 6)
    poison(tmp_path / "model.safetensors", 0, 96)
    driver = Driver(backends.get("cpu").load(plan_for(tmp_path, num_speculative_tokens=2)))
    driver.join({0: [9, 96, *prompts_of(15)[0]], 1: [5, 6, 7], 3: prompts_of(20)[0]})
    driver.leave(0)
    drafts = make_rows({1: [driver.live[1].tokens[-1], 96, 96]}, {1: 3}, Want.ALL_LOGITS)
    assert np.isnan(logits_of(driver.backend, Step(decode=drafts))[0, 1:]).all()
    for _ in range(5):
        driver.decode()
    assert_same(driver.leave(1), wanted)
    assert_same(driver.alone([5, 6, 7], 6), wanted)


def test_libraries_that_cannot_be_mapped_lack_memory() -> None:
    """torch is not loaded yet, and does not fit into 100 MiB more of address space."""
    script = """
import resource, numpy, safetensors
from djl_python_neuronx.backends import cpu
room = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + 100 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (room, room))
try:
    cpu.load(None)
except Exception as error:
    print(type(error).__name__, error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stdout.startswith(
        "DeviceMemoryError the cpu backend's libraries do not fit into memory"
    )
    assert "Install" not in ran.stdout


def test_supports_tells_the_reason() -> None:
    assert backends.get("cpu").supports({"model_type": "llama"}) is None
    mixed = {"model_type": "llama", "layer_types": ["full_attention", "sliding_attention"]}
    assert backends.get("cpu").supports(mixed) is None
    linear = {"layer_types": ["full_attention", "linear_attention"]}
    assert "linear_attention" in str(backends.get("cpu").supports(linear))
    assert "encoder" in str(backends.get("cpu").supports({"is_encoder_decoder": True}))
    nested = {"text_config": {"layer_types": ["chunked_attention"]}}
    assert "chunked_attention" in str(backends.get("cpu").supports(nested))
    for wrong in (5, "full_attention", [3]):
        assert "list of names" in str(backends.get("cpu").supports({"layer_types": wrong}))


def test_supports_knows_the_types_of_transformers() -> None:
    """Its own table, as it is after an import, is the oracle."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    supports = backends.get("cpu").supports
    assert [
        name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if supports({"model_type": name})
    ] == []
    for name in ("t5", "vit", "unheard-of"):
        assert f"no causal language model of model_type '{name}'" in str(
            supports({"model_type": name})
        )
    assert "did you mean 'llama'" in str(supports({"model_type": "lama"}))
    assert supports({"model_type": "unheard-of", "auto_map": {}}) is None
    assert supports({"model_type": "unheard-of", "text_config": {"model_type": "llama"}}) is None


def test_supports_takes_an_artifact(llama: Path) -> None:
    assert backends.get("cpu").supports(detect(llama).config) is None


def test_kinds_of_layer_that_only_the_class_knows_are_refused(llama: Path) -> None:
    model = LLAMA.from_pretrained(llama)
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(BackendError, match="chunked_attention layers"):
        SlotModel(model, 4, MAX_POSITIONS)


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"model_type": "unheard_of"}, BackendError, "does not know model_type 'unheard_of'"),
        ({"model_type": "t5"}, BackendError, "no causal language model of model_type 't5'"),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4}},
            BackendUnavailableError,
            "needs a package that is missing",
        ),
        ({"hidden_size": "wide"}, ArtifactError, r"correct config\.json"),
    ],
)
def test_each_reason_not_to_load_has_its_own_advice(
    changes: dict[str, Any], error: type[Exception], named: str, llama: Path
) -> None:
    path = llama / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    (llama / "unrelated.safetensors").write_bytes(b"damaged")
    with pytest.raises(error, match=named) as caught:
        backends.get("cpu").load(plan_for(llama))
    assert "unrelated" not in str(caught.value)


def test_weights_that_are_not_finite_are_named_as_such(llama: Path) -> None:
    poison(llama / "model.safetensors", 3)
    with pytest.raises(ArtifactError, match="its logits are not finite"):
        backends.get("cpu").load(plan_for(llama))


def test_missing_tensors_are_named(llama: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    del weights["lm_head.weight"], weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, llama / "model.safetensors", {"format": "pt"})
    named = r"2 tensors.*lm_head\.weight, model\.layers\.1\.mlp\.up_proj\.weight"
    with pytest.raises(ArtifactError, match=named):
        backends.get("cpu").load(plan_for(llama))


def test_a_tied_output_layer_need_not_be_there(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    prompt = prompts_of(9)[0]
    found = Driver(backends.get("cpu").load(plan_for(tmp_path))).alone(prompt, 10)
    assert_same(found, generate(load_reference(tmp_path), prompt, 10))


def test_tensors_of_another_shape_are_refused(llama: Path) -> None:
    path = llama / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 56}))
    with pytest.raises(ArtifactError, match=r"6 tensors have another shape .*down_proj"):
        backends.get("cpu").load(plan_for(llama))


@pytest.mark.parametrize("size", [0, 5, 300, -1])
def test_a_truncated_file_is_named(size: int, llama: Path) -> None:
    path = llama / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:size])
    with pytest.raises(ArtifactError, match=r"model\.safetensors cannot be read"):
        backends.get("cpu").load(plan_for(llama))


def sharded(directory: Path) -> list[Path]:
    model = load_reference(directory)
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="20KB")
    return sorted(directory.glob("*.safetensors"))


def test_shards_are_put_together_and_a_damaged_one_is_named(llama: Path) -> None:
    prompt = prompts_of(9)[0]
    wanted = generate(load_reference(llama), prompt, 10)
    shards = sharded(llama)
    assert len(shards) > 2
    assert_same(Driver(backends.get("cpu").load(plan_for(llama))).alone(prompt, 10), wanted)
    shards[1].write_bytes(shards[1].read_bytes()[:-7])
    with pytest.raises(ArtifactError, match=rf": {shards[1].name} cannot be read"):
        backends.get("cpu").load(plan_for(llama))
    shards[1].unlink()
    with pytest.raises(ArtifactError, match="cannot be loaded"):
        backends.get("cpu").load(plan_for(llama))


def test_a_folder_without_weights_or_config_is_refused(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(ArtifactError, match="cannot be loaded"):
        backends.get("cpu").load(plan_for(llama))
    (llama / "config.json").unlink()
    with pytest.raises(ArtifactNotFoundError, match=r"no config\.json"):
        backends.get("cpu").load(plan_for(llama))


def test_pickled_weights_are_read_without_running_what_is_in_them(llama: Path) -> None:
    prompt, path = prompts_of(9)[0], llama / "pytorch_model.bin"
    wanted = generate(load_reference(llama), prompt, 10)
    torch.save(load_file(llama / "model.safetensors"), path)
    # An adapter that lies beside the weights is none of them.
    (llama / "model.safetensors").rename(llama / "adapter_model.safetensors")
    plan = plan_for(llama, kind=detect(llama).kind)
    assert_same(Driver(backends.get("cpu").load(plan)).alone(prompt, 10), wanted)

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (llama / "sprung",))

    torch.save({"lm_head.weight": Trap()}, path)
    with pytest.raises(ArtifactError):
        backends.get("cpu").load(plan)
    assert not (llama / "sprung").exists()
    path.write_bytes(pickle.dumps(Trap(), protocol=2))
    with pytest.raises(ArtifactError):
        backends.get("cpu").load(plan)
    assert not (llama / "sprung").exists()


REMOTE_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_remote_code_runs_only_if_it_is_trusted(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    prompt = prompts_of(9)[0]
    wanted = generate(load_reference(llama), prompt, 10)
    (llama / "own.py").write_text(REMOTE_CODE)
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config = json.loads((llama / "config.json").read_text())
    config.update(model_type="own", architectures=["OwnModel"], auto_map=own)
    (llama / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=r"option\.trust_remote_code=true"):
        backends.get("cpu").load(plan_for(llama))
    backend = backends.get("cpu").load(plan_for(llama, trust_remote_code=True))
    assert_same(Driver(backend).alone(prompt, 10), wanted)


def test_loading_prints_nothing(llama: Path) -> None:
    """In a process of its own: nothing of pytest's or an earlier test's silences it."""
    program = (
        "import pathlib, sys; from djl_python_neuronx import backends;"
        "backends.get('cpu').load(backends.LoadPlan(pathlib.Path(sys.argv[1]), 2, 64, (16, 64)));"
        "import torch, transformers.utils.logging as own;"
        "print(torch.get_num_threads(), own.get_verbosity(), own.is_progress_bar_enabled())"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(llama)],
        env={**os.environ, "OMP_NUM_THREADS": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stderr == ""
    # DJL's OMP_NUM_THREADS does not count, and transformers' own settings are restored.
    assert result.stdout.split() == [str(max(1, count_cores() - 1)), "30", "True"]


def test_the_thread_count_holds_in_every_thread(llama: Path) -> None:
    backends.get("cpu").load(plan_for(llama, num_threads=3))
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [3]


def test_an_old_transformers_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "__version__", "4.45.2")
    with pytest.raises(BackendUnavailableError, match=r"4\.45\.2.* 4\.57"):
        backends.get("cpu").load(plan_for(llama))


def test_a_cache_that_does_not_fit_is_refused(llama: Path) -> None:
    with pytest.raises(DeviceMemoryError, match=r"more memory .* n_positions") as caught:
        backends.get("cpu").load(plan_for(llama, num_slots=10**9))  # 4 TB a layer
    assert caught.value.status == 507


def test_close_frees_the_cache(llama: Path) -> None:
    backend = backends.get("cpu").load(plan_for(llama))
    assert isinstance(backend, CpuBackend)
    assert backend._model.cache_bytes == 2 * 2 * 4 * 2 * MAX_POSITIONS * 8 * 4
    cache = weakref.ref(backend._model._cache)
    backend.close()
    assert cache() is None

"""Static batches on transformers-neuronx against transformers: requests join and leave at any time all the same."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the tnx backend needs torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from djl_python_neuronx import backends  # noqa: E402
from djl_python_neuronx.backends import tnx  # noqa: E402
from djl_python_neuronx.backends.base import Step  # noqa: E402
from djl_python_neuronx.backends.tnx.static import StaticBackend  # noqa: E402
from djl_python_neuronx.engine.core import Engine  # noqa: E402
from djl_python_neuronx.errors import ArtifactError, StepError  # noqa: E402
from djl_python_neuronx.types import GenerationRequest  # noqa: E402
from tests.backends.tnx_engine import assert_like_alone, reference  # noqa: E402
from tests.backends.tnx_plans import VARIANTS, tnx_plan  # noqa: E402
from tests.doubles.device_driver import Driver, assert_same, logits_of, make_rows  # noqa: E402
from tests.doubles.tiny_models import load_reference, poison, save_tiny_model  # noqa: E402

pytestmark = pytest.mark.tnx


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    "name",
    [
        *("gpt2", "gpt_bigcode", "gpt_bigcode-mha", "gpt_neox", "gptj", "gptj-odd", "opt", "bloom"),
        *("llama", "mistral", "mixtral"),
    ],
)
def test_any_traffic_gives_what_transformers_gives(tmp_path: Path, name: str, tp: int) -> None:
    model_type, settings = VARIANTS[name]
    save_tiny_model(model_type, tmp_path, **settings)
    backend = backends.get("tnx").load(tnx_plan(tmp_path, tp=tp, continuous=False))
    assert isinstance(backend, StaticBackend)
    try:
        assert backend.spec.joins == "reprefill"
        assert assert_like_alone(backend, load_reference(tmp_path), seed=tp) > 100
    finally:
        backend.close()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["gpt_bigcode", "gpt_bigcode-mha", "gptj", "gptj-odd"])
def test_rearranged_weights_give_transformers_logits(tmp_path: Path, name: str, tp: int) -> None:
    """Tokens would hide a small error: the head's bias, or a rotary dimension too few."""
    model_type, settings = VARIANTS[name]
    save_tiny_model(model_type, tmp_path, **settings)
    backend = backends.get("tnx").load(tnx_plan(tmp_path, tp=tp, continuous=False))
    ids = [5, 60, 7, 96, 9, 10, 3, 44, 21]
    backend.acquire(1, ids[:4], 0)
    steps = [Step(prefill=make_rows({1: ids[:4]}))]
    steps += [Step(decode=make_rows({1: [ids[i]]}, {1: i})) for i in range(4, len(ids))]
    found = np.stack([logits_of(backend, step)[0, 0] for step in steps])
    backend.close()
    with torch.no_grad():
        wanted = load_reference(tmp_path)(torch.tensor([ids])).logits[0, 3:].numpy()
    assert np.abs(found - wanted).max() < 1e-4 < wanted.std()


@pytest.mark.parametrize("name", ["gpt_bigcode", "gptj"])
@pytest.mark.parametrize("form", ["pickle", "shards", "split", "without the prefix"])
def test_rearranged_weights_come_from_any_checkpoint(tmp_path: Path, name: str, form: str) -> None:
    model = load_reference(save_tiny_model(name, tmp_path))
    weights = tmp_path / "model.safetensors"
    if form == "shards":
        model.save_pretrained(tmp_path, max_shard_size="20KB")
        weights.unlink(missing_ok=True)
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
    elif form == "without the prefix":
        tensors = load_file(weights)
        renamed = {key.removeprefix("transformer."): value for key, value in tensors.items()}
        save_file(renamed, weights, {"format": "pt"})
    else:
        weights.unlink()
        save = torch.save
        if form == "split":
            save = importlib.import_module("transformers_neuronx.module").save_split
        save(model.state_dict(), tmp_path / "pytorch_model.bin")
    backend = backends.get("tnx").load(tnx_plan(tmp_path, tp=2, continuous=False))
    assert_same(Driver(backend).alone([5, 6, 7], 12), reference(model, [5, 6, 7], 12))
    backend.close()


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *((name, "n_positions") for name in ("gpt2", "gpt_bigcode", "gptj")),
        ("gpt_neox", "max_position_embeddings"),
    ],
)
def test_positions_beyond_128_are_right(tmp_path: Path, name: str, sizes: str) -> None:
    """These classes choose lengths of their own, powers of two from 128: the row goes on in another program."""
    model_type, settings = VARIANTS[name]
    save_tiny_model(model_type, tmp_path, **{**settings, sizes: 256})
    plan = tnx_plan(tmp_path, 2, 160, (32, 150), (160,), continuous=False)
    backend = backends.get("tnx").load(plan)
    prompt = [3 + i * i % 83 for i in range(120)]
    wanted = reference(load_reference(tmp_path), prompt, 30)
    try:
        found = Driver(backend).alone(prompt, 30, slot=1)
        assert_same(found, wanted)
        assert len(set(found.tokens)) > 3
    finally:
        backend.close()


def test_a_free_row_spoils_nothing(tmp_path: Path) -> None:
    """The last token of a slot is not fed to its row once the slot is free: here, a token that makes NaN."""
    save_tiny_model("llama", tmp_path)
    wanted = reference(load_reference(tmp_path), [5, 6, 7], 20)
    poison(tmp_path / "model.safetensors", 96)
    backend = backends.get("tnx").load(tnx_plan(tmp_path, continuous=False))
    driver = Driver(backend)
    driver.join({1: [8, 9], 2: [9, 8]})
    for text in driver.live.values():
        text.tokens[-1] = 96
    driver.decode()
    driver.leave(1)
    driver.leave(2)
    driver.join({2: [5, 6, 7]})
    for _ in range(12):
        driver.decode()
    driver.leave(2)
    assert_same(driver.alone([5, 6, 7], 20, slot=1), wanted)
    assert np.isfinite(wanted.gaps).all()
    backend.close()


def test_each_step_tells_what_it_encoded_again(tmp_path: Path) -> None:
    """Counted once more from who comes and goes: by joins, and where the shared position runs out."""
    model_type, settings = VARIANTS["opt"]
    save_tiny_model(model_type, tmp_path, **settings)
    backend = backends.get("tnx").load(tnx_plan(tmp_path, continuous=False))
    limit, engine = backend.spec.max_model_len, Engine(backend)
    # Turn of arrival, tokens of the prompt, tokens of the answer; "b" leaves rows behind that lag after it.
    traffic = {"a": (0, 3, 40), "b": (4, 20, 28), "c": (4, 1, 30), "d": (9, 7, 2), "e": (45, 5, 9)}
    cached: dict[str, int] = {}
    end, reasons = 0, set()
    for turn in range(200):
        for name, (arrival, length, wanted) in traffic.items():
            if arrival == turn:
                prompt = [3 + length + i for i in range(length)]
                engine.add(GenerationRequest(name, prompt, max_new_tokens=wanted, ignore_eos=True))
        outputs, info = engine.step()
        if info is None:
            continue
        joins, runs_out = info.kind == "prefill", end == limit
        assert info.num_reprefilled == (sum(cached.values()) if joins or runs_out else 0)
        if joins:
            cached |= {output.request_id: traffic[output.request_id][1] for output in outputs}
        else:
            cached = {name: tokens + 1 for name, tokens in cached.items()}
        end = max(cached.values()) if joins or runs_out else end + 1
        if info.num_reprefilled:
            reasons.add("join" if joins else "end")
        for output in outputs:
            assert output.error is None
            if output.finish_reason is not None:
                del cached[output.request_id]
    assert reasons == {"join", "end"}
    assert not engine.has_work
    backend.close()


def test_what_a_failure_costs_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        message = "the device did not answer"
        raise RuntimeError(message)

    model_type, settings = VARIANTS["opt"]
    save_tiny_model(model_type, tmp_path, **settings)
    backend = backends.get("tnx").load(tnx_plan(tmp_path, continuous=False))
    wanted = reference(load_reference(tmp_path), [5, 6, 7], 6)
    driver = Driver(backend)
    driver.join({0: [5, 6, 7], 2: [8, 9]})
    driver.decode()
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_model", broken)
        with pytest.raises(StepError, match="did not answer"):
            backend.run(driver.next())
    assert backend.run(driver.next()).num_reprefilled == 4 + 3
    for _ in range(4):
        driver.decode()
    assert_same(driver.leave(0), wanted)
    backend.close()


@pytest.mark.parametrize("name", ["gpt2", "opt", "bloom"])
def test_another_program_s_graphs_encode_what_is_longer_token_by_token(
    tmp_path: Path, name: str
) -> None:
    model_type, settings = VARIANTS[name]
    model, compiled = save_tiny_model(model_type, tmp_path / "model", **settings), tmp_path / "c"
    compiled.mkdir()
    plan = tnx_plan(model, continuous=False)
    # As every program compiles that does not have sequences join a static batch.
    foreign = tnx_plan(model, continuous=False, foreign_graphs=True)
    tnx.compile(foreign, compiled)
    with pytest.raises(ArtifactError, match="Compile it again"):
        tnx.load(plan, compiled)
    backend = tnx.load(foreign, compiled)
    try:
        assert assert_like_alone(backend, load_reference(model), seed=1) > 100
    finally:
        backend.close()


@pytest.mark.parametrize("name", ["gpt2", "opt", "bloom", "llama", "mistral", "mixtral"])
def test_whoever_joins_sequences_longer_than_any_prompt_costs_one_call(
    tmp_path: Path, name: str
) -> None:
    runtime = pytest.importorskip("neuron_emulator.runtime", reason="counts the rig's executions")
    model_type, settings = VARIANTS[name]
    save_tiny_model(model_type, tmp_path, **settings)
    backend = backends.get("tnx").load(tnx_plan(tmp_path, continuous=False))
    assert backend.spec.prefill_buckets == (8, 20)
    driver, costs = Driver(backend), []
    driver.join({0: [3 + i * i % 83 for i in range(19)]})
    for slot in (1, 2):
        before = runtime.stats["executions"]
        driver.join({slot: [4 + slot, 9]})
        costs.append(runtime.stats["executions"] - before)
        for _ in range(12):
            driver.decode()
    assert costs[1] == costs[0]
    model = load_reference(tmp_path)
    for slot in (0, 1, 2):
        found = driver.leave(slot)
        assert_same(found, reference(model, found.prompt, len(found.tokens)))
    with pytest.raises(StepError, match="a prompt of 21 tokens"):
        backend.run(Step(prefill=make_rows({0: range(3, 24)})))
    backend.close()

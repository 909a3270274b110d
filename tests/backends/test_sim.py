"""The device that only waits: its answers, its time, and where it is refused."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from djl_python_neuronx import backends
from djl_python_neuronx.artifacts.folder import CONFIGURATION, SERVING
from djl_python_neuronx.backends.base import Float32Array, Step, Want
from djl_python_neuronx.backends.sim import backend as sim
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.step_times import StepTimes
from djl_python_neuronx.errors import ServingError
from djl_python_neuronx.loading.check import check
from djl_python_neuronx.loading.partition import compile_model
from djl_python_neuronx.loading.prepare import prepare_or_raise
from djl_python_neuronx.planning import machines
from djl_python_neuronx.planning.backend_choice import choose_backend, libraries
from tests.clients.answers import MODEL
from tests.clients.embedded import DEADLINE_S, Embedded
from tests.doubles.device_driver import logits_of, make_rows

EOS = (2, 5)
MAX_LEN = 64
SHAPES: Mapping[str, Any] = {
    "num_slots": 3, "max_model_len": MAX_LEN, "prefill_buckets": (8, 32), "token_buckets": (16, 64)
}  # fmt: skip
TIMES = {"prefill": {"8": 20, "32": 70.5}, "decode": {"16": 3, "64": 4.25}}


def write_model(folder: Path, **config: object) -> Path:
    """A model without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((MODEL / name).read_bytes())
    whole = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def load(folder: Path, **plan: Any) -> sim.SimBackend:
    plan = {**SHAPES, "eos_ids": frozenset(EOS), **plan}
    loaded = backends.get("sim").load(backends.LoadPlan(folder, **plan))
    assert isinstance(loaded, sim.SimBackend)
    return loaded


@pytest.fixture
def short_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim, "_RING_BYTES", 0)


def texts(
    backend: sim.SimBackend,
    prompts: Mapping[int, Sequence[int]],
    num_steps: int,
    num_ranks: int = 1,
) -> dict[int, tuple[list[int], Float32Array]]:
    """Of each slot the tokens, which have the ranks 1 to `num_ranks` in turn, and all its logits."""
    tokens: dict[int, list[int]] = {slot: [] for slot in prompts}
    logits: dict[int, list[Float32Array]] = {slot: [] for slot in prompts}

    def take(slots: Sequence[int], values: Float32Array) -> None:
        for slot, row in zip(slots, values[:, 0], strict=True):
            tokens[slot].append(int(row.argsort()[-1 - len(tokens[slot]) % num_ranks]))
            logits[slot].append(row.copy())

    for slot, prompt in prompts.items():
        backend.acquire(slot, prompt, 0)
        take([slot], logits_of(backend, Step(prefill=make_rows({slot: prompt}))))
    for i in range(num_steps - 1):
        starts = {slot: len(prompt) + i for slot, prompt in prompts.items()}
        rows = make_rows({slot: text[-1:] for slot, text in tokens.items()}, starts)
        take([*prompts], logits_of(backend, Step(decode=rows)))
    backend.release([*prompts])
    return {slot: (tokens[slot], np.array(logits[slot])) for slot in prompts}


@pytest.mark.usefixtures("short_ring")
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_logits_follow_from_the_history_alone(tmp_path: Path, num_ranks: int) -> None:
    """In more steps than the ring has, with the best tokens and with others, as a sampled request takes them."""
    folder = write_model(tmp_path)
    prompts = {0: [7, 8, 9], 1: [7, 8, 9], 2: [9, 8, 7, 6]}
    together = texts(load(folder), prompts, 40, num_ranks)
    np.testing.assert_array_equal(together[0][1], together[1][1])
    assert together[0][0] != together[2][0]
    busy = load(folder)
    texts(busy, {2: [4]}, 5)
    for slot, prompt in ((1, prompts[0]), (0, prompts[2])):
        tokens, logits = texts(busy, {slot: prompt}, 40, num_ranks)[slot]
        assert tokens == together[2 if slot == 0 else 0][0]
        np.testing.assert_array_equal(logits, together[2 if slot == 0 else 0][1])
    # Another model gives another text.
    other = texts(load(write_model(tmp_path / "other", seed=2)), {0: prompts[0]}, 40, num_ranks)
    assert other[0][0] != together[0][0]


@pytest.mark.usefixtures("short_ring")
def test_the_end_of_text_is_never_likely(tmp_path: Path) -> None:
    """A vocabulary of eight tokens, of which two are eos, at any temperature up to 10; one eos more is beyond it."""
    backend = load(write_model(tmp_path, vocab_size=8), eos_ids=frozenset({*EOS, 8}))
    tokens, logits = texts(backend, {0: [1]}, 60)[0]
    assert {*tokens} == {*range(8)} - {*EOS}
    weights = np.exp(logits.astype(np.float64) / 10)
    assert (weights[:, EOS].sum(axis=1) / weights.sum(axis=1)).max() < 1e-3


def test_the_ring_is_larger_than_the_caches(tmp_path: Path) -> None:
    ring = load(write_model(tmp_path))._model.ring
    assert 64 * 2**20 <= ring.nbytes < 65 * 2**20
    assert np.ptp(ring, axis=(0, 1, 2)).max() == 0


class Clock:
    """Time that passes only while the backend sleeps: too late by 0.2 ms, as the kernel's timers are."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def monotonic_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now_ns += round(seconds * 1e9) + (200_000 if seconds else 1_000)


def decode(start: int) -> Step:
    return Step(decode=make_rows({0: [5]}, {0: start}))


def prefill(length: int, start: int = 0) -> Step:
    return Step(prefill=make_rows({0: [5] * length}, {0: start}, Want.NOTHING))


STEPS: Sequence[tuple[Step, float]] = [
    *((prefill(length), 20) for length in (1, 8)),
    *((prefill(length), 70.5) for length in (9, 32)),
    # The positions that a decode reads have its own.
    *((decode(start), 3) for start in (14, 15)),
    *((decode(start), 4.25) for start in (16, 30)),
]
MIXED: Sequence[tuple[Step, float]] = [
    (prefill(32), 70.5),
    (decode(30), 20),
    (Step(make_rows({1: [5] * 7}), decode(30).decode), 20),
    (Step(make_rows({2: [5] * 8}), decode(30).decode), 70.5),
]


@pytest.mark.parametrize("mixed", [False, True])
def test_a_step_takes_the_time_of_its_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mixed: bool
) -> None:
    clock, wrong = Clock(), []
    monkeypatch.setattr(sim, "time", clock)
    folder = write_model(tmp_path)
    times = StepTimes.model_validate(TIMES)
    for given, steps in ((times, MIXED if mixed else STEPS), (12.5, [(s, 12.5) for s, _ in STEPS])):
        backend = load(folder, sim_step_ms=given, mixed_steps=mixed)
        backend.run(prefill(32))
        for step, expected_ms in steps:
            began_ns = clock.now_ns
            backend.run(step)
            taken_ms = (clock.now_ns - began_ns) / 1e6
            if not expected_ms <= taken_ms < expected_ms + 0.01:
                wrong.append((step, taken_ms, expected_ms))
            backend.run(prefill(32))
    assert wrong == []


def test_it_is_never_chosen_by_itself() -> None:
    devices = (None, "inf2.48xlarge")
    for loader, name, compiled, is_dry in itertools.product(
        ("auto", "optimum", "vllm"), devices, (None, "tnx", "nxdi"), (False, True)
    ):
        machine = machines.detect(environ={}) if name is None else machines.named(name)
        options = ServingOptions(model_id="m", model_loader=loader, sim_step_ms=5)
        for installed in (None, libraries()):
            try:
                choice = choose_backend(
                    options, machine, "llama", lambda _library: (),
                    installed=installed, artifact_backend=compiled, dry_run=is_dry,
                )  # fmt: skip
            except ServingError:
                continue
            assert choice.backend != "sim"
    options = ServingOptions(model_id="m", model_loader="sim")
    for name in devices:
        machine = machines.detect(environ={}) if name is None else machines.named(name)
        choice = choose_backend(
            options, machine, "llama", lambda _library: (), installed=libraries()
        )
        assert (choice.backend, choice.reason) == ("sim", "")


DRAFTS = "model_loader=sim verifies no drafts"
REFUSED: Sequence[tuple[Mapping[str, object], str]] = [
    ({"ngram_prompt_lookup_max": 3}, DRAFTS),
    ({"speculative_draft_model": str(MODEL)}, DRAFTS),
    ({"sim_step_ms": {"prefill": {"8": 1}, "decode": {"512": 1}}}, "prefill has no time for 512 tok"),
    ({"sim_step_ms": {"prefill": {"512": 1}, "decode": {"8": 1}}}, "decode has no time for 512 tok"),
    ({"sim_step_ms": {"prefill": {"512": 1}}}, "decode is missing"),
    ({"sim_step_ms": {"prefill": {"512": 1}, "decode": {"x": 1}}}, "decode.x is wrong"),
    ({"sim_step_ms": {"prefill": {"512": -1}, "decode": {"512": 1}}}, "prefill.512 is wrong"),
    ({"sim_step_ms": {"prefill": {"512": 1}, "decode": {"512": 1}, "all": 1}}, "all is not known"),
]  # fmt: skip


def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    """A step-time file with its name; `check` and a start say the same."""
    folder = write_model(tmp_path / "model")
    for options, text in REFUSED:
        given = {"model_loader": "sim", **options}
        if "sim_step_ms" in options:
            (folder / "steps.json").write_text(json.dumps(options["sim_step_ms"]))
            given["sim_step_ms"] = "steps.json"
        overrides = {name: str(value) for name, value in given.items()}
        errors = check(str(folder), environ={}, overrides=overrides).findings.messages("error")
        assert len(errors) == 1, errors
        assert text in errors[0]
        if "is " in text:
            assert "'steps.json'" in errors[0]
        with pytest.raises(ServingError, match=text):
            prepare_or_raise(None, folder, environ={}, overrides=overrides)
    sim_only = {"model_loader": "sim"}
    with pytest.raises(ServingError, match="model_loader=sim compiles nothing"):
        compile_model(str(folder), str(tmp_path / "out"), environ={}, overrides=sim_only)
    config = json.loads((folder / "config.json").read_text())
    del config["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ServingError, match="vocab_size"):
        prepare_or_raise(None, folder, environ={}, overrides=sim_only)


def test_a_model_of_any_size_fits(tmp_path: Path) -> None:
    """A laptop has no room for its weights: none are loaded."""
    folder = write_model(
        tmp_path, hidden_size=16384, num_hidden_layers=126, num_attention_heads=128
    )
    report = check(str(folder), environ={}, overrides={"model_loader": "sim", "n_positions": "512"})
    assert report.findings.messages("error") == ()
    (warning,) = report.findings.messages("warning")
    assert "no model runs, and all answers are made up" in warning
    assert report.prepared is not None
    assert report.prepared.planned.memory is None


def test_options_without_effect_are_noted(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    for options, name in (
        ({"model_loader": "sim", "cpu_threads": "2"}, "cpu_threads"),
        ({"model_loader": "sim", "quantize": "static_int8"}, "quantize"),
        ({"model_loader": "tnx", "sim_step_ms": "7"}, "sim_step_ms"),
    ):
        found = check(str(folder), environ={}, overrides=options).findings
        assert any(one.options == (name,) for one in found if one.level == "note"), name


def test_no_weights_are_fetched() -> None:
    kept = ["config.json", "merges.txt", "tokenizer.model", "model.py", "chat_template.jinja"]
    weights = ["model.safetensors", "model-00001-of-2.safetensors", "model.safetensors.index.json"]
    weights += ["pytorch_model.bin", "pytorch_model.bin/p0.wte", "model.pt", "compiled/a1.neff"]
    assert sorted(CONFIGURATION.choose([*weights, *kept])) == sorted(kept)
    for name in (*weights[:4], weights[5]):
        assert SERVING.choose([name, "config.json"]) == ["config.json", name]


def test_the_embedded_server_serves_it_without_weights(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="needs the `server` extra")
    folder = write_model(tmp_path / "model")
    (folder / "steps.json").write_text('{"prefill": {"512": 2}, "decode": {"512": 1}}')
    options = {"model_loader": "sim", "sim_step_ms": "steps.json", "max_rolling_batch_size": 4}
    server = Embedded(options, tmp_path, dict(os.environ), models=(folder,))
    try:
        server.wait_ready()
        info = server.send("GET", "/info", b"", {}, time.monotonic() + DEADLINE_S)
        assert json.loads(info.data)["simulated"] is True

        def generate(**parameters: object) -> list[int]:
            parameters |= {"max_new_tokens": 30, "details": True}
            body = json.dumps({"inputs": "one two", "parameters": parameters}).encode()
            reply = server.post(body, {})
            assert reply.status == 200, reply
            details = json.loads(reply.data)["details"]
            assert details["finish_reason"] == "length"
            return [token["id"] for token in details["tokens"]]

        sampled = {"do_sample": True, "temperature": 2.0, "seed": 4}
        greedy, drawn = generate(), generate(**sampled)
        assert len(greedy) == len(drawn) == 30
        assert greedy != drawn
        assert (generate(), generate(**sampled)) == (greedy, drawn)
        assert server.end() == 0
    finally:
        server.kill()
    assert server.log_text.count("loaded backend=sim (no model runs, answers are made up)") == 1


def test_a_decode_that_comes_again_is_one_position_further_or_refused(tmp_path: Path) -> None:
    backend = load(write_model(tmp_path), sim_step_ms=0.0)
    backend.acquire(0, [7], 0)
    backend.run(Step(prefill=make_rows({0: [7]})))
    rows = make_rows({0: [8]}, {0: 1})
    step = Step(decode=rows)
    for position in range(1, MAX_LEN):
        rows.starts[:] = position
        backend.run(step)
    for position, why in ((MAX_LEN, "positions"), (MAX_LEN + 1, "positions"), (-1, "positions")):
        rows.starts[:] = position
        with pytest.raises(ServingError, match=why):
            backend.run(step)
    rows.starts[:] = 1
    backend.run(step)
    backend.release([0])
    for position, why in ((2, "starts"), (0, "slots that hold a prompt")):
        rows.starts[:] = position
        with pytest.raises(ServingError, match=why):
            backend.run(step)

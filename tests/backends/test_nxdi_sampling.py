"""Tokens of NxD Inference: each row as its own parameters say, on the device or not, whatever its neighbours have."""

from __future__ import annotations

import importlib
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the nxdi backend needs torch")

from djl_python_neuronx.backends.base import Step, Want  # noqa: E402
from djl_python_neuronx.backends.nxdi.rows import NO_TOP_P  # noqa: E402
from djl_python_neuronx.backends.nxdi.spec import TEMPERATURES  # noqa: E402
from djl_python_neuronx.engine.core import Engine  # noqa: E402
from djl_python_neuronx.engine.limits import check, sampled_on_host  # noqa: E402
from djl_python_neuronx.errors import StepError, UnsupportedParameterError  # noqa: E402
from djl_python_neuronx.sampling import SamplingParams  # noqa: E402
from djl_python_neuronx.types import GenerationRequest  # noqa: E402
from tests.backends.nxdi_plans import loaded, obtained, save_variant  # noqa: E402
from tests.distributions import assert_followed, hugging_face  # noqa: E402
from tests.doubles.device_driver import make_rows  # noqa: E402
from tests.doubles.tiny_models import load_reference  # noqa: E402

pytestmark = pytest.mark.nxdi

PROMPT, NEXT, DRAWS = [5, 6, 7], 9, 900
GENERATION = '{"do_sample": true, "dynamic": true, "global_top_k": 16, "top_k": 16}'
ROWS = [
    SamplingParams(temperature=temperature, top_k=top_k)
    for top_k, temperature in product((1, 2, 5, 16), (0.7, 2.0, 5.0))
]
"""Of requests that the device samples."""
FIXED = SamplingParams(temperature=3.0, top_k=5)
MIXED = {
    "output_logits": "true",
    "rolling_batch_strategy": "naive_rolling_batch",  # 16 draws in a call
    "max_rolling_batch_size": "16",
}


@pytest.fixture
def backend(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A llama that samples on the device, with its reference in transformers."""
    monkeypatch.setenv("NXDI_RIG_SEED", "7")
    folder = save_variant("llama", tmp_path / "model")
    settings = {"on_device_generation": GENERATION, **getattr(request, "param", {})}
    made = obtained(folder, tmp_path, **settings)
    with loaded(made.plan, made.folder) as found:
        yield found, load_reference(folder)


def logits_of(model: Any, *tokens: int) -> Any:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, -1]


@pytest.mark.parametrize(
    ("backend", "params"),
    [
        ({}, ROWS),
        ({"on_device_generation": '{"do_sample": true, "top_k": 5, "temperature": 3}'}, [FIXED]),
        pytest.param({"tensor_parallel_degree": "2"}, ROWS, marks=pytest.mark.nightly),
        pytest.param({"async_execution": "true"}, ROWS, marks=pytest.mark.nightly),
    ],
    indirect=["backend"],
    ids=["one core", "fixed", "two cores", "async"],
)
def test_each_row_is_drawn_as_its_own_parameters_say(
    backend: Any, params: list[SamplingParams]
) -> None:
    backend, model = backend
    draws: dict[Any, Any] = {}
    for start in range(0, len(params), 4):
        four = params[start : start + 4]
        slots = range(len(four))
        values = [(one.top_k, one.top_p, one.temperature) for one in four]
        for slot in slots:
            backend.acquire(slot, PROMPT, 0)
            prompt = make_rows({slot: PROMPT}, wants=Want.TOKENS)
            prompt.sampling[0] = values[slot]
            drawn = (start, slot) == (4, 1)
            runs = DRAWS if drawn else 1
            found = [backend.run(Step(prefill=prompt)).ids.item() for _ in range(runs)]
            if drawn:
                wanted = hugging_face(logits_of(model, *PROMPT), four[slot])
                draws["prefill", four[slot]] = found, wanted
        rows = make_rows(
            {slot: [NEXT] for slot in slots}, dict.fromkeys(slots, len(PROMPT)), Want.TOKENS
        )
        rows.sampling[:] = values
        before = rows.sampling.copy()
        ids = [backend.run(Step(decode=rows)).ids[:, 0].tolist() for _ in range(DRAWS)]
        assert (rows.sampling == before).all()
        for one, found in zip(four, zip(*ids, strict=True), strict=True):
            draws[one] = found, hugging_face(logits_of(model, *PROMPT, NEXT), one)
        backend.release(list(slots))
    assert_followed(draws)


def test_a_row_with_top_p_is_refused(backend: Any) -> None:
    backend, _ = backend
    sampling = SamplingParams(temperature=1.0, top_k=3, top_p=0.9)
    with pytest.raises(UnsupportedParameterError, match=r"top_p is 0\.9.*output_logits"):
        check(GenerationRequest("r", PROMPT, sampling), backend.spec)
    backend.acquire(0, PROMPT, 0)
    rows = make_rows({0: PROMPT}, wants=Want.TOKENS)
    rows.sampling[0] = (3, 0.9, 1.0)
    with pytest.raises(StepError, match="top_p"):
        backend.run(Step(prefill=rows))


@pytest.mark.nightly
@pytest.mark.parametrize("backend", [MIXED], indirect=True)
def test_requests_are_drawn_alike_with_log_probabilities_and_without(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, model = backend
    # A request with a seed of its own is always the host's.
    seeds = count()
    monkeypatch.setattr("secrets.randbits", lambda _: next(seeds))
    engine, logits, draws = Engine(backend), logits_of(model, *PROMPT), {}
    for top_k, top_p, temperature, min_p in product((0, 5), (1.0, 0.7), (0.8, 4.0), (0.0, 0.2)):
        for logprobs in (False, True):
            params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
            found: list[int] = []
            for name in range(DRAWS):
                request = GenerationRequest(str(name), PROMPT, params, 1, logprobs=logprobs)
                check(request, backend.spec)
                on_host = logprobs or top_p < 1 or min_p > 0 or not top_k
                assert sampled_on_host(request, backend.spec) == on_host
                engine.add(request)
            while engine.has_work:
                found += [token for one in engine.step().outputs for token in one.token_ids]
            draws[params, logprobs] = found, hugging_face(logits, params)
    assert_followed(draws)


def test_the_device_draws_from_exactly_what_hugging_face_does() -> None:
    """With the parameters that a row gets here: no neighbour, rounded sum or temperature changes its distribution."""
    library = "neuronx_distributed_inference"
    module = importlib.import_module(f"{library}.modules.generation.sampling")
    kind = importlib.import_module(f"{library}.models.config").OnDeviceSamplingConfig
    own = kind(do_sample=True, dynamic=True, global_topk=64)
    sampler = module.Sampler(
        SimpleNamespace(on_cpu=True, is_medusa=False, on_device_sampling_config=own)
    )
    random = np.random.default_rng(0)
    for _ in range(300):
        logits = torch.from_numpy(random.normal(size=(5, 97)).astype(np.float32))
        logits *= torch.from_numpy(random.uniform(0.1, 20, (5, 1)).astype(np.float32))
        temperatures = random.choice([1e-30, 0.01, 0.5, 1.0, 3.0, TEMPERATURES[1]], 5)
        rows = [
            SamplingParams(temperature=float(temperature), top_k=int(top_k))
            for temperature, top_k in zip(temperatures, random.integers(1, 65, 5), strict=True)
        ]
        parameters = torch.tensor([[row.top_k, NO_TOP_P, row.temperature] for row in rows])
        ids, found = sampler(logits.clone(), parameters, return_values=True)
        drawn = torch.zeros_like(logits).scatter_(1, ids, found)
        wanted = np.array([hugging_face(*pair) for pair in zip(logits, rows, strict=True)])
        np.testing.assert_allclose(drawn, wanted, atol=1e-4)  # float32 at a temperature of 0.01

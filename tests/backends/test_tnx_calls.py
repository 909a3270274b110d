"""What `check` says that the library is called with, against what the backend calls it with."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the tnx backend needs torch")

from djl_python_neuronx import backends
from djl_python_neuronx.loading.check import check
from djl_python_neuronx.loading.load_plan import load_plan
from djl_python_neuronx.loading.prepare import prepare_or_raise
from djl_python_neuronx.loading.report import calls
from djl_python_neuronx.planning import machines
from tests.backends import tnx_double

TINY = Path(__file__).parents[2] / "examples" / "tiny-llama"
MACHINE = machines.named("inf2.xlarge")
SETTINGS = {
    "model_loader": "tnx",
    "tensor_parallel_degree": "1",
    "n_positions": "128",
    "max_rolling_batch_size": "2",
}


@pytest.mark.parametrize(
    ("settings", "methods"),
    [
        ({}, set()),
        ({"ngram_prompt_lookup_max": "3"}, {"enable_speculative_decoder"}),
        (
            {"ngram_prompt_lookup_max": "3", "speculative_length": "4"},
            {"enable_speculative_decoder"},
        ),
        (
            {"speculative_draft_model": str(TINY), "speculative_length": "2"},
            {"enable_speculative_decoder"},
        ),
        ({"enable_chunked_prefill": "true"}, {"init_cache_engine"}),
    ],
)
def test_the_backend_calls_what_check_says(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], methods: set[str]
) -> None:
    tnx_double.install(monkeypatch)
    overrides = {**SETTINGS, **settings}
    told = calls(check(str(TINY), environ={}, overrides=overrides, machine=MACHINE))
    assert told.keys() == methods
    prepared = prepare_or_raise(None, TINY, environ={}, overrides=overrides, machine=MACHINE)
    backends.get("tnx").load(load_plan(prepared, prepared.load_tokenizer())).close()
    assert told == tnx_double.CALLS

"""Speculation from the options to the answers: the same texts, with a draft model or a look-up, also compiled ahead."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the cpu backend needs torch")
pytest.importorskip("transformers", "4.57", reason="the cpu backend needs transformers 4.57")


from djl_python_neuronx.engine.core import Engine  # noqa: E402
from djl_python_neuronx.engine.streams import BlockingQueue  # noqa: E402
from djl_python_neuronx.engine.worker import EngineThread, WorkerSettings  # noqa: E402
from djl_python_neuronx.errors import ConfigError, ServingError  # noqa: E402
from djl_python_neuronx.loading import launch as launch_module  # noqa: E402
from djl_python_neuronx.loading.engine_process import EngineJob  # noqa: E402
from djl_python_neuronx.loading.launch import make_launch  # noqa: E402
from djl_python_neuronx.loading.partition import compile_model  # noqa: E402
from djl_python_neuronx.loading.prepare import prepare_or_raise  # noqa: E402
from djl_python_neuronx.service import Service  # noqa: E402
from djl_python_neuronx.telemetry import exposition  # noqa: E402
from tests.backends.top_tokens import TINY, assert_top_tokens  # noqa: E402
from tests.doubles.tiny_models import save_tiny_model  # noqa: E402

PLAIN = {
    "model_loader": "cpu",
    "n_positions": "128",
    "max_rolling_batch_size": "3",
    "dtype": "fp32",
}
DRAFT = {**PLAIN, "speculative_draft_model": str(TINY), "speculative_length": "4"}
LOOKUP = {
    **PLAIN,
    "ngram_prompt_lookup_max": "3",
    "speculative_length": "4",
    "engine_process": "false",
}
SAMPLED = {"do_sample": True, "temperature": 0.9, "seed": 3}


def answers(
    options: dict[str, str], folder: Path = TINY
) -> tuple[list[tuple[str, str]], dict[str, float]]:
    """Texts and reasons of some requests that run at the same time, and the counters of drafts."""
    prompts = ["a b c d a b c", "the cat", "1 2 1 2 1 2"]
    bodies: list[dict[str, Any]] = [
        {"inputs": prompt, "parameters": {"max_new_tokens": 40, **parameters}}
        for prompt in prompts
        for parameters in ({}, SAMPLED, {"repetition_penalty": 1.3}, {"stop": ["e", "1"]})
    ]
    service = Service.load(None, folder, environ={}, overrides=options)
    texts: dict[str, str] = defaultdict(str)
    reasons: dict[str, str] = {}
    inbox = BlockingQueue()
    names = []
    try:
        for body in bodies:
            request = service.parse(json.dumps(body).encode()).request
            names.append(request.request_id)
            service.loop.submit(request, inbox)
        while len(reasons) < len(bodies):
            for delta in inbox.drain(60):
                assert delta.error is None, delta.error
                texts[delta.request_id] += delta.text
                if delta.finish_reason is not None:
                    reasons[delta.request_id] = delta.finish_reason.value
        if folder == TINY:
            assert_top_tokens(service, prompts[0])
        metrics = exposition({"": service.metrics}).decode().splitlines()
    finally:
        service.close()
    counters = {
        line.partition("{")[0].removeprefix("djl_neuronx_"): float(line.split()[1])
        for line in metrics
        if "draft_tokens_total" in line and not line.startswith("#")
    }
    return [(texts[name], reasons[name]) for name in names], counters


def job(
    options: dict[str, str], folder: Path = TINY, environ: Mapping[str, str] = MappingProxyType({})
) -> EngineJob:
    """Everything that the engine process gets."""
    launch = make_launch(prepare_or_raise(None, folder, environ=environ, overrides=options))
    launch.tokenizer().close()
    return launch.job


@pytest.fixture(scope="module")
def wanted() -> dict[str, tuple[str, str]]:
    found, counters = answers({**PLAIN, "engine_process": "false"})
    assert set(counters.values()) == {0.0}
    return found


@pytest.mark.parametrize("options", [DRAFT, LOOKUP], ids=["draft model", "look-up"])
def test_the_texts_are_those_without_drafts(
    options: dict[str, str], wanted: dict[str, tuple[str, str]]
) -> None:
    found, counters = answers(options)
    assert found == wanted
    assert 0 < counters["accepted_draft_tokens_total"] <= counters["draft_tokens_total"]


def test_a_compiled_output_has_its_draft_model_with_it(
    tmp_path: Path, wanted: dict[str, tuple[str, str]]
) -> None:
    output = tmp_path / "output"
    compile_model(str(TINY), str(output), environ={}, overrides=DRAFT)
    assert "option.speculative_draft_model=draft" in (output / "serving.properties").read_text()
    moved = output.rename(tmp_path / "elsewhere")
    found, counters = answers({"dtype": "fp32"}, moved)
    assert found == wanted
    assert counters["accepted_draft_tokens_total"] > 0
    # By its name too, when its `serving.properties` is not read.
    named = job({"dtype": "fp32", "model_id": str(moved)}, tmp_path)
    assert named == job({"dtype": "fp32"}, moved)
    assert len(named.models) == 2


@pytest.mark.parametrize(
    "line",
    [
        "option.on_device_generation=true",
        "option.speculative_draft_model=.",
        "option.enable_chunked_prefill=true",
        "option.no_such_option=1",
    ],
)
def test_a_file_in_the_draft_models_folder_is_for_serving_it(tmp_path: Path, line: str) -> None:
    draft = shutil.copytree(TINY, tmp_path / "draft")
    options = {**DRAFT, "speculative_draft_model": str(draft)}
    without = job(options)
    (draft / "serving.properties").write_text(f"engine=Python\n{line}\n")
    assert job(options) == without
    assert len(without.models) == 2


def test_the_threads_of_the_options_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model is loaded last. Threads of torch have numbers of their own: the engine's counts."""
    found: list[int] = []

    def start(load: Callable[[], Engine], settings: WorkerSettings) -> EngineThread:
        def noting() -> Engine:
            engine = load()
            found.append(torch.get_num_threads())
            return engine

        return EngineThread(noting, settings)

    monkeypatch.setattr(launch_module, "EngineThread", start)
    overrides = {**DRAFT, "cpu_threads": "2", "engine_process": "false"}
    Service.load(None, TINY, environ={}, overrides=overrides).close()
    assert found == [2]


def test_options_of_the_environment_are_not_the_draft_models() -> None:
    environ = {"OPTION_N_POSITIONS": "64", "OPTION_MAX_ROLLING_BATCH_SIZE": "1"}
    found = job(DRAFT, environ=environ)
    assert found == job(DRAFT)
    assert [(one.plan.max_model_len, one.plan.num_slots) for one in found.models] == [(128, 3)] * 2


def test_a_draft_model_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path / "other")
    with pytest.raises(ConfigError, match=r"97 tokens and the model's \d+"):
        answers({**DRAFT, "n_positions": "64", "speculative_draft_model": str(tmp_path / "other")})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ServingError, match="empty"):
        answers({**DRAFT, "speculative_draft_model": str(tmp_path / "empty")})

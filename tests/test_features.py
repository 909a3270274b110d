"""Prefixes, adapters and drafts under traffic: requests at random, clients that leave, an engine that is killed.

Through the embedded server and through DJL's released Java engine, on the CPU and with NxD Inference on its rig.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("uvicorn", reason="needs the `server` extra")

from tests.clients.answers import FORMS, MODEL, SSE, judge
from tests.clients.embedded import Embedded
from tests.djl.folders import write_model
from tests.doubles import neuron_machine
from tests.features import Asked, Feature, in_int8, prepared
from tests.processes import engines, wait_until

LORA = {"enable_lora": "true", "max_loras": "2", "max_lora_rank": "8"}
ADAPTERS = {"red": 1, "blue": 2}
CPU = {"model_loader": "cpu", "max_rolling_batch_size": "4"}
NXDI = {
    "model_loader": "nxdi",
    "dtype": "fp32",
    "tensor_parallel_degree": "1",
    "n_positions": "256",
    "context_length_estimate": "128",
    "max_rolling_batch_size": "4",
}
PREFIXES = {"enable_prefix_caching": "true", "context_length_estimate": "128,256"}
# As its own draft the model accepts all of them.
DRAFT = {"speculative_draft_model": str(MODEL), "speculative_length": "3"}
DEVICE = {"on_device_generation": "true", "output_logits": "true"}
CACHED = ("cached_prompt_tokens_total",)
DRAFTS = ("drafts_total", "accepted_draft_tokens_total")
LOOKUP = {"ngram_prompt_lookup_max": "3", "speculative_length": "3"}
FEATURES: Mapping[str, Feature] = {
    "cpu adapters, prefixes, look-up": Feature(
        {**CPU, **LORA, **LOOKUP, "enable_prefix_caching": "true"}, CACHED + DRAFTS, ADAPTERS
    ),
    "nxdi adapters, look-up": Feature({**NXDI, **LORA, **LOOKUP}, DRAFTS, ADAPTERS),
    "nxdi int8": Feature({**NXDI, "quantize": "static_int8"}, changes=in_int8),
    "nxdi prefixes": Feature({**NXDI, **PREFIXES}, CACHED),
    "nxdi draft": Feature({**NXDI, **DRAFT}, DRAFTS),
    "nxdi ahead": Feature({**NXDI, **DEVICE, "async_execution": "true"}),
}
"""Backend and feature."""


def chosen(*marks: pytest.MarkDecorator) -> list[Any]:
    """Parameters of a test: the features, those of NxD Inference on its rig. `marks`: of the others."""
    return [
        pytest.param(name, marks=pytest.mark.nxdi if name.startswith("nxdi") else marks)
        for name in FEATURES
    ]


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """Variables of a machine with Neuron devices, and one compile store."""
    own = {
        "PATH": f"{neuron_machine.FOLDER / 'bin'}:{os.environ['PATH']}",
        "NEURON_RT_NUM_CORES": "1",
        "NEURON_COMPILE_CACHE_URL": str(tmp_path_factory.mktemp("store")),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in own.items():
            patch.setenv(name, value)
        yield dict(os.environ)


class Server(Embedded):
    """The embedded server, with what it counts."""

    def wait_ready(self) -> None:
        """Wait for it longer than for a model on a CPU: it compiles, and imports the library twice."""
        wait_until(lambda: not self.alive or self._is_ready(), lambda: self.said, 600)
        assert self.alive, self.said

    def _is_ready(self) -> bool:
        time.sleep(1)
        return self.send("GET", "/ping", b"", {}, time.monotonic() + 60).status == 200

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples."""
        text = self.send("GET", "/metrics", b"", {}, time.monotonic() + 60).data.decode()
        found = [line for line in text.splitlines() if line.startswith(f"djl_neuronx_{name}{{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def outcomes(
        self,
        asked: Sequence[Asked],
        draw: random.Random,
        *,
        leave: bool = False,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> list[str]:
        """Ask at random within a second; some clients leave. Returns what came of each request."""

        def client(one: Asked, form: str, at_s: float, leave_s: float | None) -> str:
            time.sleep(at_s)
            body = json.dumps(one.body(stream=form != "json")).encode()
            reply = self.post(body, {"accept": SSE} if form == "sse" else {}, leave_s)
            return judge(reply, form, one.text, leaves=leave_s is not None)

        with ThreadPoolExecutor(len(asked)) as clients:
            found = [
                clients.submit(
                    client,
                    one,
                    draw.choice(FORMS),
                    draw.random(),
                    draw.uniform(0.05, 0.5) if leave and draw.random() < 0.3 else None,
                )
                for one in draw.sample(asked, len(asked))
            ]
            meanwhile()
            return [each.result() for each in found]


@pytest.mark.parametrize("name", chosen())
def test_every_answer_is_right_or_an_error_that_is_seen(
    environ: Mapping[str, str], tmp_path: Path, name: str
) -> None:
    feature, draw = FEATURES[name], random.Random(name)
    options, asked = prepared(feature, tmp_path)
    server = Server.start(options, tmp_path, environ)
    try:
        found = server.outcomes(asked, draw, leave=True)
        assert {*found} <= {"right", "left"}, found
        assert found.count("right") > len(asked) / 3
        before = server.metric("generated_tokens_total")
        (engine,) = engines(server.front)

        def kill() -> None:
            wait_until(lambda: server.metric("generated_tokens_total") > before + 8)
            os.kill(engine, signal.SIGKILL)

        found = server.outcomes(asked, draw, meanwhile=kill)
        assert all(each == "right" or each.startswith("error") for each in found), found
        wait_until(lambda: "engine_restarted" in server.log_text, lambda: server.said, 300)
        found = server.outcomes(asked, draw)
        assert {*found} == {"right"}, found
        for metric in ("engine_deaths_total", *feature.metrics):
            assert server.metric(metric) > 0, metric
    finally:
        server.kill()


@pytest.mark.djl
@pytest.mark.parametrize("name", chosen(pytest.mark.nightly))
def test_djl_s_released_engine_gets_the_same(
    environ: Mapping[str, str], start_java: Any, tmp_path: Path, name: str
) -> None:
    feature, draw = FEATURES[name], random.Random(name)
    options, asked = prepared(feature, tmp_path)
    folder = write_model(tmp_path, "rolling", **options)
    with start_java(environ) as java:
        java.load("tiny", folder)
        (worker,) = java.workers()
        for killed in (False, True, False):
            before = wait_until(lambda: engines(worker), java.tail)
            answers = []
            for one in draw.sample(asked, len(asked)):
                stream, leaves = draw.random() < 0.5, draw.random() < 0.2
                body = one.body(stream=stream)
                (answer,) = java.submit("tiny", body, leave_after=int(stream and leaves))
                answers.append((one, answer, stream and leaves))
                time.sleep(draw.random() / 20)
            if killed:
                os.kill(before[0], signal.SIGKILL)
            for one, answer, left in answers:
                if left:
                    continue
                end = json.loads(answer.wait().content.splitlines()[-1])
                if not (killed and ("error" in end or "code" in end)):
                    assert end["generated_text"] == one.text, (one, end)
            if killed:
                wait_until(lambda old=before: engines(worker) not in ([], old), java.tail)
        assert java.workers() == [worker]

"""The handler on transformers-neuronx in every mode of DJL Serving, against transformers and the embedded server."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="the tnx backend needs torch")
pytest.importorskip("uvicorn", reason="needs the `server` extra")
httpx = pytest.importorskip("httpx", reason="needs httpx")

from transformers import AutoTokenizer  # noqa: E402

from djl_python_neuronx.server import models  # noqa: E402
from djl_python_neuronx.server.app import Application  # noqa: E402
from djl_python_neuronx.service import Service  # noqa: E402
from tests.backends.tnx_plans import CACHE  # noqa: E402
from tests.djl.folders import MODES  # noqa: E402
from tests.doubles.djl_peer import (  # noqa: E402
    ENTRY,
    REST,
    Answer,
    Peer,
)
from tests.doubles.tiny_models import load_reference, save_tiny_model  # noqa: E402
from tests.server.running import TINY_LLAMA, Running  # noqa: E402

pytestmark = pytest.mark.tnx

PROMPTS = (
    "janvier février mars",
    "12 - 5 =",
    "red orange yellow",
    "♎ ♏ ♐",
    "x",
    "Monday Tuesday Wednesday",
)
NUM_TOKENS = (20, 9, 16, 14, 7, 25)
SETTINGS = {
    "model_loader": "tnx",
    "tensor_parallel_degree": "1",
    "dtype": "fp32",
    "n_positions": "96",
    "context_length_estimate": "48",
    "max_rolling_batch_size": "4",
    "compiled_graph_path": CACHE,
}


class Model(NamedTuple):
    """A folder, and what transformers writes greedily after each of PROMPTS."""

    folder: Path
    texts: tuple[str, ...]
    environ: Mapping[str, str]

    @property
    def settings(self) -> dict[str, str]:
        return {**SETTINGS, "model_id": str(self.folder)}


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The quick start's llama (continuous batching), or a gpt2 of random weights (static) that spells like it."""
    work = tmp_path_factory.mktemp(request.param)
    folder = TINY_LLAMA
    if request.param == "gpt2":
        folder = save_tiny_model("gpt2", work / "model", vocab_size=400, n_positions=96)
        for path in TINY_LLAMA.glob("tokenizer*"):
            shutil.copy(path, folder)
    reference, tokenizer = load_reference(folder), AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt, num_tokens in zip(PROMPTS, NUM_TOKENS, strict=True):
        encoded = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        found = reference.generate(**encoded, max_new_tokens=num_tokens, do_sample=False)[0]
        ids = found[encoded.input_ids.shape[1] :]
        texts.append(tokenizer.decode(ids, skip_special_tokens=True))
    return Model(folder, tuple(texts), {"DJL_CACHE_DIR": str(work / "cache")})


@pytest.fixture(scope="module", params=MODES)
def peer(
    request: pytest.FixtureRequest, model: Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Peer]:
    properties, folder = {**model.settings, **MODES[request.param]}, tmp_path_factory.mktemp("peer")
    with Peer(folder, properties, folder, entry_point=ENTRY, env=model.environ) as running:
        yield running


def payload(i: int, *, stream: bool = False, **parameters: object) -> dict[str, Any]:
    parameters = {"max_new_tokens": NUM_TOKENS[i], "do_sample": False, **parameters}
    return {"inputs": PROMPTS[i], "parameters": parameters, "stream": stream}


def generated(answer: Answer) -> str:
    assert answer.wait().status_sent == 200, answer.content
    text: str = json.loads(answer.content.splitlines()[-1])["generated_text"]
    return text


def test_texts_of_many_at_once_are_what_transformers_writes(peer: Peer, model: Model) -> None:
    order = [*range(len(PROMPTS)), *reversed(range(len(PROMPTS)))]
    answers = [peer.submit(payload(i, stream=n % 3 == 0)) for n, i in enumerate(order)]
    assert [generated(answer) for answer in answers] == [model.texts[i] for i in order]
    assert peer.usage() == REST
    assert (peer.failures, peer.num_starts) == (0, 1)


def test_a_stream_comes_before_its_end(peer: Peer, model: Model) -> None:
    answer = peer.submit(payload(0, stream=True, ignore_eos=True))
    lines = [json.loads(line) for line in answer.wait().content.splitlines()]
    assert len(lines) == NUM_TOKENS[0]
    assert len(answer.chunks) > 2  # with a rolling batch on a busy machine a chunk has several
    assert all(line["token"]["log_prob"] <= 0 for line in lines)
    text = "".join(line["token"]["text"] for line in lines)
    assert text == lines[-1]["generated_text"]
    assert text.startswith(model.texts[0])


def test_a_stop_string_ends_its_own_request(peer: Peer, model: Model) -> None:
    text = model.texts[5]
    stop = text[len(text) // 2 :][:3]
    stopped = peer.submit(payload(5, stop=[stop]))
    other = peer.submit(payload(5))
    assert generated(stopped) == text[: text.index(stop)]
    assert generated(other) == text
    assert peer.usage() == REST


def test_a_bad_request_gets_its_error_and_nobody_else(peer: Peer, model: Model) -> None:
    before = [peer.submit(payload(i, stream=i == 1)) for i in range(3)]
    bad = {
        b"{": 400,
        json.dumps(payload(0, no_such_parameter=1)).encode(): 400,
        json.dumps({"inputs": "one two " * 100}).encode(): 413,
    }
    refused = [(peer.submit(body), status) for body, status in bad.items()]
    after = peer.submit(payload(3))
    for answer, status in refused:
        assert answer.wait().status_sent == status
        assert json.loads(answer.content)["code"] == status
    assert [generated(answer) for answer in [*before, after]] == list(model.texts[:4])
    assert peer.usage() == REST


def test_the_embedded_server_writes_the_same(model: Model) -> None:
    application = Application(models.Model("model"))
    application.models[0].service = Service.load(
        None, model.folder, environ={**os.environ, **model.environ}, overrides=SETTINGS
    )
    server = Running(application)

    def text(i: int) -> str:
        response = httpx.post(server.url + "/invocations", json=payload(i), timeout=60)
        assert response.status_code == 200, response.text
        found: str = response.json()["generated_text"]
        return found

    try:
        with ThreadPoolExecutor(len(PROMPTS)) as clients:
            assert tuple(clients.map(text, range(len(PROMPTS)))) == model.texts
    finally:
        server.close()
        application.models[0].service.close()

"""Adapters through DJL's released engine in each of its modes, with the calls of DJL Serving's routes of adapters.

Source: djl-serving d21927c, Adapter.java, PyAdapter.java, ModelInfo.java: the calls that it makes.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch", reason="needs the `cpu` extra")

from tests.djl.conftest import answering
from tests.djl.folders import MODEL, write_model
from tests.djl.questions import body
from tests.doubles.lora_adapters import save_merged, write_adapter

pytestmark = pytest.mark.djl
PROMPT, NUM_TOKENS = "15 20 25 30", 12
LORA = {"enable_lora": "true", "max_loras": 3, "dtype": "fp32"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three adapters: two that lie beside serving.properties, and a later one."""
    model, other = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("other")
    places = {
        "one": model / "adapters" / "one",
        "two": model / "adapters" / "two",
        "three": other / "three",
    }
    for seed, folder in enumerate(places.values()):
        write_adapter(folder, seed=seed)
    return places


@pytest.fixture(scope="module")
def texts(folders, tmp_path_factory):
    """The texts of models with an adapter's product in their weights, served by themselves; "": without one."""
    found = {}
    for name, adapter in {"": None, **folders}.items():
        overrides = {"model_loader": "cpu", "dtype": "fp32"}
        if adapter is not None:
            merged = tmp_path_factory.mktemp("merged") / name
            overrides["model_id"] = str(save_merged(MODEL, adapter, merged))
        with answering(**overrides) as answer:
            found[name] = json.loads(answer(body(PROMPT, NUM_TOKENS)))["generated_text"]
    assert len({*found.values()}) == 4, found
    return found


@pytest.fixture(
    scope="module", params=["rolling", "async", pytest.param("plain", marks=pytest.mark.nightly)]
)
def java(request, start_java, folders):
    """A JVM that serves the example model with adapters; `OPTION_ADAPTER_SOURCES` allows the later one."""
    folder = folders["one"].parents[1]
    write_model(folder, request.param, **LORA)
    with start_java({"OPTION_ADAPTER_SOURCES": str(folders["three"].parent)}) as java:
        java.load("tiny", folder)
        yield java


def ask(java, adapter="", headers=None):
    (answer,) = java.submit(
        "tiny", {**body(PROMPT, NUM_TOKENS), "adapters": adapter}, headers=headers
    )
    return answer.wait()


def text(answer):
    assert (answer.status, answer.errors) == (200, []), answer.content
    return json.loads(answer.content)["generated_text"]


def change(java, function, **properties):
    """A call as PyAdapter makes it. Returns status and reason."""
    (answer,) = java.submit("tiny", None, headers={"handler": function, **properties})
    answer.wait()
    assert answer.errors == []
    return answer.status, answer.reason


def test_a_start_of_java_registers_what_is_there(java, folders, texts):
    for name in ("one", "two"):
        status, _ = change(java, "register_adapter", name=name, src=str(folders[name]))
        assert status == 200
    answers = java.submit(
        "tiny",
        *[{**body(PROMPT, NUM_TOKENS), "adapters": name} for name in ("one", "", "two", None)],
    )
    assert [text(one.wait()) for one in answers] == [texts[name] for name in ("one", "", "two", "")]
    header = {"X-Amzn-SageMaker-Adapter-Identifier": "two"}
    assert text(ask(java, "one", header)) == texts["two"]
    refused = ask(java, "four")
    assert refused.status == 400
    assert "it has 'one', 'two'" in json.loads(refused.content)["error"]


def test_routes_of_adapters(java, folders, texts):
    elsewhere = folders["one"]
    assert change(java, "register_adapter", name="x", src=str(elsewhere))[0] == 400
    assert change(java, "register_adapter", name="three", src=str(folders["three"]))[0] == 200
    assert text(ask(java, "three")) == texts["three"]
    assert change(java, "unregister_adapter", name="two")[0] == 200
    assert ask(java, "two").status == 400
    assert change(java, "update_adapter", name="one", src=str(folders["three"]))[0] == 200
    assert [text(ask(java, name)) for name in ("one", "three", "")] == [
        texts[name] for name in ("three", "three", "")
    ]
    assert change(java, "unregister_adapter", name="none")[0] == 400

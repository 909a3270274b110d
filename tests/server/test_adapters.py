"""Adapters over HTTP: who gets which, and their changes under load. Toys: a text tells whose it is."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from djl_python_neuronx.engine.adapters import Adapters
from djl_python_neuronx.engine.streams import Stream
from djl_python_neuronx.errors import RequestError
from djl_python_neuronx.server.app import Application
from djl_python_neuronx.server.models import Loader, Model
from djl_python_neuronx.service import Service
from djl_python_neuronx.types import GenerationRequest
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend, expected
from tests.doubles.toy_service import toy_service
from tests.doubles.toy_tokenizer import TOKENIZER
from tests.processes import PATIENCE_S, held_port, wait_until
from tests.server.running import Running, body, http, serving

PLACES = 3
SPEC = replace(TOY_SPEC, num_slots=4, num_adapters=PLACES, changes_adapters=True)
PROMPT = [5, 6]
HEADER = "X-Amzn-SageMaker-Adapter-Identifier"


def text(folder: str, prompt: list[int] = PROMPT, num_tokens: int = 5) -> str:
    """The text that the toy's definition has for a prompt and an adapter's folder; "": for the model itself."""
    return TOKENIZER.decode(expected([*folder.encode(), 1, *prompt], num_tokens))


class Served:
    """A server of a toy with the adapters `one` and `two`, whose folders have their names, and its second port."""

    def __init__(self, running: Running, backend: ToyBackend, admin: str) -> None:
        self.running, self.backend, self.admin = running, backend, admin
        self.model = running.application.models[0]

    @property
    def adapters(self) -> Adapters:
        return self.model.ready().adapters

    @property
    def places(self) -> dict[str, int]:
        return self.model.ready().loop.places

    def post(self, path: str, payload: object, **headers: str) -> Any:
        return http.post(self.running.url + path, json=payload, headers=headers)

    def ask(
        self, adapter: str | None = None, prompt: list[int] = PROMPT, num: int = 5, **more: Any
    ) -> Any:
        return self.post("/invocations", {**body(prompt, num, **more), "adapters": adapter})

    def change(self, what: str, **payload: object) -> Any:
        return http.post(f"{self.admin}/v1/{what}_lora_adapter", json=payload)


@contextmanager
def served(step_s: float = 0.0, **options: Any) -> Iterator[Served]:
    backend = ToyBackend(SPEC, step_s=step_s)
    settings = {"model_name": "toy", "max_loras": PLACES, "adapter_sources": ["/"], **options}
    with held_port() as port, serving(backend, admin_port=port, **settings) as running:
        wait_until(lambda: len(running._server.servers) == 2)
        one = Served(running, backend, f"http://127.0.0.1:{port}")
        for name in ("one", "two"):
            one.adapters.register(name, f"/a/{name}")
        yield one
    assert not backend.violations


@pytest.fixture(scope="module")
def toys() -> Iterator[Served]:
    with served() as one:
        yield one


CHAT = [{"role": "user", "content": "<5>"}]
OPENAI = {"prompt": "<5><6>", "max_tokens": 5, "ignore_eos": True, "temperature": 0}
CHOICES: dict[str, tuple[str, Any, dict[str, str], str]] = {
    "LMI, none": ("/invocations", body(PROMPT), {}, ""),
    "LMI, a text": ("/invocations", {**body(PROMPT), "adapters": "one"}, {}, "one"),
    "LMI, a list": ("/invocations", {**body(PROMPT), "adapters": ["two"]}, {}, "two"),
    "LMI, null": ("/invocations", {**body(PROMPT), "adapters": None}, {}, ""),
    "LMI, the model itself": ("/invocations", {**body(PROMPT), "adapters": ""}, {}, ""),
    "LMI, header": ("/invocations", body(PROMPT), {HEADER: "one"}, "one"),
    "the header first": (
        "/invocations",
        {**body(PROMPT), "adapters": "one"},
        {HEADER: "two"},
        "two",
    ),
    "LMI, model": ("/invocations", {**body(PROMPT), "model": "two"}, {}, "two"),
    "adapters before model": (
        "/invocations",
        {**body(PROMPT), "model": "two", "adapters": "one"},
        {},
        "one",
    ),
    "path": ("/predictions/two", body(PROMPT), {}, "two"),
    "TGI": ("/generate", body(PROMPT, parameters={"adapter_id": "one"}), {}, "one"),
    "TGI, header": (
        "/generate",
        body(PROMPT, parameters={"adapter_id": "one"}),
        {HEADER: "two"},
        "two",
    ),
    "TGI, model": ("/generate", {**body(PROMPT), "model": "two"}, {}, ""),
    "vLLM, plain": ("/generate", OPENAI, {HEADER: "two"}, "two"),
    "completions": ("/v1/completions", {**OPENAI, "model": "one"}, {}, "one"),
    "completions, the model": ("/v1/completions", {**OPENAI, "model": "toy"}, {}, ""),
    "completions, header": ("/v1/completions", {**OPENAI, "model": "toy"}, {HEADER: "one"}, "one"),
    "completions, adapters": ("/v1/completions", {**OPENAI, "adapters": "two"}, {}, "two"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_request_chooses_an_adapter(toys: Served, name: str) -> None:
    path, payload, headers, folder = CHOICES[name]
    found = toys.post(path, payload, **headers)
    assert found.status_code == 200, found.text
    answer = found.json()
    written = answer.get("generated_text") or answer.get("text") or answer["choices"][0]["text"]
    assert text(folder) in "".join(written)
    if "model" in answer:
        assert answer["model"] == (folder or "toy")


def test_each_prompt_of_a_list_has_its_adapter(toys: Served) -> None:
    inputs = ["<5><6>", "<7>", "<5><6>"]
    payload = {**body([]), "inputs": inputs, "adapters": ["two", None, "one"]}
    found = [one["generated_text"] for one in toys.post("/invocations", payload).json()]
    assert found == [text("two"), text("", [7]), text("one")]
    found = [
        one["generated_text"]
        for one in toys.post("/invocations", {**payload, "adapters": "one"}).json()
    ]
    assert found == [text("one"), text("one", [7]), text("one")]
    several = toys.post(
        "/v1/completions", {**OPENAI, "prompt": inputs[:2], "adapters": ["two", "one"]}
    ).json()
    assert [one["text"] for one in several["choices"]] == [text("two"), text("one", [7])]
    assert several["model"] == "toy"


def test_all_endpoints_of_openai_echo_the_adapter(toys: Served) -> None:
    asked = {
        "/v1/chat/completions": {"messages": CHAT, "max_tokens": 3},
        "/v1/responses": {"input": "<5>", "max_output_tokens": 3},
        "/v1/messages": {"messages": CHAT, "max_tokens": 3},
    }
    for path, payload in asked.items():
        answers = [toys.post(path, {"model": name, **payload}) for name in ("one", "two", "toy")]
        assert [one.json()["model"] for one in answers] == ["one", "two", "toy"], path
        streamed = toys.post(path, {"model": "one", **payload, "stream": True})
        assert '"model":"one"' in streamed.text
    counts = {
        toys.post("/tokenize", {"model": name, "prompt": "<5>"}).json()["count"]
        for name in ("toy", "one")
    }
    assert counts == {2}


WRONG: dict[str, tuple[str, Any, dict[str, str], int]] = {
    "adapters": ("/invocations", {**body(PROMPT), "adapters": "three"}, {}, 400),
    "one of a list": (
        "/invocations",
        {**body([]), "inputs": ["<5>", "<6>"], "adapters": ["one", "three"]},
        {},
        400,
    ),
    "header": ("/invocations", body(PROMPT), {HEADER: "three"}, 400),
    "TGI": ("/generate", body(PROMPT, parameters={"adapter_id": "three"}), {}, 422),
    "completions, adapters": ("/v1/completions", {**OPENAI, "adapters": "three"}, {}, 400),
    "model, as any unknown one": ("/v1/completions", {**OPENAI, "model": "three"}, {}, 404),
    "path": ("/predictions/three", body(PROMPT), {}, 404),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_unknown_adapter_is_an_error_that_lists_them(toys: Served, name: str) -> None:
    path, payload, headers, status = WRONG[name]
    found = toys.post(path, payload, **headers)
    assert found.status_code == status, found.text
    assert all(each in found.text for each in ("'three'", "'one'", "'two'"))


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        (["one"], "1 names for 2 prompts"),
        (["one", "two", "one"], "3 names for 2 prompts"),
        (5, "adapters names a number"),
        ({"a": 1}, "adapters names an object"),
        (["one", 5], "adapters names a number"),
        (["one", ["two"]], "adapters names a list"),
    ],
)
def test_other_adapters_are_refused(toys: Served, adapters: object, message: str) -> None:
    found = toys.post("/invocations", {**body([]), "inputs": ["<5>", "<6>"], "adapters": adapters})
    assert found.status_code == 400
    assert message in found.json()["error"]


def test_the_list_of_models_has_them(toys: Served) -> None:
    entries = {one["id"]: one for one in http.get(toys.running.url + "/v1/models").json()["data"]}
    parents = {name: (one["parent"], one["root"]) for name, one in entries.items()}
    assert parents == {"toy": (None, "toy"), "one": ("toy", "toy"), "two": ("toy", "toy")}
    assert "/a/" not in json.dumps(entries), "no client learns of folders"
    assert http.get(toys.running.url + "/v1/models/two").json() == entries["two"]


def test_the_log_names_the_adapter(toys: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    toys.ask("one")
    toys.ask()
    lines = [one.getMessage() for one in caplog.records if "request_finished" in one.getMessage()]
    assert ["adapter=one" in line for line in lines] == [True, False]


def test_openais_client_finds_and_uses_them(toys: Served) -> None:
    openai = pytest.importorskip("openai", reason="needs openai")
    client = openai.OpenAI(base_url=toys.running.url + "/v1", api_key="none", timeout=PATIENCE_S)
    assert {one.id for one in client.models.list()} == {"toy", "one", "two"}
    made = client.completions.create(
        model="two", prompt="<5><6>", max_tokens=5, temperature=0, extra_body={"ignore_eos": True}
    )
    assert (made.model, made.choices[0].text) == ("two", text("two"))


# Changes


class Crowd:
    """Clients that ask for adapters without a pause until the end of a block."""

    def __init__(self, server: Served, *adapters: str | None, num_tokens: int = 8) -> None:
        self._server, self._num_tokens, self._enough = server, num_tokens, threading.Event()
        self.answers: dict[str | None, list[tuple[float, int, str]]] = {one: [] for one in adapters}
        """Of each adapter: when it was asked, status and text."""
        self._threads = [
            threading.Thread(target=self._ask, args=(one,)) for one in adapters for _ in "ab"
        ]

    def _ask(self, adapter: str | None) -> None:
        while not self._enough.is_set():
            asked_s = time.monotonic()
            found = self._server.ask(adapter, num=self._num_tokens)
            self.answers[adapter].append(
                (asked_s, found.status_code, found.json().get("generated_text", found.text))
            )

    def texts(self, adapter: str | None) -> set[str]:
        return {answer for _, _, answer in self.answers[adapter]}

    def wait(self, count: int = 5) -> None:
        """Wait until each has so many more answers."""
        before = {name: len(answers) for name, answers in self.answers.items()}
        wait_until(
            lambda: all(len(got) >= before[name] + count for name, got in self.answers.items())
        )

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        self.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert {status for got in self.answers.values() for _, status, _ in got} <= {200, 400}


def test_updates_under_load_change_whole_answers_alone(served_slowly: Served) -> None:
    """The name never disappears, requests that run keep their adapter, and new ones have the next at once."""
    server = served_slowly
    with Crowd(server, None, "one", "two") as crowd:
        for turn in range(8):
            folder = f"/b/v{turn}"
            found = server.change("load", lora_name="two", lora_path=folder, load_inplace=True)
            assert found.status_code == 200, found.text
            assert server.ask("two").json()["generated_text"] == text(f"v{turn}")
            crowd.wait(2)
    assert {status for got in crowd.answers.values() for _, status, _ in got} == {200}
    assert crowd.texts(None) == {text("", num_tokens=8)}
    assert crowd.texts("one") == {text("one", num_tokens=8)}
    versions = {text(name, num_tokens=8) for name in ("two", *(f"v{turn}" for turn in range(8)))}
    assert crowd.texts("two") <= versions
    assert len(crowd.texts("two")) > 4


@pytest.fixture
def served_slowly() -> Iterator[Served]:
    with served(step_s=0.002) as one:
        yield one


def test_an_adapter_that_is_unregistered_serves_running_requests_to_their_end(
    served_slowly: Served,
) -> None:
    server = served_slowly
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(server.ask, "one", PROMPT, 60)
        wait_until(lambda: server.model.ready().loop.state.running)
        assert server.change("unload", lora_name="one").status_code == 200
        assert not running.done()
        refused = server.ask("one")
        assert (refused.status_code, "'two'" in refused.text) == (400, True)
        assert server.post("/v1/completions", {**OPENAI, "model": "one"}).status_code == 404
        names = {one["id"] for one in http.get(server.running.url + "/v1/models").json()["data"]}
        assert names == {"toy", "two"}
        # Its place is free when its request has ended: one of three is.
        assert server.change("load", lora_name="three", lora_path="/a/three").status_code == 200
        full = server.change("load", lora_name="four", lora_path="/a/four")
        assert full.status_code == 400
        assert "option.max_loras is 3" in full.json()["error"]["message"]
        assert server.ask("three").json()["generated_text"] == text("three")
        assert not running.done()
        assert running.result(PATIENCE_S).json()["generated_text"] == text("one", num_tokens=60)
        assert server.change("load", lora_name="four", lora_path="/a/four").status_code == 200
        assert server.ask("four").json()["generated_text"] == text("four")


def test_a_name_that_several_register_at_once_has_one_adapter(toys: Served) -> None:
    with ThreadPoolExecutor(6) as pool:
        folders = [f"/b/x{i}" for i in range(6)]
        found = [
            *pool.map(lambda folder: toys.change("load", lora_name="x", lora_path=folder), folders)
        ]
    assert sorted(one.status_code for one in found) == [200, 400, 400, 400, 400, 400]
    refused = next(one for one in found if one.status_code == 400)
    assert "registered already" in refused.json()["error"]["message"]
    won = [one.status_code for one in found].index(200)
    assert toys.ask("x").json()["generated_text"] == text(f"x{won}")
    # The same again changes nothing, as DJL Serving registers what is there.
    assert toys.change("load", lora_name="x", lora_path=folders[won]).status_code == 200
    assert toys.change("unload", lora_name="x").status_code == 200


def test_a_failure_leaves_all_as_it_was(toys: Served) -> None:
    def state() -> Any:
        return dict(toys.places), [
            toys.ask(name).json()["generated_text"] for name in (None, "one", "two")
        ]

    before = state()
    for what, payload, message in (
        ("load", {"lora_name": "bad", "lora_path": "/a/bad"}, "/a/bad is no adapter"),
        (
            "load",
            {"lora_name": "two", "lora_path": "/a/bad", "load_inplace": True},
            "/a/bad is no adapter",
        ),
        ("load", {"lora_name": "two", "lora_path": "/a/other"}, "registered already"),
        ("load", {"lora_name": "x", "lora_path": "/a", "more": 1}, "more"),
        ("load", {"lora_name": "x", "lora_path": "/a", "base_model_name": "other"}, "'other'"),
        ("load", {"lora_name": "x"}, "lora_path is missing"),
        ("unload", {"lora_name": "x"}, "not registered"),
        ("unload", {}, "lora_name"),
        ("unload", {"lora_name": "toy"}, "not registered"),
    ):
        found = toys.change(what, **payload)
        assert found.status_code >= 400
        assert message in found.json()["error"]["message"], (what, payload)
        assert state() == before


async def finished(service: Service, group: list[Stream]) -> str:
    """The text of the only request in a group that is queued now."""
    return "".join([delta.text async for delta in service.loop.generate(group)])


def test_a_request_has_the_adapter_of_the_moment_in_which_it_is_queued() -> None:
    """Between the parsing of a request and its queue the names may change."""
    with served() as server:
        service = server.model.ready()

        def parsed() -> list[GenerationRequest]:
            content = json.dumps({**body(PROMPT), "adapters": "two"}).encode()
            return [*service.parse(content).requests]

        early, prepared = parsed(), service.loop.prepare(*parsed())
        server.adapters.register("two", "/b/next", replaces=True)
        server.adapters.unregister("one")
        server.adapters.register("three", "/b/three")
        server.adapters.register("one", "/b/uno")
        assert dict(server.places) == {"two": 3, "three": 1, "one": 2}, "the old place is another's"
        for group in (service.loop.prepare(*early), prepared):
            assert asyncio.run(finished(service, group)) == text("next")
        late = service.loop.prepare(*parsed())
        server.adapters.unregister("two")
        with pytest.raises(RequestError, match="'two' was unregistered before"):
            asyncio.run(finished(service, late))


def test_a_reload_ends_requests_as_they_began_and_has_those_of_a_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    found, hold, model = {"one": Path("/a/one")}, threading.Event(), Model("toy")

    def load(_stage: Any, on_death: Any, *, placed: Any, before: Service | None = None) -> Service:
        spec = replace(SPEC, num_adapters=PLACES)
        make = lambda: ToyBackend(spec, step_s=0.002)  # noqa: E731
        options = {"max_loras": PLACES, "adapter_sources": ["/"], "model_name": "toy"}
        service = toy_service(make, on_death=on_death, before=before, adapters=found, **options)
        if before is not None:
            begin = service.loop.start
            service.loop.start = lambda i: hold.wait(PATIENCE_S) and begin(i)  # type: ignore[method-assign]
        return service

    application = Application(model)
    loader = Loader({model: load}, lambda: [()], lambda _: None, application.fail)
    running = Running(application)
    try:
        loader.thread.start()
        wait_until(lambda: model.service is not None)
        server = Served(running, ToyBackend(SPEC), "")
        server.adapters.register("two", "/a/two")
        server.adapters.register("three", "/a/three")
        server.adapters.unregister("two")
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(server.ask, "three", PROMPT, 100)
            wait_until(lambda: model.ready().loop.state.running)
            old = server.adapters
            loader.reload()
            hold.set()
            assert slow.result(PATIENCE_S).json()["generated_text"] == text("three", num_tokens=100)
        wait_until(lambda: "reloaded model=toy" in caplog.text)
        assert server.adapters is not old
        assert dict(server.places) == {"one": 1}
        assert server.ask("one").json()["generated_text"] == text("one")
        assert server.ask("three").status_code == 400
        server.adapters.register("two", "/b/zwei")
        assert server.ask("two").json()["generated_text"] == text("zwei")
    finally:
        hold.set()
        running.close()
        loader.end(PATIENCE_S)
        for service in model.services:
            service.close()


def test_several_models_share_no_name() -> None:
    with held_port() as port:
        applied = {"max_loras": PLACES, "adapter_sources": ["/"], "admin_port": port, "page": False}
        models = [Model(name) for name in "ab"]
        for model in models:
            model.service = toy_service(ToyBackend(SPEC), model_name=model.names[0], **applied)
        running = Running(Application(*models))
        wait_until(lambda: len(running._server.servers) == 2)
        server = Served(running, ToyBackend(SPEC), f"http://127.0.0.1:{port}")
        for path, base, name, status in (
            ("/a/one", "a", "x", 200),
            ("/a/one", "b", "x", 400),
            ("/a/one", "b", "a", 400),
            ("/a/two", "b", "y", 200),
            ("/a/two", None, "z", 400),
        ):
            payload = {"lora_path": path, "base_model_name": base, "lora_name": name}
            assert server.change("load", **payload).status_code == status, payload
        for name, folder in (("x", "one"), ("y", "two"), ("a", ""), ("b", "")):
            answer = server.post("/v1/completions", {**OPENAI, "model": name}).json()
            assert (answer["model"], answer["choices"][0]["text"]) == (name, text(folder))
        assert server.change("unload", lora_name="x", base_model_name="a").status_code == 200
        running.close()
        for model in models:
            for service in model.services:
                service.close()


def test_the_first_port_changes_nothing(toys: Served) -> None:
    for what in ("load", "unload"):
        found = toys.post(f"/v1/{what}_lora_adapter", {"lora_name": "one", "lora_path": "/a/x"})
        assert found.status_code == 404
    assert "lora_adapter" not in http.get(toys.running.url + "/openapi.json").text
    assert [*toys.places] == ["one", "two"]

"""Several models behind one front: routing, state, death of one, first load and reload, over HTTP with toys."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the `server` extra")
pytest.importorskip("httpx", reason="needs httpx")

from djl_python_neuronx import service as service_module
from djl_python_neuronx.errors import BackendError, BackendUnavailableError, StepError
from djl_python_neuronx.server import models
from djl_python_neuronx.server.app import Application
from djl_python_neuronx.server.models import Loader, Model
from djl_python_neuronx.service import Service
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend
from tests.doubles.toy_service import toy_service
from tests.doubles.toy_tokenizer import ToyTokenizer
from tests.processes import PATIENCE_S, wait_until
from tests.server.running import Running, answer, body, http

NAMES = ("a", "b")


@pytest.fixture(autouse=True)
def _without_collections(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader collects garbage after each load; the heap of a test process is so large that this takes a second."""
    if "collections" not in request.node.name:
        monkeypatch.setattr(models, "freeze_heap", lambda: None)


class Pair:
    """A server of two models."""

    def __init__(self, **settings: dict[str, Any]) -> None:
        """`settings`: further options of a model, by its name."""
        self.backends = {name: ToyBackend(replace(TOY_SPEC, num_slots=2)) for name in NAMES}
        self.settings = settings
        self.models = {name: Model(name) for name in NAMES}
        self.application = Application(*self.models.values())
        self.stopped: list[str] = []
        self.application.stop = lambda: self.stopped.append("stopped")
        self.served = Running(self.application)
        self.url = self.served.url

    def load(self, name: str, *backends: ToyBackend, **more: Any) -> Service:
        options = {"model_name": (name, f"{name}-alias"), **self.settings.get(name, {})}
        return toy_service(*backends or [self.backends[name]], **options, **more)

    def load_all(self) -> None:
        for name, model in self.models.items():
            model.service = self.load(name)

    def post(self, path: str, payload: Any, **more: Any) -> Any:
        return http.post(self.url + path, json=payload, **more)

    def close(self) -> None:
        for backend in self.backends.values():
            backend.resume.set()
        self.served.close()
        for model in self.models.values():
            for service in model.services:
                service.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    made.load_all()
    yield made
    made.close()


CHAT = {"messages": [{"role": "user", "content": "<5>"}], "max_tokens": 3}
LONG = "<5>" * 1000
"""A prompt whose body is parsed on a thread."""
BODIES = [
    ("/invocations", body([5, 6])),
    ("/invocations", CHAT),
    ("/invocations", {"prompt": "<5>", "max_tokens": 3}),
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "<5>", "max_tokens": 3}),
    ("/generate", body([5, 6])),
    ("/generate_stream", body([5, 6])),
    ("/", body([5, 6])),
    ("/generate", {"prompt": "<5>", "max_tokens": 3}),
]


@pytest.mark.parametrize(("path", "payload"), BODIES)
def test_a_request_goes_to_the_model_that_its_body_names(
    pair: Pair, path: str, payload: dict[str, Any]
) -> None:
    for name, other in (("a", "b"), ("b-alias", "a")):
        before = pair.backends[other].num_steps
        own = pair.backends[name[0]].num_steps
        found = pair.post(path, {**payload, "model": name})
        assert found.status_code == 200, found.text
        assert pair.backends[name[0]].num_steps > own
        assert pair.backends[other].num_steps == before


@pytest.mark.parametrize("path", ["/predictions/b", "/models/b/invoke", "/predictions/b-alias"])
def test_a_path_names_the_model(pair: Pair, path: str) -> None:
    for payload in (body([5, 6]), {**body([5, 6]), "model": "b"}):
        assert pair.post(path, payload).json() == {"generated_text": answer([5, 6])}
    assert (pair.backends["a"].num_steps, pair.backends["b"].num_steps > 0) == (0, True)
    text = http.post(pair.url + path, content="<5><6>", headers={"content-type": "text/plain"})
    assert text.status_code == 200
    assert pair.post(path, {**body([5]), "model": "a"}).status_code == 404


def test_long_bodies_are_routed_too(pair: Pair) -> None:
    for name in NAMES:
        found = pair.post("/tokenize", {"prompt": LONG, "model": name})
        assert (found.status_code, found.json()["count"]) == (200, 1001)
    refused = pair.post("/tokenize", {"prompt": LONG})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


@pytest.mark.parametrize(
    ("content", "status", "says"),
    [
        (json.dumps(body([5])), 400, ["names no model", "'a'", "'b'", "'b-alias'"]),
        (json.dumps({**body([5]), "model": "tgi"}), 400, ["names no model"]),
        (json.dumps({**body([5]), "model": None}), 400, ["names no model"]),
        (json.dumps({**body([5]), "model": 5}), 400, ["model is", "expected a string"]),
        (json.dumps({**body([5]), "model": "c"}), 404, ["unknown model 'c'", "'a'", "'b'"]),
        ("{", 400, ["not valid JSON"]),
        ("[]", 400, ["expected an object"]),
        ("", 400, ["empty"]),
    ],
)
def test_bodies_that_name_no_model_of_the_server(
    pair: Pair, content: str, status: int, says: list[str]
) -> None:
    found = http.post(pair.url + "/invocations", content=content)
    assert found.status_code == found.json()["code"] == status
    for words in says:
        assert words in found.json()["error"]
    error = http.post(pair.url + "/v1/completions", content=content).json()["error"]
    assert says[0] in error["message"]


def test_one_model_needs_no_name_and_checks_it(pair: Pair) -> None:
    application = Application(pair.models["a"])
    running = Running(application)
    for payload, status in ((body([5]), 200), ({**body([5]), "model": "a"}, 200)):
        assert http.post(running.url + "/invocations", json=payload).status_code == status
    for path, _ in BODIES[:5]:
        found = http.post(running.url + path, json={**body([5]), "model": "b"})
        assert found.status_code == 404
    running.close()


def test_lists_and_facts_of_all_models(pair: Pair) -> None:
    services = {name: model.service for name, model in pair.models.items()}
    services["b"].loaded_s = 7  # type: ignore[union-attr]
    listed = http.get(pair.url + "/v1/models").json()["data"]
    assert [(entry["id"], entry["created"] == 7) for entry in listed] == [
        ("a", False),
        ("a-alias", False),
        ("b", True),
        ("b-alias", True),
    ]
    assert http.get(pair.url + "/v1/models/b-alias").json() == listed[3]
    assert http.get(pair.url + "/v1/models/c").status_code == 404
    facts = http.get(pair.url + "/info").json()
    assert [each["model"] for each in facts] == [each["model_id"] for each in facts] == ["a", "b"]


def test_metrics_of_all_models_are_one_exposition(pair: Pair) -> None:
    for name, count in (("a", 1), ("b", 2)):
        for _ in range(count):
            pair.post("/predictions/" + name, body([5, 6]))
    counted = 'djl_neuronx_generated_tokens_total{{model="{}"}} {}'.format
    wait_until(
        lambda: (
            {counted("a", 5.0), counted("b", 10.0)}
            <= {*http.get(pair.url + "/metrics").text.splitlines()}
        )
    )
    lines = http.get(pair.url + "/metrics").text.splitlines()
    heads = [line for line in lines if line.startswith("#")]
    assert len(heads) == len(set(heads)) > 20
    assert all('model="' in line for line in lines if not line.startswith("#"))
    names = [line.split()[2] for line in heads if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_a_model_with_the_name_that_a_client_sends_for_none_can_be_named() -> None:
    pair = Pair(b={"model_name": ("tgi",)})
    pair.load_all()
    for path, payload in BODIES:
        assert pair.post(path, {**payload, "model": "tgi"}).status_code == 200
    assert (pair.backends["a"].num_steps, pair.backends["b"].num_steps > 0) == (0, True)
    pair.close()


@pytest.mark.parametrize("failing", ["Threads", "custom.CustomFormatters"])
def test_a_service_that_cannot_be_made_frees_its_engine_and_its_tokenizer(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, made = ToyBackend(TOY_SPEC), threading.Event()
    closed: list[ToyTokenizer] = []

    def make() -> ToyBackend:
        made.set()
        return backend

    def refuse(*_: Any) -> None:
        assert made.wait(PATIENCE_S)
        msg = "can't start new thread"
        raise RuntimeError(msg)

    monkeypatch.setattr(f"{service_module.__name__}.{failing}", refuse)
    monkeypatch.setattr(ToyTokenizer, "close", lambda self: closed.append(self))
    with pytest.raises(RuntimeError, match="new thread"):
        toy_service(make, functions={"input_formatter": print})
    wait_until(lambda: backend.closed)
    assert len(closed) == 1


def test_each_model_has_its_own_limit_of_a_body() -> None:
    pair = Pair(a={"max_body_bytes": 2000})
    pair.load_all()
    longest = json.dumps({"prompt": "<5>" * 5, "model": "{}"}).ljust(2500)
    statuses = [
        http.post(pair.url + "/tokenize", content=longest.replace("{}", name)).status_code
        for name in NAMES
    ]
    assert statuses == [413, 200]
    pair.close()


class Loads:
    """A loader of a pair, whose loads a test holds."""

    def __init__(self, pair: Pair, **how: Any) -> None:
        self.pair = pair
        self.go_on = {name: threading.Event() for name in NAMES}
        self.failures: list[BaseException] = []
        self.placed: list[Any] = []
        self.found: list[Any] = [("0",), ("1",)]
        """The answer of `prepare`."""
        loads = {model: partial(self._load, name) for name, model in pair.models.items()}
        self.loader = Loader(loads, self.prepare, lambda _: None, pair.application.fail, **how)
        self.loader.thread.start()

    def prepare(self) -> list[Any]:
        return self.found

    def _load(self, name: str, stage: Any, on_death: Any, **more: Any) -> Service:
        self.placed.append((name, more["placed"]))
        stage(f"loading {name}")
        assert self.go_on[name].wait(PATIENCE_S)
        if self.failures:
            raise self.failures[0]
        return self.pair.load(name, on_death=on_death, before=more.get("before"))

    def end(self) -> None:
        for event in self.go_on.values():
            event.set()
        assert self.loader.end(PATIENCE_S)
        self.pair.close()


def test_models_load_side_by_side_and_serve_when_they_are_ready() -> None:
    pair = Pair()
    loads = Loads(pair)
    wait_until(lambda: len(loads.placed) == 2)
    assert sorted(loads.placed) == [("a", ("0",)), ("b", ("1",))]

    def ping() -> Any:
        return http.get(pair.url + "/ping")

    wait_until(lambda: "loading a" in ping().text and "loading b" in ping().text)
    assert ping().status_code == 503
    assert http.get(pair.url + "/v1/models").status_code == 503
    loads.go_on["a"].set()
    wait_until(lambda: pair.models["a"].service is not None)
    assert pair.post("/invocations", {**body([5, 6]), "model": "a"}).status_code == 200
    waiting = pair.post("/invocations", {**body([5, 6]), "model": "b"})
    assert (waiting.status_code, "loading b" in waiting.text) == (503, True)
    assert (ping().status_code, "a-alias" in ping().text) == (503, False)
    loads.go_on["b"].set()
    wait_until(lambda: ping().status_code == 200)
    assert ping().json() == {"status": "healthy", "models": {"a": "ready", "b": "ready"}}
    loads.end()


def test_a_first_load_that_fails_ends_the_server_and_names_its_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = Pair()
    loads = Loads(pair)
    loads.go_on["a"].set()
    wait_until(lambda: pair.models["a"].service is not None)
    loads.failures.append(BackendError("weights are missing"))
    loads.go_on["b"].set()
    wait_until(lambda: pair.stopped)
    assert "weights are missing" in str(pair.application.failure)
    assert "load_failed model=b code=backend_error" in caplog.text
    assert "server_ends model=b cannot be loaded" in caplog.text
    loads.end()


@pytest.mark.parametrize("broken", ["plan", "load"])
@pytest.mark.parametrize("wanted", ["any", "all"])
def test_a_broken_model_may_leave_the_others_in_service(broken: str, wanted: str) -> None:
    """Until a reload mends it."""
    pair = Pair(a={"ping": wanted}, b={"ping": wanted})
    loads = Loads(pair, exit_on_error=False)
    if broken == "plan":
        loads.found[1] = BackendError("weights are missing")
    loads.go_on["a"].set()
    wait_until(lambda: pair.models["a"].service is not None)
    loads.failures.append(BackendError("weights are missing"))
    loads.go_on["b"].set()
    wait_until(lambda: pair.models["b"].failure is not None)
    assert pair.post("/predictions/a", body([5, 6])).status_code == 200
    refused = pair.post("/predictions/b", body([5, 6]))
    assert (refused.status_code, "weights are missing" in refused.text) == (503, True)
    found = http.get(pair.url + "/ping")
    assert found.status_code == (200 if wanted == "any" else 503)
    assert "weights are missing" in found.text
    loads.failures.clear()
    loads.found[1] = ("1",)
    loads.loader.reload()
    wait_until(lambda: pair.models["b"].service is not None and not pair.models["b"].failure)
    assert pair.post("/predictions/b", body([5, 6])).status_code == 200
    assert http.get(pair.url + "/ping").status_code == 200
    assert not pair.stopped
    loads.end()


def test_a_server_without_any_model_ends() -> None:
    pair = Pair()
    loads = Loads(pair, exit_on_error=False)
    loads.failures.append(BackendError("weights are missing"))
    for event in loads.go_on.values():
        event.set()
    wait_until(lambda: pair.stopped)
    assert "weights are missing" in str(pair.application.failure)
    loads.end()


def test_problems_of_all_models_come_before_any_load(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair()
    failing = BackendError("two problems")

    def prepare() -> Any:
        raise failing

    def load(*_: Any, **__: Any) -> Any:
        pytest.fail("a model is loaded")

    loads = dict.fromkeys(pair.models.values(), load)
    loader = Loader(loads, prepare, lambda _: None, pair.application.fail)
    loader.thread.start()
    loader.thread.join(PATIENCE_S)
    assert (pair.application.failure, pair.stopped) == (failing, ["stopped"])
    assert "two problems" in caplog.text
    pair.close()


def test_a_model_whose_engine_is_given_up_leaves_the_others_alone() -> None:
    pair = Pair()
    loads = Loads(pair)
    for event in loads.go_on.values():
        event.set()
    wait_until(lambda: http.get(pair.url + "/ping").status_code == 200)
    for dying, count in (("a", 1), ("b", 2)):
        backend = pair.backends[dying]
        backend.fail_at = dict.fromkeys(range(1000), StepError("the device is gone"))
        while pair.models[dying].failure is None:  # three failed calls in a row end an engine
            pair.post("/predictions/" + dying, body([5, 6]))
        refused = pair.post("/predictions/" + dying, body([5, 6]))
        assert (refused.status_code, "the device is gone" in refused.text) == (503, True)
        assert len(pair.stopped) == count // 2
        if count == 1:
            assert pair.post("/predictions/b", body([5, 6])).status_code == 200
            found = http.get(pair.url + "/ping")
            assert (found.status_code, found.json()["models"]["b"]) == (200, "ready")
            assert "the device is gone" in found.json()["models"]["a"]
            of_a, of_b = http.get(pair.url + "/info").json()
            assert (of_a["model"], of_b["model"]) == ("a", "b")
            assert "the device is gone" in of_a["problem"]
            assert "problem" not in of_b
            assert len(http.get(pair.url + "/v1/models").json()["data"]) == 2
    ping = http.get(pair.url + "/ping")
    assert ping.status_code == 503
    assert all(f"{name}: " in ping.json()["error"] for name in NAMES)
    assert "the device is gone" in str(pair.application.failure)
    loads.end()


class Reloading:
    """A server of one model, which is reloaded while a test asks."""

    def __init__(self, num_copies: int = 1, **options: Any) -> None:
        self.num_copies, self.options = num_copies, options
        self.made: list[list[ToyBackend]] = []
        """The backends of each load, in the order of their starts."""
        self.prepare_fails: list[BaseException] = []
        self.load_fails: list[BaseException] = []
        self.start_fails: list[BaseException] = []
        """Of the last copy: those before it have been replaced."""
        self.hold = threading.Event()
        """Engines start while it is set."""
        self.hold.set()
        self.model = Model("toy")
        self.application = Application(self.model)
        self.application.stop = lambda: None
        self.loader = Loader(
            {self.model: self._load}, self._prepare, lambda _: None, self.application.fail
        )
        self.served = Running(self.application)
        self.url = self.served.url
        self.loader.thread.start()
        wait_until(lambda: http.get(self.url + "/ping").status_code == 200)

    def _prepare(self) -> list[tuple[str, ...]]:
        if self.prepare_fails:
            raise self.prepare_fails.pop()
        return [()]

    def _load(
        self, _stage: Any, on_death: Any, *, placed: Any = (), before: Service | None = None
    ) -> Service:
        assert placed == ()
        if self.load_fails:
            raise self.load_fails.pop()
        made: list[ToyBackend] = []
        self.made.append(made)

        def make() -> ToyBackend:
            made.append(ToyBackend(replace(TOY_SPEC, num_slots=2), step_s=0.002))
            return made[-1]

        makes = [make] * self.num_copies
        service = toy_service(*makes, on_death=on_death, before=before, **self.options)
        begin = service.loop.start

        def held(i: int) -> None:
            assert self.hold.wait(PATIENCE_S)
            if self.start_fails and i == self.num_copies - 1 and len(self.made) > 1:
                raise self.start_fails.pop()
            begin(i)

        service.loop.start = held  # type: ignore[method-assign]
        return service

    def post(self, prompt: list[int], num_tokens: int = 5, **more: Any) -> Any:
        return http.post(self.url + "/invocations", json=body(prompt, num_tokens, **more))

    def reload(self) -> None:
        self.loader.reload()

    def close(self) -> None:
        self.hold.set()
        for backend in (one for backends in self.made for one in backends):
            backend.resume.set()
        self.served.close()
        assert self.loader.end(PATIENCE_S)
        for service in self.model.services:
            service.close()


class Crowd:
    """Clients that ask without a pause until the end of a block; each answer must be right."""

    def __init__(self, server: Reloading, count: int = 6) -> None:
        self._server, self._enough = server, threading.Event()
        self.wrong: list[str] = []
        self.done = 0
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(count)]

    def _ask(self, i: int) -> None:
        turn = 0
        while not self._enough.is_set():
            turn += 1
            prompt = [3 + i, 3 + turn % 250]
            found = self._server.post(prompt, 12, stream=bool(turn % 2))
            text = json.loads(found.text.splitlines()[-1]).get("generated_text")
            if found.status_code != 200 or text != answer(prompt, 12):
                self.wrong.append(found.text)
            self.done += 1

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        wait_until(lambda: self.done > len(self._threads))
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert self.wrong == []


@pytest.fixture(params=[1, 3])
def reloading(request: pytest.FixtureRequest) -> Iterator[Reloading]:
    made = Reloading(request.param)
    yield made
    made.close()


def test_a_reload_fails_no_request(reloading: Reloading, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with Crowd(reloading) as crowd:
        for count in (1, 2):
            reloading.reload()
            wait_until(lambda count=count: caplog.text.count("reloaded model=toy") == count)
            asked = crowd.done
            wait_until(lambda asked=asked: crowd.done > asked + 6)
    assert len(reloading.made) == 3
    for backends in reloading.made[:2]:
        assert all(backend.closed and not backend.acquired for backend in backends)
    assert all(backend.num_steps for backend in reloading.made[2])
    lines = http.get(reloading.url + "/metrics").text.splitlines()
    name = "djl_neuronx_requests_total{"
    counted = sum(float(line.split()[-1]) for line in lines if line.startswith(name))
    assert counted == crowd.done


def test_collections_of_garbage_leave_out_what_is_loaded_and_find_what_a_reload_has_ended(
    reloading: Reloading, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    service: Any = reloading.model.service
    service.itself = service  # so that only a collection finds it
    old = weakref.ref(service)
    del service
    wait_until(lambda: not any(one is old() for one in gc.get_objects()))
    reloading.reload()
    wait_until(lambda: "reloaded model=toy" in caplog.text)
    wait_until(lambda: old() is None)
    gc.unfreeze()


@pytest.mark.parametrize("how", ["resumes", "off", "another model"])
def test_requests_wait_at_the_door_while_the_only_copy_is_replaced(how: str) -> None:
    reloading, resumes = Reloading(resume_requests=how != "off"), how == "resumes"
    if how == "another model":
        service: Any = reloading.model.service
        service.files = frozenset({(Path("model.safetensors"), 1, 1)})
    (old,) = reloading.made[0]
    begun = old.num_steps
    old.hang_at = {begun + 4}
    answers: list[Any] = []

    def ask(prompt: list[int]) -> threading.Thread:
        thread = threading.Thread(target=lambda: answers.append(reloading.post(prompt, 9)))
        thread.start()
        return thread

    threads = [ask([5, 6])]
    assert old.hanging.wait(PATIENCE_S)
    reloading.hold.clear()
    reloading.reload()

    def ping() -> Any:
        return http.get(reloading.url + "/ping")

    wait_until(lambda: "is being reloaded" in ping().text)
    threads += [ask([7, 8]), ask([9])]
    model = reloading.model
    wait_until(lambda: model._door is not None and len(model._door._done_callbacks) == 2)  # type: ignore[attr-defined]
    old.resume.set()
    if not resumes:  # what runs ends on the old engine, and nothing else comes to it
        threads[0].join(PATIENCE_S)
        assert answers[0].json() == {"generated_text": answer([5, 6], 9)}
        assert old.num_steps - begun == 9
    wait_until(lambda: old.closed)
    assert ping().status_code == 503
    reloading.hold.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    texts = {found.json()["generated_text"] for found in answers}
    assert texts == {answer(prompt, 9) for prompt in ([5, 6], [7, 8], [9])}
    assert old.num_steps - begun == (5 if resumes else 9)
    metrics = http.get(reloading.url + "/metrics").text
    assert f'djl_neuronx_resumed_requests_total{{model="toy"}} {float(resumes)}' in metrics
    wait_until(lambda: ping().status_code == 200)
    reloading.close()


class ClosingTokenizer(ToyTokenizer):
    """Tokenises <77> until it is closed, and refuses it then, as one in processes does."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.closed = threading.Event(), threading.Event()

    def encode(self, text: str, **how: Any) -> list[int]:
        if "<77>" in text:
            self.begun.set()
            assert self.closed.wait(PATIENCE_S)
            msg = "the model is replaced; retry"
            raise BackendUnavailableError(msg)
        return super().encode(text, **how)

    def close(self) -> None:
        self.closed.set()


def test_a_text_that_a_reload_interrupts_is_tokenised_by_the_new_model() -> None:
    reloading = Reloading()
    service: Any = reloading.model.service
    service.tokenizer = tokenizer = ClosingTokenizer()
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(reloading.post([77])))
    asking.start()
    assert tokenizer.begun.wait(PATIENCE_S)
    reloading.reload()
    asking.join(PATIENCE_S)
    assert answers[0].json() == {"generated_text": answer([77])}
    # A refusal that is no reload's is the answer.
    service = reloading.model.service
    service.tokenizer = closed = ClosingTokenizer()
    closed.close()
    assert reloading.post([77]).status_code == 503
    reloading.close()


def test_who_waits_too_long_at_the_door_gets_503() -> None:
    reloading = Reloading(restart_timeout=0.3)
    reloading.hold.clear()
    reloading.reload()
    wait_until(lambda: "is being reloaded" in http.get(reloading.url + "/ping").text)
    found = reloading.post([5])
    assert (found.status_code, int(found.headers["retry-after"]) > 0) == (503, True)
    assert (
        "0.3 s (option.restart_timeout; default: option.predict_timeout)" in found.json()["error"]
    )
    reloading.close()


def test_a_stop_ends_the_wait_at_the_door(caplog: pytest.LogCaptureFixture) -> None:
    reloading = Reloading()
    reloading.hold.clear()
    reloading.reload()
    wait_until(lambda: "is being reloaded" in http.get(reloading.url + "/ping").text)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(reloading.post([5])))
    thread.start()
    model = reloading.model
    wait_until(lambda: model._door is not None and model._door._done_callbacks)  # type: ignore[attr-defined]
    reloading.served.close()
    thread.join(PATIENCE_S)
    assert (found[0].status_code, "server is stopping" in found[0].text) == (503, True)
    reloading.close()
    assert reloading.application.failure is None
    assert "reload_failed" not in caplog.text


def reload_in_vain(reloading: Reloading, crowd: Crowd, caplog: pytest.LogCaptureFixture) -> None:
    """Reload, wait until that has failed, and then for some more answers."""
    reloading.reload()
    wait_until(lambda: "reload_failed" in caplog.text)
    wait_until(lambda: len(reloading.model.services) == 1)
    answered = crowd.done
    wait_until(lambda: crowd.done > answered + 6)


@pytest.mark.parametrize("failing", ["prepare_fails", "load_fails", "start_fails"])
def test_a_reload_that_fails_leaves_the_old_service(
    reloading: Reloading, failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    service = reloading.model.service
    getattr(reloading, failing).append(BackendError("no memory"))
    with Crowd(reloading) as crowd:
        reload_in_vain(reloading, crowd, caplog)
        assert reloading.model.service is service
        assert http.get(reloading.url + "/ping").status_code == 200
    assert "no memory" in caplog.text
    assert "reloaded model" not in caplog.text
    assert reloading.application.failure is None
    assert service is not None
    assert all(copy.alive for copy in service.loop.copies)
    reloading.reload()  # and the next one works
    wait_until(lambda: "reloaded model" in caplog.text)
    assert reloading.model.service is not service


def test_a_reload_that_loses_a_copy_serves_on_with_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reloading = Reloading(3)
    broken = BackendError("the device is gone")
    reloading.start_fails += [broken, broken]  # of the new copy, then of the old one in its place
    with Crowd(reloading) as crowd:
        reload_in_vain(reloading, crowd, caplog)
    assert "copy_lost model=toy copy=2" in caplog.text
    service = reloading.model.service
    assert service is not None
    assert [copy.alive for copy in service.loop.copies] == [True, True, False]
    reloading.reload()  # the next one brings it back
    wait_until(lambda: reloading.model.service is not service)
    wait_until(lambda: len(reloading.model.services) == 1)
    assert all(copy.alive for copy in reloading.model.services[0].loop.copies)
    reloading.close()


def test_who_waits_for_the_only_copy_hears_that_it_is_lost() -> None:
    reloading = Reloading()
    broken = BackendError("the device is gone")
    reloading.start_fails += [broken, broken]  # of the new copy, then of the old one in its place
    reloading.hold.clear()
    reloading.reload()
    wait_until(lambda: "is being reloaded" in http.get(reloading.url + "/ping").text)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(reloading.post([5])))
    thread.start()
    model = reloading.model
    wait_until(lambda: model._door is not None and model._door._done_callbacks)  # type: ignore[attr-defined]
    reloading.hold.set()
    thread.join(PATIENCE_S / 2)
    assert (found[0].status_code, "the device is gone" in found[0].text) == (503, True)
    reloading.close()


def test_a_reload_to_other_copies_is_refused(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reloading = Reloading(1)
    reloading.num_copies = 2
    closed: list[ToyTokenizer] = []
    monkeypatch.setattr(ToyTokenizer, "close", lambda self: closed.append(self))
    reloading.reload()
    wait_until(lambda: "restart the server" in caplog.text)
    assert len(closed) == 1
    assert "from 1 on no cores of their own, to 2 on no cores of their own" in caplog.text
    assert reloading.post([5, 6]).json() == {"generated_text": answer([5, 6])}
    reloading.close()


def test_wishes_during_a_reload_are_one_more(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    reloading = Reloading(1)
    reloading.hold.clear()
    reloading.reload()
    wait_until(lambda: len(reloading.made) == 2)
    for _ in range(3):
        reloading.reload()
    reloading.hold.set()
    wait_until(lambda: caplog.text.count("reloaded model=toy") == 2)
    reloading.close()
    assert len(reloading.made) == 3

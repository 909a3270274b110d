"""The handler under DJL's engine process (a double of it), driven as Java drives it, where that needs a device whose
every step is controlled or a Java that fails at will. The rest is in `tests/djl`, with the real ones.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from djl_python_neuronx import djl_process, handler
from djl_python_neuronx.errors import BackendError, BackendUnavailableError, RequestError
from djl_python_neuronx.service import Service
from tests.djl.folders import MODES
from tests.doubles import djl_engine_double
from tests.doubles.djl_engine_double import Input, Output
from tests.doubles.djl_peer import ENTRY, PATIENCE_S, REST, ROOT, Peer
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend, expected
from tests.doubles.toy_service import toy_service
from tests.doubles.toy_tokenizer import TOKENIZER

RESUME = signal.SIGUSR2
"""Lets a toy device go on that hangs at `toy_hang_at`."""


@pytest.fixture
def start(tmp_path):
    """Start peers; they are closed at the end."""
    peers = []

    def start(mode, **properties):
        properties = {**MODES[mode], "toy_hung": str(tmp_path / "hung"), **properties}
        env = {"TMPDIR": str(tmp_path)}
        peer = Peer(tmp_path, properties, tmp_path, entry_point=ENTRY, env=env)
        peers.append(peer)
        return peer.start()

    yield start
    for peer in peers:
        peer.close()


def payload(prompt, num_tokens=5, *, stream=False, **parameters):
    inputs = "".join(f"<{i}>" for i in prompt)
    parameters = {"max_new_tokens": num_tokens, "ignore_eos": True, **parameters}
    return {"inputs": inputs, "parameters": parameters, "stream": stream}


def wait_until(condition):
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def text(prompt, num_tokens=5):
    return TOKENIZER.decode(expected([1, *prompt], num_tokens))


def test_a_plain_answer_that_takes_too_long_is_an_error_not_a_restart(start):
    peer = start("plain", predict_timeout="2", toy_step_s="0.04")
    peer.timeout_s = PATIENCE_S  # Java's own limit is not the point
    late = peer.submit(payload([5], 100))
    assert late.wait().status_sent == 408
    assert "async_mode" in json.loads(late.content)["error"]
    streamed = peer.submit(payload([5], 100, stream=True))
    lines = [json.loads(line) for line in streamed.wait().content.splitlines()]
    assert lines[-1]["generated_text"] == text([5], 100)
    assert peer.usage() == REST
    assert peer.num_starts == 1


def test_a_rolling_batch_reset_frees_everything(start):
    peer = start("rolling", toy_hang_at="10")
    lost = [peer.submit(payload([5, i], 60, stream=True)) for i in range(3, 9)]
    assert lost[0].started.wait(PATIENCE_S)
    peer.spoil_next_reply = True
    peer.kill(RESUME)
    for answer in lost:
        answer.wait()
    again = [peer.submit(payload([6, i], 6)) for i in range(3, 9)]
    for i, answer in zip(range(3, 9), again, strict=True):
        assert json.loads(answer.wait().content) == {"generated_text": text([6, i], 6)}
    assert peer.usage() == REST
    assert peer.num_starts == 1


def test_more_requests_than_rows_and_than_slots_are_all_answered(start):
    peer = start("rolling", max_rolling_batch_size="8", toy_slots="3", toy_hang_at="0")
    payloads = [payload([i % 50 + 5, i % 7 + 5], 4) for i in range(60)]
    answers = [peer.submit(each) for each in payloads[:8]]
    wait_until(lambda: max(peer.batch_sizes, default=0) == 8)
    peer.kill(RESUME)
    answers += [peer.submit(each) for each in payloads[8:]]
    for i, answer in enumerate(answers):
        expected_text = text([i % 50 + 5, i % 7 + 5], 4)
        assert json.loads(answer.wait().content) == {"generated_text": expected_text}
    assert max(peer.batch_sizes) == 8
    assert peer.usage() == REST


def test_a_frozen_process_is_killed_and_the_next_one_serves(start):
    peer = start("rolling", toy_hang_at="10")
    lost = peer.submit(payload([5], 60, stream=True))
    assert lost.started.wait(PATIENCE_S)
    peer.kill(signal.SIGSTOP)
    peer.time_out()
    assert lost.wait().lost
    peer.wait_ready()
    assert peer.num_starts == 2
    answer = peer.submit(payload([6]))
    assert json.loads(answer.wait().content) == {"generated_text": text([6])}
    assert peer.usage() == REST


@pytest.mark.parametrize("mode", MODES)
def test_a_device_that_hangs_costs_its_requests_and_a_restart(start, mode):
    peer = start(mode, predict_timeout="3", toy_hang_at="12")
    peer.timeout_s = PATIENCE_S  # the handler is to notice, not Java
    first = [peer.submit(payload([5, i], 4)) for i in range(3, 5)]
    for answer in first:
        assert answer.wait().status_sent == 200
    stuck = peer.submit(payload([5], 60))
    assert stuck.wait().status_sent in {408, 503}
    # DJL restarts a process that ends during a call: without asynchronous mode, the next one.
    deadline_s = time.monotonic() + PATIENCE_S
    while peer.num_starts == 1 and time.monotonic() < deadline_s:
        peer.submit(payload([6]))
        time.sleep(0.1)
    peer.wait_ready()
    answer = peer.submit(payload([6]))
    assert json.loads(answer.wait().content) == {"generated_text": text([6])}
    assert peer.num_starts == 2


@pytest.mark.parametrize("mode", MODES)
def test_two_copies_serve_behind_one_process(start, mode):
    # Calls in plain mode do not overlap: the first one would wait for ever.
    hanging = {} if mode == "plain" else {"toy_hang_at": "1"}
    peer = start(mode, replicas="2", **hanging)
    answers = [peer.submit(payload([5, i], 20)) for i in range(3, 7)]
    deadline_s = time.monotonic() + PATIENCE_S
    while sum(one.done for one in answers) < 2:  # half of them are on the copy whose device hangs
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert mode == "plain" or sum(one.done for one in answers) == 2
    peer.kill(RESUME)
    for i, answer in enumerate(answers):
        assert json.loads(answer.wait().content) == {"generated_text": text([5, 3 + i], 20)}
    assert peer.usage() == REST
    assert peer.num_starts == 1


def test_a_limit_of_zero_is_javas_default(start):
    peer = start("async", model_loading_timeout="0")
    assert json.loads(peer.submit(payload([5])).wait().content) == {"generated_text": text([5])}


def test_both_ways_at_once_are_refused(start):
    peer = start("async", rolling_batch="auto")
    refused = peer.submit(payload([5])).wait()
    assert "leave out option.rolling_batch" in json.loads(refused.content)["error"]


def test_the_import_is_light():
    script = (
        "import sys, djl_python_neuronx.handler; "
        "print([n for n in ('torch', 'transformers', 'openai', 'numpy', 'pydantic') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_late_load_that_fails_ends_the_process_then(process, monkeypatch):
    """Not when it has taken as long again, which may be an hour."""
    failing, statuses = threading.Event(), []

    def load(_inputs, *, in_event_loop):
        assert failing.wait(PATIENCE_S)
        return BackendUnavailableError("the device is gone")

    async def late(*_):
        raise asyncio.TimeoutError

    monkeypatch.setattr(djl_process, "_load", load)
    monkeypatch.setattr(djl_process, "EXIT_GRACE_S", 0.0)
    monkeypatch.setattr(djl_process.asyncio, "wait_for", late)

    async def run():
        ended = asyncio.Event()
        monkeypatch.setattr(
            djl_process.os, "_exit", lambda status: (statuses.append(status), ended.set())
        )
        inputs = called(model_dir="/m", model_loading_timeout="3600")
        assert await djl_process._load_or_end(inputs) is None
        assert statuses == []
        failing.set()
        await asyncio.wait([asyncio.create_task(ended.wait())], timeout=PATIENCE_S)

    asyncio.run(run())
    assert statuses == [djl_process.EXIT_STATUS]


@pytest.fixture
def process(monkeypatch, tmp_path):
    """A process that has loaded nothing yet."""
    monkeypatch.setitem(sys.modules, "djl_python", djl_engine_double.installed())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process = djl_process._Process()
    monkeypatch.setattr(djl_process, "_process", process)
    return process


def called(function_name="handle", body=None, **properties):
    """A call as DJL's engine reads it; without a body it is empty."""
    inputs = Input()
    inputs.function_name = function_name
    inputs.properties |= {"handler": function_name, **properties}
    if body is not None:
        inputs.content.add("data", bytearray(body))
    return inputs


ADAPTER_FUNCTIONS = {"register_adapter", "update_adapter", "unregister_adapter"}


def test_the_entry_module_has_five_functions():
    functions = {name for name, value in vars(handler).items() if callable(value)}
    assert functions == {"handle", "partition", *ADAPTER_FUNCTIONS}


OTHERS = sorted(
    {*dir(handler), *dir(djl_process), "", "handle.__globals__"} - {"handle", "partition"}
)
"""Without a model the functions of adapters are errors, too."""


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_name_is_an_error_and_changes_nothing(process, name):
    """Also what every module object has, such as __class__ and __setattr__."""
    before, unchanged = dict(vars(handler)), dataclasses.replace(process)
    try:
        returned = getattr(handler, name)(called(name, b"{}"))
    except Exception as error:  # noqa: BLE001  (DJL's engine catches all of them)
        returned = error
    # DJL's engine makes an error of an exception, and of whatever else is not an Output; of None it makes a 204.
    assert returned is not None
    assert not isinstance(returned, Output)
    assert dict(vars(handler)) == before
    assert process == unchanged


@pytest.mark.parametrize("load_begun", [True, False])
def test_no_request_partitions(process, tmp_path, load_begun):
    process.load_begun = load_begun
    inputs = called("partition", save_mp_checkpoint_path=str(tmp_path / "out"))
    with pytest.raises(RequestError, match="leave out the request's property handler"):
        handler.partition(inputs)
    assert not [*tmp_path.iterdir()]


def test_a_process_that_serves_partitions_nothing(process, tmp_path):
    process.load_begun = True
    with pytest.raises(RequestError, match="this process serves a model"):
        handler.partition(called(None, save_mp_checkpoint_path=str(tmp_path / "out")))


@pytest.fixture
def loads(monkeypatch):
    """The properties of each load. A load fails once `goes_on` is set."""

    class Loads(list):
        goes_on = threading.Event()

    loads = Loads()

    def load(properties, model_dir, **_):
        loads.append(dict(properties))
        assert loads.goes_on.wait(PATIENCE_S)
        raise BackendError("no device")

    monkeypatch.setattr(Service, "load", load)
    return loads


FIRST = {"model_dir": "/first", "model_id": "operators"}
CLIENTS = {"model_dir": "/second", "model_id": "clients", "save_mp_checkpoint_path": "/third"}


@pytest.mark.parametrize("body", [None, b"{}"])
def test_only_the_first_call_sets_options(process, loads, body):
    loads.goes_on.set()
    assert handler.handle(called(**FIRST)).code == 500
    answer = handler.handle(called(body=body, **CLIENTS))
    assert answer.code == 503
    assert b"no model is loaded" in answer.content.get("data")
    assert [load["model_id"] for load in loads] == ["operators"]


def test_only_the_first_call_sets_options_in_asynchronous_mode(process, loads):
    async def calls():
        first = asyncio.create_task(handler.handle(called(**FIRST)))
        while not loads:
            await asyncio.sleep(0.01)
        meanwhile = await handler.handle(called(**CLIENTS))
        loads.goes_on.set()
        await first
        return meanwhile, [each async for each in await handler.handle(called(**CLIENTS))]

    meanwhile, (later,) = asyncio.run(calls())
    assert meanwhile.code == 503
    assert b"no device" in later.content.get("data")
    assert [load["model_id"] for load in loads] == ["operators"]


def test_collections_of_garbage_leave_out_what_is_loaded(process, monkeypatch):
    service = toy_service(ToyBackend())
    monkeypatch.setattr(Service, "load", lambda *_, **__: service)
    handler.handle(called(**FIRST))
    assert process.service is service
    assert not any(one is service for one in gc.get_objects())
    service.close()
    gc.unfreeze()


@pytest.fixture(params=["in an event loop", "without one"])
def change(request, process):
    """Call a function of adapters as DJL does; returns status, message, and the token record of asynchronous mode."""
    spec = dataclasses.replace(TOY_SPEC, num_adapters=4, changes_adapters=True)
    process.service = toy_service(ToyBackend(spec), model_name="toy", adapter_sources=["/"])

    def change(function, **properties):
        def call():
            return getattr(handler, function)(called(function, **properties))

        async def awaited():
            return await call()

        output = call() if request.param == "without one" else asyncio.run(awaited())
        return output.code, output.message, output.content.value_at(0)

    yield change
    process.service.close()


def test_javas_calls_change_adapters(change, process):
    """As its routes of adapters make them: Adapter.java, PyAdapter.java (0.36)."""
    places = lambda: dict(process.service.loop.places)  # noqa: E731
    status, message, record = change(
        "register_adapter", name="a", src="/a/one", alias="A", preload="true"
    )
    assert (status, message) == (200, "Adapter a registered")
    assert b"last" in record, "Java keeps the request of asynchronous mode until then"
    assert change("register_adapter", name="a", src="/a/../a/one")[0] == 200, (
        "as at a start of Java"
    )
    assert places() == {"a": 1}
    assert change("update_adapter", name="a", src="/a/two")[:2] == (200, "Adapter a updated")
    assert places() == {"a": 2}
    for function, properties, reason in (
        ("register_adapter", {"name": "a", "src": "/a/three"}, "registered already"),
        ("register_adapter", {"name": "b", "src": "/a/bad"}, "/a/bad is no adapter"),
        ("update_adapter", {"name": "a", "src": "/a/bad"}, "/a/bad is no adapter"),
        ("unregister_adapter", {"name": "b"}, "not registered"),
        ("unregister_adapter", {}, "not registered"),
    ):
        status, message, _ = change(function, **properties)
        assert status >= 400, (function, properties)
        assert reason in message
        assert places() == {"a": 2}
    assert change("unregister_adapter", name="a")[:2] == (200, "Adapter a unregistered")
    assert places() == {}

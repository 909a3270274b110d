"""The doors without sockets: rows by position, whatever the engine does meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import sys
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from djl_python_neuronx.engine.detokenizer import Delta
from djl_python_neuronx.errors import RequestError, StepError
from djl_python_neuronx.protocol import djl
from djl_python_neuronx.protocol.djl_doors import AsyncDoor, PlainDoor, RollingBatchDoor
from djl_python_neuronx.service import TEXT_THREADS
from tests.clients import hostile
from tests.doubles import djl_engine_double
from tests.doubles.djl_engine_double import Input
from tests.doubles.djl_peer import PATIENCE_S, decode_record
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend, expected
from tests.doubles.toy_service import toy_service
from tests.doubles.toy_tokenizer import TOKENIZER, PanickingTokenizer, ToyTokenizer
from tests.protocol.wire_schemas import SCHEMAS

CROSSING_S = 0.02
"""A step that is so slow that an abort reaches the engine long before a sequence of a hundred tokens ends."""
END_OF_STREAM = bytes(5)
"""The last chunk: its flag 0 and its length 0."""


@pytest.fixture(autouse=True)
def djl_python(monkeypatch):
    monkeypatch.setitem(sys.modules, "djl_python", djl_engine_double.installed())
    monkeypatch.setattr(
        djl, "ADMIT_S", 1.0
    )  # enough for texts that are not slow, also on a busy machine


@pytest.fixture
def backend():
    return ToyBackend(replace(TOY_SPEC, num_slots=2))


@pytest.fixture
def service(backend):
    service = toy_service(backend)
    yield service
    backend.resume.set()
    service.close()


@pytest.fixture
def door(service):
    door = RollingBatchDoor(service, 60.0)
    yield door
    door.close()


def body(prompt, num_tokens=4, *, stream=False):
    inputs = "".join(f"<{i}>" for i in prompt)
    parameters = {"max_new_tokens": num_tokens, "ignore_eos": True}
    return json.dumps({"inputs": inputs, "parameters": parameters, "stream": stream}).encode()


def text(prompt, num_tokens=4):
    return TOKENIZER.decode(expected([1, *prompt], num_tokens))


REQUEST_IDS = itertools.count()


def call(known, new=(), **properties):
    """A rolling-batch call: `known` empty rows, then the bodies of `new`."""
    inputs = Input()
    inputs.properties |= {"batch_size": str(known + len(new)), **properties}
    for i in range(known):
        inputs.content.add(f"batch_{i:03d}.data", bytearray())
    for i, content in enumerate(new, known):
        inputs.properties[f"batch_{i:03d}.requestId"] = f"r{next(REQUEST_IDS)}"
        inputs.content.add(f"batch_{i:03d}.data", bytearray(content))
        inputs.content.add(f"batch_{i:03d}.seed", bytearray(b"7"))
    return inputs


def single(content):
    inputs = Input()
    inputs.properties["requestId"] = "r"
    inputs.content.add("data", bytearray(content))
    return inputs


def records(output):
    assert output.code == 200
    assert output.content.get_keys() == [f"batch_{i}.data" for i in range(output.content.size())]
    return [decode_record(value) for value in output.content.get_values()]


def wait_until_delivered(service, num_tokens):
    """Wait for the step that brings the total to `num_tokens`: it is counted once its queues have it."""
    wait_until(lambda: service.metrics["generated_tokens_total"]._value.get() == num_tokens)


class Caller:
    """Java's list: remembers which of its requests are where, and joins what each of them gets."""

    def __init__(self, door):
        self.door, self.live, self.answers = door, [], {}
        self._next = 0

    def step(self, bodies=()):
        known = len(self.live)
        for _ in bodies:
            self.live.append(self._next)
            self.answers[self._next] = []
            self._next += 1
        found = records(self.door.answer(call(known, bodies)))
        assert len(found) == len(self.live)
        for key, record in zip(self.live, found, strict=True):
            assert record.keys() >= {"data", "last"}
            assert ("code" in record) <= (record["last"] == "true")
            self.answers[key].append(record)
        self.live = [
            key for key, record in zip(self.live, found, strict=True) if record["last"] == "false"
        ]

    def finish(self):
        deadline_s = time.monotonic() + PATIENCE_S
        while self.live:
            assert time.monotonic() < deadline_s
            self.step()

    def data(self, key):
        return "".join(record["data"] for record in self.answers[key])


def test_every_row_gets_its_own_text(door):
    caller = Caller(door)
    caller.step([body([5], 9), body([6], 2)])
    caller.step([body([7], 5, stream=True)])
    caller.finish()
    assert json.loads(caller.data(0)) == {"generated_text": text([5], 9)}
    assert json.loads(caller.data(1)) == {"generated_text": text([6], 2)}
    lines = [json.loads(line) for line in caller.data(2).splitlines()]
    assert "".join(line["token"]["text"] for line in lines) == text([7], 5)
    assert door.num_rows == 0


REQUEST = st.tuples(
    st.lists(st.integers(3, 299), min_size=1, max_size=20), st.integers(1, 12), st.booleans()
)


@settings(max_examples=40, deadline=None)
@given(arrivals=st.lists(st.lists(st.one_of(REQUEST, st.none()), max_size=4), max_size=8))
def test_any_arrivals(arrivals):
    """None is a request that cannot be read."""
    sys.modules["djl_python"] = djl_engine_double.installed()
    backend = ToyBackend(replace(TOY_SPEC, num_slots=2))
    service = toy_service(backend)
    door = RollingBatchDoor(service, 60.0)
    try:
        caller = Caller(door)
        for group in arrivals:
            caller.step(
                [b"{" if one is None else body(one[0], one[1], stream=one[2]) for one in group]
            )
        caller.finish()
        for key, one in enumerate(one for group in arrivals for one in group):
            if one is None:
                *early, last = caller.answers[key]
                assert (last["code"], [record["data"] for record in early if record["data"]]) == (
                    "400",
                    [],
                )
                continue
            prompt, num_tokens, _ = one
            last = json.loads(caller.data(key).splitlines()[-1])
            assert last["generated_text"] == text(prompt, num_tokens)
        assert door.num_rows == len(service.loop.streams) == 0
        assert backend.violations == []
    finally:
        door.close()
        service.close()


def test_tokens_that_came_between_calls_travel_together(backend, door, service):
    caller = Caller(door)
    # The device stops after two tokens, so that the first call cannot have more.
    backend.hang_at.add(2)
    caller.step([body([5], 20, stream=True)])
    backend.resume.set()
    wait_until_delivered(service, 20)
    caller.step()
    assert len(caller.answers[0][-1]["data"].splitlines()) >= 18
    caller.step()
    assert caller.live == []
    assert len(caller.data(0).splitlines()) == 20


def test_the_adapter_of_a_query_is_that_of_its_request():
    """A content in Java; a header takes precedence over it, and it over the body."""
    header = {"X-Amzn-SageMaker-Adapter-Identifier": "two"}
    for properties, wanted in (({}, "one"), (header, "two")):
        inputs = single(b"{}")
        inputs.properties |= properties
        inputs.content.add("adapter", bytearray(b"one"))
        content, headers = djl.read(inputs)
        assert content == b"{}"
        assert headers["x-amzn-sagemaker-adapter-identifier"] == wanted


def test_content_types_are_per_row(door, service):
    first = door.answer(call(0, [body([5], 1), body([6], 1, stream=True), b"{"]))
    wait_until_delivered(service, 2)
    second = door.answer(call(door.num_rows))
    types = [
        properties[f"batch_{i}_Content-Type"]
        for properties in (first.properties, second.properties)
        for i in range(3)
        if f"batch_{i}_Content-Type" in properties
    ]
    assert sorted(types) == ["application/json", "application/json", "application/jsonlines"]
    assert first.properties["batch_2_Content-Type"] == "application/json"


def test_a_call_waits_for_a_step_but_not_for_ever(backend, service):
    backend.hang_at.add(0)
    door = RollingBatchDoor(service, 0.2)
    try:
        output = door.answer(call(0, [body([5])]))
        assert records(output) == [{"data": "", "last": "false"}]
        assert backend.hanging.wait(PATIENCE_S)
    finally:
        door.close()


class _Waiting(ToyTokenizer):
    """Takes as long as the test wants for a prompt with <77>."""

    def __init__(self):
        super().__init__()
        self.go_on = threading.Event()
        self.seen = []

    def encode(self, text, **how):
        self.seen.append(text)
        if "<77>" in text:
            assert self.go_on.wait(PATIENCE_S)
        return super().encode(text, **how)


def test_a_row_that_is_being_tokenised_holds_up_no_other(door, service):
    service.tokenizer = waiting = _Waiting()
    caller = Caller(door)
    caller.step([body([5], 30)])
    caller.step([body([77], 2), body([6], 9)])
    while len(caller.live) > 1:
        caller.step()
    assert json.loads(caller.data(0)) == {"generated_text": text([5], 30)}
    assert json.loads(caller.data(2)) == {"generated_text": text([6], 9)}
    waiting.go_on.set()
    caller.finish()
    assert json.loads(caller.data(1)) == {"generated_text": text([77], 2)}


def test_a_text_that_is_ready_waits_for_no_other(door, service, monkeypatch):
    monkeypatch.setattr(djl, "ADMIT_S", 0.0)
    service.tokenizer = waiting = _Waiting()
    door._wait_s = PATIENCE_S
    caller = Caller(door)
    caller.step([body([77], 2), body([6], 9)])
    while len(caller.live) > 1:
        caller.step()
    assert json.loads(caller.data(1)) == {"generated_text": text([6], 9)}
    waiting.go_on.set()
    caller.finish()
    assert json.loads(caller.data(0)) == {"generated_text": text([77], 2)}


def test_a_row_that_is_given_up_is_not_tokenised(door, service):
    service.tokenizer = waiting = _Waiting()
    door._wait_s = 0.0
    rows = [body([77], 2)] * TEXT_THREADS + [body([78])]
    assert records(door.answer(call(0, rows))) == [{"data": "", "last": "false"}] * len(rows)
    caller = Caller(door)
    caller.live, caller.answers = [0], {0: []}
    records(door.answer(call(0, [body([5], 3)], reset_rollingbatch="true")))
    waiting.go_on.set()
    caller.finish()
    assert json.loads(caller.data(0)) == {"generated_text": text([5], 3)}
    assert not [one for one in waiting.seen if "<78>" in one]


def test_rows_beyond_the_texts_that_may_wait_get_503(backend):
    service = toy_service(backend, max_waiting=1)
    service.tokenizer = waiting = _Waiting()
    door = RollingBatchDoor(service, 60.0)
    most = TEXT_THREADS + 3
    caller = Caller(door)
    caller.step([body([77], 2)] * most + [body([78])])
    assert [caller.answers[i][-1].get("code") for i in range(most + 1)] == [None] * most + ["503"]
    waiting.go_on.set()
    door.close()
    service.close()


def test_the_time_of_a_plain_call_counts_its_texts_too(service, monkeypatch):
    monkeypatch.setattr(djl, "ADMIT_S", 0.0)
    service.tokenizer = waiting = _Waiting()
    output = PlainDoor(service, 0.1).answer(single(body([77])))
    assert output.code == 408
    inputs = call(0, [body([77]), body([6], 9)])
    late = threading.Timer(0, lambda: (wait_until_delivered(service, 9), waiting.go_on.set()))
    late.start()  # the slow one waits for no other, and no other for it
    output = PlainDoor(service, PATIENCE_S).answer(inputs)
    texts = [json.loads(one)["generated_text"] for one in output.content.get_values()]
    assert texts == [text([77]), text([6], 9)]
    late.join()


def test_reset_gives_up_before_new_rows_are_read(backend, door, service):
    backend.hang_at.add(1)
    door.answer(call(0, [body([5], 60), body([6], 60)]))
    output = door.answer(call(0, [body([7], 3)], reset_rollingbatch="true"))
    assert len(records(output)) == door.num_rows == 1
    assert len(service.loop.streams) == 1
    backend.resume.set()
    caller = Caller(door)
    caller.live, caller.answers = [0], {0: records(output)}
    caller.finish()
    assert json.loads(caller.data(0)) == {"generated_text": text([7], 3)}
    assert door.num_rows == len(service.loop.streams) == 0


@pytest.mark.parametrize(
    "broken", [call(1), call(3), call(1, [body([9])]), call(0, [body([8]), body([9])]), call(0)]
)
def test_rows_that_do_not_continue_the_last_call_fail_it_whole(backend, door, service, broken):
    backend.hang_at.add(1)
    door.answer(call(0, [body([5], 60), body([6], 60)]))
    assert door.answer(broken).code == 500
    assert door.num_rows == len(service.loop.streams) == 0
    backend.resume.set()
    caller = Caller(door)
    caller.step([body([7], 3)])
    caller.finish()
    assert json.loads(caller.data(0)) == {"generated_text": text([7], 3)}


def test_a_call_that_is_no_batch_touches_nobody(backend, door):
    backend.hang_at.add(1)
    door.answer(call(0, [body([5], 60)]))
    assert door.answer(single(body([6]))).code == 400
    assert door.num_rows == 1


@pytest.mark.parametrize("names", [("data",), ("batch_000.data",), (None, "batch_000.data")])
def test_a_client_makes_no_batch_and_resets_nothing(backend, door, names):
    """Its request is a call of its own if it names the function, and DJL Serving allows that."""
    backend.hang_at.add(1)
    door.answer(call(0, [body([5], 60)]))
    request = Input()
    request.properties |= {"reset_rollingbatch": "true", "batch_size": "1"}
    if None not in names:  # HTTP
        request.properties["RequestID"] = "r"
    for name in names:
        request.content.add(name, bytearray(body([6])))
    assert door.answer(request).code == 400
    assert door.num_rows == 1


def test_an_empty_list_is_an_empty_answer(door):
    assert records(door.answer(call(0))) == []


def test_rows_that_nobody_asks_for_are_given_up(service):
    door = RollingBatchDoor(service, 0.05)
    try:
        output = door.answer(call(0, [body([5], 100), body([6], 100), body([7], 100)]))
        assert output.code == 200
        wait_until(lambda: door.num_rows == len(service.loop.streams) == 0)
    finally:
        door.close()


def test_a_failed_step_answers_its_rows_and_the_next_request_works(backend, door):
    caller = Caller(door)
    backend.fail_at[2] = StepError("the device\nis unwell")
    caller.step([body([5], 30)])
    caller.finish()
    failed = {"data": "", "last": "true", "code": "424", "error": "the device is unwell"}
    assert caller.answers[0][-1] == failed
    caller.step([body([7], 3)])
    caller.finish()
    assert json.loads(caller.data(1)) == {"generated_text": text([7], 3)}


def test_a_sequence_of_a_list_that_fails_ends_the_others(backend, door, service):
    backend.fail_at[1] = StepError("the device is unwell")
    backend.step_s = CROSSING_S
    caller = Caller(door)
    caller.step([several([[5], [6], [7]], 100), body([8], 3)])
    caller.finish()
    assert [record.get("code") for record in caller.answers[0]][-1] == "424"
    assert json.loads(caller.data(1)) == {"generated_text": text([8], 3)}
    wait_until(lambda: len(service.loop.streams) == 0 and not backend.acquired)
    assert backend.num_steps < 100  # no other has come to its own end


def test_reset_gives_up_all_of_a_list(backend, door, service):
    backend.hang_at.add(1)
    door.answer(call(0, [several([[5], [6], [7]], 60)]))
    assert len(service.loop.streams) == 3
    door.answer(call(0, reset_rollingbatch="true"))
    assert len(service.loop.streams) == 0


def test_a_list_that_finds_no_room_is_refused_whole(backend):
    service = toy_service(backend, max_waiting=1)
    door = RollingBatchDoor(service, 60.0)
    backend.hang_at.add(0)
    caller = Caller(door)
    caller.step([body([5]), several([[6], [7], [8]]), several([[6]] * 4), several([[7], [8]])])
    assert caller.answers[1][-1]["code"] == "503"
    assert caller.answers[2][-1]["code"] == "400"
    backend.resume.set()
    caller.finish()
    assert json.loads(caller.data(0)) == {"generated_text": text([5])}
    assert json.loads(caller.data(3)) == [{"generated_text": text([i])} for i in (7, 8)]
    door.close()
    service.close()


def test_an_id_that_comes_again_after_a_reset_gets_none_of_the_old_tokens(backend, door):
    """Ids come from clients, and a client that was cut off tries again with the same."""
    backend.hang_at.add(1)
    first, again = call(0, [body([5], 60)]), call(0, [body([7], 3)], reset_rollingbatch="true")
    first.properties["batch_000.requestId"] = again.properties["batch_000.requestId"] = "same"
    door.answer(first)
    assert backend.hanging.wait(PATIENCE_S)
    caller = Caller(door)
    caller.live, caller.answers = [0], {0: records(door.answer(again))}
    backend.resume.set()
    caller.finish()
    assert json.loads(caller.data(0)) == {"generated_text": text([7], 3)}


def test_an_error_after_the_first_bytes_is_written_in_the_format(backend, service):
    door = RollingBatchDoor(service, 60.0)
    backend.hang_at.add(3)
    caller = Caller(door)
    caller.step([body([5], 30, stream=True)])
    while not caller.data(0):
        caller.step()
    backend.fail_at[3] = StepError("the device is unwell")
    backend.resume.set()
    caller.finish()
    assert "code" not in caller.answers[0][-1]
    assert json.loads(caller.data(0).splitlines()[-1])["code"] == 424
    door.close()


def test_an_error_of_model_py_after_the_first_bytes_is_written_in_the_format(backend):
    """Also where these are a comment: a reader of events would not see the body that Java makes of an error."""

    written = []

    def write(part):
        written.append(part)
        if len(written) == 4:
            raise KeyError("a bug")
        return part

    backend.step_s = CROSSING_S
    service = toy_service(backend, functions={"output_formatter": write})
    request = single(body([5], 9, stream=True))
    request.properties["Accept"] = "text/event-stream"
    records = records_of(AsyncDoor(service).answer(request))
    assert not any("code" in record for record in records)
    *_, last = "".join(record["data"] for record in records).strip().split("\n\n")
    error = json.loads(last.removeprefix("data:"))
    assert error["code"] == 424
    assert error["details"]["generated_tokens"] >= 4
    service.close()


class _Broken:
    """A formatter that fails at the third delta."""

    content_type = "application/jsonlines"

    def __init__(self):
        self.count = 0

    def feed(self, delta: Delta) -> bytes:
        self.count += 1
        if self.count == 3:
            raise KeyError("a bug")
        return delta.text.encode()


class _Breaking:
    """A service whose answers for one prompt cannot be written."""

    custom = None

    def __init__(self, service):
        self._service, self.loop, self.threads = service, service.loop, service.threads

    def parse(self, content, **known):
        if b"<66>" in content:
            raise RuntimeError("a bug")
        parsed = self._service.parse(content, **known)
        return replace(parsed, formatter=_Broken()) if b"<99>" in content else parsed


def test_a_bug_costs_one_request(service):
    door = RollingBatchDoor(_Breaking(service), 60.0)
    caller = Caller(door)
    caller.step([body([99], 30), body([5], 30), body([66])])
    caller.finish()
    assert caller.answers[0][-1]["code"] == caller.answers[2][-1]["code"] == "500"
    assert json.loads(caller.data(1)) == {"generated_text": text([5], 30)}
    assert len(service.loop.streams) == 0
    door.close()


async def gather(answer):
    return [output async for output in answer]


def answer_of(mode, service, properties, content=None):
    """Type and bytes of one answer."""
    content = content or body([5], 9)
    request = single(content)
    if mode == "plain":
        request.properties |= properties
        output = PlainDoor(service, 60.0).answer(request)
        return output.properties["Content-Type"], bytes(output.content.get("data"))
    if mode == "async":
        request.properties |= properties
        (output,) = asyncio.run(gather(AsyncDoor(service).answer(request)))
        return output.properties["Content-Type"], decode_record(output.content.value_at(0))["data"]
    door = RollingBatchDoor(service, 60.0)
    request = call(0, [content])
    request.properties |= {f"batch_000.{name}": value for name, value in properties.items()}
    output = door.answer(request)
    while not output.properties:
        output = door.answer(call(1))
    door.close()
    return output.properties["batch_0_Content-Type"], records(output)[0]["data"]


MODES = pytest.mark.parametrize("mode", ["rolling", "plain", "async"])


def several(prompts, num_tokens=4, **parameters):
    inputs = ["".join(f"<{i}>" for i in prompt) for prompt in prompts]
    parameters |= {"max_new_tokens": num_tokens, "ignore_eos": True}
    return json.dumps({"inputs": inputs, "parameters": parameters}).encode()


@MODES
def test_a_list_is_answered_by_a_list(service, backend, mode):
    prompts = [[i, i + 1] for i in range(5, 11)]
    _, answer = answer_of(mode, service, {}, several(prompts))
    assert json.loads(answer) == [{"generated_text": text(prompt)} for prompt in prompts]
    assert len(service.loop.streams) == 0
    assert backend.violations == []


@MODES
def test_a_chat_by_its_body(service, mode):
    """OpenAI's own client names itself, because Java does not pass on the route."""
    chat = {"messages": [{"role": "user", "content": "<5>"}], "max_tokens": 4, "temperature": 0}
    content_type, content = answer_of(mode, service, {}, json.dumps(chat).encode())
    assert (content_type, SCHEMAS["chat"](content).texts) == ("application/json", [text([5], 4)])
    for properties, kind in (({}, "chat_jsonlines"), ({"X-Stainless-Lang": "js"}, "chat_sse")):
        answer = streamed(mode, service, properties, json.dumps({**chat, "stream": True}).encode())
        assert SCHEMAS[kind](answer).texts == [text([5], 4)]


@MODES
@pytest.mark.parametrize("parsed", [False, True])
def test_an_error_of_a_chat_has_openais_status(service, mode, parsed):
    """Of a prompt that is too long, and of a wrong parameter. Java makes the body of a record's status and message."""
    long = {"messages": [{"role": "user", "content": "<5>" * 200}], "max_tokens": 4}
    wrong = {"messages": [{"role": "user", "content": "<5>"}], "model": "other"}
    content, status = json.dumps(long if parsed else wrong).encode(), "400" if parsed else "404"
    if mode == "plain":
        output = PlainDoor(service, 60.0).answer(single(content))
        assert str(output.code) == status
        error = json.loads(bytes(output.content.get("data")))["error"]
        assert error["code"] == ("context_length_exceeded" if parsed else "model_not_found")
        return
    if mode == "async":
        (output,) = asyncio.run(gather(AsyncDoor(service).answer(single(content))))
        record = decode_record(output.content.value_at(0))
    else:
        door = RollingBatchDoor(service, 60.0)
        (record,) = records(door.answer(call(0, [content])))
        door.close()
    assert record["code"] == status


def streamed(mode, service, properties, content):
    """The bytes of a streamed answer."""
    request = single(content)
    request.properties |= properties
    if mode == "plain":
        output = PlainDoor(service, 60.0).answer(request)
        return b"".join(output.stream_content or [bytes(output.content.get("data"))])
    if mode == "async":
        outputs = asyncio.run(gather(AsyncDoor(service).answer(request)))
        found = [decode_record(one.content.value_at(0)) for one in outputs]
        return "".join(record["data"] for record in found).encode()
    door, found = RollingBatchDoor(service, 60.0), []
    request = call(0, [content])
    request.properties |= {f"batch_000.{name}": value for name, value in properties.items()}
    while not found or found[-1]["last"] == "false":
        found += records(door.answer(request))
        request = call(1)
    door.close()
    return "".join(record["data"] for record in found).encode()


@MODES
def test_a_body_of_text_is_the_prompt(service, mode):
    _, answer = answer_of(mode, service, {"Content-Type": "text/plain"}, b"<5><6>")
    ids = expected([1, 5, 6], 30, stop_ids={2})
    assert json.loads(answer) == {"generated_text": TOKENIZER.decode(ids)}


@pytest.mark.parametrize(
    ("name", "value"), [('{"inputs": "a", "stream": true}', b""), ('{"inputs": "5 ', b' 3"}')]
)
def test_the_error_of_a_form_names_the_type(service, name, value):
    """Java makes fields of a body of curl's default type; the name of the first ends at an equals sign."""
    row = Input()
    row.content.add(name, value)
    row.properties["Content-Type"] = "application/x-www-form-urlencoded"
    content, headers = djl.read(row)
    with pytest.raises(
        RequestError, match="its Content-Type is 'application/x-www-form-urlencoded'"
    ):
        service.parse(content, headers=headers)


@MODES
def test_a_deadline_ends_an_answer_with_what_there_is(mode):
    backend = ToyBackend(replace(TOY_SPEC, max_model_len=4096, token_buckets=(4096,)), step_s=0.005)
    service = toy_service(backend, max_request_seconds=60.0)
    content = several([[5], [6]], 4000, max_time=1.0, details=True)
    _, answer = answer_of(mode, service, {}, content)
    for one, prompt in zip(json.loads(answer), ([5], [6]), strict=True):
        details = one["details"]
        assert (details["finish_reason"], len(details["tokens"])) == (
            "time",
            details["generated_tokens"],
        )
        assert one["generated_text"] == text(prompt, details["generated_tokens"])
    service.close()


@MODES
def test_no_property_of_a_request_sets_anything(service, mode):
    options = service.options.model_dump()
    plain = answer_of(mode, service, {})
    assert json.loads(plain[1]) == {"generated_text": text([5], 9)}
    assert answer_of(mode, service, hostile.PROPERTIES) == plain
    assert service.options.model_dump() == options


def test_asynchronous_records_never_raise(service, backend):
    async def run():
        door = AsyncDoor(_Breaking(service))
        contents = [body([99], 30), body([5], 9), body([66]), b"", body([6], 9, stream=True)]
        found = await asyncio.gather(*(gather(door.answer(single(c))) for c in contents))
        return [
            [decode_record(output.content.value_at(0)) for output in outputs] for outputs in found
        ]

    broken, whole, unread, empty, streamed = asyncio.run(run())
    assert broken[-1]["code"] == unread[-1]["code"] == "500"
    assert empty == [{"data": "", "last": "true", "code": "400", "error": empty[0]["error"]}]
    assert [json.loads(record["data"]) for record in whole] == [{"generated_text": text([5], 9)}]
    # Java may lose what comes with the end of a stream.
    assert [record["last"] for record in streamed] == ["false"] * 9 + ["true"]
    assert streamed.pop()["data"] == ""
    lines = [json.loads(record["data"]) for record in streamed]
    assert "".join(line["token"]["text"] for line in lines) == text([6], 9)
    assert len(service.loop.streams) == 0
    assert backend.violations == []


def test_a_tokenizer_that_panics_fails_its_request_only(service):
    """A panic of the Rust library is no `Exception`."""
    service.tokenizer = PanickingTokenizer()
    bad = json.dumps({"inputs": "~"}).encode()
    (record,) = records_of(AsyncDoor(service).answer(single(bad)))
    assert record["code"] == "500"
    assert PlainDoor(service, 60.0).answer(single(bad)).code == 500
    door = RollingBatchDoor(service, 60.0)
    caller = Caller(door)
    caller.step([body([5], 9), bad])
    caller.finish()
    assert caller.answers[1][-1]["code"] == "500"
    assert json.loads(caller.data(0)) == {"generated_text": text([5], 9)}
    door.close()


def test_a_body_above_the_limit_is_refused_by_its_row(backend):
    service = toy_service(backend, max_body_bytes=200)
    door = RollingBatchDoor(service, 60.0)
    caller = Caller(door)
    caller.step([body([5], 9), body([5], 9).ljust(201)])
    caller.finish()
    assert caller.answers[1][-1]["code"] == "413"
    assert json.loads(caller.data(0)) == {"generated_text": text([5], 9)}
    door.close()
    service.close()


def records_of(answer, backend=None, num_before_resume=0):
    """All records. A device that hangs goes on after so many of them."""

    async def read():
        found = []
        async for output in answer:
            found.append(decode_record(output.content.value_at(0)))
            if len(found) == num_before_resume:
                backend.resume.set()
        return found

    return asyncio.run(read())


@pytest.mark.parametrize("late_at", [0, 12])
def test_a_late_json_answer_begins_with_blanks(backend, service, late_at):
    # Before the first token, and between tokens: Java's limit is on the time without bytes.
    backend.hang_at = {late_at}
    late = AsyncDoor(service, 0.4).answer(single(body([5], 20)))
    *blanks, answer, last = records_of(late, backend, num_before_resume=2)
    assert len(blanks) >= 2
    assert all(record == {"data": " ", "last": "false"} for record in blanks)
    assert json.loads(answer["data"]) == {"generated_text": text([5], 20)}
    assert last == {"data": "", "last": "true"}


def test_blanks_take_the_headers_with_them(backend, service):
    backend.hang_at = {0}

    async def run():
        answer = AsyncDoor(service, 0.4).answer(single(body([5])))
        first = await answer.__anext__()
        backend.resume.set()
        await gather(answer)
        return first

    assert asyncio.run(run()).get_properties()["Content-Type"] == "application/json"


def test_an_error_after_a_blank_is_in_the_body(backend, service):
    backend.hang_at = {5}
    backend.fail_at[6] = StepError("the device is unwell")
    late = AsyncDoor(service, 0.4).answer(single(body([5], 20)))
    *blanks, last = records_of(late, backend, num_before_resume=1)
    assert blanks
    assert "code" not in last
    assert json.loads("".join(r["data"] for r in [*blanks, last]))["type"] == "step_error"


def test_a_prompt_answer_gets_no_blank(backend, service):
    (whole,) = records_of(AsyncDoor(service, 4.0).answer(single(body([5], 20))))
    assert json.loads(whole["data"]) == {"generated_text": text([5], 20)}
    records = records_of(AsyncDoor(service, 4.0).answer(single(body([6], 9, stream=True))))
    assert all(json.loads(record["data"]) for record in records[:-1])


@pytest.mark.parametrize("late_at", [0, 5])
@pytest.mark.parametrize(
    ("form", "ignored"), [("jsonlines", "\n"), ("sse", ":\n\n")], ids=["jsonlines", "sse"]
)
def test_a_late_stream_gets_what_its_readers_ignore(backend, service, form, ignored, late_at):
    """An empty line between lines of JSON; a comment between events (HTML standard, 9.2.6)."""
    backend.hang_at = {late_at}
    request = single(body([6], 9, stream=True))
    if form == "sse":
        request.properties["Accept"] = "text/event-stream"
    late = AsyncDoor(service, 0.4).answer(request)
    records = records_of(late, backend, num_before_resume=late_at + 2)
    silent = [record["data"] for record in records if record["data"] == ignored]
    assert len(silent) >= 2
    streamed = [r["data"] for r in records if r["data"] not in {ignored, ""}]
    lines = [json.loads(line.removeprefix("data:")) for line in streamed]
    assert "".join(line["token"]["text"] for line in lines) == text([6], 9)


def test_rows_of_a_rolling_batch_get_blanks_too(backend, service):
    backend.hang_at = {0}
    door = RollingBatchDoor(service, 60.0, 0.4)
    caller = Caller(door)
    caller.step([body([5], 9), body([6], 9, stream=True)])
    deadline_s = time.monotonic() + PATIENCE_S
    while not caller.answers[0][-1]["data"]:
        assert time.monotonic() < deadline_s
        caller.step()
    assert caller.answers[0][-1] == {"data": " ", "last": "false"}
    assert {record["data"] for record in caller.answers[1]} <= {"", "\n"}
    backend.resume.set()
    caller.finish()
    assert json.loads(caller.data(0)) == {"generated_text": text([5], 9)}
    lines = [json.loads(line) for line in caller.data(1).splitlines() if line]
    assert "".join(line["token"]["text"] for line in lines) == text([6], 9)
    door.close()


def test_a_closed_answer_frees_its_slot(service):
    async def run():
        answer = AsyncDoor(service).answer(single(body([5], 100, stream=True)))
        await answer.__anext__()
        await answer.aclose()

    asyncio.run(run())
    assert len(service.loop.streams) == 0


def test_a_long_prompt_is_read_on_a_thread(service):
    content = body([5] * 40 + [6]).replace(b"{", b"{" + b" " * 9000, 1)

    async def run():
        return await gather(AsyncDoor(service).answer(single(content)))

    (output,) = asyncio.run(run())
    assert json.loads(decode_record(output.content.value_at(0))["data"]) == {
        "generated_text": text([5] * 40 + [6])
    }


def test_a_plain_stream_that_is_dropped_frees_its_slot(backend, service):
    backend.hang_at = {50}  # else a fast device may be through before the door looks
    output = PlainDoor(service, 60.0).answer(single(body([5], 100, stream=True)))
    chunks = output.stream_content
    assert next(chunks)
    assert backend.hanging.wait(PATIENCE_S)
    del chunks, output
    backend.step_s = CROSSING_S
    backend.resume.set()
    wait_until(lambda: len(service.loop.streams) == 0 and not backend.acquired)
    assert backend.num_steps < 100


def test_the_end_of_a_plain_stream_is_read_alone(service):
    """Java loses its place in the bytes if a read of it ends within the last chunk."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    output = PlainDoor(service, 60.0).answer(single(body([5], 100, stream=True)))
    with ours, theirs:
        sender = threading.Thread(target=output.send, args=(ours,))
        sender.start()
        reads = [b""]
        while not reads[-1].endswith(END_OF_STREAM):
            time.sleep(0.001)  # the sender is ahead
            reads.append(theirs.recv(100))
        sender.join()
    assert reads[-1] == END_OF_STREAM


def test_a_plain_error_before_the_first_bytes_is_a_status(backend, service):
    backend.fail_at[0] = StepError("the device is unwell")
    output = PlainDoor(service, 60.0).answer(single(body([5], 9, stream=True)))
    assert output.code == 424
    assert output.stream_content is None
    assert json.loads(output.content.get("data"))["type"] == "step_error"


def test_a_dead_engine_answers_everyone(service, door):
    service.loop.close()
    caller = Caller(door)
    caller.step([body([5]), body([6])])
    assert [caller.answers[key][-1]["code"] for key in (0, 1)] == ["503", "503"]


def wait_until(condition):
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)

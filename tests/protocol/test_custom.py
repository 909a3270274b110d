"""Formatters of `model.py` around toy answers: in the embedded server and behind each of DJL Serving's doors."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
from concurrent.futures import Future, wait
from contextlib import contextmanager
from types import MappingProxyType

import pytest

httpx = pytest.importorskip("httpx", reason="needs httpx")
pytest.importorskip("uvicorn", reason="needs the `server` extra")

from djl_python_neuronx.artifacts.tokenizer import load_tokenizer  # noqa: E402
from djl_python_neuronx.config.own_code import READS, WRITES  # noqa: E402
from djl_python_neuronx.engine.detokenizer import Delta, Token  # noqa: E402
from djl_python_neuronx.errors import ArtifactError, RequestError  # noqa: E402
from djl_python_neuronx.protocol import custom  # noqa: E402
from djl_python_neuronx.protocol.base import ParseContext, ParsedRequest  # noqa: E402
from djl_python_neuronx.protocol.djl_doors import (  # noqa: E402
    AsyncDoor,
    PlainDoor,
    RollingBatchDoor,
)
from djl_python_neuronx.server.app import Application, create_app  # noqa: E402
from djl_python_neuronx.server.models import Model  # noqa: E402
from djl_python_neuronx.types import FinishReason, GenerationRequest  # noqa: E402
from tests.djl.java import ROOT, MavenError, missing_programs, released_jars  # noqa: E402
from tests.doubles import djl_engine_double  # noqa: E402
from tests.doubles.djl_peer import PATIENCE_S, decode_record  # noqa: E402
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend, expected  # noqa: E402
from tests.doubles.toy_service import toy_service  # noqa: E402
from tests.doubles.toy_tokenizer import TOKENIZER  # noqa: E402

SECRET = "<77>"
"""A prompt that no log may have."""
DOORS = ("embedded", "rolling", "plain", "async")


@contextmanager
def serving(backend=None, settings=MappingProxyType({}), **functions):
    """A toy service with formatters: `read` for the input, `write` for the output."""
    names = {"read": READS, "write": WRITES}
    backend = backend or ToyBackend(TOY_SPEC)
    functions = {names[kind]: one for kind, one in functions.items()}
    service = toy_service(backend, functions=functions, **settings)
    try:
        yield service
        assert not service.loop.streams
    finally:
        service.close()


def request(prompt="<5>", num_tokens=3, **more):
    return {
        "inputs": prompt,
        "parameters": {"max_new_tokens": num_tokens, "ignore_eos": True},
        **more,
    }


def text_of(prompt="<5>", num_tokens=3):
    return TOKENIZER.decode(expected(TOKENIZER.encode(prompt), num_tokens))


class Answer:
    """Status, type and content as a client gets them."""

    def __init__(self, status, content_type, content):
        self.status, self.content_type, self.content = status, content_type, content

    @property
    def lines(self):
        return [json.loads(line) for line in self.content.splitlines()]


def ask(door, service, *bodies, **headers):
    """The answers to bodies that are sent at the same time (plain: one after the other)."""
    contents = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in bodies]
    if door == "embedded":
        return asyncio.run(_embedded(service, contents, headers))
    if door == "async":
        return asyncio.run(_async(service, contents, headers))
    if door == "plain":
        return [_plain(service, content, headers) for content in contents]
    return _rolling(service, contents, headers)


async def _embedded(service, contents, headers):
    application = Application(Model("toy"))
    application.models[0].service = service
    transport = httpx.ASGITransport(app=create_app(application))
    async with httpx.AsyncClient(transport=transport, base_url="http://toy") as client:
        posts = [client.post("/invocations", content=one, headers=headers) for one in contents]
        found = await asyncio.gather(*posts)
    return [Answer(one.status_code, one.headers["content-type"], one.content) for one in found]


def _row(content, headers):
    row = djl_engine_double.Input()
    row.properties |= {"requestId": "r", **headers}
    row.content.add("data", bytearray(content))
    return row


def _joined(records):
    """Records as Java joins them: a code is the status, and its error the body or the end of it."""
    status, content = 200, b""
    for record in records:
        content += record["data"].encode()
        if "code" in record:
            status = int(record["code"])
            content += json.dumps({"code": status, "error": record["error"]}).encode()
    assert [record["last"] for record in records].index("true") == len(records) - 1
    return status, content


async def _async(service, contents, headers):
    door = AsyncDoor(service)

    async def one(content):
        outputs = [output async for output in door.answer(_row(content, headers))]
        records = [decode_record(bytes(output.content.value_at(0))) for output in outputs]
        return Answer(
            *_joined(records)[:1], outputs[0].properties["Content-Type"], _joined(records)[1]
        )

    return await asyncio.gather(*map(one, contents))


def _plain(service, content, headers):
    output = PlainDoor(service, 60.0).answer(_row(content, headers))
    content = (
        bytes(output.content.value_at(0))
        if output.stream_content is None
        else b"".join(output.stream_content)
    )
    return Answer(output.code, output.properties["Content-Type"], content)


def _rolling(service, contents, headers):
    door = RollingBatchDoor(service, 60.0)
    live = list(range(len(contents)))
    types, records = {}, {i: [] for i in live}
    new = contents
    while live:
        call = djl_engine_double.Input()
        call.properties["batch_size"] = str(len(live))
        for i in range(len(live)):
            content = new[i] if new else b""
            row = {"requestId": "r", **headers} if new else {}
            call.properties |= {f"batch_{i:03d}.{name}": value for name, value in row.items()}
            call.content.add(f"batch_{i:03d}.data", bytearray(content))
        output, new = door.answer(call), ()
        assert output.code == 200
        for i, key in enumerate(live):
            records[key].append(decode_record(bytes(output.content.value_at(i))))
            if content_type := output.properties.get(f"batch_{i}_Content-Type"):
                types.setdefault(key, content_type)
        live = [key for key in live if records[key][-1]["last"] == "false"]
    door.close()
    found = {key: _joined(each) for key, each in records.items()}
    return [Answer(status, types[key], content) for key, (status, content) in found.items()]


@pytest.fixture(autouse=True)
def djl_python(monkeypatch):
    monkeypatch.setitem(sys.modules, "djl_python", djl_engine_double.installed())


@pytest.fixture(params=DOORS)
def door(request):
    return request.param


def rename(payload, tokenizer=None, **_):
    """As in DJL's documentation: a field of another name, and a default."""
    payload["inputs"] = payload.pop("question")
    payload.setdefault("parameters", {}).setdefault("max_new_tokens", 3)
    payload["parameters"]["ignore_eos"] = True
    assert tokenizer.encode("<8>") == [1, 8]
    return payload


def shout(answer):
    return {**answer, "by": "model.py"}


def test_the_payload_is_what_the_input_formatter_returns(door):
    with serving(read=rename) as service:
        (answer,) = ask(door, service, {"question": "<5>"})
        assert (answer.status, answer.content_type) == (200, "application/json")
        assert answer.lines == [{"generated_text": text_of()}]


def test_a_text_is_a_payload_too():
    def read(payload, **_):
        return request(payload["inputs"] + "<6>")

    with serving(read=read) as service:
        (answer,) = ask("embedded", service, b"<5>", **{"content-type": "text/plain"})
        assert answer.lines == [{"generated_text": text_of("<5><6>")}]


def test_an_answer_is_what_the_output_formatter_returns(door):
    with serving(write=shout) as service:
        whole, several, lines = ask(
            door, service, request(), request(["<5>", "<6>"]), request(stream=True)
        )
    assert whole.lines == [{"generated_text": text_of(), "by": "model.py"}]
    expect = [{"generated_text": text_of(one), "by": "model.py"} for one in ("<5>", "<6>")]
    assert several.lines == [expect]
    assert lines.content_type == "application/jsonlines"
    assert len(lines.lines) == 3
    assert all(line["by"] == "model.py" and "token" in line for line in lines.lines)
    assert lines.lines[-1]["generated_text"] == text_of()


def test_an_event_stays_an_event():
    with serving(write=shout) as service:
        (answer,) = ask("embedded", service, request(stream=True), accept="text/event-stream")
    events = answer.content.decode().removesuffix("\n\n").split("\n\n")
    assert len(events) == 3
    assert all(json.loads(event.removeprefix("data: "))["by"] == "model.py" for event in events)


class Sends:
    """A formatter of any protocol, with the same bytes for each delta."""

    content_type = "text/event-stream"

    def __init__(self, sent):
        self.feed = lambda _: sent


@pytest.mark.parametrize(
    ("sent", "made"),
    [
        ('data: {"a":1}\n\ndata: [DONE]\n\n', 'data: {"a":1,"by":"model.py"}\n\ndata: [DONE]\n\n'),
        ('data:{"a":"}{\\n"}\n\n', 'data:{"a":"}{\\n","by":"model.py"}\n\n'),
        ('event: end\ndata: {}\n\n', 'event: end\ndata: {"by":"model.py"}\n\n'),
        ('{"a":[1]}\n{}\n', '{"a":[1],"by":"model.py"}\n{"by":"model.py"}\n'),
        ("[{}]", '[{"by":"model.py"}]'),
        ("", ""),
    ],
)  # fmt: skip
def test_only_objects_are_formatted_and_all_else_stays(sent, made):
    parsed = ParsedRequest([GenerationRequest("r1", ())], Sends(sent.encode()), stream=True)
    formatters = custom.CustomFormatters({WRITES: shout}, TOKENIZER)
    context = ParseContext(TOKENIZER, "r1")
    parsed = formatters.parse(b"", context, lambda *_: {}, lambda *_: parsed)
    assert parsed.formatter.feed(Delta("r1", "", ())) == made.encode()


@pytest.mark.parametrize("made", ["Grüße", "Grüße".encode()])
def test_text_is_sent_as_it_is(door, made):
    with serving(write=lambda _: made) as service:
        (answer,) = ask(door, service, request())
    assert (answer.status, answer.content.decode()) == (200, "Grüße")


def failing(how):
    """A formatter that fails on the secret prompt, for the one request that has it."""

    def read(payload, **_):
        return how(payload) if payload["inputs"] == SECRET else payload

    return read


def raise_value_error(payload, **_):
    raise ValueError(f"cannot do {payload}")


def leave(payload):
    sys.exit(str(payload))


BROKEN = {
    "raises": raise_value_error,
    "leaves": leave,
    "returns nothing": lambda _: None,
    "returns a number": lambda _: 5,
    "returns what is not JSON": lambda payload: {**payload, "inputs": object()},
    "returns keys that are not text": lambda _: {1: 2},
}


@pytest.mark.parametrize("how", BROKEN.values(), ids=BROKEN)
def test_an_input_formatter_that_fails_costs_its_request_alone(door, how, caplog):
    caplog.set_level(logging.DEBUG)
    with serving(read=failing(how)) as service:
        good, bad, stream = ask(door, service, request(), request(SECRET), request(stream=True))
        assert (
            service.metrics["rejected_requests_total"].labels("formatter_error")._value.get() == 1
        )
    assert good.lines == [{"generated_text": text_of()}]
    assert stream.lines[-1]["generated_text"] == text_of()
    assert bad.status == 424
    assert "input_formatter of model.py" in json.loads(bad.content)["error"]
    assert SECRET not in caplog.text + bad.content.decode()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "how",
    [*BROKEN.values(), lambda _: b"\xff", lambda _: "\ud800"],
    ids=[*BROKEN, "returns no UTF-8", "returns no Unicode"],
)
def test_an_output_formatter_that_fails_costs_its_request_alone(door, how, streams, caplog):
    """A stream at its second object, of many more that nobody waits for."""
    caplog.set_level(logging.DEBUG)
    second = expected(TOKENIZER.encode(SECRET), 2)[1]

    def write(answer):
        of_secret = answer.get("token", {}).get("id") == second
        if of_secret or answer.get("generated_text") == text_of(SECRET):
            return how({"inputs": SECRET})
        return answer

    bad = request(SECRET, 100, stream=True) if streams else request(SECRET)
    with serving(write=write) as service:
        first, failed, last = ask(door, service, request(), bad, request("<6>", stream=True))
    assert first.lines == [{"generated_text": text_of()}]
    assert last.lines[-1]["generated_text"] == text_of("<6>")
    if door == "embedded":  # DJL's doors may collect both objects before they answer
        assert (failed.status, len(failed.lines)) == ((200, 2) if streams else (424, 1))
    assert "output_formatter of model.py" in failed.lines[-1]["error"]
    assert failed.lines[-1]["code"] == 424
    if streams and door == "embedded":
        assert failed.lines[-1]["details"]["generated_tokens"] == 2
        assert failed.lines[-1]["details"]["finish_reason"] == "error"
    assert SECRET not in caplog.text


def test_the_log_says_where_a_formatter_failed(caplog):
    with serving(read=raise_value_error) as service:
        ask("embedded", service, request(SECRET), **{"x-request-id": "mine"})
    (record,) = [one for one in caplog.records if "formatter_failed" in one.message]
    assert "request_id=mine error=ValueError" in record.message
    assert "in raise_value_error" in record.message
    assert SECRET not in caplog.text


@pytest.mark.parametrize("kind", ["read", "write"])
def test_an_error_of_this_package_is_the_answer(door, kind):
    def refuse(payload, **_):
        raise RequestError("question is missing")

    with serving(**{kind: refuse}) as service:
        (answer,) = ask(door, service, request())
    assert (answer.status, json.loads(answer.content)["error"]) == (400, "question is missing")


def test_errors_of_the_protocol_are_not_formatted(door):
    backend = ToyBackend(TOY_SPEC)
    with serving(backend, write=shout) as service:
        backend.fail_at[backend.num_steps] = RuntimeError("broken")
        (answer,) = ask(door, service, request())
    assert answer.status == 424
    assert "by" not in json.loads(answer.content)


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("door", ["embedded", "async"])
def test_a_slow_formatter_leaves_the_event_loop_alone(door, kind):
    """They come one at a time, as DJL's engine calls them: they need not be safe for threads."""
    turn, threads = threading.Lock(), set()
    reached, go_on = threading.Event(), threading.Event()

    def slow(payload, **_):
        threads.add(threading.current_thread())
        assert turn.acquire(blocking=False)
        reached.set()
        assert go_on.wait(PATIENCE_S)
        turn.release()
        return payload

    async def run(service):
        asks = {"embedded": _embedded, "async": _async}[door]
        contents = [json.dumps(request()).encode()] * 2
        answers = asyncio.create_task(asks(service, contents, {}))
        assert await asyncio.to_thread(reached.wait, PATIENCE_S)
        # The loop runs: this coroutine does.
        go_on.set()
        return await answers

    with serving(**{kind: slow}) as service:
        found = asyncio.run(run(service))
    assert [answer.lines for answer in found] == [[{"generated_text": text_of()}]] * 2
    assert len(threads) == 1
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_formatter_that_hangs_costs_its_request(door, kind, caplog):
    go_on = threading.Event()

    hung = []

    def hanging(payload, **_):
        if payload.get("inputs", payload.get("generated_text")) in {"<7>", text_of("<7>")}:
            hung.append(threading.current_thread())
            assert go_on.wait(PATIENCE_S)
        return payload

    with serving(settings={"text_timeout": 0.5}, **{kind: hanging}) as service:
        for _ in range(2):
            found = ask(door, service, request(), request("<7>"), request("<6>"))
            assert [found[0].lines, found[2].lines] == [
                [{"generated_text": text_of()}],
                [{"generated_text": text_of("<6>")}],
            ]
            assert found[1].status == 424
            assert b"takes more than 0.5 s (option.text_timeout)" in found[1].content
        assert caplog.text.count("formatter_hangs") == 2
        hanging, service.custom._hanging = service.custom._hanging, [Future()] * custom.MOST_HANGING
        (refused,) = ask(door, service, request())
        assert (refused.status, b"calls of model.py hang" in refused.content) == (424, True)
        go_on.set()
        assert not wait(hanging, PATIENCE_S).not_done
        hanging += [Future()] * (custom.MOST_HANGING - 2)
        service.custom._hanging = hanging
        (served,) = ask(door, service, request())
        assert served.lines == [{"generated_text": text_of()}]
        assert len(service.custom._hanging) == custom.MOST_HANGING - 2
        for thread in hung:
            thread.join(PATIENCE_S)
        assert [thread.is_alive() for thread in hung] == [False, False]


def test_a_formatter_has_a_tokenizer_of_its_own():
    """Truncation is a state of the tokenizer, which all requests share."""
    folder = ROOT / "examples" / "tiny-llama"
    tokenizer = load_tokenizer(folder)
    before = tokenizer.encode("1 2 3 4 5")

    def read(payload, tokenizer):
        return {"inputs": str(len(tokenizer("1 2 3 4 5", truncation=True, max_length=2).input_ids))}

    formatters = custom.CustomFormatters({READS: read}, tokenizer)
    context = ParseContext(tokenizer, "r1")
    payload = formatters.parse(b"", context, lambda *_: {}, lambda payload, _: payload)
    assert payload == {"inputs": "2"}
    assert tokenizer.encode("1 2 3 4 5") == before
    assert len(before) > 2


# --- formatters with DJL's own classes


@pytest.fixture
def released(monkeypatch):
    """`djl_python` of DJL's released engine."""
    try:
        jars = released_jars() if missing_programs() is None else None
    except MavenError:
        jars = None
    if jars is None:
        assert os.environ.get("CI") != "true", "needs Maven"
        pytest.skip("needs Maven")
    for name in [name for name in sys.modules if name.partition(".")[0] == "djl_python"]:
        monkeypatch.delitem(sys.modules, name)
    (jar,) = jars.glob("python-*.jar")
    monkeypatch.syspath_prepend(str(jar))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "djl_python"]:
        del sys.modules[name]


class Answers:
    """The toy answer to a prompt as DJL's classes have it: one token with each call."""

    def __init__(self, prompt="<5>", num_tokens=3):
        ids = expected(TOKENIZER.encode(prompt), num_tokens)
        self.rows = [
            [
                one,
                f"<{one}>",
                i == 0,
                i == num_tokens - 1,
                "length" if i == num_tokens - 1 else None,
            ]
            for i, one in enumerate(ids)
        ]


def function_of(source, kind, tmp_path):
    """The function that `model.py` with the source has."""
    (tmp_path / "model.py").write_text(source)
    return custom.load(tmp_path)[kind]


READ_ITEM = """
from djl_python import Input
from djl_python.request_io import TextInput
import json

class Question(TextInput):
    asked_by: str = ""

def read(item: Input, tokenizer=None, **kwargs):
    name, _, prompt = item.get_as_string().partition(":")
    made = Question()
    made.input_text = prompt
    made.parameters = {"max_new_tokens": 3, "ignore_eos": True, "stream": item.get_property("X-Stream") == "yes"}
    made.asked_by = name
    return made

read.is_input_formatter = True
"""
WRITE_OUTPUT = """
import json
from djl_python.output_formatter import TextGenerationOutput, output_formatter

@output_formatter
def write(output: TextGenerationOutput) -> str:
    sequence = output.sequences[output.best_sequence_index]
    token, index, first, last = sequence.get_next_token()
    made = [token.id, token.text, first, last, sequence.finish_reason if last else None]
    rest = [output.finished, getattr(output.input, "asked_by", None), token.log_prob is not None]
    return json.dumps(made + rest) + "\\n"
"""
WRITE_LEGACY = """
import json
from djl_python.output_formatter import output_formatter

@output_formatter
def write(token, first_token, last_token, details, generated_text, id):
    made = [token.id, token.text, first_token, last_token, details.get("finish_reason")]
    return json.dumps([*made, generated_text, len(details.get("tokens", ()))]) + "\\n"
"""


@pytest.mark.djl
@pytest.mark.usefixtures("released")
class TestWithTheReleasedEngine:
    """Signatures with DJL's own classes."""

    @pytest.mark.parametrize("stream", ["no", "yes"])
    def test_a_request_output_grows_by_one_token_with_each_call(self, door, stream, tmp_path):
        source = READ_ITEM
        if stream == "yes":
            source = source.replace("item: Input", "item: 'djl_python.Input'")
        read = function_of(source, READS, tmp_path)
        write = function_of(WRITE_OUTPUT, WRITES, tmp_path)
        with serving(read=read, write=write) as service:
            one, other = ask(door, service, b"me:<5>", b"you:<6>", **{"X-Stream": stream})
        for answer, prompt, name in ((one, "<5>", "me"), (other, "<6>", "you")):
            assert (answer.status, answer.content_type) == (200, "text/plain; charset=utf-8")
            rows = Answers(prompt).rows
            assert answer.lines == [[*row, row[3], name, True] for row in rows]

    def test_six_arguments_are_the_older_signature(self, door, tmp_path):
        write = function_of(WRITE_LEGACY, WRITES, tmp_path)
        body = request(stream=True)
        body["parameters"] |= {"details": True, "return_full_text": True}
        with serving(write=write) as service:
            (answer,) = ask(door, service, body)
        rows = Answers().rows
        texts = ["<5>", "<5>", "<5>" + text_of()]
        assert answer.lines == [
            [*row, text, i] for i, (row, text) in enumerate(zip(rows, texts, strict=True), 1)
        ]

    def test_an_end_without_a_token_is_an_empty_token(self, tmp_path):
        """As at a deadline: text that was held back comes with the end alone."""
        write = function_of(WRITE_OUTPUT, WRITES, tmp_path)
        with serving(write=write) as service:
            parsed = service.parse(json.dumps(request()).encode())
        deltas = [
            Delta("r1", "a", (Token(7, "a", -1.0, special=False),)),
            Delta("r1", "b", (), FinishReason.TIME),
        ]
        made = b"".join(map(parsed.formatter.feed, deltas))
        assert [json.loads(line)[:5] for line in made.splitlines()] == [
            [7, "a", True, False, None],
            [-1, "b", False, True, "time"],
        ]

    def test_tokens_of_several_sequences_are_refused(self, door, tmp_path):
        write = function_of(WRITE_OUTPUT, WRITES, tmp_path)
        with serving(write=write) as service:
            refused, answer = ask(door, service, request(["<5>", "<6>"]), request())
        assert refused.status == 400
        assert "model.py" in json.loads(refused.content)["error"]
        assert len(answer.lines) == 3

    def test_a_request_input_of_another_shape_costs_its_request_alone(self, door, tmp_path):
        """Without `adapters`, which DJL's `Request` reads."""
        source = READ_ITEM.replace("(TextInput)", "").replace("made = Question()", MADE)
        read = function_of(source, READS, tmp_path)
        write = function_of(WRITE_OUTPUT, WRITES, tmp_path)
        with serving(read=read, write=write) as service:
            good, bad = ask(door, service, b"me:<5>", b"odd:<5>")
        assert (good.status, len(good.lines)) == (200, 3)
        assert bad.status == 424
        assert "output_formatter of model.py" in json.loads(bad.content)["error"]

    @pytest.mark.parametrize("made", ["None", "5", "{1: 2}"])
    def test_what_is_no_text_costs_its_request_alone(self, door, made, tmp_path):
        source = WRITE_OUTPUT + f"\n    return {made}"
        source = source.replace(
            "    return json", f"    if token.id == {FAILS}: return {made}\n    return json"
        )
        write = function_of(source, WRITES, tmp_path)
        with serving(write=write) as service:
            good, bad = ask(door, service, request("<6>"), request())
        assert (good.status, len(good.lines)) == (200, 3)
        assert "output_formatter of model.py" in bad.lines[-1]["error"]


MADE = 'made = Question() if name == "odd" else TextInput()'
FAILS = expected(TOKENIZER.encode("<5>"), 3)[2]


# --- model.py itself


NEIGHBOUR = """
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import output_formatter
import words_beside_model_py as words

@input_formatter
def read(payload, tokenizer=None, **kwargs):
    return {"inputs": words.PROMPT}

@output_formatter
def write(answer):
    return {"text": answer["generated_text"]}
"""


@pytest.fixture
def without_djl(monkeypatch):
    """As on a machine that has no `djl_python`."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "djl_python"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "djl_python"]:
        del sys.modules[name]


@pytest.mark.usefixtures("without_djl")
class TestLoad:
    """Import of `model.py` by the embedded server."""

    def test_the_decorators_need_no_djl_serving(self, tmp_path):
        (tmp_path / "model.py").write_text(NEIGHBOUR)
        (tmp_path / "words_beside_model_py.py").write_text('PROMPT = "<5>"')
        functions = custom.load(tmp_path)
        assert [function.__name__ for function in functions.values()] == ["read", "write"]
        assert functions["input_formatter"]({}) == {"inputs": "<5>"}
        assert custom.load(tmp_path).keys() == functions.keys()

    @pytest.mark.parametrize("source", ["raise SystemError", ""])
    def test_a_file_without_formatters_is_not_run(self, source, tmp_path):
        (tmp_path / "model.py").write_text(source)
        assert custom.load(tmp_path) == {}

    def test_no_file_is_no_formatter(self, tmp_path):
        assert custom.load(tmp_path) == {}

    @pytest.mark.parametrize(
        "source",
        [
            READ_ITEM,
            WRITE_OUTPUT,
            WRITE_LEGACY,
            "input_formatter syntax error",
            "output_formatter = 1 / 0",
        ],
    )
    def test_what_cannot_be_imported_is_an_error_that_says_so(self, source, tmp_path):
        (tmp_path / "model.py").write_text(source)
        with pytest.raises(ArtifactError, match=r"model\.py cannot be imported .*djl-serving"):
            custom.load(tmp_path)

    def test_a_link_out_of_the_folder_is_not_followed(self, tmp_path):
        outside, folder = tmp_path / "outside.py", tmp_path / "model"
        outside.write_text("raise SystemExit  # input_formatter")
        folder.mkdir()
        (folder / "model.py").symlink_to(outside)
        with pytest.raises(ArtifactError, match="link out of"):
            custom.load(folder)

"""Requests through DJL's released engine in each of its modes: right answers, streams, errors, headers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.clients import hostile, sdks
from tests.djl.folders import MAX_RUNNING, MAX_WAITING, MODEL, write_model
from tests.djl.questions import CHECKS, COUNT, body, generated
from tests.protocol.wire_schemas import SCHEMAS

pytest.importorskip("torch", reason="needs the `cpu` extra")
pytestmark = pytest.mark.djl

NUM_REQUESTS, NUM_CLIENTS = 40, 16
JSON, JSON_LINES = "application/json", "application/jsonlines"


def one(java, request, **more):
    (answer,) = java.submit("tiny", request, **more)
    return answer.wait()


def test_many_at_once_get_their_own_right_answers(served):
    checks = CHECKS[:NUM_REQUESTS]

    def ask(i):
        check = checks[i]
        return one(served, body(check["prompt"], check["max_new_tokens"], stream=i % 2 == 0))

    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        found = [generated(answer) for answer in clients.map(ask, range(NUM_REQUESTS))]
    assert found == [check["completion"] for check in checks]


def test_seeded_answers_are_those_of_a_service_by_itself(served, alone):
    bodies = [
        body("7 8 9", 30, do_sample=True, seed=seed, temperature=1.5, top_p=0.95, ignore_eos=True)
        for seed in range(6)
    ]
    found = [generated(answer) for answer in served.submit("tiny", *bodies)]
    assert len(set(found)) > 1
    assert found == [json.loads(alone(each))["generated_text"] for each in bodies]


def test_a_stream_comes_in_pieces_that_make_the_whole(served):
    answer = one(served, body(num_tokens=100, ignore_eos=True, stream=True))
    whole = one(served, body(num_tokens=100, ignore_eos=True))
    assert answer.headers["Content-Type"] == JSON_LINES
    assert whole.headers["Content-Type"] == JSON
    assert len(answer.chunks) > 1
    lines = [json.loads(line) for line in answer.content.splitlines()]
    assert len(lines) == 100
    assert "".join(line["token"]["text"] for line in lines) == generated(answer)
    assert generated(answer) == generated(whole)


def test_a_list_is_answered_by_a_list_and_a_text_is_a_prompt(served, alone):
    several = body([COUNT, "7 8 9", COUNT])
    answer = one(served, several)
    assert (answer.status, answer.headers["Content-Type"]) == (200, JSON)
    assert json.loads(answer.content) == json.loads(alone(several))
    assert len(json.loads(answer.content)) == 3
    text = one(served, COUNT, headers={"Content-Type": "text/plain"})
    assert json.loads(text.content) == json.loads(alone(body(num_tokens=30)))


def test_several_sequences_and_all_details(served, alone):
    sampling = {"do_sample": True, "temperature": 1.5, "seed": 7, "n": 3}
    request = body("7 8 9", 8, decoder_input_details=True, top_n_tokens=2, **sampling)
    request["parameters"]["details"] = True
    found = json.loads(one(served, request).content)["details"]
    expected = json.loads(alone(request))["details"]
    texts = [other["generated_text"] for other in found["best_of_sequences"]]
    assert texts == [other["generated_text"] for other in expected["best_of_sequences"]]
    assert (found["prefill"], len(texts)) == (expected["prefill"], 2)
    assert [len(top) for top in found["top_tokens"]] == [2] * found["generated_tokens"]


BAD = {
    "empty": ("", 400),
    "cut off": ("{", 400),
    "no text": ('{"inputs": 5}', 400),
    "unknown parameter": (body(no_such_parameter=1), 400),
    "bad value": (body(stream=True, top_p=7), 400),
    "long prompt": (body("one two three " * 200), 413),
}


def test_a_bad_request_gets_its_error_and_its_neighbours_their_answers(served):
    checks = CHECKS[:4]
    good = [body(check["prompt"], check["max_new_tokens"], stream=True) for check in checks]
    bad = [request for request, _ in BAD.values()]
    answers = served.submit("tiny", *good[:2], *bad, *good[2:])
    refused = answers[2:-2]
    for name, answer in zip(BAD, refused, strict=True):
        assert answer.wait().status == BAD[name][1], name
        error = json.loads(answer.content)
        assert error["code"] == answer.status
        assert error["error"]
        assert answer.headers["Content-Type"] == JSON
    found = [generated(answer) for answer in answers if answer not in refused]
    assert found == [check["completion"] for check in checks]


OTHER_FUNCTIONS = [
    "_end_process",
    "close",
    "djl_process",
    "partition",
    "TYPE_CHECKING",
    "__class__",
    "__dir__",
    "",
]


def test_a_client_calls_no_other_function(served, mode, tmp_path):
    """As with ALLOW_REQUEST_HANDLER_OVERRIDE=true, which lets the property `handler` of a request pass."""
    out = tmp_path / "out"
    options = {"model_id": str(MODEL), "model_loader": "cpu", "save_mp_checkpoint_path": str(out)}
    for name in OTHER_FUNCTIONS:
        answer = one(served, body(), headers={"handler": name, "requestId": "r", **options})
        assert (answer.status, answer.errors) == (424, []), name
        assert json.loads(answer.content)["code"] == 424
    for name in ("register_adapter", "update_adapter", "unregister_adapter"):
        adapter = {"name": "a", "src": str(MODEL), "option.adapter_sources": "/"}
        assert one(served, body(), headers={"handler": name, **adapter}).status == 400, name
    itself = one(served, body(), headers={"handler": "handle", "requestId": "r"})
    # Java passes it on outside the batch.
    assert itself.status == (400 if mode == "rolling" else 200), itself.content
    assert not out.exists()
    check = CHECKS[0]
    found = one(served, body(check["prompt"], check["max_new_tokens"]))
    assert generated(found) == check["completion"]


def test_no_property_of_a_request_sets_anything(served, tmp_path):
    out = tmp_path / "out"
    properties = {
        **hostile.PROPERTIES,
        "requestId": "r",
        "model_id": str(MODEL),
        "save_mp_checkpoint_path": str(out),
    }
    check = CHECKS[0]
    request = body(check["prompt"], check["max_new_tokens"])
    (stream,) = served.submit("tiny", body(num_tokens=100, ignore_eos=True, stream=True))
    (answer,) = served.submit("tiny", request, headers=properties)
    (empty,) = served.submit("tiny", None, headers=properties)
    assert generated(answer) == check["completion"]
    assert answer.headers["Content-Type"] == JSON
    assert (empty.wait().status, empty.errors) == (400, [])
    assert len(stream.wait().content.splitlines()) == 100
    assert not out.exists()


def test_the_clients_id_is_in_the_log(served, mode):
    labels = [f"label-{mode}-{i}" for i in range(3)]
    for label in labels:
        generated(one(served, body(), headers={"requestId": label}))
        served.wait_log(f"request_finished request_id={label} ")


def test_two_requests_of_one_id_are_two_requests(served):
    checks = CHECKS[10:14]
    bodies = [body(check["prompt"], check["max_new_tokens"]) for check in checks]
    answers = served.submit("tiny", *bodies, headers={"requestId": "same"})
    assert [generated(answer) for answer in answers] == [check["completion"] for check in checks]


def test_a_client_that_leaves_costs_nobody_else_anything(served, mode):
    """Java does not report it: its tokens are made to the end, and its place is free then."""
    long = body(num_tokens=200, ignore_eos=True, stream=True)
    label = f"left-{mode}"
    gone = served.submit("tiny", *[long] * MAX_RUNNING, headers={"requestId": label}, leave_after=1)
    check = CHECKS[2]
    stays = served.submit("tiny", body(check["prompt"], check["max_new_tokens"]))
    assert [len(answer.wait().chunks) for answer in gone] == [1] * MAX_RUNNING
    assert generated(*stays) == check["completion"]
    served.wait_log(f"request_finished request_id={label} ", MAX_RUNNING)


@pytest.mark.parametrize("mode", ["async"], indirect=True)
def test_a_full_queue_says_when_to_come_back(served):
    """In the other modes Java itself keeps back what does not fit."""
    long = body(num_tokens=400, ignore_eos=True)
    answers = served.submit("tiny", *[long] * 2 * (MAX_RUNNING + MAX_WAITING))
    statuses = {answer.wait().status for answer in answers}
    refused = [answer for answer in answers if answer.status == 503]
    assert statuses == {200, 503}
    assert all(int(answer.headers["Retry-After"]) > 0 for answer in refused)
    assert len({generated(answer) for answer in answers if answer not in refused}) == 1


@pytest.mark.parametrize("mode", ["plain"], indirect=True)
def test_a_plain_batch_answers_each_row_in_its_place(served):
    checks = CHECKS[20:23]
    bodies = [body(check["prompt"], check["max_new_tokens"]) for check in checks]
    bodies[2]["stream"] = True
    first, bad, *others = served.submit("tiny", bodies[0], "{", *bodies[1:], together=True)
    assert [generated(answer) for answer in (first, *others)] == [
        check["completion"] for check in checks
    ]
    assert json.loads(bad.wait().content)["code"] == 400


DICTS = """
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import output_formatter

@input_formatter
def read(decoded_payload: dict, tokenizer=None, **kwargs) -> dict:
    assert tokenizer.encode("1 2 3")
    return {"inputs": decoded_payload.pop("question"), **decoded_payload}

@output_formatter
def write(response_data: dict) -> dict:
    return {**response_data, "by": "model.py"}
"""
OBJECTS = """
import json
from djl_python import Input
from djl_python.encode_decode import decode
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import output_formatter
from djl_python.request_io import RequestInput, TextGenerationOutput, TextInput

@input_formatter
def read(input_item: Input, **kwargs) -> RequestInput:
    fields = decode(input_item, input_item.get_property("Content-Type"))
    made = TextInput()
    made.input_text = fields["question"]
    made.parameters = {**fields["parameters"], "stream": fields["stream"]}
    return made

@output_formatter
def write(output: TextGenerationOutput) -> str:
    sequence = output.sequences[output.best_sequence_index]
    token, index, first, last = sequence.get_next_token()
    text = "".join(token.text for token in sequence.tokens)
    if not last and not output.input.parameters["stream"]:
        return ""
    return json.dumps({"generated_text": text, "by": "model.py", "first": first}) + "\\n"
"""


@pytest.mark.parametrize(("mode", "source"), [("rolling", OBJECTS), ("async", DICTS)])
def test_formatters_of_a_model_py_run_around_the_model(mode, source, start_java, tmp_path):
    """The older signatures as in the old engine, the newer ones as in the asynchronous one."""
    (write_model(tmp_path, mode) / "model.py").write_text(source)
    with start_java() as java:
        java.load("formatted", tmp_path)
        for stream in (False, True):
            check_formatted(java, stream)


def check_formatted(java, stream):
    checks = CHECKS[:4]
    bodies = []
    for check in checks:
        fields = body(check["prompt"], check["max_new_tokens"], stream=stream)
        bodies.append({"question": fields.pop("inputs"), **fields})
    good = java.submit("formatted", *bodies[:2])
    (bad,) = java.submit("formatted", {"query": COUNT})
    good += java.submit("formatted", *bodies[2:])
    assert [generated(answer) for answer in good] == [check["completion"] for check in checks]
    for answer in good:
        lines = [json.loads(line) for line in answer.content.splitlines()]
        assert all(line["by"] == "model.py" for line in lines)
        assert (len(lines) > 1) == stream
    assert bad.wait().status == 424
    error = json.loads(bad.content)["error"]
    assert "input_formatter of model.py failed (KeyError)" in error


@pytest.mark.parametrize("ask", sdks.CHAT_CLIENTS, ids=lambda ask: ask.__name__)
def test_chats_of_clients_are_answered_right(url, ask):
    few = None if ask in {sdks.openai_chat, sdks.openai_chat_stream} else 8
    sdks.check_chats(url, ask, few)


@pytest.mark.parametrize(
    "check",
    [
        sdks.check_sagemaker,
        sdks.check_completions,
        sdks.check_logprobs,
        sdks.check_tools,
        sdks.check_response_tools,
        sdks.check_prompt_scores,
        sdks.check_text_generation,
    ],
    ids=lambda check: check.__name__,
)
def test_clients_get_what_the_embedded_server_gives_them(url, check):
    check(url)


def test_messages_of_anthropic(served, mode):
    """The path is unknown here: a header, or the body, tells them from OpenAI's chats."""
    version = {"anthropic-version": "2023-06-01"}
    asked = []
    for i, check in enumerate(sdks.CHATS[:8]):
        system = [one["content"] for one in check["messages"] if one["role"] == "system"]
        messages = [one for one in check["messages"] if one["role"] != "system"]
        fields = {"max_tokens": check["max_new_tokens"], "temperature": 0, "stream": i % 2 == 1}
        request = {"messages": messages, **fields, **({"system": system[0]} if system else {})}
        asked += served.submit("tiny", request, headers={} if system else version)
    for i, (answer, check) in enumerate(zip(asked, sdks.CHATS[:8], strict=True)):
        answer.wait()
        assert (answer.status, answer.errors) == (200, []), answer.content
        assert answer.headers["Content-Type"] == ("text/event-stream" if i % 2 else JSON)
        found = SCHEMAS["messages_events" if i % 2 else "messages"](answer.content)
        assert found.texts == [check["completion"]]
    image = {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 5}
    refused = one(served, image, headers=version)
    assert refused.status == 400
    error = json.loads(refused.content)["error"]
    assert "block 0 is image" in (error["message"] if mode == "plain" else error)


def test_errors_are_those_of_the_openai_client(url, mode):
    """DJL Serving makes the bodies of errors itself where Python's answer is not passed on whole."""
    sdks.check_openai_errors(url, has_shape=mode == "plain")

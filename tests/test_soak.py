"""A short soak, and whether the soak would notice what is wrong."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from soak import CLIENTS, Holdings, Mix, replies, soak

from tests.clients.answers import Reply, judge

pytest.importorskip("uvicorn", reason="needs the `server` extra")

TEXT = " 2 3 4"
REFUSED = {"code": 503, "error": "the engine has ended", "type": "backend_unavailable"}


def jsonlines(*texts, whole=None, error=None):
    events = [{"token": {"id": 5, "text": text, "log_prob": None}} for text in texts]
    if whole is not None:
        events[-1]["generated_text"] = whole
    if error is not None:
        events.append(error)
    return "".join(json.dumps(event) + "\n" for event in events)


def outcome(data, form="json", status=200, **more):
    if form == "sse":
        data = "".join(f"data: {line}\n\n" for line in data.splitlines())
    return judge(Reply(status, data.encode(), **more), form, TEXT).partition(":")[0]


@pytest.mark.parametrize("form", ["jsonlines", "sse"])
def test_streams_are_judged(form):
    whole = jsonlines(" 2", " 3", " 4", whole=TEXT)
    assert outcome(whole, form) == "right"
    cut = jsonlines(" 2", " 3", error=REFUSED)
    assert outcome(cut, form) == "error event 503 backend_unavailable"
    for wrong in (
        "",
        whole.splitlines()[0] + "\n",
        whole.replace(" 3", " 5"),
        jsonlines(" 2", " 4", whole=" 2 4"),
        jsonlines(" 2", " 3", " 4", whole=" 2"),
        jsonlines(" 2", " 5", error=REFUSED),
        jsonlines(" 2", error={**REFUSED, "error": ""}),
    ):
        assert outcome(wrong, form) == "wrong", wrong
    assert outcome(whole, form, timed_out=True) == "wrong"
    assert outcome(whole, form, broken="reset") == "wrong"


def test_whole_answers_are_judged():
    assert outcome(json.dumps({"generated_text": TEXT})) == "right"
    assert outcome(json.dumps({"generated_text": TEXT + " 5"})) == "wrong"
    assert outcome(json.dumps({"generated_text": TEXT})[:-3]) == "wrong"
    assert outcome(json.dumps(REFUSED), status=503) == "error 503 backend_unavailable"
    for status, body in (
        (503, "Service Unavailable"),
        (500, json.dumps(REFUSED)),
        (404, json.dumps({**REFUSED, "code": 404})),
        (503, json.dumps({**REFUSED, "error": ""})),
        (0, ""),
    ):
        assert outcome(body, status=status) == "wrong", (status, body)


def test_a_client_that_leaves_has_seen_nothing_wrong():
    for form, data, expected in (
        ("json", "", "left"),
        ("jsonlines", jsonlines(" 2"), "left"),
        ("jsonlines", jsonlines(" 2") + '{"tok', "left"),
        ("jsonlines", jsonlines(" 3"), "wrong"),
    ):
        reply = Reply(200, data.encode(), timed_out=True)
        assert judge(reply, form, TEXT, leaves=True).partition(":")[0] == expected


class Door:
    """A door of Java's kind, which answers everything alike."""

    port = None

    def __init__(self, status, data):
        self.reply = Reply(status, json.dumps(data).encode())

    def ask(self, question, form, leave_s=None):
        return self.reply

    def post(self, body, headers, leave_s=None):
        return self.reply


@pytest.mark.parametrize(
    ("name", "status", "data", "expected"),
    [
        ("flood", 503, {"code": 503, "error": "full"}, "error 503"),
        ("flood", 500, {"code": 500, "error": "bug"}, "wrong"),
        ("flood", 503, {"code": 503, "error": "full", "type": "queue_full"}, "wrong"),
        ("bad_body", 400, {"code": 400, "error": "bad"}, "error 400"),
        ("bad_body", 200, {"code": 400, "error": "bad"}, "error 400"),
        ("bad_body", 200, {"generated_text": TEXT}, "wrong"),
        ("bad_body", 500, {"code": 500, "error": "bug"}, "wrong"),
        ("odd_headers", 200, {"generated_text": TEXT}, "right"),
        ("odd_headers", 200, {"generated_text": TEXT + TEXT}, "wrong"),
        ("odd_headers", 400, {"code": 400, "error": "bad"}, "wrong"),
    ],
)
def test_what_a_client_may_get_is_judged(name, status, data, expected):
    mix = Mix(Door(status, data), random.Random(0), 1, 3)
    mix.texts = dict.fromkeys(mix.questions, TEXT)
    mix.serve(name, random.Random(0))
    assert set(mix.clients[name]) == {expected}
    assert bool(mix.tally.wrong) == (expected == "wrong")


def test_responses_of_one_connection_are_told_apart():
    first = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    second = b"HTTP/1.1 400 Bad Request\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n"
    found = replies(first + second)
    assert [(reply.status, reply.data, reply.timed_out) for reply in found] == [
        (200, b"{}", False),
        (400, b"a", False),
    ]
    for cut in (first[:-1], second[:-5], second[:-9]):
        assert replies(first + cut)[1].timed_out
    assert [reply.timed_out for reply in replies(b"")] == [True]


def test_what_has_grown_is_found():
    before = Holdings(descriptors=8, threads=9, children=2, rss_mib=100.0)
    assert replace(before, rss_mib=104.9).grown(before, 1.05) == []
    assert replace(before, rss_mib=105.1).grown(before, 1.05) == ["memory"]
    assert replace(before, descriptors=9, threads=10).grown(before) == ["descriptors", "threads"]


def check(report, num_kills):
    assert report["wrong"] == [], report
    assert sum(report["kills"].values()) == num_kills
    assert report["outcomes"]["right"] > 0
    assert report["exit_status"] == 0


def test_the_embedded_server_survives_two_kills():
    pytest.importorskip("torch", reason="needs the `cpu` extra")
    check(soak("embedded", kills=2, streams=20, seed=1, num_questions=12), 2)


@pytest.mark.nightly
def test_the_embedded_server_survives_ten_kills_with_200_streams():
    pytest.importorskip("torch", reason="needs the `cpu` extra")
    check(soak("embedded", kills=10, streams=200, seed=2), 10)


def test_the_embedded_server_withstands_hostile_clients():
    """Memory is not judged: that needs a longer warm-up."""
    pytest.importorskip("torch", reason="needs the `cpu` extra")
    report = soak("embedded", requests=200, warm_up=1, streams=24, seed=4, num_questions=8)
    assert report["wrong"] == [], report
    assert report["clients"].keys() == CLIENTS.keys()
    for outcome in ("right", "left", "closed", "error 400 bad_request", "error 503 queue_full"):
        assert report["outcomes"][outcome] > 0
    assert report["exit_status"] == 0

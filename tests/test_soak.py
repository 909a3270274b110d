"""A short soak, and whether the soak would notice what is wrong."""

from __future__ import annotations

import json

import pytest

from benchmarks.soak import Reply, judge, soak

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


def check(report, num_kills):
    assert report["wrong"] == [], report
    assert sum(report["kills"].values()) == num_kills
    assert report["outcomes"]["right"] > 0
    assert report["exit_status"] == 0


def test_the_embedded_server_survives_two_kills():
    pytest.importorskip("torch", reason="needs the `cpu` extra")
    check(soak("embedded", kills=2, streams=40, seed=1, num_questions=12), 2)


@pytest.mark.nightly
def test_the_embedded_server_survives_ten_kills_with_200_streams():
    pytest.importorskip("torch", reason="needs the `cpu` extra")
    check(soak("embedded", kills=10, streams=200, seed=2), 10)

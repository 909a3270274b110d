"""Loads and answers that take too long for DJL's released engine, and loads that fail again and again."""

from __future__ import annotations

import json
import re
import time

import pytest

from tests.djl.folders import write_toy
from tests.djl.questions import TOY_TEXT, toy_body
from tests.processes import wait_until

pytestmark = pytest.mark.djl


def ask(java, request):
    (answer,) = java.submit("toy", request)
    return answer.wait()


def pauses(java):
    """Seconds that each process lives after its load has failed."""
    found = re.compile(r"process_ends .*seconds=(\d+)")
    return [int(match[1]) for line in list(java.log) if (match := found.search(line))]


@pytest.fixture
def start(start_java, tmp_path, monkeypatch):
    """Start a JVM with a toy model; closed at the end."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    opened = []

    def start(mode, environ=None, **options):
        java = start_java(environ)
        opened.append(java)
        java.load("toy", write_toy(tmp_path, mode, **options))
        return java

    yield start
    for java in opened:
        java.close()


def test_a_load_that_fails_is_tried_again_less_and_less_often(start):
    java = start("async", toy_load_error="CompileError")
    refused = ask(java, toy_body())
    assert refused.status == 503
    assert "two lines of one problem" in " ".join(json.loads(refused.content)["error"].split())
    wait_until(lambda: pauses(java)[:3] == [1, 2, 4], java.tail)
    assert java.workers()


def test_a_load_that_takes_longer_than_java_waits_serves_in_the_end(start):
    java = start("async", model_loading_timeout=4, toy_load_s=3)
    assert "option.model_loading_timeout" in json.loads(ask(java, toy_body()).content)["error"]

    def served():
        time.sleep(0.2)
        return ask(java, toy_body()).status == 200

    wait_until(served, java.tail)
    workers, num_pauses = java.workers(), len(pauses(java))
    assert json.loads(ask(java, toy_body()).content) == {"generated_text": TOY_TEXT}
    time.sleep(2 * pauses(java)[-1])
    assert (java.workers(), len(pauses(java))) == (workers, num_pauses)


@pytest.mark.parametrize("mode", ["async", "rolling"])
def test_a_json_answer_arrives_that_takes_longer_than_java_waits(start, mode):
    java = start(mode, {"SERVING_CHUNKED_READ_TIMEOUT": "2"}, toy_step_s=0.05)
    answer = ask(java, toy_body())
    assert answer.errors == []
    assert answer.chunks[0] == b" "
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    assert json.loads(answer.content) == {"generated_text": TOY_TEXT}

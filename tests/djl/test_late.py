"""Loads and answers that take too long for DJL's released engine, and loads that fail again and again."""

from __future__ import annotations

import json
import time

import pytest

from tests.djl.folders import write_toy
from tests.djl.questions import TOY_TEXT, toy_body
from tests.processes import wait_until

pytestmark = pytest.mark.djl


def count(java, event):
    return sum(event in line for line in list(java.log))


def ask(java, request):
    (answer,) = java.submit("toy", request)
    return answer.wait()


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


def test_the_processes_after_a_failed_load_do_not_load_again(start):
    """So Java has counted `retry_threshold` ends in seconds."""
    java = start("async", toy_load_error="CompileError")
    refused = ask(java, toy_body())
    assert refused.status == 503
    assert "two lines of one problem" in " ".join(json.loads(refused.content)["error"].split())
    wait_until(lambda: count(java, "load_skipped") >= 3, java.tail)
    assert count(java, "load_failed") <= 2  # the second one after a pause of 30 s
    assert count(java, "process_ends") >= 3
    refused = ask(java, toy_body())
    assert refused.status != 200


def test_a_load_that_takes_longer_than_java_waits_serves_in_the_end(start):
    java = start("async", model_loading_timeout=4, toy_load_s=3)
    assert "option.model_loading_timeout" in json.loads(ask(java, toy_body()).content)["error"]

    def served():
        time.sleep(0.2)
        return ask(java, toy_body()).status == 200

    wait_until(served, java.tail)
    assert json.loads(ask(java, toy_body()).content) == {"generated_text": TOY_TEXT}
    time.sleep(5)  # the time after which the process of a load that does not end would
    assert json.loads(ask(java, toy_body()).content) == {"generated_text": TOY_TEXT}
    assert count(java, "process_ends") == 0


@pytest.mark.parametrize("mode", ["async", "rolling"])
def test_a_json_answer_arrives_that_takes_longer_than_java_waits(start, mode):
    java = start(mode, {"SERVING_CHUNKED_READ_TIMEOUT": "2"}, toy_step_s=0.05)
    answer = ask(java, toy_body())
    assert answer.errors == []
    assert answer.chunks[0] == b" "
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    assert json.loads(answer.content) == {"generated_text": TOY_TEXT}

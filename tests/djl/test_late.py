"""Loads and answers that take too long for DJL's released engine, and loads that fail again and again."""

from __future__ import annotations

import json
import re
import time

import pytest

from tests.djl.conftest import write_toy
from tests.djl.java import wait_until
from tests.doubles.toy_backend import expected
from tests.doubles.toy_tokenizer import TOKENIZER

pytestmark = pytest.mark.djl

PROMPT, TEXT = "<5><6>", TOKENIZER.decode(expected([1, 5, 6], 100))


def body(*, stream=False):
    parameters = {"max_new_tokens": 100, "ignore_eos": True}
    return {"inputs": PROMPT, "parameters": parameters, "stream": stream}


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
    refused = ask(java, body())
    assert refused.status == 503
    assert "two lines of one problem" in " ".join(json.loads(refused.content)["error"].split())
    wait_until(lambda: pauses(java)[:3] == [1, 2, 4], java.tail)
    assert java.workers()


def test_a_load_that_takes_longer_than_java_waits_serves_in_the_end(start):
    java = start("async", model_loading_timeout=4, toy_load_s=3)
    assert "option.model_loading_timeout" in json.loads(ask(java, body()).content)["error"]

    def served():
        time.sleep(0.2)
        return ask(java, body()).status == 200

    wait_until(served, java.tail)
    workers, num_pauses = java.workers(), len(pauses(java))
    assert json.loads(ask(java, body()).content) == {"generated_text": TEXT}
    time.sleep(2 * pauses(java)[-1])
    assert (java.workers(), len(pauses(java))) == (workers, num_pauses)


@pytest.mark.parametrize("mode", ["async", "rolling"])
def test_a_json_answer_arrives_that_takes_longer_than_java_waits(start, mode):
    java = start(mode, {"SERVING_CHUNKED_READ_TIMEOUT": "2"}, toy_step_s=0.05)
    answer = ask(java, body())
    assert answer.errors == []
    assert answer.chunks[0] == b" "
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    assert json.loads(answer.content) == {"generated_text": TEXT}

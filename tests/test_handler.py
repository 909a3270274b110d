"""The handler under DJL's engine process (a double of it), driven as Java drives it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.djl_peer import PATIENCE_S, REST, ROOT, EngineError, Peer
from tests.toy_backend import expected
from tests.toy_tokenizer import TOKENIZER

ENTRY = "tests.djl_entry"
RESUME = signal.SIGUSR2
"""Lets a toy device go on that hangs at `toy_hang_at`."""
MODES = {
    "rolling": {"rolling_batch": "tnx"},
    "async": {"async_mode": "true", "rolling_batch": "disable"},
    "plain": {"rolling_batch": "disable"},
}


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


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_the_models_own(start, mode):
    peer = start(mode)
    prompts = [[i + 3, i + 4, i + 5] for i in range(12)]
    answers = [
        peer.submit(payload(prompt, 3 + i, stream=i % 2 == 0)) for i, prompt in enumerate(prompts)
    ]
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        answer.wait()
        assert answer.status_sent == 200, answer.content
        if i % 2 == 0:
            assert answer.headers["Content-Type"] == "application/jsonlines"
            lines = [json.loads(line) for line in answer.content.splitlines()]
            assert len(lines) == 3 + i
            assert "".join(line["token"]["text"] for line in lines) == text(prompt, 3 + i)
            assert lines[-1]["generated_text"] == text(prompt, 3 + i)
        else:
            assert answer.headers["Content-Type"] == "application/json"
            assert json.loads(answer.content) == {"generated_text": text(prompt, 3 + i)}
    assert peer.usage() == REST
    assert peer.failures == 0
    assert peer.num_starts == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_comes_in_pieces(start, mode):
    peer = start(mode, toy_hang_at="10")
    answer = peer.submit(payload([5], 20, stream=True))
    assert answer.started.wait(PATIENCE_S)
    assert not answer.done
    peer.kill(RESUME)
    assert len(answer.wait().chunks) > 1


@pytest.mark.parametrize("mode", MODES)
def test_a_bad_request_gets_its_error_and_nobody_else(start, mode):
    peer = start(mode)
    good = [peer.submit(payload([7, i], 20)) for i in range(3, 6)]
    bad = {
        b"": 400,
        b"{": 400,
        b'{"inputs": 5}': 400,
        json.dumps(payload([5], no_such_parameter=1)).encode(): 400,
        json.dumps(payload([5] * 100)).encode(): 413,
        json.dumps(payload(range(3, 30), stream=True, top_p=7)).encode(): 400,
    }
    answers = [(peer.submit(body), status) for body, status in bad.items()]
    late = peer.submit(payload([9, 9], 4))
    for answer, status in answers:
        answer.wait()
        assert answer.status_sent == status
        body = json.loads(answer.content)
        assert body["code"] == status
        assert body["error"]
        assert answer.headers["Content-Type"] == "application/json"
    for i, answer in zip(range(3, 6), good, strict=True):
        assert json.loads(answer.wait().content) == {"generated_text": text([7, i], 20)}
    assert json.loads(late.wait().content) == {"generated_text": text([9, 9], 4)}
    assert peer.usage() == REST
    assert peer.failures == 0


def test_a_full_queue_says_when_to_come_back(start):
    peer = start("async", toy_slots="1", toy_hang_at="0", toy_max_waiting="3")
    answers = [peer.submit(payload([5, i + 3], 3)) for i in range(12)]
    wait_until(lambda: sum(answer.done for answer in answers) == 8)
    peer.kill(RESUME)
    statuses = [answer.wait().status_sent for answer in answers]
    assert sorted(statuses) == 4 * [200] + 8 * [503]
    refused = [answer for answer in answers if answer.status_sent == 503]
    assert all(int(answer.headers["Retry-After"]) > 0 for answer in refused)


@pytest.mark.parametrize("mode", MODES)
def test_two_requests_of_one_id_are_two_requests(start, mode):
    peer = start(mode)
    answers = [peer.submit(payload([i, i], 8), {"requestId": "same"}) for i in range(5, 9)]
    for i, answer in zip(range(5, 9), answers, strict=True):
        assert json.loads(answer.wait().content) == {"generated_text": text([i, i], 8)}


def test_a_plain_batch_answers_each_row_in_its_place(start):
    peer = start("plain", batch_size="4")
    bodies = [payload([5, 6]), b"{", payload([7, 8], stream=True), payload([9], 12)]
    answers = [peer.submit(body) for body in bodies]
    for answer in answers:
        answer.wait()
    assert peer.batch_sizes == [4]
    assert json.loads(answers[0].content) == {"generated_text": text([5, 6])}
    assert json.loads(answers[1].content)["code"] == 400
    assert json.loads(answers[2].content.splitlines()[-1])["generated_text"] == text([7, 8])
    assert json.loads(answers[3].content) == {"generated_text": text([9], 12)}


@pytest.mark.parametrize("mode", ["rolling", "async"])
def test_java_need_not_wait_for_a_long_answer_in_silence(start, monkeypatch, mode):
    monkeypatch.setenv("SERVING_CHUNKED_READ_TIMEOUT", "1")
    peer = start(mode, toy_step_s="0.02")
    answer = peer.submit(payload([5], 100)).wait()
    assert answer.content.startswith(b" ")
    assert answer.headers["Content-Type"] == "application/json"
    assert json.loads(answer.content) == {"generated_text": text([5], 100)}


def test_a_plain_answer_that_takes_too_long_is_an_error_not_a_restart(start):
    peer = start("plain", predict_timeout="4", toy_step_s="0.04")
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


@pytest.mark.parametrize("mode", ["rolling", "plain"])
def test_a_failed_load_says_why(start, mode):
    with pytest.raises(EngineError, match="Failed to initialize model: two lines of one problem"):
        start(mode, toy_load_error="ArtifactError")
    with pytest.raises(EngineError, match="OOM"):
        start(mode, toy_load_error="DeviceMemoryError")


def pauses(peer):
    """Seconds that each process lived after its failed load."""
    return [
        int(found[1])
        for line in peer.log
        if (found := re.search(r"process_ends .*seconds=(\d+)", line))
    ]


def test_an_async_load_that_fails_is_tried_again_less_and_less_often(start):
    # An error as the answer would leave Java waiting for itself.
    peer = start("async", toy_load_error="ArtifactError")
    refused = peer.submit(payload([5])).wait()
    assert refused.status_sent == 503
    assert "two lines of one problem" in json.loads(refused.content)["error"].replace("\n", " ")
    wait_until(lambda: pauses(peer) == [1, 2, 4])
    assert peer.failures == 2
    assert any("load_failed code=artifact" in line for line in peer.log)


def test_an_async_load_that_is_late_ends_before_javas_limit(start):
    peer = start("async", model_loading_timeout="4", toy_load_s="3")
    refused = peer.submit(payload([5])).wait()
    assert "model_loading_timeout" in json.loads(refused.content)["error"]
    # The third process lives for 4 s after it gave up, and its load ends well in that time: it stays.
    wait_until(lambda: peer.submit(payload([6])).wait().status_sent == 200)
    num_starts = peer.num_starts
    time.sleep(2 * pauses(peer)[-1])
    answer = peer.submit(payload([6])).wait()
    assert json.loads(answer.content) == {"generated_text": text([6])}
    assert peer.num_starts == num_starts


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

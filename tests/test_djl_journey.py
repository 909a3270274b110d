"""Hundreds of requests with known answers through a rolling batch, a third of them lost by resets."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.doubles.djl_peer import PATIENCE_S, REST, ROOT, Peer
from tests.processes import engines

pytest.importorskip("torch", reason="needs the `cpu` extra")

MODEL = ROOT / "examples" / "tiny-llama"
NUM_LOST, NUM_KEPT, NUM_RESETS = 100, 200, 4


@pytest.fixture
def checks():
    lines = (MODEL / "checks.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert len(found) >= NUM_LOST + NUM_KEPT
    return iter(found)


def send(peer, check, *, stream, **parameters):
    parameters = {"max_new_tokens": check["max_new_tokens"], **parameters}
    return peer.submit({"inputs": check["prompt"], "parameters": parameters, "stream": stream})


def generated(answer):
    assert answer.wait().status_sent == 200, answer.content
    return json.loads(answer.content.splitlines()[-1])["generated_text"]


def test_what_is_not_lost_is_right(tmp_path, checks):
    properties = {
        "rolling_batch": "tnx",
        "model_id": str(MODEL),
        "model_loader": "cpu",
        "replicas": "2",
        "max_rolling_batch_size": "32",  # all victims of a reset have a row
        "predict_timeout": "60",
    }
    peer = Peer(tmp_path, properties, tmp_path, entry_point="tests.doubles.djl_entry")
    num_lost = 0
    with peer, ThreadPoolExecutor(40) as clients:
        for _ in range(NUM_RESETS):
            # Endless, so that none of them is finished when they are lost.
            victims = [
                clients.submit(
                    send,
                    peer,
                    next(checks),
                    stream=i % 2 == 0,
                    max_new_tokens=10_000,
                    ignore_eos=True,
                )
                for i in range(NUM_LOST // NUM_RESETS)
            ]
            begun = [victim.result() for victim in victims]
            assert begun[0].started.wait(PATIENCE_S)
            peer.spoil_next_reply = True
            num_lost += sum(map(is_lost, begun))
            kept = [next(checks) for _ in range(NUM_KEPT // NUM_RESETS)]
            answers = clients.map(
                lambda pair: send(peer, pair[1], stream=pair[0] % 2 == 0), enumerate(kept)
            )
            for check, answer in zip(kept, answers, strict=True):
                assert generated(answer) == check["completion"], check["prompt"]
        assert peer.usage() == REST
        assert len(engines(peer.pid)) == 2
        assert num_lost >= NUM_LOST / 2


def is_lost(answer):
    return b"Batch inference failed" in answer.wait().content


def test_serving_one_request_at_a_time_unasked_is_told_in_the_log(tmp_path):
    properties = {"model_id": str(MODEL), "model_loader": "cpu", "rolling_batch": "disable"}
    with Peer(tmp_path, properties, tmp_path, entry_point="tests.doubles.djl_entry") as peer:
        deadline_s = time.monotonic() + PATIENCE_S
        while not any("Set option.async_mode=true" in line for line in peer.log):
            assert time.monotonic() < deadline_s, peer.log
            time.sleep(0.01)

"""Several models, workers and copies in one JVM: what happens to one happens to no other."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.djl.folders import SIMULATED, write_model
from tests.djl.questions import CHECKS, LONG, ask, body, generated
from tests.processes import engines, tree, wait_gone, wait_until

pytestmark = pytest.mark.djl

CHECKS_EACH, SLOTS = CHECKS[:24], 8
OPTIONS = {**SIMULATED, "max_rolling_batch_size": SLOTS}


@pytest.fixture(scope="module")
def java(start_java, tmp_path_factory):
    """Two models with two engines each: "workers" has two processes, "copies" one."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("workers", "copies")}
    write_model(folders["workers"], "rolling", workers=2, **OPTIONS)
    write_model(folders["copies"], "async", replicas=2, **OPTIONS)
    with start_java() as java:
        java.folders = folders
        for name, folder in folders.items():
            java.begin_load(name, folder)
        for name in folders:
            java.end_load(name)
        yield java
        left = [each for pid in java.workers() for each in tree(pid)]
        assert java.end() == 0
        wait_gone(left)


def engines_of(java, name):
    """Ids of a model's engine processes."""
    return [pid for worker in java.workers(java.folders[name]) for pid in engines(worker)]


def test_every_worker_of_every_model_gives_right_answers(java, made_up):
    assert [len(java.workers(folder)) for folder in java.folders.values()] == [2, 1]
    assert [len(engines_of(java, name)) for name in java.folders] == [2, 2]
    bodies = [
        body(check["prompt"], check["max_new_tokens"], stream=i % 2 == 0)
        for i, check in enumerate(CHECKS_EACH)
    ]
    for answers in [java.submit(name, *bodies) for name in java.folders]:
        texts = [generated(answer) for answer in answers]
        assert texts == made_up[: len(CHECKS_EACH)]
    for worker in java.workers():
        java.wait_log(f"W-{worker}-")
        log = [line for line in list(java.log) if f"W-{worker}-" in line]
        assert any("request_finished" in line for line in log)


@pytest.mark.parametrize("name", ["workers", "copies"])
def test_a_killed_engine_costs_no_request(java, name, made_up):
    (other,) = java.folders.keys() - {name}
    workers = set(java.workers())
    before = engines_of(java, name)
    victims = java.submit(name, *[LONG] * 3 * SLOTS)
    others = java.submit(other, *[LONG] * SLOTS)
    # More than one engine holds.
    wait_until(lambda: sum(victim.started.is_set() for victim in victims) > SLOTS, java.tail)
    os.kill(before[0], signal.SIGKILL)
    (text,) = {generated(answer) for answer in others}
    ends = [json.loads(victim.wait().content.splitlines()[-1]) for victim in victims]
    assert not any(victim.errors for victim in victims)
    # Other engines go on with what the killed one was answering.
    assert {end["generated_text"] for end in ends} == {text}
    ask(java, name, made_up, 16)
    wait_until(lambda: len(engines_of(java, name)) == 2, java.tail)
    assert before[1] in engines_of(java, name)
    assert set(java.workers()) == workers

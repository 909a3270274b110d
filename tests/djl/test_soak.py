"""A short soak with hostile clients through each of DJL's modes; benchmarks/soak.py runs a long one."""

from __future__ import annotations

import random

import pytest
from soak import Holdings, Mix, settled

from tests.djl.door import Door
from tests.processes import engines

pytest.importorskip("torch", reason="needs the `cpu` extra")
pytestmark = pytest.mark.djl


def test_hostile_clients_get_errors_and_the_others_right_answers(served, mode):
    mix = Mix(Door(mode, served), random.Random(3), 24, 8)
    mix.learn()
    mix.warm_up(1)
    (worker,) = served.workers()
    before = {pid: Holdings.of(pid) for pid in (worker, *engines(worker))}
    mix.run(80)
    mix.repeat()
    assert mix.wrong == []
    for outcome in ("right", "left", "error 400", *(["error 503"] if mode == "async" else [])):
        assert mix.tally.outcomes[outcome] > 0
    assert settled(before)[1] == []

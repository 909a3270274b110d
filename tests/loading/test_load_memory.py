"""Loads side by side within the host's memory."""

from __future__ import annotations

import threading
import time

import pytest

from djl_python_neuronx.loading import load_memory
from djl_python_neuronx.loading.load_memory import LOAD_MEMORY, LoadMemory


class Loads:
    """Loads that run until they are ended, each on a thread."""

    def __init__(self, available):
        self.memory = LoadMemory(lambda: available[0])
        self.running = []
        self._ends, self._threads = {}, []

    def start(self, name, num_bytes):
        """Start a load; return when it runs or waits."""
        end = self._ends[name] = threading.Event()

        def load():
            with self.memory.of(num_bytes):
                self.running.append(name)
                assert end.wait(60)
                self.running.remove(name)

        thread = threading.Thread(target=load)
        thread.start()
        self._threads.append(thread)

    def end(self, name):
        self._ends[name].set()

    def join(self):
        for end in self._ends.values():
            end.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def available():
    return [100]


@pytest.fixture
def loads(available, monkeypatch):
    monkeypatch.setattr(load_memory, "_POLL_S", 0.01)
    found = Loads(available)
    yield found
    found.join()


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_as_many_as_there_is_room_for(loads, caplog):
    caplog.set_level("INFO")
    loads.start("a", 40)
    wait_until(lambda: loads.running == ["a"])
    loads.start("b", 60)
    wait_until(lambda: loads.running == ["a", "b"])
    loads.start("c", 10)
    wait_until(lambda: "load_waits" in caplog.text)
    assert loads.running == ["a", "b"]
    loads.end("a")
    wait_until(lambda: loads.running == ["b", "c"])


def test_one_always_runs_and_the_next_waits_for_it(loads, caplog):
    caplog.set_level("INFO")
    loads.start("a", 1000)
    wait_until(lambda: loads.running == ["a"])
    loads.start("b", 1000)
    wait_until(lambda: "load_waits" in caplog.text)
    assert loads.running == ["a"]
    loads.end("a")
    wait_until(lambda: loads.running == ["b"])


def test_room_that_other_processes_free_is_seen(loads, available, caplog):
    caplog.set_level("INFO")
    loads.start("a", 60)
    wait_until(lambda: loads.running == ["a"])
    loads.start("b", 60)
    wait_until(lambda: "load_waits" in caplog.text)
    available[0] = 120
    wait_until(lambda: loads.running == ["a", "b"])


@pytest.mark.parametrize(("first", "second"), [(None, 1), (1, None)])
def test_a_load_of_unknown_size_is_alone(loads, caplog, first, second):
    caplog.set_level("INFO")
    loads.start("a", first)
    wait_until(lambda: loads.running == ["a"])
    loads.start("b", second)
    wait_until(lambda: "load_waits" in caplog.text)
    assert loads.running == ["a"]
    loads.end("a")
    wait_until(lambda: loads.running == ["b"])


def test_where_the_memory_is_not_known_all_run(loads, available):
    available[0] = None
    loads.start("a", 10**12)
    loads.start("b", 10**12)
    wait_until(lambda: sorted(loads.running) == ["a", "b"])


def test_a_load_that_fails_gives_its_room_back():
    memory = LoadMemory(lambda: 100)
    for _ in range(3):
        with pytest.raises(OSError, match="no such file"), memory.of(100):
            raise OSError("no such file")
    with memory.of(60), memory.of(40):
        pass


def test_the_loads_of_this_process_look_at_this_machine():
    with LOAD_MEMORY.of(1), LOAD_MEMORY.of(1):
        pass

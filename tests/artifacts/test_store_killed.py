"""The compile store between processes: one compile per key, whoever is killed and whenever."""

import json
import multiprocessing
import random
import shutil

import pytest

from djl_python_neuronx.artifacts import manifest as manifests
from tests.artifacts import store_worker
from tests.artifacts.store_worker import (
    NUM_GRAPHS,
    build,
    expected_files,
    files_of,
    finished,
    graphs_made,
    make_facts,
)

# Not fork: this process has threads. Not spawn: an import per process would make these tests minutes long.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.artifacts.store_worker"])


def check_nothing_half_done(root):
    """A folder that looks finished is finished; the rest is out of the way."""
    for folder in finished(root):
        manifests.verify(folder, manifests.read(folder))
        assert files_of(folder) == expected_files()


@pytest.fixture
def place(tmp_path):
    return tmp_path / "store", tmp_path / "journal"


def test_killed_before_every_single_change_of_the_disk(place):
    """Each try dies one step later than the one before, and whatever it leaves, the next one gets through."""
    root, journal = place
    kills = 0
    while True:
        died = processes.Process(target=store_worker.build_and_die, args=(root, journal, kills + 1))
        died.start()
        died.join()
        check_nothing_half_done(root)
        if died.exitcode == 0:
            break
        assert died.exitcode == -9
        kills += 1
        assert files_of(build(root, journal)) == expected_files()
        assert not list((root / ".work").iterdir())
        shutil.rmtree(root)  # so that every step of a whole build is met
    assert kills > 15
    assert files_of(root / make_facts().key) == expected_files()


def test_a_killed_build_goes_on_at_the_next_graph(place):
    """Dies at ever later steps without a clean start between them: no graph that was whole is made twice."""
    root, journal = place
    kills = 0
    for step in range(1, 200):
        before = journal.read_text() if journal.exists() else ""
        whole = {int(path.stem) for path in root.glob(".work/*/graphs/[0-9].neff")}
        died = processes.Process(target=store_worker.build_and_die, args=(root, journal, step))
        died.start()
        died.join()
        check_nothing_half_done(root)
        new = journal.read_text()[len(before) :] if journal.exists() else ""
        assert not whole & {int(line.split()[0]) for line in new.splitlines()}
        if died.exitcode == 0:
            break
        kills += 1
    assert kills >= NUM_GRAPHS
    assert files_of(root / make_facts().key) == expected_files()
    assert not list((root / ".work").iterdir())


def test_killed_at_random_moments(place):
    root, journal = place
    for moment_s in [random.uniform(0, 0.15) for _ in range(12)]:
        told = processes.Queue()
        died = processes.Process(
            target=store_worker.build_and_tell, args=(root, journal, told, 0.005)
        )
        died.start()
        died.join(moment_s)
        died.kill()
        died.join()
        check_nothing_half_done(root)
    folder = build(root, journal)
    assert files_of(folder) == expected_files()


def test_eight_processes_compile_once(place):
    root, journal = place
    told = processes.Queue()
    started = [
        processes.Process(target=store_worker.build_and_tell, args=(root, journal, told, 0.01))
        for _ in range(8)
    ]
    for process in started:
        process.start()
    places = [told.get(timeout=60) for _ in started]
    for process in started:
        process.join()
    assert set(places) == {str(root / make_facts().key)}
    assert sorted(graphs_made(journal)) == [0, 1, 2]


def test_the_lock_of_a_killed_process_is_free_at_once_and_names_it_before(place):
    root, journal = place
    ready = processes.Event()
    holder = processes.Process(target=store_worker.wait_with_lock, args=(root, journal, ready))
    holder.start()
    assert ready.wait(60)
    named = json.loads((root / ".locks" / f"{make_facts().key}.json").read_bytes())
    assert named["pid"] == holder.pid
    holder.kill()
    holder.join()
    assert files_of(build(root, journal)) == expected_files()

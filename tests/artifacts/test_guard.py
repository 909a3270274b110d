"""A guarded command never outlives its starter, and neither does anything that it started."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from djl_python_neuronx.artifacts.guard import guarded

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the guard is for Linux")

# A compiler that starts a worker, which starts one in a session of its own whose parent is gone at once.
_TREE = """
import os, sys, time
def note():
    with open(sys.argv[1], "a") as pids:
        pids.write(f"{os.getpid()}\\n")
note()
if os.fork() == 0:
    note()
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
            note()
            time.sleep(600)
        os._exit(0)
    time.sleep(600)
while len(open(sys.argv[1]).read().split()) < 3:
    time.sleep(0.01)
time.sleep(float(sys.argv[2]))
"""
_STARTER = """
import subprocess, sys
from djl_python_neuronx.artifacts.guard import guarded
guard = subprocess.Popen(guarded([sys.executable, "-c", sys.argv[1], sys.argv[2], "600"]))
print(guard.pid, flush=True)
guard.wait()
"""


def pids_in(path, count):
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        pids = path.read_text().split() if path.exists() else []
        if len(pids) == count:
            return [int(pid) for pid in pids]
        time.sleep(0.01)
    pytest.fail(f"not {count} processes: {pids}")


def alive(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # A zombie has ended; whoever adopted it (a container's first process) may never collect it.
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def all_gone(pids):
    deadline_s = time.monotonic() + 60
    while any(map(alive, pids)):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def started(tmp_path):
    path = tmp_path / "pids"
    starter = subprocess.Popen(
        [sys.executable, "-c", _STARTER, _TREE, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    guard = int(starter.stdout.readline())
    tree = pids_in(path, 3)
    yield starter, guard, tree
    starter.kill()
    starter.communicate()
    assert all_gone([guard, *tree])


def test_all_end_when_the_starter_is_killed(started):
    starter, guard, tree = started
    assert all(map(alive, [guard, *tree]))
    starter.kill()
    starter.wait()
    assert all_gone([guard, *tree])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_all_end_when_the_guard_is_told_to(started, number):
    starter, guard, tree = started
    subprocess.run(["kill", f"-{number}", str(guard)], check=True)
    starter.wait()
    assert all_gone([guard, *tree])


def test_the_command_ends_when_the_guard_is_killed(started):
    starter, guard, tree = started
    subprocess.run(["kill", "-9", str(guard)], check=True)
    starter.wait()
    try:
        assert all_gone(tree[:1])
    finally:
        # Out of reach by then; left over by nobody but this test.
        subprocess.run(["kill", "-9", *map(str, tree[1:])], check=True)


def test_what_the_command_leaves_running_ends_with_it(tmp_path):
    path = tmp_path / "pids"
    ran = subprocess.run(guarded([sys.executable, "-c", _TREE, str(path), "0"]), check=False)
    assert ran.returncode == 0
    assert all_gone(pids_in(path, 3))


@pytest.mark.parametrize(
    ("code", "status"),
    [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 15)", 128 + 15)],
)
def test_the_status_comes_back(code, status):
    ran = subprocess.run(guarded([sys.executable, "-c", code]), check=False)
    assert ran.returncode == status


def test_streams_folder_and_environment_go_through(tmp_path):
    code = "import os, sys; print(os.getcwd(), os.environ['MARK'], sys.stdin.read())"
    ran = subprocess.run(
        guarded([sys.executable, "-c", code]),
        cwd=tmp_path, env={"MARK": "here"}, input="in", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ran.stdout == f"{tmp_path} here in\n"


def test_a_command_that_is_not_there_is_named():
    ran = subprocess.run(guarded(["/no/compiler"]), capture_output=True, text=True, check=False)
    assert ran.returncode == 127
    assert "/no/compiler" in ran.stderr

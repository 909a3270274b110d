"""A guarded command never outlives its starter, and neither does anything that it started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from djl_python_neuronx import backends
from djl_python_neuronx.errors import BackendError
from djl_python_neuronx.loading.engine_process import EngineJob, EngineProcess
from djl_python_neuronx.loading.guard import guarded
from djl_python_neuronx.loading.guarded_job import run_guarded
from tests.processes import alive, children, command_line, wait_until

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
from djl_python_neuronx.loading.guard import guarded
stop = [int(number) for number in sys.argv[3:]]
command = guarded([sys.executable, "-c", sys.argv[1], sys.argv[2], "600"], stop=stop)
guard = subprocess.Popen(command)
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


def all_gone(pids):
    deadline_s = time.monotonic() + 60
    while any(map(alive, pids)):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def stop():
    return [signal.SIGTERM, signal.SIGINT]


@pytest.fixture
def started(tmp_path, stop):
    path = tmp_path / "pids"
    starter = subprocess.Popen(
        [sys.executable, "-c", _STARTER, _TREE, str(path), *(str(int(one)) for one in stop)],
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


def test_a_guard_that_is_stopped_goes_on_when_the_starter_is_killed(started):
    starter, guard, tree = started
    os.kill(guard, signal.SIGSTOP)
    starter.kill()
    starter.wait()
    assert all_gone([guard, *tree])


def test_a_guard_that_is_stopped_goes_on_when_an_engine_or_a_job_is_ended(monkeypatch):
    monkeypatch.setattr(backends, "python_command", lambda _: ["sleep", "600"])
    engine = EngineProcess(EngineJob(models=()), os.environ)
    os.kill(engine._process.pid, signal.SIGSTOP)
    engine.kill()
    assert engine.wait(60.0) is not None

    def guards():
        mine = children(os.getpid())
        return [pid for pid in mine if any("guard.py" in word for word in command_line(pid))]

    before = set(guards())

    def interrupt():
        (guard,) = wait_until(lambda: set(guards()) - before)
        os.kill(guard, signal.SIGSTOP)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_guarded("", b"", os.environ, lambda _: BackendError("ended"), look=interrupt)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_all_end_when_the_guard_is_told_to(started, number):
    starter, guard, tree = started
    subprocess.run(["kill", f"-{number}", str(guard)], check=True)
    starter.wait()
    assert all_gone([guard, *tree])


@pytest.mark.parametrize("stop", [[signal.SIGUSR1]])
def test_a_guard_with_a_signal_of_its_own_takes_no_other(started):
    starter, guard, tree = started
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(guard, number)
    time.sleep(0.3)
    assert all(map(alive, [guard, *tree]))
    os.kill(guard, signal.SIGUSR1)
    starter.wait()
    assert all_gone([guard, *tree])


_OUTLIVING = """
import os, signal, subprocess, sys, time
from djl_python_neuronx.loading.guard import outlive_stops
outlive_stops()
for number in (signal.SIGTERM, signal.SIGINT):
    os.kill(os.getpid(), number)
started = subprocess.Popen(["sleep", "600"])
started.terminate()
assert started.wait() == -signal.SIGTERM
ready, say = os.pipe()
forked = os.fork()
if not forked:
    os.write(say, b"!")
    time.sleep(60)
os.read(ready, 1)
os.kill(forked, signal.SIGTERM)
assert os.waitpid(forked, 0)[1] == signal.SIGTERM
"""


def test_a_process_outlives_stops_and_its_children_do_not():
    subprocess.run(
        [sys.executable, "-c", _OUTLIVING], cwd=Path(__file__).parents[2], check=True, timeout=60
    )


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

"""Run a command that ends, with all processes that it started, when its starter ends, even by SIGKILL.

A compile is a tree of processes (worker pools, the compiler, the compiler's own children) started by libraries that do
not end each other. A death signal set on the first does not reach the others, and a process can leave its group. So a
small process stands between: orphans of the tree become its children (it is a "subreaper"), and it polls whether its
own parent still exists. Linux only.

It runs as a file, without this package or its dependencies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

_LOOK_EVERY_S = 0.5
# Numbers as in Linux, include/uapi/linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STOPS = (signal.SIGTERM, signal.SIGINT)


def guarded(command: Sequence[str], *, stop: Sequence[signal.Signals] = _STOPS) -> list[str]:
    """The command line that runs `command` under a guard. Start it from this process directly, without a shell.

    Streams, working directory and environment are inherited; the exit status is returned (128 + n for signal n).
    A signal of `stop` to the guard ends the tree; it ignores SIGTERM and SIGINT if `stop` lacks them. Send SIGCONT too:
    a guard that was stopped takes it only then. Nothing here limits how long a command that was stopped takes.
    """
    stops = ",".join(str(int(number)) for number in stop)
    return [sys.executable, "-I", "-S", str(Path(__file__)), str(os.getpid()), stops, *command]


def outlive_stops() -> None:
    """Ignore SIGTERM and SIGINT in this process, but not in those that it starts, which libraries end by SIGTERM.

    A system that stops a service signals all of its processes; this one has to run until its starter ends it.
    """
    for number in _STOPS:
        # With SIG_IGN, the programs that it executes would ignore the signal too.
        signal.signal(number, _ignore)
        signal.siginterrupt(number, False)
        os.register_at_fork(after_in_child=partial(signal.signal, number, signal.SIG_DFL))


def _main(starter: int, stops: Collection[int], command: Sequence[str]) -> int:
    for number in {*_STOPS, *stops}:
        signal.signal(number, _stop if number in stops else _ignore)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)  # or a guard that is stopped would not see the end
    # Awaited below: to poll for the end wakes 70 times a second, on a core that the engine may need.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        # Without threads here, code between fork and exec is safe.
        child = subprocess.Popen(command, preexec_fn=_die_with_guard)  # noqa: S603
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be run: {error.strerror}\n")
        return 127
    try:
        while os.getppid() == starter:
            signal.sigtimedwait({signal.SIGCHLD}, _LOOK_EVERY_S)
            if (code := child.poll()) is not None:
                return code if code >= 0 else 128 - code
            _reap_orphans(child.pid)
        return 128 + signal.SIGKILL
    finally:
        for number in stops:
            signal.signal(number, _ignore)
        _kill_tree()


def _reap_orphans(child: int) -> None:
    """Reap adopted processes that have ended, which would stay zombies; `Popen` reaps the child."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == child:
                return
            os.waitpid(ended.si_pid, 0)


def _die_with_guard() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _stop(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    pass


def _kill_tree() -> None:
    """Kill all descendants, and those that they start meanwhile; return when none is left."""
    while found := _children():
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            # At least one ends now; its own children become ours and are found in the next turn.
            os.waitpid(-1, 0)


def _children() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # Source: proc(5): pid (name) state ppid …; the name may hold anything.
            if int(path.read_text(errors="replace").rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(path.parent.name))
    return found


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), [*map(int, sys.argv[2].split(","))], sys.argv[3:]))

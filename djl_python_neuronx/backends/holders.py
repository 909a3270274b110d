"""Processes that hold Neuron devices, from the open files in /proc and from `neuron-ls -j`, and the wait for their end.

The driver gives a core to one process at a time, and shows the devices of a process, not its cores. `neuron-ls` may
miss a process in another container, and a container sees its own processes alone.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from djl_python_neuronx.config.values import join_words
from djl_python_neuronx.errors import CoresTakenError
from djl_python_neuronx.planning.machines import neuron_processes, read_text

_DEVICE = re.compile(r"/dev/neuron(\d+)")
_CONTAINER = re.compile(r"[0-9a-f]{64}")
"""A container's id in the path of its cgroup, as Docker, containerd, CRI-O and ECS write it."""
_WATCHERS = frozenset({"neuron-ls", "neuron-monitor", "neuron-top"})
"""Programs that open devices and take no core."""
_HOST_PIDS = "pid:[4026531836]"
"""The host's namespace of processes: PROC_PID_INIT_INO in Linux, include/linux/proc_ns.h."""
_SWITCHES = re.compile(r"-[bBdEiIOPqsSuvx]+")
"""Python's options that take no value. Source: `python --help`."""
_SHOWN_ID = 12
_RETRY_S, _LOOK_S = 10.0, 1.0
"""Seconds from a start that failed to the next one, and between two looks: the end of a holder shortens the wait."""
_T = TypeVar("_T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """A process that has Neuron devices open."""

    pid: int
    command: str
    """Its program, and the script or module of Python: other words may be secret. Empty if not known."""
    devices: tuple[int, ...]
    """Numbers of the devices, ascending."""
    container: str | None = None
    """The first characters of its container's id; None: without one, or not visible."""

    def __str__(self) -> str:
        """Describe the process in words."""
        facts = [self.command or "command not visible"]
        if self.container is not None:
            facts.append(f"container {self.container}")
        numbers = join_words([f"/dev/neuron{number}" for number in self.devices])
        return f"process {self.pid} ({', '.join(facts)}) has {numbers} open"


@dataclass(frozen=True)
class Holders:
    """The processes that hold Neuron devices, and what could not be looked at."""

    found: tuple[Holder, ...]
    """Ascending by pid."""
    num_hidden: int
    """Processes of other users, whose open files this one may not see."""
    in_container: bool
    """Processes outside of this container are not visible."""

    @property
    def unseen(self) -> str | None:
        """The processes that were not looked at, and what helps; None: all were."""
        reasons = []
        if self.num_hidden:
            reasons.append(
                f"the open files of {self.num_hidden} processes of other users (root sees them)"
            )
        if self.in_container:
            reasons.append("processes outside of this container (run neuron-ls on the host)")
        return f"not visible here: {join_words(reasons)}" if reasons else None

    def __str__(self) -> str:
        """List the processes, and what is not visible, in words."""
        holders = (
            "; ".join(map(str, self.found)) or "no process is seen that has a Neuron device open"
        )
        return f"{holders}; {self.unseen}" if self.unseen else holders


def find_holders(root: Path = Path("/"), search_path: str | None = None) -> Holders:
    """Find the processes that have Neuron devices open, except those that only watch them. Never raises.

    `root`: root of the file system. `search_path`: folders of `neuron-ls`; None: `$PATH`.
    """
    found: dict[int, Holder] = {}
    num_hidden = 0
    for folder in (root / "proc").glob("[0-9]*"):
        command = _shown(read_text(folder / "cmdline").replace("\0", " "))
        try:
            devices = {*_open_devices(folder)}
        except PermissionError:
            num_hidden += bool(command)  # threads of the kernel have none
        else:
            if devices:
                pid = int(folder.name)
                found[pid] = Holder(pid, command, tuple(sorted(devices)), _container(folder))
    for pid, (command, numbers) in neuron_processes(search_path).items():
        # In a container the pid is the host's, so nothing in /proc here belongs to it.
        found.setdefault(pid, Holder(pid, _shown(command), tuple(sorted(numbers))))
    holders = (found[pid] for pid in sorted(found))
    return Holders(
        tuple(one for one in holders if one.command not in _WATCHERS),
        num_hidden,
        _link(root / "proc/self/ns/pid") not in {"", _HOST_PIDS},
    )


def once_free(
    start: Callable[[], _T],
    *,
    wait_s: float,
    pause: Callable[[float], object],
    report: Callable[[str], object],
) -> _T:
    """Call `start`; while it raises `CoresTakenError`, wait for the end of a holder, and call it again.

    Each call has to make a new process: the runtime starts once in each. `pause` sleeps; a true value ends the wait.
    The holders go to the log alone, because `report` and the error may reach clients.

    Raises:
        CoresTakenError: the cores are still taken `wait_s` after the first failure.
    """
    ends_s = None
    while True:
        try:
            return start()
        except CoresTakenError as error:  # noqa: PERF203
            now_s, holders = time.monotonic(), find_holders()
            ends_s = now_s + wait_s if ends_s is None else ends_s
            left_s = max(0.0, ends_s - now_s)
            logger.warning(
                "cores_taken left_s=%.0f holders=%r error=%s", left_s, str(holders), error
            )
            if pause(0):
                raise
            if not left_s:
                message = f"{error} (option.core_wait_s={wait_s:g} is over; the log names the processes seen)"
                raise CoresTakenError(message) from error
            report(
                f"waiting for NeuronCores that another process holds, for at most {left_s:.0f} s"
            )
            _await_change(holders, min(now_s + _RETRY_S, ends_s), pause)


def _await_change(holders: Holders, until_s: float, pause: Callable[[float], object]) -> None:
    """Wait until one of the holders has ended, or until a time."""
    folders = [Path(f"/proc/{holder.pid}") for holder in holders.found]
    running = [folder for folder in folders if folder.exists()]
    while (left_s := until_s - time.monotonic()) > 0 and not pause(min(left_s, _LOOK_S)):
        if not all(folder.exists() for folder in running):
            return


def _open_devices(folder: Path) -> Iterator[int]:
    """Yield the numbers of the devices that a process has open; none if it is gone.

    Raises:
        PermissionError: it belongs to another user.
    """
    with suppress(FileNotFoundError, ProcessLookupError, NotADirectoryError):
        for file in (folder / "fd").iterdir():
            if device := _DEVICE.fullmatch(_link(file)):
                yield int(device[1])


def _shown(command: str) -> str:
    """Return the name of a command's program, and the script or ``-m module`` of Python."""
    program, *words = [Path(word).name for word in command.split()] or [""]
    if program.startswith("python"):
        match [word for word in words if not _SWITCHES.fullmatch(word)]:
            case ["-m", module, *_]:
                return f"{program} -m {module}"
            case [script, *_] if not script.startswith("-"):
                return f"{program} {script}"
    return program


def _container(folder: Path) -> str | None:
    ids = _CONTAINER.findall(read_text(folder / "cgroup"))
    return ids[-1][:_SHOWN_ID] if ids else None


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""

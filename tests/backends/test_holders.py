"""Processes that hold Neuron devices: of this machine, of folders that look like one, and of `neuron-ls`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from djl_python_neuronx.backends import holders
from djl_python_neuronx.backends.holders import Holder, Holders, find_holders, once_free
from djl_python_neuronx.errors import CoresTakenError
from djl_python_neuronx.planning import programs

CONTAINER = "3f2a91c07b5d" + 52 * "e"
# As Docker (cgroup v1 and v2), containerd, CRI-O and ECS name them.
CGROUPS = [
    f"0::/system.slice/docker-{CONTAINER}.scope\n",
    f"12:memory:/docker/{CONTAINER}\n1:name=systemd:/docker/{CONTAINER}\n",
    f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod9f.slice/cri-containerd-{CONTAINER}.scope\n",
    f"0::/kubepods/besteffort/pod1f3e/crio-{CONTAINER}/container\n",
    f"4:memory:/ecs/0a1b2c3d4e5f/{CONTAINER}\n",
]


@pytest.fixture
def machine(tmp_path):
    """A root; call it with pid -> (arguments, the cgroup, links of open files), and what `neuron-ls` answers."""

    def build(
        processes: dict[int, tuple[list[str], str, list[str]]],
        answer: Any = None,
        namespace: int = 4026531836,
    ):
        for pid, (arguments, cgroup, links) in processes.items():
            folder = tmp_path / "proc" / str(pid)
            (folder / "fd").mkdir(parents=True)
            (folder / "cmdline").write_text("".join(f"{word}\0" for word in arguments))
            (folder / "cgroup").write_text(cgroup)
            for number, link in enumerate(links):
                (folder / "fd" / str(number)).symlink_to(link)
        own = tmp_path / "proc/self/ns"
        own.mkdir(parents=True)
        (own / "pid").symlink_to(f"pid:[{namespace}]")
        (tmp_path / "bin").mkdir()
        if answer is not None:
            program = tmp_path / "bin/neuron-ls"
            program.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(answer)}\nEND\n")
            program.chmod(0o755)
        return find_holders(tmp_path, f"{tmp_path / 'bin'}{os.pathsep}{os.defpath}")

    return build


def test_a_holder_is_named_with_command_devices_and_container(machine):
    shell = ["/bin/sh", "-c", "neuron"]
    found = machine(
        {
            7: (
                shell,
                "0::/\n",
                ["/dev/null", "/opt/aws/neuron/bin/neuron0", "/home/a/dev/neuron0"],
            ),
            42: (
                ["python3", "-m", "vllm", "--api-key=hunter2", "x"],
                CGROUPS[0],
                ["/dev/neuron3", "/dev/neuron0"],
            ),
            43: (["/opt/aws/neuron/bin/neuron-monitor", "-c", "x"], "0::/\n", ["/dev/neuron0"]),
            9: (
                ["python3", "-u", "-c", "key = 1", "a", "b", "c"],
                "0::/user.slice\n",
                ["/dev/neuron0", "/dev/neuron0"],
            ),
        }
    )
    assert found.found == (
        Holder(9, "python3", (0,)),
        Holder(42, "python3 -m vllm", (0, 3), CONTAINER[:12]),
    )
    assert found.unseen is None
    assert (
        "process 42 (python3 -m vllm, container 3f2a91c07b5d) has /dev/neuron0 and /dev/neuron3"
        in str(found)
    )


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("/usr/bin/python3.10 -uB /opt/hunter2/serve.py api_key=hunter2", "python3.10 serve.py"),
        ("/usr/bin/python3 /usr/local/bin/vllm serve m -k hunter2", "python3 vllm"),
        ("python3 -u -m vllm -k hunter2", "python3 -m vllm"),
        ("python3 -uc key='hunter2'", "python3"),
        ("python3 -X hunter2 -c x", "python3"),
        ("bash -lc HF_TOKEN=hunter2 exec python3 serve.py", "bash"),
        ("/opt/serve hunter2", "serve"),
        ("", ""),
    ],
)
@pytest.mark.parametrize("kept", [True, False])
def test_secrets_of_a_command_are_not_shown(machine, command, shown, kept):
    """In /proc the words are apart, unless the process has set its title; `neuron-ls` shows one text."""
    words = command.split(" ") if kept else [command]
    rows = [{"neuron_device": 0, "neuron_processes": [{"pid": 6, "command": command}]}]
    found = machine({5: (words, "0::/\n", ["/dev/neuron0"])}, rows)
    assert [holder.command for holder in found.found] == [shown, shown]


def test_a_neuron_ls_that_hangs_is_asked_only_after_a_start(tmp_path, monkeypatch, caplog):
    calls = tmp_path / "calls"
    program = tmp_path / "neuron-ls"
    program.write_text(f"#!/bin/sh\necho >> {calls}\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(programs, "_TIMEOUT_S", 0.5)
    looks = []

    def start():
        raise CoresTakenError("taken")

    def pause(seconds):
        looks.append(seconds)
        time.sleep(seconds)

    with pytest.raises(CoresTakenError):
        once_free(start, wait_s=2, pause=pause, report=lambda _: None)
    assert len(looks) >= 2
    assert len(calls.read_text()) == 2  # after the first start, and after the last one


def test_holders_are_in_the_log_and_not_in_the_error(monkeypatch, caplog):
    found = Holders((Holder(4711, "python3 serve.py", (0,)),), 0, in_container=False)
    monkeypatch.setattr(holders, "find_holders", lambda: found)
    reports = []

    def start():
        raise CoresTakenError("taken")

    with pytest.raises(CoresTakenError) as caught:
        once_free(start, wait_s=0, pause=lambda _: False, report=reports.append)
    assert "4711" not in f"{caught.value} {reports}"
    assert "core_wait_s=0 is over" in str(caught.value)
    assert "process 4711 (python3 serve.py)" in caplog.text
    with pytest.raises(CoresTakenError, match=r"^taken$"):  # a wait that is ended is not over
        once_free(start, wait_s=90, pause=lambda _: True, report=reports.append)


@pytest.mark.parametrize("cgroup", CGROUPS)
def test_the_container_is_found_in_every_layout(machine, cgroup):
    assert machine({5: (["a"], cgroup, ["/dev/neuron0"])}).found[0].container == CONTAINER[:12]


def test_neuron_ls_adds_what_proc_does_not_show(machine):
    rows = [
        {"neuron_device": number, "neuron_processes": processes}
        for number, processes in enumerate(
            [
                [{"pid": 42, "command": "python3 -m vl..."}, {"pid": 1966680, "command": ""}],
                [{"pid": 1966680, "command": ""}, {"pid": 77, "command": "neuron-top"}],
                [{"command": "x"}, "odd", {"pid": "1"}],
                "odd",
            ]
        )
    ]
    found = machine(
        {42: (["python3", "-m", "vllm"], "0::/\n", ["/dev/neuron0"])}, rows, namespace=4026532000
    )
    assert found.found == (Holder(42, "python3 -m vllm", (0,)), Holder(1966680, "", (0, 1)))
    assert "process 1966680 (command not visible)" in str(found)
    assert "outside of this container" in (found.unseen or "")


def test_nobody_is_found_without_devices(machine):
    assert "no process is seen" in str(machine({}, answer={"mlas": "odd"}))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a process of another user")
def test_processes_of_other_users_are_counted():
    foreign = "import os; os.setuid(65534); print(flush=True); input()"
    looker = (
        "import os; from djl_python_neuronx.backends.holders import find_holders\n"
        "find_holders(search_path=''); os.setuid(65533); print(find_holders(search_path='').num_hidden)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", foreign], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        seen = subprocess.run(
            [sys.executable, "-c", looker], capture_output=True, text=True, check=True
        )
        process.communicate(b"\n")
    assert int(seen.stdout) >= 1


def test_an_open_file_of_this_machine_is_no_device():
    with Path("/dev/null").open():
        assert os.getpid() not in {holder.pid for holder in find_holders(search_path="").found}

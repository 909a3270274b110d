"""What is seen of a machine, on folders that look like one."""

import json
import os

import pytest

from djl_python_neuronx.config.device import detect

GIB = 2**30


@pytest.fixture
def machine(tmp_path):
    """A root folder; call it with what it shall hold."""

    def build(nodes=(), product=None, memory_kib=None, limit=None):
        contents = {
            "sys/devices/virtual/dmi/id/product_name": product and f"{product}\n",
            "proc/meminfo": memory_kib and f"MemTotal:  {memory_kib} kB\nMemFree: 1 kB\n",
            "sys/fs/cgroup/memory.max": limit and f"{limit}\n",
            **{f"dev/{node}": "x" for node in nodes},
        }
        for name, text in contents.items():
            if text:
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_text(text)
        return tmp_path

    return build


@pytest.fixture
def neuron_ls(tmp_path):
    """A search path with a `neuron-ls`; call it with the shell lines that it runs."""

    def build(script):
        folder = tmp_path / "bin"
        folder.mkdir()
        program = folder / "neuron-ls"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return f"{folder}{os.pathsep}{os.defpath}"

    return build


def answering(value):
    return f"cat <<'END'\n{value if isinstance(value, str) else json.dumps(value)}\nEND"


CHIP = {"neuron_device": 0, "nc_count": 2, "memory_size": 32 * GIB, "neuron_processes": []}


def test_a_machine_without_neuron(machine):
    found = detect(machine(memory_kib=1024, product="m7i.large"), search_path="")
    assert not found.has_neuron
    assert (found.neuron_cores, found.memory_bytes) == (0, 2**20)
    assert found.instance_type == "m7i.large"
    assert found.cpus == len(os.sched_getaffinity(0))


def test_a_machine_with_two_chips(machine, neuron_ls):
    root = machine(nodes=["neuron0", "neuron1", "neuron_monitor"], product="inf2.24xlarge")
    found = detect(root, neuron_ls(answering([CHIP, CHIP])))
    assert (found.neuron_devices, found.neuron_cores, found.memory_bytes) == (2, 4, 64 * GIB)


def test_nodes_without_neuron_ls_are_devices_of_unknown_size(machine):
    found = detect(machine(nodes=["neuron0"], memory_kib=1024), search_path="")
    assert found.has_neuron
    assert (found.neuron_cores, found.memory_bytes) == (0, 0)
    assert "no neuron-ls" in found.seen


def test_the_containers_memory_counts_if_it_is_less(machine):
    assert detect(machine(memory_kib=1024, limit=5000), search_path="").memory_bytes == 5000


def test_no_limit_is_no_limit(machine):
    assert detect(machine(memory_kib=1024, limit="max"), search_path="").memory_bytes == 2**20


@pytest.mark.parametrize(
    "script",
    [
        "exit 1",
        answering("no json"),
        answering("[" * 100_000),
        answering(7),
        answering({"mlas": 7}),
        answering([1, None, {"nc_count": "two"}]),
    ],
)
def test_an_odd_neuron_ls_does_no_harm(machine, neuron_ls, script):
    found = detect(machine(), neuron_ls(script))
    assert found.neuron_cores == 0
    assert "neuron-ls" in found.seen


def test_an_empty_root_is_unknown(tmp_path):
    found = detect(tmp_path / "nowhere", search_path="")
    assert (found.instance_type, found.memory_bytes, found.has_neuron) == (None, 0, False)

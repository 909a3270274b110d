"""Detection of a machine, on folders that look like one."""

import json
import os
from dataclasses import replace

import pytest

from djl_python_neuronx.planning.machines import (
    INSTANCES,
    DeviceInfo,
    available_memory,
    core_limit,
    detect,
    for_process,
    named,
    oom_kills,
)

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
TRN2_CHIP = {"neuron_device": 0, "nc_count": 4, "memory_size": 96 * GIB, "neuron_processes": []}


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
    assert (found.family, found.core_memory_bytes, found.visible_cores) == ("inf2", 16 * GIB, 4)
    assert found.assumed is None


@pytest.mark.parametrize("name", INSTANCES)
def test_a_whole_machine_is_seen_as_it_is_named(machine, neuron_ls, name):
    expected = named(name)
    chip = TRN2_CHIP if expected.family == "trn2" else CHIP
    count = expected.neuron_devices
    nodes = [f"neuron{index}" for index in range(count)]
    found = detect(machine(nodes=nodes, product=name), neuron_ls(answering([chip] * count)))
    assert replace(found, cpus=0, seen="") == replace(expected, cpus=0, seen="")


@pytest.mark.parametrize(
    ("environ", "visible"),
    [
        ({}, 24),
        ({"NEURON_RT_VISIBLE_CORES": "0-7"}, 8),
        ({"NEURON_RT_VISIBLE_CORES": "3"}, 1),
        ({"NEURON_RT_VISIBLE_CORES": "0,1,4-5"}, 4),
        ({"NEURON_RT_VISIBLE_CORES": " 0 , 1 "}, 2),
        ({"NEURON_RT_VISIBLE_CORES": "0,0-1"}, 2),
        ({"NEURON_RT_VISIBLE_CORES": "", "NEURON_RT_NUM_CORES": "2"}, 2),
        ({"NEURON_RT_VISIBLE_CORES": "0-3", "NEURON_RT_NUM_CORES": "2"}, 4),
        ({"NEURON_RT_NUM_CORES": "8"}, 8),
        ({"NEURON_RT_NUM_CORES": "800"}, 24),
        ({"NEURON_RT_VISIBLE_CORES": "0-99999"}, 24),
    ],
)
def test_the_cores_of_this_process(machine, neuron_ls, environ, visible):
    root = machine(product="inf2.48xlarge")
    found = for_process(detect(root, neuron_ls(answering([CHIP] * 12))), environ)
    assert (found.neuron_cores, found.visible_cores) == (24, visible)


@pytest.mark.parametrize("name", ["NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"])
@pytest.mark.parametrize("value", ["all", "-1", "3-", "7-0", "0;1", "1e3", "²", "9" * 5000])
def test_an_odd_limit_is_left_aside_and_told(machine, neuron_ls, name, value):
    environ = {name: value}
    found = detect(machine(product="inf2.xlarge"), neuron_ls(answering([CHIP])))
    assert for_process(found, environ).visible_cores == 2
    assert name in core_limit(environ).problem


def test_a_limit_counts_where_nothing_else_tells_the_cores(machine):
    found = for_process(detect(machine(nodes=["neuron0"]), ""), {"NEURON_RT_NUM_CORES": "2"})
    assert (found.neuron_cores, found.visible_cores) == (0, 2)


@pytest.mark.parametrize("given", [1, 6, 12])
def test_without_neuron_ls_the_instance_type_tells_and_it_is_said(machine, given):
    nodes = [f"neuron{index}" for index in range(given)]
    found = detect(machine(nodes=nodes, product="inf2.48xlarge"), search_path="")
    assert (found.neuron_cores, found.core_memory_bytes) == (2 * given, 16 * GIB)
    assert found.memory_bytes == given * 32 * GIB
    assert "neuron-ls does not list the cores" in found.assumed
    assert f"{2 * given} cores with 16 GiB" in found.assumed


def test_a_neuron_ls_that_tells_no_memory(machine, neuron_ls):
    chip = {"nc_count": 2}
    found = detect(machine(product="trn1.2xlarge"), neuron_ls(answering([chip])))
    assert (found.neuron_cores, found.core_memory_bytes) == (2, 16 * GIB)
    assert "does not list the memory" in found.assumed


@pytest.mark.parametrize(
    ("listed", "environ", "cores", "gib"),
    [
        (4, {}, 4, 24),
        (8, {}, 4, 24),
        (4, {"NEURON_LOGICAL_NC_CONFIG": "2"}, 4, 24),
        (4, {"NEURON_LOGICAL_NC_CONFIG": "1"}, 8, 12),
        (8, {"NEURON_LOGICAL_NC_CONFIG": "1"}, 8, 12),
    ],
)
def test_trn2_counts_logical_cores(machine, neuron_ls, listed, environ, cores, gib):
    chip = {**TRN2_CHIP, "nc_count": listed}
    found = detect(machine(product="trn2.3xlarge"), neuron_ls(answering([chip])), environ)
    assert (found.neuron_cores, found.core_memory_bytes) == (cores, gib * GIB)
    assert (found.assumed is None) is (listed == cores)


def test_the_name_may_come_from_neuron_ls(machine, neuron_ls):
    told = {"instance_type": "inf2.xlarge", "mlas": [CHIP]}
    found = detect(machine(), neuron_ls(answering(told)))
    assert (found.instance_type, found.family, found.neuron_cores) == ("inf2.xlarge", "inf2", 2)


def test_the_driver_counts_the_cores_where_neuron_ls_does_not(machine):
    root = machine(nodes=["neuron0", "neuron1"])
    for name, text in (("neuron0", "2\n"), ("neuron1", "many")):
        folder = root / "sys/devices/virtual/neuron_device" / name
        folder.mkdir(parents=True)
        (folder / "core_count").write_text(text)
    assert detect(root, search_path="").neuron_cores == 2


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
        answering([{"nc_count": True, "memory_size": -1}]),
        answering({"instance_type": 7, "mlas": [{}]}),
    ],
)
def test_an_odd_neuron_ls_does_no_harm(machine, neuron_ls, script):
    found = detect(machine(), neuron_ls(script))
    assert found.neuron_cores == 0
    assert "neuron-ls" in found.seen


def test_an_empty_root_is_unknown(tmp_path):
    found = detect(tmp_path / "nowhere", search_path="")
    assert (found.instance_type, found.memory_bytes, found.has_neuron) == (None, 0, False)


@pytest.mark.parametrize(
    ("environ", "visible", "limit", "local"),
    [
        ({}, 24, None, None),
        ({"NEURON_RT_VISIBLE_CORES": "0-7"}, 8, "NEURON_RT_VISIBLE_CORES=0-7", None),
        ({"NEURON_RT_NUM_CORES": "99"}, 24, "NEURON_RT_NUM_CORES=99", None),
        ({"NEURON_RT_NUM_CORES": "0"}, 24, None, None),
        ({"NEURON_RT_NUM_CORES": "x", "NEURON_LOCAL_TP": "8"}, 24, None, 8),
    ],
)
def test_a_machine_that_was_only_named_as_a_process_has_it(environ, visible, limit, local):
    found = for_process(named("inf2.48xlarge"), environ)
    assert (found.neuron_cores, found.visible_cores) == (24, visible)
    assert (found.limited_by, found.local_degree) == (limit, local)
    assert for_process(found, environ) == found


@pytest.mark.parametrize(
    ("machine", "cores", "last"),
    [
        ("inf2.48xlarge", "0-23", None),
        ("inf2.48xlarge", "22-24", 23),
        ("inf2.xlarge", "8", 1),
        ("trn2.3xlarge", "0-3", None),
        ("trn2.3xlarge", "2-4", 3),
        ("inf2.xlarge", "0,40000", 1),
    ],
)
def test_cores_that_a_machine_does_not_have_are_named(machine, cores, last):
    problem = core_limit({"NEURON_RT_VISIBLE_CORES": cores}).beyond(named(machine))
    assert (problem is not None) == (last is not None)
    assert last is None or f"{machine} has no core" in problem
    assert last is None or problem.endswith(f"0 to {last}")
    assert core_limit({"NEURON_RT_NUM_CORES": "99"}).beyond(named(machine)) is None


def test_a_machine_without_neuron_has_no_cores_to_limit():
    laptop = DeviceInfo(None, 0, 0, 2**30, 8, "a laptop")
    assert for_process(laptop, {"NEURON_RT_NUM_CORES": "4"}) == laptop


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"NEURON_RT_NUM_CORES": "0"}, False),
        ({"NEURON_RT_NUM_CORES": "3"}, False),
        ({"NEURON_RT_NUM_CORES": "-1"}, True),
        ({"NEURON_RT_VISIBLE_CORES": "0"}, False),
        ({"NEURON_RT_VISIBLE_CORES": "zero"}, True),
        ({"NEURON_RT_VISIBLE_CORES": "5-2,0"}, True),
    ],
)
def test_what_is_not_understood_is_said(environ, told):
    problem = core_limit(environ).problem
    assert (problem is not None) == told
    assert not told or "expected" in problem


class TestAvailableMemory:
    """Memory left for loads, of the host and of the containers around this process."""

    @pytest.fixture
    def host(self, tmp_path):
        def build(files):
            meminfo = "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 800 kB\n"
            for name, text in {"proc/meminfo": meminfo, **files}.items():
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_text(text)
            return available_memory(tmp_path)

        return build

    def test_of_the_host(self, host):
        assert host({}) == 800 * 1024

    def test_unknown(self, tmp_path):
        assert available_memory(tmp_path) is None

    def test_of_a_container_cached_files_are_available(self, host):
        group = "sys/fs/cgroup/memory."
        files = {f"{group}max": "500000\n", f"{group}current": "300000\n"}
        assert host(files) == 200000
        stat = {f"{group}stat": "anon 1\nactive_file 40000\ninactive_file 60000\nfile 150000\n"}
        assert host(files | stat) == 300000
        assert host(files | stat | {f"{group}max": "max\n"}) == 800 * 1024
        assert host(files | stat | {f"{group}max": "100000\n", f"{group}stat": ""}) == 0

    def test_of_a_service_and_the_slice_around_it(self, host):
        slice_, service = "sys/fs/cgroup/a.slice", "sys/fs/cgroup/a.slice/b.service"
        files = {
            "proc/self/cgroup": "0::/a.slice/b.service\n",
            f"{slice_}/memory.max": "400000\n",
            f"{slice_}/memory.current": "100000\n",
            f"{service}/memory.max": "900000\n",
            f"{service}/memory.current": "500000\n",
        }
        assert host(files) == 300000
        assert host({**files, f"{service}/memory.max": "600000\n"}) == 100000

    def test_of_a_container_of_version_1(self, host):
        group = "sys/fs/cgroup/memory/memory."
        files = {
            "proc/self/cgroup": "12:memory:/docker/1\n1:name=systemd:/docker/1\n",
            f"{group}limit_in_bytes": "500000\n",
            f"{group}usage_in_bytes": "300000\n",
            f"{group}stat": "total_active_file 10000\ntotal_inactive_file 20000\nactive_file 7\n",
        }
        assert host(files) == 230000


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({}, None),
        ({"sys/fs/cgroup/memory.events": "oom 3\noom_kill 2\n"}, 2),
        ({"sys/fs/cgroup/memory/memory.oom_control": "under_oom 0\noom_kill 1\n"}, 1),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.events": "oom_kill 4\n"}, 4),
        (
            {
                "proc/self/cgroup": "5:cpu:/x\n4:memory:/p/q\n",
                "sys/fs/cgroup/memory/p/q/memory.oom_control": "oom_kill 7\n",
                "sys/fs/cgroup/memory/memory.oom_control": "oom_kill 1\n",
            },
            7,
        ),
        # Of the host's path in a container that has a namespace of its own, nothing is there.
        ({"proc/self/cgroup": "0::/host/x\n", "sys/fs/cgroup/memory.events": "oom_kill 0\n"}, 0),
    ],
)
def test_processes_that_the_kernel_has_killed_for_memory(tmp_path, files, count):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert oom_kills(tmp_path) == count

"""`doctor` on machines made of recorded outputs, good and bad ones, and on this one."""

import json
import platform
import re
import shutil
import socket
import threading
import time
from collections import namedtuple
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from djl_python_neuronx import cli, doctor
from djl_python_neuronx.doctor import Fact, Host, examine
from djl_python_neuronx.planning import programs
from tests.doubles.recorded_machine import RecordedMachine
from tests.processes import wait_gone

ROOT = Path(__file__).parents[1]
GIB = 2**30
# An inf2.8xlarge. Sources: neuron-ls of https://github.com/vllm-project/vllm/issues/11189, in the JSON of "Neuron LS
# user guide" (tools/neuron-sys-tools/neuron-ls.rst of aws-neuron-sdk 81ce03ae).
CHIP = {
    "neuron_device": 0,
    "bdf": "00:1f.0",
    "nc_count": 2,
    "memory_size": 32 * GIB,
    "neuroncore_ids": [0, 1],
    "neuron_processes": [],
}
# AWS's image of SDK 2.28.1: aws-neuron/deep-learning-containers 033cc6a, pytorch/inference/2.9.0/Dockerfile.neuronx.
SYSTEM = {
    "aws-neuronx-runtime-lib": "2.30.51.0-faafe26f0",
    "aws-neuronx-collectives": "2.30.59.0-f5cdefb39",
    "aws-neuronx-tools": "2.28.23.0-f1c114a9d",
}
PYTHON = {
    "neuronx-cc": "2.23.6484.0+3b612583",
    "torch-neuronx": "2.9.0.2.12.22436+0f1dac25",
    "libneuronxla": "2.2.15515.0",
    "neuronx-distributed": "0.17.26814+4b18de63",
    "neuronx-distributed-inference": "0.8.16251+f3ca5575",
    "nki": "0.2.0+g82fdb402",
    "torch": "2.9.1",
    "transformers": "4.57.6",
}
# setup.py of neuronx-distributed-inference cd3abf3; torch-neuronx pins torch, as pip shows in
# https://github.com/aws-neuron/aws-neuron-samples/issues/47
REQUIRES = [
    ("neuronx-distributed-inference", "transformers==4.57.*"),
    ("neuronx-distributed-inference", "neuronx_distributed"),
    ("neuronx-distributed-inference", 'pytest; extra == "test"'),
    ("torch-neuronx", "torch==2.9.*"),
]
MODINFO = """filename:       /lib/modules/6.8.0-1021-aws/updates/dkms/neuron.ko
alias:          pci:v00001d0fd00007064sv*sd*bc*sc*i*
version:        {}
license:        GPL
description:    Neuron Driver, built from SHA: 559cb9bf14a5b9e98b28b11fe8c7d70d659bd308
srcversion:     4E77A4CB04E32F68022400E
"""
"""Form: https://github.com/bottlerocket-os/bottlerocket-kernel-kit/pull/407"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """An inf2.8xlarge on which all is well, SDK 2.28.1 in a container; without a network."""
    monkeypatch.setattr(platform, "python_version", lambda: "3.12.3")
    made = RecordedMachine(tmp_path)
    made.driver("2.26.10.0")
    made.packages(SYSTEM)
    made.file(".dockerenv")
    made.file("sys/devices/virtual/dmi/id/product_name", "inf2.8xlarge\n")
    made.file("proc/sys/kernel/osrelease", "6.8.0-1021-aws\n")
    made.file("proc/meminfo", "MemTotal: 130000000 kB\nMemAvailable: 120000000 kB\n")
    made.program("neuron-ls", json.dumps([CHIP]))
    made.environ = {"HF_HUB_OFFLINE": "1", "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    made.environ |= {"SERVING_DOWNLOAD_DIR": str(tmp_path), "HF_HOME": str(tmp_path)}
    made.installed, made.requires = dict(PYTHON), list(REQUIRES)
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(900 * GIB, 0, 500 * GIB))
    return made


@pytest.fixture
def diagnose(machine, monkeypatch):
    """Examine the machine; the findings as (level, name in doctor.toml or text), without S3's, and the facts."""

    def run(**how):
        monkeypatch.syspath_prepend(machine.python_packages(machine.installed, machine.requires))
        host = Host(machine.environ, machine.root, machine.search_path, **how)
        return examine(host)

    return run


def forms():
    """The name of each finding, and the form of its text; the longest first."""
    for name, advice in sorted(doctor.table().items(), key=lambda one: -len(one[1].problem)):
        places = re.split(r"\{[^}]*\}", f"{advice.problem}; {advice.fix}")
        yield name, re.compile(".*".join(map(re.escape, places)), re.DOTALL)


def named(diagnosis, level=None):
    """The names of the findings, those of one level if it is given; a text that has none as it is."""
    found = [one.message for one in diagnosis.findings if level in (None, one.level)]
    return {next((name for name, form in forms() if form.fullmatch(text)), text) for text in found}


def test_a_machine_on_which_all_is_well(diagnose):
    found = diagnose()
    assert named(found) == {"no_answer"}  # S3, which this test keeps away
    assert found.ok
    pinned = {fact.name: fact[2:] for fact in found.facts if fact.section == "versions"}
    assert pinned["Neuron SDK"] == ("2.28.1", "")
    assert pinned["aws-neuronx-dkms"] == ("2.26.10.0", "2.26.10.0")
    assert pinned["aws-neuronx-runtime-lib"] == ("2.30.51.0-faafe26f0", "2.30.51.0")
    assert pinned["transformers"] == ("4.57.6", "4.57.*")
    assert pinned["python"] == ("3.12.3", "3.10, 3.11, 3.12")
    machine = {fact.name: fact.value for fact in found.facts if fact.section == "machine"}
    assert machine["instance"] == "inf2.8xlarge"
    assert machine["in a container"] == "yes"
    assert machine["cores"] == "2 of 2 visible"
    assert machine["host memory"].startswith("114.44 GiB")


def driver_too_new(machine):
    machine.driver("2.29.0.0")


def driver_of_sagemaker(machine):
    machine.driver("2.10.11.0")


def no_devices_given(machine):
    (machine.root / "dev/neuron0").unlink()
    # https://github.com/aws-neuron/aws-neuron-sdk/issues/633
    text = "FATA[0000] Failed to discover neuron devices"
    machine.program("neuron-ls", text, status=1)


def driver_not_loaded(machine):
    no_devices_given(machine)
    (machine.root / ".dockerenv").unlink()
    (machine.root / "sys/module/neuron/version").unlink()
    machine.program("modinfo", MODINFO.format("2.26.10.0"))


def driver_not_reloaded(machine):
    machine.driver("2.22.2.0")
    machine.program("modinfo", MODINFO.format("2.26.10.0"))


def old_package_of_the_driver(machine):
    machine.packages({**SYSTEM, "aws-neuron-dkms": "2.3.26.0"})


def amazon_linux_2(machine):
    machine.file("proc/sys/kernel/osrelease", "4.14.355-276.618.amzn2.x86_64\n")


def newest_transformers(machine):
    machine.installed["transformers"] = "5.24.0"


def newest_torch(machine):
    machine.installed["torch"] = "2.13.0"


def compiler_of_another_sdk(machine):
    machine.installed["neuronx-cc"] = "2.24.8799.0+6f62ff7c"


def old_python(machine):
    platform.python_version = lambda: "3.9.2"


def no_runtime(machine):
    machine.packages({})


def no_library(machine):
    for name in ("neuronx-distributed", "neuronx-distributed-inference"):
        del machine.installed[name]


def placeholder(machine):
    # The description of PyPI's transformers-neuronx 0.1.
    machine.python_packages({"transformers-neuronx": "0.1"}, description="WRONG PACKAGE\n")


def cores_that_are_not_there(machine):
    machine.environ["NEURON_RT_VISIBLE_CORES"] = "0-7"


def held(machine):
    machine.file("proc/4242/cmdline", "python3\0-m\0djl_python_neuronx\0serve\0/models/llama\0")
    machine.file("proc/4242/cgroup", "0::/\n")
    (machine.root / "proc/4242/fd").mkdir()
    (machine.root / "proc/4242/fd/7").symlink_to("/dev/neuron0")


def no_rights(machine):
    (machine.root / "dev/neuron0").chmod(0o660)
    doctor.os.access = lambda path, mode: "neuron0" not in str(path)


def read_only(machine):
    machine.environ["SERVING_DOWNLOAD_DIR"] = "/opt/none/there"
    doctor.os.access = lambda path, mode: "opt" not in str(path)


def small_disk(machine):
    usage = shutil.disk_usage("/")._replace(free=3 * GIB)
    doctor.shutil.disk_usage = lambda _: usage


def neuron_ls_that_fails(machine):
    laptop(machine)
    machine.program("neuron-ls", "", status=3, errors="no reply from the driver")


def neuron_ls_without_cores(machine):
    machine.file("sys/devices/virtual/dmi/id/product_name", "")
    machine.program("neuron-ls", json.dumps([{**CHIP, "nc_count": None}]))


def programs_that_print_nothing(machine):
    laptop(machine)
    machine.program("neuron-ls", "")
    machine.program("modinfo", "\x01")
    machine.program("dpkg-query", "", status=2, errors="the database is locked")


def several_machines(machine):
    machine.environ["NEURON_LOCAL_TP"] = "2"
    doctor.resource.getrlimit = lambda _: (65536, 65536)


def no_url(machine):
    machine.environ["AWS_ENDPOINT_URL"] = "file:///etc/passwd"


def no_place(machine):
    machine.environ["NEURON_COMPILE_CACHE_URL"] = "graphs"


def no_hub(machine):
    machine.environ["HF_ENDPOINT"] = "https://someone:secret@[huggingface.co"


def laptop(machine):
    driver_not_loaded(machine)
    for name in ("modinfo", "dpkg-query", "neuron-ls"):
        (machine.root.parent / "bin" / name).unlink()
    machine.file("sys/devices/virtual/dmi/id/product_name", "ThinkPad\n")
    machine.installed, machine.requires = {}, []


def device_of_an_instance_without_driver(machine):
    driver_not_loaded(machine)
    (machine.root.parent / "bin/modinfo").unlink()


BAD = [
    # what is wrong, errors, warnings and notes
    (driver_too_new, {"2.33"}, set()),
    (driver_of_sagemaker, {"al2-ami-sagemaker-inference-neuron-2"}, {"driver_old"}),
    (no_devices_given, {"no_device_in_container"}, {"unread"}),
    (driver_not_loaded, {"driver_not_loaded", "no_device"}, {"unread"}),
    (device_of_an_instance_without_driver, {"no_device"}, {"unread"}),
    (neuron_ls_that_fails, set(), {"unread", "no_sdk"}),
    (neuron_ls_without_cores, set(), {"cores_unknown"}),
    (programs_that_print_nothing, set(), {"unread"}),
    (driver_not_reloaded, set(), {"driver_not_reloaded", "driver_old"}),
    (old_package_of_the_driver, {"first Neuron SDK"}, set()),
    (amazon_linux_2, {"Linux 5.10"}, set()),
    (newest_transformers, set(), {"requirement"}),
    (newest_torch, {"requirement_of_torch"}, set()),
    (compiler_of_another_sdk, set(), {"several_sdks"}),
    (old_python, set(), {"python"}),
    (no_runtime, {"no_runtime"}, set()),
    (no_library, {"no_library"}, set()),
    (placeholder, {"placeholder"}, {"several_sdks"}),
    (cores_that_are_not_there, {"cores"}, set()),
    (held, set(), {"in_use"}),
    (no_rights, {"no_rights"}, set()),
    (read_only, {"not_writable"}, set()),
    (small_disk, set(), {"disk"}),
    (several_machines, {"locked_memory"}, set()),
    (no_url, {"url"}, set()),
    (no_place, {"NEURON_COMPILE_CACHE_URL"}, set()),
    (no_hub, {"HF_ENDPOINT is not a URL"}, set()),
    (laptop, set(), {"not_neuron", "no_sdk"}),
]


@pytest.mark.parametrize(
    ("spoil", "errors", "others"), BAD, ids=lambda one: getattr(one, "__name__", "")
)
def test_what_is_wrong_with_a_machine(machine, diagnose, monkeypatch, spoil, errors, others):
    for owner, name in (
        (doctor.os, "access"),
        (doctor.shutil, "disk_usage"),
        (doctor.resource, "getrlimit"),
        (platform, "python_version"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # brought back after the test
    spoil(machine)
    found = diagnose()
    assert spoil is not small_disk or len(found.findings.messages("warning")) == 2  # and S3

    def fits(expected, names):
        return len(names) == len(expected) and all(
            any(one == name or one in name for name in names) for one in expected
        )

    assert fits(errors, named(found, "error")), named(found)
    left = named(found, "warning") | named(found, "note")
    assert fits(others, left - {"no_answer"}), named(found)
    assert found.ok == (not errors)


def test_texts_name_values_and_the_cure(machine, diagnose):
    held(machine)
    compiler_of_another_sdk(machine)
    driver_too_new(machine)
    text = "\n".join(one.message for one in diagnose().findings)
    assert re.search(
        r"process 4242 \(python3 -m djl_python_neuronx.*\) has /dev/neuron0 open", text
    )
    assert "most are of 2.28.1, but neuronx-cc 2.24.8799.0+6f62ff7c (SDK 2.29.1)" in text
    assert "aws-neuronx-dkms 2.29.0.0 and aws-neuronx-runtime-lib 2.30.51.0-faafe26f0" in text
    assert "apt install aws-neuronx-dkms=2.28.*" in text


def test_a_program_without_an_answer_is_named_with_its_reason(machine, diagnose):
    programs_that_print_nothing(machine)
    found = diagnose()
    text = "\n".join(found.findings.messages("warning"))
    assert "neuron-ls gave no answer that can be read (its output is no list of devices" in text
    assert "modinfo gave no answer that can be read (its output has no version)" in text
    assert (
        "dpkg-query gave no answer that can be read (exit status 2: the database is locked)" in text
    )
    assert Fact("versions", "Neuron SDK", "unknown") in found.facts


def test_programs_that_hang_are_ended_with_what_they_started(
    machine, diagnose, monkeypatch, tmp_path
):
    monkeypatch.setattr(programs, "_TIMEOUT_S", 0.5)
    laptop(machine)
    for name in ("neuron-ls", "modinfo", "dpkg-query"):
        machine.program(name, "")
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\nsleep 300 &\necho $! >> {tmp_path}/{name}.pid\nwait\n")
    found = diagnose()
    assert named(found) == {"unread", "no_answer"}
    reasons = [one for one in found.findings.messages("warning") if "no answer within 0.5 s" in one]
    assert len(reasons) == 3
    pids = [int(pid) for one in tmp_path.glob("*.pid") for pid in one.read_text().split()]
    assert len(pids) >= 3
    wait_gone(pids)


class Answer(BaseHTTPRequestHandler):
    """A site that refuses, with any clock, and notes what it was asked for."""

    skew_s, date, age, asked = 0.0, None, None, []

    def do_HEAD(self):
        self.asked.append((self.path, dict(self.headers)))
        self.send_response_only(self.status)
        date = self.date or formatdate(time.time() - self.skew_s, usegmt=True)
        if self.age:
            self.send_header("Age", self.age)
        if date != "none":
            self.send_header("Date", date)
        self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def site():
    """Start a site; its URL."""
    servers = []

    def start(**how):
        handler = type("Site", (Answer,), {"status": 403, "asked": [], **how})
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.05,), daemon=True).start()
        return f"127.0.0.1:{servers[-1].server_port}", handler.asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, set()),
        ({"status": 301}, set()),
        ({"skew_s": 20}, set()),
        ({"skew_s": 120}, {"clock_drifts"}),
        ({"skew_s": -120}, {"clock_drifts"}),
        ({"skew_s": 16 * 60}, {"clock_off"}),
        ({"skew_s": 600, "age": "600"}, set()),  # the answer of a cache
        ({"date": "none"}, set()),
        ({"date": "yesterday"}, set()),
    ],
)
def test_network_and_clock(machine, diagnose, site, how, expected):
    place, asked = site(**how)
    machine.environ |= {"HF_HUB_OFFLINE": "", "AWS_ENDPOINT_URL": f"http://{place}/"}
    machine.environ |= {"HF_ENDPOINT": f"http://someone:secret@{place}", "HF_TOKEN": "hf_secret"}
    found = diagnose()
    assert named(found) == expected
    facts = {fact.name: fact.value for fact in found.facts if fact.section == "network"}
    assert re.match(
        rf"http://{place} answers in \d+\.\d s \({how.get('status', 403)}\)", facts["hub"]
    )
    assert ("clock, by S3" in facts) == ("date" not in how)
    assert len(asked) == 2
    assert not any("secret" in str(one) for one in (asked, found.as_json(), [*found.blocks()]))


@pytest.mark.parametrize("proxy", ["", "me:s3cret@", "http://me:s3cret@", "me:/s3cr@et@"])
def test_no_credentials_of_a_proxy_are_shown(machine, diagnose, monkeypatch, proxy):
    """A proxy need not be a URI."""
    monkeypatch.setenv("https_proxy", f"{proxy}127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    machine.environ["AWS_ENDPOINT_URL"] = "https://127.0.0.1:1"
    found = diagnose()
    assert Fact("network", "proxy, https", "127.0.0.1:1") in found.facts
    assert "no_answer" in named(found)
    assert "s3cr" not in str([found.as_json(), *found.blocks()])


def test_s3_has_the_domain_of_its_region(monkeypatch):
    asked = []
    monkeypatch.setattr(doctor, "_reach", lambda name, site, _: asked.append(site) or ())
    for region in ("us-gov-west-1", "cn-north-1", "eusc-de-east-1"):
        [*doctor._network(Host({"AWS_REGION": region, "HF_HUB_OFFLINE": "1"}))]
    assert asked == [
        "https://s3.us-gov-west-1.amazonaws.com",
        "https://s3.cn-north-1.amazonaws.com.cn",
        "https://s3.eusc-de-east-1.amazonaws.eu",
    ]


def test_sites_that_do_not_answer(machine, diagnose, monkeypatch):
    monkeypatch.setattr(doctor, "_ANSWER_S", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        socket.create_server(("127.0.0.1", 0)) as gone,
    ):
        machine.environ |= {
            "HF_HUB_OFFLINE": "",
            "HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
        }
        machine.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{gone.getsockname()[1]}"
        gone.close()
        found = diagnose()
    assert named(found) == {"no_answer"}
    assert found.ok
    assert len([*found.findings]) == 2


def test_a_probe_that_hangs_or_fails_is_a_line(machine, diagnose, monkeypatch):
    release = threading.Event()

    def hanging(_host):
        yield Fact("machine", "before", "it")
        release.wait(60)

    def failing(_host):
        yield Fact("machine", "also", "this")
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(doctor, "PROBES", {"a": hanging, "b": failing})
    found = examine(Host({}), limit_s=0.2)
    release.set()
    assert [fact.value for fact in found.facts] == ["it", "this"]
    assert named(found) == {"late", "failed"}
    assert found.ok
    assert any("OSError: [Errno 5] Input/output error" in one.message for one in found.findings)


def test_the_model_is_checked_too(machine, diagnose, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(ROOT / "examples/tiny-llama", model)
    (model / "serving.properties").write_text("option.n_positions=-4\n")
    found = diagnose(model=str(model))
    assert Fact("model", str(model), "cannot be served like this") in found.facts
    assert any("n_positions" in text for text in found.findings.messages("error"))


def test_every_finding_has_a_test():
    text = Path(__file__).read_text()
    source = (ROOT / "djl_python_neuronx/doctor.py").read_text()
    for name, advice in doctor.table().items():
        assert f'"{name}"' in source, name
        assert f'"{name}"' in text, name
        assert not (advice.problem + advice.fix).endswith("."), name


def test_this_machine(monkeypatch, capsys):
    """The command, without a network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "verysecret")
    status = cli.main(["doctor", "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert status == (0 if shown["ok"] else 1)
    assert shown["ok"] == (not shown["errors"])
    assert shown["versions"]["python"]["value"] == platform.python_version()
    assert not any("failed" in text for text in shown["warnings"])
    assert cli.main(["doctor"]) == status
    text = capsys.readouterr().out
    assert all(heading in text for heading in ("Versions", "Machine", "Disk", "Network", "Result"))
    assert "verysecret" not in text
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--nonsense"])
    assert ended.value.code == 2

"""The systemd unit: what it names exists here, and its times fit the server's."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from djl_python_neuronx import cli

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "ec2" / "djl-neuronx.service"


def test_the_unit_starts_and_stops_the_server():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # systemd's names have capitals
    unit.read_string(UNIT.read_text())
    service = unit["Service"]
    program, *rest = service["ExecStart"].split()
    assert program.endswith("/bin/djl-neuronx")
    arguments = cli._parser().parse_args(rest)
    assert int(service["TimeoutStopSec"]) > arguments.drain + 2
    assert "-HUP" in service["ExecReload"]
    cache = f"/var/cache/{service['CacheDirectory']}"
    written = re.findall(r"^Environment=\w+=(\S+)$", UNIT.read_text(), re.M)
    assert len(written) == 3
    assert all(path == cache or path.startswith(f"{cache}/") for path in written)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_knows_each_line_of_the_unit(tmp_path):
    text = re.sub("^ExecStart=.*$", "ExecStart=/bin/true", UNIT.read_text(), flags=re.M)
    copy = tmp_path / UNIT.name
    copy.write_text(text.replace("User=djl-neuronx", "User=root"))
    command = ["systemd-analyze", "verify", "--man=no", str(copy)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in ran.stderr.splitlines() if UNIT.name in line]
    assert lines == []
    copy.write_text(f"{text}\n[Service]\nRestartSeconds=3\n")
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "RestartSeconds" in ran.stderr


def test_the_documented_packages_are_those_of_the_images():
    """One place says which versions are known; the commands of docs/install.md repeat them."""
    pins = (ROOT / "docker/sdk-2.25.env").read_text()
    versions = dict(re.findall(r"^(\w+)=(\S+)$", pins, re.MULTILINE))
    page = (ROOT / "docs" / "install.md").read_text()
    installed = dict(re.findall(r"([\w-]+)==([\w.+]+)", page))
    assert installed == {
        name: versions[name.upper().replace("-", "_")]
        for name in ("transformers-neuronx", "torch-neuronx", "neuronx-cc", "libneuronxla")
    }
    assert "aws_neuronx_venv_pytorch_2_9_nxd_inference" in UNIT.read_text()

"""The Kubernetes Deployment and the systemd unit: what they name exists here, and their times fit the server's."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from djl_python_neuronx import cli
from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.config.resolve import read_settings
from djl_python_neuronx.config.sources import LOG_FORMAT

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "ec2" / "djl-neuronx.service"


@pytest.fixture(scope="module")
def deployment() -> dict:
    documents = yaml.safe_load_all((ROOT / "deploy" / "eks" / "deployment.yaml").read_text())
    return {one["kind"]: one["spec"] for one in documents}


def test_the_deployment_fits_the_image(deployment, tmp_path):
    pod = deployment["Deployment"]["template"]["spec"]
    server = pod["containers"][0]
    arguments = cli._parser().parse_args(server["args"])
    assert arguments.command == "serve"
    assert pod["terminationGracePeriodSeconds"] > arguments.drain + 2
    variables = {one["name"]: one["value"] for one in server["env"]}
    assert cli._log_format(variables[LOG_FORMAT]) == "json"
    options = {name: value for name, value in variables.items() if name.startswith("OPTION_")}
    problems = Problems()
    read = read_settings(None, tmp_path, {**options, "OPTION_MODEL_ID": "s3://b/m"}, problems)
    problems.raise_errors()
    assert read.options.compilation == "forbid"
    assert set(variables) == {LOG_FORMAT, *options}
    dockerfile = (ROOT / "docker" / "Dockerfile.nxdi").read_text()
    assert f"USER {pod['securityContext']['runAsUser']}:" in dockerfile
    assert f"EXPOSE {server['ports'][0]['containerPort']}\n" in dockerfile
    assert server["volumeMounts"][0]["mountPath"] == "/tmp"  # the image's only folder for writing


def test_the_probes_wait_for_the_load_and_let_the_server_heal_its_engine(deployment):
    server = deployment["Deployment"]["template"]["spec"]["containers"][0]
    startup = server["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    assert startup["httpGet"]["path"] == server["readinessProbe"]["httpGet"]["path"] == "/ping"
    assert "httpGet" not in server["livenessProbe"]
    ports = {one["name"] for one in server["ports"]}
    assert {server[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "readiness")} <= ports
    assert server["livenessProbe"]["tcpSocket"]["port"] in ports


def test_the_service_finds_the_pods(deployment):
    template = deployment["Deployment"]["template"]
    assert deployment["Service"]["selector"].items() <= template["metadata"]["labels"].items()
    assert deployment["Deployment"]["selector"]["matchLabels"] == template["metadata"]["labels"]


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

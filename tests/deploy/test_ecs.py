"""The task definition and the service of ECS: valid by botocore's model, and fitting image and server."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from djl_python_neuronx import cli
from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.config.resolve import read_settings
from djl_python_neuronx.config.sources import LOG_FORMAT
from djl_python_neuronx.planning import machines

pytest.importorskip("botocore", reason="needs the `s3` extra")
import botocore.session
from botocore.validate import ParamValidator

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile.nxdi").read_text()
API = botocore.session.get_session().get_service_model("ecs")


def read(name: str) -> dict:
    return json.loads((ROOT / "deploy" / "ecs" / name).read_text())


TASK = read("task-definition.json")
SERVICE = read("service.json")
(SERVER,) = TASK["containerDefinitions"]


@pytest.mark.parametrize(
    ("values", "operation"),
    [(TASK, "RegisterTaskDefinition"), (SERVICE, "CreateService")],
)
def test_the_api_takes_the_files(values, operation):
    shape = API.operation_model(operation).input_shape
    report = ParamValidator().validate(values, shape)
    assert not report.has_errors(), report.generate_report()
    wrong = ParamValidator().validate({**values, "stopTimeout": 45}, shape)
    assert "stopTimeout" in wrong.generate_report()


def test_the_container_gets_the_chips_of_its_instance():
    (place,) = TASK["placementConstraints"]
    machine = machines.named(place["expression"].split(" == ")[1])
    devices = [device["hostPath"] for device in SERVER["linuxParameters"]["devices"]]
    assert devices == [f"/dev/neuron{chip}" for chip in range(machine.neuron_devices)]
    host = machines.INSTANCES[machine.instance_type].host_memory_gib
    assert 0.8 < SERVER["memory"] / 1024 / host < 0.95
    assert 0.7 < SERVER["cpu"] / 1024 / machine.cpus < 1


def test_the_server_takes_what_the_task_gives(tmp_path):
    arguments = cli._parser().parse_args(SERVER["command"])
    assert SERVER["stopTimeout"] > arguments.drain + 2
    variables = {one["name"]: one["value"] for one in SERVER["environment"]}
    assert cli._log_format(variables.pop(LOG_FORMAT)) == "json"
    problems = Problems()
    options = read_settings(None, tmp_path, variables, problems).options
    problems.raise_errors()
    assert options.compilation == "forbid"
    secrets = {one["name"] for one in SERVER["secrets"]}
    assert secrets == {"DJL_NEURONX_API_KEY"}
    assert not secrets & variables.keys()


def test_the_container_is_the_images():
    assert SERVER["portMappings"][0]["containerPort"] == int(
        re.search(r"^EXPOSE (\d+)$", DOCKERFILE, re.M)[1]
    )
    check = re.search(r"^HEALTHCHECK .*CMD (\[.*\])$", DOCKERFILE, re.M)[1]
    assert SERVER["healthCheck"]["command"] == ["CMD", *json.loads(check)]
    volumes = {volume["name"] for volume in TASK["volumes"]}
    mounts = {mount["containerPath"]: mount["sourceVolume"] for mount in SERVER["mountPoints"]}
    assert set(mounts.values()) == volumes
    assert mounts.keys() == {"/tmp", "/tmp/cache"}  # the image's only folder for writing


def test_a_load_has_a_quarter_of_an_hour_and_an_update_stops_the_old_task_first():
    probe = SERVER["healthCheck"]
    assert probe["startPeriod"] <= 300  # ECS's limits
    assert probe["retries"] <= 10
    assert probe["timeout"] < probe["interval"] <= 300
    assert probe["startPeriod"] + probe["retries"] * probe["interval"] == 15 * 60
    assert SERVICE["taskDefinition"] == TASK["family"]
    deployment = SERVICE["deploymentConfiguration"]
    assert (deployment["minimumHealthyPercent"], deployment["maximumPercent"]) == (0, 100)

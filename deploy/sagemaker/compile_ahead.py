"""Compile a model beforehand, on another machine."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from deploy.sagemaker.calls import Call
from deploy.sagemaker.plan import (
    BYTES_PER_S,
    DISK_GIB,
    GIB,
    SLOWEST_COMPILE,
    Plan,
    given_variables,
    named_model,
    plan,
)
from djl_python_neuronx.errors import ConfigError
from djl_python_neuronx.planning import machines

INSTANCES = {"ml.m5.12xlarge": 192, "ml.m5.24xlarge": 384, "ml.r5.24xlarge": 768}
"""Instances of processing jobs, to their memory in GiB. Source: EC2, pages of M5 and R5."""
COMPILER_BYTES = 64 * GIB
"""Memory of the compiler besides the weights: an assumption."""


def compile_ahead(arguments: argparse.Namespace) -> list[Call]:
    """The calls that compile on another machine, and write the result to S3.

    A processing job has no Neuron instances. NxD Inference compiles without a device, so a CPU instance does;
    transformers-neuronx needs one, so an EC2 instance (`--ami`) of the type that will serve compiles, and ends itself.

    Raises:
        ConfigError: the machine that is needed is not named.
    """
    # The output records options, and another endpoint has another name.
    environ = given_variables(arguments)
    planned = plan(arguments, environ)
    model = named_model(arguments, environ)
    environ.pop("HF_MODEL_ID", None)
    environ.pop("OPTION_MODEL_ID", None)
    instance = arguments.instance.removeprefix("ml.")
    command = ["compile", model, "--output", arguments.output, "--instance", instance]
    # Twice the slowest estimate: nobody waits for it, and one that is cut off continues with the next graph.
    estimate_s = 2 * SLOWEST_COMPILE * planned.prepared.planned.estimated_compile_s
    longest_s = math.ceil(estimate_s + 4 * planned.model_bytes / BYTES_PER_S) + 3600
    disk_gib = DISK_GIB + math.ceil(3 * planned.model_bytes / GIB)
    if arguments.ami:
        return [_one_shot(arguments, environ, command, longest_s, disk_gib)]
    if planned.prepared.backend == "tnx":
        msg = (
            "transformers-neuronx compiles on a Neuron device, which no processing job has: give --ami (one with the "
            "Neuron driver, Docker and the AWS CLI) and --instance-profile for an EC2 instance, or use the backend "
            "nxdi (--env OPTION_MODEL_LOADER=nxdi)"
        )
        raise ConfigError(msg)
    job = {"ProcessingJobName": f"{arguments.name}-{arguments.version}"}
    machine = {
        "InstanceCount": 1,
        "InstanceType": arguments.compile_instance or _compile_instance(planned),
        "VolumeSizeInGB": disk_gib,
    }
    parameters = {
        **job,
        "ProcessingResources": {"ClusterConfig": machine},
        "StoppingCondition": {"MaxRuntimeInSeconds": longest_s},
        "AppSpecification": {"ImageUri": arguments.image, "ContainerArguments": command},
        "Environment": environ,
        "RoleArn": arguments.role,
    }
    return [
        Call("sagemaker", "create_processing_job", parameters),
        Call("sagemaker", "describe_processing_job", job, {"ProcessingJobStatus": "Completed"}),
    ]


def _compile_instance(planned: Plan) -> str:
    """The smallest instance whose memory holds the weights, whole and cut, and the compiler.

    Raises:
        ConfigError: there is none.
    """
    needed = (planned.prepared.host_bytes or 2 * planned.model_bytes) + COMPILER_BYTES
    for instance, memory_gib in INSTANCES.items():
        if needed <= memory_gib * GIB:
            return instance
    msg = f"the compile needs about {needed / GIB:.0f} GiB of memory; name an instance with it by --compile-instance"
    raise ConfigError(msg)


def _one_shot(
    arguments: argparse.Namespace,
    environ: Mapping[str, str],
    command: Sequence[str],
    longest_s: int,
    disk_gib: int,
) -> Call:
    """An EC2 instance that runs the image once and terminates, whatever comes of it; its log goes to S3."""
    if not arguments.instance_profile:
        msg = f"--ami {arguments.ami}: give --instance-profile too, with the role that reads and writes S3"
        raise ConfigError(msg)
    instance = machines.known(arguments.instance)
    devices = [
        f"--device=/dev/neuron{number}" for number in range(instance.devices if instance else 0)
    ]
    variables = [f"--env={name}={value}" for name, value in environ.items()]
    run = ["docker", "run", "--rm", *devices, *variables, arguments.image, *command]
    registry = arguments.image.partition("/")[0]
    log = shlex.quote(f"{arguments.output.rstrip('/')}.log")
    script = f"""#!/bin/bash
shutdown -P +{math.ceil(longest_s / 60)}
exec >/var/log/compile.log 2>&1
finish() {{
    aws s3 cp /var/log/compile.log {log}
    shutdown -P now
}}
trap finish EXIT
aws ecr get-login-password --region {arguments.region} | docker login --username AWS --password-stdin {registry}
{shlex.join(run)}
"""
    parameters: dict[str, Any] = {
        "ImageId": arguments.ami,
        "InstanceType": arguments.instance.removeprefix("ml."),
        "MinCount": 1,
        "MaxCount": 1,
        "UserData": script,
        "IamInstanceProfile": {"Name": arguments.instance_profile},
        "InstanceInitiatedShutdownBehavior": "terminate",
        # The container is one hop further from the credentials of the instance.
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 2},
        "BlockDeviceMappings": [
            {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": disk_gib, "VolumeType": "gp3"}}
        ],
    }
    return Call("ec2", "run_instances", parameters)

#!/usr/bin/env python3
"""Creates, updates and deletes a SageMaker endpoint with a model on Neuron instances; compiles the model beforehand.

Every command first plans the model with the package (`djl-neuronx check`) and holds each call to botocore's model of
the API, so that what cannot work is refused before anything is created. `--dry-run` prints the calls as JSON and needs
neither credentials nor network, if `--plan` names a local folder. README.md has the order of the commands.
"""

from __future__ import annotations

import argparse
import json
import math
import posixpath
import re
import shlex
import string
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from dashboard import dashboard, namespace

from djl_python_neuronx.artifacts import s3
from djl_python_neuronx.config import sources
from djl_python_neuronx.errors import ArtifactNotFoundError, ConfigError, ServingError
from djl_python_neuronx.loading.check import check_all
from djl_python_neuronx.loading.prepare import Prepared
from djl_python_neuronx.planning import machines, memory
from djl_python_neuronx.telemetry import NAMESPACE

VARIANT = "main"
GIB = 2**30
BYTES_PER_S = 100e6
"""Assumed speed of the download from S3, and of the load from the volume to the device."""
START_S = 300
"""Assumed time of everything else: imports, tokenizer, warm-up, and the container's start."""
FRONT_BYTES = 2 * GIB
"""Host memory of the front process: an assumption."""
SLOWEST_COMPILE = 2
"""Real compile times are up to twice the estimate, see `plan.COMPILE_BASIS`."""
WEIGHT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
EBS_FAMILIES = ("inf2",)
"""Instances without disks of their own, whose volume has a size to choose. Source: EC2, instance types."""
DISK_GIB = 32
"""Room on the volume besides the model, as downloaded and as a container cuts or converts it."""
BUSY = 0.7
"""Default target of the autoscaling: this share of an instance's or copy's slots."""
BACKLOG = 4
"""Default target with asynchronous requests: requests in S3 for each instance."""
READ_BY_OTHERS = ("SERVING_", "HF_", "AWS_", "NEURON_", "DJL_", "OMP_", "FI_", "TRANSFORMERS_")
"""Prefixes of variables that libraries or DJL Serving read."""
TRANSITIONS = frozenset({"Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting"})
COMPILE_INSTANCES = {"ml.m5.12xlarge": 192, "ml.m5.24xlarge": 384, "ml.r5.24xlarge": 768}
"""Instances of processing jobs, to their memory in GiB. Source: EC2, pages of M5 and R5."""
COMPILER_BYTES = 64 * GIB
"""Memory of the compiler besides the weights: an assumption."""
POLICY_ARN = "${PolicyARN}"
"""Stands for the ARN in the answer to the call before."""
POLICIES = Path(__file__).parent / "policies"
SERVERLESS = (
    "serverless inference has no accelerators: a ServerlessConfig has memory and concurrency, and no instance type. "
    "Choose --instance ml.inf2.xlarge or larger; --async-output with --min-instances 0 costs nothing while idle"
)


@dataclass(frozen=True)
class Call:
    """One call of the API."""

    service: str
    operation: str
    """Name of boto3's method."""
    parameters: dict[str, Any]
    until: dict[str, str] | None = None
    """Repeat a `describe_…` until its status has settled; then these fields must have these values."""


@dataclass(frozen=True)
class Plan:
    """What the package says about the model on the instance."""

    prepared: Prepared
    model_bytes: int
    compile_s: float
    """0 if a start compiles nothing."""
    copies: int
    """Copies of the model in one container."""

    @property
    def slots(self) -> int:
        """Sequences that one container generates at once."""
        return self.copies * (self.prepared.options.max_rolling_batch_size or 1)


@cache
def _service(name: str) -> Any:
    from botocore.session import get_session

    return get_session().get_service_model(name)


def _limits(shape: str, member: str) -> tuple[int, int]:
    """The least and the greatest value of a number of SageMaker's API."""
    metadata = _service("sagemaker").shape_for(shape).members[member].metadata
    return metadata["min"], metadata["max"]


def validate(call: Call) -> None:
    """Hold a call to botocore's model of the API.

    Raises:
        ConfigError: a parameter is missing, unknown, of another type, out of its range or no value of its enumeration.
    """
    from botocore import xform_name
    from botocore.validate import ParamValidator

    service = _service(call.service)
    name = next(name for name in service.operation_names if xform_name(name) == call.operation)
    shape = service.operation_model(name).input_shape
    problems = [ParamValidator().validate(call.parameters, shape).generate_report()]
    problems += _out_of_range(call.parameters, shape, name)
    if text := "; ".join(filter(None, problems)):
        msg = f"{call.service} {name}: {text}"
        raise ConfigError(msg)


def _out_of_range(value: Any, shape: Any, where: str) -> Iterator[str]:
    """What botocore's validator leaves to the service, for a value and all that is in it."""
    if shape.type_name == "structure":
        for name in value.keys() & shape.members.keys():
            yield from _out_of_range(value[name], shape.members[name], f"{where}.{name}")
    elif shape.type_name == "list":
        for entry in value:
            yield from _out_of_range(entry, shape.member, where)
    elif isinstance(value, str):
        if shape.enum and value not in shape.enum:
            yield f"{where} does not allow {value!r}"
        yield from _wrong_text(value, shape.metadata, where)
    elif isinstance(value, (int, float)) and value > shape.metadata.get("max", math.inf):
        yield f"{where} is {value}, at most {shape.metadata['max']} is allowed"


def _wrong_text(value: str, metadata: Mapping[str, Any], where: str) -> Iterator[str]:
    if len(value) > metadata.get("max", math.inf):
        yield f"{where} has {len(value)} characters, at most {metadata['max']} are allowed"
    with suppress(re.error):  # the patterns are Java's
        if not re.fullmatch(metadata.get("pattern", ".*"), value, re.DOTALL):
            yield f"{where} does not allow {value!r}; expected {metadata['pattern']}"


def environment(arguments: argparse.Namespace) -> dict[str, str]:
    """The variables of the endpoint's container: those given, with names for the model and its metrics."""
    given = given_variables(arguments)
    if not {"OPTION_MODEL_NAME", "OPTION_SERVED_MODEL_NAME"} & given.keys():
        given["OPTION_MODEL_NAME"] = arguments.name
    given.setdefault("OPTION_CLOUDWATCH_NAMESPACE", namespace(arguments.name))
    return given


def given_variables(arguments: argparse.Namespace) -> dict[str, str]:
    """The variables of the command line.

    Raises:
        ConfigError: no program in the image reads a variable.
    """
    given = dict(arguments.env)
    for name in given:
        known = name in sources.OPTION_VARIABLES or name.startswith(("OPTION_", *READ_BY_OTHERS))
        if not known and name != sources.API_KEYS:
            msg = f"nothing in the image reads the variable {name}; an option is set by OPTION_<NAME> (docs/options.md)"
            raise ConfigError(msg)
    return given


def plan(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Plan:
    """Plan the model of a command for its instance.

    Raises:
        ConfigError: the instance type is none of SageMaker's or of the package's, or the package refuses the plan.
    """
    instance = arguments.instance
    allowed = _service("sagemaker").shape_for("ProductionVariantInstanceType").enum
    if machines.known(instance) is None or instance not in allowed:
        known = ", ".join(name for name in allowed if machines.known(name))
        msg = f"--instance {instance!r} is not a Neuron instance of SageMaker's endpoints; expected one of {known}"
        raise ConfigError(msg)
    machine = machines.named(instance)
    # In the container this is the model's folder; here another folder stands for it.
    here = {
        name: value
        for name, value in environ.items()
        if value.rstrip("/") != str(sources.MODEL_DIR)
    }
    with TemporaryDirectory() as folder:
        target, overrides = _target(arguments, environ, Path(folder))
        placement = check_all([target], environ=here, overrides=overrides, machine=machine)
    prepared = placement.reports[0].prepared
    if not placement.ok or prepared is None:
        problems = "\n".join(placement.findings.messages("error"))
        msg = f"this cannot be served on {instance}:\n{problems}"
        raise ConfigError(msg)
    if prepared.case.on_cpu:
        msg = f"model_loader=cpu on {instance} would leave its Neuron devices idle; leave OPTION_MODEL_LOADER out"
        raise ConfigError(msg)
    compiled = prepared.artifact.compiled is not None or prepared.options.compilation == "forbid"
    return Plan(
        prepared,
        model_bytes=int(arguments.model_gib * GIB)
        if arguments.model_gib
        else _model_bytes(prepared),
        compile_s=0 if compiled else SLOWEST_COMPILE * prepared.planned.estimated_compile_s,
        copies=len(placement.placed[0]),
    )


def _target(
    arguments: argparse.Namespace, environ: Mapping[str, str], folder: Path
) -> tuple[str | None, dict[str, str]]:
    """What `check` reads, with overrides: of a prefix in S3 its `serving.properties` too, by way of `folder`.

    Raises:
        ServingError: S3 refuses, or the model data are an archive.
    """
    data = arguments.model_data
    if arguments.plan or not data:
        return arguments.plan or environ.get("HF_MODEL_ID"), {}
    if data.endswith(".tar.gz"):
        msg = (
            f"the content of {data} is not looked into; give --plan, a folder with its config.json"
        )
        raise ConfigError(msg)
    try:
        content = s3.read(data, sources.FILE_NAME, sources.environment())
    except ArtifactNotFoundError:
        return data, {}
    file = folder / sources.FILE_NAME
    file.write_bytes(content)
    named = {setting.name: str(setting.value) for setting in sources.from_file(folder)}
    model = named.get("model_id", ".")
    if model.startswith("."):  # of the prefix, such as SageMaker Neo's
        model = posixpath.normpath(posixpath.join(data.removeprefix("s3://"), model))
        model = f"s3://{model}"
    return str(file), {"model_id": model}


def _model_bytes(prepared: Prepared) -> int:
    """Bytes of the weights in the checkpoint or, if they are more, of the weights cut for the cores."""
    case = prepared.case
    if case.model.num_parameters is None:
        msg = f"the size of a {case.model.model_type} model is not known; give --model-gib, the size of its files"
        raise ConfigError(msg)
    whole = case.model.num_parameters * WEIGHT_BYTES[case.model.dtype or "float32"]
    whole += 4 * (case.draft.num_parameters or 0) if case.draft else 0
    short = replace(memory.Load.of(case), num_slots=1, max_model_len=1)  # hardly any KV cache
    share = memory.needed(
        case.model, short, degree=case.degree, core_memory_bytes=0, backend=case.backend
    )
    return max(whole, (share.weights + share.padding) * case.degree)


def timeouts(planned: Plan, *, downloads_itself: bool) -> dict[str, int]:
    """The two timeouts of a start, with SageMaker's names.

    `downloads_itself`: there is no model data, and the container fetches the model.

    Raises:
        ConfigError: SageMaker allows no timeout that is as long as the start may take.
    """
    transfer_s = planned.model_bytes / BYTES_PER_S
    parts = {
        "downloading": transfer_s,
        "loading": planned.copies * transfer_s,
        "compiling": planned.compile_s,
    }
    before = 0.0 if downloads_itself else parts["downloading"]
    times = {
        "ModelDataDownloadTimeoutInSeconds": before,
        "ContainerStartupHealthCheckTimeoutInSeconds": sum(parts.values()) - before,
    }
    found = {}
    for name, estimate in times.items():
        least, most = _limits("ProductionVariant", name)
        found[name] = max(least, math.ceil(estimate + START_S))
        if found[name] > most:
            words = ", ".join(f"{part} {seconds:.0f} s" for part, seconds in parts.items())
            msg = (
                f"{name} would have to be {found[name]} s, and SageMaker allows {most} s ({words}). Compile beforehand "
                "(deploy.py compile) and set OPTION_COMPILATION=forbid, or divide the model among fewer copies"
            )
            raise ConfigError(msg)
    return found


def model_call(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Call:
    """Create the model: image, model data and variables."""
    container: dict[str, Any] = {"Image": arguments.image, "Environment": dict(environ)}
    if data := arguments.model_data:
        if data.endswith(".tar.gz"):
            kind, compression = "S3Object", "Gzip"
        else:
            # A prefix needs no archive to be written, and none to be unpacked at each start.
            kind, compression, data = "S3Prefix", "None", data.rstrip("/") + "/"
        source = {"S3Uri": data, "S3DataType": kind, "CompressionType": compression}
        container["ModelDataSource"] = {"S3DataSource": source}
    name = f"{arguments.name}-{arguments.version}"
    parameters = {
        "ModelName": name,
        "ExecutionRoleArn": arguments.role,
        "PrimaryContainer": container,
    }
    if arguments.isolated:
        remote = [
            name for name, value in environ.items() if "s3://" in value or name in sources.HUB
        ]
        if remote or not data:
            msg = f"--isolated: the container has no network, and fetches {', '.join(remote) or 'the model'} itself"
            raise ConfigError(msg)
        parameters["EnableNetworkIsolation"] = True
    return Call("sagemaker", "create_model", parameters)


def endpoint_config_call(arguments: argparse.Namespace, planned: Plan) -> Call:
    """Create the configuration of the endpoint: instances, timeouts, disk; and S3 for asynchronous requests."""
    name = f"{arguments.name}-{arguments.version}"
    variant: dict[str, Any] = {
        "VariantName": VARIANT,
        "InstanceType": arguments.instance,
        "InitialInstanceCount": max(1, arguments.min_instances),
        **timeouts(planned, downloads_itself=not arguments.model_data),
        "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
    }
    parameters: dict[str, Any] = {"EndpointConfigName": name, "ProductionVariants": [variant]}
    containers = 1
    if arguments.copies:
        containers = _copies_per_instance(arguments.instance, needs(arguments.instance, planned))
        least = math.ceil(arguments.copies / containers)
        most = math.ceil(max(arguments.copies, arguments.max_copies) / containers)
        variant["InitialInstanceCount"] = least
        scaling = {"Status": "ENABLED", "MinInstanceCount": least, "MaxInstanceCount": most}
        variant["ManagedInstanceScaling"] = scaling
        parameters["ExecutionRoleArn"] = arguments.role
    else:
        variant |= {"ModelName": name, "InitialVariantWeight": 1.0}
    if planned.prepared.machine.family in EBS_FAMILIES:
        size = (1 + containers) * planned.model_bytes
        variant["VolumeSizeInGB"] = DISK_GIB + math.ceil(size / GIB)
    if arguments.ami_version:
        variant["InferenceAmiVersion"] = arguments.ami_version
    if arguments.async_output:
        parameters["AsyncInferenceConfig"] = {
            "OutputConfig": {"S3OutputPath": arguments.async_output},
            "ClientConfig": {"MaxConcurrentInvocationsPerInstance": planned.slots},
        }
    return Call("sagemaker", "create_endpoint_config", parameters)


def needs(instance: str, planned: Plan) -> dict[str, int]:
    """What one copy of an inference component needs: whole chips, and the memory of the host that a load takes.

    Raises:
        ConfigError: the instance has less.
    """
    cores = machines.FAMILIES[planned.prepared.machine.family or ""].cores_per_device
    replicas = planned.prepared.options.replicas
    groups = 1 if replicas == "max" else replicas
    host_bytes = (planned.prepared.host_bytes or 2 * planned.model_bytes) + FRONT_BYTES
    found = {
        "NumberOfAcceleratorDevicesRequired": math.ceil(
            planned.prepared.need.cores * groups / cores
        ),
        "MinMemoryRequiredInMb": math.ceil(host_bytes / 2**20),
    }
    if not _copies_per_instance(instance, found):
        there = (
            f"{instance} has {machines.INSTANCES[instance.removeprefix('ml.')].host_memory_gib} GiB"
        )
        msg = f"a copy needs {host_bytes / GIB:.1f} GiB of the host's memory to load, {there}; choose a larger instance"
        raise ConfigError(msg)
    return found


def _copies_per_instance(instance: str, needed: Mapping[str, int]) -> int:
    there = machines.INSTANCES[instance.removeprefix("ml.")]
    by_chips = there.devices // needed["NumberOfAcceleratorDevicesRequired"]
    return min(by_chips, there.host_memory_gib * 1024 // needed["MinMemoryRequiredInMb"])


def component(arguments: argparse.Namespace, planned: Plan) -> dict[str, Any]:
    """Specification of the inference component."""
    return {
        "ModelName": f"{arguments.name}-{arguments.version}",
        "ComputeResourceRequirements": needs(arguments.instance, planned),
        "StartupParameters": timeouts(planned, downloads_itself=not arguments.model_data),
    }


def deploy(arguments: argparse.Namespace) -> list[Call]:
    """The calls that make a new endpoint, its autoscaling and its dashboard."""
    environ = environment(arguments)
    planned = plan(arguments, environ)
    name = arguments.name
    config = endpoint_config_call(arguments, planned)
    endpoint = {"EndpointName": name, "EndpointConfigName": config.parameters["EndpointConfigName"]}
    calls = [
        model_call(arguments, environ),
        config,
        Call("sagemaker", "create_endpoint", endpoint),
        _endpoint_settled(endpoint),
    ]
    if arguments.copies:
        parameters = {
            "InferenceComponentName": name,
            "EndpointName": name,
            "VariantName": VARIANT,
            "Specification": component(arguments, planned),
            "RuntimeConfig": {"CopyCount": arguments.copies},
        }
        calls += [
            Call("sagemaker", "create_inference_component", parameters),
            _component_settled(name),
        ]
    body = dashboard(name, planned.prepared.options.model_names[0], arguments.region)
    shown = {"DashboardName": name, "DashboardBody": json.dumps(body)}
    return [*calls, *autoscaling(arguments, planned), Call("cloudwatch", "put_dashboard", shown)]


def _endpoint_settled(endpoint: dict[str, str]) -> Call:
    # An update that failed was rolled back: it is in service with the earlier configuration.
    until = {"EndpointStatus": "InService", "EndpointConfigName": endpoint["EndpointConfigName"]}
    return Call("sagemaker", "describe_endpoint", {"EndpointName": endpoint["EndpointName"]}, until)


def _component_settled(name: str) -> Call:
    until = {"InferenceComponentStatus": "InService"}
    return Call(
        "sagemaker", "describe_inference_component", {"InferenceComponentName": name}, until
    )


def scalable(arguments: argparse.Namespace) -> dict[str, str]:
    """What is scaled: the instances of the variant, or the copies of the inference component."""
    if arguments.copies:
        resource = f"inference-component/{arguments.name}"
        dimension = "sagemaker:inference-component:DesiredCopyCount"
    else:
        resource = f"endpoint/{arguments.name}/variant/{VARIANT}"
        dimension = "sagemaker:variant:DesiredInstanceCount"
    return {"ServiceNamespace": "sagemaker", "ResourceId": resource, "ScalableDimension": dimension}


def autoscaling(arguments: argparse.Namespace, planned: Plan) -> list[Call]:
    """Target tracking of the requests in a container, or of our own metric; none with one instance or copy."""
    least = arguments.copies or arguments.min_instances
    most = arguments.max_copies if arguments.copies else arguments.max_instances
    if most <= least:
        return []
    service, target, metric = "application-autoscaling", scalable(arguments), arguments.scale_on
    busy, queue = round(BUSY * planned.slots, 1), {"EndpointName": arguments.name}
    if arguments.async_output:
        busy, metric = BACKLOG, "backlog"
        tracked = _customized("AWS/SageMaker", "ApproximateBacklogSizePerInstance", queue)
    elif metric == "concurrency":
        kind = "InferenceComponentConcurrentRequestsPerCopy"
        if not arguments.copies:
            kind = "VariantConcurrentRequestsPerModel"
        predefined = {"PredefinedMetricType": f"SageMaker{kind}HighResolution"}
        tracked = {"PredefinedMetricSpecification": predefined}
    else:
        model = {"model": planned.prepared.options.model_names[0]}
        tracked = _customized(namespace(arguments.name), f"{NAMESPACE}_{metric}", model)
    policy = {
        "PolicyName": f"{arguments.name}-{metric}",
        **target,
        "PolicyType": "TargetTrackingScaling",
        "TargetTrackingScalingPolicyConfiguration": {
            "TargetValue": float(arguments.target_value or busy),
            **tracked,
            # A new one takes requests after its start.
            "ScaleOutCooldown": sum(timeouts(planned, downloads_itself=False).values()),
            "ScaleInCooldown": 600,
        },
    }
    calls = [
        Call(
            service,
            "register_scalable_target",
            {**target, "MinCapacity": least, "MaxCapacity": most},
        ),
        Call(service, "put_scaling_policy", policy),
    ]
    return calls if least else [*calls, *_from_zero(arguments)]


def _from_zero(arguments: argparse.Namespace) -> list[Call]:
    """An instance for the first request: target tracking would wait for more than its target.

    Source: SageMaker's developer guide, "Autoscale an asynchronous endpoint".
    """
    name = f"{arguments.name}-from-zero"
    step = {"MetricIntervalLowerBound": 0.0, "ScalingAdjustment": 1}
    policy = {
        "PolicyName": name,
        **scalable(arguments),
        "PolicyType": "StepScaling",
        "StepScalingPolicyConfiguration": {
            "AdjustmentType": "ChangeInCapacity",
            "MetricAggregationType": "Average",
            "Cooldown": 300,
            "StepAdjustments": [step],
        },
    }
    alarm = {
        "AlarmName": name,
        "Namespace": "AWS/SageMaker",
        "MetricName": "HasBacklogWithoutCapacity",
        "Dimensions": [{"Name": "EndpointName", "Value": arguments.name}],
        "Statistic": "Average",
        "Period": 60,
        "EvaluationPeriods": 2,
        "DatapointsToAlarm": 2,
        "Threshold": 1.0,
        "ComparisonOperator": "GreaterThanOrEqualToThreshold",
        "TreatMissingData": "missing",
        "AlarmActions": [POLICY_ARN],
    }
    return [
        Call("application-autoscaling", "put_scaling_policy", policy),
        Call("cloudwatch", "put_metric_alarm", alarm),
    ]


def _customized(space: str, metric: str, dimensions: Mapping[str, str]) -> dict[str, Any]:
    specification = {
        "Namespace": space,
        "MetricName": metric,
        "Dimensions": [{"Name": name, "Value": value} for name, value in dimensions.items()],
        "Statistic": "Average",
    }
    return {"CustomizedMetricSpecification": specification}


def update(arguments: argparse.Namespace) -> list[Call]:
    """The calls that bring a new version into an endpoint that serves; SageMaker rolls back one that does not start."""
    environ = environment(arguments)
    planned = plan(arguments, environ)
    once_s = sum(timeouts(planned, downloads_itself=not arguments.model_data).values())
    least, most = _limits("RollingUpdatePolicy", "MaximumExecutionTimeoutInSeconds")

    def at_most(batches: int) -> int:
        return min(most, max(least, batches * (once_s + 2 * START_S)))

    def one_by_one(unit: str, number: int) -> dict[str, Any]:
        return {
            "RollingUpdatePolicy": {
                "MaximumBatchSize": {"Type": unit, "Value": 1},
                "WaitIntervalInSeconds": 60,
                "MaximumExecutionTimeoutInSeconds": at_most(number),
            }
        }

    if arguments.copies:
        parameters = {
            "InferenceComponentName": arguments.name,
            "Specification": component(arguments, planned),
            "DeploymentConfig": one_by_one(
                "COPY_COUNT", max(arguments.copies, arguments.max_copies)
            ),
        }
        return [
            model_call(arguments, environ),
            Call("sagemaker", "update_inference_component", parameters),
            _component_settled(arguments.name),
        ]
    blue_green = {
        "BlueGreenUpdatePolicy": {
            "TrafficRoutingConfiguration": {"Type": "ALL_AT_ONCE", "WaitIntervalInSeconds": 0},
            "TerminationWaitInSeconds": 0,
            "MaximumExecutionTimeoutInSeconds": at_most(1),
        }
    }
    rolling = one_by_one("INSTANCE_COUNT", max(1, arguments.min_instances, arguments.max_instances))
    config = endpoint_config_call(arguments, planned)
    endpoint = {
        "EndpointName": arguments.name,
        "EndpointConfigName": config.parameters["EndpointConfigName"],
    }
    parameters = {
        **endpoint,
        "RetainAllVariantProperties": True,  # the autoscaling's number of instances
        "DeploymentConfig": rolling if arguments.strategy == "rolling" else blue_green,
    }
    return [
        model_call(arguments, environ),
        config,
        Call("sagemaker", "update_endpoint", parameters),
        _endpoint_settled(endpoint),
    ]


def delete(arguments: argparse.Namespace) -> list[Call]:
    """The calls that delete everything that the other commands have made, but what they wrote to S3."""
    name = arguments.name
    calls = []
    if arguments.scaled:
        calls.append(
            Call("application-autoscaling", "deregister_scalable_target", scalable(arguments))
        )
    if arguments.from_zero:
        alarm = {"AlarmNames": [f"{name}-from-zero"]}
        calls.append(Call("cloudwatch", "delete_alarms", alarm))
    if arguments.copies:
        component = {"InferenceComponentName": name}
        calls += [
            Call("sagemaker", "delete_inference_component", component),
            Call("sagemaker", "describe_inference_component", component, {}),
        ]
    calls.append(Call("sagemaker", "delete_endpoint", {"EndpointName": name}))
    for version in arguments.versions:
        config = {"EndpointConfigName": f"{name}-{version}"}
        calls.append(Call("sagemaker", "delete_endpoint_config", config))
        calls.append(Call("sagemaker", "delete_model", {"ModelName": f"{name}-{version}"}))
    return [*calls, Call("cloudwatch", "delete_dashboards", {"DashboardNames": [name]})]


def compile_ahead(arguments: argparse.Namespace) -> list[Call]:
    """The call that compiles on another machine, and writes the result to S3.

    A processing job has no Neuron instances. NxD Inference compiles without a device, so a CPU instance does;
    transformers-neuronx needs one, so an EC2 instance of the type that will serve compiles, and ends itself.
    """
    environ = given_variables(
        arguments
    )  # the output records options, and another endpoint has another name
    planned = plan(arguments, environ)
    model = arguments.model_data or environ.get("HF_MODEL_ID")
    if not model:
        msg = "nothing names the model; give --model-data s3://… or --env HF_MODEL_ID=owner/name"
        raise ConfigError(msg)
    environ.pop("HF_MODEL_ID", None)
    instance = arguments.instance.removeprefix("ml.")
    command = ["compile", model, "--output", arguments.output, "--instance", instance]
    # Twice the slowest estimate: nobody waits for it, and one that is cut off continues with the next graph.
    estimate_s = 2 * SLOWEST_COMPILE * planned.prepared.planned.estimated_compile_s
    longest_s = math.ceil(estimate_s + 4 * planned.model_bytes / BYTES_PER_S) + 3600
    disk_gib = DISK_GIB + math.ceil(3 * planned.model_bytes / GIB)
    if planned.prepared.backend == "tnx":
        return [_one_shot(arguments, environ, command, longest_s, disk_gib)]
    machine = {
        "InstanceCount": 1,
        "InstanceType": arguments.compile_instance or _compile_instance(planned),
        "VolumeSizeInGB": disk_gib,
    }
    parameters = {
        "ProcessingJobName": f"{arguments.name}-{arguments.version}",
        "ProcessingResources": {"ClusterConfig": machine},
        "StoppingCondition": {"MaxRuntimeInSeconds": longest_s},
        "AppSpecification": {"ImageUri": arguments.image, "ContainerArguments": command},
        "Environment": environ,
        "RoleArn": arguments.role,
    }
    return [Call("sagemaker", "create_processing_job", parameters)]


def _compile_instance(planned: Plan) -> str:
    """The smallest instance whose memory holds the weights, whole and cut, and the compiler.

    Raises:
        ConfigError: there is none.
    """
    needed = (planned.prepared.host_bytes or 2 * planned.model_bytes) + COMPILER_BYTES
    for instance, memory_gib in COMPILE_INSTANCES.items():
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
    if not arguments.ami or not arguments.instance_profile:
        msg = (
            "transformers-neuronx compiles on a Neuron device, which no processing job has: give --ami (one with the "
            "Neuron driver, Docker and the AWS CLI) and --instance-profile for an EC2 instance, or use the backend "
            "nxdi (--env OPTION_MODEL_LOADER=nxdi)"
        )
        raise ConfigError(msg)
    instance = machines.known(arguments.instance)
    devices = [
        f"--device=/dev/neuron{number}" for number in range(instance.devices if instance else 0)
    ]
    variables = [f"--env={name}={value}" for name, value in environ.items()]
    run = ["docker", "run", "--rm", *devices, *variables, arguments.image, *command]
    registry = arguments.image.partition("/")[0]
    region = shlex.quote(arguments.region)
    script = f"""#!/bin/bash
shutdown -P +{math.ceil(longest_s / 60)}
exec >/var/log/compile.log 2>&1
trap 'aws s3 cp /var/log/compile.log {shlex.quote(arguments.output.rstrip("/") + ".log")}; shutdown -P now' EXIT
aws ecr get-login-password --region {region} | docker login --username AWS --password-stdin {shlex.quote(registry)}
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
    if arguments.subnet:
        parameters["SubnetId"] = arguments.subnet
    return Call("ec2", "run_instances", parameters)


def policy(arguments: argparse.Namespace) -> dict[str, Any]:
    """One of the IAM policies, for this endpoint, image and S3 prefixes."""
    registry = re.fullmatch(
        r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com/([^:@]+)([:@].+)?", arguments.image
    )
    if registry is None:
        msg = f"--image {arguments.image!r} is not an image of ECR: ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG"
        raise ConfigError(msg)
    filled = {
        "Account": arguments.role.split(":")[4],
        "CompileRole": arguments.compile_role or arguments.role,
        "ExecutionRole": arguments.role,
        "ImageAccount": registry[1],
        "ImageRegion": registry[2],
        "Name": arguments.name,
        "Region": arguments.region,
        "Repository": registry[3],
    }
    for name, uri in (("Model", arguments.model_data), ("Output", arguments.output)):
        place = re.fullmatch(r"s3://([^/*?]+)/([^*?]+?)(/[^/]+\.tar\.gz|/)?", uri)
        if place is None:
            msg = f"{uri!r} is not s3://bucket/folder, and rights to a whole bucket are not given"
            raise ConfigError(msg)
        filled |= {f"{name}Bucket": place[1], f"{name}Key": place[2]}
    text = (POLICIES / f"{arguments.policy}.json").read_text()
    return json.loads(string.Template(text).substitute(filled))  # type: ignore[no-any-return]


def run(calls: Sequence[Call], region: str) -> None:
    """Make the calls in order, and print the name of each.

    Raises:
        ServingError: an endpoint or component settled in another state than the one that is expected.
    """
    import boto3

    clients: dict[str, Any] = {}
    answer: dict[str, Any] = {}
    for call in calls:
        client = clients.setdefault(call.service, boto3.client(call.service, region_name=region))
        print(f"{call.service} {call.operation}", file=sys.stderr)
        if call.until is not None:
            _settle(client, call)
            continue
        parameters = dict(call.parameters)
        if parameters.get("AlarmActions") == [POLICY_ARN]:
            parameters["AlarmActions"] = [answer["PolicyARN"]]
        answer = getattr(client, call.operation)(**parameters)


def _settle(client: Any, call: Call, pause_s: float = 15) -> None:
    from botocore.exceptions import ClientError

    while True:
        try:
            seen = getattr(client, call.operation)(**call.parameters)
        except ClientError as error:
            if not call.until and error.response["Error"]["Code"] == "ValidationException":
                return  # it was to be deleted, and is gone
            raise
        status = next(value for name, value in seen.items() if name.endswith("Status"))
        if status not in TRANSITIONS:
            break
        time.sleep(pause_s)
    expected = call.until or {}
    if any(seen[name] != value for name, value in expected.items()) or not expected:
        reason = seen.get("FailureReason", "no reason is given")
        msg = f"{call.parameters}: expected {expected}, found {status}: {reason}"
        raise ServingError(msg)


def _variable(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        msg = f"{text!r} is not NAME=VALUE"
        raise argparse.ArgumentTypeError(msg)
    return name, value


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True)
    made = {
        name: commands.add_parser(name, help=text, description=text)
        for name, text in (
            ("deploy", "create an endpoint"),
            ("update", "bring a new version into an endpoint"),
            ("delete", "delete an endpoint with its versions"),
            ("compile", "compile a model into S3"),
            ("policy", "print an IAM policy"),
        )
    }
    for name, command in made.items():
        add = command.add_argument
        add(
            "--name",
            required=True,
            help="name of the endpoint, and of everything that belongs to it",
        )
        add("--region", required=True)
        if name != "policy":
            add("--dry-run", action="store_true", help="print the calls as JSON")
        if name in {"deploy", "update", "compile"}:
            _add_model(add)
        if name in {"deploy", "update"}:
            _add_endpoint(add)
        if name in {"deploy", "update", "delete"}:
            add(
                "--copies",
                type=int,
                default=0,
                metavar="N",
                help="serve N copies as an inference component",
            )
    made["update"].add_argument(
        "--strategy", choices=["blue-green", "rolling"], default="blue-green"
    )
    add = made["delete"].add_argument
    add(
        "--version",
        action="append",
        dest="versions",
        default=[],
        help="a version to delete; may be repeated",
    )
    add("--scaled", action="store_true", help="it was created with a maximum, so that it is scaled")
    add("--from-zero", action="store_true", help="it was created with --min-instances 0")
    add = made["compile"].add_argument
    add("--output", required=True, metavar="s3://…", help="where the compiled model is written")
    add("--compile-instance", help="of the processing job (default: by memory)")
    add("--ami", help="of the EC2 instance, with the Neuron driver, Docker and the AWS CLI")
    add("--instance-profile", help="of the EC2 instance")
    add("--subnet", help="of the EC2 instance")
    add = made["policy"].add_argument
    add("policy", choices=sorted(path.stem for path in POLICIES.glob("*.json")))
    for name in ("image", "role", "model-data", "output"):
        add(f"--{name}", required=True)
    add("--compile-role", help="of the compile, or of its instance profile (default: --role)")
    return top


def _add_model(add: Any) -> None:
    add("--image", required=True, help="image of docker/ in ECR")
    add("--instance", required=True, help="instance that serves, such as ml.inf2.8xlarge")
    add("--role", required=True, help="ARN of the execution role")
    add("--version", default="1", help="name of this model and configuration (%(default)s)")
    add(
        "--model-data",
        metavar="s3://…",
        help="prefix with the model's files, or a .tar.gz; without: HF_MODEL_ID",
    )
    add(
        "--env",
        action="append",
        type=_variable,
        default=[],
        metavar="NAME=VALUE",
        help="variable of the container",
    )
    add(
        "--plan",
        metavar="TARGET",
        help="folder that the plan reads in place of --model-data; config.json suffices",
    )
    add(
        "--model-gib",
        type=float,
        metavar="SIZE",
        help="size of the model's files (default: of its weights)",
    )


def _add_endpoint(add: Any) -> None:
    add("--min-instances", type=int, default=1, metavar="N")
    add(
        "--max-instances",
        type=int,
        default=1,
        metavar="N",
        help="more than the minimum: scaled automatically",
    )
    add(
        "--max-copies",
        type=int,
        default=0,
        metavar="N",
        help="more than --copies: scaled automatically",
    )
    add(
        "--scale-on",
        choices=["concurrency", "slots_in_use"],
        default="concurrency",
        help="what is tracked (%(default)s)",
    )
    add("--target-value", type=float, help="value to keep it at (default: 70 %% of the slots)")
    add("--async-output", metavar="s3://…", help="serve asynchronous requests, with answers there")
    add(
        "--isolated",
        action="store_true",
        help="no network for the container: all it needs is in --model-data",
    )
    add("--serverless", action="store_true", help="refused, with the reason")
    add("--ami-version", help="host image with another Neuron driver (InferenceAmiVersion)")


def _judge(arguments: argparse.Namespace) -> None:
    """Refuse what SageMaker does not have.

    Raises:
        ConfigError: serverless inference; asynchronous requests to an inference component; numbers that contradict.
    """
    if getattr(arguments, "serverless", False):
        raise ConfigError(SERVERLESS)
    if arguments.command not in {"deploy", "update"}:
        return
    if arguments.async_output and arguments.copies:
        msg = "--async-output and --copies exclude each other: inference components serve no asynchronous requests"
        raise ConfigError(msg)
    if arguments.copies and (arguments.min_instances, arguments.max_instances) != (1, 1):
        msg = "with --copies the number of instances follows from the copies; set --max-copies instead"
        raise ConfigError(msg)
    if arguments.min_instances < 1 and not arguments.async_output:
        msg = "--min-instances 0 needs --async-output: only requests that wait in S3 can wait for an instance"
        raise ConfigError(msg)


COMMANDS: Final = {"deploy": deploy, "update": update, "delete": delete, "compile": compile_ahead}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 if all calls were made or printed, 1 with the reason on stderr."""
    parsed = parser().parse_args(arguments)
    try:
        _judge(parsed)
        if parsed.command == "policy":
            print(json.dumps(policy(parsed), indent=2))
            return 0
        calls = COMMANDS[parsed.command](parsed)
        for call in calls:
            validate(call)
        if parsed.dry_run:
            rows = [{k: v for k, v in vars(call).items() if v is not None} for call in calls]
            print(json.dumps(rows, indent=2))
        else:
            run(calls, parsed.region)
    except ServingError as error:
        print(f"deploy.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

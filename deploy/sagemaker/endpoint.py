"""The calls that create, update and delete an endpoint."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from typing import Any

from deploy.sagemaker.calls import POLICY_ARN, Call, bounds
from deploy.sagemaker.dashboard import dashboard
from deploy.sagemaker.plan import DISK_GIB, GIB, Plan, given_variables, plan, timeouts
from djl_python_neuronx.config import sources
from djl_python_neuronx.errors import ConfigError
from djl_python_neuronx.planning import machines
from djl_python_neuronx.telemetry import NAMESPACE

VARIANT = "main"
FRONT_BYTES = 2 * GIB
"""Host memory of the front process: an assumption."""
EBS_FAMILIES = ("inf2",)
"""Instances without their own disks: the size of their volume is chosen. Source: EC2, instance types."""
BUSY = 0.7
"""Default target of the autoscaling: this share of an instance's or copy's slots."""
BACKLOG = 4
"""Default target with asynchronous requests: requests in S3 for each instance."""


def environment(arguments: argparse.Namespace) -> dict[str, str]:
    """The variables of the endpoint's container: those given, with names for the model and its metrics."""
    given = given_variables(arguments)
    if not {"OPTION_MODEL_NAME", "OPTION_SERVED_MODEL_NAME"} & given.keys():
        given["OPTION_MODEL_NAME"] = arguments.name
    given.setdefault("OPTION_CLOUDWATCH_NAMESPACE", f"djl-neuronx/{arguments.name}")
    return given


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
        "InitialInstanceCount": max(1, span(arguments)[0]),
        **timeouts(planned, downloads_itself=not arguments.model_data),
        "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
    }
    parameters: dict[str, Any] = {"EndpointConfigName": name, "ProductionVariants": [variant]}
    containers = 1
    if arguments.copies:
        containers = _copies_per_instance(arguments.instance, needs(arguments.instance, planned))
        least, most = (math.ceil(copies / containers) for copies in span(arguments))
        variant["InitialInstanceCount"] = least
        scaling = {"Status": "ENABLED", "MinInstanceCount": least, "MaxInstanceCount": most}
        variant["ManagedInstanceScaling"] = scaling
        parameters["ExecutionRoleArn"] = arguments.role
    else:
        variant |= {"ModelName": name, "InitialVariantWeight": 1.0}
    if planned.prepared.machine.family in EBS_FAMILIES:
        size_gib = DISK_GIB + math.ceil((1 + containers) * planned.model_bytes / GIB)
        most = bounds("ProductionVariant", "VolumeSizeInGB")[1]
        if size_gib > most:
            msg = (
                f"the model needs a volume of {size_gib} GiB, and SageMaker allows {most}; choose an instance with "
                "its own disks, such as ml.trn1.32xlarge, or correct --model-gib"
            )
            raise ConfigError(msg)
        variant["VolumeSizeInGB"] = size_gib
    if arguments.ami_version:
        variant["InferenceAmiVersion"] = arguments.ami_version
    if arguments.async_output:
        most = bounds("AsyncInferenceClientConfig", "MaxConcurrentInvocationsPerInstance")[1]
        parameters["AsyncInferenceConfig"] = {
            "OutputConfig": {"S3OutputPath": arguments.async_output},
            "ClientConfig": {"MaxConcurrentInvocationsPerInstance": min(most, planned.slots)},
        }
    return Call("sagemaker", "create_endpoint_config", parameters)


def needs(instance: str, planned: Plan) -> dict[str, int]:
    """The needs of one copy of an inference component: whole chips, and the host memory for a load.

    Raises:
        ConfigError: the instance has less.
    """
    cores = machines.FAMILIES[planned.prepared.machine.family or ""].cores_per_device
    host_bytes = (planned.prepared.host_bytes or 2 * planned.model_bytes) + FRONT_BYTES
    found = {
        "NumberOfAcceleratorDevicesRequired": math.ceil(
            planned.prepared.need.cores * planned.copies / cores
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


def prepared(arguments: argparse.Namespace) -> tuple[Plan, list[Call]]:
    """The plan of a version, and the calls that create its model and its configuration."""
    environ = environment(arguments)
    planned = plan(arguments, environ)
    if arguments.copies and planned.prepared.options.replicas == "max":
        msg = (
            "replicas=max was planned for all cores of the instance, and --copies gives a container only what one copy "
            "needs; set OPTION_REPLICAS to a number, or leave --copies out"
        )
        raise ConfigError(msg)
    # An error with --copies: SageMaker places them by this number. Otherwise it is an upper bound.
    host_gib = (planned.prepared.host_bytes or 0) / GIB
    there_gib = machines.INSTANCES[arguments.instance.removeprefix("ml.")].host_memory_gib
    if host_gib > there_gib and not arguments.copies:
        print(
            f"deploy.sagemaker: warning: a load takes up to {host_gib:.1f} GiB of the host's memory, and "
            f"{arguments.instance} has {there_gib} GiB: the start may fail; choose a larger instance",
            file=sys.stderr,
        )
    config = endpoint_config_call(arguments, planned)
    (variant,) = config.parameters["ProductionVariants"]
    # DJL Serving would stop the load after 240 s.
    startup_s = variant["ContainerStartupHealthCheckTimeoutInSeconds"]
    if not {"MODEL_LOADING_TIMEOUT", "SAGEMAKER_STARTUP_TIMEOUT"} & environ.keys():
        environ.setdefault("OPTION_MODEL_LOADING_TIMEOUT", str(startup_s))
    return planned, [model_call(arguments, environ), config]


def deploy(arguments: argparse.Namespace) -> list[Call]:
    """The calls that make a new endpoint, its autoscaling and its dashboard."""
    planned, calls = prepared(arguments)
    name = arguments.name
    endpoint = {"EndpointName": name, "EndpointConfigName": f"{name}-{arguments.version}"}
    calls += [Call("sagemaker", "create_endpoint", endpoint), _endpoint_settled(endpoint)]
    if arguments.copies:
        parameters = {
            "InferenceComponentName": name,
            "EndpointName": name,
            "VariantName": VARIANT,
            "Specification": component(arguments, planned),
            "RuntimeConfig": {"CopyCount": arguments.copies},
        }
        calls.append(Call("sagemaker", "create_inference_component", parameters))
        calls.append(_component_settled(arguments))
    return [*calls, *autoscaling(arguments, planned), _dashboard(arguments, planned)]


def _dashboard(arguments: argparse.Namespace, planned: Plan) -> Call:
    name, options = arguments.name, planned.prepared.options
    body = json.dumps(
        dashboard(name, options.cloudwatch_namespace, options.model_names[0], arguments.region)
    )
    return Call("cloudwatch", "put_dashboard", {"DashboardName": name, "DashboardBody": body})


def _endpoint_settled(endpoint: dict[str, str]) -> Call:
    # An update that failed was rolled back: it is in service with the earlier configuration.
    until = {"EndpointStatus": "InService", "EndpointConfigName": endpoint["EndpointConfigName"]}
    return Call("sagemaker", "describe_endpoint", {"EndpointName": endpoint["EndpointName"]}, until)


def _component_settled(arguments: argparse.Namespace) -> Call:
    model = f"{arguments.name}-{arguments.version}"
    until = {"InferenceComponentStatus": "InService", "ModelName": model}
    component = {"InferenceComponentName": arguments.name}
    return Call("sagemaker", "describe_inference_component", component, until)


def span(arguments: argparse.Namespace) -> tuple[int, int]:
    """The least and the greatest number of instances or, of an inference component, of copies."""
    if arguments.copies:
        least, most = arguments.copies, arguments.max_copies
    else:
        least, most = arguments.min_instances, arguments.max_instances
    return least, max(1, least) if most is None else most


def scalable(name: str, *, copies: bool) -> dict[str, str]:
    """The scaled resource: the instances of the variant, or the copies of the inference component."""
    resource, dimension = f"endpoint/{name}/variant/{VARIANT}", "variant:DesiredInstanceCount"
    if copies:
        resource, dimension = f"inference-component/{name}", "inference-component:DesiredCopyCount"
    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": resource,
        "ScalableDimension": f"sagemaker:{dimension}",
    }


def autoscaling(arguments: argparse.Namespace, planned: Plan) -> list[Call]:
    """Target tracking of the requests in a container, or of our own metric; none without a range to scale in.

    Raises:
        ConfigError: our own metric is not logged.
    """
    least, most = span(arguments)
    if most <= least:
        return []
    service, target = "application-autoscaling", scalable(arguments.name, copies=arguments.copies)
    busy = round(BUSY * planned.slots, 1)
    if arguments.async_output:
        busy, queue = BACKLOG, {"EndpointName": arguments.name}
        tracked = _customized("AWS/SageMaker", "ApproximateBacklogSizePerInstance", queue)
    elif arguments.scale_on == "slots_in_use":
        options = planned.prepared.options
        if options.cloudwatch_namespace is None:
            msg = "--scale-on slots_in_use needs a value of OPTION_CLOUDWATCH_NAMESPACE, which is empty; leave it out"
            raise ConfigError(msg)
        model = {"model": options.model_names[0]}
        tracked = _customized(options.cloudwatch_namespace, f"{NAMESPACE}_slots_in_use", model)
    else:
        kind = "InferenceComponentConcurrentRequestsPerCopy"
        if not arguments.copies:
            kind = "VariantConcurrentRequestsPerModel"
        predefined = {"PredefinedMetricType": f"SageMaker{kind}HighResolution"}
        tracked = {"PredefinedMetricSpecification": predefined}
    policy = {
        "PolicyName": arguments.name,
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
    between = {**target, "MinCapacity": least, "MaxCapacity": most}
    calls = [
        Call(service, "register_scalable_target", between),
        Call(service, "put_scaling_policy", policy),
    ]
    return calls if least else [*calls, *_from_zero(arguments.name)]


def _from_zero(endpoint: str) -> list[Call]:
    """An instance for the first request: target tracking would wait for more than its target.

    Source: SageMaker's developer guide, "Autoscale an asynchronous endpoint".
    """
    name = f"{endpoint}-from-zero"
    step = {"MetricIntervalLowerBound": 0.0, "ScalingAdjustment": 1}
    policy = {
        "PolicyName": name,
        **scalable(endpoint, copies=False),
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
        "Dimensions": [{"Name": "EndpointName", "Value": endpoint}],
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
    planned, (model, config) = prepared(arguments)
    name, most = arguments.name, span(arguments)[1]
    start_s = sum(timeouts(planned, downloads_itself=not arguments.model_data).values())

    def one_by_one(unit: str) -> dict[str, Any]:
        policy = {
            "MaximumBatchSize": {"Type": unit, "Value": 1},
            "WaitIntervalInSeconds": 60,
            "MaximumExecutionTimeoutInSeconds": _longest(most * start_s),
        }
        return {"RollingUpdatePolicy": policy}

    if arguments.copies:
        parameters = {
            "InferenceComponentName": name,
            "Specification": component(arguments, planned),
            "DeploymentConfig": one_by_one("COPY_COUNT"),
        }
        calls = [
            model,
            Call("sagemaker", "update_inference_component", parameters),
            _component_settled(arguments),
        ]
    else:
        at_once = {
            "TrafficRoutingConfiguration": {"Type": "ALL_AT_ONCE", "WaitIntervalInSeconds": 0},
            "TerminationWaitInSeconds": 0,
            "MaximumExecutionTimeoutInSeconds": _longest(start_s),
        }
        blue_green = {"BlueGreenUpdatePolicy": at_once}
        rolling = arguments.strategy == "rolling"
        endpoint = {"EndpointName": name, "EndpointConfigName": f"{name}-{arguments.version}"}
        parameters = {
            **endpoint,
            "RetainAllVariantProperties": True,  # the number of instances, which may be scaled
            "DeploymentConfig": one_by_one("INSTANCE_COUNT") if rolling else blue_green,
        }
        update = Call("sagemaker", "update_endpoint", parameters)
        calls = [model, config, update, _endpoint_settled(endpoint)]
    return [*calls, *autoscaling(arguments, planned), _dashboard(arguments, planned)]


def _longest(start_s: int) -> int:
    """The time of an update with starts of `start_s`: twice that, within SageMaker's bounds."""
    least, most = bounds("RollingUpdatePolicy", "MaximumExecutionTimeoutInSeconds")
    return min(most, max(least, 2 * start_s))


def delete(arguments: argparse.Namespace) -> list[Call]:
    """The calls that delete whatever there is of an endpoint and its versions, but logs and what is in S3."""
    name = arguments.name
    component, alarm = {"InferenceComponentName": name}, {"AlarmNames": [f"{name}-from-zero"]}
    scaling, deregister = "application-autoscaling", "deregister_scalable_target"
    calls = [
        Call(scaling, deregister, scalable(name, copies=False)),
        Call(scaling, deregister, scalable(name, copies=True)),
        Call("cloudwatch", "delete_alarms", alarm),
        Call("sagemaker", "delete_inference_component", component),
        Call("sagemaker", "describe_inference_component", component, {}),
        Call("sagemaker", "delete_endpoint", {"EndpointName": name}),
    ]
    for version in arguments.versions:
        config = {"EndpointConfigName": f"{name}-{version}"}
        calls.append(Call("sagemaker", "delete_endpoint_config", config))
        calls.append(Call("sagemaker", "delete_model", {"ModelName": f"{name}-{version}"}))
    return [*calls, Call("cloudwatch", "delete_dashboards", {"DashboardNames": [name]})]

"""Tags, a VPC and a key for everything that is created."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from botocore import xform_name

from deploy.sagemaker.calls import Call, service_model
from deploy.sagemaker.endpoint import EBS_FAMILIES
from djl_python_neuronx.planning import machines


def for_account(calls: Sequence[Call], arguments: argparse.Namespace) -> None:
    """Add `--tag`, `--subnet`, `--security-group` and `--kms-key` to the calls that create something."""
    tags = [{"Key": key, "Value": value} for key, value in getattr(arguments, "tag", ())]
    for call in calls:
        if tags and call.operation.startswith("create_") and "Tags" in _members(call):
            call.parameters["Tags"] = tags
        if tags and call.operation == "run_instances":
            kinds = ("instance", "volume")
            call.parameters["TagSpecifications"] = [
                {"ResourceType": kind, "Tags": tags} for kind in kinds
            ]
        if getattr(arguments, "subnets", ()):
            _into_vpc(call, arguments)
        if getattr(arguments, "kms_key", None):
            _encrypt(call, arguments.kms_key)


def _members(call: Call) -> Any:
    service = service_model(call.service)
    name = next(one for one in service.operation_names if xform_name(one) == call.operation)
    return service.operation_model(name).input_shape.members


def _into_vpc(call: Call, arguments: argparse.Namespace) -> None:
    vpc = {"Subnets": arguments.subnets, "SecurityGroupIds": arguments.groups}
    match call.operation:
        case "create_model":
            call.parameters["VpcConfig"] = vpc
        case "create_endpoint_config" if arguments.copies:
            call.parameters["VpcConfig"] = vpc
        case "create_processing_job":
            call.parameters["NetworkConfig"] = {"VpcConfig": vpc}
        case "run_instances":
            call.parameters["SubnetId"] = arguments.subnets[0]
            if arguments.groups:
                call.parameters["SecurityGroupIds"] = arguments.groups


def _encrypt(call: Call, key: str) -> None:
    """Encrypt volumes and answers. Disks of the instance itself take no key; its hardware encrypts them."""
    parameters = call.parameters
    match call.operation:
        case "create_endpoint_config":
            (variant,) = parameters["ProductionVariants"]
            if machines.named(variant["InstanceType"]).family in EBS_FAMILIES:
                parameters["KmsKeyId"] = key
            if "AsyncInferenceConfig" in parameters:
                parameters["AsyncInferenceConfig"]["OutputConfig"]["KmsKeyId"] = key
        case "create_processing_job":
            parameters["ProcessingResources"]["ClusterConfig"]["VolumeKmsKeyId"] = key
        case "run_instances":
            for device in parameters["BlockDeviceMappings"]:
                device["Ebs"] |= {"Encrypted": True, "KmsKeyId": key}

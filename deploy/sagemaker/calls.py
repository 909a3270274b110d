"""Calls of AWS's API: held to botocore's model of it, then made in order."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import boto3
from botocore import xform_name
from botocore.exceptions import BotoCoreError, ClientError
from botocore.session import get_session
from botocore.validate import ParamValidator

from djl_python_neuronx.errors import ConfigError, ServingError

POLICY_ARN = "${PolicyARN}"
"""Stands for the ARN in the answer to the call before."""
TRANSITIONS = frozenset(
    ["Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting", "InProgress", "Stopping"]
)
MISSING = ("Could not find ", "No scalable target found ")
"""Start of messages about a missing resource: SageMaker has no separate error code for it."""


@dataclass(frozen=True)
class Call:
    """One call of the API."""

    service: str
    operation: str
    """Name of boto3's method."""
    parameters: dict[str, Any]
    until: dict[str, str] | None = None
    """Repeat a `describe_…` until its status has settled; then these fields have these values. Empty: it is gone."""


@cache
def service_model(name: str) -> Any:
    """The API of a service, as botocore describes it."""
    return get_session().get_service_model(name)


@cache
def regions() -> list[str]:
    """The regions with SageMaker."""
    return list(get_session().get_available_regions("sagemaker"))


def bounds(shape: str, member: str) -> tuple[int, int]:
    """The least and the greatest value of a number of SageMaker's API."""
    metadata = service_model("sagemaker").shape_for(shape).members[member].metadata
    return metadata["min"], metadata["max"]


def validate(call: Call) -> None:
    """Hold a call to botocore's model of the API.

    Raises:
        ConfigError: a parameter is missing, unknown, of another type, out of its range or no value of its enumeration.
    """
    service = service_model(call.service)
    name = next(name for name in service.operation_names if xform_name(name) == call.operation)
    shape = service.operation_model(name).input_shape
    problems = [ParamValidator().validate(call.parameters, shape).generate_report()]
    for value, of, where in _leaves(call.parameters, shape, name):
        problems += _left_to_the_service(value, of, where)
    if text := "; ".join(filter(None, problems)):
        msg = f"{call.service} {name}: {text}"
        raise ConfigError(msg)


def _leaves(value: Any, shape: Any, where: str) -> Iterator[tuple[Any, Any, str]]:
    """Each text and number in `value`, with its shape and its place."""
    if shape.type_name == "structure":
        for name in value.keys() & shape.members.keys():
            yield from _leaves(value[name], shape.members[name], f"{where}.{name}")
    elif shape.type_name == "map":
        for name, entry in value.items():
            yield from _leaves(entry, shape.value, f"{where}.{name}")
    elif shape.type_name == "list":
        for entry in value:
            yield from _leaves(entry, shape.member, where)
    else:
        yield value, shape, where


def _left_to_the_service(value: Any, shape: Any, where: str) -> Iterator[str]:
    """Yield the errors of a value that botocore's validator leaves to the service."""
    most = shape.metadata.get("max", math.inf)
    if isinstance(value, (int, float)):
        if value > most:
            yield f"{where} is {value}, at most {most} is allowed"
        return
    if shape.enum and value not in shape.enum:
        yield f"{where} does not allow {value!r}"
    if len(value) > most:
        yield f"{where} has {len(value)} characters, at most {most} are allowed"
    with suppress(re.error):  # the patterns are Java's
        if not re.fullmatch(shape.metadata.get("pattern", ".*"), value, re.DOTALL):
            yield f"{where} does not allow {value!r}; expected {shape.metadata['pattern']}"


def run(calls: Sequence[Call], region: str) -> None:
    """Make the calls in order, and print the name of each. What is to be deleted and does not exist is passed over.

    Raises:
        ServingError: a service refuses, or something settled in another state than the one that is expected.
    """
    answer: Mapping[str, Any] = {}
    for call in calls:
        print(f"{call.service} {call.operation}", file=sys.stderr)
        parameters = dict(call.parameters)
        if parameters.get("AlarmActions") == [POLICY_ARN]:
            parameters["AlarmActions"] = [answer["PolicyARN"]]
        try:
            client = boto3.client(call.service, region_name=region)
            if call.until is None:
                answer = getattr(client, call.operation)(**parameters)
            else:
                settle(client, call)
        except (BotoCoreError, ClientError) as error:
            deletes = call.until == {} or call.operation.startswith(("delete_", "deregister_"))
            if deletes and _is_missing(error):
                continue
            # Without the parameters: variables of the container may be secrets.
            msg = f"{call.service} {call.operation}: {error}"
            raise ServingError(msg) from error


def _is_missing(error: Exception) -> bool:
    found = getattr(error, "response", {}).get("Error", {})
    coded = found.get("Code") in {"ObjectNotFoundException", "ResourceNotFound"}
    return coded or found.get("Message", "").startswith(MISSING)


def settle(client: Any, call: Call, pause_s: float = 15) -> None:
    """Wait until the status of something is none of `TRANSITIONS`.

    Raises:
        ServingError: then it is another one than the one that is expected, or what was to be deleted is still there.
        ClientError: the service refuses; so it does when something is gone.
    """
    while True:
        seen = getattr(client, call.operation)(**call.parameters)
        seen |= seen.get("Specification", {})  # of an inference component
        status = next(value for name, value in seen.items() if name.endswith("Status"))
        if status not in TRANSITIONS:
            break
        time.sleep(pause_s)
    if not call.until or any(seen.get(name) != value for name, value in call.until.items()):
        expected = call.until or "that it is gone"
        reason = seen.get("FailureReason", "no reason is given")
        msg = f"{call.parameters}: expected {expected}, found {status}: {reason}"
        raise ServingError(msg)

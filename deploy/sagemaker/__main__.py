"""Creates, updates and deletes a SageMaker endpoint with a model on Neuron instances; compiles the model beforehand.

Every command first plans the model with the package (`djl-neuronx check`) and validates each call against botocore's
model of the API, so that what cannot work is refused before anything is created. `--dry-run` prints the calls as JSON;
it needs credentials and network only to read what is in S3. README.md has the order of the commands.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from deploy.sagemaker.account import for_account
from deploy.sagemaker.calls import regions, run, validate
from deploy.sagemaker.compile_ahead import compile_ahead
from deploy.sagemaker.endpoint import delete, deploy, span, update
from deploy.sagemaker.iam import POLICIES, policy, registry
from djl_python_neuronx.errors import ConfigError, ServingError

FIRST_VERSION = "1"
SERVERLESS = (
    "serverless inference has no accelerators: a ServerlessConfig has memory and concurrency, and no instance type. "
    "Choose --instance ml.inf2.xlarge or larger; --async-output with --min-instances 0 costs nothing while idle"
)


def _text(pattern: str, expected: str) -> Callable[[str], str]:
    """A reader of an argument that the pattern must match."""

    def read(text: str) -> str:
        if not re.fullmatch(pattern, text, re.ASCII):
            msg = f"{text!r} is not {expected}"
            raise argparse.ArgumentTypeError(msg)
        return text

    return read


_role = _text(r"arn:aws:iam::\d{12}:role/[\w+=,.@/-]+", "arn:aws:iam::ACCOUNT:role/NAME")
_key = _text(r"arn:aws:kms:[a-z0-9-]+:\d{12}:key/[\w-]+", "arn:aws:kms:REGION:ACCOUNT:key/ID")
_s3 = _text(r"s3://[^/]+(/.*)?", "s3://bucket/folder")


def _variable(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        msg = f"{text!r} is not NAME=VALUE"
        raise argparse.ArgumentTypeError(msg)
    return name, value


def _count(text: str) -> int:
    if not text.isdecimal():
        msg = f"{text!r} is not a number from 0 on"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def _size(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    msg = f"{text!r} is not a number above 0"
    raise argparse.ArgumentTypeError(msg)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m deploy.sagemaker",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True)
    for name, text, adding in (
        ("deploy", "create an endpoint", (_add_model, _add_endpoint)),
        (
            "update",
            "bring a new version into an endpoint",
            (_add_model, _add_endpoint, _add_update),
        ),
        ("delete", "delete an endpoint with its versions", (_add_delete,)),
        ("compile", "compile a model into S3", (_add_model, _add_compile)),
        ("policy", "print an IAM policy", (_add_policy,)),
    ):
        add = commands.add_parser(name, help=text, description=text).add_argument
        add("--name", required=True, help="of the endpoint, and of all that belongs to it")
        add("--region", required=True, choices=regions(), metavar="REGION")
        for add_arguments in adding:
            add_arguments(add)
    return top


def _add_model(add: Any) -> None:
    _add_dry_run(add)
    add("--image", required=True, help="image of docker/ in ECR")
    add("--instance", required=True, help="instance that serves, such as ml.inf2.8xlarge")
    add("--role", type=_role, required=True, help="ARN of the execution role")
    add(
        "--version",
        default=FIRST_VERSION,
        help="name of this model and configuration (%(default)s; an update needs another)",
    )
    add(
        "--model-data",
        type=_s3,
        metavar="s3://…",
        help="prefix with the model's files, or a .tar.gz",
    )
    variable = "of the container; may be repeated"
    add("--env", action="append", type=_variable, default=[], metavar="NAME=VALUE", help=variable)
    add("--plan", metavar="FOLDER", help="read in place of --model-data; config.json suffices")
    network = "of the account's VPC, for container or compile; may be repeated"
    add("--subnet", action="append", default=[], dest="subnets", metavar="ID", help=network)
    add("--security-group", action="append", default=[], dest="groups", metavar="ID", help=network)
    add("--kms-key", type=_key, metavar="ARN", help="encrypts volumes and asynchronous answers")
    tag = "of all that is created; may be repeated"
    add("--tag", action="append", type=_variable, default=[], metavar="KEY=VALUE", help=tag)
    add("--model-gib", type=_size, metavar="SIZE", help="of the model's files (default: weights)")


def _add_endpoint(add: Any) -> None:
    add("--min-instances", type=_count, default=1, metavar="N")
    add("--max-instances", type=_count, metavar="N", help="above the minimum: autoscaling")
    add("--copies", type=_count, metavar="N", help="of an inference component")
    add("--max-copies", type=_count, metavar="N", help="above --copies: autoscaling")
    tracked = "what the autoscaling tracks (concurrency)"
    add("--scale-on", choices=["concurrency", "slots_in_use"], help=tracked)
    add("--target-value", type=_size, help="value to keep it at (70 %% of the slots)")
    add(
        "--async-output",
        type=_s3,
        metavar="s3://…",
        help="asynchronous requests, with answers there",
    )
    add("--isolated", action="store_true", help="no network: all it needs is in --model-data")
    add("--serverless", action="store_true", help="refused, with the reason")
    add("--ami-version", help="host image with another Neuron driver (InferenceAmiVersion)")


def _add_update(add: Any) -> None:
    strategies = ["blue-green", "rolling"]
    add("--strategy", choices=strategies, default="blue-green", help="(%(default)s)")


def _add_delete(add: Any) -> None:
    _add_dry_run(add)
    several = "to delete; may be repeated"
    add("--version", action="append", dest="versions", required=True, help=several)


def _add_dry_run(add: Any) -> None:
    add("--dry-run", action="store_true", help="print the calls as JSON")


def _add_compile(add: Any) -> None:
    add(
        "--output",
        type=_s3,
        required=True,
        metavar="s3://…",
        help="where the compiled model is written",
    )
    add("--compile-instance", help="of the processing job (default: by memory)")
    add("--ami", help="compile on EC2: Ubuntu with the Neuron driver, Docker and the AWS CLI")
    add("--instance-profile", help="of the EC2 instance")


def _add_policy(add: Any) -> None:
    add("policy", choices=sorted(path.stem for path in POLICIES.glob("*.json")))
    add("--image", required=True)
    add("--role", type=_role, required=True, help="ARN of the execution role")
    add("--compile-role", type=_role, help="ARN of the compile's role, if it has its own")
    prefix = {"type": _s3, "action": "append", "default": [], "metavar": "s3://…"}
    add("--model-data", **prefix, help="prefix that is read; may be repeated")
    add("--output", **prefix, help="prefix that is written, too; may be repeated")
    add("--kms-key", type=_key, metavar="ARN", help="key of these prefixes and of volumes")
    add("--vpc", action="store_true", help="the container is in a VPC of the account")


def _judge(arguments: argparse.Namespace) -> None:
    """Refuse what SageMaker does not have, and what contradicts itself.

    Raises:
        ConfigError: names the arguments, and the fix.
    """
    if arguments.command in {"deploy", "update", "compile"}:
        region = registry(arguments.image)["region"]
        if region != arguments.region:
            msg = (
                f"--image is in {region}; --region {arguments.region} needs an image in that region"
            )
            raise ConfigError(msg)
    if arguments.command == "update" and arguments.version == FIRST_VERSION:
        msg = f"--version {FIRST_VERSION} is what `deploy` creates without --version; name another one for the update"
        raise ConfigError(msg)
    in_vpc = bool(getattr(arguments, "groups", ())), bool(getattr(arguments, "subnets", ()))
    if in_vpc == (True, False) or (in_vpc == (False, True) and not getattr(arguments, "ami", None)):
        msg = "a VPC needs both: give --subnet and --security-group"
        raise ConfigError(msg)
    if arguments.command in {"deploy", "update"}:
        _judge_numbers(arguments)


def _judge_numbers(arguments: argparse.Namespace) -> None:
    least, most = span(arguments)
    copies, queue = arguments.copies, arguments.async_output
    instances = (arguments.min_instances, arguments.max_instances) != (1, None)
    for holds, msg in (
        (arguments.serverless, SERVERLESS),
        (copies == 0, "--copies 0 would serve nothing; set at least 1, or leave it out"),
        (
            copies and queue,
            "--async-output and --copies exclude each other: inference components serve no asynchronous requests",
        ),
        (
            copies and instances,
            "with --copies the number of instances follows from the copies; set --max-copies instead",
        ),
        (arguments.max_copies is not None and not copies, "--max-copies needs --copies"),
        (
            not least and not queue,
            "--min-instances 0 needs --async-output: only requests that wait in S3 can wait for an instance",
        ),
        (
            most < least,
            f"the maximum {most} is less than the minimum {least}; raise it, or leave it out",
        ),
        (
            most == least and (arguments.scale_on or arguments.target_value),
            "--scale-on and --target-value need a maximum above the minimum",
        ),
        (
            queue and arguments.scale_on,
            "--scale-on: asynchronous requests are scaled by those that wait; leave it out",
        ),
    ):
        if holds:
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
        for_account(calls, parsed)
        for call in calls:
            validate(call)
        if parsed.dry_run:
            rows = [{k: v for k, v in vars(call).items() if v is not None} for call in calls]
            print(json.dumps(rows, indent=2))
        else:
            run(calls, parsed.region)
    except ServingError as error:
        print(f"deploy.sagemaker: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

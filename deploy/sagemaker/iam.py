"""The IAM policies of `policies/`, for one endpoint, image and some places in S3."""

from __future__ import annotations

import argparse
import json
import re
import string
from pathlib import Path
from typing import Any

from djl_python_neuronx.errors import ConfigError

POLICIES = Path(__file__).parent / "policies"


def registry(image: str) -> dict[str, str]:
    """The parts of the name of an image in ECR.

    Raises:
        ConfigError: it is elsewhere.
    """
    name = r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com/(?P<repository>[^:@]+)([:@].+)?"
    found = re.fullmatch(name, image)
    if found is None:
        msg = f"--image {image!r} is not an image of ECR: ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG"
        raise ConfigError(msg)
    return found.groupdict()


def policy(arguments: argparse.Namespace) -> dict[str, Any]:
    """One of the policies. A statement about a place in S3 is there once for each place.

    Rights to EC2, and to hand it a role, are there with the role of a compile only; those to a VPC and a key on demand.

    Raises:
        ConfigError: a place is no folder of a bucket, or there is none that a compile could write to.
    """
    if arguments.policy == "compile" and not arguments.output:
        msg = "policy compile: give --output s3://…, where the compiled model is written"
        raise ConfigError(msg)
    image = registry(arguments.image)
    filled = {
        "Account": arguments.role.split(":")[4],
        "CompileRole": arguments.compile_role,
        "ExecutionRole": arguments.role,
        "ImageAccount": image["account"],
        "ImageRegion": image["region"],
        "Name": arguments.name,
        "Region": arguments.region,
        "Repository": image["repository"],
        "KmsKey": arguments.kms_key,
    }
    document = json.loads((POLICIES / f"{arguments.policy}.json").read_text())
    wanted = {
        "RunInstances": arguments.compile_role,
        "${CompileRole}": arguments.compile_role,
        "CreateNetworkInterface": arguments.vpc,
        "${KmsKey}": arguments.kms_key,
    }
    """Word of a statement to the argument without which the statement is left out."""
    statements = []
    for statement in document["Statement"]:
        text, values = json.dumps(statement), [filled]
        if any(word in text and not given for word, given in wanted.items()):
            continue
        for kind, uris in (("Model", arguments.model_data), ("Output", arguments.output)):
            if f"${{{kind}Bucket}}" in text:
                values = [{**filled, **_place(kind, uri)} for uri in uris]
        for number, each in enumerate(values):
            made = json.loads(string.Template(text).substitute(each))
            statements.append({**made, "Sid": f"{made['Sid']}{number or ''}"})
    return {**document, "Statement": statements}


def _place(kind: str, uri: str) -> dict[str, str]:
    """Bucket and key of a folder in S3, or of the folder of an archive, as a policy names them."""
    place = re.fullmatch(r"s3://([^/*?]+)/([^*?]+?)/?", re.sub(r"/[^/]+\.tar\.gz$", "/", uri))
    if place is None:
        msg = f"{uri!r} is not s3://bucket/folder, and rights to a whole bucket are not given"
        raise ConfigError(msg)
    return {f"{kind}Bucket": place[1], f"{kind}Key": place[2]}

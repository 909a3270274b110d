"""The package's plan for a model on an instance, and the time that a start may take."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from deploy.sagemaker.calls import bounds, service_model
from djl_python_neuronx.artifacts import s3
from djl_python_neuronx.config import sources
from djl_python_neuronx.errors import ConfigError
from djl_python_neuronx.loading.check import check_all
from djl_python_neuronx.loading.prepared import Prepared
from djl_python_neuronx.loading.targets import find_target
from djl_python_neuronx.planning import machines, memory

GIB = 2**30
BYTES_PER_S = 100e6
"""Assumed speed of the download from S3, and of the load from the volume to the device."""
START_S = 300
"""Assumed time of everything else: imports, tokenizer, warm-up, and the container's start."""
SLOWEST_COMPILE = 2
"""Real compile times are up to twice the estimate, see `plan.COMPILE_BASIS`."""
DISK_GIB = 32
"""Room on a volume besides the model, as downloaded, cut and written."""
WEIGHTS = (".bin", ".pt", ".safetensors")
"""Ends of the names of weights."""
HALF = frozenset({"float16", "bfloat16"})
"""Types of weights of two bytes."""
READ = (
    *sources.PREFIXES,
    "SERVING_",
    "JAVA_",
    "HF_",
    "TRANSFORMERS_",
    "AWS_",
    "NEURON_",
    "DJL_",
    "OMP_",
    "FI_",
)
"""Prefixes of variables that the server, its libraries or DJL Serving read."""


@dataclass(frozen=True)
class Plan:
    """The model on the instance."""

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


def given_variables(arguments: argparse.Namespace) -> dict[str, str]:
    """The variables of the command line.

    Raises:
        ConfigError: no program in the image reads a variable.
    """
    given = dict(arguments.env)
    for name in given:
        if name not in sources.OPTION_VARIABLES and not name.startswith(READ):
            msg = f"nothing in the image reads the variable {name}; an option is set by OPTION_<NAME> (docs/options.md)"
            raise ConfigError(msg)
    return given


def plan(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Plan:
    """Plan the model of a command for its instance.

    Raises:
        ConfigError: the instance type is none of SageMaker's or of the package's, or the package refuses the plan.
    """
    instance = arguments.instance
    allowed = service_model("sagemaker").shape_for("ProductionVariantInstanceType").enum
    if machines.known(instance) is None or instance not in allowed:
        known = ", ".join(name for name in allowed if machines.known(name))
        msg = f"--instance {instance!r} is not a Neuron instance of SageMaker's endpoints; expected one of {known}"
        raise ConfigError(msg)
    machine = machines.named(instance)
    # In the container this is the model's folder; here another folder stands for it.
    here = {name: value for name, value in environ.items() if not _is_model_dir(value)}
    target = _target(arguments, environ)
    placement = check_all([target], environ=here, overrides={}, machine=machine)
    prepared = placement.reports[0].prepared
    if not placement.ok or prepared is None:
        problems = "\n".join(placement.findings.messages("error"))
        msg = f"this cannot be served on {instance}:\n{problems}"
        raise ConfigError(msg)
    if prepared.case.on_cpu:
        msg = f"model_loader=cpu on {instance} would leave its Neuron devices idle; leave OPTION_MODEL_LOADER out"
        raise ConfigError(msg)
    compiled = prepared.artifact.compiled is not None or prepared.options.compilation == "forbid"
    given_bytes = arguments.model_gib and int(arguments.model_gib * GIB)
    planned = Plan(
        prepared,
        model_bytes=given_bytes or _model_bytes(prepared),
        compile_s=0 if compiled else SLOWEST_COMPILE * prepared.planned.estimated_compile_s,
        copies=len(placement.placed[0]),
    )
    tagged = re.search(r"[-:/_](nxdi|tnx|cpu)\b", arguments.image)
    if tagged is not None and tagged[1] != prepared.backend:
        print(
            f"deploy.sagemaker: warning: --image {arguments.image} is named for the backend {tagged[1]}, and the plan "
            f"needs {prepared.backend}; take that image, or set OPTION_MODEL_LOADER={tagged[1]}",
            file=sys.stderr,
        )
    print(
        f"deploy.sagemaker: planned for each container: {planned.copies} x {prepared.need.cores} NeuronCores of "
        f"{instance}, {planned.slots} slots, backend {prepared.backend} (the image needs it)",
        file=sys.stderr,
    )
    return planned


def named_model(arguments: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """The model in S3 or of the hub.

    Raises:
        ConfigError: nothing names one.
    """
    named = [environ.get(name, "") for name in ("HF_MODEL_ID", "OPTION_MODEL_ID")]
    found = [name for name in named if name and not _is_model_dir(name)]
    if not arguments.model_data and not found:
        msg = "nothing names the model; give --model-data s3://… or --env HF_MODEL_ID=owner/name"
        raise ConfigError(msg)
    return arguments.model_data or found[0]


def _is_model_dir(value: str) -> bool:
    return value.rstrip("/") == str(sources.MODEL_DIR)


def _target(arguments: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """The target for `check`, which reads a prefix in S3 as a folder here.

    Raises:
        ServingError: nothing names a model, S3 refuses, there are no weights, or the model data are an archive.
    """
    data, named = arguments.model_data, named_model(arguments, environ)
    if arguments.plan or not data:
        return arguments.plan or named
    if data.endswith(".tar.gz"):
        msg = f"--model-data {data} is not looked into; give --plan, a folder with its config.json"
        raise ConfigError(msg)
    model = find_target(data, sources.environment()).overrides.get("model_id")
    if model is not None:
        _require_weights(model)
    return data


def _require_weights(uri: str) -> None:
    """Look for weights in a folder of S3.

    Raises:
        ServingError: there are none, or S3 refuses.
    """
    names = s3.list_names(uri, sources.environment())
    if names and not any(part.endswith(WEIGHTS) for name in names for part in name.split("/")):
        msg = (
            f"{uri} has no weights ({', '.join(WEIGHTS)}) among its {len(names)} files; copy the whole model there, or "
            "give --plan FOLDER for a dry run without it"
        )
        raise ConfigError(msg)


def _model_bytes(prepared: Prepared) -> int:
    """Bytes of the weights in the checkpoint or, if they are more, of the weights cut for the cores."""
    case = prepared.case
    if case.model.num_parameters is None:
        msg = f"the size of a {case.model.model_type} model is not known; give --model-gib, the size of its files"
        raise ConfigError(msg)
    whole = case.model.num_parameters * (2 if case.model.dtype in HALF else 4)
    whole += 4 * (case.draft.num_parameters or 0) if case.draft else 0
    short = case.with_options(n_positions=1, max_rolling_batch_size=1)  # hardly any KV cache
    share = memory.core_memory(short)
    cut = 0 if share is None else share.weights + share.padding
    return max(whole, cut * case.degree)


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
        least, most = bounds("ProductionVariant", name)
        found[name] = max(least, math.ceil(estimate + START_S))
        if found[name] > most:
            words = ", ".join(f"{part} {seconds:.0f} s" for part, seconds in parts.items())
            fix = "give --model-gib if the files of the model are smaller than its plan assumes"
            if planned.copies > 1:
                fix = "lower OPTION_REPLICAS"
            if planned.compile_s:
                fix = "compile beforehand (python -m deploy.sagemaker compile) and set OPTION_COMPILATION=forbid"
            msg = f"{name} would have to be {found[name]} s, and SageMaker allows {most} s ({words}); {fix}"
            raise ConfigError(msg)
    return found

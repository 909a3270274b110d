"""Every option of `serving.properties`: one annotated field is one option.

The text below a field is its documentation (docs/options.md is made from it). Its name, aliases and environment
names, its check and its place in `Resolved.explain` all follow from the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field

from djl_python_neuronx.config.values import (
    BUCKETS,
    COUNT,
    POSITIONS,
    SECONDS,
    Buckets,
    Count,
    Dtype,
    Lower,
    Option,
    Positions,
    Seconds,
)

MAX_ROWS = 999
"""Rows of one call of DJL Serving's rolling batch."""


class ServingOptions(BaseModel):
    """All options, validated one by one; `conflicts` tells what does not go together.

    None means that the value follows from the model and the machine: `resolve.complete` fills it in.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model_id: Annotated[str | None, Option(allowed="a folder", env=("HF_MODEL_ID",))] = None
    """The model: a local folder, absolute or relative to the model folder. By default the model lies in the model
    folder itself. Hugging Face model ids come with a later version."""
    model_dir: Annotated[Path | None, Option(allowed="a folder")] = None
    """The folder that holds `serving.properties`. Set by whoever starts the model; written in the file it is
    refused."""
    revision: Annotated[
        str | None, Option(allowed="a branch, tag or commit", env=("HF_REVISION",))
    ] = None
    """Version of a Hugging Face model id. For a local folder it only says which version of the model's own code
    runs."""
    trust_remote_code: Annotated[bool, Option()] = False
    """Run Python code that comes with the model. Only for models whose code was read."""
    model_name: Annotated[
        str | None, Field(min_length=1), Option(allowed="text", aliases=("served_model_name",))
    ] = None
    """Name under which the embedded server offers the model: `/predictions/<name>`. The default is the folder's."""

    model_loader: Annotated[Literal["auto", "cpu", "tnx", "nxdi"], Lower, Option()] = "auto"
    """Backend. `auto` takes the one that the model was compiled for, else an installed Neuron library, else, on a
    machine without any Neuron device, `cpu`. This version has only `cpu`: the others say so and stop."""
    tensor_parallel_degree: Annotated[
        Count | Literal["max"] | None,
        Lower,
        Option(
            allowed=f'{COUNT}, or "max"',
            env=("TENSOR_PARALLEL_DEGREE",),
            to={"tnx": "tp_degree", "nxdi": "tp_degree"},
        ),
    ] = None
    """NeuronCores that share the model. `max` and the default take all of them. The cpu loader uses
    none: a file written for Inferentia can be tried on a CPU as it is."""
    dtype: Annotated[
        Dtype,
        Option(
            allowed="auto, fp32 or float32, fp16 or float16, bf16 or bfloat16",
            to={"tnx": "amp", "nxdi": "torch_dtype"},
        ),
    ] = "auto"
    """Type of weights and activations. `auto` keeps the checkpoint's own. The cpu loader computes float16, asked for or
    not, in float32: CPUs are slow at float16, and it loses accuracy."""
    n_positions: Annotated[
        Positions | None,
        Option(
            allowed=POSITIONS,
            aliases=("max_model_len",),
            to={"tnx": "n_positions", "nxdi": "seq_len"},
        ),
    ] = None
    """Tokens that a sequence can have, prompt and output together. The default is what the model was trained for, at
    most 4096; on a CPU at most 2048, and halved until the cache of all slots fits into half of the memory; but never
    less than the last of `context_length_estimate`."""
    context_length_estimate: Annotated[
        Buckets | None,
        Option(
            allowed=BUCKETS,
            env=("NEURON_CONTEXT_LENGTH_ESTIMATE",),
            to={"tnx": "context_length_estimate", "nxdi": "context_encoding_buckets"},
        ),
    ] = None
    """Prompt lengths that graphs are compiled for; a prompt runs in the smallest that holds it, and the last is the
    longest prompt. The default is powers of two from 128 up to `n_positions`."""

    rolling_batch: Annotated[Literal["auto", "tnx", "vllm", "disable"], Lower, Option()] = "auto"
    """How DJL Serving hands over requests. `tnx` and `vllm` mean the same here: a row per request, joining and leaving
    at each step. `disable`: one request (or `batch_size`) at a time. DJL turns `auto` into `disable`."""
    async_mode: Annotated[bool, Option()] = False
    """DJL Serving hands over each request once and gets tokens as they come. Not together with `rolling_batch`."""
    max_rolling_batch_size: Annotated[
        Count | None,
        Option(allowed=COUNT, to={"tnx": "batch_size", "nxdi": "batch_size"}),
    ] = None
    """Sequences that are generated at once: the slots of the cache. The default is 32, DJL Serving's own."""
    batch_size: Annotated[Count, Option(allowed=COUNT)] = 1
    """Requests that DJL Serving collects before a call when `rolling_batch` is off."""
    max_waiting: Annotated[Count, Option(allowed=COUNT)] = 1000
    """Requests that may wait for a slot; one more gets 503. 1000 is the length of DJL Serving's own queue."""
    decode_interleave: Annotated[Count, Option(allowed=COUNT)] = 1
    """Decode steps between two prompt steps while sequences are running: a higher value makes running streams
    smoother and new requests wait longer."""

    output_formatter: Annotated[Literal["json", "jsonlines", "sse"] | None, Lower, Option()] = None
    """Format of LMI answers. Left out: `json`, and `jsonlines` for a request with `stream`."""
    predict_timeout: Annotated[Seconds, Option(allowed=SECONDS, env=("PREDICT_TIMEOUT",))] = 120.0
    """Most time that a request waits for a slot and that a step on the device takes."""
    model_loading_timeout: Annotated[
        Seconds, Option(allowed=SECONDS, env=("MODEL_LOADING_TIMEOUT",))
    ] = 240.0
    """Most time that a model may take to load. DJL Serving reads it and ends a load that takes longer; the embedded
    server has no limit. Compiling on first use needs much more than the default."""
    skip_warmup: Annotated[bool, Option()] = False
    """Answer before every graph has run once; the first request of each length is then slower."""
    cpu_threads: Annotated[Count | None, Option(allowed=COUNT)] = None
    """Threads that the cpu loader computes with. The default is all physical cores but one, which is left to the
    server."""


def option(name: str) -> Option:
    """The marker of a field."""
    metadata = ServingOptions.model_fields[name].metadata
    return next(entry for entry in metadata if isinstance(entry, Option))


def allowed_values(name: str) -> str:
    """The values that an option takes, in words: ``auto, cpu, tnx or nxdi``."""
    if words := option(name).allowed:
        return words
    annotation: Any = ServingOptions.model_fields[name].annotation
    if annotation is bool:
        return "true or false"
    branches = [annotation] if get_origin(annotation) is Literal else get_args(annotation)
    *most, last = [
        value for branch in branches if branch is not NoneType for value in get_args(branch)
    ]
    return f"{', '.join(most)} or {last}"


NAMES: Mapping[str, str] = MappingProxyType(
    {known: name for name in ServingOptions.model_fields for known in (name, *option(name).aliases)}
)
"""Every name that an option can be written with, aliases included, to the field's name."""

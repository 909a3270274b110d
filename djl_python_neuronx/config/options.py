"""Every option of `serving.properties`: one annotated field is one option.

`ServingOptions` has them all: its own, those of the graphs (graph_options.py) and those that only NxD Inference knows
(nxdi_options.py). Each class is a section of docs/options.md, the text below a field its documentation there. An
option's name, aliases and environment names, its check, its place in `Resolved.explain` and what the libraries are
given of it (mapping.py) all follow from the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, get_args, get_origin

from pydantic import Field

from djl_python_neuronx.config.graph_options import GraphOptions
from djl_python_neuronx.config.values import (
    AMOUNT,
    BUCKETS,
    COUNT,
    DTYPES,
    POSITIONS,
    SECONDS,
    Amount,
    AutoDtype,
    Buckets,
    Count,
    Hyphenated,
    Lower,
    OneOrList,
    Option,
    OptionGroup,
    Positions,
    Seconds,
    TokenBuckets,
)

MAX_ROWS = 999
"""Rows of one call of DJL Serving's rolling batch."""

_STORED: Mapping[str, Literal["int8", "fp8"]] = MappingProxyType(
    {"static_int8": "int8", "static_fp8": "fp8"}
)


class BatchingOptions(GraphOptions):
    """Batching and lengths."""

    n_positions: Annotated[
        TokenBuckets | Positions | None,
        OneOrList,
        Option(
            allowed=f'{POSITIONS}, or lengths such as "1024,2048,4096"',
            aliases=("max_model_len",),
            to={"tnx": "n_positions", "nxdi": "seq_len"},
        ),
    ] = None
    """Tokens that a sequence can have, prompt and output together. A list compiles a decode graph for each of its
    lengths, and a step runs in the smallest that holds every sequence; the last one is the limit. The default is what
    the model was trained for, at most 4096, and what fits into memory; on a CPU at most 2048."""
    context_length_estimate: Annotated[
        Buckets | None,
        Option(
            allowed=BUCKETS,
            aliases=("context_encoding_buckets",),
            env=("NEURON_CONTEXT_LENGTH_ESTIMATE",),
            to={"tnx": "context_length_estimate", "nxdi": "context_encoding_buckets"},
        ),
    ] = None
    """Prompt lengths that graphs are compiled for; a prompt runs in the smallest that holds it, and the last is the
    longest prompt. The default is chosen from `n_positions`. With `enable_chunked_prefill` these are the tokens of a
    step, and prompts are as long as `n_positions` allows; the default is chosen from `max_rolling_batch_size`."""
    rolling_batch: Annotated[Literal["auto", "tnx", "vllm", "disable"], Lower, Option()] = "auto"
    """How DJL Serving hands over requests. `tnx` and `vllm` mean the same here: a row per request, joining and leaving
    at each step. `disable`: one request (or `batch_size`) at a time. Recent DJL Serving turns `auto` into `disable`
    before the handler sees it: write `tnx`, or set `async_mode`."""
    async_mode: Annotated[bool, Option()] = False
    """DJL Serving hands over each request once and gets tokens as they come. Not together with `rolling_batch`."""
    max_rolling_batch_size: Annotated[
        Count | None,
        Option(
            allowed=COUNT,
            aliases=("max_num_seqs",),
            to={"tnx": "batch_size", "nxdi": "batch_size"},
        ),
    ] = None
    """Sequences that are generated at once: the slots of the cache. The default is what fits into memory, at most 32,
    which is what DJL Serving sends."""
    batch_size: Annotated[Count, Option(allowed=COUNT)] = 1
    """Requests that DJL Serving collects before a call when `rolling_batch` is off."""
    max_waiting: Annotated[Count, Option(allowed=COUNT)] = 1000
    """Requests that may wait for a slot; one more gets 503. 1000 is the length of DJL Serving's own queue."""
    decode_interleave: Annotated[Count, Option(allowed=COUNT)] = 1
    """Decode steps between two prompt steps while sequences are running: a higher value makes running streams
    smoother and new requests wait longer."""
    max_join_wait_ms: Annotated[Amount, Option(allowed=AMOUNT)] = 100
    """Milliseconds that new requests wait for one another before they join a static batch, where each join has every
    running sequence encoded anew; the decode steps of `decode_interleave` come first all the same. Nobody waits while
    nothing runs, or once the free slots can be filled; 0: never. Where joining costs the others nothing it has no
    effect. 100 ms is how long DJL Serving collects a batch: mostly less than the prompt step that it saves, and hardly
    noticed before a first token."""


class ServingOptions(BatchingOptions):
    """General.

    All options, validated one by one; `rules.conflicts` tells what does not go together. None means that the value
    follows from the model and the machine, `resolve.assess` fills it in, or else that the library's default holds.
    """

    model_id: Annotated[
        str | None,
        Option(
            allowed="a folder, a Hugging Face model id or s3://bucket/key",
            aliases=("s3url",),
            env=("HF_MODEL_ID",),
        ),
    ] = None
    """The model: a local folder, absolute or relative to the model folder, an id of the Hugging Face hub, or a place in
    S3. The latter two are downloaded, once for all processes, and again only where they changed. By default the model
    lies in the model folder itself."""
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
    task: Annotated[Literal["text-generation", "auto"], Hyphenated, Option(env=("HF_TASK",))] = (
        "text-generation"
    )
    """What the model does. Only text is generated: no embeddings, no classification."""

    model_loader: Annotated[
        Literal["auto", "cpu", "tnx", "nxdi", "optimum", "vllm"], Lower, Option()
    ] = "auto"
    """Backend. `auto` takes the one that the model was compiled for, else an installed Neuron library, else, on a
    machine without any Neuron device, `cpu`. `optimum` and `vllm` are loaders of the old engine and mean `auto`. This
    version has `cpu` and `tnx`; `nxdi` says so and stops."""
    tensor_parallel_degree: Annotated[
        Count | Literal["max"] | None,
        Lower,
        Option(
            allowed=f'{COUNT}, or "max"',
            aliases=("tp_degree", "tensor_parallel_size"),
            env=("TENSOR_PARALLEL_DEGREE",),
            to={"tnx": "tp_degree", "nxdi": "tp_degree"},
        ),
    ] = None
    """NeuronCores that share the model: Inf2 takes 1, 2, 4, 8 or 24 (12 too, which its guide does not list), Trn1
    1, 2, 8, 16 or 32, Trn2 1, 2, 4, 8, 16, 32 or 64. `max` is the largest of these that the machine has. The cpu
    loader uses none: a file written for Inferentia can be tried on a CPU as it is."""
    dtype: Annotated[
        AutoDtype,
        Option(
            allowed=f"auto, {DTYPES}",
            aliases=("torch_dtype",),
            to={"tnx": "amp", "nxdi": "torch_dtype"},
        ),
    ] = "auto"
    """Type of weights and activations. `auto` is the checkpoint's own, bfloat16 on a Neuron device where that is
    float32. The cpu loader computes float16, asked for or not, in float32: CPUs are slow at float16, and it loses
    accuracy."""

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

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of a sequence: the largest of `n_positions`."""
        return self.n_positions[-1] if isinstance(self.n_positions, tuple) else self.n_positions

    @property
    def token_buckets(self) -> tuple[int, ...] | None:
        """Lengths that decode graphs are compiled for, ascending; None unless `n_positions` was written as a list."""
        return self.n_positions if isinstance(self.n_positions, tuple) else None

    @property
    def weight_dtype(self) -> Literal["int8", "fp8"] | None:
        """What `quantize` stores weights in."""
        return None if self.quantize is None else _STORED[self.quantize]


def option(name: str) -> Option:
    """The marker of a field."""
    metadata = ServingOptions.model_fields[name].metadata
    return next(entry for entry in metadata if isinstance(entry, Option))


def allowed_values(name: str) -> str:
    """The values that an option takes, in words: ``auto, cpu, tnx or nxdi``."""
    if words := option(name).allowed:
        return words
    *most, last = _choices(ServingOptions.model_fields[name].annotation)
    return f"{', '.join(most)} or {last}"


def _choices(annotation: object) -> list[str]:
    """The values of the Literals and booleans in a type."""
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [choice for branch in get_args(annotation) for choice in _choices(branch)]


SECTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        str(group.__doc__).partition(".")[0]: tuple(group.__annotations__)
        for group in ServingOptions.__mro__
        if issubclass(group, OptionGroup) and group is not OptionGroup
    }
)
"""Title to options, in the order in which people read them: one class of options is one section."""

NAMES: Mapping[str, str] = MappingProxyType(
    {known: name for name in ServingOptions.model_fields for known in (name, *option(name).aliases)}
)
"""Every name that an option can be written with, aliases included, to the field's name."""

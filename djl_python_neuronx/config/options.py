"""Every option of `serving.properties`: one annotated field is one option.

`ServingOptions` has them all. Each of its base classes is a section of docs/options.md, and the text below a field is
the option's documentation there. Name, aliases, environment variables, validation, the place in `Resolved.explain` and
what the libraries get all follow from the field and its `Option` marker.

Sources: the old engine (djl-serving 1132e3ab^, tnx_properties.py), transformers-neuronx 0.13 (config.py) and
NxD Inference 0.9 (models/config.py). Options that only NxD Inference has are in nxdi_options.py, those of the embedded
server in server_options.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationError

from djl_python_neuronx.config.device_sampling import OnDeviceGeneration, parse_generation
from djl_python_neuronx.config.lora_options import LoraOptions
from djl_python_neuronx.config.nxdi_options import NxdiOptions
from djl_python_neuronx.config.server_options import LimitOptions, ServerOptions
from djl_python_neuronx.config.step_times import STEP_MS, StepMs
from djl_python_neuronx.config.values import (
    COUNT,
    POSITIONS,
    SAME,
    Amount,
    AutoDtype,
    Buckets,
    Count,
    Djl,
    Dtype,
    EightBits,
    Hyphenated,
    Location,
    Lower,
    ModelSource,
    Names,
    Object,
    OneOrList,
    Option,
    OptionGroup,
    Order,
    Plain,
    Positions,
    Seconds,
    Template,
    TokenBuckets,
    Upper,
    Weights,
    allowed_words,
)
from djl_python_neuronx.errors import redacted

MAX_ROWS = 999
"""Most rows of one call of DJL Serving's rolling batch."""

_STORED: Final[Mapping[str, Literal["int8", "fp8"]]] = {"static_int8": "int8", "static_fp8": "fp8"}


_TNX = Option(to={"tnx": SAME})
_TNX_TUNING = Option(to={"tnx": SAME}, tunes=True)
_Tuning = Annotated[bool | None, _TNX_TUNING]
_DRAFTING = "enable_speculative_decoder()"
_CACHE = "NEURON_COMPILE_CACHE_URL"


def _both(nxdi: str, **facts: Any) -> Option:  # noqa: ANN401
    """The marker of an option named as in TNX; NxD Inference's name is accepted too."""
    return Option(aliases=(nxdi,), to={"tnx": SAME, "nxdi": nxdi}, **facts)


class GeneralOptions(OptionGroup):
    """General."""

    model_id: Annotated[
        ModelSource | None,
        Option(
            aliases=("s3url",),
            env=("HF_MODEL_ID",),
            output="local",
            djl=Djl(reads="word", otherwise="does not read the model's configuration"),
        ),
    ] = None
    """The model: a local folder (absolute, or relative to the model folder), a Hugging Face model id or an S3 URI. Ids
    and URIs are downloaded once for all processes, and again only where the source changed. Default: the model folder
    itself."""
    model_dir: Annotated[Path | None, Option(allowed="a folder", output="local")] = None
    """Folder that holds `serving.properties`. Set by the server or by DJL Serving; an error in the file."""
    revision: Annotated[
        Plain | None,
        Option(allowed="a branch, tag or commit", env=("HF_REVISION",), output="local"),
    ] = None
    """Revision of a Hugging Face model id. For a local folder it only selects the revision of the model's own code."""
    trust_remote_code: Annotated[bool, Option(draft="same", output="file")] = False
    """Run Python code that comes with the model, in the embedded server also the formatters of its `model.py`. Read the
    code first."""
    model_name: Annotated[Names | None, Option(aliases=("served_model_name",))] = None
    """Names of the model in requests (`/predictions/<name>`, OpenAI's `model`): the first is the name in answers,
    others are aliases. Default: the name of the model's folder, and `model_id` as it is given."""
    chat_template: Annotated[Template | None, Option(text_file=True)] = None
    """Chat template in place of the model's own: Jinja, as in transformers. A file is absolute or relative to the model
    folder; text with `{{` or `{%` is the template itself."""
    tool_call_parser: Annotated[
        Literal[
            "auto",
            "none",
            "hermes",
            "llama3_json",
            "mistral",
            "granite",
            "deepseek_v3",
            "deepseek_v31",
        ],
        Lower,
        Option(),
    ] = "auto"
    """Format in which the model calls tools (docs/protocols.md), by vLLM's names. `auto`: the one of which the chat
    template has a text; `none`: requests with tools get 400."""
    reasoning_parser: Annotated[
        Literal["auto", "none", "deepseek_r1", "qwen3", "mistral", "granite"], Lower, Option()
    ] = "auto"
    """Format in which the model marks its reasoning (docs/protocols.md), by vLLM's names. `auto`: the one of which the
    chat template has a text; `none`: it stays in the text."""
    generation_config: Annotated[Literal["auto", "vllm"], Lower, Option()] = "auto"
    """Defaults of OpenAI's parameters: `auto` takes sampling and most tokens from the model's `generation_config.json`
    where it has them (docs/protocols.md), else from OpenAI's reference; `vllm` takes all from the reference."""
    task: Annotated[Literal["text-generation", "auto"], Hyphenated, Option(env=("HF_TASK",))] = (
        "text-generation"
    )
    """Task of the model. Only text generation is supported: no embeddings, no classification."""

    model_loader: Annotated[
        Literal["auto", "cpu", "tnx", "nxdi", "sim", "optimum", "vllm"],
        Lower,
        Option(output="file"),
    ] = "auto"
    """Backend. `auto` selects the backend that the model was compiled for, else an installed Neuron library that serves
    the model with these options (`nxdi` before `tnx`), else `cpu` if the machine has no Neuron device. `sim` runs no
    model and makes up all answers, for load tests: docs/sim.md. `optimum` and `vllm` are loaders of the old engine
    and mean `auto`."""
    tensor_parallel_degree: Annotated[
        Count | Literal["max"] | None,
        Lower,
        Option(
            allowed=f'{COUNT}, or "max"',
            aliases=("tp_degree", "tensor_parallel_size"),
            env=("TENSOR_PARALLEL_DEGREE",),
            to={"tnx": "tp_degree", "nxdi": "tp_degree"},
            computed=True,
            djl=Djl(reads="cores", otherwise="starts a process for each NeuronCore"),
        ),
    ] = None
    """NeuronCores that share the model. Inf2: 1, 2, 4, 8 or 24 (12 works too, although its guide does not list it);
    Trn1: 1, 2, 8, 16 or 32; Trn2: 1, 2, 4, 8, 16, 32 or 64. `max` is the largest of these that the machine has
    and the library takes for the model. The default is the one whose cores read least in a decode step, padding
    included; `check` prints it. With several models or copies it is another, see `replicas`. Ignored by the cpu
    backend, so that a file for Inferentia can be tried on a CPU unchanged."""
    replicas: Annotated[
        Annotated[int, Field(ge=1, le=128)] | Literal["max"],
        Lower,
        Option(allowed='a whole number from 1 to 128, or "max"', output="file"),
    ] = 1
    """Copies of the model, each in an engine process with its own NeuronCores; requests go to the one that has least
    to do. `max` is as many as the machine holds beside the other models of the server, and 1 on a CPU. With several
    copies the default of `tensor_parallel_degree` is the degree with the most slots per core. Under DJL Serving, on
    Neuron devices, leave it out: it starts a process for each copy."""
    dtype: Annotated[
        AutoDtype,
        Option(
            aliases=("torch_dtype", "amp"),
            to={"tnx": "amp", "nxdi": "torch_dtype"},
            computed=True,
            cpu=True,
            draft="same",
        ),
    ] = "auto"
    """Type of weights and activations. `auto` is the checkpoint's type, or bfloat16 on a Neuron device if that is
    float32. The cpu backend computes float16 in float32, because CPUs are slow at float16 and it loses accuracy."""

    output_formatter: Annotated[
        Literal[
            "json",
            "jsonlines",
            "sse",
            "3p",
            "3p_stream",
            "json_chat",
            "jsonlines_chat",
            "sse_chat",
        ]
        | None,
        Lower,
        Option(),
    ] = None
    """Format of LMI answers. Default: `json`, or `jsonlines` for a request with `stream`. `3p` and `3p_stream` have
    Bedrock's shape, and allow its bodies. `json_chat`, `jsonlines_chat` and `sse_chat` have no effect on LMI's
    requests."""
    tgi_compat: Annotated[bool, Option()] = False
    """Answer LMI requests in TGI's shape: a list of one, with details by default; streams are server-sent events."""
    bedrock_compat: Annotated[bool, Option()] = False
    """A body with `prompt` is for one of Bedrock's models ("3p"), not an OpenAI completion."""
    predict_timeout: Annotated[
        Seconds, Option(env=("PREDICT_TIMEOUT",), djl=Djl(reads="seconds"))
    ] = 120.0
    """Default of the three limits that follow. DJL Serving reads it too, as its limit for each call of Python."""
    step_timeout: Annotated[Seconds | None, Option()] = None
    """Longest time of a step on the device; ten times as long for the first one of a graph. After it the device counts
    as hanging, and the engine is started again. Default: `predict_timeout`."""
    queue_timeout: Annotated[Seconds | None, Option()] = None
    """Longest time that a request waits for a slot; then it gets 408. If the engine is started again meanwhile, the
    time restarts when it is ready. Default: `predict_timeout`."""
    restart_timeout: Annotated[Seconds | None, Option()] = None
    """Longest time that a request waits for an engine that is started again, or for the only copy of a model that is
    reloaded; then it gets 503. Its earlier wait for a slot does not count. Default: `predict_timeout`."""
    model_loading_timeout: Annotated[
        Seconds, Option(env=("MODEL_LOADING_TIMEOUT",), djl=Djl(reads="seconds", sign=True))
    ] = 240.0
    """Longest time to load the model. DJL Serving stops a load that takes longer; the embedded server has no limit.
    Compiling on first use takes much longer than the default."""
    skip_warmup: Annotated[bool, Option()] = False
    """Do not run every graph once before serving. The first request of each length is then slower."""
    cpu_threads: Annotated[Count | None, Option(draft="same")] = None
    """Threads of each copy on the cpu backend. Default: all physical cores but one, which is left to the server, shared
    by the copies (`replicas`)."""
    sim_step_ms: Annotated[StepMs, Option(allowed=STEP_MS, file=True)] = 10.0
    """Time of a step with `model_loader=sim`. A number is for every step. An object has the times of buckets: a step
    takes that of the smallest one which holds its own bucket."""


class BatchingOptions(OptionGroup):
    """Batching and lengths."""

    n_positions: Annotated[
        TokenBuckets | Positions | None,
        OneOrList,
        Option(
            allowed=f'{POSITIONS}, or lengths such as "1024,2048,4096"',
            aliases=("max_model_len",),
            to={"tnx": "n_positions", "nxdi": "seq_len"},
            computed=True,
            cpu=True,
        ),
    ] = None
    """Longest sequence, prompt and output together. A list compiles one decode graph for each length; a step runs in
    the smallest graph that holds every sequence, and the last length is the limit. Default: the length that the model
    was trained for, at most 4096 and at most what fits into memory; at most 2048 on a CPU."""
    context_length_estimate: Annotated[
        Buckets | None,
        _both(
            "context_encoding_buckets",
            env=("NEURON_CONTEXT_LENGTH_ESTIMATE",),
            computed=True,
            cpu=True,
        ),
    ] = None
    """Prompt lengths to compile graphs for. A prompt runs in the smallest graph that holds it, and the last length is
    the longest prompt. Default: derived from `n_positions`. With `enable_chunked_prefill` these are the tokens of a
    step, prompts may be as long as `n_positions`, and the default is derived from `max_rolling_batch_size`."""
    rolling_batch: Annotated[
        Literal["auto", "tnx", "vllm", "disable"],
        BeforeValidator(lambda mode: "vllm" if mode == "lmi-dist" else mode),
        Lower,
        Option(output="file", djl=Djl(overrules=True, sign=True, reads="mode")),
    ] = "auto"
    """How DJL Serving hands over requests. `tnx` and `vllm` mean the same: requests join and leave the batch at each
    step; `lmi-dist` is read as `vllm`, as in DJL Serving. `disable`: one request, or `batch_size` of them, at a time.
    Recent DJL Serving turns `auto` into `disable` before the handler gets it: set `tnx`, or `async_mode`."""
    async_mode: Annotated[bool, Option(output="file", djl=Djl(overrules=True, reads="truth"))] = (
        False
    )
    """DJL Serving hands over each request once and receives tokens as they are generated. Excludes `rolling_batch`, and
    a `batch_size` that DJL Serving collects. NxD Inference's `async_mode` is the option `async_execution`."""
    max_rolling_batch_size: Annotated[
        Count | None,
        Option(
            aliases=("max_num_seqs",),
            to={"tnx": "batch_size", "nxdi": "batch_size"},
            computed=True,
            cpu=True,
            draft="same",
            djl=Djl(
                fills_in=("32", "256"),
                sign=True,
                reads="rows",
                otherwise="sends up to {rows} rows",
            ),
        ),
    ] = None
    """Sequences that are generated at once: the slots of the KV cache. Default: what fits into memory, at most 32,
    which is how many DJL Serving sends."""
    batch_size: Annotated[Count, Option(env=("SERVING_BATCH_SIZE",))] = 1
    """Requests that DJL Serving collects for one call; it turns `rolling_batch` off for them. It reads `batch_size`
    without `option.` only: `option.batch_size` sets the number of slots, and requests come one at a time."""
    engine_process: Annotated[bool, Option()] = True
    """Run the engine in a separate process, which is started again after a crash. False: on a thread, to debug it."""
    engine_restarts: Annotated[Amount, Option()] = 10
    """Most starts of an engine process after crashes within ten minutes, and of those that fail in a row, however long
    they take; after one more, it is given up, and with the last one of `replicas` the server ends."""
    core_wait_s: Annotated[Amount, Option()] = 90
    """Most seconds to wait for NeuronCores that another process still holds, such as a server or pod that this one
    replaces, from the first start of an engine that failed by it; the log names the process. After a crash only the
    first start waits. 0: no wait. Under DJL Serving wait and load together must end within `model_loading_timeout`."""
    resume_requests: Annotated[bool, Option()] = True
    """After a crash of the engine, go on with the requests that have tokens: their prompt and tokens are prefilled by
    another copy or the next engine, and the rest follows what was sent. A request that was running at two crashes gets
    an error. False: at the first one. A reload hands requests over in the same way; False: it waits for their ends."""
    max_waiting: Annotated[Count, Option()] = 1000
    """Requests that may wait for a slot of one copy (`replicas`); any further request gets 503. 1000 is the length of
    DJL Serving's own queue."""
    scheduling_policy: Annotated[Literal["fcfs", "priority"], Lower, Option()] = "fcfs"
    """Order in which waiting requests get slots: `fcfs`, as they came; `priority`, those with the lowest number in
    their field `priority` first, and as they came among equals. Any client can then overtake the others: set it where
    all are trusted, or where a gateway writes the field."""
    fairness_key: Annotated[Literal["api_key", "user"] | None, Lower, Option()] = None
    """Clients take turns for free slots, and the more requests wait, the fewer one client may have: as many as there is
    still room for, or as there are slots. A client is who sends an API key (`api_key`; without keys of this server
    its gateway must check them), or a name in the request (`user`: docs/protocols.md), which clients choose themselves:
    let a gateway write it. Requests without one are one client's. Unset: all are."""
    decode_interleave: Annotated[Count, Option()] = 1
    """Decode steps between two prefills while sequences are running. Higher values make running streams smoother and
    new requests wait longer."""
    enable_prefix_caching: Annotated[
        bool | None,
        Option(
            to={"tnx": "init_cache_engine()", "nxdi": "is_prefix_caching"},
            computed=True,
            cpu=True,
            graph=("nxdi",),
        ),
    ] = None
    """Reuse what the KV cache holds of a prompt's beginning, as of a conversation's turns before, instead of running it
    again: with `cpu`, in `tnx` with `enable_chunked_prefill`, whose blocks are shared, and in `nxdi` with `true`, which
    keeps the cache in blocks and compiles more graphs (docs/nxdi.md, "Prefix caching"). docs/security.md says who
    shares what. Default: where it costs no graphs, `cpu` and `tnx`."""
    native_sampling: Annotated[bool, Option(env=("DJL_NEURONX_NATIVE",))] = True
    """Sample with the compiled kernel, where the package has one. False: with numpy, which gives the same tokens."""
    sampling_threads: Annotated[Count | None, Option()] = None
    """Threads of the compiled kernel that sample the rows of one step, of each copy (`replicas`). There are no more
    than rows, and each has at least 262,144 logits to read: 8 rows of 32,000 are one thread's. Default: a quarter of
    the host's cores, divided among the copies, at most 4."""
    max_join_wait_ms: Annotated[Amount, Option()] = 100
    """Milliseconds that new requests wait for each other before they join a static batch, where every join prefills all
    running sequences again. The decode steps of `decode_interleave` run first in any case. Requests do not wait while
    nothing runs, or if they fill the free slots; 0 disables waiting. No effect with continuous batching. 100 ms is how
    long DJL Serving collects a batch: usually less than the prefill that it saves, and hardly noticeable before a
    first token."""


class GraphOptions(OptionGroup):
    """Graphs and layouts."""

    group_query_attention: Annotated[
        Literal["shard-over-heads", "shard-over-batch", "replicated-heads", "all-gather-heads"]
        | None,
        Hyphenated,
        _TNX_TUNING,
    ] = None
    """How cores share KV heads if there are fewer than query heads. Default: the library's choice."""
    fuse_qkv: Annotated[bool | None, _both("fused_qkv", tunes=True)] = None
    """One matrix product instead of three for queries, keys and values."""
    fuse_mlp: _Tuning = None
    """One matrix product instead of two at the input of the MLP. Needs `mlp_out_weight_transpose`."""
    fused_rmsnorm_qkv: Annotated[bool | None, _both("qkv_kernel_enabled", tunes=True)] = None
    """Kernel for the norm before attention and the QKV projections. TNX needs `fuse_qkv`, `attention_layout=BSH`,
    `group_query_attention=replicated-heads` and no `sequence_parallel` for it."""
    fused_rmsnorm_mlp: Annotated[bool | None, _both("mlp_kernel_enabled", tunes=True)] = None
    """Kernel for the norm before the MLP and the MLP. TNX needs `attention_layout=BSH` and
    `group_query_attention=replicated-heads` for it."""
    qkv_tiling: _Tuning = None
    """Split the QKV projections into tiles of 128; both of their dimensions must be multiples of it. Needs
    `fuse_qkv`."""
    weight_tiling: _Tuning = None
    """Split the weights of the MLP into tiles of 128."""
    mlp_in_weight_tiling_permute_order: Annotated[Order | None, _TNX_TUNING] = None
    """Order of the tiles' axes at the input of the MLP, axis 2 before axis 3; with `weight_tiling`. Library default:
    1,2,0,3."""
    mlp_out_weight_tiling_permute_order: Annotated[Order | None, _TNX_TUNING] = None
    """The same at the output of the MLP."""
    mlp_out_weight_transpose: _Tuning = None
    """Store the weights at the output of the MLP transposed."""
    attn_output_transposed: _Tuning = None
    """Store the weights of the projection after attention transposed."""
    attention_layout: Annotated[Literal["HSB", "BSH"] | None, Upper, _TNX_TUNING] = None
    """Order of the axes in attention: hidden, sequence, batch. TNX default: HSB."""
    collectives_layout: Annotated[Literal["HSB", "BSH"] | None, Upper, _TNX_TUNING] = None
    """Order of the axes of the values that cores exchange. TNX default: HSB."""
    cache_layout: Annotated[Literal["SBH", "BSH"] | None, Upper, _TNX_TUNING] = None
    """Order of the axes of the KV cache. TNX default: SBH; BSH needs continuous batching and one bucket."""
    sequence_parallel: Annotated[
        bool | None,
        Option(
            aliases=("sequence_parallel_enabled", "sequence_parallel_norm"),
            env=("NEURON_SEQUENCE_PARALLEL",),
            to={"tnx": "sequence_parallel_norm", "nxdi": "sequence_parallel_enabled"},
            tunes=True,
        ),
    ] = None
    """Divide a prompt's tokens among the cores where tokens are independent (norms)."""
    sequence_parallel_norm_threshold: Annotated[Count | None, _TNX_TUNING] = None
    """Prompt length in tokens above which `sequence_parallel` applies. TNX default: 2048."""
    shard_over_sequence: Annotated[
        bool | None,
        _both("flash_decoding_enabled", env=("NEURON_SHARD_OVER_SEQUENCE",), tunes=True),
    ] = None
    """Divide the tokens of the KV cache among the cores (flash decoding), for a batch times length above 16384."""
    duplicate_q_weight_sos: _Tuning = None
    """Copy the query weights to all cores instead of gathering queries; with `shard_over_sequence`."""
    on_device_embedding: Annotated[
        bool | None,
        Option(
            env=("NEURON_ON_DEVICE_EMBEDDING",),
            to={"tnx": SAME},
            tunes=True,
            always={"nxdi": True},
        ),
    ] = None
    """Look embeddings up on the device. TNX default: on the host; NxDI always does it on the device."""
    on_device_generation: Annotated[
        OnDeviceGeneration | None,
        BeforeValidator(parse_generation),
        _both(
            "on_device_sampling_config",
            allowed="true, false, a JSON object of do_sample, dynamic, top_k, top_p, temperature, top_p_min_tokens, "
            "global_top_k, per_batch_line and deterministic, or a file that holds one",
            env=("NEURON_ON_DEV_GENERATION",),
            file=True,
            computed=True,
            draft="off",
        ),
    ] = None
    """Sample on the device, which saves the transfer of all logits: faster, but without seeds, penalties,
    log-probabilities and constraints. `true` samples with each request's own top_k, top_p and temperature. With NxD
    Inference a top_p below 1 is the host's, which needs `output_logits`."""
    on_device_default_top_k: Annotated[Literal["global_top_k"] | None, Lower, Option()] = None
    """top_k of requests that sample without one, if the device samples with each request's own parameters
    (`on_device_generation` with `dynamic`). The device cannot sample from the whole vocabulary: without this option
    such a request is an error; with `global_top_k` it samples from that many of the most likely tokens. OpenAI's routes
    do so by default for a request that leaves `top_k` out."""
    padding_side: Annotated[
        Literal["left", "right"] | None, Lower, Option(to={"tnx": SAME, "nxdi": SAME})
    ] = None
    """Side on which shorter prompts of a batch are padded. Continuous batching pads on the right."""
    is_block_kv_layout: Annotated[
        bool | None,
        Option(
            aliases=("optimized_paged_attention",),
            to={
                "tnx": "continuous_batching.optimized_paged_attention",
                "nxdi": SAME,
            },
            computed=True,
        ),
    ] = None
    """Store the KV cache in blocks instead of one row per slot (paged attention). transformers-neuronx is served
    with it for `enable_chunked_prefill` only, NxD Inference for `enable_prefix_caching` only, which imply it."""
    pa_block_size: Annotated[
        Count | None, Option(to={"tnx": "init_cache_engine()", "nxdi": SAME})
    ] = None
    """Tokens in a block of the KV cache; with `is_block_kv_layout`. For `enable_chunked_prefill` a power of two below
    `n_positions`. Default: at least 128, and large enough for at most 256 blocks, because graphs grow with their
    number. For `enable_prefix_caching` a power of two that divides all lengths; default: 32 at most."""
    pa_num_blocks: Annotated[
        Count | None, Option(to={"tnx": "init_cache_engine()", "nxdi": SAME})
    ] = None
    """Blocks of the KV cache; with `is_block_kv_layout`. The default is what all slots need at their full length, and
    fewer are an error. With `enable_prefix_caching` further ones keep prefixes while all slots are in use."""
    prefix_buckets: Annotated[Buckets | None, Option(to={"nxdi": SAME})] = None
    """Lengths of a cached prefix to compile prompt graphs for, each with every one of `context_length_estimate`, and
    those without a prefix; multiples of `pa_block_size`. With `enable_prefix_caching` in NxD Inference, which reads as
    much of the cache as the smallest holds. Default: a quarter of what the longest prompt needs, and all."""
    enable_chunked_prefill: Annotated[
        bool,
        Option(
            aliases=("is_chunked_prefill",),
            to={"tnx": "continuous_batching.enable_chunked_prefill"},
            cpu=True,
            draft="off",
        ),
    ] = False
    """Prefill prompts in chunks together with the running streams, so that a long prompt does not stall them: every
    step has one token of each stream, and prompts share the rest of the tokens of `context_length_estimate`. Where a
    chunk ends depends on the other requests; the answer does not, up to rounding of the dtype. Supported for llama on
    transformers-neuronx, where it implies `is_block_kv_layout`, and on the CPU; NxDI 0.9 raises NotImplementedError."""
    pipeline_parallel_degree: Annotated[
        Count,
        Option(
            aliases=("pp_degree",),
            env=("PIPELINE_PARALLEL_DEGREE",),
            to={"nxdi": "pp_degree"},
            computed=True,
            djl=Djl(fills_in=("1",), reads="whole"),
        ),
    ] = 1
    """Stages that the layers are divided into. Only 1: neither library divides layers (docs/nxdi.md), and DJL Serving
    starts no Neuron worker with more."""
    rolling_batch_strategy: Annotated[
        Literal["continuous_batching", "naive_rolling_batch"] | None,
        Lower,
        Option(graph=("cpu", "tnx", "nxdi")),
    ] = None
    """How sequences join a running batch: `continuous_batching` prefills the new prompt only, `naive_rolling_batch`
    prefills all sequences again. Default: the first if the model supports it; with NxD Inference the second where DJL
    Serving collects `batch_size` requests for each call (`rolling_batch=disable`)."""
    allow_known_defects: Annotated[bool, Option()] = False
    """Serve combinations that are known to give wrong answers in the library. Without it they are errors."""


class PrecisionOptions(OptionGroup):
    """Precision and quantisation."""

    quantize: Annotated[
        Weights | None,
        Option(
            allowed="static_int8 (int8, s8, neuron_quant, true), static_fp8 (fp8, f8e4m3fn) or false; checkpoints that "
            "are quantised already need dequantize=true",
            aliases=("load_in_8bit", "neuron_quant"),
            env=("NEURON_QUANT",),
            to={"tnx": "quant.quant_dtype", "nxdi": "quantization_dtype"},
            computed=True,
        ),
    ] = None
    """Store weights in 8 bits and compute in `dtype`: half the memory, half the memory traffic. TNX quantises while
    loading, NxDI once, when it compiles: docs/nxdi.md. Embeddings stay in `dtype`."""
    kv_cache_quantize: Annotated[
        EightBits | None,
        Option(
            allowed="int8 (s8) or fp8 (f8e4m3fn)",
            to={"tnx": "kv_cache_quant.quant_dtype", "nxdi": "kv_quant_config.quant_dtype"},
            computed=True,
        ),
    ] = None
    """Store the KV cache in 8 bits: twice as many tokens in the same memory. NxDI has fp8 only."""
    dequantize: Annotated[bool, Option(output="local")] = False
    """Convert a checkpoint that is quantised (AWQ, GPTQ, FP8) to bfloat16 before it is loaded: once, into the folder
    for downloads. `quantize` may quantise it again, for the device. Without it such checkpoints are an error;
    docs/artifacts.md has the formats."""
    all_reduce_dtype: Annotated[Dtype | None, _both("rpl_reduce_dtype")] = None
    """Type in which partial results are summed across cores. NxDI applies it to the projection after attention."""
    cast_logits_dtype: Annotated[
        Dtype | None, Option(to={"tnx": SAME}, always={"nxdi": "float32"})
    ] = None
    """Type of the logits. TNX default: float32, the only type of NxDI."""
    bf16_rms_norm: Annotated[bool | None, _TNX] = None
    """Compute RMS norms in bfloat16 instead of float32."""


class SpeculationOptions(OptionGroup):
    """Speculation."""

    speculative_draft_model: Annotated[
        ModelSource | None,
        Field(min_length=1),
        Option(
            aliases=("draft_model_id",),
            to={"tnx": _DRAFTING, "nxdi": "fused_spec_config.draft_model_path"},
            graph=(),
            cpu=True,
            draft="off",
        ),
    ] = None
    """Small model with the same vocabulary that proposes tokens for the large one to verify. With NxD Inference it is
    part of the model's own graphs (`enable_fused_speculation`), which sample greedily (docs/nxdi.md)."""
    draft_model_kind: Annotated[
        Literal["draft_model", "eagle", "eagle3"],
        Lower,
        Option(to={"nxdi": "enable_eagle_speculation"}, computed=True),
    ] = "draft_model"
    """Kind of draft model: a whole one, or the layers of EAGLE or EAGLE3, which read the model's own states. These take
    embeddings and output projection from the model where their checkpoint has none."""
    enable_fused_speculation: Annotated[bool | None, Option(to={"nxdi": SAME}, computed=True)] = (
        None
    )
    """Compile model and draft model into the same graphs, and verify on the device. Default: true."""
    enable_eagle_draft_input_norm: Annotated[
        bool | None, Option(to={"nxdi": SAME}, computed=True)
    ] = None
    """Normalise the input of the first layer of an EAGLE draft, if it was trained so. Default: for EAGLE3, which is."""
    speculative_length: Annotated[
        Amount,
        Option(
            aliases=("spec_length",),
            to={"tnx": _DRAFTING, "nxdi": "speculation_length"},
            computed=True,
            cpu=True,
        ),
    ] = 5
    """Tokens proposed per step; 0 disables speculation. Answers do not depend on it, up to rounding of the dtype: a
    proposed token is kept only if the model itself would have chosen it. Where drafts make it slower they are switched
    off. NxDI also counts the large model's own token, which is added automatically."""
    ngram_prompt_lookup_max: Annotated[
        Count | None,
        Option(
            to={"tnx": _DRAFTING, "nxdi": "enable_token_generation()"},
            graph=(),
            cpu=True,
            draft="off",
        ),
    ] = None
    """Speculate without a draft model: propose what followed the newest tokens where they last occurred in the prompt
    or the output. The value is the longest run of tokens to look for; 3 suits summaries, code and answers from
    documents."""
    draft_model_tp_size: Annotated[
        Count | None,
        Option(
            to={"tnx": "tp_degree", "nxdi": "tp_degree"}, tunes=True, computed=True, graph=("nxdi",)
        ),
    ] = None
    """NeuronCores that share the draft model. Default: `tensor_parallel_degree`."""


class ArtifactOptions(OptionGroup):
    """Artifacts."""

    compiled_graph_path: Annotated[
        Location | None,
        Option(
            env=("NEURON_COMPILED_ARTIFACTS",),
            to={"tnx": _CACHE, "nxdi": _CACHE},
            tunes=True,
            graph=(),
            output="local",
        ),
    ] = None
    """Cache of compiled graphs: a folder that exists, or an S3 URI that is read before a compile and written after it.
    A folder of saved graphs (`*.neff`, or NxD Inference's `model.pt`) is used as it is, also where it is the only one
    in vLLM's `neuron-compiled-artifacts` of this folder. Default: `NEURON_COMPILE_CACHE_URL`, else the compiler's own
    cache."""
    draft_model_compiled_path: Annotated[
        Location | None, Option(to={"tnx": "load()"}, tunes=True, graph=(), output="local")
    ] = None
    """The same for the draft model. NxDI keeps both models in one artifact."""
    save_mp_checkpoint_path: Annotated[
        Location | None,
        Option(output="local", unused="partition writes there; serving ignores it"),
    ] = None
    """Where `partition` writes the compiled model."""
    partition_schema: Annotated[
        Literal["optimum", "safetensors", "compile_only"] | None, Lower, Option(output="local")
    ] = None
    """Weights that `partition` stores beside the graphs: as `safetensors`, or none with `compile_only`. The
    `optimum` layout can be read, not written."""
    load_split_model: Annotated[bool, Option(to={"tnx": "from_pretrained()"})] = False
    """The weights are in TNX's split format: one `.bin` file per tensor. Turns `on_device_embedding` on unless it is
    set, as in the old engine."""
    low_cpu_mem_usage: Annotated[bool, Option()] = False
    """No effect: weights are always memory-mapped."""
    on_mismatch: Annotated[Literal["error", "recompile"], Lower, Option(draft="same")] = "error"
    """Action if the compiled model, or the folder of saved graphs in `compiled_graph_path`, was compiled for other
    options: `error` stops with those that differ, `recompile` compiles again and leaves the folder as it is. A store
    holds any number of compiles: `compilation`."""
    compilation: Annotated[Literal["allow", "forbid"], Lower, Option(draft="same")] = "allow"
    """`forbid`: a start that would compile ends with an error that names what differs from the nearest compiled graphs.
    For production. `djl-neuronx compile` compiles nevertheless."""
    retry_compile: Annotated[bool, Option(aliases=("retry",), draft="same", output="local")] = False
    """Compile again what failed before with the same settings and versions, instead of ending with that error at once.
    `--retry` of `serve` and `compile`."""


class CompilerOptions(OptionGroup):
    """Compiler."""

    neuron_optimize_level: Annotated[
        Annotated[int, Field(ge=1, le=3)] | None,
        Option(allowed="1, 2 or 3", to={"tnx": "-O"}, tunes=True),
    ] = None
    """Optimisation level of the compiler: 1 compiles fastest, 3 may run fastest. Compiler default: 2. NxDI chooses a
    level for each graph."""
    enable_mixed_precision_accumulation: Annotated[
        bool | None, Option(to={"tnx": "--enable-mixed-precision-accumulation"})
    ] = None
    """Accumulate in float32 and cast the result. The guides recommend it for Llama 70B."""
    enable_saturate_infinity: Annotated[
        bool | None, Option(to={"tnx": "--enable-saturate-infinity"})
    ] = None
    """Clamp infinities to the largest finite number. The guides recommend it for Llama 13B in fp16."""
    neuron_cc_pipeline_factor: Annotated[
        Count | None,
        Option(
            env=("NEURON_CC_PIPELINE_FACTOR",),
            aliases=("cc_pipeline_tiling_factor",),
            to={"tnx": "--tensorizer-options", "nxdi": "cc_pipeline_tiling_factor"},
            tunes=True,
        ),
    ] = None
    """Tiles that a collective is split into, so that it overlaps with computation. NxDI default: 2."""
    compilation_worker_count: Annotated[
        Count | None,
        Option(
            env=("NEURON_COMPILATION_WORKER_COUNT",),
            to={"tnx": SAME, "nxdi": "compile()"},
            tunes=True,
            graph=(),
        ),
    ] = None
    """Graphs that are compiled at once. Each compiler process takes some GB of host memory: lower it if the machine
    runs out. Default: as many as that memory holds by an estimate, at most one for each graph."""
    unroll: Annotated[Count | None, Option(to={"tnx": SAME}, tunes=True, computed=True)] = None
    """Layers in one compiled graph. Default: all, which runs fastest and compiles longest. GPT-NeoX always takes
    all."""
    multi_node: Annotated[
        bool, Option(env=("NEURON_MULTI_NODE",), to={"tnx": "fuse_mlp"}, tunes=True, computed=True)
    ] = False
    """Graph defaults of the old engine for a model on several machines: turns `fuse_mlp` and `mlp_out_weight_transpose`
    on unless they are set. Such a model can be planned, not served: docs/neuron.md."""
    override_neuron_config: Annotated[
        Object | None,
        Option(
            aliases=("additional_config",),
            to={"tnx": "NeuronConfig()", "nxdi": "NeuronConfig()"},
            file=True,
        ),
    ] = None
    """Keywords of either library's `NeuronConfig`. One that has an option sets it, and overrides every source but the
    command line: `{"seq_len": 2048}` is `n_positions=2048`. The others go to the library; one that it does not have is
    an error there. vLLM's `additional_config` holds the object as `override_neuron_config`; nothing else in it counts.
    """


class ServingOptions(
    GeneralOptions,
    BatchingOptions,
    LimitOptions,
    ServerOptions,
    GraphOptions,
    PrecisionOptions,
    SpeculationOptions,
    LoraOptions,
    ArtifactOptions,
    CompilerOptions,
    NxdiOptions,
):
    """All options, validated one by one. `planning.rules` refuses combinations of them.

    None means that `planning.assess` derives the value from the model and the machine, or that the library's default
    holds.
    """

    @property
    def max_model_len(self) -> int | None:
        """Longest sequence in tokens: the largest of `n_positions`."""
        return self.n_positions[-1] if isinstance(self.n_positions, tuple) else self.n_positions

    @property
    def token_buckets(self) -> tuple[int, ...] | None:
        """Lengths of the decode graphs, ascending; None unless `n_positions` is a list."""
        return self.n_positions if isinstance(self.n_positions, tuple) else None

    @property
    def simulated(self) -> bool:
        """True if no model runs and answers are made up."""
        return self.model_loader == "sim"

    @property
    def join_wait_s(self) -> float:
        """Seconds of `max_join_wait_ms`; half of `queue_timeout` where that would be over by then."""
        wait, limit = self.max_join_wait_ms / 1000, self.queue_timeout or self.predict_timeout
        return wait if wait < limit else limit / 2

    @property
    def weight_dtype(self) -> Literal["int8", "fp8"] | None:
        """Type that `quantize` stores weights in, or None."""
        return None if self.quantize is None else _STORED[self.quantize]

    @property
    def drafting(self) -> bool:
        """True if a draft model is used."""
        return self.speculative_draft_model is not None and self.speculative_length > 0

    @property
    def speculating(self) -> bool:
        """True if steps verify drafted tokens, of a draft model or of a prompt lookup."""
        return self.drafting or (
            self.ngram_prompt_lookup_max is not None and self.speculative_length > 0
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that requests may have for the model, the first one for answers.

        Credentials are left out, and places on this machine.
        """
        folder = None if self.model_dir is None else self.model_dir.absolute().name
        return _names(self.model_name, self.model_id, folder)

    def place(self, name: str) -> str | None:
        """The S3 URI or the absolute folder in a `Location`, which may be relative to the model folder."""
        value: str | None = getattr(self, name)
        if value is None or value.startswith("s3://"):
            return value
        # Not pathlib, which raises for the home of an unknown user.
        return str((self.model_dir or Path()).absolute() / os.path.expanduser(value))  # noqa: PTH111

    @property
    def in_blocks(self) -> bool:
        """True if the KV cache is kept in blocks."""
        return bool(self.is_block_kv_layout) or self.enable_chunked_prefill

    @property
    def continuous_batching(self) -> bool:
        """True if a sequence joins a running batch without a second prefill of the others, if the library can do it.

        One slot needs no batching, unless it verifies drafts or its prompts come in chunks.
        """
        if self.rolling_batch_strategy is not None:
            return self.rolling_batch_strategy == "continuous_batching"
        several = (self.max_rolling_batch_size or 0) > 1
        return several or self.speculating or self.enable_chunked_prefill


@cache
def option(name: str) -> Option:
    """The marker of a field, with the libraries' names of the option."""
    metadata = ServingOptions.model_fields[name].metadata
    marker = next(entry for entry in metadata if isinstance(entry, Option))
    return replace(marker, to={backend: known or name for backend, known in marker.to.items()})


def names_where(test: Callable[[Option], object]) -> frozenset[str]:
    """The options whose marker satisfies `test`."""
    return frozenset(name for name in ServingOptions.model_fields if test(option(name)))


INVALID: Final = object()
"""`parse_value` of a value that is not allowed."""


def parse_value(name: str, value: object) -> object:
    """The value as `ServingOptions` holds it, or `INVALID`."""
    try:
        return getattr(ServingOptions.model_validate({name: value}), name)
    except ValidationError:
        return INVALID


def allowed_values(name: str) -> str:
    """The allowed values of an option in words: ``auto, cpu, tnx or nxdi``."""
    return option(name).allowed or allowed_words(ServingOptions.model_fields[name])


SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    str(group.__doc__).rstrip("."): tuple(group.model_fields)
    for group in ServingOptions.__bases__
    if issubclass(group, OptionGroup)
}
"""Section title to its options, in the order of the documentation."""

NAMES: Final[Mapping[str, str]] = {
    known: name for name in ServingOptions.model_fields for known in (name, *option(name).aliases)
}
"""Every accepted name, aliases included, to the name of the field."""


@cache  # without it 12 µs, several times for each request (2 vCPU, 2026-11)
def _names(
    names: tuple[str, ...] | None, model_id: str | None, folder: str | None
) -> tuple[str, ...]:
    if names is not None:
        return tuple(dict.fromkeys(names))
    given = [] if model_id is None else [redacted(model_id)]
    short = [name.rstrip("/").rpartition("/")[2] for name in given]
    public = [name for name in given if not name.startswith(("/", ".", "~"))]
    return tuple(dict.fromkeys(filter(None, [folder, *short, *public])))

"""Every option of `serving.properties`: one annotated field is one option.

`ServingOptions` has them all. Each of its base classes is a section of docs/options.md, and the text below a field is
the option's documentation there. Name, aliases, environment variables, validation, the place in `Resolved.explain` and
what the libraries get all follow from the field and its `Option` marker.

Sources: the old engine (djl-serving 1132e3ab^, tnx_properties.py), transformers-neuronx 0.13 (config.py) and
NxD Inference 0.9 (models/config.py). Options that only NxD Inference has are in nxdi_options.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, get_args, get_origin

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field

from djl_python_neuronx.config.nxdi_options import NxdiOptions
from djl_python_neuronx.config.values import (
    AMOUNT,
    BUCKETS,
    COUNT,
    DTYPES,
    OBJECT,
    POSITIONS,
    SECONDS,
    Amount,
    AutoDtype,
    Buckets,
    Count,
    Djl,
    Dtype,
    EightBits,
    Hyphenated,
    Lower,
    Object,
    OneOrList,
    Option,
    OptionGroup,
    Order,
    Positions,
    Seconds,
    TokenBuckets,
    Upper,
    Weights,
    parse_object,
    truth,
)

MAX_ROWS = 999
"""Most rows of one call of DJL Serving's rolling batch."""

_STORED: Final[Mapping[str, Literal["int8", "fp8"]]] = {"static_int8": "int8", "static_fp8": "fp8"}


class OnDeviceGeneration(BaseModel):
    """Sampling on the device; the names and defaults are those of TNX's `GenerationConfig`."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    do_sample: bool = False
    """False: the most probable token, whatever a request asks for."""
    dynamic: bool = False
    """Each request's own parameters count; else those below are compiled in."""
    top_k: Count = 50
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    top_p_min_tokens: Count = 1
    """Tokens that `top_p` keeps at least."""
    global_top_k: Annotated[
        Count | None, Field(validation_alias=AliasChoices("global_top_k", "global_topk"))
    ] = None
    """Most tokens that are ever sampled from, `global_topk` in NxDI; the libraries' kernels take at most 256."""
    per_batch_line: bool = False
    """Every sequence has parameters of its own; with `dynamic`."""
    deterministic: bool = False
    """Accept at 0.5 instead of drawing a number."""


PER_REQUEST = OnDeviceGeneration(
    do_sample=True, dynamic=True, per_batch_line=True, top_k=50, global_top_k=256
)
"""What ``on_device_generation=true`` stands for: the device samples, each request with its own parameters."""


def _generation(value: object) -> object:
    if isinstance(value, OnDeviceGeneration):
        return value
    told = truth(value)
    if told is not None:
        return PER_REQUEST if told else None
    return parse_object(value) if isinstance(value, str) else value


class GeneralOptions(OptionGroup):
    """General."""

    model_id: Annotated[
        str | None,
        Option(
            allowed="a folder, a Hugging Face model id or s3://bucket/key",
            aliases=("s3url",),
            env=("HF_MODEL_ID",),
            output="local",
        ),
    ] = None
    """The model: a local folder, absolute or relative to the model folder, an id of the Hugging Face hub, or a place in
    S3. The latter two are downloaded, once for all processes, and again only where they changed. By default the model
    lies in the model folder itself."""
    model_dir: Annotated[Path | None, Option(allowed="a folder", output="local")] = None
    """The folder that holds `serving.properties`. Set by whoever starts the model; written in the file it is
    refused."""
    revision: Annotated[
        str | None, Option(allowed="a branch, tag or commit", env=("HF_REVISION",), output="local")
    ] = None
    """Version of a Hugging Face model id. For a local folder it only says which version of the model's own code
    runs."""
    trust_remote_code: Annotated[bool, Option(draft="same", output="file")] = False
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
        Literal["auto", "cpu", "tnx", "nxdi", "optimum", "vllm"],
        Lower,
        Option(derived=("on_cpu",), output="file"),
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
            computed=True,
            derived=("tp_degree", "world_size", "start_rank_id", "local_ranks_size"),
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
            computed=True,
            derived=("amp", "torch_dtype", "overrides_torch_dtype"),
            cpu=True,
            draft="same",
        ),
    ] = "auto"
    """Type of weights and activations. `auto` is the checkpoint's own, bfloat16 on a Neuron device where that is
    float32. The cpu loader computes float16, asked for or not, in float32: CPUs are slow at float16, and it loses
    accuracy."""

    output_formatter: Annotated[Literal["json", "jsonlines", "sse"] | None, Lower, Option()] = None
    """Format of LMI answers. Left out: `json`, and `jsonlines` for a request with `stream`."""
    predict_timeout: Annotated[
        Seconds, Option(allowed=SECONDS, env=("PREDICT_TIMEOUT",), djl=Djl(whole_seconds=True))
    ] = 120.0
    """Most time that a request waits for a slot and that a step on the device takes."""
    model_loading_timeout: Annotated[
        Seconds,
        Option(
            allowed=SECONDS, env=("MODEL_LOADING_TIMEOUT",), djl=Djl(whole_seconds=True, sign=True)
        ),
    ] = 240.0
    """Most time that a model may take to load. DJL Serving reads it and ends a load that takes longer; the embedded
    server has no limit. Compiling on first use needs much more than the default."""
    skip_warmup: Annotated[bool, Option(derived=("skip_warmup",))] = False
    """Answer before every graph has run once; the first request of each length is then slower."""
    cpu_threads: Annotated[Count | None, Option(allowed=COUNT, draft="same")] = None
    """Threads that the cpu loader computes with. The default is all physical cores but one, which is left to the
    server."""


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
            derived=(
                "n_positions",
                "seq_len",
                "max_length",
                "max_new_tokens",
                "token_generation_buckets",
                "n_active_tokens",
            ),
            cpu=True,
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
            computed=True,
            derived=(
                "context_length_estimate",
                "context_encoding_buckets",
                "max_context_length",
                "buckets",
                "enable_bucketing",
                "bucket_n_active_tokens",
                "allow_input_truncation",
            ),
            cpu=True,
        ),
    ] = None
    """Prompt lengths that graphs are compiled for; a prompt runs in the smallest that holds it, and the last is the
    longest prompt. The default is chosen from `n_positions`. With `enable_chunked_prefill` these are the tokens of a
    step, and prompts are as long as `n_positions` allows; the default is chosen from `max_rolling_batch_size`."""
    rolling_batch: Annotated[
        Literal["auto", "tnx", "vllm", "disable"],
        Lower,
        Option(output="file", djl=Djl(overrules=True, sign=True)),
    ] = "auto"
    """How DJL Serving hands over requests. `tnx` and `vllm` mean the same here: a row per request, joining and leaving
    at each step. `disable`: one request (or `batch_size`) at a time. Recent DJL Serving turns `auto` into `disable`
    before the handler sees it: write `tnx`, or set `async_mode`."""
    async_mode: Annotated[bool, Option(output="file", djl=Djl(overrules=True))] = False
    """DJL Serving hands over each request once and gets tokens as they come. Not together with `rolling_batch`."""
    max_rolling_batch_size: Annotated[
        Count | None,
        Option(
            allowed=COUNT,
            aliases=("max_num_seqs",),
            to={"tnx": "batch_size", "nxdi": "batch_size"},
            computed=True,
            derived=(
                "batch_size",
                "continuous_batching",
                "ctx_batch_size",
                "tkg_batch_size",
                "max_batch_size",
                "kv_cache_batch_size",
                "kv_cache_padding_size",
                "spec_batch_size",
                "apply_seq_ids_mask",
            ),
            cpu=True,
            draft="same",
            djl=Djl(fills_in=("32", "256"), sign=True),
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


class GraphOptions(OptionGroup):
    """Graphs and layouts."""

    group_query_attention: Annotated[
        Literal["shard-over-heads", "shard-over-batch", "replicated-heads", "all-gather-heads"]
        | None,
        Hyphenated,
        Option(to={"tnx": "group_query_attention"}, tunes=True),
    ] = None
    """How cores share KV heads that are fewer than the query heads. Both libraries choose by themselves."""
    fuse_qkv: Annotated[
        bool | None,
        Option(aliases=("fused_qkv",), to={"tnx": "fuse_qkv", "nxdi": "fused_qkv"}, tunes=True),
    ] = None
    """One matrix product in place of three for queries, keys and values."""
    fuse_mlp: Annotated[bool | None, Option(to={"tnx": "fuse_mlp"}, tunes=True)] = None
    """One matrix product in place of two at the entrance of the MLP. Needs `mlp_out_weight_transpose`."""
    fused_rmsnorm_qkv: Annotated[
        bool | None,
        Option(
            aliases=("qkv_kernel_enabled",),
            to={"tnx": "fused_rmsnorm_qkv", "nxdi": "qkv_kernel_enabled"},
            tunes=True,
        ),
    ] = None
    """Kernel for the norm before attention and the projections after it. TNX needs `fuse_qkv`,
    `attention_layout=BSH`, `group_query_attention=replicated-heads` and no `sequence_parallel` for it."""
    fused_rmsnorm_mlp: Annotated[
        bool | None,
        Option(
            aliases=("mlp_kernel_enabled",),
            to={"tnx": "fused_rmsnorm_mlp", "nxdi": "mlp_kernel_enabled"},
            tunes=True,
        ),
    ] = None
    """Kernel for the norm before the MLP and the MLP. TNX needs `attention_layout=BSH` and
    `group_query_attention=replicated-heads` for it."""
    qkv_tiling: Annotated[bool | None, Option(to={"tnx": "qkv_tiling"}, tunes=True)] = None
    """Cut the projections of attention into tiles of 128, which both their sides have to be multiples of. Needs
    `fuse_qkv`."""
    weight_tiling: Annotated[bool | None, Option(to={"tnx": "weight_tiling"}, tunes=True)] = None
    """Cut the weights of the MLP into tiles of 128."""
    mlp_in_weight_tiling_permute_order: Annotated[
        Order | None,
        Option(
            allowed='an order of the four axes such as "1,2,0,3"',
            to={"tnx": "mlp_in_weight_tiling_permute_order"},
            tunes=True,
        ),
    ] = None
    """Order of the tiles' axes at the entrance of the MLP, axis 2 before axis 3; with `weight_tiling`. The library's
    default is 1,2,0,3."""
    mlp_out_weight_tiling_permute_order: Annotated[
        Order | None,
        Option(
            allowed='an order of the four axes such as "1,2,0,3"',
            to={"tnx": "mlp_out_weight_tiling_permute_order"},
            tunes=True,
        ),
    ] = None
    """The same at the exit of the MLP."""
    mlp_out_weight_transpose: Annotated[
        bool | None, Option(to={"tnx": "mlp_out_weight_transpose"}, tunes=True)
    ] = None
    """Keep the weights at the exit of the MLP transposed."""
    attn_output_transposed: Annotated[
        bool | None, Option(to={"tnx": "attn_output_transposed"}, tunes=True)
    ] = None
    """Keep the weights of the projection after attention transposed."""
    attention_layout: Annotated[
        Literal["HSB", "BSH"] | None, Upper, Option(to={"tnx": "attention_layout"}, tunes=True)
    ] = None
    """Order of the axes in attention: hidden, sequence, batch. TNX's default is HSB."""
    collectives_layout: Annotated[
        Literal["HSB", "BSH"] | None, Upper, Option(to={"tnx": "collectives_layout"}, tunes=True)
    ] = None
    """Order of the axes in what cores exchange. TNX's default is HSB."""
    cache_layout: Annotated[
        Literal["SBH", "BSH"] | None, Upper, Option(to={"tnx": "cache_layout"}, tunes=True)
    ] = None
    """Order of the axes of the KV cache. TNX's default is SBH; BSH needs continuous batching and one bucket."""
    sequence_parallel: Annotated[
        bool | None,
        Option(
            aliases=("sequence_parallel_enabled", "sequence_parallel_norm"),
            env=("NEURON_SEQUENCE_PARALLEL",),
            to={"tnx": "sequence_parallel_norm", "nxdi": "sequence_parallel_enabled"},
            tunes=True,
        ),
    ] = None
    """Divide a prompt's tokens among the cores where each token is computed alone (norms)."""
    sequence_parallel_norm_threshold: Annotated[
        Count | None,
        Option(allowed=COUNT, to={"tnx": "sequence_parallel_norm_threshold"}, tunes=True),
    ] = None
    """Prompt length in tokens above which `sequence_parallel` works. TNX's default is 2048."""
    shard_over_sequence: Annotated[
        bool | None,
        Option(
            aliases=("flash_decoding_enabled",),
            env=("NEURON_SHARD_OVER_SEQUENCE",),
            to={"tnx": "shard_over_sequence", "nxdi": "flash_decoding_enabled"},
            tunes=True,
        ),
    ] = None
    """Divide the KV cache's tokens among the cores (flash decoding): for a batch times length above 16384."""
    duplicate_q_weight_sos: Annotated[
        bool | None, Option(to={"tnx": "duplicate_q_weight_sos"}, tunes=True)
    ] = None
    """Copy the query weights to the cores in place of gathering queries; with `shard_over_sequence`."""
    on_device_embedding: Annotated[
        bool | None,
        Option(
            env=("NEURON_ON_DEVICE_EMBEDDING",),
            to={"tnx": "on_device_embedding"},
            tunes=True,
            always={"nxdi": True},
        ),
    ] = None
    """Look embeddings up on the device. TNX's default is the host; NxDI always does it on the device."""
    on_device_generation: Annotated[
        OnDeviceGeneration | None,
        BeforeValidator(_generation),
        Option(
            allowed="true, false, a JSON object of do_sample, dynamic, top_k, top_p, temperature, top_p_min_tokens, "
            "global_top_k, per_batch_line and deterministic, or a file that holds one",
            aliases=("on_device_sampling_config",),
            env=("NEURON_ON_DEV_GENERATION",),
            to={"tnx": "on_device_generation", "nxdi": "on_device_sampling_config"},
            file=True,
            computed=True,
            derived=("on_device_generation", "on_device_sampling_config"),
            draft="off",
        ),
    ] = None
    """Sample on the device, which saves reading all logits back: faster, and without seeds, penalties, log
    probabilities and constraints. `true` serves each request with its own top_k, top_p and temperature."""
    on_device_default_top_k: Annotated[
        Literal["global_top_k"] | None, Lower, Option(allowed="global_top_k")
    ] = None
    """top_k of requests that sample without one, where the device samples with each request's own parameters
    (`on_device_generation` with `dynamic`). A device cannot choose among the whole vocabulary: such a request is
    refused, or with `global_top_k` chooses among that many of the most likely tokens."""
    padding_side: Annotated[
        Literal["left", "right"] | None,
        Lower,
        Option(
            to={"tnx": "padding_side", "nxdi": "padding_side"},
            derived=("use_2d_cache_ids", "lhs_aligned"),
        ),
    ] = None
    """Side that shorter prompts of a batch are padded on. Continuous batching pads on the right."""
    is_block_kv_layout: Annotated[
        bool | None,
        Option(
            aliases=("optimized_paged_attention",),
            to={
                "tnx": "continuous_batching.optimized_paged_attention",
                "nxdi": "is_block_kv_layout",
            },
            computed=True,
        ),
    ] = None
    """Keep the KV cache in blocks instead of one row for each slot (paged attention). NxDI has it for prefix caching
    alone, transformers-neuronx is served with it for `enable_chunked_prefill` alone; both imply it."""
    pa_block_size: Annotated[
        Count | None,
        Option(allowed=COUNT, to={"tnx": "init_cache_engine()", "nxdi": "pa_block_size"}),
    ] = None
    """Tokens in a block of the KV cache; with `is_block_kv_layout`. For `enable_chunked_prefill` a power of two below
    `n_positions`; the default is at least 128 and leaves at most 256 blocks, for graphs grow with their number."""
    pa_num_blocks: Annotated[
        Count | None,
        Option(allowed=COUNT, to={"tnx": "init_cache_engine()", "nxdi": "pa_num_blocks"}),
    ] = None
    """Blocks of the KV cache; with `is_block_kv_layout`. For `enable_chunked_prefill` the default is what all slots
    take at their full length, and fewer are refused."""
    enable_prefix_caching: Annotated[
        bool,
        Option(
            aliases=("is_prefix_caching",),
            to={"nxdi": "is_prefix_caching"},
            computed=True,
            derived=("is_prefix_caching",),
        ),
    ] = False
    """Keep the KV blocks of finished prompts for prompts that begin alike. It implies `is_block_kv_layout`."""
    enable_chunked_prefill: Annotated[
        bool,
        Option(
            aliases=("is_chunked_prefill",),
            to={"tnx": "continuous_batching.enable_chunked_prefill"},
            derived=("chunked_prefill_config",),
            cpu=True,
            draft="off",
        ),
    ] = False
    """Encode prompts in chunks beside running streams, so that a long prompt does not silence them: every step has a
    token of each stream, and prompts share what is left of the tokens of `context_length_estimate`. Where a chunk ends
    depends on who else is there; what is served does not, up to rounding of the dtype. For llama on
    transformers-neuronx, where it implies `is_block_kv_layout`, and on the CPU; NxDI 0.9 raises NotImplementedError."""
    pipeline_parallel_degree: Annotated[
        Count,
        Option(
            allowed=COUNT,
            aliases=("pp_degree",),
            env=("PIPELINE_PARALLEL_DEGREE",),
            to={"nxdi": "pp_degree"},
            computed=True,
            derived=("pp_degree",),
            djl=Djl(fills_in=("1",)),
        ),
    ] = 1
    """Stages that the layers are divided among, each with `tensor_parallel_degree` cores. DJL Serving starts no Neuron
    worker with more than 1."""
    rolling_batch_strategy: Annotated[
        Literal["continuous_batching", "naive_rolling_batch"] | None,
        Lower,
        Option(derived=("is_continuous_batching",), graph=("cpu", "tnx", "nxdi")),
    ] = None
    """How sequences join a running batch: `continuous_batching` encodes only the new prompt, `naive_rolling_batch`
    encodes everyone anew. The default is the first where the model can do it."""
    allow_known_defects: Annotated[bool, Option()] = False
    """Serve what is known to give wrong answers in the library; without it such a combination is refused."""


class PrecisionOptions(OptionGroup):
    """Precision and quantisation."""

    quantize: Annotated[
        Weights | None,
        Option(
            allowed="static_int8 (int8, s8) or static_fp8 (fp8, f8e4m3fn)",
            env=("NEURON_QUANT",),
            to={"tnx": "quant.quant_dtype", "nxdi": "quantization_dtype"},
            computed=True,
            derived=("quant", "quantized", "quantization_dtype"),
        ),
    ] = None
    """Store weights in 8 bits and compute in `dtype`: half the memory and half the reading. TNX quantises while
    loading, NxDI once before compiling."""
    kv_cache_quantize: Annotated[
        EightBits | None,
        Option(
            allowed="int8 (s8) or fp8 (f8e4m3fn)",
            to={"tnx": "kv_cache_quant.quant_dtype", "nxdi": "kv_quant_config.quant_dtype"},
            derived=("kv_cache_quant", "kv_quant_config"),
            never={"nxdi": "int8"},
        ),
    ] = None
    """Store the KV cache in 8 bits: twice as many tokens in the same memory."""
    all_reduce_dtype: Annotated[
        Dtype | None,
        Option(
            allowed=DTYPES,
            aliases=("rpl_reduce_dtype",),
            to={"tnx": "all_reduce_dtype", "nxdi": "rpl_reduce_dtype"},
        ),
    ] = None
    """Type that partial results are summed in across cores. NxDI applies it to the projection after attention."""
    cast_logits_dtype: Annotated[
        Dtype | None,
        Option(allowed=DTYPES, to={"tnx": "cast_logits_dtype"}, always={"nxdi": "float32"}),
    ] = None
    """Type of the logits. TNX's default is float32, and NxDI knows no other."""
    bf16_rms_norm: Annotated[bool | None, Option(to={"tnx": "bf16_rms_norm"})] = None
    """Compute RMS norms in bfloat16 instead of float32."""


class SpeculationOptions(OptionGroup):
    """Speculation."""

    speculative_draft_model: Annotated[
        str | None,
        Field(min_length=1),
        Option(
            allowed="a folder, a Hugging Face model id or s3://bucket/key",
            aliases=("draft_model_id",),
            to={
                "tnx": "enable_speculative_decoder()",
                "nxdi": "fused_spec_config.draft_model_path",
            },
            derived=("enable_fused_speculation",),
            graph=(),
            cpu=True,
            draft="off",
        ),
    ] = None
    """A small model of the same vocabulary that drafts tokens for the large one to verify."""
    speculative_length: Annotated[
        Amount,
        Option(
            allowed=AMOUNT,
            aliases=("spec_length",),
            to={"tnx": "enable_speculative_decoder()", "nxdi": "speculation_length"},
            computed=True,
            derived=("speculation_length",),
            cpu=True,
        ),
    ] = 5
    """Tokens that are drafted at a time; 0 is no speculation. Up to rounding of the dtype, what is served does not
    depend on it, nor on the drafts: a draft stands only if the model itself would have chosen it. NxDI counts the
    large model's own token too, which is added for it."""
    ngram_prompt_lookup_max: Annotated[
        Count | None,
        Option(
            allowed=COUNT,
            to={"tnx": "enable_speculative_decoder()"},
            graph=(),
            cpu=True,
            draft="off",
        ),
    ] = None
    """Draft without a draft model: what followed the newest tokens when they last occurred in prompt or text. This is
    the longest run of tokens that is looked for; 3 suits summaries, code and answers from documents."""
    draft_model_tp_size: Annotated[
        Count | None,
        Option(
            allowed=COUNT,
            to={"tnx": "tp_degree", "nxdi": "tp_degree"},
            tunes=True,
            computed=True,
            graph=("nxdi",),
        ),
    ] = None
    """NeuronCores that share the draft model. The default is `tensor_parallel_degree`."""
    enable_eagle_speculation: Annotated[
        bool | None,
        Option(
            to={"tnx": "is_eagle_target", "nxdi": "enable_eagle_speculation"},
            derived=("is_eagle_target", "is_eagle_draft", "enable_eagle_speculation"),
            cpu=True,
        ),
    ] = None
    """The draft model is an EAGLE one: it drafts from the large model's hidden states. With NxDI alone."""


class ArtifactOptions(OptionGroup):
    """Artifacts."""

    compiled_graph_path: Annotated[
        str | None,
        Field(min_length=1),
        Option(
            allowed="a folder or s3://bucket/key",
            to={"tnx": "NEURON_COMPILE_CACHE_URL", "nxdi": "NEURON_COMPILE_CACHE_URL"},
            tunes=True,
            graph=(),
            output="local",
        ),
    ] = None
    """Where compiled graphs are found, and kept once they are made: a folder, or a place in S3 that is read before a
    compile and written after it. A folder of saved graphs (`*.neff`) is used as it is. The default is what
    `NEURON_COMPILE_CACHE_URL` names, else the compiler's own cache."""
    draft_model_compiled_path: Annotated[
        str | None,
        Field(min_length=1),
        Option(
            allowed="a folder or s3://bucket/key",
            to={"tnx": "load()"},
            tunes=True,
            graph=(),
            output="local",
        ),
    ] = None
    """The same for the draft model. NxDI keeps both models in one artifact."""
    save_mp_checkpoint_path: Annotated[
        str | None,
        Field(min_length=1),
        Option(
            allowed="a folder or s3://bucket/key",
            output="local",
            unused="partition writes there; serving ignores it",
        ),
    ] = None
    """Where `partition` puts the compiled model."""
    partition_schema: Annotated[
        Literal["optimum", "safetensors", "compile_only"] | None, Lower, Option(output="local")
    ] = None
    """What `partition` stores beside the graphs: the weights as `safetensors`, or nothing with `compile_only`. The
    `optimum` layout is read, not written."""
    load_split_model: Annotated[bool, Option(to={"tnx": "from_pretrained()"})] = False
    """The weights lie in TNX's split format: one `.bin` file for each tensor. It switches `on_device_embedding` on
    unless that is set, as the old engine did."""
    low_cpu_mem_usage: Annotated[bool, Option()] = False
    """Weights are always read through a memory map, which is what this asks for."""
    on_mismatch: Annotated[Literal["error", "recompile"], Lower, Option(draft="same")] = "error"
    """What to do if there are compiled graphs of this model and none fits the options: `error` says which differ and
    stops, `recompile` compiles anew, beside them."""


class CompilerOptions(OptionGroup):
    """Compiler."""

    neuron_optimize_level: Annotated[
        Annotated[int, Field(ge=1, le=3)] | None,
        Option(allowed="1, 2 or 3", to={"tnx": "-O"}, tunes=True),
    ] = None
    """How hard the compiler tries: 1 compiles fastest, 3 may run fastest. The compiler's default is 2. NxDI chooses a
    level for each graph itself."""
    enable_mixed_precision_accumulation: Annotated[
        bool | None, Option(to={"tnx": "--enable-mixed-precision-accumulation"})
    ] = None
    """Accumulate in float32, cast the result: the guides ask for it for Llama 70B."""
    enable_saturate_infinity: Annotated[
        bool | None, Option(to={"tnx": "--enable-saturate-infinity"})
    ] = None
    """Clamp infinities to the largest finite number: the guides ask for it for Llama 13B in fp16."""
    neuron_cc_pipeline_factor: Annotated[
        Count | None,
        Option(
            allowed=COUNT,
            env=("NEURON_CC_PIPELINE_FACTOR",),
            aliases=("cc_pipeline_tiling_factor",),
            to={"tnx": "--tensorizer-options", "nxdi": "cc_pipeline_tiling_factor"},
            tunes=True,
        ),
    ] = None
    """Tiles that a collective is cut into, so that it overlaps with computing. NxDI's default is 2."""
    compilation_worker_count: Annotated[
        Count | None,
        Option(
            allowed=COUNT,
            env=("NEURON_COMPILATION_WORKER_COUNT",),
            to={"tnx": "compilation_worker_count"},
            tunes=True,
            graph=(),
        ),
    ] = None
    """Graphs that are compiled at once. Each compiler takes some GB of host memory: lower it if the machine runs out.
    The library's default is one for each graph."""
    unroll: Annotated[
        Count | None, Option(allowed=COUNT, to={"tnx": "unroll"}, tunes=True, computed=True)
    ] = None
    """Layers in one compiled graph. Not set: all, which runs fastest and compiles longest. GPT-NeoX takes all."""
    multi_node: Annotated[
        bool, Option(env=("NEURON_MULTI_NODE",), to={"tnx": "fuse_mlp"}, tunes=True, computed=True)
    ] = False
    """The old engine's graph defaults for a model on several machines: `fuse_mlp` and `mlp_out_weight_transpose` are
    on unless set. A model on several machines is planned and not served: docs/neuron.md."""
    override_neuron_config: Annotated[
        Object | None,
        Option(allowed=OBJECT, to={"tnx": "NeuronConfig()", "nxdi": "NeuronConfig()"}, file=True),
    ] = None
    """More keywords of the library's `NeuronConfig`, for what has no option here. They win over options; a name that
    the installed library does not know is an error, and so is one that follows from an option."""


class ServingOptions(
    GeneralOptions,
    BatchingOptions,
    GraphOptions,
    PrecisionOptions,
    SpeculationOptions,
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

    @property
    def drafting(self) -> bool:
        """Whether a draft model is used."""
        return self.speculative_draft_model is not None and self.speculative_length > 0

    @property
    def speculating(self) -> bool:
        """Whether steps verify drafted tokens, of a draft model or of a prompt lookup."""
        return self.drafting or (
            self.ngram_prompt_lookup_max is not None and self.speculative_length > 0
        )

    @property
    def continuous_batching(self) -> bool:
        """Whether a sequence joins a running batch without a second prefill of the others, if the library can do it.

        One slot needs no batching, unless it verifies drafts or its prompts come in chunks.
        """
        if self.rolling_batch_strategy is not None:
            return self.rolling_batch_strategy == "continuous_batching"
        several = (self.max_rolling_batch_size or 0) > 1
        return several or self.speculating or self.enable_chunked_prefill


def option(name: str) -> Option:
    """The marker of a field."""
    metadata = ServingOptions.model_fields[name].metadata
    return next(entry for entry in metadata if isinstance(entry, Option))


def names_where(test: Callable[[Option], object]) -> frozenset[str]:
    """The options whose marker satisfies `test`."""
    return frozenset(name for name in ServingOptions.model_fields if test(option(name)))


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


SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    str(group.__doc__).rstrip("."): tuple(group.model_fields)
    for group in ServingOptions.__bases__
    if issubclass(group, OptionGroup)
}
"""Section title to its options, in the order of the documentation."""

NAMES: Final[Mapping[str, str]] = {
    known: name for name in ServingOptions.model_fields for known in (name, *option(name).aliases)
}
"""Every name that an option can be written with, aliases included, to the field's name."""

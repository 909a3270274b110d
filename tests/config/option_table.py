"""One row for each option: good values, bad values, other names, variables, what the libraries get.

Data only. The right-hand sides were written from the old engine's and the libraries' documentation, not from the
fields: they are what `test_options` and `test_mapping` hold the fields against.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from djl_python_neuronx.config.device_sampling import OnDeviceGeneration
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.step_times import StepTimes

LEFT_OUT = "no equivalent: left out, it only tunes"
REFUSED = "no equivalent: refused"
ANYWAY = "no equivalent, but the library does this anyway"
BACKEND = "handed over by a method, not by a keyword, or refused until a later version"
OURS = "the server's own"
WORDS = frozenset({LEFT_OUT, REFUSED, ANYWAY, BACKEND, OURS})


@dataclass(frozen=True)
class Row:
    """One option. The libraries' columns are about the first of the good values."""

    good: tuple[tuple[object, object], ...]
    """As written, as read."""
    bad: tuple[object, ...]
    tnx: object = OURS
    """The additions to the library's arguments over those of `BASE`, by part; or one of `WORDS`."""
    nxdi: object = OURS
    also: tuple[str, ...] = ()
    env: tuple[str, ...] = ()


BASE = ServingOptions(
    tensor_parallel_degree=2,
    n_positions=2048,
    context_length_estimate=(128, 2048),
    max_rolling_batch_size=4,
    dtype="bfloat16",
)
"""Options as `defaults.fill` leaves them."""

NONE = (("None", None), ("null", None), (None, None))
FLAG = (
    *(("true", True), ("True", True), ("TRUE", True), ("1", True), ("yes", True), ("on", True)),
    *(("false", False), ("False", False), ("0", False), ("no", False), ("off", False)),
    *((True, True), (False, False)),
)
FLAG_BAD = ("maybe", "2", "[true]", "tru e", "-1", "{}", [True], 2)
COUNT_BAD = ("0", "-1", "1.5", "many", "[1]", "true", str(2**31), "1e3", [3], 2.5)
TEMPLATES = (
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "{%- generation -%}{{ messages | tojson }}{%- endgeneration -%}",
    "{{ raise_exception('no') }}",
)
TEXT_BAD = (7, ["a"], {"a": 1}, 1.5)
DTYPES = (
    *((text, "float16") for text in ("fp16", "float16", "half", "f16", "torch.float16", "FP16")),
    *((text, "float32") for text in ("fp32", "float32", "f32", "torch.float32", "Float32")),
    *((text, "bfloat16") for text in ("bf16", "bfloat16", "torch.bfloat16", "BF16")),
)
DTYPE_BAD = ("int8", "fp8", "16", "float64", 16)
LENGTHS = (
    *(("256,512,1024", (256, 512, 1024)), ("[256, 512, 1024]", (256, 512, 1024))),
    *(("(1024, 256)", (256, 1024)), ("64", (64,)), (" 8 , 8,16 ", (8, 16)), ("8,", (8,))),
    *(([1024, 256], (256, 1024)), ((16,), (16,)), (16, (16,))),
)
LENGTHS_BAD = ("", "[]", ",", "256,,512", "0", "-1,2", "a", "[[1]]", "1.5", "9" * 5000, "1 2", {})
OBJECT = (
    ('{"block_size": 512}', {"block_size": 512}),
    ("{'block_size': 512}", {"block_size": 512}),
    ("{'a': True, 'b': None, 'c': (1, 2)}", {"a": True, "b": None, "c": [1, 2]}),
    ('{"a": true, "b": null}', {"a": True, "b": None}),
    ({"a": {"b": [1]}}, {"a": {"b": [1]}}),
    ("{}", {}),
)
OBJECT_BAD = (
    *("[1]", "1", "true", "text", "{", "{1: 2}", "{'a': {1: 2}}", "{'a': {1}}", "{'a': b'x'}"),
    *("{'a': 1j}", "{[]: 1}", "{'a': NaN}", '{"a": NaN}', '{"a": 1e999}', "{'a': 1e999}"),
    *("__import__('os')", "{'a': print}", "{'a': " + "9" * 30 + "}", "-" * 8000 + "1", [1], 1),
    *("{'a': " + "[" * 40 + "]" * 40 + "}", '{"a": "' + "x" * 70_000 + '"}', "+".join("1" * 4000)),
    *('{"a": ' * 5000, "(" * 60_000, "not " * 2000 + "1", "lambda:" * 1000 + "1"),
)
WORD_LIST = (
    *(("lm_head,embed_tokens", ("lm_head", "embed_tokens")), ('["a", "b"]', ("a", "b"))),
    *(("['a']", ("a",)), ("a", ("a",)), (["a", "b"], ("a", "b"))),
)
WORD_LIST_BAD = ("", ",", "a,,b", "[]", 7, [1], {"a": 1}, "x" * 300)


def config(**keywords: object) -> dict[str, object]:
    """Keywords of `NeuronConfig`."""
    return {"neuron_config": keywords}


def constructor(**keywords: object) -> dict[str, object]:
    """Keywords of TNX's constructor."""
    return {"constructor": keywords}


def flag(tnx: object = OURS, nxdi: object = OURS, **more: tuple[str, ...]) -> Row:
    """A boolean; a column is the keyword that becomes True, or one of `WORDS`, or a part."""
    return Row(FLAG, FLAG_BAD, _column(tnx, True), _column(nxdi, True), **more)


def optional_flag(tnx: object = OURS, nxdi: object = OURS, **more: tuple[str, ...]) -> Row:
    """A boolean that may be unset."""
    return Row((*FLAG, *NONE), FLAG_BAD, _column(tnx, True), _column(nxdi, True), **more)


def count(tnx: object = OURS, nxdi: object = OURS, **more: tuple[str, ...]) -> Row:
    """A whole number of at least 1; a column is the keyword that becomes 3, or one of `WORDS`, or a part."""
    good = (("3", 3), (3, 3), ("2147483647", 2**31 - 1))
    return Row(good, COUNT_BAD, _column(tnx, 3), _column(nxdi, 3), **more)


def choice(
    *words: str, also_bad: tuple[object, ...] = (), tnx: object = OURS, nxdi: object = OURS
) -> Row:
    """One of `words`, in any case; a column is the keyword that becomes the first, or one of `WORDS`, or a part."""
    good = tuple((text, word) for word in words for text in (word, word.upper(), word.lower()))
    bad = ("", "nothing of the kind", *also_bad, 7, ["a"], True)
    return Row(good, bad, _column(tnx, words[0]), _column(nxdi, words[0]))


def lengths(tnx: object = OURS, nxdi: object = OURS, **more: tuple[str, ...]) -> Row:
    """Ascending whole numbers."""
    return Row(LENGTHS, LENGTHS_BAD, tnx, nxdi, **more)


def mapping(keyword: str, tnx: object = LEFT_OUT) -> Row:
    """An object for NxDI."""
    return Row(OBJECT, OBJECT_BAD, tnx, config(**{keyword: {"block_size": 512}}))


def _column(column: object, value: object) -> object:
    named = isinstance(column, str) and column not in WORDS
    return config(**{str(column): value}) if named else column


def _shared(**more: object) -> dict[str, object]:
    return config(continuous_batching={"batch_size_for_shared_caches": 4, **more})


_TRUE_GENERATION = OnDeviceGeneration(
    do_sample=True, dynamic=True, per_batch_line=True, top_k=50, global_top_k=256
)

SECONDS = Row((("2.5", 2.5), (1, 1.0)), ("0", "-1", "inf", "nan", "soon", [1]))
GENERAL = {
    "model_id": Row(
        (("org/model", "org/model"), ("s3://b/k", "s3://b/k"), ("./x", "./x")),
        TEXT_BAD,
        also=("s3url",),
        env=("HF_MODEL_ID",),
    ),
    "model_dir": Row((("/opt/ml/model", Path("/opt/ml/model")),), (7, ["a"])),
    "revision": Row((("main", "main"), *NONE), TEXT_BAD, env=("HF_REVISION",)),
    "trust_remote_code": flag(),
    "model_name": Row(
        (("llama", ("llama",)), ("llama, org/llama", ("llama", "org/llama")), (["a"], ("a",))),
        ("", ",", "a,,b", "[]", 7, [1], {"a": 1}, "mine # x"),
        also=("served_model_name",),
    ),
    "chat_template": Row(
        (
            ("{{ messages }}", "{{ messages }}"),
            *((text, text) for text in TEMPLATES),
            *NONE,
        ),
        ("", "{% x\n", "{% endfor %}", "{{ messages", *TEXT_BAD),
    ),
    "chat_template_kwargs": Row(OBJECT, OBJECT_BAD, also=("default_chat_template_kwargs",)),
    "generation_config": choice("auto", "vllm"),
    "task": Row(
        (
            ("text-generation", "text-generation"),
            ("text_generation", "text-generation"),
            ("auto", "auto"),
        ),
        ("feature-extraction", "fill-mask", 7),
        env=("HF_TASK",),
    ),
    "model_loader": choice(
        "auto", "cpu", "tnx", "nxdi", "sim", "optimum", "vllm", also_bad=("gpu",)
    ),
    "tensor_parallel_degree": Row(
        (("8", 8), (8, 8), ("max", "max"), ("MAX", "max")),
        ("0", "-1", "most", "1.5", [1]),
        constructor(tp_degree=8),
        config(tp_degree=8),
        also=("tp_degree", "tensor_parallel_size"),
        env=("TENSOR_PARALLEL_DEGREE",),
    ),
    "replicas": Row(
        (("2", 2), (128, 128), ("max", "max"), ("Max", "max")),
        ("0", "-1", "129", "2000000000", "all", "auto", "1.5", [2], "None"),
    ),
    "dtype": Row(
        (*DTYPES, ("auto", "auto"), ("AUTO", "auto")),
        DTYPE_BAD,
        constructor(amp="f16"),
        config(torch_dtype="float16"),
        also=("torch_dtype", "amp"),
    ),
    "output_formatter": choice(
        *("json", "jsonlines", "sse", "3p", "3p_stream", "json_chat", "jsonlines_chat", "sse_chat"),
        also_bad=("xml",),
    ),
    "tgi_compat": flag(),
    "bedrock_compat": flag(),
    "predict_timeout": Row(
        (("240", 240.0), ("0.5", 0.5), (1, 1.0)),
        ("0", "-1", "inf", "nan", "soon", [1]),
        env=("PREDICT_TIMEOUT",),
    ),
    "step_timeout": SECONDS,
    "queue_timeout": SECONDS,
    "restart_timeout": SECONDS,
    "model_loading_timeout": Row(
        (("1800", 1800.0),), ("0", "-1", "inf", "nan"), env=("MODEL_LOADING_TIMEOUT",)
    ),
    "skip_warmup": flag(),
    "cpu_threads": count(),
    "sim_step_ms": Row(
        (
            *(("12.5", 12.5), ("7", 7.0), (0, 0.0)),
            (
                '{"prefill": {"64": 20, "512": 90.5}, "decode": {"512": 0}}',
                StepTimes(prefill={64: 20.0, 512: 90.5}, decode={512: 0.0}),
            ),
        ),
        (
            *("-1", "nan", "inf", "3600001", "true", True, [1], "[1]", "{}", "steps.json"),
            *('{"prefill": {"64": 20}}', '{"prefill": {}, "decode": {"512": 1}}'),
            '{"prefill": {"64": 20}, "decode": {"512": 1}, "verify": {}}',
            *(
                f'{{"prefill": {{"64": {ms}}}, "decode": {{"512": 1}}}}'
                for ms in ("-1", "null", '"1"')
            ),
            '{"prefill": {"0": 20}, "decode": {"512": 1}}',
        ),
    ),
}

BATCHING = {
    "n_positions": Row(
        (
            *(("1024", 1024), (1024, 1024), ("[4096]", (4096,)), ("(512, 2048)", (512, 2048))),
            *(("2048,512", (512, 2048)), ([512, 2048], (512, 2048)), *NONE),
        ),
        ("1", "0", "many", "1.5", "1,2", "[]", "[[2]]", "", str(2**31), {}),
        constructor(n_positions=[128, 256, 512, 1024]),
        config(seq_len=1024, max_length=1024),
        also=("max_model_len",),
    ),
    "context_length_estimate": lengths(
        constructor(context_length_estimate=[256, 512, 1024]),
        config(context_encoding_buckets=[256, 512, 1024], max_context_length=1024),
        also=("context_encoding_buckets",),
        env=("NEURON_CONTEXT_LENGTH_ESTIMATE",),
    ),
    "rolling_batch": choice("auto", "tnx", "vllm", "disable", also_bad=("trtllm",)),
    "async_mode": flag(),
    "max_rolling_batch_size": count(
        {
            **constructor(batch_size=3),
            **config(continuous_batching={"batch_size_for_shared_caches": 3}),
        },
        config(batch_size=3, tkg_batch_size=3, max_batch_size=3),
        also=("max_num_seqs",),
    ),
    "batch_size": count(env=("SERVING_BATCH_SIZE",)),
    "engine_process": flag(),
    "core_wait_s": Row((("30", 30), ("0", 0)), ("-1", "1.5", "soon", str(2**31), [3])),
    "engine_restarts": Row((("3", 3), ("0", 0)), ("-1", "1.5", "soon", str(2**31), [3])),
    "resume_requests": flag(),
    "max_waiting": count(),
    "tool_call_parser": choice(
        "auto", "none", "hermes", "llama3_json", "mistral", "granite", "deepseek_v3", "deepseek_v31"
    ),
    "reasoning_parser": choice("auto", "none", "deepseek_r1", "qwen3", "mistral", "granite"),
    "scheduling_policy": choice("fcfs", "priority"),
    "fairness_key": Row((("api_key", "api_key"), ("USER", "user"), *NONE), ("", "key", 7, True)),
    "decode_interleave": count(),
    "enable_prefix_caching": optional_flag(BACKEND, BACKEND),
    "native_sampling": flag(env=("DJL_NEURONX_NATIVE",)),
    "sampling_threads": Row((("3", 3), (3, 3), *NONE), COUNT_BAD),
    "max_join_wait_ms": Row(
        (("250", 250), ("0", 0), (100, 100)), ("-1", "1.5", "soon", "None", str(2**31), [3])
    ),
}

LIMITS = {
    "max_request_seconds": SECONDS,
    "max_body_bytes": count(),
    "unknown_parameters": choice("error", "warn"),
    "text_timeout": SECONDS,
    "request_head_timeout": SECONDS,
    "request_body_timeout": SECONDS,
    "write_timeout": SECONDS,
    "keep_alive_timeout": SECONDS,
    "max_connections": count(),
}

SERVER = {
    "api_key_file": Row(
        (("/run/keys", "/run/keys"), ("keys", "keys"), *NONE), ("s3://b/k", *TEXT_BAD)
    ),
    "cors_allow_origins": Row(
        (
            ("https://a.test,http://localhost:3000", ("https://a.test", "http://localhost:3000")),
            ("*", ("*",)),
            (["http://[::1]:80"], ("http://[::1]:80",)),
            *NONE,
        ),
        ("a.test", "https://a.test/", "https://*.a.test", "https://u@a.test", "", "true", 7),
    ),
    "page": flag(),
    "access_log": choice("text", "json", "off"),
    "ping": choice("any", "all"),
    "cloudwatch_namespace": Row(
        (("djl-neuronx/chat", "djl-neuronx/chat"), (" My Models #1 ", "My Models #1"), *NONE),
        (":a", 'a"b', "a" * 256, *TEXT_BAD),
    ),
    "otlp_traces_endpoint": Row(
        (
            ("http://collector:4318/v1/traces", "http://collector:4318/v1/traces"),
            (" https://[::1]:4317 ", "https://[::1]:4317"),
            *NONE,
        ),
        (
            "collector:4317",
            "grpc://collector:4317",
            "http://user:secret@collector/v1/traces",
            "http://c/v1/traces?key=secret",
            *TEXT_BAD,
        ),
    ),
    "admin_port": Row((("9000", 9000), (9000, 9000), *NONE), ("0", "65536", "-1", "http", [1])),
    "admin_host": Row((("127.0.0.1", "127.0.0.1"), ("::1", "::1"), *NONE), TEXT_BAD),
}

GRAPHS = {
    "group_query_attention": Row(
        (
            ("replicated-heads", "replicated-heads"),
            ("shard-over-heads", "shard-over-heads"),
            ("shard_over_batch", "shard-over-batch"),
            ("ALL-GATHER-HEADS", "all-gather-heads"),
            *NONE,
        ),
        ("heads", "", 7),
        config(group_query_attention="replicated-heads"),
        LEFT_OUT,
    ),
    "fuse_qkv": optional_flag("fuse_qkv", "fused_qkv", also=("fused_qkv",)),
    "fuse_mlp": optional_flag("fuse_mlp", LEFT_OUT),
    "fused_rmsnorm_qkv": optional_flag(
        "fused_rmsnorm_qkv", "qkv_kernel_enabled", also=("qkv_kernel_enabled",)
    ),
    "fused_rmsnorm_mlp": optional_flag(
        "fused_rmsnorm_mlp", "mlp_kernel_enabled", also=("mlp_kernel_enabled",)
    ),
    "qkv_tiling": optional_flag("qkv_tiling", LEFT_OUT),
    "weight_tiling": optional_flag("weight_tiling", LEFT_OUT),
    **{
        name: Row(
            (
                ("1,2,0,3", (1, 2, 0, 3)),
                ("[1, 2, 0, 3]", (1, 2, 0, 3)),
                ([0, 1, 2, 3], (0, 1, 2, 3)),
            ),
            ("1,2,3", "1,2,0,4", "1,2,0,3,3", "a", ""),
            config(**{name: [1, 2, 0, 3]}),
            LEFT_OUT,
        )
        for name in ("mlp_in_weight_tiling_permute_order", "mlp_out_weight_tiling_permute_order")
    },
    "mlp_out_weight_transpose": optional_flag("mlp_out_weight_transpose", LEFT_OUT),
    "attn_output_transposed": optional_flag("attn_output_transposed", LEFT_OUT),
    "attention_layout": choice(
        "BSH", "HSB", also_bad=("SBH",), tnx="attention_layout", nxdi=LEFT_OUT
    ),
    "collectives_layout": choice(
        "BSH", "HSB", also_bad=("SBH",), tnx="collectives_layout", nxdi=LEFT_OUT
    ),
    "cache_layout": choice("BSH", "SBH", also_bad=("HSB",), tnx="cache_layout", nxdi=LEFT_OUT),
    "sequence_parallel": optional_flag(
        "sequence_parallel_norm",
        "sequence_parallel_enabled",
        also=("sequence_parallel_enabled", "sequence_parallel_norm"),
        env=("NEURON_SEQUENCE_PARALLEL",),
    ),
    "sequence_parallel_norm_threshold": count("sequence_parallel_norm_threshold", LEFT_OUT),
    "shard_over_sequence": optional_flag(
        {**config(shard_over_sequence=True), **constructor(n_positions=[2048])},
        "flash_decoding_enabled",
        also=("flash_decoding_enabled",),
        env=("NEURON_SHARD_OVER_SEQUENCE",),
    ),
    "duplicate_q_weight_sos": optional_flag("duplicate_q_weight_sos", LEFT_OUT),
    "on_device_embedding": optional_flag(
        "on_device_embedding", ANYWAY, env=("NEURON_ON_DEVICE_EMBEDDING",)
    ),
    "on_device_default_top_k": choice("global_top_k", also_bad=("50", "true")),
    "on_device_generation": Row(
        (
            ("true", _TRUE_GENERATION),
            ("True", _TRUE_GENERATION),
            (True, _TRUE_GENERATION),
            ("false", None),
            (False, None),
            *NONE,
            ("{}", OnDeviceGeneration()),
            ('{"top_k": 1, "do_sample": true}', OnDeviceGeneration(top_k=1, do_sample=True)),
            (
                "{'dynamic': True, 'temperature': 0.5}",
                OnDeviceGeneration(dynamic=True, temperature=0.5),
            ),
            ({"top_p": "0.9"}, OnDeviceGeneration(top_p=0.9)),
            ({"global_topk": 64}, OnDeviceGeneration(global_top_k=64)),
        ),
        (
            *(
                "maybe",
                "[1]",
                "{",
                '{"top_k": 0}',
                '{"top_p": 1.5}',
                '{"top_p": 0}',
                '{"top_q": 1}',
            ),
            *('{"temperature": 0}', '{"temperature": NaN}', '{"global_top_k": -1}', "{1: 2}"),
            *('{"top_p_min_tokens": 0}', '{"do_sample": "perhaps"}', {1: 2}, [1], 7, 1.5),
        ),
        config(
            on_device_generation={
                "do_sample": True,
                "dynamic": True,
                "per_batch_line": True,
                "deterministic": False,
                "global_top_k": 256,
                "top_k": [50] * 4,
                "top_p": [1.0] * 4,
                "temperature": [1.0] * 4,
                "top_p_min_tokens": [1] * 4,
            }
        ),
        config(
            on_device_sampling_config={
                "do_sample": True,
                "dynamic": True,
                "deterministic": False,
                "top_k": 50,
                "top_p": 1.0,
                "temperature": 1.0,
                "global_topk": 256,
            }
        ),
        also=("on_device_sampling_config",),
        env=("NEURON_ON_DEV_GENERATION",),
    ),
    "padding_side": choice(
        "right", "left", also_bad=("both",), tnx="padding_side", nxdi="padding_side"
    ),
    "is_block_kv_layout": optional_flag(
        _shared(optimized_paged_attention=True, max_model_len=2048),
        BACKEND,
        also=("optimized_paged_attention",),
    ),
    "pa_block_size": count(BACKEND, "pa_block_size"),
    "pa_num_blocks": count(BACKEND, "pa_num_blocks"),
    "prefix_buckets": lengths(REFUSED, config(prefix_buckets=[256, 512, 1024])),
    "enable_chunked_prefill": flag(
        _shared(optimized_paged_attention=True, max_model_len=2048, enable_chunked_prefill=True),
        REFUSED,
        also=("is_chunked_prefill",),
    ),
    "pipeline_parallel_degree": count(
        REFUSED, "pp_degree", also=("pp_degree",), env=("PIPELINE_PARALLEL_DEGREE",)
    ),
    "rolling_batch_strategy": choice(
        "naive_rolling_batch",
        "continuous_batching",
        also_bad=("static",),
        tnx=config(continuous_batching=None),
        nxdi=config(is_continuous_batching=None, ctx_batch_size=4),
    ),
    "allow_known_defects": flag(),
}

PRECISION = {
    "quantize": Row(
        (
            *(
                (text, "static_int8")
                for text in ("static_int8", "int8", "s8", "INT8", "true", True)
            ),
            *((text, "static_fp8") for text in ("static_fp8", "fp8", "f8e4m3fn", "f8e4m3", "FP8")),
            *(("false", None), (False, None), *NONE),
        ),
        ("awq", "gptq", "int4", "bitsandbytes8", "", 8, ["int8"], {"int8": 1}, 1.5),
        config(quant={"quant_dtype": "s8", "dequant_dtype": "bf16"}),
        config(
            quantized=True,
            quantization_dtype="int8",
            quantization_type="per_channel_symmetric",
            modules_to_not_convert=["lm_head"],
        ),
        also=("load_in_8bit", "neuron_quant"),
        env=("NEURON_QUANT",),
    ),
    "kv_cache_quantize": Row(
        (("int8", "int8"), ("s8", "int8"), ("fp8", "fp8"), ("f8e4m3fn", "fp8"), *NONE),
        ("int4", "", "true", 8, ["int8"]),
        config(kv_cache_quant={"quant_dtype": "s8", "dequant_dtype": "bf16"}),
        BACKEND,
    ),
    "dequantize": flag(),
    "all_reduce_dtype": Row(
        DTYPES,
        (*DTYPE_BAD, "auto"),
        config(all_reduce_dtype="float16"),
        config(rpl_reduce_dtype="float16"),
        also=("rpl_reduce_dtype",),
    ),
    "cast_logits_dtype": Row(
        DTYPES, (*DTYPE_BAD, "auto"), config(cast_logits_dtype="float16"), REFUSED
    ),
    "bf16_rms_norm": optional_flag("bf16_rms_norm", REFUSED),
}

_SQL = {"sql": "/adapters/sql"}
_TWO = {**_SQL, "law-1.b": "owner/law@main"}
LORA = {
    "enable_lora": Row(
        FLAG,
        FLAG_BAD,
        REFUSED,
        {
            "neuron_config": {
                "lora_config": {
                    "max_loras": 5,
                    "max_lora_rank": 16,
                    "batch_size": 4,
                    "target_modules": [
                        *("q_proj", "k_proj", "v_proj", "o_proj"),
                        *("gate_proj", "up_proj", "down_proj"),
                    ],
                    "lora_shard_linear_layer": True,
                    "dynamic_multi_lora": True,
                }
            }
        },
    ),
    "adapters": Row(
        (
            ("sql=/adapters/sql", _SQL),
            *(("sql=/adapters/sql, law-1.b=owner/law@main", _TWO), (_TWO, _TWO)),
            ('{"sql": "/adapters/sql", "law-1.b": "owner/law@main"}', _TWO),
            ("{'sql': 's3://bucket/a=b'}", {"sql": "s3://bucket/a=b"}),
            *NONE,
        ),
        (
            *(
                "",
                "sql",
                "=/a",
                "sql=",
                '{"name": "sql", "path": "/a/sql", "base_model_name": "m"}',
                "a=/a,a=/b",
                "a=/a,,b=/b",
                "a/b=/a",
                "..=/a",
                ".a=/a",
                "é=/a",
            ),
            *(
                "a b=/a",
                '{"a": 1}',
                '{"name": "a"}x',
                "{}",
                "[]",
                "[1]",
                '[["a", "/a"]]',
                "x" * 129 + "=/a",
            ),
            *(
                '[{"name": "a", "path": "/a"}]',
                '{"a": "/a"},{"b": "/b"}',
                7,
                ["a"],
                "a\n=/a",
                "-a=/a",
            ),
        ),
        REFUSED,
        BACKEND,
    ),
    "max_loras": count(REFUSED, BACKEND),
    "max_lora_rank": count(REFUSED, BACKEND),
    "adapter_sources": Row(
        (
            ("/adapters", ("/adapters",)),
            ("/a, s3://b/c,owner", ("/a", "s3://b/c", "owner")),
            (["/a"], ("/a",)),
            *NONE,
        ),
        ("", [], ["/a", ""], True, 5),
    ),
    "lora_target_modules": Row(
        (*WORD_LIST, *NONE), WORD_LIST_BAD, REFUSED, BACKEND, also=("target_modules",)
    ),
    "lora_shard_linear_layer": optional_flag(LEFT_OUT, BACKEND),
}
SPECULATION = {
    "speculative_draft_model": Row(
        (("org/draft", "org/draft"), ("./draft", "./draft")),
        ("", *TEXT_BAD),
        BACKEND,
        config(enable_fused_speculation=True, speculation_length=6, seq_len=2176, max_length=2176),
        also=("draft_model_id",),
    ),
    "speculative_length": Row(
        (("7", 7), ("0", 0), (5, 5)),
        ("-1", "1.5", "many", "None"),
        BACKEND,
        BACKEND,
        also=("spec_length",),
    ),
    "draft_model_kind": choice("eagle", "eagle3", "draft_model", tnx=REFUSED, nxdi=BACKEND),
    "enable_fused_speculation": optional_flag(REFUSED, BACKEND),
    "enable_eagle_draft_input_norm": optional_flag(REFUSED, BACKEND),
    "ngram_prompt_lookup_max": count(
        BACKEND, config(speculation_length=6, seq_len=2176, max_length=2176)
    ),
    "draft_model_tp_size": count(BACKEND, BACKEND),
}

_LOCAL = (("/opt/graphs", "/opt/graphs"), ("a:b", "a:b"), ("file:///opt/graphs", "/opt/graphs"))
_PATHS = (*_LOCAL, ("s3://bucket/key", "s3://bucket/key"), ("S3://bucket", "s3://bucket"))
_NO_PLACES = ("https://host/x", "s3://", "s3:///key", "s3:/bucket/key", "gs://b/k", "file://host/a")
_CACHE = {"environment": {"NEURON_COMPILE_CACHE_URL": "/opt/graphs"}}

ARTIFACTS = {
    "compiled_graph_path": Row(
        *(_PATHS, ("", *_NO_PLACES, *TEXT_BAD), _CACHE, _CACHE),
        env=("NEURON_COMPILED_ARTIFACTS",),
    ),
    "draft_model_compiled_path": Row(_PATHS, ("", *_NO_PLACES, *TEXT_BAD), BACKEND, LEFT_OUT),
    "save_mp_checkpoint_path": Row(_PATHS, ("", *_NO_PLACES, *TEXT_BAD)),
    "partition_schema": choice("optimum", "safetensors", "compile_only", also_bad=("split",)),
    "load_split_model": flag("on_device_embedding", REFUSED),
    "low_cpu_mem_usage": flag(),
    "on_mismatch": choice("error", "recompile", also_bad=("ignore",)),
    "compilation": choice("allow", "forbid", also_bad=("false",)),
    "retry_compile": flag(also=("retry",)),
}

COMPILER = {
    "neuron_optimize_level": Row(
        (("2", 2), ("1", 1), (3, 3)), ("0", "4", "high"), {"compiler_flags": ("-O2",)}, LEFT_OUT
    ),
    "enable_mixed_precision_accumulation": optional_flag(
        {"compiler_flags": ("--enable-mixed-precision-accumulation",)}, REFUSED
    ),
    "enable_saturate_infinity": optional_flag(
        {"compiler_flags": ("--enable-saturate-infinity",)}, REFUSED
    ),
    "neuron_cc_pipeline_factor": count(
        {
            "compiler_flags": (
                "--tensorizer-options=--enable-ccop-compute-overlap --cc-pipeline-tiling-factor=3",
            )
        },
        "cc_pipeline_tiling_factor",
        also=("cc_pipeline_tiling_factor",),
        env=("NEURON_CC_PIPELINE_FACTOR",),
    ),
    "compilation_worker_count": count(
        "compilation_worker_count", BACKEND, env=("NEURON_COMPILATION_WORKER_COUNT",)
    ),
    "unroll": count(constructor(unroll=3), LEFT_OUT),
    "multi_node": flag(
        config(fuse_mlp=True, mlp_out_weight_transpose=True), LEFT_OUT, env=("NEURON_MULTI_NODE",)
    ),
    "override_neuron_config": Row(
        OBJECT,
        OBJECT_BAD,
        config(block_size=512),
        config(block_size=512),
        also=("additional_config",),
    ),
}

NXDI_ONLY = {
    "nxdi_model_code": Row(
        (("./code", "./code"), ("org/code@v1", "org/code@v1"), ("s3://b/k", "s3://b/k")),
        ("", *TEXT_BAD),
        REFUSED,
        BACKEND,
    ),
    "nxdi_model_class": Row(
        (("NeuronGraniteForCausalLM", "NeuronGraniteForCausalLM"), *NONE),
        ("", "a.b", "1a", "os.system('x')", *TEXT_BAD),
        REFUSED,
        BACKEND,
    ),
    "nxdi_model_code_unverified": flag(),
    **{
        name: count(LEFT_OUT, name)
        for name in (
            *("cp_degree", "mlp_cp_degree", "attention_dp_degree", "moe_tp_degree"),
            *("moe_ep_degree", "weight_gather_seq_len_threshold"),
            *("windowed_context_encoding_size", "seq_len_threshold_for_cc_tiling"),
            *("scratchpad_page_size", "lm_head_pad_alignment_size"),
        )
    },
    "ep_degree": count(REFUSED, "ep_degree"),
    **{
        name: optional_flag(LEFT_OUT, name)
        for name in (
            *("vocab_parallel", "enable_cte_modular_flow", "layer_boundary_markers"),
            *("k_cache_transposed", "attn_kernel_enabled"),
            "strided_context_parallel_kernel_enabled",
            *("qkv_nki_kernel_enabled", "qkv_cte_nki_kernel_fuse_rope", "qkv_kernel_nbsd_layout"),
            *("qkv_kernel_fuse_residual_add", "mlp_kernel_fuse_residual_add"),
            *("fused_rmsnorm_skip_gamma", "out_proj_kernel_enabled"),
            *("attn_block_tkg_nki_kernel_enabled", "attn_block_tkg_nki_kernel_cache_update"),
            "attn_block_tkg_nki_kernel_cascaded_attention",
            "attn_block_tkg_nki_kernel_use_online_softmax",
            "attn_block_tkg_nki_kernel_disable_gpsimd_sb2sb",
            *("disable_argmax_kernel", "moe_fused_nki_kernel_enabled"),
            *("router_topk_nki_kernel_enabled", "expert_mlp_nki_kernel_enabled"),
            *("shared_mlp_nki_kernel_enabled", "fused_shared_experts"),
            "shared_experts_sequence_parallel_enabled",
            *("transpose_shared_experts_weights", "use_index_calc_kernel"),
            *("save_sharded_checkpoint", "enable_spill_reload_dge", "switch_cc"),
            *("disable_numeric_cc_token", "lm_head_pad"),
        )
    },
    **{
        name: optional_flag(REFUSED, name)
        for name in (
            *("is_mxfp4_compute", "output_logits"),
            *("early_expert_affinity_modulation", "disable_normalize_top_k_affinities"),
            "moe_mask_padded_tokens",
        )
    },
    "async_execution": optional_flag(LEFT_OUT, "async_mode"),
    "hybrid_sharding_config": mapping("hybrid_sharding_config"),
    "blockwise_matmul_config": mapping("blockwise_matmul_config"),
    "dma_order_config": mapping("dma_order_config"),
    "router_config": mapping("router_config", REFUSED),
    "ep_dispatch_cc_option": choice(
        "AR_AG", "RS_AG", "AG_AR", tnx=LEFT_OUT, nxdi="ep_dispatch_cc_option"
    ),
    "logical_nc_config": Row(
        (("2", 2), ("1", 1), *NONE),
        ("0", "3", "two"),
        REFUSED,
        {**config(logical_nc_config=2), "environment": {"NEURON_LOGICAL_NC_CONFIG": "2"}},
        env=("NEURON_LOGICAL_NC_CONFIG",),
    ),
    "cast_type": Row(
        (("as-declared", "as-declared"), ("as_declared", "as-declared"), ("config", "config")),
        ("declared", 7),
        REFUSED,
        config(cast_type="as-declared"),
    ),
    "attention_dtype": Row(
        DTYPES, (*DTYPE_BAD, "auto"), REFUSED, config(attention_dtype="float16")
    ),
    "quantization_type": Row(
        tuple((name, name) for name in ("per_channel_symmetric", "per_tensor_symmetric")),
        ("blockwise_symmetric", "", 7),
        REFUSED,
        BACKEND,
    ),
    "modules_to_not_convert": Row(
        (("lm_head,mlp", ("lm_head", "mlp")), ('["lm_head"]', ("lm_head",))),
        WORD_LIST_BAD,
        REFUSED,
        BACKEND,
    ),
    "weights_to_skip_layout_optimization": Row(
        (('[".*lora.*"]', (".*lora.*",)), (".*a.*,b", (".*a.*", "b"))),
        WORD_LIST_BAD,
        LEFT_OUT,
        config(weights_to_skip_layout_optimization=[".*lora.*"]),
    ),
    "token_generation_batches": lengths(
        LEFT_OUT, config(token_generation_batches=[256, 512, 1024])
    ),
    "capacity_factor": Row(
        (("1.5", 1.5), ("2", 2.0)), ("0", "-1", "inf", "nan"), REFUSED, config(capacity_factor=1.5)
    ),
    "compiler_target": Row(
        (("trn2", "trn2"), ("TRN2", "trn2")), ("", 2), LEFT_OUT, config(target="trn2")
    ),
}

TABLE: dict[str, Row] = {
    **GENERAL,
    **BATCHING,
    **LIMITS,
    **SERVER,
    **GRAPHS,
    **PRECISION,
    **SPECULATION,
    **LORA,
    **ARTIFACTS,
    **COMPILER,
    **NXDI_ONLY,
}

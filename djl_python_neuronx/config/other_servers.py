"""Names that other servers have for an option, and those of theirs that nothing here corresponds to.

Words in lower case are names of flags, words in capitals those of variables. Sources: text-generation-inference db931fc
(launcher/src/main.rs, backends/neuron), optimum-neuron 213224e (serve.py, and until 2ac9af6b tgi_env.py), vLLM 0.16
(arg_utils.py, cli_args.py, envs.py), vllm-neuron a5ef7c8, and AWS's guide for vLLM before its plugin.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final


def _by_word(rows: Mapping[str, str]) -> dict[str, str]:
    """The words of the rows, each to what it stands behind."""
    return {word: what for what, words in rows.items() for word in words.split()}


SAME: Final = _by_word(
    {
        "adapters": "lora_modules",
        "context_length_estimate": "max_input_length max_input_tokens MAX_INPUT_LENGTH MAX_INPUT_TOKENS "
        "NEURON_CONTEXT_LENGTH_BUCKETS",
        "dtype": "HF_AUTO_CAST_TYPE",
        "max_body_bytes": "payload_limit PAYLOAD_LIMIT",
        "max_rolling_batch_size": "batch_size max_batch_size HF_BATCH_SIZE",
        "max_waiting": "max_concurrent_requests",
        "model_id": "m model",
        "n_positions": "max_total_tokens sequence_length MAX_TOTAL_TOKENS HF_SEQUENCE_LENGTH NEURON_TOKEN_GEN_BUCKETS",
        "pipeline_parallel_degree": "pipeline_parallel_size pp",
        "quantize": "quantization",
        "replicas": "data_parallel_size dp",
        "speculative_draft_model": "speculative_model speculative_config",
        "speculative_length": "num_speculative_tokens",
        "tensor_parallel_degree": "num_shard tp HF_NUM_CORES NUM_SHARD",
    }
)
"""Name to the option that means the same; of several variables for one option the first counts. An option's own aliases
are flags too."""

SPECULATION: Final = {
    "method": "draft_model_kind",
    "model": "speculative_draft_model",
    "num_speculative_tokens": "speculative_length",
    "prompt_lookup_max": "ngram_prompt_lookup_max",
    "draft_tensor_parallel_size": "draft_model_tp_size",
}
"""Key of vLLM's `speculative_config` to the option. Source: vLLM 0.16, config/speculative.py."""

_KEYS = "write the keys into a file and set -o api_key_file=FILE, or set DJL_NEURONX_API_KEY"
_ORIGINS = "write -o cors_allow_origins=https://a.org,https://b.org"
_DRAFTS = "write -o ngram_prompt_lookup_max=3, or -o speculative_draft_model=MODEL, and -o speculative_length=N"
_CACHE = "set HF_HUB_CACHE to the folder of the hub's files"
NOTHING = "nothing here corresponds to it; leave it out (docs/migration.md)"
_PARSERS = "write -o tool_call_parser=NAME, or -o reasoning_parser=NAME: there are no others"
_ADAPTERS = "write -o enable_lora=true -o adapters=NAME=PLACE"
_IMAGES = "no images, video or audio in this version; leave it out"
_TOKENIZER = (
    "the model's own tokenizer is used: put other files of a tokenizer into the model folder"
)
_TGI = _by_word(
    {
        _CACHE: "weights_cache_override",
        _DRAFTS: "speculate",
        _KEYS: "api_key",
        _ORIGINS: "cors_allow_origin",
        NOTHING: "cuda_graphs cuda_memory_fraction disable_custom_kernels disable_grammar_support enable_cuda_graphs "
        "enable_prefill_logprobs max_best_of max_client_batch_size max_stop_sequences max_top_n_tokens "
        "ngrok ngrok_authtoken ngrok_edge rope_factor rope_scaling shard_uds_path "
        "usage_stats validation_workers watermark_delta watermark_gamma",
        _ADAPTERS: "lora_adapters",
        "-o max_rolling_batch_size and -o n_positions decide": "max_batch_total_tokens",
        "-o decode_interleave rules how new requests join": "max_waiting_tokens waiting_served_ratio",
        "-o tensor_parallel_degree decides": "sharded",
        "write -o admin_port=PORT": "prometheus_port",
        "write -o chat_template=FILE": "tokenizer_config_path",
        "write -o kv_cache_quantize=fp8": "kv_cache_dtype",
        "write --log-format json": "json_output",
        "write -o otlp_traces_endpoint=http://HOST:4318/v1/traces": "otlp_endpoint",
        "set OTEL_SERVICE_NAME": "otlp_service_name",
    }
)
_COMMON = "DTYPE QUANTIZE TRUST_REMOTE_CODE"
ADVICE: Final = {
    **{name.upper(): advice for name, advice in _TGI.items()},
    **{name: f"its name is too common to be read; set OPTION_{name}" for name in _COMMON.split()},
    **_TGI,
    **_by_word(
        {
            _CACHE: "download_dir huggingface_hub_cache",
            "leave it out: adapters have the dtype of the model": "lora_dtype",
            "write -o max_loras=NUMBER, of all adapters": "max_cpu_loras",
            "write -o lora_shard_linear_layer=true": "fully_sharded_loras",
            "leave it out: max_loras is compiled": "specialize_active_lora",
            _IMAGES: "allowed_local_media_path allowed_media_domains default_mm_loras enable_mm_embeds "
            "enable_tower_connector_lora interleave_mm_strings "
            "limit_mm_per_prompt media_io_kwargs mm_encoder_attn_backend mm_encoder_only mm_encoder_tp_mode "
            "mm_processor_cache_gb mm_processor_cache_type mm_processor_kwargs mm_shm_cache_max_object_size_mb "
            "skip_mm_profiling video_pruning_rate",
            _TOKENIZER: "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init",
            _PARSERS: "reasoning_parser_plugin tool_parser_plugin",
            "prompts are not logged here; leave it out": "enable_log_requests enable_log_outputs",
            "write its settings as flags, or into a serving.properties as option.NAME=VALUE": "config",
            _KEYS: "VLLM_API_KEY",
            _ORIGINS: "allowed_origins",
            "set AWS_ENDPOINT_URL": "S3_ENDPOINT_URL",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY": "S3_ACCESS_KEY_ID S3_SECRET_ACCESS_KEY",
            "set HF_TOKEN": "hf_token HF_API_TOKEN",
            "the hub's cache of compiled models is not read; compile with djl-neuronx compile": "CUSTOM_CACHE_REPO",
            "leave it out, or with tnx set OPTION_ENABLE_CHUNKED_PREFILL=true": "DISABLE_NEURON_CUSTOM_SCHEDULER",
            "set OPTION_MODEL_LOADER=nxdi, or tnx": "VLLM_NEURON_FRAMEWORK",
            "set OPTION_STEP_TIMEOUT": "VLLM_ENGINE_ITERATION_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
            "set OPTION_KEEP_ALIVE_TIMEOUT": "VLLM_HTTP_TIMEOUT_KEEP_ALIVE",
            "set OPTION_ADAPTER_SOURCES and OPTION_ADMIN_PORT": "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
            "the host samples unless OPTION_ON_DEVICE_GENERATION is set": "NEURON_ON_DEVICE_SAMPLING_DISABLED",
            "write djl-neuronx serve --drain SECONDS": "GRACEFUL_TERMINATION_TIMEOUT",
            "write djl-neuronx serve --host ADDRESS --port PORT": "host port PORT",
            "write -o access_log=off": "disable_uvicorn_access_log",
            "write --log-level LEVEL": "uvicorn_log_level VLLM_LOGGING_LEVEL",
        }
    ),
}
"""Name that sets nothing here, to what to do instead."""

_SWITCHES_OFF = """
    aggregate_engine_logging allow_credentials allow_deprecated_quantization calculate_kv_scales
    cudagraph_metrics data_parallel_external_lb data_parallel_hybrid_lb disable_cascade_attn disable_chunked_mm_input
    disable_fastapi_docs disable_hybrid_kv_cache_manager disable_nccl_for_dp_synchronization disable_sliding_window
    disable_uvicorn_access_log enable_dbo enable_eplb enable_expert_parallel enable_force_include_usage
    enable_layerwise_nvtx_tracing enable_log_outputs enable_log_requests enable_logging_iteration_details
    enable_mfu_metrics enable_mm_embeds enable_offline_docs enable_prompt_embeds enable_prompt_tokens_details
    enable_request_id_headers enable_return_routed_experts enable_server_load_tracking enable_sleep_mode
    enable_ssl_refresh enable_tokenizer_info_endpoint enable_tower_connector_lora
    fully_sharded_loras headless interleave_mm_strings kv_cache_metrics kv_sharing_fast_prefill log_error_stack
    mm_encoder_only ray_workers_use_nsight return_tokens_as_token_ids skip_mm_profiling skip_tokenizer_init
    specialize_active_lora tokens_only trust_request_chat_template
"""
_SWITCHES = """
    async_scheduling disable_frontend_multiprocessing enable_auto_tool_choice enable_flashinfer_autotune
    enable_log_deltas exclude_tools_when_tool_choice_none use_tqdm_on_load
"""
NEUTRAL: Final = {
    **dict.fromkeys(_SWITCHES_OFF.split(), ("false",)),
    **dict.fromkeys(_SWITCHES.split(), ("false", "true")),
    **{
        name: tuple(values.split())
        for name, values in {
            "all2all_backend": "allgather_reducescatter",
            "api_server_count": "1",
            "chat_template_content_format": "auto",
            "config_format": "auto hf",
            "convert": "auto none",
            "cp_kv_cache_interleave_size": "1",
            "cpu_offload_gb": "0",
            "data_parallel_backend": "mp",
            "dbo_decode_token_threshold": "32",
            "dbo_prefill_token_threshold": "512",
            "dcp_kv_cache_interleave_size": "1",
            "decode_context_parallel_size": "1",
            "expert_placement_strategy": "linear",
            "h11_max_header_count": "256",
            "h11_max_incomplete_event_size": "4194304",
            "hf_overrides": "{}",
            "kv_cache_dtype": "auto",
            "kv_cache_metrics_sample": "0.01",
            "kv_offloading_backend": "native",
            "limit_mm_per_prompt": "{}",
            "load_format": "auto safetensors",
            "logprobs_mode": "raw_logprobs",
            "long_prefill_token_threshold": "0",
            "lora_dtype": "auto",
            "mamba_cache_dtype": "auto",
            "mamba_cache_mode": "none",
            "mamba_ssm_cache_dtype": "auto",
            "max_logprobs": "20",
            "max_long_partial_prefills": "1",
            "max_num_partial_prefills": "1",
            "media_io_kwargs": "{}",
            "mm_encoder_tp_mode": "weights",
            "mm_processor_cache_gb": "4",
            "mm_processor_cache_type": "lru",
            "mm_shm_cache_max_object_size_mb": "128",
            "model_impl": "auto",
            "model_loader_extra_config": "{}",
            "nnodes": "1",
            "node_rank": "0",
            "override_generation_config": "{}",
            "prefill_context_parallel_size": "1",
            "prefix_caching_hash_algo": "sha256",
            "pt_load_map_location": "cpu",
            "response_role": "assistant",
            "runner": "auto generate",
            "safetensors_load_strategy": "lazy",
            "seed": "0",
            "ssl_cert_reqs": "0",
            "stream_interval": "1",
            "tokenizer": "",
            "tokenizer_mode": "auto hf",
            "ubatch_size": "0",
            "uvicorn_log_level": "info",
            "worker_cls": "auto",
        }.items()
    },
}
"""Flag of vLLM to the values that ask for nothing here: its defaults, and for flags of its own parts every value.
The tokenizer may also be the model's own. Flags that are true or false are switches."""


_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT\w*)$|_PORT_\d+_(TCP|UDP)")
"""Variables that Kubernetes sets in every pod for each service, such as one named vllm."""


def unread(variable: str) -> str:
    """Advice on a variable of another server that sets nothing here; empty for any other."""
    known = ADVICE.get(variable, NOTHING if variable.startswith("VLLM_") else "")
    return known if variable.isupper() and not _KUBERNETES.search(variable) else ""

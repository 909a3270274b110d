"""Names that other servers have for an option, and those of theirs that nothing here corresponds to.

Words in lower case are names of flags, words in capitals those of variables. Sources: text-generation-inference db931fc
(launcher/src/main.rs, backends/neuron), optimum-neuron 213224e (serve.py, and until 2ac9af6b tgi_env.py), vLLM 0.16
(arg_utils.py, cli_args.py, envs.py), vllm-neuron a5ef7c8, and AWS's guide for vLLM before its plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final


def _by_word(rows: Mapping[str, str]) -> dict[str, str]:
    """The words of the rows, each to what it stands behind."""
    return {word: what for what, words in rows.items() for word in words.split()}


SAME: Final = _by_word(
    {
        "context_length_estimate": "max_input_length max_input_tokens MAX_INPUT_LENGTH MAX_INPUT_TOKENS "
        "NEURON_CONTEXT_LENGTH_BUCKETS",
        "dtype": "HF_AUTO_CAST_TYPE",
        "max_body_bytes": "payload_limit PAYLOAD_LIMIT",
        "max_rolling_batch_size": "batch_size max_batch_size HF_BATCH_SIZE",
        "max_waiting": "max_concurrent_requests",
        "model_id": "m model",
        "n_positions": "max_total_tokens sequence_length HF_SEQUENCE_LENGTH MAX_TOTAL_TOKENS NEURON_TOKEN_GEN_BUCKETS",
        "override_neuron_config": "additional_config",
        "pipeline_parallel_degree": "pipeline_parallel_size pp",
        "quantize": "quantization",
        "replicas": "data_parallel_size dp",
        "tensor_parallel_degree": "num_shard tp HF_NUM_CORES NUM_SHARD",
    }
)
"""Name to the option that means the same. An option's own aliases are flags too."""

_KEYS = "write the keys into a file and set -o api_key_file=FILE, or set DJL_NEURONX_API_KEY"
_ORIGINS = "write -o cors_allow_origins=https://a.org,https://b.org"
_DRAFTS = "write -o ngram_prompt_lookup_max=3, or -o speculative_draft_model=MODEL, and -o speculative_length=N"
_CACHE = "set HF_HUB_CACHE to the folder of the hub's files"
_NOTHING = "nothing here corresponds to it; leave it out (docs/nxdi.md)"
_TGI = _by_word(
    {
        _CACHE: "weights_cache_override",
        _DRAFTS: "speculate",
        _KEYS: "api_key",
        _ORIGINS: "cors_allow_origin",
        _NOTHING: "cuda_graphs cuda_memory_fraction disable_custom_kernels disable_grammar_support enable_cuda_graphs "
        "enable_prefill_logprobs lora_adapters max_best_of max_client_batch_size max_stop_sequences max_top_n_tokens "
        "ngrok ngrok_authtoken ngrok_edge otlp_endpoint otlp_service_name rope_factor rope_scaling shard_uds_path "
        "usage_stats validation_workers watermark_delta watermark_gamma",
        "-o max_rolling_batch_size and -o n_positions decide": "max_batch_total_tokens",
        "-o decode_interleave rules how new requests join": "max_waiting_tokens waiting_served_ratio",
        "-o tensor_parallel_degree decides": "sharded",
        "write -o admin_port=PORT": "prometheus_port",
        "write -o chat_template=FILE": "tokenizer_config_path",
        "write -o kv_cache_quantize=fp8": "kv_cache_dtype",
        "write --log-format json": "json_output",
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
            _DRAFTS: "speculative_config",
            _KEYS: "VLLM_API_KEY",
            _ORIGINS: "allowed_origins",
            "set AWS_ENDPOINT_URL": "S3_ENDPOINT_URL",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY": "S3_ACCESS_KEY_ID S3_SECRET_ACCESS_KEY",
            "set HF_TOKEN": "hf_token HF_API_TOKEN",
            "set OPTION_ENABLE_CHUNKED_PREFILL=true": "DISABLE_NEURON_CUSTOM_SCHEDULER",
            "set OPTION_MODEL_LOADER=nxdi, or tnx": "VLLM_NEURON_FRAMEWORK",
            "set OPTION_STEP_TIMEOUT": "VLLM_ENGINE_ITERATION_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
            "set OPTION_KEEP_ALIVE_TIMEOUT": "VLLM_HTTP_TIMEOUT_KEEP_ALIVE",
            "the host samples unless OPTION_ON_DEVICE_GENERATION is set": "NEURON_ON_DEVICE_SAMPLING_DISABLED",
            "write djl-neuronx serve --drain SECONDS": "GRACEFUL_TERMINATION_TIMEOUT",
            "write djl-neuronx serve --host ADDRESS --port PORT": "host port PORT",
            "write --log-level LEVEL": "uvicorn_log_level VLLM_LOGGING_LEVEL",
        }
    ),
}
"""Name that sets nothing here, to what to do instead."""


def unread(variable: str) -> str:
    """Advice on a variable of another server that sets nothing here; empty for any other."""
    known = ADVICE.get(variable, _NOTHING if variable.startswith("VLLM_") else "")
    return known if variable.isupper() else ""

"""Names that are not options: those of the old engine, DJL Serving's own, and those of features to come.

Four tables: names without effect, what is not served yet with NxD Inference, unsupported names, and keys that DJL
Serving reads without the prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Unsupported:
    """An unsupported name; only values that turn it off are accepted."""

    neutral: tuple[str, ...] = ()
    """Values that turn it off, in lower case, the one for messages first. Empty: every value is refused."""
    advice: str = "it is not supported in this version; remove it"
    """Text after the allowed values in an error message."""
    off: str = "not supported in this version, and off"
    """The reason why an accepted value has no effect."""

    def accepts(self, value: object) -> bool:
        """True if `value` turns it off."""
        return str(value).strip().lower() in self.neutral

    @property
    def expected(self) -> str:
        """The allowed values, for an error message."""
        allowed = f"{self.neutral[0]} or nothing" if self.neutral else "nothing"
        return f"{allowed}: {self.advice}"


DJL_OPTIONS: Final = ("parallel_loading", "enable_venv", "modelName")
"""Options that DJL Serving alone reads, and that hold wherever a model is served."""

_DJL = "read by DJL Serving"
_GPU = "GPU only"
_VLLM = "for vLLM's own scheduler and cache"
_IMAGES = "for images; only text is generated"
_NEVER = "not used by the old engine either"

IGNORED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("engine", "entryPoint", "handler", "env", "pythonExecutable"), _DJL),
    **dict.fromkeys(DJL_OPTIONS, _DJL),
    "allow_non_cached_model": "the option is compilation",
    "max_batch_prefill_tokens": "the prompt buckets limit a prefill",
    "mpi_mode": "one process drives all NeuronCores of a model",
    "enable_streaming": 'set per request: "stream": true',
    "max_rolling_batch_prefill_tokens": "the prompt buckets limit a prefill",
    **dict.fromkeys(("waiting_steps", "cluster_size"), _NEVER),
    **dict.fromkeys(("gpu_memory_utilization", "enforce_eager", "device_map"), _GPU),
    **dict.fromkeys(("swap_space", "disable_custom_all_reduce"), _GPU),
    "device": "model_loader chooses the device",
    "enable_reasoning": "reasoning is split where the chat template marks it: reasoning_parser",
    **dict.fromkeys(("block_size", "max_num_batched_tokens", "use_v2_block_manager"), _VLLM),
    **dict.fromkeys(("num_gpu_blocks_override", "distributed_executor_backend"), _VLLM),
    **dict.fromkeys(("max_parallel_loading_workers", "tokenizer_pool_size"), _VLLM),
    **dict.fromkeys(("disable_log_stats", "disable_log_requests"), _VLLM),
    **dict.fromkeys(("height", "width", "num_images_per_prompt"), _IMAGES),
}
"""Name without effect, to the reason."""


NOT_SERVED: Final[Mapping[str, object]] = {
    # Keywords: of the library's own speculation and its own quantisation.
    **dict.fromkeys(("eagle_rolling_buffer_kernel_enabled", "is_medusa"), False),
    **dict.fromkeys(("medusa_speculation_length", "num_medusa_heads"), 0),
    **dict.fromkeys(("quantized_mlp_kernel_enabled", "rmsnorm_quantize_kernel_enabled"), False),
    **dict.fromkeys(("token_tree_config", "medusa_tree"), None),
    **dict.fromkeys(("activation_quantization_type", "quantize_clamp_bound"), None),
    "draft_model_modules_to_not_convert": None,
    **dict.fromkeys(("quantization_block_axis", "quantization_block_size"), None),
    "quantization_scale_dtype": None,
    "disable_kv_cache_tiling": False,
}
"""Keyword of a feature of NxD Inference that is not served, to the value that asks for nothing."""

_OFF = Unsupported(("false", "0", "no", "off", "none"))
_ANY = Unsupported()

UNSUPPORTED: Final[Mapping[str, Unsupported]] = {
    **dict.fromkeys(("use_stable_diffusion", "enable_stateful_sessions"), _OFF),
    "long_lora_scaling_factors": _OFF,
    "lora_extra_vocab_size": Unsupported(("0", "256")),
    **dict.fromkeys(NOT_SERVED, _OFF),
}
"""Unsupported names."""

# Source: djl-serving, ModelInfo.java, SageMakerCompatibility.java, and Model.intProperty's callers.
_WORKERS = ("minWorkers", "maxWorkers", "required_memory_mb", "reserved_memory_mb")
DJL_ARGUMENTS: Final = frozenset(
    {
        *("engine", "job_queue_size", "max_dynamic_batch_size", "max_batch_delay", "max_idle_time"),
        *("load_on_devices", "retry_threshold", "max_request_size", "log_request_metric"),
        "metrics_aggregation",
        *("metric_dimension", "use_passive_workers", "application", "translatorFactory"),
        *(f"{kind}{name}" for kind in ("", "cpu.", "gpu.", "nc.") for name in _WORKERS),
    }
)
"""Keys of `serving.properties` that DJL Serving reads without the ``option.`` prefix."""

# Source: djl-serving d21927c, ModelInfo.java, LmiConfigRecommender.java, PyModel.java, PyProcess.java.
DJL_READS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("parallel_loading", "enable_venv", "log_request_metric"), "truth"),
    "mpi_mode": "any",  # every word but true is the false that it should be
    **dict.fromkeys(("entryPoint", "handler", "pythonExecutable", "engine"), "word"),
    **dict.fromkeys(("env", "modelName"), "any"),
    **dict.fromkeys(("batch_size", "max_dynamic_batch_size", "max_batch_delay"), "whole"),
    **dict.fromkeys(("job_queue_size", "max_idle_time"), "whole"),
    **dict.fromkeys(("retry_threshold", "metrics_aggregation"), "rows"),
    **{f"{kind}{name}": "whole" for kind in ("", "cpu.", "gpu.", "nc.") for name in _WORKERS},
}
"""Other names than options, and `batch_size`, to how DJL Serving reads their values: see `config.values.Djl.reads`."""

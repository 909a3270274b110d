"""Names that users legitimately write and that are no options here: the old engine's and DJL Serving's own.

Three tables: what does nothing, what this version cannot do, and what DJL Serving reads without the prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Ignored:
    """An option that does nothing here; `reason` says why."""

    reason: str


@dataclass(frozen=True)
class Unsupported:
    """An option that means something this version cannot do; only the values that ask for nothing are accepted."""

    neutral: tuple[str, ...] = ()
    """In lower case, the one to show first. Empty: no value asks for nothing."""

    def accepts(self, value: object) -> bool:
        """True if `value` asks for nothing."""
        return str(value).strip().lower() in self.neutral

    @property
    def expected(self) -> str:
        """What may be written, in words that complete ``expected``."""
        shown = f"{self.neutral[0]} or nothing" if self.neutral else "nothing"
        return f"{shown}: it is not supported in this version; remove it"


_DJL = Ignored("DJL Serving reads it itself")
_GRAPH = Ignored("it tunes a Neuron graph, and this version compiles none")
_GPU = Ignored("GPU only")
_IMAGES = Ignored("it describes an image, and only text is generated")
_NEVER = Ignored("the old engine did not use it either")

IGNORED: Mapping[str, Ignored] = MappingProxyType(
    {
        **dict.fromkeys(("engine", "entryPoint", "handler", "env", "pythonExecutable"), _DJL),
        **dict.fromkeys(("parallel_loading", "enable_venv", "modelName"), _DJL),
        "mpi_mode": Ignored("one process drives all NeuronCores of a model"),
        "enable_streaming": Ignored('a request asks for a stream itself: "stream": true'),
        "low_cpu_mem_usage": Ignored("weights are always read through a memory map"),
        "rolling_batch_strategy": Ignored("batching is always continuous"),
        "max_rolling_batch_prefill_tokens": Ignored("the prompt buckets bound a prompt step"),
        **dict.fromkeys(("waiting_steps", "cluster_size", "unroll"), _NEVER),
        **dict.fromkeys(("gpu_memory_utilization", "enforce_eager", "device_map"), _GPU),
        **dict.fromkeys(("height", "width", "num_images_per_prompt"), _IMAGES),
        **dict.fromkeys(("neuron_optimize_level", "compilation_worker_count"), _GRAPH),
        **dict.fromkeys(
            ("enable_mixed_precision_accumulation", "enable_saturate_infinity"), _GRAPH
        ),
        **dict.fromkeys(("fuse_qkv", "fuse_mlp", "fused_rmsnorm_qkv", "qkv_tiling"), _GRAPH),
        **dict.fromkeys(("weight_tiling", "mlp_out_weight_transpose"), _GRAPH),
        **dict.fromkeys(("attention_layout", "collectives_layout", "cache_layout"), _GRAPH),
        **dict.fromkeys(("all_reduce_dtype", "cast_logits_dtype", "group_query_attention"), _GRAPH),
        **dict.fromkeys(("sequence_parallel", "sequence_parallel_norm_threshold"), _GRAPH),
        **dict.fromkeys(("shard_over_sequence", "neuron_cc_pipeline_factor"), _GRAPH),
        **dict.fromkeys(("on_device_embedding", "on_device_generation"), _GRAPH),
    }
)
"""Options that do nothing here, by name."""

_OFF = Unsupported(("false", "0", "no", "off"))
_ONE = Unsupported(("1",))
_ANY = Unsupported()

UNSUPPORTED: Mapping[str, Unsupported] = MappingProxyType(
    {
        **dict.fromkeys(("enable_lora", "tgi_compat", "bedrock_compat", "multi_node"), _OFF),
        **dict.fromkeys(("load_in_8bit", "neuron_quant", "load_split_model"), _OFF),
        **dict.fromkeys(("use_stable_diffusion", "enable_prefix_caching"), _OFF),
        **dict.fromkeys(("pipeline_parallel_degree", "draft_model_tp_size"), _ONE),
        "task": Unsupported(("text-generation", "auto")),
        "override_neuron_config": Unsupported(("{}",)),
        "spec_length": Unsupported(("0",)),
        # 5 is the old engine's default, which counts for nothing without a draft model.
        "speculative_length": Unsupported(("5", "0")),
        **dict.fromkeys(("speculative_draft_model", "draft_model_id"), _ANY),
        **dict.fromkeys(("compiled_graph_path", "draft_model_compiled_path"), _ANY),
        **dict.fromkeys(("partition_schema", "save_mp_checkpoint_path"), _ANY),
        **dict.fromkeys(("quantize", "adapters", "s3url"), _ANY),
    }
)
"""Options that this version cannot honour, by name."""

# Source: djl-serving, ModelInfo.java, SageMakerCompatibility.java, and Model.intProperty's callers.
_WORKERS = ("minWorkers", "maxWorkers", "required_memory_mb", "reserved_memory_mb")
DJL_ARGUMENTS: frozenset[str] = frozenset(
    {
        *("engine", "job_queue_size", "max_dynamic_batch_size", "max_batch_delay", "max_idle_time"),
        *("load_on_devices", "retry_threshold", "max_request_size", "log_request_metric"),
        *("metric_dimension", "use_passive_workers", "application", "translatorFactory"),
        *(f"{kind}{name}" for kind in ("", "cpu.", "gpu.", "nc.") for name in _WORKERS),
    }
)
"""Keys of `serving.properties` that DJL Serving reads without the ``option.`` prefix."""

"""Names that users legitimately write and that are no options here: the old engine's and DJL Serving's own.

Four tables: what does nothing, what this version cannot do, what means a value of an option, and what DJL Serving
reads without the prefix.
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


@dataclass(frozen=True)
class Translation:
    """A name that is no option, whose values mean something in one."""

    option: str
    """The option, as a field of `ServingOptions`."""
    values: Mapping[str, str | None]
    """Value in lower case to the option's; None asks for nothing."""


_DJL = Ignored("DJL Serving reads it itself")
_GPU = Ignored("GPU only")
_IMAGES = Ignored("it describes an image, and only text is generated")
_NEVER = Ignored("the old engine did not use it either")

IGNORED: Mapping[str, Ignored] = MappingProxyType(
    {
        **dict.fromkeys(("engine", "entryPoint", "handler", "env", "pythonExecutable"), _DJL),
        **dict.fromkeys(("parallel_loading", "enable_venv", "modelName"), _DJL),
        "mpi_mode": Ignored("one process drives all NeuronCores of a model"),
        "enable_streaming": Ignored('a request asks for a stream itself: "stream": true'),
        "max_rolling_batch_prefill_tokens": Ignored("the prompt buckets bound a prompt step"),
        "amp": Ignored("dtype decides, as it did in the old engine"),
        **dict.fromkeys(("waiting_steps", "cluster_size"), _NEVER),
        **dict.fromkeys(("gpu_memory_utilization", "enforce_eager", "device_map"), _GPU),
        **dict.fromkeys(("height", "width", "num_images_per_prompt"), _IMAGES),
    }
)
"""Options that do nothing here, by name."""

_OFF = Unsupported(("false", "0", "no", "off", "none"))
_ANY = Unsupported()

UNSUPPORTED: Mapping[str, Unsupported] = MappingProxyType(
    {
        **dict.fromkeys(("enable_lora", "tgi_compat", "bedrock_compat"), _OFF),
        **dict.fromkeys(("use_stable_diffusion", "enable_stateful_sessions"), _OFF),
        "adapters": _ANY,
    }
)
"""Options that this version cannot honour, by name."""

_WORDS = {
    **dict.fromkeys(("true", "1", "yes", "on"), "static_int8"),
    **dict.fromkeys(("false", "0", "no", "off", "none"), None),
}
_IN_8_BITS = Translation("quantize", MappingProxyType(_WORDS))

TRANSLATED: Mapping[str, Translation] = MappingProxyType(
    dict.fromkeys(("load_in_8bit", "neuron_quant"), _IN_8_BITS)
)
"""The old engine's other names for an option, by name."""

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

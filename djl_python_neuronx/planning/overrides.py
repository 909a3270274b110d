"""What `override_neuron_config` must not hold: keywords that follow from options, and those that nobody may set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from djl_python_neuronx.config.findings import Finding
from djl_python_neuronx.config.options import ServingOptions, option

DERIVED: Final[Mapping[str, str]] = {
    keyword: name for name in ServingOptions.model_fields for keyword in option(name).derived
}
"""Keywords that follow from an option, to that option: `override_neuron_config` must not set them."""

_SHAPE = "it changes what a call returns, which the server relies on"
RESERVED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("output_all_logits", "log_softmax_scores"), _SHAPE),
        **dict.fromkeys(("return_expert_index", "return_router_logits"), _SHAPE),
        "sparse_attn": "it is an object, which no file can hold",
        "lora_config": "adapters are not served",
    }
)
"""Keywords that no configuration may set, to the reason."""


def findings(options: ServingOptions) -> Iterator[Finding]:
    """What is wrong with the names in `override_neuron_config`, as far as no library is needed to tell."""
    names = options.override_neuron_config or {}
    if others := [name for name in names if name not in {*DERIVED, *RESERVED}]:
        problem = f"whether the library knows {', '.join(others)} is seen when it loads"
        yield Finding(("override_neuron_config",), problem, "note")
    for name in names:
        if name in DERIVED:
            advice = f"it follows from {DERIVED[name]}; set option.{DERIVED[name]} instead"
        elif name in RESERVED:
            advice = f"it cannot be set: {RESERVED[name]}; remove it"
        else:
            continue
        yield Finding(("override_neuron_config",), f"{name}: {advice}")

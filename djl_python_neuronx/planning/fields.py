"""Fields of `config.json` that change a model's numbers: what a library makes of each, and which values it cannot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from djl_python_neuronx.config.values import jsonable, shortened
from djl_python_neuronx.planning.model import ModelFacts

_NUMBERS: Final[Mapping[str, tuple[str, ...]]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Type of scaled positions to the numbers that it needs."""


@dataclass(frozen=True)
class Field:
    """A library's treatment of one field of `config.json`, and transformers' default where the field is absent."""

    does: str
    """``read``, ``translated``, or the library's behaviour for every value, for messages."""
    computes: tuple[object, ...] = ()
    """Values that the library computes; empty: see `right`, or all."""
    default: object = None
    """Transformers' value where the field is absent or null."""
    near: tuple[object, ...] = ()
    """Values the library approximates closely enough for a warning."""
    right: Callable[[Any, ModelFacts], bool] | None = None
    """True for a value that the library computes, where `computes` cannot list them."""
    stops: bool = False
    """At other values the library fails. Otherwise its answers are wrong."""
    fix: str = "correct config.json"
    """Advice where no backend supports every value."""
    backends: tuple[str, ...] = ("cpu",)
    """Backends without such a table that support every value."""

    def takes(self, value: object, model: ModelFacts) -> bool:
        """Return whether the library computes a value."""
        if self.right is not None:
            try:
                return self.right(value, model)
            except (AttributeError, TypeError, ValueError):  # of a type that the field never has
                return False
        return not self.computes or value in self.computes


TRANSLATED: Final = Field("translated")
ROTARY: Final = ("rope_scaling", "rope_parameters")
"""Names of one field, in transformers 4 and from 5 on."""
QUANTISED: Final = Field(
    "reads no weights that are quantised already",
    (None,),
    stops=True,
    fix="set dequantize=true (for AWQ, GPTQ, compressed-tensors and FP8), or take the model's checkpoint that is not "
    "quantised; quantize=static_int8 quantises it for the device",
    backends=(),
)
"""The field `quantization_config`. transformers needs further packages for it, on a CPU too."""
LIBRARY_ONLY: Final = "reads it, which transformers does not"


def read(names: str) -> dict[str, Field]:
    """Return the fields of these names, separated by blanks, that a library reads as transformers does."""
    return dict.fromkeys(names.split(), Field("read"))


def rotary(*types: str, stops: bool = False) -> dict[str, Field]:
    """Return the fields of rotary positions, of which a library scales these types."""
    does = f"scales positions as {', '.join(types[1:])} or not at all"
    field = Field(
        does if types[1:] else "scales no positions",
        right=lambda value, _model: rope_type(value) in types,
        stops=stops,
    )
    return {**dict.fromkeys(ROTARY, field), "rope_theta": TRANSLATED}


def _same_size(value: object, model: ModelFacts) -> bool:
    return value is None or value == (model.hidden_size or 0) // (model.num_heads or 1)


SAME_HEAD_DIM: Final = Field(
    "takes heads of hidden_size / num_attention_heads", right=_same_size, stops=True
)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


def rope_type(value: object) -> str | None:
    """Return the type of scaled positions, from `rope_scaling` or `rope_parameters`; None if it is malformed."""
    if value is None:
        return "default"
    if not isinstance(value, Mapping):
        return None
    kind = value.get("rope_type", value.get("type", "default"))
    needed = _NUMBERS.get(kind, ()) if isinstance(kind, str) else None
    nested = any(isinstance(inner, Mapping) for inner in value.values())
    if needed is None or nested or not all(_is_number(value.get(name)) for name in needed):
        return None
    return str(kind)


def with_rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `config.json`, with those inside `rope_scaling` and `rope_parameters` beside them."""
    inner = [value for name in ROTARY if isinstance(value := config.get(name), Mapping)]
    given = {key: value for each in inner for key, value in each.items() if value is not None}
    return {**config, **given}


def unusual_fields(
    fields: Mapping[str, Field], model: ModelFacts
) -> Iterator[tuple[str, object, Field]]:
    """Yield fields of a model's `config.json` that the library computes otherwise: words, value and treatment."""
    for name, field in fields.items():
        given = model.config.get(name)
        value = field.default if given is None else given
        if not field.takes(value, model):
            shown = json.dumps(jsonable(shortened(value)))
            origin = f"config.json has {name}={shown}"
            if given is None:
                origin = f"config.json has no {name}, which means {shown}"
            yield origin, value, field

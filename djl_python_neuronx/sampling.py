"""Sampling parameters of a request. `engine/sampler.py` has the rules themselves."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any, ClassVar, TypeVar

from djl_python_neuronx.errors import RequestError, json_type

_T = TypeVar("_T")


def _rule(
    default: _T,
    allowed: str,
    holds: Callable[[float], bool],
    *types: type,
    greedy: bool = False,
    on_device: bool = False,
) -> _T:
    """A field of SamplingParams.

    `allowed`: the values in words, for the error message; `holds`: True for an allowed value; `types`: int and float by
    default; `greedy`: the rule applies to greedy requests too, so that setting it does not turn sampling on;
    `on_device`: a device that samples supports it.
    """
    metadata = {
        "allowed": allowed,
        "holds": holds,
        "types": types or (int, float),
        "greedy": greedy,
        "on_device": on_device,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is sampled; the defaults are greedy, and so is top_k 1. A field is one sampling rule.

    Raises:
        RequestError: a value of the wrong type or out of its range, by name.
    """

    temperature: float = _rule(
        0.0, "a finite number >= 0 (0: greedy)", lambda v: 0 <= v < inf, on_device=True
    )
    top_k: int = _rule(0, "an integer >= 1, or 0 for off", lambda v: v >= 0, int, on_device=True)
    top_p: float = _rule(
        1.0, "a number > 0 and <= 1 (1: off)", lambda v: 0 < v <= 1, on_device=True
    )
    min_p: float = _rule(0.0, "a number from 0 to 1 (0: off)", lambda v: 0 <= v <= 1)
    repetition_penalty: float = _rule(
        1.0, "a finite number > 0 (1: off)", lambda v: 0 < v < inf, greedy=True
    )
    seed: int | None = _rule(
        None, "an integer from 0 to 2**64 - 1", lambda v: 0 <= v < 2**64, int, greedy=True
    )

    WIRE_NAMES: ClassVar[tuple[str, ...]]
    """Names of the parameters in requests, in every protocol: the fields."""
    GREEDY_NAMES: ClassVar[tuple[str, ...]]
    """Parameters that apply to greedy requests too. Setting any other one turns sampling on."""
    HOST_NAMES: ClassVar[tuple[str, ...]]
    """Parameters that a device which samples does not support."""

    def __post_init__(self) -> None:
        """Reject values that are not allowed."""
        for rule in fields(self):
            value = getattr(self, rule.name)
            if value is None and rule.default is None:
                continue
            numeric = isinstance(value, rule.metadata["types"]) and not isinstance(value, bool)
            if not numeric or not rule.metadata["holds"](value):
                shown = reprlib.repr(value) if isinstance(value, (int, float)) else json_type(value)
                msg = f"{rule.name} is {shown}; expected {rule.metadata['allowed']}"
                raise RequestError(msg, param=rule.name)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters among a request's `values`; None counts as not set."""
        return cls(
            **{name: values[name] for name in cls.WIRE_NAMES if values.get(name) is not None}
        )

    def unsupported_on_device(self) -> list[str]:
        """Return the parameters that are set and that a device which samples does not support."""
        default = SamplingParams()
        return [name for name in self.HOST_NAMES if getattr(self, name) != getattr(default, name)]


_FIELDS = fields(SamplingParams)
SamplingParams.WIRE_NAMES = tuple(rule.name for rule in _FIELDS)
SamplingParams.GREEDY_NAMES = tuple(rule.name for rule in _FIELDS if rule.metadata["greedy"])
SamplingParams.HOST_NAMES = tuple(rule.name for rule in _FIELDS if not rule.metadata["on_device"])

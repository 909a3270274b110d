"""Sampling parameters of a request. The rules that apply them are in `engine.sampler`."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any, ClassVar, TypeVar

from djl_python_neuronx.errors import RequestError

_T = TypeVar("_T")


def _rule(default: _T, allowed: str, holds: Callable[[float], bool], *types: type) -> _T:
    """A field of SamplingParams with its allowed values."""
    metadata = {"allowed": allowed, "holds": holds, "types": types or (int, float)}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling; the defaults are greedy, and so is top_k 1.

    Raises:
        RequestError: a value of the wrong type or out of its range, by name.
    """

    temperature: float = _rule(0.0, "a finite number >= 0 (0: greedy)", lambda v: 0 <= v < inf)
    top_k: int = _rule(0, "an integer >= 1, or 0 for off", lambda v: v >= 0, int)
    top_p: float = _rule(1.0, "a number > 0 and <= 1 (1: off)", lambda v: 0 < v <= 1)
    min_p: float = _rule(0.0, "a number from 0 to 1 (0: off)", lambda v: 0 <= v <= 1)
    repetition_penalty: float = _rule(1.0, "a finite number > 0 (1: off)", lambda v: 0 < v < inf)
    seed: int | None = _rule(None, "an integer from 0 to 2**64 - 1", lambda v: 0 <= v < 2**64, int)

    WIRE_NAMES: ClassVar[tuple[str, ...]]
    """Names of the fields in requests; every protocol reads the parameters by these names."""

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        for rule in fields(self):
            value = getattr(self, rule.name)
            if value is None and rule.default is None:
                continue
            numeric = isinstance(value, rule.metadata["types"]) and not isinstance(value, bool)
            if not numeric or not rule.metadata["holds"](value):
                shown = (
                    reprlib.repr(value)
                    if isinstance(value, (int, float))
                    else f"a {type(value).__name__}"
                )
                msg = f"{rule.name} is {shown}; expected {rule.metadata['allowed']}"
                raise RequestError(msg)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """The parameters among a request's `values`; other names are ignored here, and None counts as left out."""
        return cls(
            **{name: values[name] for name in cls.WIRE_NAMES if values.get(name) is not None}
        )


SamplingParams.WIRE_NAMES = tuple(rule.name for rule in fields(SamplingParams))

"""What an option's value may be: the marker that every field carries, and the types with their readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

COUNT = "a whole number of at least 1"
POSITIONS = "a whole number of at least 2"
SECONDS = "seconds, a number above 0"
BUCKETS = 'ascending lengths such as "256,512,1024", each a whole number of at least 1'

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Option:
    """What an option is beside its type and default."""

    allowed: str = ""
    """The values that are allowed, in words; empty where the type says it (a Literal, a bool)."""
    aliases: tuple[str, ...] = ()
    """Other names that users know it by."""
    env: tuple[str, ...] = ()
    """Environment variables that stand in for it when nothing else sets it, the first one first."""
    to: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Loader name to the library's own name, for options that are handed through."""


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _long_dtype(value: object) -> object:
    return _DTYPES.get(value.lower(), value.lower()) if isinstance(value, str) else value


def _split(value: object) -> object:
    if isinstance(value, str):
        # Blanks go here: pydantic 2.6 does not take " 512" for a number.
        listed = value.strip().removeprefix("[").removesuffix("]").strip()
        parts = listed.removesuffix(",").split(",")
        return [part.strip() for part in parts]
    return [value] if isinstance(value, int) else value


def _ascending(lengths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(lengths)))


Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Positions = Annotated[int, Field(ge=2, le=2**31 - 1)]
Lower = BeforeValidator(_lower)
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Dtype = Annotated[Literal["auto", "float32", "float16", "bfloat16"], BeforeValidator(_long_dtype)]
Buckets = Annotated[
    tuple[Count, ...], Field(min_length=1), BeforeValidator(_split), AfterValidator(_ascending)
]

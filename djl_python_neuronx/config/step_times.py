"""The value of `sim_step_ms`: the time of a step on the sim backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal, Union

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from djl_python_neuronx.config.values import Count, parse_object

Milliseconds = Annotated[float, Field(ge=0, le=3_600_000, strict=True)]
_Times = Annotated[dict[Count, Milliseconds], Field(min_length=1)]
STEP_MS = (
    'milliseconds from 0 to 3600000, a JSON object of them by bucket such as {"prefill": {"128": 20, "2048": 190}, '
    '"decode": {"2048": 10}}, or a file that holds one'
)
"""The allowed values of `StepMs`."""
_WRONG: Final = {"missing": "is missing", "extra_forbidden": "is not known"}
"""Kind of a pydantic error to what is wrong with a key."""


class StepTimes(BaseModel):
    """Milliseconds of a step by the bucket that it runs in: tokens to those of each step up to as many."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefill: _Times
    """By the tokens of the prompt, or with chunked prefill of the step."""
    decode: _Times
    """By the positions that the step reads. Without effect with chunked prefill."""

    def of(self, part: Literal["prefill", "decode"], bucket: int) -> float:
        """Return the milliseconds of a step in a bucket, which is at most the largest."""
        times: dict[int, float] = getattr(self, part)
        return times[min(length for length in times if length >= bucket)]


def parse_step_ms(value: object) -> object:
    """Return a number of milliseconds, or the `StepTimes` of an object.

    Raises:
        ValueError: a key of the object is wrong; the message names it.
    """
    given = parse_object(value) if isinstance(value, str) else value
    if not isinstance(given, Mapping):
        return given
    try:
        return StepTimes.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if part != "[key]")
        message = f"{key} {_WRONG.get(first['type'], 'is wrong')}"
        raise ValueError(message) from error


StepMs = Annotated[Union[Milliseconds, StepTimes], BeforeValidator(parse_step_ms)]
"""A number of milliseconds for every step, or those of each bucket."""

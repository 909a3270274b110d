"""Request models: the parameters that protocols share, and errors that name a field, its value and what is expected."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Annotated, Any, TypeVar, Union, cast

import orjson
from annotated_types import MaxLen
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

from djl_python_neuronx.errors import (
    RequestError,
    UnsupportedParameterError,
    did_you_mean,
    json_type,
)
from djl_python_neuronx.protocol.base import ParseContext
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.types import GenerationRequest

logger = logging.getLogger(__name__)

MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LEN = 1000
"""Every stop string is searched for in every token of its request."""
MAX_STOP_TOKEN_IDS = 64
MOST_SHOWN = 100
"""Characters of an unknown name that errors show."""

EXPECTED = "expected"
"""Type of a validator's error whose text is what was expected."""


@dataclass(frozen=True, eq=False)  # equal ones would be the same `Annotated`, and 1 equals true
class Only:
    """Marks a parameter that is not supported: `neutral`, the value without effect, is accepted, and null."""

    neutral: object

    def __get_pydantic_core_schema__(self, *_: object) -> core_schema.CoreSchema:
        """See pydantic."""
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, _schema: core_schema.CoreSchema, _handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """See pydantic."""
        return {"enum": [self.neutral]}

    def _check(self, value: object) -> object:
        same_type = isinstance(value, bool) == isinstance(self.neutral, bool)
        if value != self.neutral or not same_type:
            kind = "unsupported"
            raise PydanticCustomError(kind, kind)
        return value


def _as_list(value: object) -> object:
    return value if isinstance(value, list) else [value]


class _OneOrMore(BeforeValidator):
    """A list, or one element in its place."""

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """See pydantic."""
        several = handler(schema)
        return {"anyOf": [several["items"], several]}


Text = Annotated[str, Field(min_length=1, description="a non-empty string")]
Flag = Annotated[bool, Field(description="true or false")]
Count = Annotated[int, Field(ge=1, description="an integer of at least 1")]
MaybeCount = Annotated[Union[int, None], Field(ge=1, description="an integer of at least 1")]
Seconds = Annotated[
    float, Field(gt=0, allow_inf_nan=False, description="seconds, a number above 0")
]
Strings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_LEN)]],
    _OneOrMore(_as_list),
    Field(
        max_length=MAX_STOP_STRINGS,
        description=(
            f"a non-empty string of at most {MAX_STOP_STRING_LEN} characters or a list of at most "
            f"{MAX_STOP_STRINGS} of them"
        ),
    ),
]
TokenIds = Annotated[
    list[Annotated[int, Field(ge=0)]],
    _OneOrMore(_as_list),
    Field(
        max_length=MAX_STOP_TOKEN_IDS,
        description=f"a token id (0 or more) or a list of at most {MAX_STOP_TOKEN_IDS} of them",
    ),
]
# The values themselves are validated by `SamplingParams`.
_Number = Annotated[Any, WithJsonSchema({"type": "number"})]
_Integer = Annotated[Any, WithJsonSchema({"type": "integer"})]


def _allow_nulls(schema: dict[str, Any]) -> None:
    properties, required = schema.get("properties", {}), schema.get("required", ())
    for name in properties.keys() - required:
        # JSON has no value of the field's type for them.
        if properties[name].get("default") in (None, inf):
            properties[name].pop("default", None)
        properties[name] = {"anyOf": [properties[name], {"type": "null"}]}


class RequestModel(BaseModel):
    """An object of a request. Null means missing. The description of a field is what its error expects."""

    model_config = ConfigDict(strict=True, extra="forbid", json_schema_extra=_allow_nulls)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


class GenerationParameters(RequestModel):
    """The parameters that every protocol has, under vLLM's and TGI's names."""

    temperature: _Number = None
    top_k: _Integer = None
    top_p: _Number = None
    min_p: _Number = None
    repetition_penalty: _Number = None
    seed: _Integer = None
    stop: Strings = []
    stop_token_ids: TokenIds = []
    include_stop_str_in_output: Flag = False
    ignore_eos: Flag = False
    max_time: Seconds = inf
    frequency_penalty: Annotated[Any, Only(0)] = None
    presence_penalty: Annotated[Any, Only(0)] = None
    length_penalty: Annotated[Any, Only(1)] = None
    skip_special_tokens: Annotated[Any, Only(neutral=True)] = None
    spaces_between_special_tokens: Annotated[Any, Only(neutral=True)] = None
    typical_p: Annotated[Any, Only(1)] = None

    def given_sampling(self) -> dict[str, Any]:
        """The sampling parameters that the request has, by name; top_k -1 is off, as in vLLM."""
        names = self.model_fields_set.intersection(SamplingParams.WIRE_NAMES)
        values = {name: getattr(self, name) for name in names}
        if values.get("top_k") == -1:
            del values["top_k"]
        return values

    def request(
        self,
        context: ParseContext,
        protocol: str,
        sampling: SamplingParams,
        **more: Any,  # noqa: ANN401
    ) -> GenerationRequest:
        """The request that its sequences share. `more`: further fields of `GenerationRequest`.

        Raises:
            UnsupportedParameterError: the stop strings are too many.
        """
        if len(self.stop) > MAX_STOP_STRINGS:
            msg = f"{len(self.stop)} stop strings; expected at most {MAX_STOP_STRINGS}"
            raise UnsupportedParameterError(msg, param="stop")
        return GenerationRequest(
            request_id=context.request_id,
            prompt_ids=(),
            sampling=sampling,
            stop_token_ids=frozenset(self.stop_token_ids),
            stop_strings=tuple(dict.fromkeys(self.stop)),
            include_stop=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            max_seconds=self.max_time,
            arrived_s=context.arrived_s,
            client_id=context.client_id,
            protocol=protocol,
            **more,
        )


def sampling_params(values: Mapping[str, Any], *, samples: bool = True) -> SamplingParams:
    """The sampling of `values`, with temperature 1 if they have none. Temperature 0 and not `samples` are greedy.

    Raises:
        RequestError: a value is not allowed; also one that has no effect.
    """
    params = SamplingParams.from_mapping({"temperature": 1.0, **values})
    if samples and params.temperature > 0:
        return params
    return SamplingParams(**{name: getattr(params, name) for name in SamplingParams.GREEDY_NAMES})


def default_parameters(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that a model's generation_config.json has. A value that no request may have is left out."""
    found: dict[str, Any] = {}
    for name in generation.keys() & set(SamplingParams.WIRE_NAMES) - {"seed"}:
        try:
            SamplingParams.from_mapping({name: generation[name]})
        except RequestError as error:  # noqa: PERF203
            logger.warning("generation_config_unused reason=%r", str(error))
        else:
            found[name] = generation[name]
    limit = generation.get("max_new_tokens")
    if type(limit) is int and limit > 0:
        found["max_new_tokens"] = limit
    return {name: value for name, value in found.items() if value is not None}


def shown_name(name: str) -> str:
    """A client's name of a field for a message, at most `MOST_SHOWN` characters."""
    short = reprlib.Repr()
    short.maxstring = MOST_SHOWN
    return short.repr(name)


_Model = TypeVar("_Model", bound=RequestModel)


def validated(model: type[_Model], values: Mapping[str, Any]) -> _Model:
    """A request model of `values`.

    Raises:
        RequestError: a value is wrong.
        UnsupportedParameterError: a field is unknown or not supported.
    """
    for name, most in _longest(model).items():
        # Checked first: pydantic makes an error for each element that is wrong, 0.6 s for 200,000.
        value = values.get(name)
        if isinstance(value, list) and len(value) > most:
            msg = f"parameter {name!r} has {len(value)} values; expected at most {most}"
            raise UnsupportedParameterError(msg, param=name)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # Outside the except clause: the cause would hold the value, which may be part of a prompt.
    kind, place, expected = first["type"], first["loc"], first["msg"]
    name, value = _given(values, place)
    if kind == "extra_forbidden":
        known = sorted(model.model_fields if len(place) == 1 else ())
        near = did_you_mean(name, known)
        rest = (
            f"{' Known' if near else '; known'}: {', '.join(known)}" if known else "; leave it out"
        )
        msg = f"unknown parameter {shown_name(name)}{near}{rest}"
        raise UnsupportedParameterError(msg, param=name)
    if kind == "unsupported":
        msg = f"parameter {name!r} is not supported; leave it out"
        raise UnsupportedParameterError(msg, param=name)
    if kind == "missing":
        msg = f"{name} is missing"
        raise RequestError(msg, param=name)
    # Of a value inside an object within a list the field's own description says nothing.
    own = kind != EXPECTED and len(place) in {1, 2}
    described = model.model_fields[str(place[0])].description if own else None
    expected = described or expected.replace("Input should be", "").strip()
    shown = orjson.dumps(value).decode() if isinstance(value, (int, float)) else json_type(value)
    msg = f"parameter {name!r} is {shown}; expected {expected}"
    raise RequestError(msg, param=name)


@cache
def _longest(model: type[RequestModel]) -> dict[str, int]:
    """The fields whose lists have a largest length, with it."""
    return {
        name: limit.max_length
        for name, field in model.model_fields.items()
        for limit in field.metadata
        if isinstance(limit, MaxLen)
    }


def _given(values: Mapping[str, Any], place: tuple[int | str, ...]) -> tuple[str, Any]:
    """The name of a place, such as ``messages[0].role``, and the value there.

    pydantic's places also have names of types, which no value has.
    """
    name, value = "", cast("Any", values)
    for i, step in enumerate(place):
        if isinstance(step, int):
            if isinstance(value, list):
                name, value = f"{name}[{step}]", value[step]
        elif isinstance(value, dict) and (step in value or i == len(place) - 1):
            name, value = f"{name}.{step}" if name else step, value.get(step)
    return name, value

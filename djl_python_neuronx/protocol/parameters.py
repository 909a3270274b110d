"""Request models: the parameters that protocols share, and errors that name a field, its value and what is expected."""

from __future__ import annotations

import hashlib
import logging
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import inf
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, cast

import orjson
from annotated_types import MaxLen
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.errors import (
    RequestError,
    UnsupportedParameterError,
    did_you_mean,
    json_type,
)
from djl_python_neuronx.protocol.base import ParseContext
from djl_python_neuronx.protocol.neutral import NEUTRAL, WITHOUT_EFFECT, is_neutral
from djl_python_neuronx.protocol.structured_output import grammar_of
from djl_python_neuronx.sampling import Ids, SamplingParams
from djl_python_neuronx.types import GenerationRequest, Tokenizer

logger = logging.getLogger(__name__)

MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LEN = 1000
"""Every stop string is searched for in every token of its request."""
MAX_STOP_TOKEN_IDS = 64
MAX_SALT_LEN = 1000
MOST_SHOWN = 100
"""Characters of an unknown name that errors and logs show."""
MAX_IGNORED_LOGGED = 100
"""Unknown names that the log has: clients can make any number of them."""

_TRACE = ("traceparent", "tracestate")
"""Headers by which a client names its trace."""
_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling parameters that a model's generation_config.json sets, as in vLLM."""
_SAME = (
    (
        "max_tokens",
        "max_new_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "max_gen_len",
        "max_length",
    ),
    ("stop", "stop_sequences"),
    ("truncate_prompt_tokens", "truncate"),
    ("top_logprobs", "top_n_tokens"),
    ("ignore_eos", "ignore_eos_token"),
    ("bad_words", "bad_sequences"),
)
"""Names of different protocols for one thing."""

EXPECTED = "expected"
"""Type of a validator's error whose text is what was expected."""
_EXPECTED_TYPES = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
}
"""Type of pydantic's error to what was expected."""


def _refuse(value: object) -> None:
    if value:
        kind = "unsupported"
        raise PydanticCustomError(kind, kind)


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
FromZero = Annotated[int, Field(ge=0, description="an integer of at least 0")]
MaybeCount = Annotated[Union[int, None], Field(ge=1, description="an integer of at least 1")]
MaybeFromZero = Annotated[Union[int, None], Field(ge=0, description="an integer of at least 0")]
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
MaybeObject = Annotated[Union[dict[str, Any], None], Field(description="an object")]
Absent = Annotated[Any, BeforeValidator(_refuse), WithJsonSchema({"type": "null"})]
"""A field that is not supported and must not get lost: null, false or empty."""
# The values themselves are validated by `SamplingParams`.
_Number = Annotated[Any, WithJsonSchema({"type": "number"})]
_Integer = Annotated[Any, WithJsonSchema({"type": "integer"})]
_Ids = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "integer"}})]
_Words = Annotated[
    Any,
    WithJsonSchema({"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}),
]
_Biases = Annotated[
    Any, WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})
]


def _allow_nulls(schema: dict[str, Any]) -> None:
    properties, required = schema.get("properties", {}), schema.get("required", ())
    for name in properties.keys() - required:
        # JSON has no value of the field's type for them.
        if properties[name].get("default") in (None, inf):
            properties[name].pop("default", None)
        properties[name] = {"anyOf": [properties[name], {"type": "null"}]}


def _allow_more(schema: dict[str, Any]) -> None:
    _allow_nulls(schema)
    schema["additionalProperties"] = True


def _add_neutral(schema: dict[str, Any], model: type[RequestModel]) -> None:
    for name, values in NEUTRAL.items():
        schema["properties"].setdefault(name, {"enum": [*values, None]})
    for name in model.without_effect:
        schema["properties"].setdefault(name, {})
    _allow_nulls(schema)


_ignored: set[str] = set()
"""Unknown fields that the log has named."""


class RequestModel(BaseModel):
    """An object of a request. Null means missing. The description of a field is what its error expects."""

    model_config = ConfigDict(strict=True, extra="forbid", json_schema_extra=_allow_nulls)
    without_effect: ClassVar[frozenset[str]] = WITHOUT_EFFECT
    """Fields that change no answer, whatever their value is."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: object, info: ValidationInfo) -> object:
        """Leave out what has no effect; with `option.unknown_parameters=warn` also what is unknown."""
        if not isinstance(values, dict):
            return values
        options: ServingOptions | None = info.context
        strict = cls.model_config["extra"] == "forbid"
        warns = strict and options is not None and options.unknown_parameters == "warn"
        found = {}
        for name, value in values.items():
            known = name in cls.model_fields
            if value is None:
                continue
            if not known and (name in cls.without_effect or is_neutral(name, value, values)):
                continue
            if warns and not known and name not in NEUTRAL:
                log_ignored(name)
            else:
                found[name] = value
        return found


class LenientModel(RequestModel):
    """An object in which clients' libraries put fields of their own: unknown ones are ignored."""

    model_config = ConfigDict(extra="ignore", json_schema_extra=_allow_more)


class GenerationParameters(RequestModel):
    """The parameters that every protocol has, under vLLM's and TGI's names."""

    model_config = ConfigDict(json_schema_extra=_add_neutral)

    temperature: _Number = None
    top_k: _Integer = None
    top_p: _Number = None
    min_p: _Number = None
    typical_p: Annotated[float, Field(gt=0, le=1, description="a number above 0, up to 1")] = 1.0
    repetition_penalty: _Number = None
    presence_penalty: _Number = None
    frequency_penalty: _Number = None
    logit_bias: _Biases = None
    allowed_token_ids: _Ids = None
    bad_words: Strings = Field(default_factory=list)
    bad_words_ids: _Words = None
    suppress_tokens: _Ids = None
    begin_suppress_tokens: _Ids = None
    no_repeat_ngram_size: _Integer = None
    min_new_tokens: FromZero = 0
    min_tokens: FromZero = 0
    min_length: FromZero = 0
    seed: _Integer = None
    stop: Strings = Field(default_factory=list)
    stop_token_ids: TokenIds = Field(default_factory=list)
    include_stop_str_in_output: Flag = False
    ignore_eos: Flag = False
    max_time: Seconds = inf
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31, description="an integer of 32 bits")] = 0
    user: Any = None
    safety_identifier: Any = None
    """Who sends it, OpenAI's fields: the second is the newer name. Without effect unless they share out the slots."""
    cache_salt: Annotated[
        str,
        Field(
            max_length=MAX_SALT_LEN, description=f"a string of at most {MAX_SALT_LEN} characters"
        ),
    ] = ""
    truncation_side: Annotated[Literal["left", "right"], Field(description='"left" or "right"')] = (
        "left"
    )
    """The end of the prompt that loses tokens where it is truncated."""
    add_special_tokens: Flag = True
    """Of a prompt that is text."""
    skip_special_tokens: Flag = True
    spaces_between_special_tokens: Flag = False
    response_format: MaybeObject = None
    grammar: MaybeObject = None
    structured_outputs: MaybeObject = None
    guided_json: Union[dict[str, Any], str, None] = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    structural_tag: Union[dict[str, Any], str, None] = None

    def given_sampling(self) -> dict[str, Any]:
        """The sampling parameters that the request has, by name; top_k -1 is off, as in vLLM; a seed may be negative.

        `bad_words` are text: `request` adds them.
        """
        names = self.model_fields_set.intersection(SamplingParams.WIRE_NAMES) - {"bad_words"}
        values = {name: getattr(self, name) for name in names}
        if values.get("top_k") == -1:
            values["top_k"] = 0
        if type(self.seed) is int and -(2**63) <= self.seed < 0:
            values["seed"] = self.seed + 2**64
        if self.min_tokens:
            values["min_new_tokens"] = max(self.min_tokens, self.min_new_tokens)
        return values

    def request(
        self,
        context: ParseContext,
        protocol: str,
        sampling: SamplingParams,
        calls: Mapping[str, Any] | None = None,
        reasoning: Mapping[str, Any] | None = None,
        **more: Any,  # noqa: ANN401
    ) -> GenerationRequest:
        """The request that its sequences share. `more`: further fields of `GenerationRequest`.

        `calls`, `reasoning`: see `grammar_of`.

        Raises:
            UnsupportedParameterError: the stop strings are too many.
            RequestError: one of `bad_words` has no tokens, or see `grammar_of`.
        """
        words = [
            ids
            for name in ("bad_words", "bad_sequences")
            for word in getattr(self, name, [])
            for ids in _spellings(word, context.tokenizer, name)
        ]
        if words:
            sampling = replace(sampling, bad_words=tuple(words))
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
            grammar=grammar_of(self, context, calls, reasoning),
            max_seconds=self.max_time,
            priority=self._priority(context.options),
            client=self._client(context),
            cache_salt=self.cache_salt,
            skips_special=self.skip_special_tokens,
            spaces_special=self.spaces_between_special_tokens,
            arrived_s=context.arrived_s,
            client_id=context.client_id,
            trace={name: one for name in _TRACE if (one := context.headers.get(name))},
            protocol=protocol,
            least_name="min_tokens" if self.min_tokens > self.min_new_tokens else "min_new_tokens",
            **more,
        )

    def _priority(self, options: ServingOptions) -> int:
        if self.priority and options.scheduling_policy != "priority":
            msg = (
                f"parameter 'priority' is {self.priority}, and this deployment serves requests as they come; leave it "
                "out, or set option.scheduling_policy=priority"
            )
            raise UnsupportedParameterError(msg, param="priority")
        return self.priority

    def _client(self, context: ParseContext) -> str:
        """The client in a form that shows no key."""
        if context.options.fairness_key is None:
            return ""
        if context.options.fairness_key == "api_key":
            # A server with keys has checked it, and put the key's digest there.
            name = context.headers.get("authorization", "").partition(" ")[2].strip()
            name = name or context.headers.get("x-api-key", "").strip()
        else:
            field = "user" if self.safety_identifier in (None, "") else "safety_identifier"
            name = getattr(self, field)
            if not isinstance(name, (str, type(None))):
                msg = (
                    f"{field} is {json_type(name)}; expected a string, by which clients take turns"
                )
                raise RequestError(msg, param=field)
        return hashlib.sha256(str(name).encode(errors="replace")).hexdigest()[:16]


def _spellings(word: str, tokenizer: Tokenizer, name: str) -> list[Ids]:
    """The tokens of a word at the beginning of a text, and within one if the space before it makes another first token.

    Source: vllm 002032ee, vllm/sampling_params.py, update_from_tokenizer.
    """
    word = word.lstrip()
    first, other = (tuple(tokenizer.encode(space + word, special=False)) for space in ("", " "))
    if not first:
        msg = f"{name} has a word without tokens; expected words of the model"
        raise RequestError(msg, param=name)
    return [first, other] if len(other) == len(first) and other[0] != first[0] else [first]


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
    """The defaults that a model's generation_config.json has. A value that no request may have is left out.

    Its other sampling parameters too, as in vLLM.
    """
    found: dict[str, Any] = {}
    for name in sorted(set(SamplingParams.WIRE_NAMES).difference(_DEFAULTS)):
        if generation.get(name) not in (None, [], getattr(SamplingParams, name)):
            logger.warning("generation_config_unused name=%s reason='requests alone set it'", name)
    for name in generation.keys() & set(_DEFAULTS):
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


def log_ignored(name: str, by: str = "option.unknown_parameters") -> None:
    """Log an unknown field, each once."""
    shown = shown_name(name)
    if shown not in _ignored and len(_ignored) < MAX_IGNORED_LOGGED:
        _ignored.add(shown)
        logger.warning("parameter_ignored name=%s by=%r", shown, by)


def nearest(name: str, known: Sequence[str]) -> str:
    """A hint at the known name for the same thing, or at a similar one; see `did_you_mean`."""
    same = [other for names in _SAME if name in names for other in names if other in known]
    return f"; did you mean {same[0]!r}?" if same else did_you_mean(name, known)


def shown_name(name: str) -> str:
    """A client's name of a field for a message, at most `MOST_SHOWN` characters."""
    short = reprlib.Repr()
    short.maxstring = MOST_SHOWN
    return short.repr(name)


_Model = TypeVar("_Model", bound=RequestModel)


def validated(model: type[_Model], values: Mapping[str, Any], options: ServingOptions) -> _Model:
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
        return model.model_validate(values, context=options)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # Outside the except clause: the cause would hold the value, which may be part of a prompt.
    kind, place, expected = first["type"], first["loc"], first["msg"]
    name, value = _given(values, place, missing=kind == "missing")
    if kind == "unsupported" or (kind == "extra_forbidden" and place[-1] in NEUTRAL):
        msg = f"parameter {name!r} is not supported; leave it out"
        raise UnsupportedParameterError(msg, param=name)
    if kind == "extra_forbidden":
        known = sorted(model.model_fields if len(place) == 1 else ())
        near = nearest(name, known)
        rest = (
            f"{' Known' if near else '; known'}: {', '.join(known)}" if known else "; leave it out"
        )
        fix = "" if near else "; or set option.unknown_parameters=warn"
        msg = f"unknown parameter {shown_name(name)}{near}{rest}{fix}"
        raise UnsupportedParameterError(msg, param=name)
    if kind == "missing":
        msg = f"{name} is missing"
        raise RequestError(msg, param=name)
    # Of a value inside an object the field's own description says nothing.
    own = len(place) in {1, 2} and "." not in name and not (kind == "model_type" and "[" in name)
    described = model.model_fields[str(place[0])].description if own and kind != EXPECTED else None
    expected = described or _EXPECTED_TYPES.get(
        kind, expected.replace("Input should be", "").strip()
    )
    shown = orjson.dumps(value).decode() if isinstance(value, (int, float)) else json_type(value)
    msg = f"parameter {name!r} is {shown}; expected {expected}"
    raise RequestError(msg, param=name)


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The error with other names of its field; `names`: a part of a field's name to the one in its place."""
    param = error.param or ""
    found = "|".join([re.escape(name) for name in names if name in param])
    if not found:
        return error
    return type(error)(
        *[re.sub(found, lambda name: names[name[0]], text) for text in (str(error), param)]
    )


@cache
def _longest(model: type[RequestModel]) -> dict[str, int]:
    """The fields whose lists have a largest length, with it."""
    return {
        name: limit.max_length
        for name, field in model.model_fields.items()
        for limit in field.metadata
        if isinstance(limit, MaxLen)
    }


def _given(
    values: Mapping[str, Any], place: tuple[int | str, ...], *, missing: bool
) -> tuple[str, Any]:
    """The name of a place, such as ``messages[0].role``, and the value there.

    pydantic's places also have names of types, which no value has.
    """
    name, value = "", cast("Any", values)
    for i, step in enumerate(place):
        if isinstance(step, int):
            if isinstance(value, list):
                name, value = f"{name}[{step}]", value[step]
        elif isinstance(value, dict) and (step in value or (missing and i == len(place) - 1)):
            name, value = f"{name}.{step}" if name else step, value.get(step)
    return name, value

"""Tools of a request, and the formats in which models write calls of tools and reasoning.

Sources of the formats: the models' chat templates; vllm 0.16, vllm/tool_parsers and vllm/reasoning, whose names they
have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.errors import RequestError, UnsupportedParameterError
from djl_python_neuronx.protocol.parameters import EXPECTED, Flag, LenientModel, RequestModel
from djl_python_neuronx.types import Tokenizer

MAX_TOOLS = 512
SOME_TOOLS: Any = Field(max_length=MAX_TOOLS, description=f"a list of at most {MAX_TOOLS} tools")
_MARK = re.compile(r"<[^>]*>|\[[A-Z_]+\]")
_ONE_CALL = re.compile(
    r"tool_calls['\"\])]*\s*\|\s*length\s*\)?\s*(?:[!=]=|>)\s*1\b[\s\S]{0,99}raise_exception"
)
"""The test by which templates refuse messages with several calls: those of Llama 3.1 to 3.3."""


@dataclass(frozen=True)
class ToolFormat:
    """The text of an answer's calls.

    It is `opens`, then each call as `before`, its name, `between`, its arguments in JSON and `after`, with `separator`
    between two of them, then `closes`. `protocol/reading.py` reads less strict forms too.
    """

    name: str
    template: str
    """A regex that finds a text of the chat templates of models with this format."""
    starts: tuple[str, ...]
    """Texts with which calls begin, anywhere in an answer."""
    before: str
    between: str
    after: str = ""
    opens: str = ""
    separator: str = ""
    closes: str = ""
    bare: bool = False
    """True if an answer may also begin with a call without any of `starts`."""
    inside: tuple[str, ...] = ()
    """Marks that a call may have besides."""
    id_chars: int | None = None
    """Letters and digits of a call's id in the model's template; None: any id."""

    @property
    def marks(self) -> Sequence[str]:
        """All texts that may be special tokens."""
        text = f"{self.opens}{self.before}{self.between}{self.after}{self.closes}"
        return [*self.starts, *self.inside, *_MARK.findall(text)]


def _format(
    name: str,
    template: str,
    start: str,
    call: str,
    around: tuple[str, str, str] = ("", "", ""),
    **more: Any,  # noqa: ANN401
) -> ToolFormat:
    """A row. `call`: one call, with NAME and ARGUMENTS; `around`: what opens, separates and closes them."""
    before, _, rest = call.partition("NAME")
    between, _, after = rest.partition("ARGUMENTS")
    opens, separator, closes = around
    return ToolFormat(
        name, template, (start,), before, between, after, opens, separator, closes, **more
    )


_OBJECT = '{"name": "NAME", "arguments": ARGUMENTS}'
_TAG, _PIPED, _CALLS = "<tool_call>", "<|tool_call|>", "[TOOL_CALLS]"
_NAMED = f"{_CALLS}NAME[ARGS]ARGUMENTS"
_QUOTED = r"<tool_call>(?:\\n|[\s'\"+~{}-])*"
_HERMES = _QUOTED + r"\{\\*[\"'](?:name|arguments)"
_LLAMA = r"\{\\*\"name\\*\": function name|<\|python_tag\|>"
_PARAMETERS = _OBJECT.replace("arguments", "parameters")
# DeepSeek's marks have a fullwidth bar and the blank of sentencepiece.
_BEGIN, _FIRST, _SEP, _LAST, _END = (
    f"<\uff5ctool\u2581{words}\uff5c>".replace(" ", "\u2581")
    for words in ("calls begin", "call begin", "sep", "call end", "calls end")
)
_V3 = f"{_FIRST}function{_SEP}NAME\n```json\nARGUMENTS\n```{_LAST}"
_V31 = f"{_FIRST}NAME{_SEP}ARGUMENTS{_LAST}"

TOOL_FORMATS = (
    # Name, regex of templates, start, a call, and what opens, separates and closes calls.
    _format("hermes", _HERMES, _TAG, f"{_TAG}\n{_OBJECT}\n</tool_call>", ("", "\n", "")),
    _format("granite", re.escape(_PIPED), _PIPED, _OBJECT, (f"{_PIPED}[", ", ", "]")),
    _format("granite", _QUOTED + r"\[", _TAG, _OBJECT, (f"{_TAG}[", ", ", "]")),
    _format("mistral", r"\[ARGS\]", _CALLS, _NAMED, inside=("[CALL_ID]",), id_chars=9),
    _format("mistral", re.escape(_CALLS), _CALLS, _OBJECT, (f"{_CALLS}[", ", ", "]"), id_chars=9),
    _format("llama3_json", _LLAMA, "<|python_tag|>", _PARAMETERS, ("", "; ", ""), bare=True),
    _format("deepseek_v3", f"(?s){_FIRST}.*```json", _BEGIN, _V3, (_BEGIN, "\n", _END)),
    _format("deepseek_v31", _FIRST, _BEGIN, _V31, (_BEGIN, "", _END)),
)
"""The formats. Of several whose template matches the first counts, also of those with one name."""


@dataclass(frozen=True)
class ReasoningFormat:
    """The text of an answer's reasoning: one of `begins`, the reasoning, one of `ends`."""

    name: str
    template: str
    """A regex that finds a text of the chat templates of models with this format."""
    begins: tuple[str, ...]
    """Texts with which an answer begins, or with which the template ends."""
    ends: tuple[str, ...]

    @property
    def marks(self) -> Sequence[str]:
        """All texts that may be special tokens."""
        return [*self.begins, *self.ends]


_GRANITE = r"Here(?: is|'s) my (?:thought process|response):"

REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat(
        "granite",
        _GRANITE,
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    ReasoningFormat("mistral", r"\[/?THINK\]", ("[THINK]",), ("[/THINK]",)),
    ReasoningFormat("deepseek_r1", "</?think>", ("<think>",), ("</think>",)),
    ReasoningFormat("qwen3", "</?think>", ("<think>",), ("</think>",)),
)
"""The formats. Of several whose template matches the first counts."""

_Format = TypeVar("_Format", ToolFormat, ReasoningFormat)


def _found(formats: Sequence[_Format], option: str, template: str) -> _Format | None:
    """The format of a model with a chat template. `option`: its name, `auto` or `none`."""
    named = [one for one in formats if option in ("auto", one.name)]
    fits = [one for one in named if re.search(one.template, template)]
    return next(iter(fits), named[-1] if named and option != "auto" else None)


tool_format = lru_cache(partial(_found, TOOL_FORMATS))
reasoning_format = lru_cache(partial(_found, REASONING_FORMATS))


NAME = r"[A-Za-z0-9_.:-]{1,128}"


def _expects(fits: Callable[[Any], Any], expected: str) -> BeforeValidator:
    """Refuse values that do not fit. `expected`: may show the `value`."""

    def validate(value: object) -> object:
        if not fits(value):
            raise PydanticCustomError(EXPECTED, expected, {"value": str(value)[:100]})
        return value

    return BeforeValidator(validate)


def _of_object(schema: object) -> object:
    """Refuse schemas of another type."""
    kind = schema.get("type", "object") if isinstance(schema, dict) else "object"
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        expected = "a JSON schema whose type is object; its type is {kind}"
        raise PydanticCustomError(EXPECTED, expected, {"kind": str(kind)[:100]})
    return schema


_OF_NAME = _expects(
    lambda name: isinstance(name, str) and re.fullmatch(NAME, name),
    "a name of 1 to 128 letters, digits and _ . : -",
)
_FUNCTION = _expects(
    lambda kind: kind == "function",
    "function; tools of the type {value} run on servers that have them",
)


class ToolFunction(LenientModel):
    """A function that the model may call."""

    name: Annotated[str, _OF_NAME]
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, BeforeValidator(_of_object)] = None
    """The schema of its arguments; None: it has none."""
    strict: bool | None = None


class Tool(LenientModel):
    """A tool."""

    type: Annotated[Literal["function"], _FUNCTION]
    function: ToolFunction
    _given: Mapping[str, Any] = PrivateAttr(default={})

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:  # noqa: ANN401
        made = handler(values)
        made._given = values
        return made

    def for_template(self) -> Mapping[str, Any]:
        """The tool as the client sent it."""
        return self._given


class ToolChoice(NamedTuple):
    """A request's choice among its tools."""

    mode: Literal["none", "auto", "required", "named"]
    """`auto`: text or calls; `required`: at least one call; `named`: one call."""
    names: tuple[str, ...] = ()
    """The functions that may be called; (): all."""


def _choice(value: object) -> object:
    match value:
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("named", (name,))
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as tools},
        }:
            with suppress(KeyError, TypeError):
                return ToolChoice(mode, tuple([str(one["function"]["name"]) for one in tools]))
    expected = (
        'none, auto, required, {"type": "function", "function": {"name"}} or {"type": "allowed_tools", '
        '"allowed_tools": {"mode", "tools"}} with tools of type function'
    )
    raise PydanticCustomError(EXPECTED, expected)


def _unless_none(tools: object, info: ValidationInfo) -> object:
    """The tools; none with a choice of none, beside which they may be of any type."""
    return [] if info.data.get("tool_choice") == ToolChoice("none") else tools


@dataclass(frozen=True)
class ToolUse:
    """The tools that the answers of a request may call."""

    format: ToolFormat
    functions: Mapping[str, ToolFunction]
    """By name."""
    mode: Literal["auto", "required", "named"]
    """See `ToolChoice`."""
    parallel: bool
    """False: at most one call."""

    def grammar(self, special: Mapping[str, int]) -> dict[str, Any]:
        """The value of a grammar of the kind "tools". `special`: see `special_marks`."""
        functions = [
            (name, one.parameters, bool(one.strict)) for name, one in self.functions.items()
        ]
        parallel = self.parallel and self.mode != "named"
        more = {"tools": functions, "choice": self.mode, "parallel": parallel}
        return {**vars(self.format), "special": special, **more}


class ToolFields(RequestModel):
    """The fields about tools, and about the reasoning before calls."""

    tool_choice: Annotated[
        Any,
        BeforeValidator(_choice),
        WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]}),
    ] = None
    """A `ToolChoice`, once it is validated."""
    tools: Annotated[list[Tool], BeforeValidator(_unless_none), SOME_TOOLS] = Field(
        default_factory=list
    )
    parallel_tool_calls: Flag = True

    def tool_use(self, tokenizer: Tokenizer, options: ServingOptions) -> ToolUse | None:
        """The tools that may be called; None if there are none, or with a choice of none.

        Raises:
            RequestError: they are ambiguous, the choice is of none of them, or this model calls none.
        """
        if not self.tools and self.tool_choice is None:
            return None
        functions: dict[str, ToolFunction] = {}
        for i, tool in enumerate(self.tools):
            name = tool.function.name
            if name in functions:
                msg = f"tools[{i}].function.name is {name!r}, as of a tool before it; expected names that differ"
                raise RequestError(msg, f"tools[{i}].function.name")
            functions[name] = tool.function
        mode, names = self.tool_choice or ToolChoice("auto")
        unknown = [one for one in names if one not in functions]
        if unknown or (mode in ("required", "named") and not functions):
            what = f"names {unknown[0][:100]!r}" if unknown else "asks for a call"
            known = ", ".join([*functions][:8]) or "none"
            msg = f"tool_choice {what}, and tools has {known}; expected one of them"
            raise RequestError(msg, "tool_choice")
        if mode == "none" or not functions:
            return None
        form = tool_format(options.tool_call_parser, tokenizer.template)
        if form is None or not re.search(r"\btools\b", tokenizer.template):
            msg = (
                "tools cannot be called: the model's chat template lists none, or how the model writes calls is not "
                "known by it. Set option.chat_template or option.tool_call_parser, or send tool_choice=none"
            )
            raise UnsupportedParameterError(msg, "tools")
        allowed = {name: functions[name] for name in names or functions}
        parallel = self.parallel_tool_calls and not _ONE_CALL.search(tokenizer.template)
        return ToolUse(form, allowed, mode, parallel)

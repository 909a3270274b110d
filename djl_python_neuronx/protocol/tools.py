"""Tools of a request, and the formats in which models write calls of tools and reasoning.

Sources of the formats: the models' chat templates; vllm 0.16, vllm/tool_parsers and vllm/reasoning, whose names they
have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.errors import RequestError, UnsupportedParameterError
from djl_python_neuronx.protocol.parameters import EXPECTED, Flag, LenientModel, RequestModel
from djl_python_neuronx.types import Tokenizer

MAX_TOOLS = 512
_MARK = re.compile(r"<[^>]*>|\[[A-Z_]+\]")


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


_OBJECT: Mapping[str, Any] = {"before": '{"name": "', "between": '", "arguments": ', "after": "}"}
"""A call that is an object."""
_LIST: Mapping[str, Any] = {**_OBJECT, "separator": ", ", "closes": "]"}
_TAG = r"<tool_call>(?:\\n|[\s'\"+~-])*"


def _deepseek(words: str) -> str:
    """A mark of DeepSeek's, which has a fullwidth bar and the blank of sentencepiece."""
    return f"<\uff5c{words}\uff5c>".replace(" ", "\u2581")


_DEEPSEEK: Mapping[str, Any] = {
    "starts": (_deepseek("tool calls begin"),),
    "opens": _deepseek("tool calls begin"),
    "closes": _deepseek("tool calls end"),
}

TOOL_FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat(
        "hermes",
        _TAG + r"\{\\*[\"'](?:name|arguments)",
        ("<tool_call>",),
        before='<tool_call>\n{"name": "',
        between='", "arguments": ',
        after="}\n</tool_call>",
        separator="\n",
    ),
    ToolFormat(
        "granite",
        r"<\|tool_call\|>",
        ("<|tool_call|>",),
        opens="<|tool_call|>[",
        **_LIST,
    ),
    ToolFormat("granite", _TAG + r"\[", ("<tool_call>",), opens="<tool_call>[", **_LIST),
    ToolFormat(
        "mistral",
        r"\[ARGS\]",
        ("[TOOL_CALLS]",),
        before="[TOOL_CALLS]",
        between="[ARGS]",
        inside=("[CALL_ID]",),
        id_chars=9,
    ),
    ToolFormat(
        "mistral",
        r"\[TOOL_CALLS\]",
        ("[TOOL_CALLS]",),
        opens="[TOOL_CALLS][",
        id_chars=9,
        **_LIST,
    ),
    ToolFormat(
        "llama3_json",
        r"\{\\*\"name\\*\": function name|<\|python_tag\|>",
        ("<|python_tag|>",),
        before='{"name": "',
        between='", "parameters": ',
        after="}",
        separator="; ",
        bare=True,
    ),
    ToolFormat(
        "deepseek_v3",
        f"(?s){_deepseek('tool call begin')}.*```json",
        before=f"{_deepseek('tool call begin')}function{_deepseek('tool sep')}",
        between="\n```json\n",
        after=f"\n```{_deepseek('tool call end')}",
        separator="\n",
        **_DEEPSEEK,
    ),
    ToolFormat(
        "deepseek_v31",
        _deepseek("tool call begin"),
        before=_deepseek("tool call begin"),
        between=_deepseek("tool sep"),
        after=_deepseek("tool call end"),
        **_DEEPSEEK,
    ),
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


@lru_cache
def found_format(formats: tuple[_Format, ...], option: str, template: str) -> _Format | None:
    """The format of a model with a chat template. `option`: its name, `auto` or `none`."""
    named = [one for one in formats if option in ("auto", one.name)]
    fits = [one for one in named if re.search(one.template, template)]
    return next(iter(fits), named[-1] if named and option != "auto" else None)


NAME = r"[A-Za-z0-9_.:-]{1,128}"
_NAMED = "a name of 1 to 128 letters, digits and _ . : -"


def _name(value: object) -> object:
    if not isinstance(value, str) or not re.fullmatch(NAME, value):
        raise PydanticCustomError(EXPECTED, _NAMED)
    return value


def _object_schema(schema: object) -> object:
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise PydanticCustomError(EXPECTED, "a JSON schema whose type is object")
    return schema


def _function(kind: object) -> object:
    if kind != "function":
        expected = (
            '"function", because tools of other types ({kind}) run on the servers that have them'
        )
        raise PydanticCustomError(EXPECTED, expected, {"kind": str(kind)[:100]})
    return kind


class ToolFunction(LenientModel):
    """A function that the model may call."""

    name: Annotated[str, BeforeValidator(_name)]
    description: str | None = None
    parameters: Annotated[
        dict[str, Any] | None, BeforeValidator(_object_schema), WithJsonSchema({"type": "object"})
    ] = None
    """The schema of its arguments; None: it has none."""
    strict: bool | None = None


class Tool(LenientModel):
    """A tool."""

    type: Annotated[Literal["function"], BeforeValidator(_function)]
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
            names = [
                one["function"]["name"]
                for one in tools
                if isinstance(one, dict) and isinstance(one.get("function"), dict)
            ]
            if len(names) == len(tools) and all(isinstance(one, str) for one in names):
                return ToolChoice(mode, tuple(names))
    expected = (
        'none, auto, required, {"type": "function", "function": {"name"}} or {"type": "allowed_tools", '
        '"allowed_tools": {"mode", "tools"}} with tools of type function'
    )
    raise PydanticCustomError(EXPECTED, expected)


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


class ToolFields(RequestModel):
    """The fields about tools, and about the reasoning before calls."""

    tools: list[Tool] = Field(
        default=[], max_length=MAX_TOOLS, description=f"a list of at most {MAX_TOOLS} tools"
    )
    tool_choice: Annotated[
        Any,
        BeforeValidator(_choice),
        WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]}),
    ] = None
    """Made a `ToolChoice`."""
    parallel_tool_calls: Flag = True

    def tool_use(self, tokenizer: Tokenizer, options: ServingOptions) -> ToolUse | None:
        """The tools that may be called; None if there are none, or with a choice of none.

        Raises:
            RequestError: they are ambiguous, the choice is of none of them, or this model calls none.
        """
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
            msg = f"tool_choice {what}, and tools has {', '.join(functions) or 'none'}; expected one of them"
            raise RequestError(msg, "tool_choice")
        if mode == "none" or not functions:
            return None
        form = found_format(TOOL_FORMATS, options.tool_call_parser, tokenizer.template)
        known = re.search(r"\btools\b", tokenizer.template)
        if form is None or not known:
            reason = (
                "this deployment reads no calls (option.tool_call_parser=none)"
                if options.tool_call_parser == "none"
                else "how this model writes calls is not known by its chat template; set option.tool_call_parser"
                if known
                else "the chat template of this model lists no tools; set option.chat_template to one that does"
            )
            msg = f"tools cannot be called: {reason}, or send tool_choice=none"
            raise UnsupportedParameterError(msg, "tools")
        allowed = {name: functions[name] for name in names or functions}
        return ToolUse(form, allowed, mode, self.parallel_tool_calls)

"""Types of option values with their parsers, and the marker that every option field carries.

Values are text (`serving.properties`, the environment) or objects (DJL Serving, tests). A parser converts text and
returns text that it cannot parse unchanged; pydantic validates the result.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)
from pydantic.fields import FieldInfo

from djl_python_neuronx.config import hints
from djl_python_neuronx.errors import redacted

COUNT = "a whole number of at least 1"
POSITIONS = "a whole number of at least 2"
DTYPES = "fp32 or float32, fp16 or float16, bf16 or bfloat16"

SAME = ""
"""In `Option.to`: the library uses the option's own name."""

MAX_TEXT = 65_536
"""Longest list or JSON value in characters; real ones have some hundreds."""
MAX_LITERAL = 8_192
"""Longest Python literal in characters. Python's parser recurses once per operator; its stack holds this many."""
MAX_DEPTH = 32
"""Deepest nesting of brackets."""

SMALLEST_BUCKET = 128
"""Least tokens of a graph that is compiled by default."""

MAX_SHOWN, MAX_NAMES = 200, 40
"""Characters of a name or value in a message; names in a list."""

_LARGEST, _BEYOND = 2**31 - 1, 2**63
_DTYPES = {
    **dict.fromkeys(("fp32", "f32", "float"), "float32"),
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("bf16",), "bfloat16"),
}
_NOTHING = frozenset({"none", "null"})
_TRUE, _FALSE = frozenset({"true", "1", "yes", "on"}), frozenset({"false", "0", "no", "off"})
_INT8 = frozenset({"int8", "static_int8", "s8"})
# With one slash too: a typing error, not a folder.
_URI = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]+):(/.*)", re.DOTALL)
PLACE = re.compile(r"(^|[^\w.])(\.{1,2}/|[/~])")
"""A path that is absolute, or relative to the working or home directory, or a URI, anywhere in a text."""
_ORIGIN = r"^(\*|[a-z][a-z0-9+.-]*://[^\s/?#@*]+)$"
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation\b")
_BUCKET = re.compile(r"//[^/]")
_FP8 = frozenset(
    {"fp8", "static_fp8", "f8e4m3", "f8e4m3fn", "fp8_e4m3", "float8_e4m3fn", "torch.float8_e4m3fn"}
)


@dataclass(frozen=True)
class Allowed:
    """The allowed values of a type in words."""

    words: str


@dataclass(frozen=True)
class Djl:
    """DJL Serving's treatment of an option before the handler gets it.

    Source: djl-serving d21927c, LmiConfigRecommender.java and PyModel.java.
    """

    overrules: bool = False
    """It replaces the user's value: `batch_size` above 1 turns rolling batches off, for one."""
    fills_in: tuple[str, ...] = ()
    """Values that it sets where the user sets none."""
    reads: str = ""
    """How it reads ``option.<name>`` itself: a kind of `djl_serving._KINDS`; empty if it only passes the option on."""
    otherwise: str = "uses its own default"
    """Its behaviour without a value; ``{rows}`` are the most rows of a call."""
    sign: bool = False
    """A file that sets the option was written for DJL Serving."""


@dataclass(frozen=True)
class Option:
    """Facts about an option besides its type and default. Whatever depends on options by name derives from these."""

    allowed: str = ""
    """The allowed values in words; empty if the type lists them (a Literal, a bool, `Allowed`)."""
    aliases: tuple[str, ...] = ()
    """Other names of the option."""
    env: tuple[str, ...] = ()
    """Environment variables read when nothing else sets the option, in order of precedence."""
    file: bool = False
    """The value may be the path of a JSON file, absolute or relative to the model folder."""
    text_file: bool = False
    """The value may be the path of such a file with text, unless it is a Jinja template."""

    to: Mapping[str, str] = field(default_factory=dict)
    """Backend to the library's own name of the option: a keyword (`fuse_qkv`), a nested keyword (`quant.quant_dtype`),
    a compiler flag (`--optlevel`), an environment variable (`NEURON_CC_FLAGS`) or a method (`load()`). Empty if the
    option belongs to the server and means the same with every backend."""
    tunes: bool = False
    """It changes speed or memory, never an answer: a library without an equivalent ignores it, with a note. Without
    `tunes` such a library refuses the option."""
    computed: bool = False
    """The library gets a value computed from this and other options. Without `computed` it gets the value as it is,
    if `to` names a keyword."""
    always: Mapping[str, object] = field(default_factory=dict)
    """Backend to the value that its library always uses: setting that value has no effect, any other is refused."""
    cpu: bool = False
    """The cpu backend honours the option too, or refuses it. It ignores other options that have `to`."""

    graph: tuple[str, ...] | None = None
    """Backends whose compiled graphs depend on the option; None: all in `to`."""
    output: Literal["pinned", "file", "local"] = "pinned"
    """The option's place in a compiled output. `pinned`: it applies wherever the output is served. `file`: it is in
    the output's `serving.properties` only, and not applied if the output is named by hub id or URI. `local`: it holds
    on the machine that compiles, and is not kept."""
    draft: Literal["same", "off"] | None = None
    """A draft model is served with the `same` value as its large model, or with the option `off` even if its folder
    sets it."""
    unused: str = ""
    """The reason that serving ignores the option; empty if it does not."""
    operator: bool = False
    """Only the command line and the environment may set it, not a model folder, which may be a stranger's."""
    djl: Djl = Djl()

    def shapes_graphs(self, backend: str) -> bool:
        """True if the backend's compiled graphs depend on the option."""
        return backend in self.to if self.graph is None else backend in self.graph


class OptionGroup(BaseModel):
    """Base of the option classes: frozen, without unknown fields; the word ``None`` means not set."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _unset(cls, values: object) -> object:
        """Drop values such as ``option.unroll=None``, which old files have."""
        if not isinstance(values, Mapping):
            return values
        optional = {name for name, entry in cls.model_fields.items() if entry.default is None}
        return {
            name: value
            for name, value in values.items()
            if name not in optional or not _is_nothing(value)
        }


def parse_object(text: str) -> object:
    """Parse JSON or a Python literal (`{'a': True}`), which old files have.

    Raises:
        ValueError: the text is neither, or longer or deeper than any real value.
    """
    if len(text) > MAX_TEXT or _depth(text) > MAX_DEPTH:
        message = f"expected at most {MAX_TEXT} characters and {MAX_DEPTH} nested brackets"
        raise ValueError(message)
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    except ValueError:
        if len(text) > MAX_LITERAL:
            raise
    try:
        with warnings.catch_warnings():
            # Python warns of a backslash that escapes nothing.
            warnings.simplefilter("ignore")
            return ast.literal_eval(text.strip())
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        message = "expected JSON or a Python literal"
        raise ValueError(message) from error


def make_buckets(max_len: int, smallest: int = SMALLEST_BUCKET) -> tuple[int, ...]:
    """Return lengths that double from `smallest` and end with `max_len`.

    At most half of a padded row is padding, for six graphs up to 4096 and one more for each doubling. Steps of four
    would save two graphs, some minutes of compiling once, and let a row be three quarters padding at every request;
    below `smallest` a prompt costs what reading the weights costs, however short it is.

    Raises:
        ValueError: a length is not positive.
    """
    if max_len < 1 or smallest < 1:
        message = f"no buckets from {smallest} to {max_len}; expected positive lengths"
        raise ValueError(message)
    doubling = (smallest << power for power in range(max_len.bit_length()))
    return (*(length for length in doubling if length < max_len), max_len)


def join_words(values: Iterable[object], last: str = "and") -> str:
    """The values as a list in a sentence: ``1, 2 and 4`` if `last` is ``and``."""
    words = [str(value) for value in values]
    return f" {last} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def listed(names: Iterable[object]) -> str:
    """Whole names, separated by commas; of more than `MAX_NAMES` the first, and the number of the others."""
    words = [str(shortened(name)) for name in names]
    more = f" and {len(words) - MAX_NAMES} more" if len(words) > MAX_NAMES else ""
    return ", ".join(words[:MAX_NAMES]) + more


def allowed_words(field: FieldInfo) -> str:
    """Return the values that a field's type allows, in words."""
    return join_words(_words(field.metadata) or _choices(field.annotation), "or")


def _words(metadata: Iterable[object]) -> list[str]:
    return [entry.words for entry in metadata if isinstance(entry, Allowed)]


def _choices(annotation: object) -> list[str]:
    """The values of the Literals and booleans in a type, and the words of described types."""
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return _words(getattr(annotation, "__metadata__", ())) or [
        choice for branch in get_args(annotation) for choice in _choices(branch)
    ]


def as_property(value: object) -> str:
    """The value as written in `serving.properties`, without credentials."""
    plain = jsonable(value)
    if plain is None:
        return ""
    if isinstance(plain, list) and all(isinstance(part, int) for part in plain):
        return ",".join(map(str, plain))
    if isinstance(plain, float) and plain.is_integer():
        return str(int(plain))
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def shortened(value: object) -> object:
    """For messages: `value` itself, or its text without credentials, or the beginning of that if it is too long."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or endless nesting
        return f"<{type(value).__name__}>"
    shown = redacted(text)
    if len(shown) > MAX_SHOWN:
        return f"{shown[:MAX_SHOWN]}…"
    return value if shown == text else shown


def jsonable(value: object) -> Any:  # noqa: ANN401  (whatever JSON can hold)
    """The value as JSON types, without credentials; what JSON cannot represent becomes text."""
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case None | bool() | int() | float():
            return value
        case str():
            return redacted(value)
        case BaseModel():
            return jsonable(value.model_dump(mode="json", exclude_none=True))
        case Mapping():
            return {str(key): jsonable(inner) for key, inner in value.items()}
        case Sequence() | set() | frozenset():
            return [jsonable(inner) for inner in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            entry.name: jsonable(getattr(value, entry.name)) for entry in dataclasses.fields(value)
        }
    return redacted(str(value))


def truth(value: object) -> bool | None:
    """Parse any spelling of a boolean. Returns None for anything else."""
    readable = isinstance(value, (bool, str)) or (isinstance(value, int) and value in {0, 1})
    word = str(value).strip().lower() if readable else ""
    return True if word in _TRUE else False if word in _FALSE else None


def _is_nothing(value: object) -> bool:
    return isinstance(value, str) and value.strip().lower() in _NOTHING


def _refuse_constant(name: str) -> NoReturn:
    message = f"{name} is not JSON"
    raise ValueError(message)


def _depth(text: str) -> int:
    """Deepest nesting of brackets. Those in strings count too, which only makes the limit stricter."""
    steps = ((character in "[{(") - (character in "]})") for character in text)
    return max(itertools.accumulate(steps), default=0)


def _convert_text(convert: Callable[[str], str]) -> BeforeValidator:
    """A parser of text without blanks around it; a value of another type stays."""
    return BeforeValidator(
        lambda value: convert(value.strip()) if isinstance(value, str) else value
    )


def long_dtype(dtype: str) -> str:
    """Torch's name of a dtype however a library spells it: `bfloat16` for `bf16` or `torch.bfloat16`."""
    name = dtype.strip().lower().removeprefix("torch.")
    return _DTYPES.get(name, name)


def _eight_bits(text: str) -> str:
    word = text.lower()
    return "int8" if word in _INT8 else "fp8" if word in _FP8 else text


def _split(value: object) -> object:
    """Split a list written as "a,b", "[a, b]" or "(a, b)"; without blanks and quotes."""
    if isinstance(value, str) and len(value) <= MAX_TEXT:
        # Blanks go here: pydantic 2.6 does not take " 512" for a number.
        listed = value.strip()
        for left, right in ("[]", "()"):
            if listed.startswith(left) and listed.endswith(right):
                listed = listed[1:-1].strip()
                break
        parts = [_unquoted(part.strip()) for part in listed.removesuffix(",").split(",")]
        if any(part.isdecimal() and part[0] == "0" != part for part in parts):
            message = "a number begins with 0"  # 2,048 is one number
            raise ValueError(message)
        return parts
    return [value] if isinstance(value, int) else value


def reordered(value: object, lengths: object) -> bool:
    """True if the text `value` has these lengths in another order, or one of them twice."""
    if not isinstance(lengths, tuple) or not all(isinstance(length, int) for length in lengths):
        return False
    parts = _split(value)
    return isinstance(parts, list) and [int(float(part)) for part in parts] != list(lengths)


def _unquoted(part: str) -> str:
    quoted = len(part) > 1 and part[0] == part[-1] and part[0] in "\"'"
    return part[1:-1] if quoted else part


def _one_or_list(value: object) -> object:
    listed = isinstance(value, str) and ("," in value or value.strip()[:1] in {"[", "("})
    return _split(value) if listed else value


def _without(mistakes: Iterable[hints.Mistake], text: str) -> str:
    """Refuse text that has one of the mistakes."""
    for pattern, _, why in mistakes:
        if len(text) <= hints.LONGEST and re.search(pattern, text):
            raise ValueError(why)
    return text


def _ascending(lengths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(lengths)))


def _object(value: object) -> object:
    return plain(parse_object(value) if isinstance(value, str) else value)


def plain(value: object, depth: int = MAX_DEPTH) -> object:
    """Check that JSON can represent the value, and turn tuples into lists, for reports and artifacts.

    Raises:
        ValueError: JSON cannot, or a number or the nesting is beyond any real value.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)) and abs(value) < _BEYOND:
        return value
    if depth and isinstance(value, (list, tuple)):
        return [plain(entry, depth - 1) for entry in value]
    if depth and isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: plain(entry, depth - 1) for key, entry in value.items()}
    message = "expected objects, lists, text, numbers, booleans and null, as in JSON"
    raise ValueError(message)


def _without_quote(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse a quote, which would end the quotes that a library puts around the value in the compiler's flags."""
    if "'" in json.dumps(value):
        message = "expected no quote (')"
        raise ValueError(message)
    return value


def _location(text: str) -> str:
    """Check the form of a folder or S3 URI; returns the path of a `file://` URI."""
    found = _URI.fullmatch(text)
    if found is not None and found[1].lower() == "s3" and _BUCKET.match(found[2]):
        return f"s3:{found[2]}"
    return _local_path(text)


def _local_path(text: str) -> str:
    """Refuse a URI; returns the path of a `file://` URI."""
    found = _URI.fullmatch(text)
    if found is None:
        return text
    if found[1].lower() != "file" or not found[2].startswith("///"):
        message = "expected a local path"
        raise ValueError(message)
    return found[2].removeprefix("//")


def _template(text: str) -> str:
    """Refuse what is no Jinja template."""
    from jinja2 import Environment, TemplateSyntaxError

    # transformers has one tag more than Jinja, with an end.
    known = _GENERATION.sub(lambda tag: tag[1] + ("endif" if tag[2] else "if true"), text)
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(known)  # noqa: S701  (never rendered)
    except TemplateSyntaxError as error:
        message = f"line {error.lineno}: {error.message}"
        raise ValueError(message) from error
    return text


def _weights(value: object) -> object:
    """Parse `quantize`. `NEURON_QUANT` and `load_in_8bit` use true for int8, and vLLM the word `neuron_quant`."""
    enabled = truth(value)
    if enabled is not None:
        return "static_int8" if enabled else None
    word = value.strip() if isinstance(value, str) else ""
    bits = "int8" if word == "neuron_quant" else _eight_bits(word)
    return f"static_{bits}" if bits in {"int8", "fp8"} else value


Count = Annotated[int, Field(ge=1, le=_LARGEST), Allowed(COUNT)]
Amount = Annotated[int, Field(ge=0, le=_LARGEST), Allowed("a whole number of at least 0")]
Positions = Annotated[int, Field(ge=2, le=_LARGEST)]
Lower = _convert_text(str.lower)
Upper = _convert_text(str.upper)
Hyphenated = _convert_text(lambda text: text.lower().replace("_", "-"))
_LongDtype = _convert_text(long_dtype)
_Split, _Object = BeforeValidator(_split), BeforeValidator(_object)
_Filled = Field(min_length=1)
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), Allowed("seconds, a number above 0")]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), Allowed("a number above 0")]
Word = Annotated[str, StringConstraints(strip_whitespace=True, to_lower=True, min_length=1)]
Identifier = Annotated[str, StringConstraints(strip_whitespace=True, pattern=r"^[A-Za-z_]\w*$")]
Plain = Annotated[str, _Filled, AfterValidator(partial(_without, hints.TEXT))]
LocalPath = Annotated[Plain, AfterValidator(_local_path), Allowed("a file or folder")]
Location = Annotated[Plain, AfterValidator(_location), Allowed("a folder or s3://bucket/key")]
ModelSource = Annotated[
    str,
    AfterValidator(partial(_without, hints.NAME)),
    Allowed("a folder, a Hugging Face model id or s3://bucket/key"),
]
Dtype = Annotated[Literal["float32", "float16", "bfloat16"], _LongDtype, Allowed(DTYPES)]
AutoDtype = Annotated[
    Literal["auto", "float32", "float16", "bfloat16"], _LongDtype, Allowed(f"auto, {DTYPES}")
]
Buckets = Annotated[
    tuple[Count, ...],
    _Filled,
    _Split,
    AfterValidator(_ascending),
    Allowed('ascending lengths such as "256,512,1024", each a whole number of at least 1'),
]
TokenBuckets = Annotated[tuple[Positions, ...], _Filled, AfterValidator(_ascending)]
OneOrList = BeforeValidator(_one_or_list)
_Name = Annotated[str, Field(min_length=1, max_length=256)]
Address = Annotated[
    str,
    StringConstraints(strip_whitespace=True, min_length=1),
    Allowed("a host name or IP address"),
]
Port = Annotated[int, Field(ge=1, le=65535), Allowed("a port from 1 to 65535")]
Origins = Annotated[
    tuple[Annotated[str, StringConstraints(to_lower=True, pattern=_ORIGIN)], ...],
    _Filled,
    _Split,
    Allowed('origins such as "https://app.example.com,http://localhost:3000", or "*" for any'),
]
Endpoint = Annotated[
    str,
    StringConstraints(strip_whitespace=True, pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$"),
    Allowed("a URL without user and password, such as http://collector:4318/v1/traces"),
]
Namespace = Annotated[
    str,
    StringConstraints(
        strip_whitespace=True, max_length=255, pattern="^[0-9A-Za-z._/#-][0-9A-Za-z._/#: -]*$"
    ),
    Allowed("a namespace of CloudWatch such as djl-neuronx/chat"),
]
Words = Annotated[
    tuple[_Name, ...], _Filled, _Split, Allowed('names such as "lm_head,embed_tokens"')
]
Names = Annotated[
    tuple[Plain, ...], _Filled, _Split, Allowed('a name, or names such as "llama,gpt-4o"')
]
Template = Annotated[
    str, _Filled, AfterValidator(_template), Allowed("a file, or a Jinja template")
]
Order = Annotated[
    tuple[Annotated[int, Field(ge=0, le=3)], ...],
    Field(min_length=4, max_length=4),
    _Split,
    Allowed('an order of the four axes such as "1,2,0,3"'),
]
Object = Annotated[
    dict[str, Any], _Object, Allowed('a JSON object such as {"name": 1}, or a file that holds one')
]
Unquoted = Annotated[Object, AfterValidator(_without_quote)]
EightBits = Annotated[Literal["int8", "fp8"], _convert_text(_eight_bits)]
Weights = Annotated[Literal["static_int8", "static_fp8"] | None, BeforeValidator(_weights)]

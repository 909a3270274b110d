"""Advice on settings that are nearly right: quotes, comments, units, addresses, and the names of other servers."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Final, TypeAlias

from djl_python_neuronx.config.other_servers import ADVICE, NOTHING, SAME
from djl_python_neuronx.errors import did_you_mean
from djl_python_neuronx.sampling import SamplingParams

LONGEST = 512
"""Characters of a value that is looked at; longer ones are lists and JSON, and no mistake of a beginner."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "M": 2**20, "G": 2**30}

Mistake: TypeAlias = tuple[str, str | Callable[[re.Match[str]], str], str]
"""The pattern of a mistake, its replacement and the explanation."""

TEXT: Final[tuple[Mistake, ...]] = (
    (r"\s+(#|//|;).*$", "", "a comment needs its own line"),
    (r"\s*[,;]+$", "", "nothing follows a value"),
    (r"^([\"'])(.*)\1$", r"\2", "values have no quotes"),
    (r"^[=:>]+\s*", "", "one = or : ends a key"),
    (r"^(\$.*|\{\{.*|<.*>|%\w+%.*)$", "", "a placeholder is not replaced: write the value itself"),
    (r"[\t\n\r]", lambda m: f"/{repr(m[0])[2]}", r"\t, \n and \r are escapes in this file"),
)
"""Mistakes in any value; text that has one is refused."""
_HUB, _S3 = "models of the Hub are named owner/name", "S3 needs a URI"
NAME: Final[tuple[Mistake, ...]] = (
    *TEXT,
    (r"^https?://(?:www\.)?(?:huggingface|hf)\.co/([\w-][\w.-]*/[\w.-]+).*$", r"\1", _HUB),
    (r"^hf://", "", _HUB),
    (r"^https?://s3[\w.-]*\.amazonaws\.com/(.+)$", r"s3://\1", _S3),
    (r"^https?://([\w.-]+?)\.s3[\w.-]*\.amazonaws\.com/(.*)$", r"s3://\1/\2", _S3),
    (r"^https?://.*/s3/buckets/([\w.-]+)(?:\?(?:.*&)?prefix=([^&]*))?.*$", r"s3://\1/\2", _S3),
    (r"^arn:aws[\w-]*:s3:::(.+)$", r"s3://\1", _S3),
    (r"^s3:/?(?!/)", "s3://", _S3),
    (r"^file://(?=/)", "", "a folder needs no scheme"),
)
"""Mistakes in the name of a model; a name that has one is refused."""
_OTHER = "the word is another"
_VALUE: Final[tuple[Mistake, ...]] = (
    *TEXT,
    (r"[,\s]+option\..*$", "", "each setting needs its own line"),
    (r"^\d{1,3}(,\d{3})+$", lambda m: m[0].replace(",", ""), "a comma separates lengths"),
    (r"(\d+)\s*[kK]\b", lambda m: str(int(m[1]) * 1024), "numbers have no unit"),
    (
        r"^(\d+)\s*([smhMG])(?:ec|econd|in|inute|r|our|i?B)?s?$",
        lambda m: str(int(m[1]) * _UNITS[m[2]]),
        "times are in seconds, sizes in bytes",
    ),
    (r"(?<=\d)[\s;|]+(?=\d)|,\s*,+", ",", "a comma separates lengths"),
    (r"(?<=\d)\s*[A-Za-z]+$", "", "numbers have no unit"),
    (r"^-{0,2}O(?=\d$)", "", "the level alone is enough"),
    (r"(?<=[!-~])[^!-~]+$", "", "an invisible character follows it"),
    (r"(?i)^b(f|fp|float)(16)?$", "bf16", _OTHER),
    (r"([{,]\s*)(\w+)\s*:", r'\1"\2":', "names in JSON have quotes"),
    (r"(?i)^enabled?$", "true", _OTHER),
    (r"(?i)^(disabled?|false|off|no|none)$", "disable", _OTHER),
    (r"(?i)^disabled?$", "false", _OTHER),
    (r"(?i)^auto$", "max", "leave the option out for its default, or for the most"),
    (r"(?i)^all$", "max", _OTHER),
    (r"(?i)^(true|on|.*(neuron|continuous|lmi.?dist|trt.?llm|scheduler).*)$", "tnx", _OTHER),
    (r"(?i)^(auto|max|default)$", "", "leave the option out for that"),
)
"""Mistakes in other values."""


def repair(value: object, allowed: Callable[[str], bool], *, is_name: bool = False) -> str:
    """Suggest a replacement for a value that is not allowed, with the reason: ``; values have no quotes: write bf16``.

    Empty if no repair leaves a value that is `allowed`. `is_name`: it names a model.
    """
    if not isinstance(value, str) or len(value) > LONGEST:
        return ""
    for mistake in NAME if is_name else _VALUE:
        pattern, instead, why = mistake
        mended = re.sub(pattern, instead, value)
        if mended == value:
            continue
        if not mended:
            return f"; {why}"
        if allowed(mended):
            return f"; {why}: write {mended}"
        if mistake in TEXT:  # two mistakes in one value
            value = mended
    return ""


_POSITIONS = ("seq_len", "max_seq_len", "max_length")
_CORES = ("num_cores", "num_gpus")
_COPIES = ("dp_size", "num_replicas", "copies", "instance_count")
OTHERS: Final = {
    **{name: option for name, option in SAME.items() if name.islower()},
    **dict.fromkeys(_POSITIONS, "n_positions"),
    "max_input_len": "context_length_estimate",
    **dict.fromkeys(_CORES, "tensor_parallel_degree"),
    **dict.fromkeys(_COPIES, "replicas"),
    **dict.fromkeys(("model_path", "model_name_or_path"), "model_id"),
    "auto_cast_type": "dtype",
    "quantization": "quantize",
    "kv_cache_dtype": "kv_cache_quantize",
}
"""Name in other servers to the option."""
_REQUESTS = {*SamplingParams.__dataclass_fields__, "max_new_tokens", "max_tokens", "do_sample"}
_APART = re.compile(r"\W*(\w+)\s*[=:.]")


def unknown(name: str, value: object, known: Collection[str]) -> str:
    """Advice on an unknown name, or an empty string: ``; did you mean 'n_positions'?``."""
    apart = _APART.match(str(value)[:LONGEST])
    if apart and not {apart[1], f"option.{apart[1]}"}.isdisjoint({"option", *known}):
        return "; a key ends at its first blank, = or :, the rest is its value: write option.NAME=VALUE"
    plain = name.rpartition(".")[2].lower().replace("-", "_")
    if plain in _REQUESTS:
        return "; it is a parameter of requests"
    if plain in OTHERS:
        return f"; did you mean {OTHERS[plain]!r}?"
    if plain in ADVICE:
        return f"; {ADVICE[plain]}"
    return did_you_mean(plain, known) or did_you_mean(name, known)


def neutral(name: str) -> str:
    """Advice on a flag of another server at a value that asks for something: what is right whatever the value."""
    return unknown(name, None, ())[2:] or NOTHING

"""Sampling parameters of a request. `engine/sampler.py` has the rules themselves."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any, ClassVar, TypeVar

from djl_python_neuronx.errors import RequestError, json_type

_T = TypeVar("_T")
Ids = tuple[int, ...]
MAX_LISTED = 1024
"""Tokens, or words, that a parameter may list: each costs memory and time of the engine."""
MAX_NGRAM_SIZE = 64
_COUNT = 2**31
_ID = re.compile("[0-9]{1,9}")


def _rule(
    default: _T,
    allowed: str,
    holds: Callable[[Any], bool],
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


def _are_ids(value: tuple[object, ...]) -> bool:
    return len(value) <= MAX_LISTED and all(type(one) is int and one >= 0 for one in value)


def _are_words(value: tuple[object, ...]) -> bool:
    words = [one for one in value if isinstance(one, tuple) and one]
    return len(words) == len(value) and _are_ids(tuple(token for word in words for token in word))


def _are_biases(value: tuple[object, ...]) -> bool:
    pairs = [one for one in value if isinstance(one, tuple) and len(one) == 2]
    return (
        len(pairs) == len(value)
        and _are_ids(tuple(token for token, _ in pairs))
        and all(type(bias) in {int, float} and abs(bias) < inf for _, bias in pairs)
    )


def _ids(default: _T, allowed: str, holds: Callable[[Any], bool] = _are_ids) -> _T:
    """A field that lists tokens."""
    return _rule(default, allowed, holds, tuple, greedy=True)


def _count(allowed: str = "an integer >= 0", below: int = _COUNT) -> int:
    """A field that counts tokens; 0: off."""
    return _rule(0, allowed, lambda v: 0 <= v < below, int, greedy=True)


def _penalty() -> float:
    return _rule(0.0, "a number from -2 to 2 (0: off)", lambda v: -2 <= v <= 2, greedy=True)


def _plain(value: object) -> object:
    """A value of a request in tuples: of its lists, and of names and values of an object, whose names may be ids."""
    if isinstance(value, dict):
        return tuple(
            (int(name) if _ID.fullmatch(name) else name, one) for name, one in value.items()
        )
    if isinstance(value, list):
        return tuple(tuple(one) if isinstance(one, list) else one for one in value)
    return value


def _number(value: object) -> str:
    return reprlib.repr(value) if isinstance(value, (int, float)) else json_type(value)


def _wrong(value: tuple[Any, ...], holds: Callable[[Any], bool]) -> str:
    """The first wrong element of a list, or its length. Of text only names are shown: other may be a prompt's."""
    bad = next((one for one in value if not holds((one,))), None)
    if bad is None:
        return f"{len(value)} values"
    if not isinstance(bad, tuple):
        return _number(bad)
    if holds is _are_biases and len(bad) == 2:
        return f"{reprlib.repr(bad[0])}: {_number(bad[1])}"
    ids = [one for one in bad if not _are_ids((one,))]
    return f"a list with {_number(ids[0])}" if ids else f"a list of {len(bad)}"


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
    typical_p: float = _rule(1.0, "a number > 0 and <= 1 (1: off)", lambda v: 0 < v <= 1)
    repetition_penalty: float = _rule(
        1.0, "a finite number > 0 (1: off)", lambda v: 0 < v < inf, greedy=True
    )
    presence_penalty: float = _penalty()
    frequency_penalty: float = _penalty()
    logit_bias: tuple[tuple[int, float], ...] = _ids(
        (), f"an object of at most {MAX_LISTED} token ids with finite numbers", _are_biases
    )
    allowed_token_ids: tuple[int, ...] | None = _ids(
        None, f"a list of 1 to {MAX_LISTED} token ids", lambda v: v and _are_ids(v)
    )
    bad_words: tuple[Ids, ...] = _ids(
        (), f"words of at most {MAX_LISTED} tokens together", _are_words
    )
    """Each as ids; requests have strings. Looked for in the output."""
    bad_words_ids: tuple[Ids, ...] = _ids(
        (), f"a list of lists of token ids, at most {MAX_LISTED} ids together", _are_words
    )
    """Looked for in prompt and output together."""
    suppress_tokens: tuple[int, ...] = _ids((), f"a list of at most {MAX_LISTED} token ids")
    begin_suppress_tokens: tuple[int, ...] = _ids((), f"a list of at most {MAX_LISTED} token ids")
    no_repeat_ngram_size: int = _count(
        f"an integer from 0 (off) to {MAX_NGRAM_SIZE}", MAX_NGRAM_SIZE + 1
    )
    min_new_tokens: int = _count()
    min_length: int = _count()
    seed: int | None = _rule(
        None, "an integer from -2**63 to 2**64 - 1", lambda v: 0 <= v < 2**64, int, greedy=True
    )

    WIRE_NAMES: ClassVar[tuple[str, ...]]
    """Names of the parameters in requests, in every protocol: the fields."""
    GREEDY_NAMES: ClassVar[tuple[str, ...]]
    """Parameters that apply to greedy requests too. Setting any other one turns sampling on."""
    HOST_NAMES: ClassVar[tuple[str, ...]]
    """Parameters that a device which samples does not support."""

    def __post_init__(self) -> None:
        """Reject values that are not allowed."""
        for rule in _FIELDS:
            value = getattr(self, rule.name)
            if value is rule.default:
                continue
            typed = isinstance(value, rule.metadata["types"]) and not isinstance(value, bool)
            if not typed or not rule.metadata["holds"](value):
                shown = f"is {_number(value)}"
                if isinstance(value, tuple):
                    found = (
                        _wrong(value, rule.metadata["holds"]) if typed else f"{len(value)} values"
                    )
                    shown = f"has {found}"
                msg = f"{rule.name} {shown}; expected {rule.metadata['allowed']}"
                raise RequestError(msg, param=rule.name)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters among a request's `values`; None counts as not set."""
        return cls(
            **{
                name: _plain(values[name])
                for name in cls.WIRE_NAMES
                if values.get(name) is not None
            }  # type: ignore[arg-type]
        )

    def num_unending(self, prompt_len: int) -> int:
        """Return how many tokens must come before one, or a stop string, that ends the text."""
        return max(self.min_new_tokens, self.min_length - prompt_len)

    def token_ids(self) -> list[tuple[str, Ids]]:
        """Return each parameter that lists tokens, by name, with the ids in it."""
        return [
            ("logit_bias", tuple(token for token, _ in self.logit_bias)),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("bad_words", tuple(token for word in self.bad_words for token in word)),
            ("bad_words_ids", tuple(token for word in self.bad_words_ids for token in word)),
            ("suppress_tokens", self.suppress_tokens),
            ("begin_suppress_tokens", self.begin_suppress_tokens),
        ]

    def excluding(self) -> list[str]:
        """Return the parameters that are set and that exclude tokens, by name."""
        names = (
            *("allowed_token_ids", "bad_words", "bad_words_ids", "suppress_tokens"),
            *("begin_suppress_tokens", "no_repeat_ngram_size", "min_new_tokens", "min_length"),
        )
        return [name for name in names if getattr(self, name)]

    def unsupported_on_device(self) -> list[str]:
        """Return the parameters that are set and that a device which samples does not support."""
        return [
            rule.name
            for rule in _FIELDS
            if not rule.metadata["on_device"] and getattr(self, rule.name) != rule.default
        ]


_FIELDS = fields(SamplingParams)
SamplingParams.WIRE_NAMES = tuple(rule.name for rule in _FIELDS)
SamplingParams.GREEDY_NAMES = tuple(rule.name for rule in _FIELDS if rule.metadata["greedy"])
SamplingParams.HOST_NAMES = tuple(rule.name for rule in _FIELDS if not rule.metadata["on_device"])

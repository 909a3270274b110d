"""Options as flags of the command line: `--max-num-seqs 4` is `-o max_num_seqs=4`.

Each has the names of the option and those of other servers that mean the same.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, get_args

from djl_python_neuronx.config import hints
from djl_python_neuronx.config.legacy import IGNORED, UNSUPPORTED
from djl_python_neuronx.config.options import NAMES, ServingOptions
from djl_python_neuronx.config.other_servers import NEUTRAL, SAME
from djl_python_neuronx.config.sources import meant

_NAMES = dict.fromkeys((*SAME, *NAMES, *IGNORED, *UNSUPPORTED, *NEUTRAL))
_APART = {"env", "model_dir"}  # `--env` of TGI is another thing
_SWITCHES = re.compile("allow_|disable_|enable_|enforce_|use_")
"""Beginnings of names that are no options and take no value, in vLLM too."""


class _Flag(argparse.Action):
    """A flag that adds what its name (`const`) and value mean to the pairs of ``-o``."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,  # noqa: ANN401  (argparse's own type)
        flag: str | None = None,
    ) -> None:
        switch = "false" if str(flag).startswith("--no-") else "true"
        pairs = meant(str(self.const), ",".join(values) if self.nargs else switch)
        namespace.option = [*namespace.option, *pairs]


def add_flags(command: argparse.ArgumentParser) -> None:
    """Add a flag for each name, without help: docs/options.md has it."""
    for name in _NAMES:
        option = SAME.get(name, NAMES.get(name, ""))
        switch = _is_switch(name)
        if name.islower() and name not in _APART:
            command.add_argument(
                *(["-" + name] if len(name) < 3 else []),
                *dict.fromkeys(("--" + name.replace("_", "-"), "--" + name)),
                *(["--no-" + name.replace("_", "-")] if switch else []),
                action=_Flag,
                const=name,
                dest="option",
                help=argparse.SUPPRESS,
                nargs=0 if switch else "+" if option in {"model_name", "adapters"} else 1,
            )


def pair(text: str) -> tuple[str, str]:
    """Return the name and the value of an option: the type of an argument NAME=VALUE."""
    name, separator, value = text.partition("=")
    if not separator or not name.strip():
        msg = f"{text!r} is not NAME=VALUE; for example -o max_rolling_batch_size=8"
        raise argparse.ArgumentTypeError(msg)
    return name.strip().removeprefix("option."), value


def above_zero(kind: type[int] | type[float], *, or_zero: bool = False) -> Callable[[str], float]:
    """Return the type of an argument that is a number above 0, or with `or_zero` from 0 on."""

    def parsed(text: str) -> float:
        with contextlib.suppress(ValueError):
            if 0 < (value := kind(text)) < math.inf or (or_zero and value == 0):
                return value
        wanted = "from 0 on" if or_zero else "above 0"
        msg = f"{text!r} is not {'a whole' if kind is int else 'a'} number {wanted}"
        raise argparse.ArgumentTypeError(msg)

    return parsed


def unknown(words: Sequence[str], own: Collection[str]) -> str:
    """The flags in `words`, each with what to do instead of it; values, which may be secrets, are left out.

    `own`: flags of the command itself.
    """
    known = [*_NAMES, *(flag.lstrip("-") for flag in own)]
    flags = dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("-"))
    advice = {flag: hints.unknown(flag.lstrip("-"), None, known) for flag in flags}
    other = "; no flag and no option has this name; leave it out"
    return ", ".join(f"{flag} ({(advice[flag] or other)[2:]})" for flag in flags) or words[0]


def _is_switch(name: str) -> bool:
    if name in NEUTRAL:
        return not {"true", "false"}.isdisjoint(NEUTRAL[name])
    if name not in NAMES:
        return _SWITCHES.match(name) is not None
    annotation = ServingOptions.model_fields[NAMES[name]].annotation
    return bool in (annotation, *get_args(annotation))

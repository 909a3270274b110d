"""Where compiled files are kept: one place, whoever names it, for our store and for the compiler's own cache."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from djl_python_neuronx.errors import IncompatibleOptionsError, InvalidOptionError

URL_VARIABLE = "NEURON_COMPILE_CACHE_URL"
_FLAGS_VARIABLE = "NEURON_CC_FLAGS"
_CACHE_DIR_FLAG = re.compile(r"--cache_dir[= ](\S+)")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)


@dataclass(frozen=True)
class CompilePlace:
    """What `locate` found."""

    store: str
    """Where the `CompileStore` lies: a folder, or `s3://…`."""
    neff_cache: str
    """The compiler's own cache of single graphs, which the store lies in. Whoever starts a compile sets
    `NEURON_COMPILE_CACHE_URL` to it, so that a killed compile resumes at the next graph."""
    origin: str
    """Who named it."""

    @property
    def is_remote(self) -> bool:
        """True for `s3://…`."""
        return self.store.startswith("s3://")


def locate(
    option: str | None, origin: str, environ: Mapping[str, str], default: Path
) -> CompilePlace:
    """The place that `option` (from `origin`) or the environment names, else `default`; nothing is looked at or made.

    The variables are `NEURON_COMPILE_CACHE_URL` and `--cache_dir` in `NEURON_CC_FLAGS`, which the compiler's cache
    prefers (source: libneuronxla, as Ray's TorchXLAConfig calls it). The caller passes `config.sources.environment()`.

    Raises:
        IncompatibleOptionsError: two of them name different places: half of the graphs would be compiled twice.
        InvalidOptionError: it is neither a folder nor `s3://`.
    """
    flag = _CACHE_DIR_FLAG.search(environ.get(_FLAGS_VARIABLE, ""))
    named = [
        (who, _place(value.strip(), who))
        for who, value in (
            (origin, option or ""),
            (f"environment {URL_VARIABLE}", environ.get(URL_VARIABLE, "")),
            (f"--cache_dir in environment {_FLAGS_VARIABLE}", flag[1] if flag else ""),
        )
        if value.strip()
    ]
    if len({place for _, place in named}) > 1:
        listed = " and ".join(f"{place} ({who})" for who, place in named)
        msg = f"compiled files are to be kept in different places: {listed}; expected one. Keep one of the settings"
        raise IncompatibleOptionsError(msg)
    who, place = named[0] if named else ("default", str(default))
    return CompilePlace(f"{place}/djl-neuronx", place, who)


def _place(value: str, who: str) -> str:
    match = _SCHEME.fullmatch(value)
    scheme, rest = match.groups() if match else ("file", value)
    if scheme == "s3" and rest.strip("/"):
        return f"s3://{rest.rstrip('/')}"
    if scheme == "file" and Path(rest).is_absolute():
        return str(Path(rest))
    name, expected = "compile cache", "an absolute folder, or s3://bucket/prefix"
    raise InvalidOptionError(name, value, who, expected)

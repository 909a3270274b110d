"""Releases of NxD Inference, as versions.toml lists them, and what a case needs of the installed one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Final, Literal

from djl_python_neuronx.config.findings import Finding
from djl_python_neuronx.config.keywords import OPTIONS, OVERRIDE
from djl_python_neuronx.errors import did_you_mean
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.tables import read_table

_MODEL = "model_loader"
_SAMPLING = "on_device_sampling_config"


@dataclass(frozen=True, kw_only=True)
class Release:
    """A release, and what is new in it; versions.toml has the meaning of each field."""

    version: str
    name: str = ""
    sdk: str
    models: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    of_model: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    no_kernels: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Its name, for messages."""
        return f"{self.name or self.version} (SDK {self.sdk})"


@cache
def releases() -> tuple[Release, ...]:
    """Return all releases, oldest first."""
    kind = dict[Literal["release"], tuple[Release, ...]]
    return read_table(__file__, "versions.toml", kind)["release"]


def first_release(name: str, model_type: str | None = None) -> Release:
    """Return the first release with an architecture, or with a keyword (of the class of `model_type`).

    The oldest if none adds it.
    """
    found = [
        release
        for release in releases()
        if name in {*release.models, *release.keywords, *release.of_model.get(model_type or "", ())}
    ]
    return found[-1] if found else releases()[0]


def numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers, in which releases differ: (0, 10) of ``0.10.18399+ed62453e``."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def has_kernels(family: str, installed: str | None) -> bool:
    """Return whether a version has kernels on instances of a family; if None is known, whether every release has."""
    without = (release for release in releases() if family in release.no_kernels)
    return all(installed and numbers(installed) < numbers(release.version) for release in without)


_BY_RELEASE: Final = frozenset({"kv_quant_config", "kv_quant_config.direct_cast"})
"""Keywords that `arguments` leaves out for older releases, which do the same by another one."""


def findings(case: Case, keywords: Mapping[str, object]) -> Iterator[Finding]:
    """Yield what the installed release lacks; where none is known, a note with the release that the case needs.

    `keywords`: of `NeuronConfig`.
    """
    installed = case.library_version
    model_type = "" if case.code else case.model.model_type or ""
    wanted = [(_MODEL, f"model_type {model_type}", first_release(model_type))]
    names = [one for one in _names(keywords) if installed or one not in _BY_RELEASE]
    for keyword in names:
        option = OPTIONS.get(keyword, OVERRIDE)
        wanted.append((option, f"the keyword {keyword}", first_release(keyword, model_type)))
    if not case.code:
        yield from _unknown(names, model_type, installed)
    if installed is None:
        name, what, newest = max(wanted, key=lambda entry: releases().index(entry[2]))
        if newest != releases()[0]:
            problem = f"{what} needs {newest} of NxD Inference, or a newer one"
            yield Finding((name,), problem, "note")
        return
    if all(numbers(installed) != numbers(release.version) for release in releases()):
        known = f"{releases()[0]} to {releases()[-1]}"
        problem = f"NxD Inference {installed} is installed; this package is for {known}"
        yield Finding((_MODEL,), problem, "warning")
    for name, what, release in wanted:
        if numbers(installed) < numbers(release.version):
            fix = "leave it out, or " if name != _MODEL else ""
            problem = (
                f"NxD Inference {installed} is installed, and {release} is the first for {what}; {fix}install that "
                "or a later one"
            )
            yield Finding((name,), problem)


def _names(keywords: Mapping[str, object]) -> Iterator[str]:
    """Yield the keywords, and those of objects among them as ``object.field``."""
    for name, value in keywords.items():
        inner = value if isinstance(value, Mapping) else {}
        yield from (name, *(f"{name}.{entry}" for entry in inner))


def _unknown(names: Iterable[str], model_type: str, installed: str | None) -> Iterator[Finding]:
    """Yield keywords that no release has: warnings where one may run whose keywords are not known."""
    known = {
        keyword
        for release in releases()
        for keyword in (*release.keywords, *release.of_model.get(model_type, ()))
    }
    is_known = installed is not None and numbers(installed) < numbers(releases()[-1].version)
    for name in names:
        if name not in known and name.partition(".")[0] in {name, _SAMPLING}:
            hint = did_you_mean(name, known) or ";"
            problem = f"NxD Inference has no keyword {name}{hint} correct or remove it"
            yield Finding((OVERRIDE,), problem, "error" if is_known else "warning")

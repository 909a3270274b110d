"""What is to be said of options, and the rules that say it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from djl_python_neuronx.config.options import ServingOptions

Level = Literal["error", "warning", "note"]
"""Errors stop a load: what a library refuses or gets wrong, and what would not be honoured in silence. Warnings tell
what costs time, memory or speed; notes tell what is good to know."""


@dataclass(frozen=True)
class Finding:
    """What is to be said of options; `problem` completes a sentence that lists them with their values."""

    names: tuple[str, ...]
    """The options concerned, as fields of `ServingOptions`."""
    problem: str
    """What is wrong, what was expected, what to do."""
    level: Level = "error"


@dataclass(frozen=True)
class Rule:
    """A combination of options that is wrong, costly or useless, whatever the model and the machine."""

    names: tuple[str, ...]
    """The options that the finding lists."""
    broken: Callable[[ServingOptions], object]
    """Truthy: the finding is to be told."""
    problem: str
    level: Level = "error"
    filled_in: bool = False
    """Asks for values that defaults fill in (dtype, degree, lengths, slots), so it is judged only then."""

    def judge(self, options: ServingOptions) -> Finding | None:
        """The finding, if the rule is broken."""
        return Finding(self.names, self.problem, self.level) if self.broken(options) else None


def asked(options: ServingOptions, name: str) -> bool:
    """Whether an option asks for something: it is neither off nor at its default."""
    value = getattr(options, name)
    default = ServingOptions.model_fields[name].default
    return value is not None and value is not False and value != default


def lacking(name: str, other: str, problem: str, level: Level = "warning") -> Rule:
    """The rule that `name` is not asked for without `other`."""
    return Rule(
        (name, other),
        lambda options: asked(options, name) and not asked(options, other),
        problem,
        level,
    )


def excluding(name: str, other: str, problem: str) -> Rule:
    """The rule that `name` and `other` are not asked for together."""
    return Rule(
        (name, other), lambda options: asked(options, name) and asked(options, other), problem
    )


def listed(values: Sequence[int] | Sequence[str], last: str = "and") -> str:
    """The values as a sentence lists them: ``1, 2 and 4``."""
    words = [str(value) for value in values]
    return f" {last} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)

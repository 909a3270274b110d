"""Errors, warnings and notes about options, and the rules that produce them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Literal

from djl_python_neuronx.config.options import NAMES, ServingOptions
from djl_python_neuronx.errors import ConfigError, IncompatibleOptionsError, ServingError, redacted

Level = Literal["error", "warning", "note"]
"""An error stops a load: the library refuses the setting or gets it wrong, or it could not be honoured. A warning is
about time, memory or speed; a note is for information."""


@dataclass(frozen=True)
class Finding:
    """An error, warning or note about options. Messages list the options with their values before `problem`."""

    names: tuple[str, ...]
    """The options concerned: fields of `ServingOptions`, or names as written."""
    problem: str
    """Names the mistake, the expected value and the fix."""
    level: Level = "error"


@dataclass(frozen=True)
class Problem:
    """One error, warning or note about settings, model or machine."""

    level: Level
    options: tuple[str, ...]
    """The options concerned; empty if there are none."""
    message: str
    error: ServingError | None = field(default=None, compare=False)
    """The exception of an error."""


class Problems:
    """Collects errors, warnings and notes in the order of discovery, without duplicates.

    A start raises the errors, `check` prints everything.
    """

    def __init__(self) -> None:
        """Start with an empty collection."""
        self._found: dict[tuple[Level, str], Problem] = {}

    def __iter__(self) -> Iterator[Problem]:
        """Iterate over all levels, in the order of discovery."""
        return iter(tuple(self._found.values()))

    def messages(self, level: Level) -> tuple[str, ...]:
        """The messages of one level."""
        return tuple(problem.message for problem in self if problem.level == level)

    def add(self, level: Level, message: str, options: tuple[str, ...] = ()) -> None:
        """Add one message. An error is raised later as `IncompatibleOptionsError`."""
        if level == "error":
            self.add_error(IncompatibleOptionsError(message), options)
        else:
            message = redacted(message)
            self._found.setdefault((level, message), Problem(level, options, message))

    def add_error(self, error: ServingError, options: tuple[str, ...] = ()) -> None:
        """Add an exception, or each one that a `ConfigError` lists. `options`: by default the one that it names."""
        for leaf in error.problems if isinstance(error, ConfigError) else (error,):
            message = str(leaf)
            if ("error", message) in self._found:
                continue
            name = getattr(leaf, "name", None)
            named = (NAMES.get(name, name),) if isinstance(name, str) else ()
            self._found["error", message] = Problem("error", options or named, message, leaf)

    @contextmanager
    def catch(self) -> Iterator[None]:
        """Add the error that ends the block, if there is one, and go on after it."""
        try:
            yield
        except ServingError as error:
            self.add_error(error)

    @property
    def errors(self) -> tuple[ServingError, ...]:
        """The errors as exceptions."""
        return tuple(problem.error for problem in self if problem.error is not None)

    def include(self, others: Problems, prefix: str, options: tuple[str, ...]) -> None:
        """Add the problems of another collection, each message after `prefix` and about `options`.

        The exceptions stay those that were raised, with their classes and facts.
        """
        for problem in others:
            message = prefix + problem.message
            if problem.error is None:
                self.add(problem.level, message, options)
            else:
                problem.error.args = (message,)
                self.add_error(problem.error, options)

    def raise_errors(self) -> None:
        """Raise the errors collected so far; return if there are none.

        Raises:
            ServingError: the only error as it is, or a `ConfigError` that lists all of them.
        """
        errors = self.errors
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise ConfigError.collect(
                [
                    error if isinstance(error, ConfigError) else ConfigError(str(error))
                    for error in errors
                ]
            )


@dataclass(frozen=True)
class Rule:
    """A combination of options that is wrong, costly or useless for every model and machine."""

    names: tuple[str, ...]
    """The options that the message lists."""
    holds: Callable[[ServingOptions], bool]
    """True for options that have the combination."""
    problem: str = ""
    level: Level = "error"

    def refuse(self, problem: str) -> Rule:
        """Make the combination an error."""
        return replace(self, problem=problem)

    def warn(self, problem: str) -> Rule:
        """Make the combination a warning."""
        return replace(self, problem=problem, level="warning")

    def note(self, problem: str) -> Rule:
        """Make the combination a note."""
        return replace(self, problem=problem, level="note")


def is_set(options: ServingOptions, name: str) -> bool:
    """True if an option is neither off nor at its default."""
    value = getattr(options, name)
    default = ServingOptions.model_fields[name].default
    return value is not None and value is not False and value != default


class State(Enum):
    """A condition on an option, whatever its value."""

    SET = auto()
    """Neither off nor at its default."""
    UNSET = auto()
    ANY = auto()
    """No condition: the message only lists the option."""


SET, UNSET, ANY = State


def when(test: Callable[[ServingOptions], object] | None = None, /, **conditions: object) -> Rule:
    """Return the rule about options for which all conditions hold, and `test` of all together.

    A condition is a `State`, a value, a set of values, or a function of the value, which is not called with None. The
    messages list the options in the order of the conditions.
    """
    return Rule(
        tuple(conditions),
        lambda options: (
            all(_holds(options, name, wanted) for name, wanted in conditions.items())
            and (test is None or bool(test(options)))
        ),
    )


def _holds(options: ServingOptions, name: str, wanted: object) -> bool:
    value = getattr(options, name)
    if isinstance(wanted, State):
        return wanted is ANY or is_set(options, name) == (wanted is SET)
    if isinstance(wanted, Set):
        return value in wanted
    if callable(wanted):
        return value is not None and bool(wanted(value))
    return bool(value == wanted)


def above(limit: int) -> Callable[[int], bool]:
    """Return the condition that a number is greater than `limit`."""
    return lambda value: value > limit

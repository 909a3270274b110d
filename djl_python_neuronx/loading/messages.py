"""What `check` has to say of settings and model: sentences, each once, with the options that they are about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from djl_python_neuronx.config.findings import Level
from djl_python_neuronx.config.options import NAMES
from djl_python_neuronx.config.resolve import Resolved
from djl_python_neuronx.errors import ConfigError


@dataclass(frozen=True)
class Told:
    """One sentence of a report."""

    level: Level
    options: tuple[str, ...]
    """The options that it is about; empty where it is about none."""
    message: str


@dataclass
class Messages:
    """What is to be said, each thing once, in the order in which it was found."""

    said: dict[tuple[Level, str], tuple[str, ...]] = field(default_factory=dict)
    """Level and sentence to the options that it is about."""

    def tell(self, level: Level, message: str, options: tuple[str, ...] = ()) -> None:
        """One sentence, about these options."""
        self.said.setdefault((level, message), options)

    def refuse(
        self,
        errors: Iterable[Exception],
        about: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    ) -> None:
        """The errors, each problem by itself; `about`: a problem's text to its options."""
        for error in errors:
            for leaf in error.problems if isinstance(error, ConfigError) else (error,):
                name = getattr(leaf, "name", None)
                options = (NAMES.get(name, name),) if isinstance(name, str) else ()
                self.tell("error", str(leaf), about.get(str(leaf), options))

    def judge(self, resolved: Resolved, errors: Iterable[ConfigError]) -> None:
        """The errors of the settings."""
        about = {resolved.describe(finding): finding.names for finding in resolved.conflicts}
        self.refuse(errors, about)

    def add(self, resolved: Resolved) -> None:
        """What the sources, the rules and the facts gave beside errors."""
        for finding in resolved.findings:
            self.tell(finding.level, resolved.describe(finding), finding.names)
        for key, doubt in resolved.suspicious.items():
            self.tell("warning", f"{key}: {doubt}", (key,))

    def all(self) -> tuple[Told, ...]:
        """Everything, in the order in which it was found."""
        return tuple(Told(level, names, message) for (level, message), names in self.said.items())

"""Versions of the Neuron SDK: what each one consists of (`sdks.toml`), what this machine has, and what does not fit.

A machine may have packages of several SDKs: the driver belongs to the host, the runtime to the container, and pip
updates the libraries one by one.
"""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from djl_python_neuronx.config.findings import Level
from djl_python_neuronx.config.values import join_words
from djl_python_neuronx.planning.backend_choice import installed_versions
from djl_python_neuronx.planning.programs import UnreadError, output
from djl_python_neuronx.tables import read_table

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DRIVER, RUNTIME = "aws-neuronx-dkms", "aws-neuronx-runtime-lib"
TRANSFORMERS = "transformers"
SYSTEM = (DRIVER, RUNTIME, "aws-neuronx-collectives", "aws-neuronx-tools", "aws-neuron-dkms")
"""Packages of apt or dnf."""
_ALSO = ("torch", "torch-xla", "djl-python-neuronx")
"""Python packages that no SDK names, or not by their own versions."""
_QUERIES = (
    ("dpkg-query", 1, "--show", "--showformat=${db:Status-Status} ${Package} ${Version}\n"),
    ("rpm", len(SYSTEM), "--query", "--queryformat", "installed %{NAME} %{VERSION}\n"),
)
"""Each with the highest exit status of an answer: packages may be missing."""
_RELEASE = re.compile(r"\d+(\.\d+)+")


@dataclass(frozen=True)
class Sdk:
    """A release of the Neuron SDK."""

    version: str
    python: tuple[str, ...]
    """Versions of Python that its compiler is built for."""
    sources: tuple[str, ...]
    packages: Mapping[str, tuple[str, ...]]
    """Versions by package, as apt or pip name it: release numbers, or a pattern such as ``4.57.*``."""

    def has(self, package: str, version: str) -> bool:
        """True if it has this version of the package."""
        return any(fnmatchcase(release(version), pin) for pin in self.packages.get(package, ()))


@dataclass(frozen=True)
class Conflict:
    """Versions that do not work together."""

    versions: Mapping[str, str]
    """Specifiers (PEP 440) by package; ``linux`` is the kernel."""
    level: Level
    problem: str
    fix: str
    source: str
    chips: tuple[str, ...] = ()
    """Families of machines that have it; empty: all."""

    def holds(self, versions: Mapping[str, str], family: str | None) -> bool:
        """True if these versions, on a machine of this family, are the combination."""
        return (not self.chips or family in self.chips) and all(
            within(versions.get(package, ""), specifiers)
            for package, specifiers in self.versions.items()
        )


@dataclass(frozen=True)
class Table:
    """The contents of sdks.toml."""

    sdk: tuple[Sdk, ...]
    """The newest first."""
    conflict: tuple[Conflict, ...]


@cache
def table() -> Table:
    """Return the contents of sdks.toml."""
    return read_table(__file__, "sdks.toml", Table)


def release(version: str) -> str:
    """Return the numbers at the start of a version: no hash of AWS's builds, no revision of a distribution."""
    found = _RELEASE.match(version)
    return found[0] if found else ""


def within(version: str, specifiers: str) -> bool:
    """True if a version has numbers that fulfil the specifiers."""
    from packaging.specifiers import SpecifierSet  # slow: only if versions are compared

    numbers = release(version)
    return bool(numbers) and SpecifierSet(specifiers).contains(numbers)


def compared(versions: Mapping[str, str]) -> dict[str, str]:
    """Return those that belong to one SDK: not the driver, which is the host's, and not transformers."""
    names = {name for sdk in table().sdk for name in sdk.packages} - {DRIVER, TRANSFORMERS}
    return {name: version for name, version in versions.items() if name in names}


def closest(versions: Mapping[str, str]) -> Sdk | None:
    """Return the SDK that has most of these versions, of equal ones the newest; None if none has any."""

    def shared(sdk: Sdk) -> int:
        return sum(sdk.has(name, version) for name, version in compared(versions).items())

    best = max(table().sdk, key=shared)  # the first of equal ones
    return best if shared(best) else None


def owners(package: str, version: str) -> str:
    """Return the SDKs that have this version of a package, in words."""
    found = [sdk.version for sdk in table().sdk if sdk.has(package, version)]
    return f"SDK {join_words(found)}" if found else "of no SDK that is known here"


def machine_versions(
    root: Path = Path("/"),
    search_path: str | None = None,
    unread: dict[str, str] | None = None,
) -> dict[str, str]:
    """Return versions by package: of the loaded driver, packages of the system and of Python, ``python``, ``linux``.

    Never raises; what is not installed, or cannot be seen, is left out. `root`: root of the file system. `search_path`,
    `unread`: see `system_packages`.
    """
    names = {name for sdk in table().sdk for name in sdk.packages if name not in SYSTEM}
    versions = {
        **system_packages(search_path, unread),
        **installed_versions(sorted({*names, *_ALSO})),
        "python": platform.python_version(),
    }
    versions.pop(DRIVER, None)  # what is not loaded drives nothing
    for name, file in (
        (DRIVER, "sys/module/neuron/version"),
        ("linux", "proc/sys/kernel/osrelease"),
    ):
        with suppress(OSError):
            versions[name] = (root / file).read_text(errors="replace").strip()
    return versions


def unmet_requirements() -> Iterator[tuple[str, Requirement, str | None]]:
    """Yield what installed Neuron packages ask for and do not get: package, requirement, the version that is there."""
    from packaging.requirements import Requirement

    for name in sorted({name for sdk in table().sdk for name in sdk.packages} - {TRANSFORMERS}):
        with suppress(metadata.PackageNotFoundError):
            for text in metadata.requires(name) or ():
                wanted = Requirement(text)
                if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                    continue
                found = installed_versions([wanted.name]).get(wanted.name)
                if found is None or not wanted.specifier.contains(found, prereleases=True):
                    yield name, wanted, found


def system_packages(
    search_path: str | None = None, unread: dict[str, str] | None = None
) -> dict[str, str]:
    """Return the versions of the installed packages of `SYSTEM`, by dpkg or rpm. Never raises.

    `search_path`: their folders; None: `$PATH`. `unread` gets the reason of each whose answer cannot be read, by name.
    """
    found: dict[str, str] = {}
    for program, most, *arguments in _QUERIES:
        if path := shutil.which(program, path=search_path):
            try:
                found |= _listed(output([path, *arguments, *SYSTEM], range(most + 1)))
            except UnreadError as error:
                if unread is not None:
                    unread[program] = str(error)
    return found


def _listed(text: str) -> dict[str, str]:
    """Return the versions of the packages that the output of `_QUERIES` lists.

    Raises:
        UnreadError: it has text, and none of the packages.
    """
    if text.strip() and not any(name in text for name in SYSTEM):
        msg = "its output has none of the packages"
        raise UnreadError(msg)
    words = ([*line.split(), "", "", ""][:3] for line in text.splitlines())
    return {
        name: version for status, name, version in words if status == "installed" and name in SYSTEM
    }

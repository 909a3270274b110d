"""Known vulnerabilities of what the package depends on: `python -m tools.audit PIP_AUDIT`, with pip-audit's command.

It compares the versions that are installed with the lists of PyPI and, where PyPI's does not answer, of OSV. The exit
status is 1 if a package has a vulnerability; if neither list can be read, the only line says so.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGE = "djl-python-neuronx"
EXTRAS = ("cpu", "s3", "server")
SERVICES = ("pypi", "osv")
IGNORED: Mapping[str, str] = {}
"""Vulnerabilities that do not concern this package: id -> reason, and the date on which it was found out."""


def dependencies(package: str, extras: Sequence[str]) -> Iterator[str]:
    """Each installed package that `package` depends on with its extras, as `name==version`.

    A local part of a version (torch's `+cpu`), which no list has, is left out.
    """
    left = [(package, extra) for extra in ("", *extras)]
    seen = {*left}
    for name, extra in left:
        if name != package and not extra:
            yield f"{name}=={metadata.version(name).partition('+')[0]}"
        for requirement in map(Requirement, metadata.requires(name) or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                inner = canonicalize_name(requirement.name)
                new = {(inner, part) for part in ("", *requirement.extras)} - seen
                seen |= new
                left += sorted(new)


def answers(command: str, pinned: Sequence[str]) -> list[dict[str, Any]]:
    """The findings of the first service that answers, by package; empty if none answers."""
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder, "requirements.txt")
        listed.write_text("\n".join(pinned), encoding="utf-8")
        arguments = ["--no-deps", "--disable-pip", "--progress-spinner=off", "--format=json"]
        for service in SERVICES:
            ran = subprocess.run(  # noqa: S603
                [command, *arguments, f"--vulnerability-service={service}", "--requirement", listed],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            try:
                found: list[dict[str, Any]] = json.loads(ran.stdout)["dependencies"]
            except ValueError:  # a traceback: no connection
                continue
            if any("vulns" in one for one in found):
                return found
    return []


def main(command: str) -> int:
    """Print what is known and return the exit status."""
    pinned = [*dependencies(PACKAGE, EXTRAS)]
    found = answers(command, pinned)
    if not found:
        print(
            f"NOT AUDITED: neither PyPI's nor OSV's list can be read here ({len(pinned)} packages)"
        )
        return 0
    status = 0
    for one in found:
        if "skip_reason" in one:
            print(f"not audited: {one['skip_reason']}")
        for known in one.get("vulns", ()):
            ids = {known["id"], *known["aliases"]}
            fix = ", ".join(known["fix_versions"]) or "no version yet"
            line = f"{one['name']} {one['version']}: {', '.join(sorted(ids))}, mended in {fix}"
            if reasons := [IGNORED[name] for name in ids & IGNORED.keys()]:
                print(f"ignored: {line}: {reasons[0]}")
            else:
                print(f"VULNERABLE: {line}")
                status = 1
    print(f"{sum('vulns' in one for one in found)} of {len(pinned)} packages audited")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

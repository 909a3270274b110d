"""The files of a release, in dist/: `python -m tools.release [--snapshot]`, which `make release` runs.

A wheel with the sampler's kernel for this machine's architecture, one without it for all others, the sdist, of which
both are built, SBOMs in CycloneDX, a provenance in SLSA's form and SHA256SUMS. The wheels and the sdist are the same
bytes wherever the same commit is built with the versions that the provenance lists. It needs Linux, git and the
packages of `make release`; pip reads the metadata of what the package depends on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GLIBC = "2.17"
"""The oldest C library that the kernel runs with; llguidance's wheels need 2.31, so no user has an older one."""
EXTRAS = ("cpu", "server", "s3", "otel", "check")
"""Extras of the SBOM: those that serve."""
BUILDERS = ("auditwheel", "build", "hatch-vcs", "hatchling", "ziglang")
"""Packages whose versions decide on the bytes."""
BUILD_TYPE = "urn:djl-python-neuronx:make-release:1"


class ReleaseError(Exception):
    """The checkout, or a step of a release, is not what a release needs; the message is for the maintainer."""


@dataclass(frozen=True)
class Source:
    """The commit of a release."""

    commit: str
    tag: str
    """Empty for a snapshot of a commit without one, or with changes."""

    epoch: str
    """The commit's time, in seconds since 1970, for the files in archives."""

    is_changed: bool = False
    """True of a snapshot with files that are not the commit's."""


def source(root: Path, *, is_snapshot: bool) -> Source:
    """Read the commit of a checkout. Raises `ReleaseError` if it is changed or has no tag, unless for a snapshot."""
    changed = _git(root, "status", "--porcelain")
    # The one of several that the version of the files comes from; empty if the last tag is of another commit.
    described = _git(root, "describe", "--tags", "--long", "--always", "--match", "v[0-9]*")
    tag = "" if changed else described.rpartition("-0-g")[0]
    if changed and not is_snapshot:
        message = f"the checkout has changes; commit or remove them, or give --snapshot:\n{changed}"
        raise ReleaseError(message)
    if not tag and not is_snapshot:
        message = "the commit has no tag v1.2.3; make one (docs/releasing.md), or give --snapshot"
        raise ReleaseError(message)
    heading = rf"^## {re.escape(tag[1:])} - \d{{4}}-\d\d-\d\d$"
    if tag and not re.search(heading, (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.M):
        message = f"CHANGELOG.md has no line '## {tag[1:]} - YYYY-MM-DD' for the tag {tag}"
        raise ReleaseError(message)
    commit, epoch = _git(root, "log", "-1", "--format=%H %ct").split()
    return Source(commit, tag, epoch, is_changed=bool(changed))


def _git(root: Path, *arguments: str) -> str:
    ran = subprocess.run(  # noqa: S603
        ["git", "-C", str(root), *arguments],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        message = f"git {shlex.join(arguments)}: {ran.stderr.strip()}"
        raise ReleaseError(message)
    return ran.stdout.strip()


def build(root: Path, folder: Path, environ: Mapping[str, str]) -> None:
    """Build sdist and wheels of a checkout into a folder; the wheels from the sdist."""
    machine = platform.machine()
    # -s: debug information, which clang of zig writes by itself, has the paths of the builder.
    compiler = f"{sys.executable} -m ziglang cc -target {machine}-linux-gnu.{GLIBC} -g0 -s"
    _python("build", "--no-isolation", "--sdist", "--outdir", str(folder), str(root), env=environ)
    (sdist,) = map(str, folder.glob("*.tar.gz"))
    wheel = ("pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir")
    pure = {**environ, "DJL_NEURONX_NATIVE": "0"}
    _python(*wheel, str(folder), sdist, env=pure)
    with tempfile.TemporaryDirectory() as own:
        native = {**environ, "DJL_NEURONX_NATIVE": "", "CC": compiler}
        _python(*wheel, own, sdist, env=native)
        (made,) = map(str, Path(own).iterdir())
        name = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
        repair = ("auditwheel", "repair", "--only-plat", "--plat", name, "--wheel-dir")
        _python(*repair, str(folder), made, env=environ)


def write_sboms(folder: Path, environ: Mapping[str, str], pip: Sequence[str]) -> None:
    """Let pip resolve the wheel with and without its extras, and list the packages that it would install.

    The list is made of an environment that has their metadata alone: with torch they are gigabytes.
    """
    (wheel,) = folder.glob("*manylinux*.whl")
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    text = text.replace('dynamic = ["version"]', f'version = "{_version(folder)}"')
    for name, extras in (("", ""), ("-extras", f"[{','.join(EXTRAS)}]")):
        with tempfile.TemporaryDirectory() as own:
            pyproject, report = Path(own, "pyproject.toml"), Path(own, "report.json")
            pyproject.write_text(text, encoding="utf-8")
            resolve = ("--dry-run", "--ignore-installed", "--quiet", "--report", str(report))
            _python("pip", "install", *resolve, *pip, f"{wheel}{extras}", env=environ)
            _python("venv", "--without-pip", f"{own}/venv", env=environ)
            (site,) = Path(own).glob("venv/lib/python*/site-packages")
            for package in json.loads(report.read_text(encoding="utf-8"))["install"]:
                _write_metadata(site, package)
            output = folder / f"{_stem(folder)}{name}.cdx.json"
            files = ("--pyproject", str(pyproject), "--output-file", str(output))
            listed = ("--output-reproducible", *files, f"{own}/venv/bin/python")
            _python("cyclonedx_py", "environment", *listed, env=environ)


def _write_metadata(site: Path, package: Mapping[str, Any]) -> None:
    """Write what an installation would leave of a package of pip's report, without its files.

    https://packaging.python.org/en/latest/specifications/core-metadata/, of which the report has PEP 566's JSON.
    """
    given: dict[str, Any] = package["metadata"]
    info = site / f"{given['name']}-{given['version']}.dist-info"
    info.mkdir()
    lines = []
    for key, value in given.items():
        for one in value if isinstance(value, list) else [value]:
            if key != "description":
                folded = one.strip().replace("\n", "\n        ")
                lines.append(f"{key.replace('_', '-')}: {folded}\n")
    (info / "METADATA").write_text("".join(lines), encoding="utf-8")
    source = package["download_info"]
    if not source["url"].startswith("file:"):  # a path of this machine
        (info / "direct_url.json").write_text(json.dumps(source), encoding="utf-8")


def _stem(folder: Path) -> str:
    """The part of the files' names that all share: name and version."""
    (wheel,) = folder.glob("*manylinux*.whl")
    return wheel.name.partition("-py3-")[0]


def _version(folder: Path) -> str:
    return _stem(folder).partition("-")[2]


def _python(module: str, *arguments: str, env: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", module, *arguments]
    if subprocess.run(command, env=env, check=False).returncode:  # noqa: S603
        message = f"failed: {shlex.join(command)}"
        raise ReleaseError(message)


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file of a folder, by name."""
    files = sorted(folder.iterdir())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def provenance(given: Source, subjects: Mapping[str, str]) -> dict[str, Any]:
    """The in-toto statement of how files were made: SLSA's provenance, version 1, without a signature."""
    reference = f"@refs/tags/{given.tag}" if given.tag else ""
    tools = [f"pkg:pypi/{name}@{metadata.version(name)}" for name in BUILDERS]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": sha}} for name, sha in subjects.items()],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "command": "make release" if given.tag else "make release ARGS=--snapshot",
                    "tag": given.tag,
                },
                "internalParameters": {
                    "SOURCE_DATE_EPOCH": given.epoch,
                    "machine": platform.machine(),
                    "python": platform.python_version(),
                },
                "resolvedDependencies": [
                    {
                        "uri": f"git+djl-python-neuronx{reference}",
                        "digest": {"gitCommit": given.commit},
                        "annotations": {"changed": given.is_changed},
                    },
                    *({"uri": tool} for tool in tools),
                ],
            },
            "runDetails": {"builder": {"id": BUILD_TYPE}},
        },
    }


def write(given: Source, folder: Path) -> None:
    """Write provenance and checksums of a folder's files. Raises `ReleaseError` if their version is not the tag's."""
    if given.tag and given.tag != f"v{_version(folder)}":
        message = f"the tag is {given.tag}, and the files have the version {_version(folder)}"
        raise ReleaseError(message)
    statement = provenance(given, digests(folder))
    (folder / f"{_stem(folder)}.intoto.json").write_text(
        json.dumps(statement, indent=1) + "\n", encoding="utf-8"
    )
    lines = [f"{sha}  {name}\n" for name, sha in digests(folder).items()]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def main(arguments: argparse.Namespace) -> int:
    """Make a release; returns the exit status."""
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    os.umask(0o022)  # auditwheel keeps the modes of folders
    try:
        given = source(ROOT, is_snapshot=arguments.snapshot)
        environ["SOURCE_DATE_EPOCH"] = given.epoch
        with tempfile.TemporaryDirectory() as own:
            folder = Path(own) / "dist"  # of the usual mode, unlike a temporary folder
            folder.mkdir()
            build(ROOT, folder, environ)
            files = [str(path) for path in folder.iterdir()]
            _python("twine", "check", "--strict", *files, env=environ)
            write_sboms(folder, environ, shlex.split(arguments.pip_args))
            write(given, folder)
            shutil.rmtree(ROOT / "dist", ignore_errors=True)
            shutil.copytree(folder, ROOT / "dist")
    except ReleaseError as error:
        sys.stderr.write(f"tools.release: {error}\n")
        return 1
    sys.stdout.write((ROOT / "dist" / "SHA256SUMS").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__)
    parser.add_argument(
        "--snapshot", action="store_true", help="of a commit without a tag, or with changes"
    )
    parser.add_argument(
        "--pip-args", default="", help="for the resolution of which the SBOMs are made"
    )
    sys.exit(main(parser.parse_args()))

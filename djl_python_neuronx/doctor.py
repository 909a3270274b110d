"""``djl-neuronx doctor``: what this machine has, beside what its Neuron SDK pins, and what to mend (`doctor.toml`).

Each probe runs on a thread with a limit in time, and its failure is one line of the report. No device is opened, and no
credentials are sent or printed. Nothing is written, but for what `check` reads of a model elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import cache, cached_property
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener, getproxies

from djl_python_neuronx.artifacts.fetch import download_root
from djl_python_neuronx.artifacts.hub import HubSettings
from djl_python_neuronx.artifacts.store import locate
from djl_python_neuronx.backends.holders import find_holders
from djl_python_neuronx.config.findings import Level, Problems
from djl_python_neuronx.config.sources import environment
from djl_python_neuronx.config.values import join_words
from djl_python_neuronx.errors import ServingError, redacted
from djl_python_neuronx.loading.compiled import NEURON_CACHE
from djl_python_neuronx.loading.report import Block, finding_blocks, gib, write_blocks
from djl_python_neuronx.planning import machines, sdks
from djl_python_neuronx.planning.backend_choice import libraries
from djl_python_neuronx.planning.programs import UnreadError, output
from djl_python_neuronx.tables import read_table

_PROBE_S, _ANSWER_S = 30.0, 5.0
_REFUSED_S, _DRIFTED_S = 300.0, 30.0
"""AWS refuses signatures that are 5 minutes off, S3 those of 15 (its MaxAllowedSkewMilliseconds is 900000)."""
_FEW_BYTES = 20 * 2**30
_DOMAIN, _DOMAINS = "amazonaws.com", {"cn-": "amazonaws.com.cn", "eusc-": "amazonaws.eu"}
"""The domain of AWS, and those of regions with such a name. Source: botocore 1.40, endpoints.json."""


@dataclass(frozen=True)
class Advice:
    """A finding of doctor.toml; its texts have places for `str.format`."""

    level: Level
    problem: str
    fix: str


class Fact(NamedTuple):
    """One line of the report."""

    section: str
    name: str
    value: str
    pinned: str = ""
    """The versions that the SDK pins; empty: none."""


Line: TypeAlias = Fact | tuple[Level, str]
"""A fact, or the level and the text of a finding."""


@dataclass(frozen=True)
class Host:
    """The machine that is examined."""

    environ: Mapping[str, str] = field(repr=False)
    root: Path = Path("/")
    """Root of the file system."""
    search_path: str | None = None
    """Folders of programs; None: `$PATH`."""
    model: str | None = None
    """The model that is to be served here."""
    unread: dict[str, str] = field(default_factory=dict, init=False)
    """Programs whose answer cannot be read, each with the reason."""

    @cached_property
    def machine(self) -> machines.DeviceInfo:
        """The instance, its devices and the cores that a process may use."""
        found = machines.detect(self.root, self.search_path, self.environ)
        if found.unread:
            self.unread["neuron-ls"] = found.unread
        return machines.for_process(found, self.environ)

    @cached_property
    def versions(self) -> dict[str, str]:
        """Versions by package; see `sdks.machine_versions`."""
        return sdks.machine_versions(self.root, self.search_path, self.unread)

    @cached_property
    def sdk(self) -> sdks.Sdk | None:
        """The SDK that most packages are of."""
        return sdks.closest(self.versions)

    @property
    def packages_known(self) -> bool:
        """False if the system's packages cannot be listed; `versions` is read."""
        return not self.unread.keys() & {"dpkg-query", "rpm"}

    @property
    def in_container(self) -> bool:
        """True in a container."""
        marks = (self.root / name for name in (".dockerenv", "run/.containerenv"))
        return any(map(Path.exists, marks)) or "KUBERNETES_SERVICE_HOST" in self.environ

    @property
    def nodes(self) -> list[Path]:
        """The files of the devices."""
        return sorted((self.root / "dev").glob("neuron[0-9]*"))


@dataclass(frozen=True)
class Diagnosis:
    """The facts and findings of an examination."""

    facts: tuple[Fact, ...]
    findings: Problems

    @property
    def ok(self) -> bool:
        """True if there are no errors."""
        return not self.findings.errors

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values, under the keys of docs/doctor.md."""
        shown: dict[str, Any] = {"ok": self.ok}
        for section, name, value, pinned in self.facts:
            values = {"value": redacted(value)} | ({"pinned": pinned} if pinned else {})
            shown.setdefault(section, {})[name] = values
        levels: tuple[Level, ...] = ("error", "warning", "note")
        found = {f"{level}s": [*map(redacted, self.findings.messages(level))] for level in levels}
        return shown | found

    def blocks(self) -> Iterator[Block]:
        """The sections of the report."""
        for section in dict.fromkeys(fact.section for fact in self.facts):
            facts = [fact for fact in self.facts if fact.section == section]
            title = section.capitalize()
            if section == "versions":
                columns = ("package", "here", "pinned by its SDK")
                yield Block(title, tuple(fact[1:] for fact in facts), columns)
            else:
                yield Block.of_lines(title, [f"{fact.name:17} {fact.value}" for fact in facts])
        yield from finding_blocks(self.findings)
        counts = [f"{one}s: {len(self.findings.messages(one))}" for one in ("error", "warning")]
        yield Block.of_lines("Result", [", ".join(counts)], "green" if self.ok else "red")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status of the process: 1 if there is an error."""
    diagnosis = examine(Host(environment(), model=arguments.model))
    if arguments.json:
        sys.stdout.write(json.dumps(diagnosis.as_json(), indent=2) + "\n")
    else:
        write_blocks(diagnosis.blocks(), sys.stdout)
    return 0 if diagnosis.ok else 1


@cache
def table() -> dict[str, Advice]:
    """Return the findings of doctor.toml by name."""
    return read_table(__file__, "doctor.toml", dict[str, Advice])


def _find(name: str, /, **values: object) -> tuple[Level, str]:
    advice = table()[name]
    return advice.level, f"{advice.problem.format(**values)}; {advice.fix.format(**values)}"


def examine(host: Host, limit_s: float = _PROBE_S) -> Diagnosis:
    """Run all probes side by side, each for at most `limit_s`. Never raises."""
    lines: dict[str, list[Line]] = {name: [] for name in PROBES}
    threads = {
        name: threading.Thread(target=_run, args=(name, host, lines[name]), daemon=True)
        for name in PROBES
    }
    for thread in threads.values():
        thread.start()
    end, findings = time.monotonic() + limit_s, Problems()
    for name, thread in threads.items():
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            lines[name].append(_find("late", probe=name, limit=limit_s))
    found = [line for each in lines.values() for line in tuple(each)]
    unread = dict(host.unread).items()
    found += [_find("unread", program=program, reason=reason) for program, reason in unread]
    for line in found:
        if not isinstance(line, Fact):
            findings.add(*line)
    return Diagnosis(tuple(line for line in found if isinstance(line, Fact)), findings)


def _run(name: str, host: Host, lines: list[Line]) -> None:
    """Collect the lines of a probe, also those before its failure."""
    try:
        lines.extend(PROBES[name](host))  # one by one
    except ServingError as error:  # a variable that a start refuses too
        lines.append(("error", str(error)))
    except Exception as error:  # noqa: BLE001 - one line of the report, whatever a machine does
        lines.append(_find("failed", probe=name, error=f"{type(error).__name__}: {error}"))


def _versions(host: Host) -> Iterator[Line]:
    """Yield the versions of driver, runtime, libraries and Python, and combinations that are known to fail."""
    versions, sdk = host.versions, host.sdk
    pinned = {"python": sdk.python, **sdk.packages} if sdk else {}
    none = "none" if host.packages_known else "unknown"
    yield Fact("versions", "Neuron SDK", sdk.version if sdk else none)
    for name in dict.fromkeys((*sdks.SYSTEM, *sorted(versions))):
        if name in versions:
            yield Fact("versions", name, versions[name], ", ".join(pinned.get(name, ())))
    for one in sdks.table().conflict:
        if one.holds(versions, host.machine.family):
            there = join_words([f"{name} {versions[name]}" for name in one.versions])
            yield one.level, f"{there}: {one.problem}; {one.fix} (source: {one.source})"


def _mixture(host: Host) -> Iterator[Line]:
    """Yield packages that are not of the SDK that most are of, and what packages ask for and do not get."""
    versions, sdk = host.versions, host.sdk
    if sdk is None:
        if host.packages_known:
            yield _find("no_sdk")
        return
    if apart := [
        f"{name} {version} ({sdks.owners(name, version)})"
        for name, version in sdks.compared(versions).items()
        if not sdk.has(name, version)
    ]:
        yield _find("several_sdks", sdk=sdk.version, apart=join_words(apart))
    if not any(versions["python"].startswith(f"{one}.") for one in sdk.python):
        pinned = join_words(sdk.python)
        yield _find("python", version=versions["python"], sdk=sdk.version, pinned=pinned)
    for package, wanted, found in sdks.unmet_requirements():
        name = "requirement_of_torch" if wanted.name == "torch" else "requirement"
        version = versions[package]
        yield _find(name, package=package, version=version, wanted=wanted, found=found or "none")


def _driver(host: Host) -> Iterator[Line]:
    """Yield what is wrong with the driver: not loaded, not reloaded after an update, or older than its SDK's."""
    loaded, sdk = host.versions.get(sdks.DRIVER), host.sdk
    modinfo, found = shutil.which("modinfo", path=host.search_path), None
    if modinfo:
        try:
            text = output([modinfo, "neuron"], (0, 1))  # 1: there is no such module
            found = re.search(r"^version:\s*(\S+)", text, re.MULTILINE)
            if text.strip() and not found:
                host.unread["modinfo"] = "its output has no version"
        except UnreadError as error:
            host.unread["modinfo"] = str(error)
    packages = sdks.system_packages(host.search_path)
    installed = found[1] if found else packages.get(sdks.DRIVER)
    if installed and not loaded:
        yield _find("driver_not_loaded", installed=installed)
    elif installed and loaded and sdks.release(installed) != sdks.release(loaded):
        yield _find("driver_not_reloaded", installed=installed, loaded=loaded)
    pinned = sdk.packages[sdks.DRIVER][0] if sdk else ""
    if sdk and loaded and sdks.within(loaded, f"<{pinned}"):
        yield _find("driver_old", loaded=loaded, sdk=sdk.version, pinned=pinned)


def _libraries(host: Host) -> Iterator[Line]:
    """Yield packages whose names are right and whose contents are not, and what a machine with devices lacks."""
    found = libraries()
    for name, library in found.items():
        if library.state == "placeholder":
            yield _find("placeholder", package=name, version=library.version)
    runtime = host.root / "opt/aws/neuron/lib/libnrt.so.1"
    if host.nodes and sdks.RUNTIME not in host.versions and not runtime.exists():
        yield _find("no_runtime")
    served = ("neuronx-distributed-inference", "transformers-neuronx")
    if host.nodes and all(found[name].state == "missing" for name in served):
        yield _find("no_library", python=sys.executable)


def _devices(host: Host) -> Iterator[Line]:
    """Yield the instance, its devices with the rights to them, and the cores that a process may use."""
    machine = host.machine
    yield Fact("machine", "instance", machine.instance_type or "unknown")
    yield Fact("machine", "in a container", "yes" if host.in_container else "no")
    yield Fact("machine", "devices", f"{machine.neuron_devices} ({machine.seen})")
    if machine.has_neuron and not machine.neuron_cores:
        yield Fact("machine", "cores", "unknown")
        yield _find("cores_unknown", seen=machine.seen)
    elif machine.has_neuron:
        limited = f", by {machine.limited_by}" if machine.limited_by else ""
        cores = f"{machine.visible_cores} of {machine.neuron_cores} visible{limited}"
        yield Fact("machine", "cores", cores)
    else:
        yield from _without_devices(host)
    limit = machines.core_limit(host.environ)
    if limit and (problem := limit.problem or limit.beyond(machine)):
        yield _find("cores", problem=problem)
    if closed := [node for node in host.nodes if not os.access(node, os.R_OK | os.W_OK)]:
        about, nodes = closed[0].stat(), join_words([f"/dev/{node.name}" for node in closed])
        yield _find("no_rights", nodes=nodes, mode=about.st_mode & 0o777, group=about.st_gid)


def _without_devices(host: Host) -> Iterator[Line]:
    """Yield the reason that there is no /dev/neuron*, as far as it shows."""
    driver, known = host.versions.get(sdks.DRIVER), machines.known(host.machine.instance_type)
    if driver and host.in_container:
        yield _find("no_device_in_container", driver=driver)
    elif driver or known:
        why = f"driver {driver} finds no device" if driver else "the driver is not loaded"
        yield _find("no_device", instance=known.name if known else "this machine", driver=why)
    elif not host.machine.unread:
        yield _find("not_neuron")


def _holders(host: Host) -> Iterator[Line]:
    """Yield the processes that hold devices."""
    if host.machine.has_neuron:
        holders = find_holders(host.root, host.search_path)
        yield Fact("machine", "held by", str(holders))
        if holders.found:
            yield _find("in_use", holders="; ".join(map(str, holders.found)))


def _memory(host: Host) -> Iterator[Line]:
    """Yield the host's memory and the limits of a process."""
    available = machines.available_memory(host.root)
    shown = "unknown" if available is None else f"{gib(available)} GiB available"
    yield Fact("machine", "host memory", shown)
    files, locked = (
        resource.getrlimit(one)[0] for one in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)
    )
    yield Fact(
        "machine", "limits", f"{files} open files, {locked} bytes of locked memory (-1: any)"
    )
    if host.machine.local_degree and locked != resource.RLIM_INFINITY:
        yield _find("locked_memory", locked=locked)


def _disk(host: Host) -> Iterator[Line]:
    """Yield the free space of the folders that a start writes to."""
    hub, store = HubSettings.of(host.environ), locate(None, "", host.environ, NEURON_CACHE).store
    places = {
        "downloads": (str(download_root(host.environ)), "SERVING_DOWNLOAD_DIR or XDG_CACHE_HOME"),
        "models of the hub": (str(hub.cache_dir), "HF_HOME"),
        "compiled graphs": (store, "NEURON_COMPILE_CACHE_URL"),
        "temporary files": (tempfile.gettempdir(), "TMPDIR"),
    }
    disks: set[int] = set()
    for name, (folder, variable) in places.items():
        if folder.startswith("s3://"):
            yield Fact("disk", name, folder)
            continue
        place = next(one for one in (Path(folder), *Path(folder).parents) if one.is_dir())
        free = shutil.disk_usage(place).free
        yield Fact("disk", name, f"{gib(free)} GiB free in {folder}")
        values = {"name": name, "folder": folder, "variable": variable}
        if not os.access(place, os.W_OK):
            yield _find("not_writable", place=place, **values)
        elif free < _FEW_BYTES and place.stat().st_dev not in disks:
            disks.add(place.stat().st_dev)
            yield _find("disk", free=gib(free), **values)


def _network(host: Host) -> Iterator[Line]:
    """Yield whether the hub and S3 answer, and this machine's clock beside theirs."""
    environ = host.environ
    for scheme, place in getproxies().items():
        # It need not be a URI, as redacted() expects.
        yield Fact("network", f"proxy, {scheme}", place.rpartition("@")[2])
    hub = HubSettings.of(environ)
    if hub.offline:
        yield Fact("network", "hub", f"not used: {hub.offline}")
    else:
        yield from _reach("hub", hub.site, "HF_ENDPOINT")
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    named = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    domain = next((one for start, one in _DOMAINS.items() if region.startswith(start)), _DOMAIN)
    site = redacted(named or f"https://s3.{region}.{domain}")
    yield from _reach("S3", site, "AWS_ENDPOINT_URL, AWS_REGION")


class _Stay(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:  # noqa: ANN401  (urllib's)
        return None


def _reach(name: str, site: str, variable: str) -> Iterator[Line]:
    """Send a site a HEAD request. Any answer counts, a redirect or a refusal too."""
    if not site.lower().startswith(("http://", "https://")):
        yield _find("url", site=site, variable=variable)
        return
    start = time.monotonic()
    try:
        request = Request(site, method="HEAD")  # noqa: S310 - http or https, tested above
        with build_opener(_Stay).open(request, timeout=_ANSWER_S) as answer:
            status, headers = answer.status, answer.headers
    except HTTPError as error:
        status, headers = error.code, error.headers
    except (OSError, HTTPException, ValueError) as error:
        reason = redacted(str(getattr(error, "reason", error))).rpartition("@")[2]
        yield Fact("network", name, f"{site} does not answer")
        yield _find("no_answer", site=site, reason=reason, variable=variable)
        return
    yield Fact("network", name, f"{site} answers in {time.monotonic() - start:.1f} s ({status})")
    try:
        # What a cache answers has the date of when it was made (RFC 9111).
        now = parsedate_to_datetime(headers.get("Date")).timestamp() + int(headers.get("Age", 0))
    except (TypeError, ValueError):
        return
    skew = time.time() - now
    way = "ahead of" if skew > 0 else "behind"
    yield Fact("network", f"clock, by {name}", f"{abs(skew):.0f} s {way} it")
    if abs(skew) > _DRIFTED_S:
        kind = "clock_off" if abs(skew) > _REFUSED_S else "clock_drifts"
        yield _find(kind, minutes=abs(skew) / 60, way=way, site=site)


def _model(host: Host) -> Iterator[Line]:
    """Yield what `check` finds about the model."""
    if host.model is None:
        return
    from djl_python_neuronx.loading.check import check

    report = check(host.model, environ=host.environ, overrides={})
    verdict = "can be served" if report.ok else "cannot be served like this"
    yield Fact("model", host.model, ", but ".join((verdict, *report.lacking)))
    for problem in report.findings:
        yield problem.level, f"{host.model}: {problem.message}"


PROBES: Final[Mapping[str, Callable[[Host], Iterator[Line]]]] = {
    "versions": _versions,
    "mixture": _mixture,
    "driver": _driver,
    "libraries": _libraries,
    "devices": _devices,
    "holders": _holders,
    "memory": _memory,
    "disk": _disk,
    "network": _network,
    "model": _model,
}
"""The probes by name, in the order of the report."""

"""Choice of the backend: by option, by the artifact, or by machine, installed libraries and model type."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata, util
from typing import Final, Literal

from djl_python_neuronx.config.findings import is_set
from djl_python_neuronx.config.options import ServingOptions, option
from djl_python_neuronx.errors import BackendUnavailableError
from djl_python_neuronx.planning.case import NEURON_BACKENDS, capability_of
from djl_python_neuronx.planning.machines import DeviceInfo
from djl_python_neuronx.planning.model_rules import unsupported_options
from djl_python_neuronx.planning.rules import OPEN, library_conflicts

logger = logging.getLogger(__name__)

SETUP_GUIDE = "https://awsdocs-neuron.readthedocs-hosted.com/"
_INSTALL = (
    f"Install the Neuron packages as the AWS Neuron setup guide says ({SETUP_GUIDE}), or start from AWS's image "
    "public.ecr.aws/neuron/pytorch-inference-neuronx"
)

# Source: the wheels on PyPI (transformers-neuronx 0.1, torch-neuronx 1.0, neuronx-cc 1.0.post1,
# neuronx-distributed-inference 0.1.0): each one's description is a line with these words and all it does is raise.
_PLACEHOLDER_WORDS = "WRONG PACKAGE"

_MODULES: Final = {
    "neuronx-distributed-inference": "neuronx_distributed_inference",
    "transformers-neuronx": "transformers_neuronx",
    "torch-neuronx": "torch_neuronx",
    "neuronx-cc": "neuronxcc",
}


@dataclass(frozen=True)
class Library:
    """A Neuron package and its state on this machine."""

    name: str
    version: str | None
    """None: missing, or importable without being installed as a package."""
    state: Literal["installed", "placeholder", "missing"]


def libraries() -> Mapping[str, Library]:
    """Return the Neuron packages by name. Nothing is imported; a placeholder of PyPI is recognised."""
    return {name: _library(name, module) for name, module in _MODULES.items()}


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    versions = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def choose_backend(
    options: ServingOptions,
    machine: DeviceInfo,
    model_type: str | None,
    *,
    installed: Mapping[str, Library] | None,
    backends: Collection[str],
    artifact_backend: str | None = None,
    dry_run: bool = False,
) -> str:
    """Return the backend to load with, or, in a dry run, to plan for.

    The first of these: option.model_loader; the backend the artifact was compiled for; cpu on a machine without Neuron
    devices, with a warning; the `preferred` backend among those that can be used. Never cpu by default on a Neuron
    machine. A dry run accepts what is missing here: it falls back to backends of this version that are not installed,
    and plans a tensor parallel degree above 1 for Neuron even without a device.

    Args:
        options: Need not be filled in.
        machine: Where the model is served.
        model_type: Of the model; None if unknown.
        installed: Neuron packages of that machine; None if unknown.
        backends: Backends of this version.
        artifact_backend: The only backend that can load the artifact; None if any can.
        dry_run: Whether nothing is loaded.

    Raises:
        BackendUnavailableError: nothing can serve here; the message names what is missing. Not in a dry run.
    """
    is_open = options.model_loader in OPEN
    wanted = artifact_backend if is_open else options.model_loader
    no_device = not machine.has_neuron and (
        not dry_run or options.tensor_parallel_degree in {None, 1}
    )
    if wanted is not None or no_device:
        backend = wanted or "cpu"
        obstacle = None if dry_run else _obstacle(backend, installed or {}, backends)
        if obstacle:
            origin = "the model's format" if is_open else "option.model_loader"
            message = f"the backend {backend!r} ({origin}) cannot be used: {obstacle}"
            raise BackendUnavailableError(message)
        if wanted is None and not dry_run:
            logger.warning("backend name=cpu reason='no Neuron device' seen=%r", machine.seen)
        return backend
    obstacles = {
        name: "its package is not known to be installed"
        if installed is None
        else _obstacle(name, installed, backends) or _unknown_model(name, model_type)
        for name in NEURON_BACKENDS
    }
    candidates = [[name for name, obstacle in obstacles.items() if obstacle is None]]
    if dry_run:
        served = [name for name, facts in NEURON_BACKENDS.items() if facts.served]
        candidates += [served, [*NEURON_BACKENDS]]
    for names in candidates:
        if chosen := preferred(options, model_type, names):
            return chosen
    if dry_run:
        return "tnx"
    listed = "; ".join(f"{name}: {obstacle}" for name, obstacle in obstacles.items())
    message = (
        f"this machine has a Neuron device ({machine.seen}) and no backend that can use it. {listed}. "
        "The CPU is never used in its place unless option.model_loader=cpu is set"
    )
    raise BackendUnavailableError(message)


def preferred(
    options: ServingOptions,
    model_type: str | None,
    candidates: Iterable[str] = tuple(NEURON_BACKENDS),
) -> str | None:
    """Return the first backend that supports the model type and refuses none of the options.

    A file may have been written for one library: an option that only that library has shows it. If every backend
    refuses something it is the first that supports the type. None if none does.
    """
    able = [name for name in candidates if _unknown_model(name, model_type) is None]
    willing = [name for name in able if not _refuses(name, options, model_type)]
    return next(iter(willing or able), None)


def _refuses(backend: str, options: ServingOptions, model_type: str | None) -> bool:
    """Return whether a backend refuses the options, as far as it is known before they are filled in."""
    if any(not option(name).tunes for name in unsupported_options(options, backend)):
        return True
    capability = capability_of(backend, model_type)
    if capability is not None:
        ignored = (name for name in capability.ignored_options if not option(name).tunes)
        if any(is_set(options, name) for name in (*ignored, *capability.unsupported_options)):
            return True
        if options.speculating and not capability.speculation:
            return True
    return any(finding.level == "error" for finding in library_conflicts(options, backend))


def _obstacle(
    backend: str, installed: Mapping[str, Library], backends: Collection[str]
) -> str | None:
    """Explain why a backend cannot be used here, with the fix; None if it can."""
    if backend not in backends:
        names = ", ".join(sorted(backends)) or "none"
        return f"this version of djl_python_neuronx has no {backend} backend; it has: {names}"
    if backend not in NEURON_BACKENDS:
        return None
    needed = NEURON_BACKENDS[backend].package
    # Both libraries need torch-neuronx and neuronx-cc; only the other library's own package does not matter.
    others = {facts.package for facts in NEURON_BACKENDS.values()} - {needed}
    fakes = [
        library.name
        for library in installed.values()
        if library.state == "placeholder" and library.name not in others
    ]
    if fakes:
        return f"the installed {' and '.join(fakes)} is PyPI's placeholder, not the library. {_INSTALL}"
    if installed[needed].state == "missing":
        return f"{needed} is not installed. {_INSTALL}"
    return None


def _unknown_model(backend: str, model_type: str | None) -> str | None:
    """Explain why a library cannot serve the model type; None if it can, or the type is unknown."""
    known = NEURON_BACKENDS[backend].architectures
    if model_type is None or model_type in known:
        return None
    return f"it does not support model_type {model_type!r}; supported: {', '.join(known)}"


def _library(name: str, module: str) -> Library:
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return Library(name, None, "installed" if _importable(module) else "missing")
    described = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    fake = _PLACEHOLDER_WORDS in described
    return Library(name, distribution.version, "placeholder" if fake else "installed")


def _importable(module: str) -> bool:
    try:
        return module in sys.modules or util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False

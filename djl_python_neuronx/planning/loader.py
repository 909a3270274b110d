"""Which backend loads the model: what is installed, what is asked for, what the machine is."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata, util
from types import MappingProxyType
from typing import Literal

from djl_python_neuronx.config.findings import asked
from djl_python_neuronx.config.options import ServingOptions, option
from djl_python_neuronx.errors import BackendUnavailableError
from djl_python_neuronx.planning.case import NEURON_BACKENDS, capability_of
from djl_python_neuronx.planning.machines import DeviceInfo
from djl_python_neuronx.planning.model_rules import unsupported_options
from djl_python_neuronx.planning.rules import BACKEND_RULES, OPEN

logger = logging.getLogger(__name__)

SETUP_GUIDE = "https://awsdocs-neuron.readthedocs-hosted.com/"
_INSTALL = (
    f"Install the Neuron packages as the AWS Neuron setup guide says ({SETUP_GUIDE}), or start from AWS's image "
    "public.ecr.aws/neuron/pytorch-inference-neuronx, the base of this project's container"
)

# Source: the wheels on PyPI (transformers-neuronx 0.1, torch-neuronx 1.0, neuronx-cc 1.0.post1,
# neuronx-distributed-inference 0.1.0): each one's description is a line with these words and all it does is raise.
_PLACEHOLDER_WORDS = "WRONG PACKAGE"

_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "neuronx-distributed-inference": "neuronx_distributed_inference",
        "transformers-neuronx": "transformers_neuronx",
        "torch-neuronx": "torch_neuronx",
        "neuronx-cc": "neuronxcc",
    }
)
NEURON_LOADERS: Mapping[str, str] = MappingProxyType(
    {"nxdi": "neuronx-distributed-inference", "tnx": "transformers-neuronx"}
)
"""Neuron loader to the package it needs, the preferred one first."""

LEFT_OPEN = OPEN
"""Values of model_loader that name no loader of this package."""


@dataclass(frozen=True)
class Library:
    """A Neuron package as it is installed here."""

    name: str
    version: str | None
    """None: missing, or importable without being installed as a package."""
    state: Literal["installed", "placeholder", "missing"]


def libraries() -> Mapping[str, Library]:
    """The Neuron packages by name. Nothing is imported; a placeholder of PyPI is told from the real package."""
    return MappingProxyType({name: _library(name, module) for name, module in _MODULES.items()})


def choose_loader(
    options: ServingOptions,
    device: DeviceInfo,
    installed: Mapping[str, Library],
    backends: Collection[str],
    artifact_backend: str | None = None,
    model_type: str | None = None,
) -> str:
    """The backend to load with: a name in `backends`, which are those of this version.

    `auto` takes what the artifact was compiled for; else, of the libraries that are there beside a Neuron device, the
    one that `preferred` names; else, without any Neuron device, cpu with one warning. Never cpu by itself on a Neuron
    instance.

    Raises:
        BackendUnavailableError: nothing can serve here; the message says what is missing.
    """
    left_open = options.model_loader in LEFT_OPEN
    wanted = artifact_backend if left_open else options.model_loader
    if wanted is None and device.has_neuron:
        return _neuron_loader(options, device, installed, backends, model_type)
    loader = wanted or "cpu"
    if obstacle := _obstacle(loader, installed, backends):
        asked = "the model's format" if left_open else "option.model_loader"
        message = f"the loader {loader!r} ({asked}) cannot be used: {obstacle}"
        raise BackendUnavailableError(message)
    if wanted is None:
        logger.warning("loader name=cpu reason='no Neuron device' seen=%r", device.seen)
    return loader


def preferred(
    options: ServingOptions,
    model_type: str | None,
    candidates: Iterable[str] = tuple(NEURON_LOADERS),
) -> str | None:
    """The Neuron loader that `auto` means: the first that knows the model's type and refuses none of the options.

    An option that only one library has tells which one a file was written for. Where every library refuses something
    it is the first that knows the type, whose refusals are then told; None: no library knows it.
    """
    able = [name for name in candidates if _foreign(name, model_type) is None]
    willing = [name for name in able if not _refuses(name, options, model_type)]
    return next(iter(willing or able), None)


def _refuses(loader: str, options: ServingOptions, model_type: str | None) -> bool:
    """Whether a library stops at these options, as far as it is known before they are filled in."""
    if any(not option(name).tunes for name in unsupported_options(options, loader)):
        return True
    capability = capability_of(loader, model_type)
    if capability is not None:
        ignored = (name for name in capability.ignored_options if not option(name).tunes)
        if any(asked(options, name) for name in (*ignored, *capability.unsupported_options)):
            return True
        if options.speculating and not capability.speculation:
            return True
    return any(rule.level == "error" and rule.broken(options) for rule in BACKEND_RULES[loader])


def _neuron_loader(
    options: ServingOptions,
    device: DeviceInfo,
    installed: Mapping[str, Library],
    backends: Collection[str],
    model_type: str | None,
) -> str:
    obstacles = {
        name: _obstacle(name, installed, backends) or _foreign(name, model_type)
        for name in NEURON_LOADERS
    }
    usable = [name for name, obstacle in obstacles.items() if obstacle is None]
    if chosen := preferred(options, model_type, usable):
        return chosen
    listed = "; ".join(f"{name}: {obstacle}" for name, obstacle in obstacles.items())
    message = (
        f"this machine has a Neuron device ({device.seen}) and no loader that can use it. {listed}. "
        "The CPU is never used in its place unless option.model_loader=cpu asks for it"
    )
    raise BackendUnavailableError(message)


def _obstacle(
    loader: str, installed: Mapping[str, Library], backends: Collection[str]
) -> str | None:
    """Why a loader cannot be used here, with what to do; None if it can."""
    if loader not in backends:
        names = ", ".join(sorted(backends)) or "none"
        return f"this version of djl_python_neuronx has no {loader} backend; it has: {names}"
    if needed := NEURON_LOADERS.get(loader):
        fakes = [library.name for library in installed.values() if library.state == "placeholder"]
        # Both loaders stand on torch-neuronx and neuronx-cc; only the other loader's own package does not matter.
        fakes = [name for name in fakes if name == needed or name not in NEURON_LOADERS.values()]
        if fakes:
            return f"the installed {' and '.join(fakes)} is PyPI's placeholder, not the library. {_INSTALL}"
        if installed[needed].state == "missing":
            return f"{needed} is not installed. {_INSTALL}"
    return None


def _foreign(loader: str, model_type: str | None) -> str | None:
    """Why a Neuron library cannot serve the model; None if it can, or the type is unknown."""
    known = NEURON_BACKENDS[loader].architectures
    if model_type is None or model_type in known:
        return None
    return f"it knows no model of the type {model_type!r}; it knows {', '.join(known)}"


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

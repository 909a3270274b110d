"""Choice of the backend: by option, by the artifact, or by machine, installed libraries and model type."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Final, Literal

from djl_python_neuronx.config.findings import Finding
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.values import join_words
from djl_python_neuronx.errors import BackendUnavailableError
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.machines import DeviceInfo
from djl_python_neuronx.planning.placement import CUT_SHORT
from djl_python_neuronx.planning.rules import OPEN

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
    """None: missing, or neither installed as a package nor stated by its source."""
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


@dataclass(frozen=True)
class Choice:
    """A backend and why it was chosen."""

    backend: str
    reason: str = ""
    """One sentence; empty if option.model_loader names the backend."""


def choose_backend(
    options: ServingOptions,
    machine: DeviceInfo,
    model_type: str | None,
    judge: Callable[[str], Sequence[Finding]],
    *,
    installed: Mapping[str, Library] | None,
    artifact_backend: str | None = None,
    dry_run: bool = False,
) -> Choice:
    """Choose the backend to load with, or, in a dry run, to plan for.

    The first of these: option.model_loader; the backend the artifact was compiled for; cpu on a machine without Neuron
    devices; the first library of `NEURON_BACKENDS` that supports the model type, is installed and whose plan has no
    error. A file may have been written for one library: of those that are equal in this, the first that lacks none of
    the options is taken. So if each refuses something, the errors are those of the library that the file is for. Of
    those that are equal in this too, it is the first whose default length memory does not make the least.

    Never cpu by default on a Neuron machine. A dry run does without an installed library, and plans a tensor parallel
    degree above 1 for Neuron even without a device.

    Args:
        options: Need not be filled in.
        machine: Where the model is served.
        model_type: Of the model; None if unknown.
        judge: Returns the findings of a plan with a library.
        installed: Neuron packages of that machine; None if unknown.
        artifact_backend: The only backend that can load the artifact; None if any can.
        dry_run: Whether nothing is loaded.

    Raises:
        BackendUnavailableError: nothing can serve here; the message names what is missing. Not in a dry run.
    """
    missing = {
        name: (_unknown_model(name, model_type, options), _obstacle(name, installed))
        for name in NEURON_BACKENDS
    }
    is_open = options.model_loader in OPEN
    takes = f"model_loader={options.model_loader} takes"
    if wanted := artifact_backend if is_open else options.model_loader:
        if not dry_run and (obstacle := _obstacle(wanted, installed)):
            origin = "the model's format" if is_open else "option.model_loader"
            able = [f"{origin}={name}" for name in missing if not any(missing[name])]
            advice = f", or set {able[0]}, which is installed" if able and not is_open else ""
            message = (
                f"the backend {wanted!r} ({origin}) cannot be used: {obstacle}. {_INSTALL}{advice}"
            )
            raise BackendUnavailableError(message)
        return Choice(wanted, f"{takes} {wanted}: the model's files are for it alone" * is_open)
    if not machine.has_neuron and not (dry_run and _several_cores(options)):
        return Choice("cpu", f"{takes} cpu: there is no Neuron device ({machine.seen})")
    against = {name: (*missing[name], *_refusal(name, model_type, judge(name))) for name in missing}
    chosen, *others = sorted(against, key=lambda name: [bool(words) for words in against[name]])
    if any(missing[chosen]) and not dry_run:
        listed = "; ".join(unknown or obstacle for unknown, obstacle in missing.values())
        message = (
            f"no backend here can use a Neuron device ({machine.seen}): {listed}. {_INSTALL}. "
            "The CPU is never used in its place unless option.model_loader=cpu is set"
        )
        raise BackendUnavailableError(message)
    reasons = [_why_not(name, against[name], against[chosen]) for name in others]
    return Choice(chosen, f"{takes} {chosen}: {'; '.join(reasons)}")


def _several_cores(options: ServingOptions) -> bool:
    return options.tensor_parallel_degree not in {None, 1}


def _why_not(name: str, objections: tuple[str, ...], to_chosen: tuple[str, ...]) -> str:
    """Return the first objection that the chosen backend does not have."""
    pairs = zip(objections, to_chosen, strict=True)
    return next(
        (words for words, same in pairs if words and not same), f"it is preferred to {name}"
    )


def _unknown_model(backend: str, model_type: str | None, options: ServingOptions) -> str:
    """Explain why a library cannot serve the model type; empty if it can, or the type is unknown."""
    neuron = NEURON_BACKENDS[backend]
    own_code = options.nxdi_model_code is not None and neuron.with_code is not None
    if model_type is None or model_type in neuron.architectures or own_code:
        return ""
    return f"{backend} does not support model_type {model_type!r}"


def _obstacle(backend: str, installed: Mapping[str, Library] | None) -> str:
    """Explain why a backend cannot be used here; empty if it can, or the packages are unknown."""
    if installed is None or backend not in NEURON_BACKENDS:
        return ""
    needed = NEURON_BACKENDS[backend].package
    # Both libraries need torch-neuronx and neuronx-cc; only the other library's own package does not matter.
    others = {facts.package for facts in NEURON_BACKENDS.values()} - {needed}
    fakes = [
        library.name
        for library in installed.values()
        if library.state == "placeholder" and library.name not in others
    ]
    if fakes:
        return f"the installed {' and '.join(fakes)} is PyPI's placeholder, not the library"
    return f"{needed} is not installed" if installed[needed].state == "missing" else ""


def _refusal(
    backend: str, model_type: str | None, findings: Sequence[Finding]
) -> tuple[str, str, str]:
    """Name the first error of a plan, the options of its findings that a backend lacks, and a length that memory cuts.

    Each is empty if there is none.
    """
    neuron, refused, short = NEURON_BACKENDS[backend], "", ""
    lacking: dict[str, None] = {}
    for finding in findings:
        if finding.level == "error" and not refused:
            about = join_words(name for name in finding.names if name != "model_loader")
            refused = (
                f"{backend} refuses {about or 'the model'} ({finding.problem.partition(';')[0]})"
            )
        if finding.names == CUT_SHORT and finding.level == "warning":
            short = f"{backend} has memory for the shortest n_positions only"
        if finding.level != "note":
            lacks = (name for name in finding.names if neuron.lacks(name, model_type))
            lacking.update(dict.fromkeys(lacks))
    return refused, f"{backend} lacks {join_words(lacking)}" if lacking else "", short


def _library(name: str, module: str) -> Library:
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        state: Literal["installed", "missing"] = "installed" if _importable(module) else "missing"
        return Library(name, _stated_version(module), state)
    described = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    fake = _PLACEHOLDER_WORDS in described
    return Library(name, distribution.version, "placeholder" if fake else "installed")


def _importable(module: str) -> bool:
    try:
        return module in sys.modules or util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _stated_version(module: str) -> str | None:
    """Return the version that the source of a module states in `_version.py`; None if there is none."""
    with suppress(ImportError, ValueError, OSError):
        spec = util.find_spec(module)
        for folder in (spec and spec.submodule_search_locations) or ():
            text = (Path(folder) / "_version.py").read_text(encoding="utf-8")
            if found := re.search(r"""^__version__ = ["']([^"']+)""", text, re.MULTILINE):
                return found[1]
    return None

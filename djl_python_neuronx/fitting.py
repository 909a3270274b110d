"""What a folder was compiled for, against what is wanted of it now."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from types import MappingProxyType

from pydantic import ValidationError

from djl_python_neuronx import backends
from djl_python_neuronx.artifacts.formats import Artifact
from djl_python_neuronx.artifacts.layouts.folder import some, unreadable
from djl_python_neuronx.artifacts.layouts.own_output import MANIFEST, OwnOutput
from djl_python_neuronx.artifacts.store.digest import sha256_of_each
from djl_python_neuronx.artifacts.store.manifest import read as read_manifest
from djl_python_neuronx.config.device import DeviceInfo
from djl_python_neuronx.config.graph_facts import graph_options
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.resolve import Resolved
from djl_python_neuronx.config.sources import FILE_NAME as PROPERTIES
from djl_python_neuronx.errors import ArtifactError, ArtifactMismatchError

logger = logging.getLogger(__name__)

_WEIGHTS = re.compile(r"\.(safetensors|bin|pt)$|(^|/)pytorch_model\.bin/")


def proved(artifact: Artifact) -> Artifact:
    """The artifact, with the backend that an output of this package was made for.

    Of such an output the contents of all files but weights and `serving.properties` are compared with its manifest;
    weights can take minutes to read, and sizes were compared when the folder was detected. Links are followed, as a
    hub's cache has them.

    Raises:
        ArtifactAccessError: a file cannot be read.
        ArtifactError: the files that were changed.
    """
    if artifact.format != OwnOutput.name:
        return artifact
    manifest = read_manifest(artifact.path)
    expected = {
        name: entry.sha256
        for name, entry in manifest.files.items()
        if name != PROPERTIES and not _WEIGHTS.search(name)
    }
    try:
        actual = sha256_of_each(artifact.path / name for name in expected)
    except OSError as error:
        raise unreadable(artifact.path, error) from error
    pairs = zip(expected.items(), actual, strict=True)
    changed = sorted(name for (name, sha256), found in pairs if sha256 != found)
    if changed:
        msg = (
            f"the files in {artifact.path} are not those of its {MANIFEST}: changed {some(changed)}. "
            "Copy the folder again, or compile again."
        )
        raise ArtifactError(msg)
    loader = manifest.effective_options.get("model_loader")
    return replace(artifact, backend=loader) if isinstance(loader, str) else artifact


def with_recorded(resolved: Resolved, artifact: Artifact, loader: str) -> Resolved:
    """With the values that the artifact was compiled for, where nobody set another.

    Raises:
        ArtifactError: a recorded value is none of the option's.
    """
    if artifact.backend != loader:
        return resolved
    options = resolved.options
    taken = {
        name: value
        for name, value in artifact.compiled_for.items()
        if name in ServingOptions.model_fields and name not in resolved.origins
    }
    chosen = {name: getattr(options, name) for name in options.model_fields_set}
    try:
        filled = ServingOptions.model_validate({**chosen, **taken})
    except ValidationError as error:
        first = error.errors()[0]
        msg = (
            f"{artifact.path} records for {first['loc'][0]!s} what it cannot be: {first['msg']}. "
            "Copy or compile the model again."
        )
        raise ArtifactError(msg) from error
    origin = f"what {artifact.path} was compiled for"
    origins = {**resolved.origins, **dict.fromkeys(taken, origin)}
    return replace(resolved, options=filled, origins=MappingProxyType(origins))


def graph_target(machine: DeviceInfo, loader: str) -> str:
    """The kind of device that graphs are compiled for."""
    return "cpu" if loader == "cpu" else machine.family or machine.instance_type or "unknown"


def check_fit(
    artifact: Artifact, options: ServingOptions, loader: str, machine: DeviceInfo
) -> bool:
    """Whether what is compiled in the folder can be used.

    Raises:
        ArtifactMismatchError: it was compiled for other settings, and is not to be compiled again.
    """
    if artifact.backend != loader or not backends.compiles(loader):
        return False
    recorded: dict[str, object] = dict(artifact.compiled_for)
    wanted: dict[str, object] = dict(graph_options(options, loader))
    if artifact.format == OwnOutput.name:
        # It records all that there was: an option that it does not have was not set.
        recorded["target"] = read_manifest(artifact.path).facts.target
        wanted["target"] = graph_target(machine, loader)
        names = {*recorded, *wanted}
        recorded = {**dict.fromkeys(names), **recorded}
        wanted = {**dict.fromkeys(names), **wanted}
    else:
        # Foreign formats know one length, the longest.
        wanted["n_positions"] = options.max_model_len
    if "compiler_version" in recorded:
        wanted["compiler_version"] = backends.compiler(loader)[1]
    wanted = {name: tuple(v) if isinstance(v, list) else v for name, v in wanted.items()}
    try:
        replace(artifact, compiled_for=recorded).check_fit(wanted)
    except ArtifactMismatchError as error:
        if options.on_mismatch == "error":
            raise
        differing = sorted(error.differences)
        logger.warning("compiled_unused path=%s differs=%s", artifact.path, differing)
        return False
    return artifact.compiled is not None

"""Compare the settings a folder was compiled for with the current ones."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from pydantic import ValidationError

from djl_python_neuronx.artifacts.artifact import CUT, READS, WHOLE, Artifact
from djl_python_neuronx.artifacts.formats import OwnOutput
from djl_python_neuronx.artifacts.manifest import read as read_manifest
from djl_python_neuronx.artifacts.weights import Weights
from djl_python_neuronx.config.options import ServingOptions, names_where
from djl_python_neuronx.config.resolve import Resolved
from djl_python_neuronx.errors import ArtifactError, ArtifactMismatchError
from djl_python_neuronx.planning.machines import DeviceInfo
from djl_python_neuronx.planning.plan import graph_options

_FLAGS = "cc_flags"
_SURROUNDINGS = frozenset({"target", "library_version", "compiler_version"})
"""What graphs depend on beside options and flags."""
_NOT_PINNED = names_where(lambda marker: marker.output != "pinned")


def with_recorded(resolved: Resolved, artifact: Artifact, loader: str) -> Resolved:
    """Set unset options to the values that the artifact was compiled for.

    For an output of this package these are all its pinned options: if it is named by `model_id`, its
    `serving.properties` is not read, and it must behave the same.

    Raises:
        ArtifactError: a recorded value is not valid for its option.
    """
    if artifact.backend != loader:
        return resolved
    options = resolved.options
    recorded = dict(artifact.compiled_for)
    if artifact.format == OwnOutput.name:
        pinned = read_manifest(artifact.path).effective_options
        recorded |= {name: pinned[name] for name in pinned.keys() - _NOT_PINNED}
    taken = {
        name: value
        for name, value in recorded.items()
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
    """The device family that graphs are compiled for."""
    return "cpu" if loader == "cpu" else machine.family or machine.instance_type or "unknown"


def mismatch(
    artifact: Artifact, options: ServingOptions, loader: str, surroundings: Mapping[str, object]
) -> ArtifactMismatchError | None:
    """Compare what the folder was compiled or cut for with the options; for compiler flags see `flags_mismatch`.

    Returns None if both agree. `surroundings`: `target` (see `graph_target`), `library_version` and
    `compiler_version` of the machine that will serve. One that is left out is unknown and not compared.
    """
    recorded: dict[str, object] = dict(artifact.compiled_for)
    wanted: dict[str, object] = {**graph_options(options, loader), **surroundings}
    if artifact.format == OwnOutput.name:
        # It records all options: one that is missing was not set.
        recorded.pop(_FLAGS, None)
        recorded["target"] = read_manifest(artifact.path).facts.target
        names = {*recorded, *wanted} - (_SURROUNDINGS - surroundings.keys())
        recorded = {name: recorded.get(name) for name in names}
        wanted = {name: wanted.get(name) for name in names}
    else:
        # Foreign formats record one length, the longest.
        wanted["n_positions"] = options.max_model_len
    return _compare(artifact, recorded, wanted)


def weights_to_load(artifact: Artifact, loader: str, *, fits: bool) -> Weights:
    """Choose the weights that a backend loads. `fits`: the graphs are used (see `mismatch`).

    Raises:
        ArtifactNotFoundError: the folder has none.
        ArtifactError: the backend reads none of them, or they are cut for other settings.
    """
    kinds = READS.get(loader, WHOLE)
    # Weights that are cut were cut for the graphs beside them.
    recompiles = bool(artifact.compiled_for) and not fits and artifact.backend == loader
    return artifact.weights_for(loader, kinds - CUT if recompiles else kinds)


def compiled_here(folder: Path) -> bool:
    """Return whether this package compiled the graphs in a folder.

    The store's manifest shows it, which an output's folder of graphs has kept. The output's own manifest does not: an
    output can be made with the graphs of another program.
    """
    with suppress(ArtifactError):
        read_manifest(folder)
        return True
    return False


def flags_mismatch(artifact: Artifact, flags: Mapping[str, object]) -> ArtifactMismatchError | None:
    """Compare the compiler flags that an output of this package records with `flags` (see `plan.flag_facts`).

    Returns None if both agree. Other formats do not record theirs.
    """
    if artifact.format != OwnOutput.name:
        return None
    recorded = {_FLAGS: artifact.compiled_for.get(_FLAGS)}
    return _compare(artifact, recorded, {_FLAGS: None, **flags})


def _compare(
    artifact: Artifact, recorded: Mapping[str, object], wanted: Mapping[str, object]
) -> ArtifactMismatchError | None:
    wanted = {name: tuple(v) if isinstance(v, list) else v for name, v in wanted.items()}
    try:
        replace(artifact, compiled_for=recorded).check_fit(wanted)
    except ArtifactMismatchError as error:
        return error
    return None

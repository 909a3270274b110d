"""Comparison of the settings that a folder was compiled for with the current ones."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from pydantic import ValidationError

from djl_python_neuronx.artifacts.artifact import Artifact
from djl_python_neuronx.artifacts.compiled_formats import OptimumTnx
from djl_python_neuronx.artifacts.formats import OwnOutput
from djl_python_neuronx.artifacts.manifest import read as read_manifest
from djl_python_neuronx.config.keywords import OVERRIDE, RESERVED
from djl_python_neuronx.config.options import ServingOptions, names_where
from djl_python_neuronx.config.resolve import Resolved
from djl_python_neuronx.config.values import make_buckets
from djl_python_neuronx.errors import ArtifactError, ArtifactMismatchError
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.machines import DeviceInfo
from djl_python_neuronx.planning.nxdi.recorded import differences
from djl_python_neuronx.planning.plan import PACKAGE_VERSIONS, graph_options, library_arguments

FLAGS = "cc_flags"
"""The compiler flags of the environment, among what graphs depend on."""
SURROUNDINGS = (
    frozenset({"target", "library_version", "compiler_version", "draft_digest"}) | PACKAGE_VERSIONS
)
"""Facts that graphs depend on beside options and flags; unknown for a machine other than this one."""
_PINNED = names_where(lambda marker: marker.output == "pinned")


def fill_recorded(resolved: Resolved, artifact: Artifact, backend: str) -> Resolved:
    """Set unset options to the values that the artifact was compiled for.

    For an output of this package these are all its pinned options: if it is named by `model_id`, its
    `serving.properties` is not read, and it must behave the same.

    Raises:
        ArtifactError: a recorded value is not valid for its option.
    """
    if artifact.backend != backend:
        return resolved
    options = resolved.options
    recorded = dict(artifact.compiled_for)
    if artifact.manifest is not None:
        recorded |= artifact.manifest.effective_options
    taken = {
        name: value
        for name, value in recorded.items()
        if name in _PINNED and name not in resolved.origins
    }
    lengths, longest = recorded.get("n_positions"), options.n_positions
    if isinstance(lengths, (list, tuple)) and isinstance(longest, int) and longest in lengths[-1:]:
        taken["n_positions"] = lengths  # a length alone leaves the shorter graphs open
    chosen = {name: getattr(options, name) for name in options.model_fields_set}
    try:
        filled = ServingOptions.model_validate({**chosen, **taken})
    except ValidationError as error:
        first = error.errors()[0]
        msg = (
            f"{_compiled_place(artifact)} records for {first['loc'][0]!s} what it cannot be: {first['msg']}. "
            "Copy or compile the model again."
        )
        raise ArtifactError(msg) from error
    # Where settings are read these are refused; some of them name places.
    for keyword in (
        RESERVED.keys() & (filled.override_neuron_config or {}) if OVERRIDE in taken else ()
    ):
        msg = f"{_compiled_place(artifact)} records {keyword} in {OVERRIDE}: {RESERVED[keyword][1]}. Compile it again."
        raise ArtifactError(msg)
    origin = f"what {_compiled_place(artifact)} was compiled for"
    origins = {**resolved.origins, **dict.fromkeys(taken, origin)}
    return replace(resolved, options=filled, origins=MappingProxyType(origins))


def _compiled_place(artifact: Artifact) -> Path:
    """The folder of the graphs where an option may have named another than the model's."""
    return artifact.compiled if artifact.neuron_config and artifact.compiled else artifact.path


def graph_target(machine: DeviceInfo, backend: str) -> str:
    """The device family that graphs are compiled for."""
    return "cpu" if backend == "cpu" else machine.family or machine.instance_type or "unknown"


def find_mismatch(
    artifact: Artifact, case: Case, surroundings: Mapping[str, object]
) -> ArtifactMismatchError | None:
    """Compare what the folder was compiled or cut for with the options. Returns None if both agree.

    `surroundings`: compiler flags (see `plan.flag_facts`) and, of the machine that will serve, `target` (see
    `graph_target`), `compiler_version` and those of `plan.library_facts`. One that is left out is unknown and not
    compared, nor is a package's version that the folder does not record. Only an output of this package records flags.
    Of NxD Inference's own folders every keyword of `NeuronConfig` is compared, and no surroundings are recorded.
    """
    if artifact.neuron_config and artifact.format != OwnOutput.name:
        found = differences(artifact.neuron_config, library_arguments(case).neuron_config)
        return ArtifactMismatchError(found, str(artifact.compiled)) if found else None
    recorded: dict[str, object] = dict(artifact.compiled_for)
    wanted: dict[str, object] = {**graph_options(case.options, case.backend), **surroundings}
    if artifact.manifest is not None:
        # It records all options: one that is missing was not set.
        recorded["target"] = artifact.manifest.facts.target
        unknown = (SURROUNDINGS - surroundings.keys()) | (PACKAGE_VERSIONS - recorded.keys())
        names = {*recorded, *wanted} - unknown
        recorded = {name: recorded.get(name) for name in names}
        wanted = {name: wanted.get(name) for name in names}
    else:
        longest = case.options.max_model_len or 1
        if isinstance(recorded.get("n_positions"), tuple):
            wanted["n_positions"] = case.options.token_buckets or make_buckets(longest)
        else:
            wanted["n_positions"] = longest  # all that most formats record
        if artifact.format == OptimumTnx.name and recorded:
            # All that it sets is known.
            recorded = dict.fromkeys(wanted.keys() - surroundings.keys()) | recorded
    wanted = {name: tuple(v) if isinstance(v, list) else v for name, v in wanted.items()}
    try:
        replace(artifact, compiled_for=recorded).check_fit(wanted)
    except ArtifactMismatchError as error:
        return error
    return None


def has_own_graphs(folder: Path) -> bool:
    """Return whether this package compiled the graphs in a folder.

    The store's manifest shows it, which an output's folder of graphs has kept. The output's own manifest does not: an
    output can be made with the graphs of another program.
    """
    with suppress(ArtifactError):
        read_manifest(folder)
        return True
    return False

"""Weights of a compiled output: whole, or cut for each core."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from djl_python_neuronx.artifacts import manifest as manifests
from djl_python_neuronx.artifacts.artifact import CUT
from djl_python_neuronx.artifacts.compiled_formats import LmiAot, NxdiBeside
from djl_python_neuronx.artifacts.formats import OwnOutput
from djl_python_neuronx.artifacts.output import WeightsInOutput
from djl_python_neuronx.errors import IncompatibleOptionsError
from djl_python_neuronx.loading.compile_process import Forecast, compile_guarded
from djl_python_neuronx.loading.compile_risks import explained
from djl_python_neuronx.loading.compiled import Compiled
from djl_python_neuronx.loading.prepared import Prepared
from djl_python_neuronx.planning.plan import stored_findings


def usual_weights(prepared: Prepared) -> WeightsInOutput:
    """NxD Inference divides whole weights again at each start, on the host and for minutes."""
    divided = prepared.backend == "nxdi" and prepared.options.save_sharded_checkpoint is not False
    return "presharded" if divided else "link"


def check_presharded(prepared: Prepared) -> None:
    """Check that the backend reads weights that are cut for each core.

    Raises:
        IncompatibleOptionsError: it does not read them, or not with these settings.
    """
    found = stored_findings(replace(prepared.case, presharded=True))
    problem = next((finding.problem for finding in found if finding.level == "error"), None)
    if CUT.isdisjoint(prepared.case.weights):
        problem = f"the {prepared.backend} backend reads no weights that are cut for each core"
    elif prepared.backend == "tnx" and not prepared.options.on_device_embedding:
        problem = "override_neuron_config sets on_device_embedding=false; leave it out"
    if problem is not None:
        msg = f"{problem} (--weights presharded), or name link, copy or none"
        raise IncompatibleOptionsError(msg)


def preshard(prepared: Prepared, compiled: Compiled, folder: Path) -> None:
    """Write the weights of a model as each core takes them into a folder with its graphs."""
    with explained(prepared):
        compile_guarded(
            prepared.backend,
            replace(compiled.plan, presharded=True),
            folder,
            environ=prepared.environ,
            neff_cache=None,
            forecast=Forecast(0, 0.0),
        )
    # A library may rewrite its record of the compile. The output's own manifest lists the weights.
    manifest = manifests.read(folder)
    manifests.write(folder, manifest.refreshed(folder))


def layout(prepared: Prepared, *, cut: bool) -> str:
    """The format that the model had before this package compiled it, or that of cut weights beside the graphs."""
    artifact = prepared.artifact
    if prepared.backend == "nxdi" and (cut or artifact.neuron_config):
        return NxdiBeside.name
    if cut:
        return LmiAot.name
    if artifact.format == OwnOutput.name:
        return manifests.read(artifact.path).layout or "huggingface"
    return artifact.format

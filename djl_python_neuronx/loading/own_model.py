"""Code of a model, in the place of its library's own class: found and hashed here, run by the backend alone."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from djl_python_neuronx.artifacts import fetch, model_code
from djl_python_neuronx.artifacts.output import CODE
from djl_python_neuronx.config.resolve import Resolved
from djl_python_neuronx.errors import ArtifactError, ArtifactNotFoundError
from djl_python_neuronx.loading.find import Model
from djl_python_neuronx.loading.mismatch import has_own_graphs
from djl_python_neuronx.loading.situation import Situation
from djl_python_neuronx.planning.nxdi.contrib import Code

OPTION = "nxdi_model_code"
DIGEST = "nxdi_code_sha256"
"""The digest among the facts that graphs depend on."""


def with_code(
    model: Model, settings: Resolved, origins: Mapping[str, str], situation: Situation
) -> Model:
    """Return the model with the code that the settings name, if a backend may run it.

    A place without an origin in `origins` is what the artifact records, and relative to it.

    Raises:
        ArtifactError: the code cannot be fetched or read, or lacks the class that is named.
    """
    options, artifact = settings.options, model.artifact
    name = options.nxdi_model_code
    if name is None or options.model_loader in {"cpu", "sim", "tnx"}:
        return model
    base = options.model_dir if OPTION in origins else None
    folder, digest = fetch.local_folder(name, base or artifact.path), ""
    if folder is None and not model.whole and Path(name) == Path(CODE):
        digest = str(artifact.compiled_for.get(DIGEST, ""))  # in the remote folder of an output
    elif folder is None:
        folder = _fetched(name, settings, situation)
    if folder is not None:
        read, named = model_code.read(folder), options.nxdi_model_class
        if named and not read.defines(named):
            msg = f"the code in {folder} has no class {named}; correct option.nxdi_model_class, or name other code"
            raise ArtifactError(msg)
        digest = read.digest
    place = Path(CODE) if folder is None else folder.absolute()
    compiled = artifact.compiled if artifact.backend == "nxdi" else None
    is_foreign = compiled is not None and not has_own_graphs(compiled)
    code = Code(place, digest, options.nxdi_model_class or "", is_foreign)
    return replace(model, code=code)


def _fetched(name: str, settings: Resolved, situation: Situation) -> Path | None:
    """Return the folder of code that is not here; None without trust and in a dry run, which fetch nothing.

    Raises:
        ArtifactError: it cannot be fetched, or the name is that of a folder.
    """
    origin = f"option.{OPTION}, {settings.origins.get(OPTION, 'default')}"
    is_uri = fetch.uri_scheme(name) is not None
    place, at, revision = (name, "", "") if is_uri else name.partition("@")
    # Not a name without an owner, which may be that of a folder that is missing.
    if not is_uri and not ("/" in name and fetch.is_hub_id(place)):
        msg = (
            f"there is no folder {name!r} (from {origin}); expected one with {model_code.SOURCE}/modeling_*.py, "
            f"absolute or relative to the model folder. Put the code there (an output of compile has it in {CODE}), or "
            f"name another place with option.{OPTION}"
        )
        raise ArtifactNotFoundError(msg)
    if situation.is_dry or not settings.options.trust_remote_code:
        return None
    how = {"revision": revision} if at else {}
    return situation.fetch(place, origin, selection=model_code.PYTHON, **how)


def code_facts(code: Code | None) -> dict[str, str]:
    """Return the facts about a model's code that its graphs depend on: its digest, and how it is loaded and mended."""
    if code is None or not code.digest:
        return {}
    row, fix = code.row, ""
    if row.fix:
        from djl_python_neuronx.backends.nxdi.contrib import fixes  # with all of the backend

        fix = inspect.getsource(fixes)
    way = [row.class_name, row.made, dict(row.values), row.unset, row.fix, fix]
    recipe = json.dumps(way, sort_keys=True)
    return {
        DIGEST: code.digest,
        "nxdi_code_recipe": hashlib.sha256(recipe.encode()).hexdigest(),
    }

"""Code of a model, in the place of its library's own class: found and hashed here, run by the backend alone."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from djl_python_neuronx.artifacts import fetch, model_code
from djl_python_neuronx.backends.nxdi.contrib import fixes
from djl_python_neuronx.config.resolve import Resolved
from djl_python_neuronx.loading.find import Model
from djl_python_neuronx.loading.situation import Situation
from djl_python_neuronx.planning.nxdi.contrib import Code

OPTION = "nxdi_model_code"
DIGEST = "nxdi_code_sha256"
"""The digest among the facts that graphs depend on."""
OUTPUT = "model_code"
"""The folder of the code in an output of a compile."""


def with_code(
    model: Model, settings: Resolved, origins: Mapping[str, str], situation: Situation
) -> Model:
    """Return the model with the code that the settings name, if a backend may run it.

    A place without an origin in `origins` is what the artifact records, and relative to it. Without trust, and in a dry
    run, nothing is fetched: then the digest is unknown, but for an output that records it.

    Raises:
        ArtifactError: the code cannot be fetched or read.
    """
    options, artifact = settings.options, model.artifact
    name, class_name = options.nxdi_model_code, options.nxdi_model_class or ""
    if name is None or options.model_loader in {"cpu", "sim", "tnx"}:
        return model
    folder = fetch.local_folder(
        name, (options.model_dir if OPTION in origins else None) or artifact.path
    )
    if folder is None and (situation.is_dry or not options.trust_remote_code):
        recorded = artifact.compiled_for.get(DIGEST, "") if name == OUTPUT else ""
        return replace(model, code=Code(Path(name), str(recorded), class_name))
    if folder is None:
        place, at, revision = name.partition("@")
        origin = f"option.{OPTION}, {settings.origins.get(OPTION, 'default')}"
        how = {"revision": revision} if at else {}
        folder = situation.fetch(place, origin, selection=model_code.PYTHON, **how)
    digest = model_code.read(folder).digest
    return replace(model, code=Code(folder.absolute(), digest, class_name))


def code_facts(code: Code | None) -> dict[str, str]:
    """Return the facts about a model's code that its graphs depend on: its digest, and how it is loaded and mended."""
    if code is None or not code.digest:
        return {}
    row, recipe = code.row, ""
    if row is not None:
        fix = inspect.getsource(fixes) if row.fix else ""
        recipe = json.dumps([row.made, dict(row.values), row.unset, row.fix, fix], sort_keys=True)
    return {
        DIGEST: code.digest,
        "nxdi_code_recipe": hashlib.sha256(recipe.encode()).hexdigest(),
    }

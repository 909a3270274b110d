"""Find the model that settings name, the graphs beside it, and its draft model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from djl_python_neuronx.artifacts import fetch, formats
from djl_python_neuronx.artifacts.artifact import Artifact
from djl_python_neuronx.artifacts.compiled_formats import (
    graphs_in,
    saved_names,
    saved_place,
    with_graphs,
)
from djl_python_neuronx.artifacts.folder import (
    CONFIGURATION,
    EVERYTHING,
    SERVING,
    parse_object,
    read_json,
)
from djl_python_neuronx.artifacts.manifest import FILE_NAME as MANIFEST
from djl_python_neuronx.artifacts.quantised import plain_config, read_scheme
from djl_python_neuronx.config import sources
from djl_python_neuronx.config.resolve import Resolved
from djl_python_neuronx.config.values import join_words
from djl_python_neuronx.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    UnknownFormatError,
)
from djl_python_neuronx.loading.dequantised import check_headers, dequantise, place_of
from djl_python_neuronx.loading.mismatch import has_own_graphs
from djl_python_neuronx.loading.situation import Situation
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.nxdi.contrib import Code
from djl_python_neuronx.planning.rules import OPEN

DRAFT = "speculative_draft_model"
"""The option that names the draft model."""


@dataclass(frozen=True)
class Model:
    """A model that was found; see `Prepared`."""

    name: str
    source: str
    artifact: Artifact
    whole: bool = True
    """False: config.json only."""
    code: Code | None = None
    """Code in the place of the library's own class."""

    @cached_property
    def facts(self) -> ModelFacts:
        """The facts of its configuration."""
        facts = ModelFacts.from_config(self.artifact.config, self.artifact.dtype)
        return facts if self.code is None else facts.estimated()


def find_model(settings: Resolved, situation: Situation) -> Model | None:
    """Find the model, with the graphs in `compiled_graph_path`. Returns None if nothing names a model.

    Raises:
        ServingError: it cannot be read; in a dry run only without config.json.
    """
    options = settings.options
    if options.model_id is not None:
        model = find_named(options.model_id, options.model_dir, "model_id", settings, situation)
    elif options.model_dir is None or "model_id" in settings.refused:
        return None
    else:
        default = sources.MODEL_DIR
        if options.model_dir == default and not sources.try_path(default.exists, failed=True):
            raise no_model_named()
        try:
            name = str(options.model_dir)
            model = _detect(options.model_dir, name, "the model argument", settings, situation)
        except UnknownFormatError as error:
            msg = (
                f"no model: set option.model_id to a Hugging Face id, a folder or s3://bucket/key, or give the "
                f"folder of a model. Without it, {error}"
            )
            raise UnknownFormatError(msg) from error
    return _with_named_graphs(model, settings, situation)


def no_model_named() -> ArtifactNotFoundError:
    """The error without a target, SageMaker's folder and an option that names a model."""
    msg = (
        f"there is no {str(sources.MODEL_DIR)!r}, and neither variables nor command line name a model; expected a "
        "target, or HF_MODEL_ID, or OPTION_MODEL_ID"
    )
    return ArtifactNotFoundError(msg)


def find_named(
    name: str,
    base: Path | None,
    option: str,
    settings: Resolved,
    situation: Situation,
    *,
    weights_needed: bool = False,
) -> Model:
    """Find the model that an option names, relative to `base`.

    Raises:
        ServingError: it cannot be read; in a dry run only without config.json, or if `weights_needed`.
    """
    origin = f"option.{option}, {settings.origins.get(option, 'default')}"
    revision = settings.options.revision if option == "model_id" else None
    if situation.is_dry:
        folder = fetch.local_folder(name, base)
    else:
        selection = CONFIGURATION if settings.options.simulated else SERVING
        folder = situation.fetch(
            name, origin, model_dir=base, revision=revision, selection=selection
        )
    if folder is not None:
        return _detect(folder, name, origin, settings, situation, weights_needed=weights_needed)
    config = fetch.fetch_config(name, revision, situation.environ, origin=origin)
    if not isinstance(config.get("model_type"), str):
        msg = f"{fetch.CONFIG} of {name!r} has no model_type; expected one such as 'llama'"
        raise ArtifactError(msg)
    scheme, manifest = fetch.uri_scheme(name), b""
    if scheme:
        manifest = fetch.read_file(name, MANIFEST, situation.environ, origin=origin) or b""
    recorded = parse_object(manifest, f"{name}/{MANIFEST}") if manifest else {}
    artifact = formats.of_remote(Path(name), config, recorded)
    source = f"{fetch.CONFIG} from {scheme or 'the hub'}"
    return _checked(Model(name, source, artifact, whole=False), settings, situation)


def _detect(
    folder: Path,
    name: str,
    origin: str,
    settings: Resolved,
    situation: Situation,
    *,
    weights_needed: bool = False,
) -> Model:
    if settings.options.simulated:
        artifact = formats.read_configuration(folder, origin=origin)
        return _checked(Model(name, str(folder), artifact), settings, situation)
    try:
        artifact = formats.detect(folder, origin=origin)
        return _checked(Model(name, str(folder), artifact), settings, situation)
    except ArtifactNotFoundError as error:
        if not situation.is_dry or not formats.is_configuration(folder):
            raise
        if weights_needed:
            situation.problems.add_error(error)
        else:
            situation.problems.add("warning", f"{error} Only the plan is checked.")
        path = folder / fetch.CONFIG
        artifact = formats.of_remote(folder, read_json(path), {})
        return _checked(Model(name, str(path), artifact, whole=False), settings, situation)


def _checked(model: Model, settings: Resolved, situation: Situation) -> Model:
    """Return the model, dequantised if that is set.

    Raises:
        ArtifactError: its config.json lacks a size that its architecture has, or has a wrong one; or it cannot be
            dequantised.
    """
    if settings.options.dequantize:
        model = _dequantised(model, settings, situation)
    if missing := model.facts.missing_sizes():
        msg = (
            f"config.json of {model.name} lacks {join_words(missing)} (or other names that "
            f"{model.facts.model_type} has for them); the libraries would assume another model's. Copy or download "
            "the file again"
        )
        raise ArtifactError(msg)
    return model


def _dequantised(model: Model, settings: Resolved, situation: Situation) -> Model:
    """Return the model with the checkpoint that a start makes of a quantised one, or in a dry run with its facts."""
    artifact = model.artifact
    if artifact.backend is not None or not artifact.config.get("quantization_config"):
        return model
    read_scheme(artifact.config, artifact.path)
    if model.whole and not settings.options.simulated:
        situation.progress.stage("reading the quantised weights")
        place = place_of(artifact, situation.environ)
        if not situation.is_dry:
            situation.progress.stage("dequantising the weights")
            dequantise(artifact.path, place, situation.environ)
        if place.exists():
            return replace(model, artifact=formats.detect(place, origin="option.dequantize"))
        check_headers(artifact)
        note = f"a start writes the model's weights in bfloat16 to {place}"
        situation.problems.add("note", note, ("dequantize",))
    weights = tuple(replace(one, dtype="bfloat16") for one in artifact.weights)
    plain = replace(artifact, config=plain_config(artifact.config), weights=weights)
    return replace(model, artifact=plain)


def _with_named_graphs(model: Model, settings: Resolved, situation: Situation) -> Model:
    """Return the model, with the graphs that NxD Inference has saved in `compiled_graph_path`, if it has.

    Those that this package has stored there have a manifest, which `loading.compiled` reads.

    Raises:
        ArtifactError: they cannot be fetched or read, or are of another model.
    """
    place = settings.options.place("compiled_graph_path")
    if place is None or settings.options.model_loader not in {*OPEN, "nxdi"}:
        return model
    if not fetch.uri_scheme(place):
        found = saved_place(place, saved_names(Path(place)))
    elif situation.is_dry:
        return model
    else:
        origin = f"option.compiled_graph_path, {settings.origins.get('compiled_graph_path')}"
        found = saved_place(place, fetch.list_names(place, situation.environ, origin=origin))
        found = found and str(situation.fetch(found, origin, selection=EVERYTHING))
    folder = Path(found or place)
    if found is None or has_own_graphs(folder) or graphs_in(folder) != "nxdi":
        return model
    return replace(model, artifact=with_graphs(model.artifact, folder))

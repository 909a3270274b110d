"""Targets of a command line: a folder, a file with its options, or a model that only has a name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from djl_python_neuronx.artifacts import fetch
from djl_python_neuronx.config import sources
from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.config.resolve import Resolved, read_file
from djl_python_neuronx.errors import ArtifactError, ArtifactNotFoundError, ConfigError
from djl_python_neuronx.loading.find import no_model_named
from djl_python_neuronx.planning.plan import examine


class Target(NamedTuple):
    """The settings of a model that a command line names."""

    folder: Path | None
    """The model folder; None: the model is elsewhere."""
    overrides: Mapping[str, str] = MappingProxyType({})
    """The option that names a model elsewhere."""
    file: str | None = None
    """The properties file in the place of the folder's `serving.properties`."""
    content: bytes | None = None
    """Its content, if it is not on this machine."""


def find_target(target: str, environ: Mapping[str, str]) -> Target:
    """Find a model folder, a properties file as if it lay beside the model, or a model elsewhere.

    The `serving.properties` of a folder in S3 counts as that of a folder here. A name that is no folder and names no
    model elsewhere is taken for a folder.

    Raises:
        ArtifactError: a file that is no properties file, or a folder in S3 that cannot be read.
    """
    # Not pathlib, which raises for the home of an unknown user, for a NUL and for a name that is too long.
    name = os.path.expanduser(target)  # noqa: PTH111
    path = Path(name)
    if os.path.isfile(name):  # noqa: PTH113
        if path.suffix != ".properties":
            msg = f"{name!r} is not a .properties file; expected one, or a model folder"
            raise ArtifactError(msg)
        return Target(path.parent, file=name)
    if os.path.isdir(name) or name.endswith(".properties"):  # noqa: PTH112
        return Target(path)
    if fetch.uri_scheme(target) == "s3":
        file = f"{target.rstrip('/')}/{sources.FILE_NAME}"
        content = fetch.read_file(target, sources.FILE_NAME, environ, origin="the model argument")
        if content is None:
            return Target(None, {"model_id": target})
        model = "."
        with suppress(ConfigError):  # reported where the settings are read
            settings = sources.parse_properties(content, file)
            named = (str(one.value).strip() for one in settings if one.name == "model_id")
            model = next(filter(None, named), model)
        if model.startswith("."):
            return Target(None, {"model_id": sources.inside(target, model)}, file, content)
        return Target(None, {}, file, content)
    if fetch.uri_scheme(target) or fetch.is_hub_id(target):
        return Target(None, {"model_id": target})
    return Target(path)


def read_target(
    target: str | None,
    environ: Mapping[str, str],
    overrides: Mapping[str, str],
    problems: Problems,
    *,
    embedded: bool = False,
) -> tuple[Resolved, Sequence[sources.Setting]]:
    """Read the options of a target; None: of the default folder, or of the model that variables or `overrides` name.

    Also returns the settings of the file alone. `embedded`: see `read_settings`.
    """
    found = Target(sources.MODEL_DIR) if target is None else find_target(target, environ)
    folder = found.folder
    if folder is not None and not sources.try_path(folder.is_dir, failed=False):
        if target is not None:
            msg = (
                f"there is no {target!r}; expected a model folder, a .properties file, a Hugging Face id "
                "('owner/name') or s3://bucket/folder"
            )
            raise ArtifactNotFoundError(msg)
        folder = None
    file, content = found.file, found.content
    overrides = {**found.overrides, **overrides}
    settings = examine(
        None,
        folder,
        environ,
        problems,
        overrides,
        file=file,
        content=content,
        embedded=embedded,
    )
    in_file = read_file(folder, file, content, problems)
    if folder is None and settings.options.model_id is None:
        raise no_model_named()
    return settings, in_file

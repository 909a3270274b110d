"""Targets of a command line: a folder, a file with its options, or a model that only has a name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from djl_python_neuronx.artifacts import fetch
from djl_python_neuronx.config import sources
from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.config.resolve import Resolved
from djl_python_neuronx.errors import ArtifactError, ArtifactNotFoundError
from djl_python_neuronx.planning.plan import examine


def folder_or_id(target: str) -> tuple[Path | None, dict[str, str]]:
    """The model folder, or the option for a model elsewhere. As a `Path`, a URI would lose a slash.

    Raises:
        ArtifactNotFoundError: it is a file.
    """
    folder = fetch.local_folder(target, None)
    if folder is None and (fetch.uri_scheme(target) or fetch.is_hub_id(target)):
        return None, {"model_id": target}
    return folder or Path(target), {}


def read_target(
    target: str | None,
    environ: Mapping[str, str],
    overrides: Mapping[str, str],
    problems: Problems,
) -> tuple[Resolved, Sequence[sources.Setting]]:
    """Read the options of a folder, of a file as if it lay beside the model, or of a model that only has a name.

    Also returns the settings of the file alone.
    """
    # Not pathlib, which raises for the home of an unknown user, for a NUL and for a name that is too long.
    name = os.path.expanduser(str(sources.MODEL_DIR) if target is None else target)  # noqa: PTH111
    path = Path(name)
    file = path if os.path.isfile(name) else None  # noqa: PTH113
    if file and file.suffix != ".properties":
        msg = f"{name!r} is not a .properties file; expected one, or a model folder"
        raise ArtifactError(msg)
    folder = path.parent if file else path if os.path.isdir(name) else None  # noqa: PTH112
    if folder is None and target is not None:
        is_hub_model = fetch.is_hub_id(target) and not target.endswith(".properties")
        if not is_hub_model and not fetch.uri_scheme(target):
            msg = (
                f"there is no {target!r}; expected a model folder, a .properties file, a Hugging Face id "
                "('owner/name') or s3://bucket/folder"
            )
            raise ArtifactNotFoundError(msg)
        overrides = {"model_id": target, **overrides}
    settings = examine(None, folder, environ, problems, overrides, file=file)
    in_file: Sequence[sources.Setting] = ()
    with problems.catch():
        in_file = sources.from_properties(file) if file else sources.from_file(folder or path)
    if folder is None and settings.options.model_id is None:
        msg = (
            f"there is no {str(path)!r}, and neither variables nor command line name a model; expected a target, or "
            "HF_MODEL_ID, or OPTION_MODEL_ID"
        )
        raise ArtifactNotFoundError(msg)
    return settings, in_file

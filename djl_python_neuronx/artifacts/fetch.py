"""Remote models (Hugging Face ids and URIs): their configuration alone, or a local copy of them."""

from __future__ import annotations

import logging
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from djl_python_neuronx.artifacts.cache import Progress
from djl_python_neuronx.artifacts.folder import (
    SERVING,
    Selection,
    parse_object,
    read_json,
)
from djl_python_neuronx.errors import (
    ArtifactAccessError,
    ArtifactError,
    ArtifactNotFoundError,
    ServingError,
)

logger = logging.getLogger(__name__)

CONFIG = "config.json"

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# Source: huggingface_hub, utils/_validators.py: the form of a Hub id.
_HUB_ID = re.compile(r"(?!.*(--|\.\.))(?!.*\.git$)[\w][\w.-]*(/[\w][\w.-]*)?", re.ASCII)
_FOLDER = "djl-neuronx"


def s3_module(uri: str) -> Any:  # noqa: ANN401  (a module)
    """The module `s3`, which `uri` needs.

    Raises:
        ArtifactAccessError: a package of the extra `s3` is missing.
    """
    try:
        from djl_python_neuronx.artifacts import s3
    except ImportError as error:
        msg = f"{uri} needs {error.name}, which is not installed: pip install 'djl-python-neuronx[s3]'"
        raise ArtifactAccessError(msg) from error
    return s3


def uri_scheme(model_id: str) -> str | None:
    """``s3`` for ``s3://bucket/key``; None if `model_id` is not a URI."""
    found = _URI.match(model_id)
    return found[1].lower() if found else None


def is_hub_id(model_id: str) -> bool:
    """True if `model_id` has the form of a Hugging Face model id; the model need not exist."""
    return len(model_id) <= 96 and _HUB_ID.fullmatch(model_id) is not None


def local_folder(model_id: str | None, model_dir: Path | None) -> Path | None:
    """The local folder `model_id`, relative to `model_dir` or else to the working directory.

    Without `model_id` it is `model_dir` itself. Returns None if `model_id` is not a local folder.

    Raises:
        ArtifactNotFoundError: it is a file.
    """
    if model_id is None:
        return model_dir
    if uri_scheme(model_id):
        return None
    try:
        path = Path(model_id).expanduser()
        candidates = [path] if model_dir is None else [model_dir / path, path]
        folder = next((folder for folder in candidates if folder.is_dir()), None)
        file = next((path for path in candidates if path.is_file()), None)
    except (OSError, RuntimeError, ValueError):  # a name too long, no home, a NUL in it
        return None
    if folder is None and file is not None:
        msg = f"the model {model_id!r} is a file; name the folder that holds it"
        raise ArtifactNotFoundError(msg)
    return folder


def download_root(environ: Mapping[str, str]) -> Path:
    """The folder for downloads and, where there is no better place, compiled files.

    Below `SERVING_DOWNLOAD_DIR`, `DJL_CACHE_DIR` (both DJL Serving's own) or `XDG_CACHE_HOME`, else `~/.cache`; without
    a home the system's folder for temporary files.
    """
    for name in ("SERVING_DOWNLOAD_DIR", "DJL_CACHE_DIR", "XDG_CACHE_HOME"):
        if named := environ.get(name, "").strip():
            return Path(named).expanduser().absolute() / _FOLDER
    try:
        return Path.home() / ".cache" / _FOLDER
    except RuntimeError:
        return Path(tempfile.gettempdir()) / _FOLDER


def fetch(
    model_id: str,
    *,
    environ: Mapping[str, str],
    root: Path,
    model_dir: Path | None = None,
    revision: str | None = None,
    selection: Selection = SERVING,
    progress: Progress | None = None,
    origin: str = "option.model_id",
) -> Path:
    """The local folder of a model: a local one as it is, one of the Hub or of a URI after a download.

    A download is shared by all processes, resumed after an interruption, and repeated only if the remote changed. The
    Hub's lie in its own cache, others below `root`. `selection` chooses the files of a download.

    Raises:
        ArtifactNotFoundError: no such folder or model.
        ArtifactAccessError: it may not be read, cannot be reached, or does not fit on the disk.
        ArtifactError: the id is malformed, a package is missing, or keys of the remote leave the folder.
    """
    folder = local_folder(model_id, model_dir)
    if folder is not None:
        return folder
    environ, remote = _stripped(environ), _remote(model_id, origin)
    started_s = time.monotonic()
    with _no_secrets(model_id):
        if remote is not None:
            folder = remote.fetch(model_id, root, environ, selection=selection, progress=progress)
        else:
            with _quiet_hub() if progress is None else nullcontext():
                from djl_python_neuronx.artifacts import hub

                folder = hub.fetch(
                    model_id,
                    revision=revision,
                    selection=selection,
                    environ=environ,
                    origin=origin,
                )
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    logger.info(
        "fetched uri=%s files=%d bytes=%d seconds=%.2f folder=%s",
        model_id, len(sizes), sum(sizes), time.monotonic() - started_s, folder,
    )  # fmt: skip
    return folder


def list_names(uri: str, environ: Mapping[str, str], *, origin: str) -> Sequence[str]:
    """The files of the folder that a URI names; empty if there are none.

    Raises:
        ArtifactError: the scheme is unknown, or the folder cannot be listed.
    """
    remote = _remote(uri, origin)
    if remote is None:
        msg = f"{uri!r} (from {origin}) is not a URI; expected one such as s3://bucket/folder. Correct {origin}"
        raise ArtifactError(msg)
    with _no_secrets(uri):
        names: Sequence[str] = remote.list_names(uri, _stripped(environ))
    return names


def read_file(
    uri: str, name: str, environ: Mapping[str, str], *, origin: str = "option.model_id"
) -> bytes | None:
    """The content of a small file in the folder that a URI names; None if there is no such file or folder.

    Raises:
        ArtifactAccessError: it may not be read, or cannot be reached.
        ArtifactError: the scheme is unknown, or the file is large.
    """
    remote = _remote(uri, origin)
    with suppress(ArtifactNotFoundError), _no_secrets(uri):
        content: bytes = remote.read(uri, name, _stripped(environ))
        return content
    return None


def fetch_config(
    model_id: str,
    revision: str | None = None,
    environ: Mapping[str, str] = MappingProxyType({}),
    *,
    origin: str = "option.model_id",
) -> dict[str, Any]:
    """The content of config.json of a Hugging Face id or of the folder that a URI names; downloads nothing else.

    `environ` holds the Hub's variables (see `HubSettings`) and `AWS_*`; the libraries find the rest themselves (a
    login's token, `~/.aws`, the instance's role).

    Raises:
        ArtifactNotFoundError: no such model, or no config.json in it.
        ArtifactAccessError: it may not be read, or cannot be reached.
        ArtifactError: the id is malformed, a package is missing, or the content is malformed.
    """
    environ, remote = _stripped(environ), _remote(model_id, origin)
    if remote is None:
        with _no_secrets(model_id):
            from djl_python_neuronx.artifacts import hub

            path = hub.fetch_config(model_id, revision, environ, origin=origin)
        return read_json(path)
    try:
        with _no_secrets(model_id):
            content = remote.read(model_id, CONFIG, environ)
    except ArtifactNotFoundError as error:
        msg = f"there is no {CONFIG} in {model_id}; expected a model folder. Correct {origin}. {error}"
        raise ArtifactNotFoundError(msg) from error
    return parse_object(content, f"{model_id.rstrip('/')}/{CONFIG}")


def _remote(model_id: str, origin: str) -> Any:  # noqa: ANN401  (a module)
    """The module `s3` for a URI of S3, or None for a Hugging Face id.

    Raises:
        ArtifactNotFoundError: it is neither.
        ArtifactError: the scheme is unknown.
    """
    scheme = uri_scheme(model_id)
    if scheme == "s3":
        return s3_module(model_id)
    if scheme is not None:
        msg = (
            f"{model_id!r} (from {origin}) cannot be read: the scheme {scheme}:// is unknown. "
            "Give a local folder, a Hugging Face id or an s3:// URI"
        )
        raise ArtifactError(msg)
    if not is_hub_id(model_id):
        msg = (
            f"the model {model_id!r} is neither a local folder nor a Hugging Face id; expected a folder that exists, "
            f"'owner/name' or s3://bucket/key. Correct {origin}"
        )
        raise ArtifactNotFoundError(msg)
    return None


def _stripped(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the newlines that files and Kubernetes secrets append to values."""
    return {name: value.strip() for name, value in environ.items()}


@contextmanager
def _no_secrets(uri: str) -> Iterator[None]:
    """Translate every foreign error that was not translated where it arose; names only its class.

    Raises:
        ArtifactAccessError: the text of a foreign error may hold headers, and those hold tokens.
    """
    try:
        yield
    except ServingError:
        raise
    except Exception as error:  # noqa: BLE001  (what hostile variables cause in the libraries has no common base)
        msg = (
            f"{uri} cannot be read ({type(error).__name__}). "
            "Check the network, HF_ENDPOINT and HF_TOKEN, or the AWS_* variables"
        )
        raise ArtifactAccessError(msg) from None


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Hide the Hub's own progress bars, which are for terminals."""
    from huggingface_hub import utils

    hub: Any = utils  # does not declare what it exports
    if hub.are_progress_bars_disabled():
        yield
        return
    hub.disable_progress_bars()
    try:
        yield
    finally:
        hub.enable_progress_bars()

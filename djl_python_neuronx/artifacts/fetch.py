"""Models that lie elsewhere, Hugging Face ids and URIs: their configuration alone, or a local copy of them."""

from __future__ import annotations

import logging
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from djl_python_neuronx.artifacts.cache import Progress
from djl_python_neuronx.artifacts.folder import EVERYTHING, SERVING, parse_object, read_json
from djl_python_neuronx.errors import (
    ArtifactAccessError,
    ArtifactError,
    ArtifactNotFoundError,
    ServingError,
)

if TYPE_CHECKING:
    from djl_python_neuronx.artifacts.s3 import Settings

logger = logging.getLogger(__name__)

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class Remote(Protocol):
    """What can be had from one kind of URI; `uri` names a folder, `environ` holds the settings of its library."""

    def read(self, uri: str, name: str, environ: Mapping[str, str]) -> bytes:
        """The content of one small file of the folder.

        Raises:
            ArtifactError: it is not there, cannot be read, or a package is missing.
        """

    def names(self, uri: str, environ: Mapping[str, str]) -> Sequence[str]:
        """The files of the folder, with `/`; none if nothing is there.

        Raises:
            ArtifactError: it cannot be listed, or a package is missing.
        """

    def fetch(
        self,
        uri: str,
        root: Path,
        environ: Mapping[str, str],
        *,
        everything: bool,
        progress: Progress | None,
    ) -> Path:
        """A local copy of the folder, below `root`; `everything` or what a model needs.

        Raises:
            ArtifactError: it cannot be had, or a package is missing.
        """


_Class = TypeVar("_Class", bound=Callable[[], Remote])
_REMOTES: dict[str, Callable[[], Remote]] = {}


def scheme(name: str) -> Callable[[_Class], _Class]:
    """Make a class the one for ``name://`` URIs."""

    def register(remote: _Class) -> _Class:
        _REMOTES[name] = remote
        return remote

    return register


def uri_scheme(model_id: str) -> str | None:
    """``s3`` for ``s3://bucket/key``, None for everything that is no URI."""
    found = _URI.match(model_id)
    return found[1].lower() if found else None


def remote_of(model_id: str, origin: str) -> Remote | None:
    """What reads a URI; None: it is none. `origin` is what named it.

    Raises:
        ArtifactError: nobody knows the scheme.
    """
    kind = uri_scheme(model_id)
    if kind is None:
        return None
    if kind not in _REMOTES:
        known = ", ".join(f"{name}://" for name in sorted(_REMOTES))
        msg = (
            f"{model_id!r} (from {origin}) cannot be read: {kind}:// is not known. "
            f"Give a local folder, a Hugging Face id, or one of {known}"
        )
        raise ArtifactError(msg)
    return _REMOTES[kind]()


@scheme("s3")
class _S3:
    """`s3://bucket/folder`, by boto3 (the extra `s3`)."""

    def read(self, uri: str, name: str, environ: Mapping[str, str]) -> bytes:
        """See `Remote`."""
        s3 = _s3_module(uri)
        # A small file is read to tell people something: they wait for it.
        settings = s3_settings(uri, {"AWS_MAX_ATTEMPTS": "3", **environ})
        content: bytes = s3.read_object(uri, name, settings=settings)
        return content

    def names(self, uri: str, environ: Mapping[str, str]) -> Sequence[str]:
        """See `Remote`."""
        s3 = _s3_module(uri)
        try:
            return [
                file.name for file in s3.S3Folder(uri, EVERYTHING, s3_settings(uri, environ)).list()
            ]
        except ArtifactNotFoundError:
            return []

    def fetch(
        self,
        uri: str,
        root: Path,
        environ: Mapping[str, str],
        *,
        everything: bool,
        progress: Progress | None,
    ) -> Path:
        """See `Remote`."""
        s3 = _s3_module(uri)
        folder: Path = s3.fetch(
            uri,
            root,
            selection=EVERYTHING if everything else SERVING,
            settings=s3_settings(uri, environ),
            progress=progress,
        )
        return folder


def _s3_module(uri: str) -> Any:  # noqa: ANN401  (a module)
    try:
        from djl_python_neuronx.artifacts import s3
    except ImportError as error:
        msg = f"{uri} needs {error.name}, which is not installed: pip install 'djl-python-neuronx[s3]'"
        raise ArtifactAccessError(msg) from error
    return s3


def s3_settings(uri: str, environ: Mapping[str, str]) -> Settings:
    """How `uri` is to be reached.

    Raises:
        ArtifactAccessError: a package is missing.
    """
    settings: Settings = _s3_module(uri).Settings(environ=environ)
    return settings


__all__ = [
    "CONFIG",
    "MAX_CONFIG_BYTES",
    "download_root",
    "fetch",
    "fetch_config",
    "is_hub_id",
    "local_folder",
    "names",
    "s3_settings",
    "uri_scheme",
]


CONFIG = "config.json"
MAX_CONFIG_BYTES = 16 * 2**20
"""A configuration is some kilobytes; a larger object is something else."""

# Source: huggingface_hub, utils/_validators.py: what it takes for an id of the hub.
_HUB_ID = re.compile(r"(?!.*(--|\.\.))(?!.*\.git$)[\w][\w.-]*(/[\w][\w.-]*)?", re.ASCII)
_OURS = "djl-neuronx"


def is_hub_id(model_id: str) -> bool:
    """True for what has the form of a Hugging Face model id; whether there is such a model only the hub knows."""
    return len(model_id) <= 96 and _HUB_ID.fullmatch(model_id) is not None


def local_folder(model_id: str | None, model_dir: Path | None) -> Path | None:
    """The local folder that options name: `model_id`, relative to `model_dir` or else to the working directory.

    Without `model_id` it is `model_dir` itself. None: `model_id` is no local folder.
    """
    if model_id is None:
        return model_dir
    if uri_scheme(model_id):
        return None
    try:
        path = Path(model_id).expanduser()
        candidates = [path] if model_dir is None else [model_dir / path, path]
        return next((folder for folder in candidates if folder.is_dir()), None)
    except (OSError, RuntimeError, ValueError):  # a name too long, no home, a NUL in it
        return None


def download_root(environ: Mapping[str, str]) -> Path:
    """The folder that downloads and, where there is no better one, compiles are kept in.

    Below `SERVING_DOWNLOAD_DIR`, `DJL_CACHE_DIR` or `XDG_CACHE_HOME`, else `~/.cache`; without a home the system's
    folder for temporary files. The first two are DJL Serving's own.
    """
    for name in ("SERVING_DOWNLOAD_DIR", "DJL_CACHE_DIR", "XDG_CACHE_HOME"):
        if named := environ.get(name, "").strip():
            return Path(named).expanduser().absolute() / _OURS
    try:
        return Path.home() / ".cache" / _OURS
    except RuntimeError:
        return Path(tempfile.gettempdir()) / _OURS


def fetch(
    model_id: str,
    *,
    environ: Mapping[str, str],
    root: Path,
    model_dir: Path | None = None,
    revision: str | None = None,
    everything: bool = False,
    progress: Progress | None = None,
    origin: str = "option.model_id",
) -> Path:
    """The local folder of a model: a local one as it is, one of the hub or of a URI after a download.

    A download is shared by all processes, resumed after an interruption, and made again only where the remote
    changed; the hub's lies in the hub's own cache, others below `root`. `everything`: not only what a model needs.

    Raises:
        ArtifactNotFoundError: no such folder or model.
        ArtifactAccessError: it is there but may not be read, cannot be reached, or does not fit on the disk.
        ArtifactError: the id makes no sense, a package is missing, or keys of the remote leave the folder.
    """
    folder = local_folder(model_id, model_dir)
    if folder is not None:
        return folder
    environ = _told(environ)
    started_s = time.monotonic()
    remote = remote_of(model_id, origin)
    if remote is not None:
        with _no_secrets(model_id):
            folder = remote.fetch(model_id, root, environ, everything=everything, progress=progress)
    else:
        _require_hub_id(model_id, origin)
        with _no_secrets(model_id), _quiet_hub() if progress is None else nullcontext():
            from djl_python_neuronx.artifacts import hub

            folder = hub.fetch(
                model_id,
                revision=revision,
                selection=EVERYTHING if everything else SERVING,
                environ=environ,
                origin=origin,
            )
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    logger.info(
        "fetched uri=%s files=%d bytes=%d seconds=%.2f folder=%s",
        model_id, len(sizes), sum(sizes), time.monotonic() - started_s, folder,
    )  # fmt: skip
    return folder


def names(uri: str, environ: Mapping[str, str], *, origin: str) -> Sequence[str]:
    """The files of the folder that a URI names; none if nothing is there.

    Raises:
        ArtifactError: nobody knows the scheme, or the folder cannot be listed.
    """
    remote = remote_of(uri, origin)
    if remote is None:
        msg = f"{uri!r} (from {origin}) is no URI; expected one such as s3://bucket/folder. Correct {origin}"
        raise ArtifactError(msg)
    with _no_secrets(uri):
        return remote.names(uri, _told(environ))


def fetch_config(
    model_id: str,
    revision: str | None = None,
    environ: Mapping[str, str] = MappingProxyType({}),
    *,
    origin: str = "option.model_id",
) -> dict[str, Any]:
    """The content of config.json of a Hugging Face id or of the folder that a URI names; some kilobytes are loaded.

    Follows the hub's variables (see `HubSettings`) and the `AWS_*` ones of `environ`; what it leaves out, the
    libraries look up themselves (a login's token, `~/.aws`, the instance's role).

    Raises:
        ArtifactNotFoundError: no such model, or no config.json in it.
        ArtifactAccessError: it is there but may not be read, or cannot be reached.
        ArtifactError: the id makes no sense, a package is missing, or the content is malformed.
    """
    environ = _told(environ)
    remote = remote_of(model_id, origin)
    if remote is None:
        _require_hub_id(model_id, origin)
        with _no_secrets(model_id):
            from djl_python_neuronx.artifacts import hub

            path = hub.fetch_config(model_id, revision, environ, origin=origin)
        return read_json(path)
    where = f"{model_id.rstrip('/')}/{CONFIG}"
    try:
        with _no_secrets(model_id):
            content = remote.read(model_id, CONFIG, environ)
    except ArtifactNotFoundError as error:
        msg = f"there is no {CONFIG} in {model_id}; expected a model folder. Correct {origin}. {error}"
        raise ArtifactNotFoundError(msg) from error
    return _parsed(content, where)


def _told(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the line ends that files and Kubernetes' secrets add to values."""
    return {name: value.strip() for name, value in environ.items()}


@contextmanager
def _no_secrets(uri: str) -> Iterator[None]:
    """What is not translated where it arises becomes an error of ours that quotes nothing of it.

    Raises:
        ArtifactAccessError: with the exception's class alone: its text may hold headers, and those hold tokens.
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


def _require_hub_id(model_id: str, origin: str) -> None:
    if not is_hub_id(model_id):
        msg = (
            f"the model {model_id!r} is no local folder and no Hugging Face id; expected a folder that exists, "
            f"'owner/name' or s3://bucket/key. Correct {origin}"
        )
        raise ArtifactNotFoundError(msg)


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Without the hub's own bars, which are for terminals."""
    from huggingface_hub import utils

    hub: Any = utils  # says not what it exports
    if hub.are_progress_bars_disabled():
        yield
        return
    hub.disable_progress_bars()
    try:
        yield
    finally:
        hub.enable_progress_bars()


def _parsed(content: bytes, where: str) -> dict[str, Any]:
    if len(content) > MAX_CONFIG_BYTES:
        msg = f"{where} is larger than {MAX_CONFIG_BYTES // 2**20} MiB; expected a model's configuration"
        raise ArtifactError(msg)
    return parse_object(content, where)

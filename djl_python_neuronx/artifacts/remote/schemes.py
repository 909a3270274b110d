"""What URIs can be read: a kind of them is one class under `@scheme`.

What its library raises is translated where it is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from djl_python_neuronx.artifacts.remote.progress import Progress
from djl_python_neuronx.artifacts.remote.selection import EVERYTHING, SERVING
from djl_python_neuronx.errors import ArtifactAccessError, ArtifactError, ArtifactNotFoundError

if TYPE_CHECKING:
    from djl_python_neuronx.artifacts.remote.s3 import Settings

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
        from djl_python_neuronx.artifacts.remote import s3
    except ImportError as error:
        msg = f"{uri} needs {error.name}, which is not installed: pip install 'djl-python-neuronx[s3]'"
        raise ArtifactAccessError(msg) from error
    return s3


def s3_settings(uri: str, environ: Mapping[str, str]) -> Settings:
    """How `uri` is to be reached.

    Raises:
        ArtifactAccessError: a package is missing.
    """
    # AWS's own tools have no variable for it; this is GDAL's name.
    pays = environ.get("AWS_REQUEST_PAYER", "").lower() == "requester"
    settings: Settings = _s3_module(uri).Settings(environ=environ, requester_pays=pays)
    return settings

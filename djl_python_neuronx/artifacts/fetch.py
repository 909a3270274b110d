"""Models that lie elsewhere: Hugging Face ids and URIs. Only configurations so far; never a weight.

A kind of URI is one function under `@scheme`. What its library raises is translated here, at the border.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from djl_python_neuronx.artifacts.formats import read_json
from djl_python_neuronx.errors import ArtifactAccessError, ArtifactError, ArtifactNotFoundError

CONFIG = "config.json"
MAX_CONFIG_BYTES = 16 * 2**20
"""A configuration is some kilobytes; a larger object is something else."""

_ENDPOINT = "https://huggingface.co"
# Source: huggingface_hub, utils/_validators.py: what it takes for an id of the hub.
_HUB_ID = re.compile(r"(?!.*(--|\.\.))(?!.*\.git$)[\w][\w.-]*(/[\w][\w.-]*)?", re.ASCII)
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ON = frozenset({"1", "true", "yes", "on"})
_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S = 4, 10
_SERVERS_FAULT = 500
_GONE = frozenset({"NoSuchKey", "NoSuchBucket", "404"})

ConfigReader = Callable[[str, Mapping[str, str]], dict[str, Any]]
"""URI of a folder and the environment to the content of its config.json."""

_READERS: dict[str, ConfigReader] = {}


def scheme(name: str) -> Callable[[ConfigReader], ConfigReader]:
    """Make a function the reader of ``name://`` URIs."""

    def register(reader: ConfigReader) -> ConfigReader:
        _READERS[name] = reader
        return reader

    return register


def uri_scheme(model_id: str) -> str | None:
    """``s3`` for ``s3://bucket/key``, None for everything that is no URI."""
    found = _URI.match(model_id)
    return found[1].lower() if found else None


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


def fetch_config(
    model_id: str,
    revision: str | None = None,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """The content of config.json of a Hugging Face id or of the folder that a URI names; some kilobytes are loaded.

    Follows `HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE` and the `AWS_*` variables of
    `environ`; what it leaves out, the libraries look up themselves (a login's token, `~/.aws`, the instance's role).

    Raises:
        ArtifactNotFoundError: no such model, or no config.json in it.
        ArtifactAccessError: it is there but may not be read, or cannot be reached.
        ArtifactError: the id makes no sense, a package is missing, or the content is malformed.
    """
    kind = uri_scheme(model_id)
    if kind is None:
        return _from_hub(model_id, revision, environ)
    if kind not in _READERS:
        known = ", ".join(f"{name}://" for name in sorted(_READERS))
        msg = (
            f"{model_id!r} cannot be read: {kind}:// is not known. "
            f"Give a local folder, a Hugging Face id, or one of {known}"
        )
        raise ArtifactError(msg)
    return _READERS[kind](model_id, environ)


def _from_hub(model_id: str, revision: str | None, environ: Mapping[str, str]) -> dict[str, Any]:
    if not is_hub_id(model_id):
        msg = (
            f"the model {model_id!r} is no local folder and no Hugging Face id; expected a folder that exists, "
            "'owner/name' or s3://bucket/key. Correct option.model_id"
        )
        raise ArtifactNotFoundError(msg)
    try:
        path = _downloaded(model_id, revision, environ)
    except ArtifactError:
        raise
    except Exception as error:  # noqa: BLE001  (requests, httpx and what a hostile variable causes: no common base)
        # No text of theirs and no cause: either may quote headers, and those hold the token.
        status = _status(error)
        why = f"HTTP status {status}" if status else type(error).__name__
        msg = (
            f"{CONFIG} of the model {model_id!r} cannot be loaded ({why}). "
            "Check HF_ENDPOINT, HF_HOME, HF_TOKEN and the network"
        )
        raise ArtifactAccessError(msg) from None
    return read_json(Path(path))


def _downloaded(model_id: str, revision: str | None, environ: Mapping[str, str]) -> str:
    """Path of the model's configuration in the hub's cache, loaded or checked for a newer one if the hub answers."""
    from huggingface_hub import errors, hf_hub_download, hf_hub_url

    at = f" at revision {revision!r}" if revision else ""
    endpoint = (_told(environ, "HF_ENDPOINT") or "").rstrip("/") or None
    site = _without_user(endpoint or _ENDPOINT)
    token = _told(environ, "HF_TOKEN") or _told(environ, "HUGGING_FACE_HUB_TOKEN")
    offline = any(
        environ.get(name, "").strip().lower() in _ON
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
    away = ""
    try:
        if not offline:
            url = hf_hub_url(model_id, CONFIG, revision=revision, endpoint=endpoint)
            away = _obstacle(url, token)
        return str(
            hf_hub_download(
                model_id,
                CONFIG,
                revision=revision,
                cache_dir=_hub_cache(environ),
                endpoint=endpoint,
                token=token,
                local_files_only=offline or bool(away),
            )
        )
    # From the most special to the general: the classes inherit from each other.
    except errors.GatedRepoError:
        msg = (
            f"the model {model_id!r} is gated: accept its terms at {site}/{model_id} and set HF_TOKEN "
            "to a token of that account"
        )
        raise ArtifactAccessError(msg) from None
    except errors.RevisionNotFoundError:
        msg = f"the model {model_id!r} has no revision {revision!r}; correct option.revision or leave it out"
        raise ArtifactNotFoundError(msg) from None
    except errors.RepositoryNotFoundError:
        msg = (
            f"{site} has no model {model_id!r}, or a private one, and there is no local folder of "
            "that name. Correct option.model_id; for a private model set HF_TOKEN"
        )
        raise ArtifactNotFoundError(msg) from None
    except errors.LocalEntryNotFoundError:
        what = (
            "offline mode is on (HF_HUB_OFFLINE)"
            if offline
            else f"the hub cannot be reached ({away or 'it did not answer'})"
        )
        msg = (
            f"{CONFIG} of the model {model_id!r}{at} is not in the cache, and {what}. "
            "Check network, HF_ENDPOINT and HF_TOKEN, or download the model and name its folder"
        )
        raise ArtifactAccessError(msg) from None
    except errors.EntryNotFoundError:
        msg = f"the model {model_id!r}{at} has no {CONFIG}; expected a model in the format of transformers"
        raise ArtifactNotFoundError(msg) from None


def _obstacle(url: str, token: str | None) -> str:
    """Empty if the hub can be asked. The library itself would try for half a minute to reach one that is not there.

    Raises:
        huggingface_hub.errors.HfHubHTTPError: it refuses.
    """
    from huggingface_hub import errors, get_hf_file_metadata

    try:
        get_hf_file_metadata(url, token=token, timeout=_CONNECT_TIMEOUT_S)
    except errors.HfHubHTTPError as error:
        if (status := _status(error)) < _SERVERS_FAULT:
            raise
        return f"it answers {status}"
    except Exception as error:  # noqa: BLE001  (as in _from_hub)
        return type(error).__name__
    return ""


def _status(error: Exception) -> int:
    """The HTTP status that an error of the hub's library stands for; 0: none."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return status if isinstance(status, int) else 0


def _hub_cache(environ: Mapping[str, str]) -> str | None:
    """The folder of the hub's cache; None: what huggingface_hub takes by itself."""
    if named := _told(environ, "HF_HUB_CACHE") or _told(environ, "HUGGINGFACE_HUB_CACHE"):
        return named
    home = _told(environ, "HF_HOME")
    return str(Path(home).expanduser() / "hub") if home else None


def _without_user(url: str) -> str:
    """The URL without the user and the password that it may hold."""
    start, separator, rest = url.rpartition("@")
    return f"{start.partition('://')[0]}://{rest}" if separator and "://" in start else rest


class _Body(Protocol):
    def read(self, amt: int) -> bytes: ...


@scheme("s3")
def _from_s3(uri: str, environ: Mapping[str, str]) -> dict[str, Any]:
    bucket, _, prefix = uri.partition("://")[2].partition("/")
    if not bucket:
        msg = f"{uri!r} names no bucket; expected s3://bucket/folder"
        raise ArtifactNotFoundError(msg)
    folder = prefix.strip("/")
    where = f"s3://{bucket}/{folder}".rstrip("/")
    try:
        content = _loaded(bucket, f"{folder}/{CONFIG}" if folder else CONFIG, where, environ)
    except ArtifactError:
        raise
    except Exception as error:  # noqa: BLE001  (botocore asserts and passes on what http and urllib3 raise)
        # No text of theirs and no cause: either may quote headers, and those hold the signature.
        msg = (
            f"{where} cannot be read ({type(error).__name__}). "
            "Check the network, the region, AWS_ENDPOINT_URL and the AWS credentials"
        )
        raise ArtifactAccessError(msg) from None
    return _parsed(content, f"{where}/{CONFIG}")


def _loaded(bucket: str, key: str, where: str, environ: Mapping[str, str]) -> bytes:
    """The beginning of an object, one byte more than a configuration may have."""
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import ClientError, NoCredentialsError
    except ImportError as error:
        msg = f"{where} needs {error.name}, which is not installed: pip install 'djl-python-neuronx[s3]'"
        raise ArtifactAccessError(msg) from None
    try:
        session = boto3.session.Session(
            aws_access_key_id=_told(environ, "AWS_ACCESS_KEY_ID"),
            aws_secret_access_key=_told(environ, "AWS_SECRET_ACCESS_KEY"),
            aws_session_token=_told(environ, "AWS_SESSION_TOKEN"),
            region_name=_told(environ, "AWS_REGION") or _told(environ, "AWS_DEFAULT_REGION"),
            profile_name=_told(environ, "AWS_PROFILE"),
        )
        client = session.client(
            "s3",
            endpoint_url=_told(environ, "AWS_ENDPOINT_URL_S3")
            or _told(environ, "AWS_ENDPOINT_URL"),
            config=Config(
                connect_timeout=_CONNECT_TIMEOUT_S,
                read_timeout=_READ_TIMEOUT_S,
                retries={"mode": "standard", "total_max_attempts": 2},
            ),
        )
        body: _Body = client.get_object(Bucket=bucket, Key=key)["Body"]
        return body.read(MAX_CONFIG_BYTES + 1)
    except NoCredentialsError:
        msg = f"{where} cannot be read without AWS credentials: give this machine a role, or set AWS_ACCESS_KEY_ID …"
        raise ArtifactAccessError(msg) from None
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", "unknown"))
        if code in _GONE:
            msg = f"there is no {CONFIG} in {where} ({code}); expected a model folder. Correct option.model_id"
            raise ArtifactNotFoundError(msg) from None
        msg = f"{where} cannot be read: S3 answers {code}. Allow this role s3:GetObject there, and check the region"
        raise ArtifactAccessError(msg) from None


def _parsed(content: bytes, where: str) -> dict[str, Any]:
    if len(content) > MAX_CONFIG_BYTES:
        msg = f"{where} is larger than {MAX_CONFIG_BYTES // 2**20} MiB; expected a model's configuration"
        raise ArtifactError(msg)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        msg = f"{where} is not valid JSON: {error}. Copy it again"
        raise ArtifactError(msg) from error
    if not isinstance(value, dict):
        msg = f"{where} holds a JSON {type(value).__name__}; expected an object. Copy it again"
        raise ArtifactError(msg)
    return value


def _told(environ: Mapping[str, str], name: str) -> str | None:
    """The variable without the line end that files and Kubernetes' secrets add; None if it says nothing."""
    return environ.get(name, "").strip() or None

"""The configuration of a model of the Hugging Face hub, without the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from djl_python_neuronx.errors import ArtifactAccessError, ArtifactError, ArtifactNotFoundError

CONFIG = "config.json"
_ENDPOINT = "https://huggingface.co"
_ON = frozenset({"1", "true", "yes", "on"})
_CONNECT_TIMEOUT_S = 4
_SERVERS_FAULT = 500


def fetch_config(
    model_id: str, revision: str | None, environ: Mapping[str, str], *, origin: str
) -> Path:
    """The cached config.json of the model that `origin` names; some kilobytes are loaded.

    Raises:
        ArtifactNotFoundError: no such model or revision, or no config.json in it.
        ArtifactAccessError: it is there but may not be read, or cannot be reached.
    """
    try:
        return Path(_downloaded(model_id, revision, environ, origin))
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


def _downloaded(
    model_id: str, revision: str | None, environ: Mapping[str, str], origin: str
) -> str:
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
            f"that name. Correct {origin}; for a private model set HF_TOKEN"
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
    except Exception as error:  # noqa: BLE001  (as in fetch_config)
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


def _told(environ: Mapping[str, str], name: str) -> str | None:
    """The variable without the line end that files and Kubernetes' secrets add; None if it says nothing."""
    return environ.get(name, "").strip() or None

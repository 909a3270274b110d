"""The configuration of a model of the Hugging Face hub, without the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from djl_python_neuronx.artifacts.remote.hub_settings import HubSettings
from djl_python_neuronx.errors import ArtifactAccessError, ArtifactError, ArtifactNotFoundError

CONFIG = "config.json"
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
    settings = HubSettings.of(environ)
    away = ""
    try:
        if not settings.offline:
            url = hf_hub_url(model_id, CONFIG, revision=revision, endpoint=settings.endpoint)
            away = _obstacle(url, settings.token)
        return str(
            hf_hub_download(
                model_id,
                CONFIG,
                revision=revision,
                cache_dir=settings.cache_dir,
                endpoint=settings.endpoint,
                token=settings.token,
                local_files_only=bool(settings.offline or away),
            )
        )
    # From the most special to the general: the classes inherit from each other.
    except errors.GatedRepoError:
        msg = (
            f"the model {model_id!r} is gated: accept its terms at {settings.site}/{model_id} and set HF_TOKEN "
            "to a token of that account"
        )
        raise ArtifactAccessError(msg) from None
    except errors.RevisionNotFoundError:
        msg = f"the model {model_id!r} has no revision {revision!r}; correct option.revision or leave it out"
        raise ArtifactNotFoundError(msg) from None
    except errors.RepositoryNotFoundError:
        msg = (
            f"{settings.site} has no model {model_id!r}, or a private one, and there is no local folder of "
            f"that name. Correct {origin}; for a private model set HF_TOKEN"
        )
        raise ArtifactNotFoundError(msg) from None
    except errors.LocalEntryNotFoundError:
        what = (
            f"offline mode is on ({settings.offline})"
            if settings.offline
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

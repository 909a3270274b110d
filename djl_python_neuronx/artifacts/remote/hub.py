"""Models of the Hugging Face hub, through its own library and into its own cache, which other programs share."""

from __future__ import annotations

import glob
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from huggingface_hub import HfApi, errors, snapshot_download, try_to_load_from_cache

from djl_python_neuronx.artifacts.remote.hub_settings import HubSettings, without_users
from djl_python_neuronx.artifacts.remote.hub_snapshot import check_whole
from djl_python_neuronx.artifacts.remote.selection import SERVING, Selection
from djl_python_neuronx.errors import ArtifactAccessError, ArtifactNotFoundError

logger = logging.getLogger(__name__)

_GIB = 2**30

# All that the library's HTTP client raises: requests' errors are OSErrors; httpx', which came with 1.0, are not, but
# there the base of the hub's own error is the base of them all.
_UNREACHABLE: tuple[type[Exception], ...] = (
    OSError,
    *(base for base in errors.HfHubHTTPError.__bases__ if issubclass(base, Exception)),
)


def fetch(
    repo_id: str,
    *,
    revision: str | None = None,
    selection: Selection = SERVING,
    environ: Mapping[str, str] = MappingProxyType({}),
    origin: str = "option.model_id",
) -> Path:
    """The local folder with the selected files of a model at a revision (branch, tag, commit; else the default branch).

    Resumes, and locks between processes, as the library does. `environ`: see `HubSettings`. Offline, the cached
    snapshot is taken if it is whole. `origin` is what named the model.

    Raises:
        ArtifactNotFoundError: no such model or revision, or none of its files is wanted.
        ArtifactAccessError: gated, private, not in the cache or not whole while offline, no connection, or no room on
            the disk.
    """
    settings = HubSettings.of(environ)
    where = f"{repo_id} at {revision}" if revision else repo_id
    with _translated(repo_id, revision, settings, origin):
        if settings.offline:
            folder = snapshot_download(
                repo_id, revision=revision, cache_dir=settings.cache_dir, local_files_only=True,
                # Newer versions miss what they know of and we did not want, unless told so.
                allow_patterns=["config.json"],
            )  # fmt: skip
            check_whole(Path(folder), selection)
            logger.info("hub_offline model=%s folder=%s", where, folder)
            return Path(folder)
        api = HfApi(endpoint=settings.endpoint, token=settings.token)
        info = api.model_info(repo_id, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        names = sorted(selection.choose(sizes.keys()))
        if not names:
            msg = (
                f"the model {where} on {settings.site} has {len(sizes)} files, none of which is a model's. "
                f"Correct {origin}."
            )
            raise ArtifactNotFoundError(msg)
        wanted = {name: sizes[name] for name in names}
        _check_room(repo_id, info.sha, wanted, settings.cache_dir)
        logger.info("fetch_start uri=%s files=%d bytes=%d", where, len(names), sum(wanted.values()))
        folder = snapshot_download(
            repo_id,
            # The name, not the commit: only so does the cache learn which commit it means, for offline use.
            revision=revision,
            cache_dir=settings.cache_dir,
            endpoint=settings.endpoint,
            token=settings.token,
            allow_patterns=[glob.escape(name) for name in names],
        )
    return Path(folder)


def _check_room(
    repo_id: str, commit: str | None, sizes: Mapping[str, int], cache_dir: Path
) -> None:
    needed = sum(
        size
        for name, size in sizes.items()
        if not isinstance(try_to_load_from_cache(repo_id, name, cache_dir, commit), str)
    )
    cache_dir.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache_dir).free
    if needed > free:
        msg = (
            f"the model {repo_id} needs {needed / _GIB:.2f} GiB in {cache_dir}, {free / _GIB:.2f} GiB are free there. "
            "Make room, or set HF_HUB_CACHE to a folder on a larger disk."
        )
        raise ArtifactAccessError(msg)


@contextmanager
def _translated(
    repo_id: str, revision: str | None, settings: HubSettings, origin: str
) -> Iterator[None]:
    """The library's errors as ours."""
    model, endpoint = f"the model {repo_id!r}", settings.site
    try:
        yield
    except (ArtifactAccessError, ArtifactNotFoundError):
        raise
    # From the most special to the general: the classes inherit from each other.
    except errors.GatedRepoError as error:
        msg = f"{model} is gated. Accept its terms at {endpoint}/{repo_id} and set HF_TOKEN to a token of that account."
        raise ArtifactAccessError(msg) from error
    except errors.RevisionNotFoundError as error:
        msg = f"{model} has no revision {revision!r} on {endpoint}. Correct option.revision, or leave it out."
        raise ArtifactNotFoundError(msg) from error
    except errors.RepositoryNotFoundError as error:
        msg = (
            f"{endpoint} has no model {repo_id!r}, or a private one that this token may not see. "
            f"Correct {origin}; for a private model set HF_TOKEN."
        )
        raise ArtifactNotFoundError(msg) from error
    except errors.HFValidationError as error:
        msg = f"{repo_id!r} is no model id: expected 'owner/name'. Correct {origin}."
        raise ArtifactNotFoundError(msg) from error
    except errors.LocalEntryNotFoundError as error:
        at = f" at {revision!r}" if revision else ""
        msg = f"{model}{at} is not in the cache, whole, and {_unasked(settings)}, or name a folder."
        raise ArtifactAccessError(msg) from error
    except _UNREACHABLE as error:
        said = _first_line(error)
        msg = (
            f"{model} cannot be loaded from {endpoint}: {said}. Check network, HF_TOKEN and HF_ENDPOINT and start "
            "again, what is loaded is kept; HF_HUB_OFFLINE=1 takes what is in the cache."
        )
        raise ArtifactAccessError(msg) from error


def _unasked(settings: HubSettings) -> str:
    if settings.offline:
        return f"the hub was not asked. Load it once without {settings.offline}"
    return f"{settings.site} did not answer. Check the network and HF_ENDPOINT"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    if not lines or "header" in lines[0].lower():
        return type(error).__name__  # a header that is wrong is quoted, and may hold the token
    return without_users(lines[0])[:300]

"""Models of the Hugging Face hub, through its own library and into its own cache, which other programs share."""

from __future__ import annotations

import glob
import json
import logging
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import HfApi, errors, snapshot_download, try_to_load_from_cache

from djl_python_neuronx.artifacts.folder import SERVING, WEIGHT_SUFFIXES, Selection, some
from djl_python_neuronx.artifacts.tokenizer import has_vocabulary
from djl_python_neuronx.errors import ArtifactAccessError, ArtifactError, ArtifactNotFoundError

logger = logging.getLogger(__name__)

_ON = frozenset({"1", "on", "yes", "true"})
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_CACHES = (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub"))
"""Variables that tell where the cache is, and in which folder there; the first counts."""
_USERINFO = re.compile(r"(?<=//)[^/\s]*@")


@dataclass(frozen=True)
class HubSettings:
    """What the hub's library is told; what the environment leaves out, it knows by itself (a login's token)."""

    endpoint: str = field(repr=False)
    """Without a slash at its end; may hold a user and a password."""
    cache_dir: Path
    token: str | None = field(repr=False)
    offline: str
    """The variables that say so; then nobody is asked, what is in the cache is taken. Empty: the hub is asked."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> HubSettings:
        """The settings in `environ`, which win over those of the process.

        `HF_ENDPOINT`, `HF_TOKEN`, `HUGGING_FACE_HUB_TOKEN`, `HF_HUB_CACHE`, `HUGGINGFACE_HUB_CACHE`, `HF_HOME`,
        `HF_HUB_OFFLINE` and `TRANSFORMERS_OFFLINE`. The line end that files and Kubernetes' secrets add to a value is
        none of it. Where the process is offline, so are we: its library would refuse to ask.

        Raises:
            ArtifactAccessError: the endpoint is no URL, or the cache is in the home of a user that there is not.
        """
        from huggingface_hub import constants

        told = {name: value.strip() for name, value in environ.items() if value.strip()}
        endpoint = told.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")
        _check_url(endpoint)
        offline = " and ".join(name for name in _OFFLINE if told.get(name, "").lower() in _ON)
        return cls(
            endpoint=endpoint,
            cache_dir=_cache_dir(told, constants.HF_HUB_CACHE),
            token=told.get("HF_TOKEN") or told.get("HUGGING_FACE_HUB_TOKEN"),
            offline=offline or (" or ".join(_OFFLINE) if constants.HF_HUB_OFFLINE else ""),
        )

    @property
    def site(self) -> str:
        """The endpoint for messages."""
        return without_users(self.endpoint)


def without_users(text: str) -> str:
    """A text without the users and passwords that URLs in it hold."""
    return _USERINFO.sub("", text)


def _check_url(endpoint: str) -> None:
    """Refuse a password whose `/`, `?` or `#` ends the host: libraries and messages would show parts of it.

    One such as `8/x` is a port and a path by the URL's grammar, and cannot be told from one.
    """
    try:
        parts = urlsplit(endpoint)
        _ = parts.port
        broken = "@" in parts.query + parts.fragment
    except ValueError:
        broken = True
    if broken:
        msg = (
            "HF_ENDPOINT is no URL: its host or port is malformed (its value is not shown, as it may hold a password). "
            "Correct it; in a user or a password write %2F for '/', %3F for '?' and %23 for '#'"
        )
        raise ArtifactAccessError(msg)


def _cache_dir(told: Mapping[str, str], default: str) -> Path:
    """Where the hub's library keeps models; `default` is its own choice."""
    name, below = next((one for one in _CACHES if one[0] in told), ("HF_HOME or HF_HUB_CACHE", ""))
    value = told.get(name, default)
    try:
        return Path(value, below).expanduser()
    except RuntimeError as error:
        msg = f"{name} is {value!r}, but there is no such user's home. Set it to an absolute path"
        raise ArtifactAccessError(msg) from error


_UNREAD = ("LICENSE", "NOTICE", "USE_POLICY")
"""How names of files start that nothing here or in the libraries opens."""
_INDEX = ".index.json"
_CONFIG = "config.json"
_SHARD = re.compile(r".*-\d+-of-\d+\.(safetensors|bin)")
"""A part of the weights, which only an index makes whole."""
_UNFINISHED = ".incomplete"


def check_whole(folder: Path, selection: Selection) -> None:
    """Refuse a snapshot, `<cache>/models--<owner>--<name>/snapshots/<commit>`, that lacks selected files.

    Newer versions of the hub's library keep the list of a commit's files beside it, and that decides. Without it
    these tell: links whose file is gone, shards that an index names, and what every model has, if a file of it or of
    another commit is in the making.

    Raises:
        ArtifactAccessError: the files that are missing, and what to do.
    """
    listed = _listed(folder)
    if listed is None:
        found = _found(folder)
        chosen = sorted(selection.choose(found.keys()))
        missing = _seen_missing(found, chosen) or _in_the_making(folder, chosen)
    else:
        wanted = sorted(selection.choose(listed))
        missing = [name for name in wanted if not (folder / name).is_file() and _is_read(name)]
    if missing:
        msg = (
            f"the model in {folder} is not whole, its download was cut off or left files out: {some(missing)} missing. "
            "Start once without HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE to load the rest, or name that folder in "
            "option.model_id to serve what is there."
        )
        raise ArtifactAccessError(msg)


def _listed(folder: Path) -> set[str] | None:
    """All files of the commit; None: nobody noted them.

    Source: huggingface_hub 2.4, _tree_cache.py: `trees/<commit>.json`, format_version 1.
    """
    content = _object(folder.parents[1] / "trees" / f"{folder.name}.json")
    files = content.get("files")
    return set(files) if content.get("format_version") == 1 and isinstance(files, dict) else None


def _found(folder: Path) -> dict[str, Path]:
    """The files that are there, by name, and links to nothing."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def _seen_missing(found: Mapping[str, Path], chosen: Collection[str]) -> list[str]:
    """Links to nothing, and shards that are not there, of the chosen files."""
    missing = {name for name in chosen if not found[name].exists() and _is_read(name)}
    for name in chosen:
        if name.endswith(_INDEX):
            shards = _object(found[name]).get("weight_map")
            named = shards.values() if isinstance(shards, dict) else ()
            # What is no name is told by who reads the index.
            beside = {
                str(PurePosixPath(name).parent / one) for one in named if isinstance(one, str)
            }
            missing |= beside - found.keys()
    return sorted(missing)


def _in_the_making(folder: Path, chosen: Collection[str]) -> list[str]:
    """What every model has and this one lacks, if a download is not at its end; with the paths of its unfinished blobs.

    Nothing tells which file, or commit, those belong to: alone they are no reason to refuse a model.
    Source: huggingface_hub 0.25 to 2.4, file_download.py: `blobs/<etag>.incomplete`, `<etag>.<random>.incomplete`.
    """
    blobs = folder.parents[1] / "blobs"
    making = sorted(
        str(path)
        for path in blobs.glob(f"*{_UNFINISHED}")
        if not (blobs / path.name.partition(".")[0]).exists()
    )
    if not making:
        return []
    if lacking := _lacking(chosen):
        return [f"{' and '.join(lacking)} (begun: {some(making)})"]
    logger.warning("hub_download_unfinished folder=%s blobs=%r", folder, some(making))
    return []


def _lacking(names: Collection[str]) -> list[str]:
    tops = {name.split("/")[0] for name in names}
    weights = [name for name in tops if name.endswith(WEIGHT_SUFFIXES) and not _SHARD.match(name)]
    there = {_CONFIG: _CONFIG in tops, "weights": weights, "tokenizer": has_vocabulary(tops)}
    return [what for what, is_there in there.items() if not is_there]


def _is_read(name: str) -> bool:
    return not PurePosixPath(name).name.startswith(_UNREAD)


def _object(path: Path) -> dict[str, Any]:
    """A JSON object; {} for a file that is none: whoever needs its content says what is wrong with it."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


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

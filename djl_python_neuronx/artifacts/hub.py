"""Models of the Hugging Face Hub, downloaded by its own library into its own cache, which other programs share.

The library makes paths of what the server names: an ETag, a commit, the files of a listing. Its HTTP client therefore
refuses an answer with other than plain names, or with more bytes than expected, whichever one it is, and the listing is
read and checked here.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from djl_python_neuronx.artifacts.atomic import require_space, whole_file
from djl_python_neuronx.artifacts.folder import (
    LEGAL_STEMS,
    MAX_JSON_BYTES,
    SERVING,
    WEIGHT_SUFFIXES,
    Selection,
    check_names,
    file_names,
    read_json,
    some,
)
from djl_python_neuronx.artifacts.manifest import sha256_of
from djl_python_neuronx.artifacts.tensor_files import damage
from djl_python_neuronx.artifacts.tokenizer import has_vocabulary
from djl_python_neuronx.config.values import shortened
from djl_python_neuronx.errors import (
    ArtifactAccessError,
    ArtifactError,
    ArtifactNotFoundError,
    redacted,
)

logger = logging.getLogger(__name__)

CONFIG = "config.json"
_CONNECT_TIMEOUT_S = 4
_SERVER_ERROR = 500
_NUM_THREADS = 8
_MAX_LISTING_BYTES = 2 * MAX_JSON_BYTES
_MAX_TEXT_BYTES = 2**16
_most_bytes: ContextVar[int] = ContextVar("_most_bytes", default=sys.maxsize)
"""Longest body of an answer, decompressed; without a limit for others in this process who use the library."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_PLAIN = re.compile(r'(W/)?"?[\w=+-]{1,128}"?', re.ASCII)
_URL = re.compile(r"https?://.*", re.IGNORECASE)
_FORMS = {
    "X-Repo-Commit": (_COMMIT, "40 hexadecimal digits"),
    "X-Linked-ETag": (_PLAIN, "letters and digits"),
    "ETag": (_PLAIN, "letters and digits"),
    "X-Xet-Hash": (re.compile(r"[0-9a-f]{64}"), "64 hexadecimal digits"),
    "X-Xet-Cas-Url": (_URL, "an http or https URL"),
    "Location": (
        re.compile(r"(?![a-z][a-z0-9+.-]*:).*|https?://.*", re.IGNORECASE),
        "an http or https URL",
    ),
}
"""Headers of which the library makes paths and places, with their plain form. Source: huggingface_hub 0.36 and 2.4,
file_download.py; hf_xet 1.8, which makes folders at a `local://` path."""

_ON = frozenset({"1", "on", "yes", "true"})
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_CACHES = (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub"))
"""Variables that name the cache, with the sub-folder it has there; the first one set counts."""

_INDEX = ".index.json"
_SHARD = re.compile(r".*-\d+-of-\d+\.(safetensors|bin)")
_UNFINISHED = ".incomplete"
_MISSING = frozenset(
    {"RevisionNotFoundError", "RepositoryNotFoundError", "HFValidationError", "EntryNotFoundError"}
)
"""The library's errors for something that does not exist."""


@dataclass(frozen=True)
class HubSettings:
    """Endpoint, cache, token and offline mode. The library finds a login's token itself if none is set."""

    endpoint: str = field(repr=False)
    """Without a trailing slash; may hold a user and a password."""
    cache_dir: Path
    token: str | None = field(repr=False)
    offline: str
    """The variables that switch offline mode on; empty if the Hub may be contacted."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> HubSettings:
        """Read the settings from `environ`, which overrides the environment of this process.

        `HF_ENDPOINT`, `HF_TOKEN`, `HUGGING_FACE_HUB_TOKEN`, `HF_HUB_CACHE`, `HUGGINGFACE_HUB_CACHE`, `HF_HOME`,
        `HF_HUB_OFFLINE` and `TRANSFORMERS_OFFLINE`. Values are stripped of the newline that files and Kubernetes
        secrets append. If this process is offline, so is the result: the library would refuse to connect.

        Raises:
            ArtifactAccessError: the endpoint is not a URL, or the cache is in the home of an unknown user.
        """
        from huggingface_hub import constants

        values = {name: value.strip() for name, value in environ.items() if value.strip()}
        endpoint = values.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")
        _check_url(endpoint)
        token = values.get("HF_TOKEN") or values.get("HUGGING_FACE_HUB_TOKEN")
        offline = " and ".join(name for name in _OFFLINE if values.get(name, "").lower() in _ON)
        offline = offline or (" or ".join(_OFFLINE) if constants.HF_HUB_OFFLINE else "")
        cache_dir = _cache_dir(values, constants.HF_HUB_CACHE)
        return cls(endpoint=endpoint, cache_dir=cache_dir, token=token, offline=offline)

    @property
    def site(self) -> str:
        """The endpoint without user and password, for messages."""
        return redacted(self.endpoint)


def fetch(
    model_id: str,
    *,
    revision: str | None = None,
    selection: Selection = SERVING,
    environ: Mapping[str, str] = MappingProxyType({}),
    origin: str = "option.model_id",
) -> Path:
    """Download the selected files of a model at a revision (branch, tag or commit) and return their folder.

    The library resumes downloads and locks between processes. `environ`: see `HubSettings`. Offline, the cached
    snapshot is used if it is complete. `origin` names the option that `model_id` came from.

    Raises:
        ArtifactNotFoundError: no such model or revision, or it has no file that is needed.
        ArtifactAccessError: gated, private, unreachable, offline and not completely cached, or the disk is full.
    """
    from huggingface_hub import HfApi, snapshot_download

    settings = HubSettings.of(environ)
    request = _Request(model_id, revision, settings, origin)
    with request.translated(f"the model {model_id!r}"):
        if settings.offline:
            # Without patterns newer versions miss the files that were never selected.
            offline = {"local_files_only": True, "allow_patterns": [CONFIG], **request.arguments}
            folder = Path(snapshot_download(model_id, **offline))
            check_whole(folder, selection)
            logger.info("hub_offline model=%s folder=%s", model_id, folder)
            return folder
        _guard_client()
        api = HfApi(endpoint=settings.endpoint, token=settings.token)
        with _at_most(_MAX_LISTING_BYTES):
            info = api.model_info(model_id, revision=revision, files_metadata=True)
        listed = {file.rfilename: file for file in info.siblings or ()}
        files = [listed[name] for name in sorted(selection.choose(listed.keys()))]
        if not files:
            msg = (
                f"the model {model_id!r} on {settings.site} has {len(listed)} files, and none belongs to a model. "
                f"Correct {origin}."
            )
            raise ArtifactNotFoundError(msg)
        place = f"{settings.site}/{model_id}"
        commit = _checked(place, "lists the commit", info.sha, *_FORMS["X-Repo-Commit"])
        check_names([file.rfilename for file in files], place)
        sizes = {file.rfilename: file.size or 0 for file in files}
        _check_space(model_id, commit, sizes, settings.cache_dir)
        num_bytes = sum(sizes.values())
        logger.info("fetch_start uri=%s files=%d bytes=%d", model_id, len(files), num_bytes)
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="hub") as pool:
            loads = [pool.submit(request.load, file, commit) for file in files]
            try:
                (folder,) = {load.result() for load in loads}
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        ref = folder.parents[1] / "refs" / (revision or "main")
        with suppress(OSError):  # a cache that is complete may be read-only
            ref.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(ref) as temporary:  # the library's note for offline starts
                temporary.write_text(commit)
        return folder


def fetch_config(
    model_id: str, revision: str | None, environ: Mapping[str, str], *, origin: str
) -> Path:
    """Download config.json of a model, or check the cached one for a newer version, and return its path.

    Raises:
        ArtifactNotFoundError: no such model or revision, or it has no config.json.
        ArtifactAccessError: gated, private, or unreachable and not cached.
    """
    from huggingface_hub import hf_hub_download, hf_hub_url

    settings = HubSettings.of(environ)
    request = _Request(model_id, revision, settings, origin)
    at = f" at revision {revision!r}" if revision else ""
    what = f"{CONFIG} of the model {model_id!r}{at}"
    failure = ""
    if not settings.offline:
        with request.translated(what):
            _guard_client()
            url = hf_hub_url(model_id, CONFIG, revision=revision, endpoint=settings.endpoint)
            failure = _connection_failure(url, settings.token)
    with request.translated(what, failure), _at_most(MAX_JSON_BYTES):
        local = bool(settings.offline or failure)
        return Path(hf_hub_download(model_id, CONFIG, local_files_only=local, **request.arguments))


@cache
def _guard_client() -> None:
    """Have every answer to the library checked, by all HTTP clients that it makes from now on.

    Raises:
        ArtifactAccessError: this version of the library offers no way to.
    """
    import huggingface_hub

    library: Any = huggingface_hub
    if hasattr(library, "set_client_factory"):  # from 1.0
        client = library.get_session()
        kind, hooks = type(client), {**client.event_hooks, "response": [_check_answer]}
        options = {"event_hooks": hooks, "follow_redirects": True, "timeout": None}
        library.set_client_factory(lambda: kind(**options))
    elif hasattr(library, "configure_http_backend"):
        kind = type(library.get_session())

        def session() -> Any:  # noqa: ANN401  (requests has no types)
            made = kind()
            made.hooks["response"].append(_check_answer)
            return made

        library.configure_http_backend(session)
    else:
        msg = (
            f"what a server answers to huggingface_hub {library.__version__} cannot be checked: it has neither "
            "set_client_factory nor configure_http_backend. Install another version, or name a local folder."
        )
        raise ArtifactAccessError(msg)


def _check_answer(response: Any, *_: object, **__: object) -> None:  # noqa: ANN401  (of requests or httpx)
    """Refuse an answer before the library makes a path of it, and a body before the library has stored it whole.

    An ETag counts only beside a commit, as for the library.

    Raises:
        ArtifactAccessError: a header has not its plain form.
    """
    parts = "iter_bytes" if hasattr(response, "iter_bytes") else "iter_content"
    most = _most_bytes.get()
    if not 200 <= response.status_code < 300:  # the text of an error or a redirect
        most = max(most, _MAX_TEXT_BYTES)
    setattr(response, parts, _bounded(getattr(response, parts), str(response.url), most))
    headers = response.headers
    for name, form in _FORMS.items():
        if name in headers and (name != "ETag" or "X-Repo-Commit" in headers):
            _checked(str(response.url), f"answers with {name}", headers[name], *form)


@contextmanager
def _at_most(num_bytes: int) -> Iterator[None]:
    before = _most_bytes.set(num_bytes)
    try:
        yield
    finally:
        _most_bytes.reset(before)


def _bounded(
    parts: Callable[..., Iterator[bytes]], place: str, most: int
) -> Callable[..., Iterator[bytes]]:
    """Return a reader of a body that raises `ArtifactAccessError` behind `most` bytes."""

    def read(*args: Any, **keywords: Any) -> Iterator[bytes]:  # noqa: ANN401
        left = most
        for part in parts(*args, **keywords):
            left -= len(part)
            if left < 0:
                msg = (
                    f"{redacted(place)} answers with more than {most} bytes, the most that this file or listing may "
                    "have. Start again; if it stays so, tell who runs the server."
                )
                raise ArtifactAccessError(msg)
            yield part

    return read


def _checked(place: str, does: str, value: object, form: re.Pattern[str], expected: str) -> str:
    if not isinstance(value, str) or not form.fullmatch(value):
        msg = (
            f"{redacted(place)} {does} {shortened(value)!r}; expected {expected}. Nothing was written. The server is "
            "no Hub, or hostile: correct HF_ENDPOINT, or tell who runs it."
        )
        raise ArtifactAccessError(msg)
    return value


def check_whole(folder: Path, selection: Selection) -> None:
    """Refuse a snapshot, `<cache>/models--<owner>--<name>/snapshots/<commit>`, that lacks selected files.

    Newer versions of the library keep the list of a commit's files beside it, and that list decides. Without it a
    snapshot is incomplete if a link is broken, if a shard named by an index is missing, or if an essential file is
    missing while a blob of any commit is unfinished.

    Raises:
        ArtifactAccessError: the missing files, and what to do.
    """
    listed = _listed_files(folder)
    known = file_names(folder) if listed is None else listed
    chosen = sorted(selection.choose(known))
    missing = [name for name in chosen if not (folder / name).is_file() and _is_read(name)]
    if listed is None:
        missing = sorted({*missing, *_missing_shards(folder, known, chosen)})
        missing = missing or _unfinished_files(folder, chosen)
    if missing:
        msg = (
            f"the model in {folder} is incomplete: the download was interrupted or skipped files: {some(missing)} "
            "missing. Start once without HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE to load the rest, or name that folder "
            "in option.model_id to serve what is there."
        )
        raise ArtifactAccessError(msg)


@dataclass(frozen=True)
class _Request:
    """A model that is requested from the Hub, and the option that it came from."""

    model_id: str
    revision: str | None
    settings: HubSettings
    origin: str

    def __post_init__(self) -> None:
        check_names([self.revision or "main"], "option.revision")  # the library makes a path of it

    def load(self, file: Any, commit: str) -> Path:  # noqa: ANN401  (the library's RepoSibling)
        """Download a listed file of the commit, unless it is cached, and return the commit's folder.

        The library takes any file of its cache for whole: one that a crash of the machine cut, for example. The Hub
        itself may have the same content, however damaged: that is for who reads it.

        Raises:
            ArtifactAccessError: it differs twice from what is listed, or the server answers another commit.
        """
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        name, sha256, root = file.rfilename, file.lfs and file.lfs.sha256, Path("/")
        cached = try_to_load_from_cache(self.model_id, name, self.settings.cache_dir, commit)
        is_new, arguments = not isinstance(cached, str), {**self.arguments, "revision": commit}
        for again in (False, True):
            with _at_most(sys.maxsize if file.size is None else file.size):
                loaded = hf_hub_download(self.model_id, name, force_download=again, **arguments)
            path = Path(loaded)
            folder: Path = path.parents[name.count("/")]
            size = path.stat().st_size
            digest = sha256_of(path, root) if sha256 and (is_new or again) else sha256
            found, listed = (folder.name, size, digest), (commit, file.size or size, sha256)
            blob = sha256 or path.resolve().name
            is_whole = again or not damage(path) or sha256_of(path, root) == blob
            if found == listed and is_whole:
                return folder
            logger.warning("hub_file_damaged model=%s file=%s", self.model_id, name)
        path.unlink()  # the next start compares it again
        place = f"{self.settings.site}/{self.model_id}/resolve/{commit}/{name}"
        msg = (
            f"{place} differs twice from what is listed: commit, size and SHA-256 are {found}, listed are "
            f"{shortened(repr(listed))}. Start again; if it stays so, tell who runs the server."
        )
        raise ArtifactAccessError(msg)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments that all downloads of the library share."""
        return {
            "revision": self.revision,
            "cache_dir": self.settings.cache_dir,
            "endpoint": self.settings.endpoint,
            "token": self.settings.token,
        }

    @contextmanager
    def translated(self, what: str, failure: str = "") -> Iterator[None]:
        """Translate the library's errors. `failure`: why the Hub cannot be reached, if that is known.

        Texts and causes of foreign errors are dropped: either may quote request headers, which hold the token.
        """
        try:
            yield
        except ArtifactError:
            raise
        except Exception as error:  # noqa: BLE001  (requests, httpx and hostile variables: no common base)
            messages = self._messages(what, failure, _reason(error))
            kind, msg = next(item for item in messages.items() if isinstance(error, item[0]))
            is_missing = kind.__name__ in _MISSING
            raise (ArtifactNotFoundError if is_missing else ArtifactAccessError)(msg) from None

    def _messages(self, what: str, failure: str, reason: str) -> dict[type[Exception], str]:
        """The library's errors and our messages for them."""
        from huggingface_hub import errors

        site, offline, origin = self.settings.site, self.settings.offline, self.origin
        model = f"the model {self.model_id!r}"
        here = f"there is no folder {self.model_id!r} here, and as an id of the hub: "
        away = (
            f"offline mode is on ({offline}). Load it once without {offline}"
            if offline
            else f"the Hub cannot be reached ({failure or f'{site} did not answer'}). "
            "Check the network, HF_ENDPOINT and HF_TOKEN"
        )
        # From the most specific to the most general: the classes inherit from each other.
        return {
            errors.GatedRepoError: f"{model} is gated: accept its terms at {site}/{self.model_id} and set HF_TOKEN "
            "to a token of that account.",
            errors.RevisionNotFoundError: f"{model} has no revision {self.revision!r} on {site}. Correct "
            "option.revision, or leave it out.",
            errors.RepositoryNotFoundError: f"{site} has no model {self.model_id!r}, or a private one, and there is "
            f"no local folder of that name. Correct {origin}; for a private model set HF_TOKEN.",
            errors.HFValidationError: f"{self.model_id!r} is not a model id: expected 'owner/name'. Correct {origin}.",
            errors.LocalEntryNotFoundError: f"{here}{what} is not completely cached, and {away}, or name a "
            "local folder of the model.",
            errors.EntryNotFoundError: f"{model} has no {CONFIG}; expected a model as transformers saves it. "
            f"Correct {origin}.",
            Exception: f"{here}{what} cannot be loaded from {site} ({reason}). Check the network, HF_ENDPOINT, "
            "HF_HOME and HF_TOKEN and start again, finished files are kept; HF_HUB_OFFLINE=1 takes what is in the "
            "cache.",
        }


def _reason(error: Exception) -> str:
    if status := _status(error):
        return f"HTTP status {status}"
    return getattr(error, "strerror", None) or type(error).__name__


def _connection_failure(url: str, token: str | None) -> str:
    """Return the reason why the Hub cannot be reached; empty if it can.

    The library itself would retry for half a minute.

    Raises:
        huggingface_hub.errors.HfHubHTTPError: the Hub refuses the request.
        ArtifactError: the file is too large.
    """
    from huggingface_hub import errors, get_hf_file_metadata

    try:
        found = get_hf_file_metadata(url, token=token, timeout=_CONNECT_TIMEOUT_S)
    except errors.HfHubHTTPError as error:
        if (status := _status(error)) < _SERVER_ERROR:
            raise
        return f"it answers {status}"
    except ArtifactError:
        raise
    except Exception as error:  # noqa: BLE001  (as in _translated)
        return type(error).__name__
    if (found.size or 0) > MAX_JSON_BYTES:
        msg = f"{CONFIG} has {found.size} bytes on the Hub; expected at most {MAX_JSON_BYTES}. Name another model."
        raise ArtifactError(msg)
    return ""


def _status(error: Exception) -> int:
    """The HTTP status of an error of the library; 0 if it has none."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return status if isinstance(status, int) else 0


def _check_space(
    model_id: str, commit: str | None, sizes: Mapping[str, int], cache_dir: Path
) -> None:
    from huggingface_hub import try_to_load_from_cache

    needed = sum(
        size
        for name, size in sizes.items()
        if not isinstance(try_to_load_from_cache(model_id, name, cache_dir, commit), str)
    )
    cache_dir.mkdir(parents=True, exist_ok=True)
    require_space(
        f"the model {model_id}", cache_dir, needed, "set HF_HUB_CACHE to a folder on a larger disk"
    )


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
            "HF_ENDPOINT is not a URL: its host or port is malformed (the value may hold a password and is not shown). "
            "Correct it; in a user or a password write %2F for '/', %3F for '?' and %23 for '#'"
        )
        raise ArtifactAccessError(msg)


def _cache_dir(values: Mapping[str, str], default: str) -> Path:
    name, below = next(
        (one for one in _CACHES if one[0] in values), ("HF_HOME or HF_HUB_CACHE", "")
    )
    value = values.get(name, default)
    try:
        return Path(value, below).expanduser()
    except RuntimeError as error:
        msg = f"{name} is {value!r}, but there is no such user. Set it to an absolute path"
        raise ArtifactAccessError(msg) from error


def _listed_files(folder: Path) -> set[str] | None:
    """All files of the commit, or None if the library recorded none.

    Source: huggingface_hub 2.4, _tree_cache.py: `trees/<commit>.json`, format_version 1.
    """
    content = _read_object(folder.parents[1] / "trees" / f"{folder.name}.json")
    files = content.get("files")
    return set(files) if content.get("format_version") == 1 and isinstance(files, dict) else None


def _missing_shards(folder: Path, known: Collection[str], chosen: Collection[str]) -> Iterator[str]:
    """Shards that a chosen index names and that are not among the `known` files."""
    for name in chosen:
        shards = _read_object(folder / name).get("weight_map") if name.endswith(_INDEX) else None
        if isinstance(shards, dict):
            # Entries that are not names are reported when the index is read.
            named = {one for one in shards.values() if isinstance(one, str)}
            beside = {str(PurePosixPath(name).parent / one) for one in named}
            yield from beside.difference(known)


def _unfinished_files(folder: Path, chosen: Collection[str]) -> list[str]:
    """Essential files missing from an incomplete snapshot, with the paths of the unfinished blobs.

    Nothing tells which file or commit a blob belongs to: alone they are no reason to refuse a model.
    Source: huggingface_hub 0.25 to 2.4, file_download.py: `blobs/<etag>.incomplete`, `<etag>.<random>.incomplete`.
    """
    blobs = folder.parents[1] / "blobs"
    unfinished = sorted(
        str(path)
        for path in blobs.glob(f"*{_UNFINISHED}")
        if not (blobs / path.name.partition(".")[0]).exists()
    )
    if not unfinished:
        return []
    top = {name.split("/")[0] for name in chosen}
    essential = {
        CONFIG: CONFIG in top,
        "weights": any(n.endswith(WEIGHT_SUFFIXES) and not _SHARD.match(n) for n in top),
        "tokenizer": has_vocabulary(top),
    }
    if lacking := [what for what, is_there in essential.items() if not is_there]:
        return [f"{' and '.join(lacking)} (unfinished: {some(unfinished)})"]
    logger.warning("hub_download_unfinished folder=%s blobs=%r", folder, some(unfinished))
    return []


def _is_read(name: str) -> bool:
    return not PurePosixPath(name).name.startswith(LEGAL_STEMS)


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object; {} if there is none: the reader of its content reports what is wrong with it."""
    try:
        return read_json(path, Path("/"))
    except ArtifactError:
        return {}

"""Folders of S3: download into the cache, read small files, upload.

Needs boto3 (the extra `s3`); import it with `fetch.s3_module` only when a URI needs it. `environ` holds `AWS_*`
variables that override those of the process; botocore finds the rest itself (`~/.aws`, the machine's role).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from boto3.s3.transfer import TransferConfig, create_transfer_manager
from botocore import exceptions as boto
from botocore.config import Config
from botocore.session import Session
from s3transfer.subscribers import BaseSubscriber
from urllib3.exceptions import HTTPError

from djl_python_neuronx.artifacts import cache
from djl_python_neuronx.artifacts.cache import (
    PartialFolder,
    Piece,
    Progress,
    RemoteFile,
    measure_transfer,
)
from djl_python_neuronx.artifacts.folder import (
    EVERYTHING,
    MAX_JSON_BYTES,
    SERVING,
    Selection,
    check_names,
    some,
)
from djl_python_neuronx.artifacts.manifest import FILE_NAME, listed_files, unfinished
from djl_python_neuronx.artifacts.s3_checksums import is_intact, require_algorithms
from djl_python_neuronx.artifacts.s3_transfer import NUM_THREADS, Download
from djl_python_neuronx.config.values import shortened
from djl_python_neuronx.errors import ArtifactAccessError, ArtifactError, ArtifactNotFoundError

ATTEMPTS = 8
"""botocore's three are few for ten threads at once when S3 answers SlowDown."""
_READ_TIMEOUT_S = 30.0
"""Silence after which a request is repeated."""
_CONNECT_TIMEOUT_S = 10
_BODY_ATTEMPTS = 4
_NUM_LISTED = 20
_MAX_LISTED = 100_000
"""Objects of a folder: no model has so many. A page, however empty, counts as 100 of them, so that a listing ends."""

# Source: Amazon S3 user guide, "Access points": the ARN stands where a bucket's name does.
_URI = re.compile(
    r"s3://(?P<bucket>arn:[^/]*:accesspoint[:/][^/]+|[^/]+)(/(?P<key>.*))?", re.DOTALL
)

# Source: Amazon S3 API reference, "Error responses"; the numbers are what HEAD, which has no body, leaves of them.
_ANSWERS = {
    "there is no such bucket ({code}). Correct the bucket's name, or AWS_ENDPOINT_URL": "NoSuchBucket",
    "there is no such object ({code}). Correct the URI": "NoSuchKey 404",
    "S3 refuses access ({code}). Allow this role or user s3:ListBucket on the bucket and {action} in the "
    "folder (and kms:Decrypt for the key of encrypted objects)": "AccessDenied AllAccessDisabled 403",
    "S3 does not accept the credentials ({code}). Renew them: AWS_ACCESS_KEY_ID, AWS_PROFILE or the "
    "machine's role": "InvalidAccessKeyId SignatureDoesNotMatch ExpiredToken InvalidToken",
    "the bucket is in another region{region} ({code}). Set AWS_REGION to the bucket's region": "301 400 "
    "PermanentRedirect AuthorizationHeaderMalformed IllegalLocationConstraintException",
    "the server fails, or its answer is not S3's XML ({code}). Start again later, or correct AWS_ENDPOINT_URL": "500",
    "S3 stays too busy ({code}). Start again later, or raise AWS_MAX_ATTEMPTS; finished parts are kept": "503 "
    "SlowDown ServiceUnavailable InternalError RequestTimeout",
    "this machine's clock is wrong by more than S3 allows ({code}). Set it, for example by NTP": "RequestTimeTooSkewed",
    "an object is in an archive class ({code}). Restore it to a class that can be read at once": "InvalidObjectState",
}
"""Error text with its fix -> the codes of S3's answers that it is for."""
_CODES = {code: text for text, codes in _ANSWERS.items() for code in codes.split()}
_OTHER = "S3 answers {code}: {text}. See the bucket's settings and this message's cause"
_MISSING = frozenset({"NoSuchBucket", "NoSuchKey", "404"})
_REFUSED = frozenset({"AccessDenied", "403"})


class S3Folder:
    """One `s3://bucket/prefix`; a `Remote` for the cache."""

    def __init__(
        self,
        uri: str,
        environ: Mapping[str, str],
        selection: Selection = SERVING,
        *,
        attempts: int = ATTEMPTS,
    ) -> None:
        self.bucket, self.prefix = parse(uri)
        self.uri = f"s3://{self.bucket}/{self.prefix}"
        self._selection = selection
        require_algorithms()
        with translated(self.uri):
            self.client = _connect(environ, attempts)
        endpoint: str = self.client.meta.endpoint_url
        path = f"{self.bucket}/{self.prefix}".rstrip("/")
        self.identity: Sequence[str] = ("s3", endpoint, selection.name, path)

    def list(self) -> Sequence[RemoteFile]:
        """The selected files, by name.

        Raises:
            ArtifactNotFoundError: no such bucket, or no selected file under the prefix.
            ArtifactAccessError: S3 cannot be reached or refuses.
            ArtifactError: a selected key cannot be a file below one folder.
        """
        files = self.list_unchecked()
        check_names([file.name for file in files], self.uri)
        return files

    def list_unchecked(self) -> Sequence[RemoteFile]:
        """As `list`, whatever the names."""
        with translated(self.uri):
            pages = self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=self.prefix
            )
            listed: list[dict[str, Any]] = []
            for number, page in enumerate(pages):
                listed += page.get("Contents", ())
                if max(len(listed), 100 * number) > _MAX_LISTED:
                    msg = f"{self.uri} has more than {_MAX_LISTED:,} objects; expected a model. Name its own folder."
                    raise ArtifactAccessError(msg)
        for one in listed:
            has_key = one.get("Key", "").startswith(self.prefix)
            if has_key and one.get("Size", -1) >= 0 and one.get("ETag"):
                continue
            msg = (
                f"{self.uri} lists {shortened(one)}; expected a key that begins with {self.prefix!r}, a size from 0 on "
                "and an ETag. The server does not answer as S3 does: correct AWS_ENDPOINT_URL."
            )
            raise ArtifactAccessError(msg)
        files = {
            name: RemoteFile(name, item["Size"], item["ETag"])
            for item in listed
            if not _is_marker(item["Key"], item["Size"])
            for name in [item["Key"][len(self.prefix) :]]
        }
        chosen = sorted(self._selection.choose(files.keys()))
        if not chosen:
            what = (
                f"it has {len(files)} objects, and none belongs to a model"
                if files
                else "nothing is there"
            )
            msg = f"{self.uri}: {what}; expected a model folder. Correct the URI; it names a folder, not an object."
            raise ArtifactNotFoundError(msg)
        return [files[name] for name in chosen]

    def download(
        self, pieces: Sequence[Piece], into: PartialFolder, on_bytes: Callable[[int], None]
    ) -> None:
        """See `Remote`."""
        with translated(self.uri):
            Download(self.client, self.bucket, self.prefix, into, on_bytes).run(pieces)

    def verify(self, file: RemoteFile, path: Path) -> bool | None:
        """See `Remote`."""
        with translated(self.uri):
            return is_intact(self.client, self.bucket, self.prefix + file.name, file, path)

    def read(self, name: str) -> bytes | None:
        """The content of a JSON file, or None if it has more than `MAX_JSON_BYTES`.

        It is read again if its body breaks off, which botocore does not retry.

        Raises:
            botocore's NoSuchKey: there is none.
        """
        key = self.prefix + name
        for attempt in itertools.count(1):
            try:
                response = self.client.get_object(Bucket=self.bucket, Key=key)
                content = bytearray()
                with contextlib.closing(response["Body"]) as body:
                    # Whatever length the answer declares: a body in chunks may be endless.
                    while block := body.read(MAX_JSON_BYTES + 1 - len(content)):
                        content += block
                        if len(content) > MAX_JSON_BYTES:
                            return None
                return bytes(content)
            except boto.ClientError as error:  # noqa: PERF203  (a retry)
                if error.response["Error"]["Code"] in _REFUSED and self._is_absent(key):
                    absent = {"Error": {"Code": "NoSuchKey", "Message": key}}
                    raise self.client.exceptions.NoSuchKey(absent, "GetObject") from error
                raise
            except (boto.HTTPClientError, boto.IncompleteReadError, HTTPError) as error:
                if attempt == _BODY_ATTEMPTS:
                    raise boto.ResponseStreamingError(error=error) from None
        return None

    def _is_absent(self, key: str) -> bool:
        """True if a listing shows that there is no such object.

        S3 refuses to read one that is absent to those who may list a part of the bucket only (`s3:prefix`). Source:
        Amazon S3 API reference, GetObject, "Permissions".
        """
        with contextlib.suppress(boto.ClientError):
            listed = self.client.list_objects_v2(Bucket=self.bucket, Prefix=key, MaxKeys=1)
            return all(one.get("Key") != key for one in listed.get("Contents", ()))
        return False

    def read_listed(self) -> set[str]:
        """The files of the upload that is there, finished or not; empty if this package did not write it."""
        try:
            content = self.read(FILE_NAME)
        except self.client.exceptions.NoSuchKey:
            return set()
        return set() if content is None else listed_files(content) - {FILE_NAME}


def fetch(
    uri: str,
    root: Path,
    environ: Mapping[str, str],
    *,
    selection: Selection = SERVING,
    progress: Progress | None = None,
) -> Path:
    """A local copy, below the cache folder `root`, of an `s3://bucket/prefix` as it is now; see `cache.fetch`."""
    return cache.fetch(S3Folder(uri, environ, selection), root, progress=progress)


def list_names(uri: str, environ: Mapping[str, str]) -> Sequence[str]:
    """Names of all files in the folder `uri`; empty if there are none.

    Raises:
        ArtifactError: it cannot be listed.
    """
    try:
        return [file.name for file in S3Folder(uri, environ, EVERYTHING).list_unchecked()]
    except ArtifactNotFoundError:
        return []


def read(uri: str, name: str, environ: Mapping[str, str], *, attempts: int = 3) -> bytes:
    """The content of the JSON file `name` in the folder `uri`. A user often waits for it: few `attempts`.

    Raises:
        ArtifactNotFoundError: no such bucket or object.
        ArtifactAccessError: S3 cannot be reached or refuses.
        ArtifactError: it has more than `MAX_JSON_BYTES`.
    """
    folder = S3Folder(uri, environ, attempts=attempts)
    where = folder.uri + name
    with translated(where):
        content = folder.read(name)
    if content is None:
        msg = (
            f"{where} has more than {MAX_JSON_BYTES} bytes; expected a small file. Correct the URI."
        )
        raise ArtifactError(msg)
    return content


def upload(
    folder: Path, uri: str, environ: Mapping[str, str], *, progress: Progress | None = None
) -> None:
    """Copy a local folder written by this package, which has a manifest.json, to `uri`; the manifest goes last.

    Until then an `unfinished` one stands there, so that no manifest ever vouches for files of another upload. Files
    that an earlier upload listed and this one lacks are removed; other objects below `uri` stay.

    Raises:
        ArtifactNotFoundError: no such bucket, or no manifest in the folder.
        ArtifactAccessError: S3 cannot be reached or refuses, or a file cannot be read.
    """
    files = {
        path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()
    }
    manifest = files.pop(FILE_NAME, None)
    if manifest is None:
        msg = (
            f"{folder} has no {FILE_NAME}; expected a finished folder. Make it again, then upload."
        )
        raise ArtifactNotFoundError(msg)
    remote = S3Folder(uri, environ)
    check_names(files, str(folder))
    total = sum(path.stat().st_size for path in (*files.values(), manifest))
    with (
        translated(remote.uri, action="s3:PutObject and s3:DeleteObject"),
        measure_transfer(remote.uri, total, 0, progress) as on_bytes,
    ):
        earlier = remote.read_listed()
        marker = json.dumps(unfinished(earlier | files.keys())).encode()
        remote.client.put_object(Bucket=remote.bucket, Key=remote.prefix + FILE_NAME, Body=marker)
        for name in sorted(earlier - files.keys()):
            remote.client.delete_object(Bucket=remote.bucket, Key=remote.prefix + name)
        _send(remote, files, on_bytes)
        _send(remote, {FILE_NAME: manifest}, on_bytes)


def _send(remote: S3Folder, files: Mapping[str, Path], on_bytes: Callable[[int], None]) -> None:
    class Counter(BaseSubscriber):  # type: ignore[misc]  # no types
        def on_progress(self, bytes_transferred: int, **_: object) -> None:
            on_bytes(bytes_transferred)

    # Without a word boto3 takes AWS's native client where that is installed.
    config = TransferConfig(preferred_transfer_client="classic", max_concurrency=NUM_THREADS)
    with create_transfer_manager(remote.client, config) as manager:
        futures = [
            manager.upload(str(path), remote.bucket, remote.prefix + name, subscribers=[Counter()])
            for name, path in files.items()
        ]
        for future in futures:
            future.result()


def check_apart(uri: str, source: str) -> None:
    """Refuse an output `uri` and a `source` if one lies in the other.

    Raises:
        ArtifactError: they do.
    """
    (bucket, key), (source_bucket, source_key) = parse(uri), parse(source)
    if bucket == source_bucket and (key.startswith(source_key) or source_key.startswith(key)):
        msg = (
            f"the output {uri} and the model {source} overlap; expected separate folders. "
            "Name another output."
        )
        raise ArtifactError(msg)


def check_free(uri: str, environ: Mapping[str, str]) -> None:
    """Refuse a folder that holds anything but an output of this package, finished or not.

    Raises:
        ArtifactNotFoundError: no such bucket.
        ArtifactAccessError: S3 cannot be reached or refuses.
        ArtifactError: it does.
    """
    folder = S3Folder(uri, environ)
    with translated(folder.uri):
        page = folder.client.list_objects_v2(
            Bucket=folder.bucket, Prefix=folder.prefix, MaxKeys=_NUM_LISTED
        )
        found = [item["Key"][len(folder.prefix) :] for item in page.get("Contents", ())]
        names = [name for name in found if name]
        if not names or folder.read_listed():
            return
    msg = (
        f"the output {folder.uri} holds files that this package did not write ({some(names)}); expected an empty "
        "folder. Name another, or add --overwrite."
    )
    raise ArtifactError(msg)


def parse(uri: str) -> tuple[str, str]:
    """Bucket and key prefix, which ends in `/` unless it is empty.

    Raises:
        ArtifactNotFoundError: it names no bucket.
        ArtifactError: it holds credentials.
    """
    found = _URI.fullmatch(uri)
    if found is None:
        msg = f"{uri!r} names no bucket; expected s3://bucket/folder. Correct the URI."
        raise ArtifactNotFoundError(msg)
    if not found["bucket"].startswith("arn:") and not {"@", ":"}.isdisjoint(found["bucket"]):
        msg = (
            "an s3:// URI holds credentials, or a colon in place of a bucket's name (it is not shown); expected "
            "s3://bucket/folder. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, and take them out of "
            "the URI."
        )
        raise ArtifactError(msg)
    key = (found["key"] or "").rstrip("/")
    return found["bucket"], f"{key}/" if key else ""


def _is_marker(key: str, size: int) -> bool:
    """True for the objects by which consoles and Hadoop show folders. No file's name ends in a slash."""
    return key.endswith("/") or (size == 0 and key.endswith("_$folder$"))


def _connect(environ: Mapping[str, str], attempts: int) -> Any:  # noqa: ANN401  (botocore has no types)
    """A client of S3, for any thread."""
    env = {name: value for name, value in environ.items() if value}
    session = Session(profile=env.get("AWS_PROFILE"))
    if "AWS_ACCESS_KEY_ID" in env and "AWS_SECRET_ACCESS_KEY" in env:
        session.set_credentials(
            env["AWS_ACCESS_KEY_ID"], env["AWS_SECRET_ACCESS_KEY"], env.get("AWS_SESSION_TOKEN")
        )
    mode = env.get("AWS_RETRY_MODE") or session.get_config_variable("retry_mode")
    chosen = env.get("AWS_MAX_ATTEMPTS") or session.get_config_variable("max_attempts")
    config = Config(
        connect_timeout=_CONNECT_TIMEOUT_S,
        read_timeout=_READ_TIMEOUT_S,
        max_pool_connections=NUM_THREADS,
        # botocore's default is "legacy", which knows fewer errors.
        retries={
            "mode": mode if mode == "adaptive" else "standard",
            "total_max_attempts": int(chosen or attempts),
        },
    )
    return session.create_client(
        "s3",
        region_name=env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION"),
        endpoint_url=env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL"),
        config=config,
    )


@contextlib.contextmanager
def translated(uri: str, *, action: str = "s3:GetObject") -> Iterator[None]:
    """Translate errors of AWS's libraries; the result names the URI and what to do.

    Of errors other than S3's own answers only the class is named: their text may quote settings and headers, and
    those hold keys.

    Raises:
        ArtifactNotFoundError: no such bucket or object.
        ArtifactAccessError: everything else.
    """
    try:
        yield
    except boto.ClientError as error:
        raise _translate_answer(uri, error.response, action) from error
    except boto.BotoCoreError as error:
        msg = f"{uri}: {_explain(error)}."
        raise ArtifactAccessError(msg) from None
    except (ValueError, RecursionError) as error:
        # Source: botocore 1.34 to 1.44, endpoint.py, utils.py and parsers.py: malformed endpoints and numbers are plain
        # ValueErrors, and S3RegionRedirectorv2 follows redirects without a limit.
        name = type(error).__name__
        msg = (
            f"{uri}: {name}. Expected a URL such as https://host:port and a server there that answers as S3 does, "
            "without redirects in a circle; correct AWS_ENDPOINT_URL."
        )
        raise ArtifactAccessError(msg) from None


def _translate_answer(uri: str, response: dict[str, Any], action: str) -> ArtifactError:
    code = str(response.get("Error", {}).get("Code", "no code"))
    headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    home = headers.get("x-amz-bucket-region") or response.get("Error", {}).get("Region")
    text = str(response.get("Error", {}).get("Message", "")).strip().rstrip(".")[:300]
    region = f", {home}" if home else ""
    explained = _CODES.get(code, _OTHER).format(code=code, action=action, text=text, region=region)
    kind = ArtifactNotFoundError if code in _MISSING else ArtifactAccessError
    return kind(f"{uri}: {explained}.")


def _explain(error: boto.BotoCoreError) -> str:
    name = type(error).__name__
    match error:
        case boto.NoCredentialsError() | boto.PartialCredentialsError():
            return (
                f"no AWS credentials ({name}). Give this machine a role, or set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            )
        case boto.ProfileNotFound():
            return f"{name}. Correct AWS_PROFILE, or add the profile to ~/.aws/config"
        case boto.CredentialRetrievalError() | boto.TokenRetrievalError() | boto.SSOError():
            return f"the AWS credentials cannot be retrieved: {name}. Sign in again, or give this machine a role"
        case boto.ParamValidationError():
            return f"{name}. Expected s3://bucket/folder; correct the URI"
        case boto.SSLError():
            return (
                f"no trusted connection: {name}. Set AWS_CA_BUNDLE to your authority's certificate"
            )
        case boto.ConnectionError() | boto.HTTPClientError():
            return f"S3 cannot be reached: {name}. Check network, region and AWS_ENDPOINT_URL; finished parts are kept"
        case _:
            return f"{name}. Check the AWS settings (region, profile, endpoint)"

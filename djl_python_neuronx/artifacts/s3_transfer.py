"""Resumable download of S3 objects: many ranges at a time, each written directly to its place in the file.

s3transfer's managers support neither `If-Match` from a listing nor a range to start at, so they can neither resume a
killed download nor notice that an object was replaced after it was listed (s3transfer 0.19).
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from botocore import exceptions as boto
from urllib3.exceptions import HTTPError

from djl_python_neuronx.artifacts.cache import PartialFolder, Piece, RemoteChangedError, RemoteFile
from djl_python_neuronx.errors import ArtifactAccessError

logger = logging.getLogger(__name__)

NUM_THREADS = 10
_ATTEMPTS = 5
"""Attempts in a row without a single byte, after botocore's own, which end where the body begins."""
_READ_BYTES = 2**20
_BACKOFF_S = 0.2

# The stream broke or ended early: the rest can be requested.
_BROKEN = (
    boto.ResponseStreamingError,
    boto.IncompleteReadError,
    boto.ReadTimeoutError,
    boto.ConnectionClosedError,
    HTTPError,
    ConnectionError,
    TimeoutError,
)


@dataclass
class Download:
    """Downloads pieces of the objects of one folder into a `PartialFolder`."""

    client: Any
    bucket: str
    prefix: str
    into: PartialFolder
    on_bytes: Callable[[int], None]
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self, pieces: Sequence[Piece]) -> None:
        """Download and record all `pieces`.

        Raises:
            RemoteChangedError: an object has another ETag than the piece.
            botocore's errors: its retries did not help.
        """
        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="s3") as pool:
            futures = [pool.submit(self._fetch, piece) for piece in pieces]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                self._stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
        for future in futures:
            with suppress(CancelledError):
                future.result()

    def _fetch(self, piece: Piece) -> None:
        with self.into.open(piece.file) as descriptor:
            self._fill(piece, descriptor)
        self.into.record(piece)

    def _fill(self, piece: Piece, descriptor: int) -> None:
        at, attempts = piece.start, 0
        while at < piece.end:
            begun = at
            try:
                for chunk in self._stream(piece, at):
                    self.into.write(descriptor, chunk, at)
                    at += len(chunk)
                    self.on_bytes(len(chunk))
                reason = "ended early"
            except boto.FlexibleChecksumError as error:
                # Some byte since the start of the object is wrong, and nothing tells which.
                self.on_bytes(piece.start - at)
                at = begun = piece.start
                reason = str(error)
            except _BROKEN as error:
                reason = f"{type(error).__name__}: {error}"
            attempts = 0 if at > begun else attempts + 1
            if at < piece.end:
                self._wait(piece, at, attempts, reason)

    def _wait(self, piece: Piece, at: int, attempts: int, reason: str) -> None:
        where = f"s3://{self.bucket}/{self.prefix}{piece.file.name}"
        logger.info("s3_retry uri=%s at=%d attempt=%d reason=%s", where, at, attempts, reason)
        if attempts >= _ATTEMPTS:
            msg = (
                f"{where} breaks off at byte {at} of {piece.file.size}, {attempts} times in a row ({reason}). "
                "Check the network and the endpoint, then start again; finished parts are kept."
            )
            raise ArtifactAccessError(msg)
        # Random, so that the threads do not all return at once.
        self._stop.wait(_BACKOFF_S * 2**attempts * random.uniform(0.5, 1))  # noqa: S311

    def _stream(self, piece: Piece, at: int) -> Any:  # noqa: ANN401  (an iterator of bytes; mypy knows no boto types)
        """The bytes from `at` to the end of the piece, at most."""
        whole = piece.is_whole and at == piece.start
        # Without a range S3 sends the checksum of the object, which botocore then verifies.
        ranged = {} if whole else {"Range": f"bytes={at}-{piece.end - 1}"}
        response = self._get(piece.file, ranged)
        body = response["Body"]
        try:
            if not whole and not str(response.get("ContentRange")).startswith(f"bytes {at}-"):
                where = f"s3://{self.bucket}/{self.prefix}{piece.file.name}"
                msg = (
                    f"the server of {where} does not answer ranges as S3 does: requested from byte {at}, "
                    f"got {response.get('ContentRange')!r}. Correct AWS_ENDPOINT_URL."
                )
                raise ArtifactAccessError(msg)
            while chunk := body.read(_READ_BYTES):
                if self._stop.is_set():  # another thread has failed
                    raise CancelledError
                at += len(chunk)
                if at > piece.end:
                    raise RemoteChangedError(piece.file.name)
                yield chunk
        finally:
            body.close()

    def _get(self, file: RemoteFile, more: Mapping[str, str]) -> dict[str, Any]:
        if self._stop.is_set():
            raise CancelledError
        try:
            response: dict[str, Any] = self.client.get_object(
                Bucket=self.bucket,
                Key=self.prefix + file.name,
                IfMatch=file.etag,
                **more,
            )
        except boto.ClientError as error:
            if _is_changed(error):
                raise RemoteChangedError(file.name) from error
            raise
        if response.get("ETag") != file.etag:  # a server that does not know If-Match
            response["Body"].close()
            raise RemoteChangedError(file.name)
        return response


def _is_changed(error: boto.ClientError) -> bool:
    """True if an object is not, or no longer, the one with the requested ETag."""
    return error.response.get("Error", {}).get("Code") in {
        "PreconditionFailed",
        "412",
        "NoSuchKey",
        "InvalidRange",
    }

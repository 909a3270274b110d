"""Whole objects of S3 through AWS's native client, for networks that one Python process cannot fill."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from djl_python_neuronx.artifacts.remote.cache import RemoteChangedError
from djl_python_neuronx.artifacts.remote.partial import PartialFolder, Piece, RemoteFile
from djl_python_neuronx.errors import ArtifactAccessError

Client = Literal["auto", "classic", "crt"]
"""boto3's words. `auto`: CRT on the instances that it is tuned for (trn1 and others), if it is installed."""

_SMALLEST_BYTES = 64 * 2**20
"""Below it a native transfer gains nothing."""


def split(client: Client, pieces: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
    """Pieces that make up whole large files for the native client, and all the others.

    What a killed download left half-done is among the others: the native client cannot start in the middle.
    """
    if client == "classic" or (client == "auto" and not _is_tuned()):
        return [], list(pieces)
    by_file: dict[RemoteFile, list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_file[piece.file].append(piece)
    native: list[Piece] = []
    others: list[Piece] = []
    for file, parts in by_file.items():
        whole = sum(part.size for part in parts) == file.size >= _SMALLEST_BYTES
        (native if whole else others).extend(parts)
    return native, others


def _is_tuned() -> bool:
    try:
        from awscrt.s3 import is_optimized_for_system
    except ImportError:
        return False
    return bool(is_optimized_for_system())


def download(
    session: Any,  # noqa: ANN401  (botocore's Session, which mypy does not know)
    client: Any,  # noqa: ANN401
    bucket: str,
    prefix: str,
    pieces: Sequence[Piece],
    into: PartialFolder,
    on_bytes: Callable[[int], None],
    request: Mapping[str, str],
) -> None:
    """Fetch and record the files that `pieces` make up.

    Raises:
        RemoteChangedError: an object is not the listed one any more.
        ArtifactAccessError: the transfer failed for good.
        botocore's errors: as S3 answers.
    """
    from awscrt.exceptions import AwsCrtError
    from s3transfer.subscribers import BaseSubscriber

    class Counter(BaseSubscriber):  # type: ignore[misc]  # no types
        def on_progress(self, bytes_transferred: int, **_: object) -> None:
            on_bytes(bytes_transferred)

    files = list(dict.fromkeys(piece.file for piece in pieces))
    with _manager(session, client) as manager:
        futures = [
            manager.download(
                bucket, prefix + file.name, str(into.files / file.name), dict(request), [Counter()]
            )
            for file in files
        ]
        try:
            for future in futures:
                future.result()
        except AwsCrtError as error:
            msg = (
                f"s3://{bucket}/{prefix}: the transfer failed ({error.name}: {error.message}). "
                "Check the network, then start again; whole files are kept."
            )
            raise ArtifactAccessError(msg) from error
    for file in files:
        # The parts of one transfer are held together by ETag inside the client; whether it was the listed one is not.
        head = client.head_object(Bucket=bucket, Key=prefix + file.name, **request)
        if head["ETag"] != file.etag or (into.files / file.name).stat().st_size != file.size:
            raise RemoteChangedError(file.name)
    for piece in pieces:
        into.record(piece)


def _manager(session: Any, client: Any) -> Any:  # noqa: ANN401
    """boto3 makes one as well, but for the default endpoint and region only (boto3 1.44)."""
    from s3transfer import crt

    endpoint, region = client.meta.endpoint_url, client.meta.region_name
    credentials = session.get_credentials()
    native = crt.create_s3_crt_client(
        region=region,
        crt_credentials_provider=credentials
        and crt.BotocoreCRTCredentialsWrapper(credentials).to_crt_credentials_provider(),
        use_ssl=not endpoint.startswith("http:"),
        verify=session.get_config_variable("ca_bundle"),
    )
    serializer = crt.BotocoreCRTRequestSerializer(
        session, {"region_name": region, "endpoint_url": endpoint}
    )
    return crt.CRTTransferManager(native, serializer)

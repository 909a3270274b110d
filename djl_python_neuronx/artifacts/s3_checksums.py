"""Checksums that S3 stores with its objects, compared with local copies.

botocore verifies an object only where one request reads all of it: S3 sends no checksum with a range.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from botocore import exceptions as boto
from botocore import httpchecksum

from djl_python_neuronx.artifacts.cache import RemoteFile

_BLOCK_BYTES = 2**20
# Private in botocore 1.34 to 1.44, which has no public name for them. With awscrt installed crc32c and crc64nvme too.
_ALGORITHMS: Mapping[str, Any] = getattr(httpchecksum, "_CHECKSUM_CLS", {})


def is_intact(client: Any, bucket: str, key: str, file: RemoteFile, path: Path) -> bool | None:  # noqa: ANN401
    """True if `path` has the content of the object `key`, False if not.

    None if S3 stores no checksum of it, or none that this machine can compute.
    """
    try:
        parts = list(_parts(client, {"Bucket": bucket, "Key": key}, file))
    except (
        boto.ClientError
    ):  # a store without these requests, or a role without s3:GetObjectAttributes
        return None
    checks = [(part["Size"], *found) for part in parts if (found := _checksum(part))]
    if sum(size for size, *_ in checks) != file.size:
        return None
    with path.open("rb") as content:
        return all(_digest(content, size, name) == expected for size, name, expected in checks)


def _parts(client: Any, key: Mapping[str, str], file: RemoteFile) -> Iterator[dict[str, Any]]:  # noqa: ANN401
    """Size and checksum of an object or, where S3 has only theirs, of the parts that it was uploaded in."""
    head = client.head_object(**key, IfMatch=file.etag, ChecksumMode="ENABLED")
    # Source: Amazon S3 user guide, "Checking object integrity": the ETag of an upload in parts ends in their number.
    if head.get("ChecksumType") == "FULL_OBJECT" or "-" not in file.etag:
        yield {**head, "Size": file.size}
        return
    left, number = file.size, 0
    while left > 0:
        page = client.get_object_attributes(
            **key, ObjectAttributes=["ObjectParts"], PartNumberMarker=number
        )
        found = page.get("ObjectParts", {}).get("Parts", ())
        yield from found
        left -= sum(part["Size"] for part in found) or left
        number = found[-1]["PartNumber"] if found else 0


def _checksum(part: Mapping[str, Any]) -> tuple[str, str] | None:
    """Algorithm and value of a checksum that can be computed here. One with a `-` is of the parts' checksums."""
    found = ((name, part.get(f"Checksum{name.upper()}", "-")) for name in _ALGORITHMS)
    return next((one for one in found if "-" not in one[1]), None)


def _digest(content: IO[bytes], size: int, name: str) -> str:
    checksum = _ALGORITHMS[name]()
    while size and (block := content.read(min(size, _BLOCK_BYTES))):
        checksum.update(block)
        size -= len(block)
    return str(checksum.b64digest())

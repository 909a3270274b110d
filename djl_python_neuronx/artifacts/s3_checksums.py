"""Checksums that S3 stores with its objects, or else MD5 sums that are their ETags, compared with local copies.

botocore verifies an object only where one request reads all of it: S3 sends no checksum with a range.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from botocore import __version__, httpchecksum
from botocore import exceptions as boto

from djl_python_neuronx.artifacts.cache import RemoteFile
from djl_python_neuronx.errors import ArtifactAccessError

_BLOCK_BYTES = 2**20
# Private in botocore 1.34 to 1.44, which has no public name for them. With awscrt installed crc32c and crc64nvme too.
_ALGORITHMS: Mapping[str, Any] = getattr(httpchecksum, "_CHECKSUM_CLS", {})
_MAX_PARTS = 10_000  # S3's own limit
_MD5 = re.compile(r'"[0-9a-f]{32}"')


def require_algorithms() -> None:
    """Refuse a botocore whose checksums are not found: every download would pass unverified.

    Raises:
        ArtifactAccessError: they are not.
    """
    if not _ALGORITHMS:
        msg = (
            f"what S3 sends cannot be verified: botocore {__version__} has no httpchecksum._CHECKSUM_CLS. Install a "
            "version from 1.34 to 1.44."
        )
        raise ArtifactAccessError(msg)


def is_intact(client: Any, bucket: str, key: str, file: RemoteFile, path: Path) -> bool | None:  # noqa: ANN401
    """True if `path` has the content of the object `key`, False if not.

    None if S3 stores no checksum of it, or none that this machine can compute.
    """
    where = {"Bucket": bucket, "Key": key}
    try:
        head = client.head_object(**where, IfMatch=file.etag, ChecksumMode="ENABLED")
        parts = list(_parts(client, where, file, head))
    except (
        boto.ClientError
    ):  # a store without these requests, or a role without s3:GetObjectAttributes
        return None
    checks = [(part["Size"], *found) for part in parts if (found := _checksum(part))]
    with path.open("rb") as content:
        if sum(size for size, *_ in checks) == file.size:
            return all(_digest(content, size, name) == expected for size, name, expected in checks)
        if not _MD5.fullmatch(file.etag) or not _is_md5(bucket, head):
            return None
        md5 = hashlib.md5(usedforsecurity=False)
        while block := content.read(_BLOCK_BYTES):
            md5.update(block)
        return f'"{md5.hexdigest()}"' == file.etag


def _is_md5(bucket: str, head: Mapping[str, Any]) -> bool:
    """True if an ETag of that form is an MD5 sum: not in directory buckets, nor with other keys than S3's own.

    Source: Amazon S3 API reference, "Object", ETag.
    """
    own_key = head.get("ServerSideEncryption", "AES256") == "AES256"
    return own_key and "SSECustomerAlgorithm" not in head and not bucket.endswith("--x-s3")


def _parts(client: Any, key: Any, file: RemoteFile, head: Any) -> Iterator[Any]:  # noqa: ANN401
    """Size and checksum of an object or, where S3 has only theirs, of the parts that it was uploaded in."""
    # Source: Amazon S3 user guide, "Checking object integrity": the ETag of an upload in parts ends in their number.
    if head.get("ChecksumType") == "FULL_OBJECT" or "-" not in file.etag:
        yield {**head, "Size": file.size}
        return
    left, number, last = file.size, 0, -1
    while left > 0 and last < number <= _MAX_PARTS:
        page = client.get_object_attributes(
            **key, ObjectAttributes=["ObjectParts"], PartNumberMarker=number
        )
        found = page.get("ObjectParts", {}).get("Parts", ())
        yield from found
        left -= sum(part["Size"] for part in found) or left
        last, number = number, found[-1]["PartNumber"] if found else 0


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

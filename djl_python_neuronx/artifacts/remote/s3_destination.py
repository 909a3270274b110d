"""Whether a folder of S3 may be written to; asked before the work whose result goes there."""

from __future__ import annotations

from djl_python_neuronx.artifacts.layouts.folder import some
from djl_python_neuronx.artifacts.remote import s3
from djl_python_neuronx.artifacts.remote.s3_errors import translated
from djl_python_neuronx.errors import ArtifactError

_NUM_LISTED = 20


def check_apart(uri: str, source: str) -> None:
    """Refuse an output `uri` and a `source` of which one lies in the other.

    Raises:
        ArtifactError: they do.
    """
    (bucket, key), (source_bucket, source_key) = s3.parse(uri), s3.parse(source)
    if bucket == source_bucket and (key.startswith(source_key) or source_key.startswith(key)):
        msg = (
            f"the output {uri} and the model {source} lie in each other; expected two separate folders. "
            "Name another output."
        )
        raise ArtifactError(msg)


def check_free(uri: str, settings: s3.Settings) -> None:
    """Refuse a folder that holds something else than an output of ours, finished or not.

    Raises:
        ArtifactNotFoundError: no such bucket.
        ArtifactAccessError: S3 cannot be reached or refuses.
        ArtifactError: it does.
    """
    folder = s3.S3Folder(uri, settings=settings)
    with translated(folder.uri):
        page = folder.client.list_objects_v2(
            Bucket=folder.bucket, Prefix=folder.prefix, MaxKeys=_NUM_LISTED, **folder.request
        )
    found = [item["Key"][len(folder.prefix) :] for item in page.get("Contents", ())]
    names = [name for name in found if name]
    if not names or s3.listed(folder):
        return
    msg = (
        f"the output {folder.uri} holds what is not an output of this package ({some(names)}); expected an empty "
        "folder. Name another, or allow to overwrite it."
    )
    raise ArtifactError(msg)

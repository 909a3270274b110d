"""What S3 refuses, in our words."""

from __future__ import annotations

import pytest

from djl_python_neuronx.errors import ArtifactAccessError, ArtifactNotFoundError
from tests.artifacts.s3_proxy import Fault
from tests.artifacts.s3_rig import (
    SMALL,
    URI,
    fetch,
    published,
    put,
)

pytest_plugins = ["tests.artifacts.s3_fixtures"]


def is_listing(request):
    return "list-type" in request.query


def is_data(request):
    return request.is_data


@pytest.mark.parametrize(
    ("when", "status", "code", "kind", "said"),
    [
        (is_listing, 404, "NoSuchBucket", ArtifactNotFoundError, "no such bucket"),
        (is_listing, 403, "AccessDenied", ArtifactAccessError, "s3:ListBucket"),
        (is_data, 403, "AccessDenied", ArtifactAccessError, "s3:GetObject"),
        (is_listing, 403, "InvalidAccessKeyId", ArtifactAccessError, "Renew them"),
        (is_data, 400, "ExpiredToken", ArtifactAccessError, "Renew them"),
        (is_listing, 301, "PermanentRedirect", ArtifactAccessError, "Set AWS_REGION"),
        (is_listing, 403, "RequestTimeTooSkewed", ArtifactAccessError, "clock"),
        (is_data, 403, "InvalidObjectState", ArtifactAccessError, "Restore"),
        (is_listing, 503, "SlowDown", ArtifactAccessError, "AWS_MAX_ATTEMPTS"),
        (is_data, 503, "SlowDown", ArtifactAccessError, "AWS_MAX_ATTEMPTS"),
        (is_data, 418, "Teapot", ArtifactAccessError, "Teapot: No"),
    ],
)
def test_what_s3_refuses_says_what_to_do(proxy, bucket, tmp_path, when, status, code, kind, said):
    put(bucket, SMALL)
    proxy.rules = [Fault("error", when=when, times=10**6, status=status, code=code)]
    with pytest.raises(kind) as caught:
        fetch(proxy, tmp_path, AWS_MAX_ATTEMPTS="2")
    assert said in str(caught.value)
    assert URI in str(caught.value)
    assert caught.value.__cause__ is not None
    assert published(tmp_path) == []

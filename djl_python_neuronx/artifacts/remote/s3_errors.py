"""What botocore and S3 raise, as our errors. The only border where they are translated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from botocore import exceptions as boto

from djl_python_neuronx.errors import ArtifactAccessError, ArtifactError, ArtifactNotFoundError

_REFUSED = (
    "S3 refuses access ({code}). Allow this role or user s3:ListBucket on the bucket and {action} in the "
    "folder (and kms:Decrypt for the key of encrypted objects); for a requester-pays bucket say so"
)
_CREDENTIALS = (
    "S3 does not accept the credentials ({code}). Renew them: AWS_ACCESS_KEY_ID, AWS_PROFILE or the "
    "machine's role"
)
_REGION = (
    "the bucket lies in another region{region} ({code}). Set AWS_REGION to the bucket's region"
)
_BUSY = "S3 stays too busy ({code}). Start again later, or raise AWS_MAX_ATTEMPTS; what is loaded is kept"
_NOT_FOUND = "there is no such object ({code}). Correct the URI"

# Source: Amazon S3 API reference, "Error responses"; the numbers are what HEAD, which has no body, leaves of them.
_CODES = {
    "NoSuchBucket": "there is no such bucket ({code}). Correct the bucket's name, or AWS_ENDPOINT_URL",
    "NoSuchKey": _NOT_FOUND,
    "404": _NOT_FOUND,
    "AccessDenied": _REFUSED,
    "AllAccessDisabled": _REFUSED,
    "403": _REFUSED,
    "InvalidAccessKeyId": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
    "ExpiredToken": _CREDENTIALS,
    "InvalidToken": _CREDENTIALS,
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "301": _REGION,
    "400": _REGION,
    "RequestTimeTooSkewed": "this machine's clock is wrong by more than S3 allows ({code}). Set it, for example by NTP",
    "InvalidObjectState": "an object lies in an archive class ({code}). Restore it to a class that can be read at once",
    "SlowDown": _BUSY,
    "ServiceUnavailable": _BUSY,
    "InternalError": _BUSY,
    "RequestTimeout": _BUSY,
    "500": _BUSY,
    "503": _BUSY,
}
_MISSING = frozenset({"NoSuchBucket", "NoSuchKey", "404"})


@contextmanager
def translated(uri: str, *, action: str = "s3:GetObject") -> Iterator[None]:
    """Errors of AWS's libraries inside become ours, with the URI and what to do.

    Raises:
        ArtifactNotFoundError: no such bucket or object.
        ArtifactAccessError: everything else.
    """
    try:
        yield
    except boto.ClientError as error:
        raise _answer(uri, error.response, action) from error
    except boto.BotoCoreError as error:
        msg = f"{uri}: {_trouble(error)}."
        raise ArtifactAccessError(msg) from None
    except ValueError as error:
        # Source: botocore 1.34 to 1.44, endpoint.py and utils.py: malformed endpoints are plain ValueErrors.
        msg = f"{uri}: {_named(error)}. Expected a URL such as https://host:port; correct AWS_ENDPOINT_URL."
        raise ArtifactAccessError(msg) from None


def is_changed(error: boto.ClientError) -> bool:
    """True if an object is not, or no longer, the one that was asked for by ETag."""
    return error.response.get("Error", {}).get("Code") in {
        "PreconditionFailed",
        "412",
        "NoSuchKey",
        "InvalidRange",
    }


def _answer(uri: str, response: dict[str, Any], action: str) -> ArtifactError:
    code = str(response.get("Error", {}).get("Code", "no code"))
    headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    home = headers.get("x-amz-bucket-region") or response.get("Error", {}).get("Region")
    text = _CODES.get(
        code, "S3 answers {code}: {said}. See the bucket's settings and this message's cause"
    )
    said = str(response.get("Error", {}).get("Message", "")).strip().rstrip(".")[:300]
    text = text.format(code=code, action=action, said=said, region=f", {home}" if home else "")
    kind = ArtifactNotFoundError if code in _MISSING else ArtifactAccessError
    return kind(f"{uri}: {text}.")


def _trouble(error: boto.BotoCoreError) -> str:
    said = _named(error)
    match error:
        case boto.NoCredentialsError() | boto.PartialCredentialsError():
            return (
                f"no AWS credentials ({said}). Give this machine a role, or set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            )
        case boto.ProfileNotFound():
            return f"{said}. Correct AWS_PROFILE, or add the profile to ~/.aws/config"
        case boto.CredentialRetrievalError() | boto.TokenRetrievalError() | boto.SSOError():
            return f"the AWS credentials cannot be had: {said}. Sign in again, or give this machine a role"
        case boto.ParamValidationError():
            return f"{said}. Expected s3://bucket/folder; correct the URI"
        case boto.SSLError():
            return (
                f"no trusted connection: {said}. Set AWS_CA_BUNDLE to your authority's certificate"
            )
        case boto.ConnectionError() | boto.HTTPClientError():
            return f"S3 cannot be reached: {said}. Check network, region and AWS_ENDPOINT_URL; what is loaded is kept"
        case _:
            return f"{said}. Check the AWS settings (region, profile, endpoint)"


def _named(error: Exception) -> str:
    """The class alone: the text of AWS's libraries may quote settings and headers, and those hold keys."""
    return type(error).__name__

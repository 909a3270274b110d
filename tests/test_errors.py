"""Messages without credentials."""

from __future__ import annotations

import pytest

from djl_python_neuronx import errors
from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.config.values import MAX_SHOWN, as_property, jsonable, shortened
from djl_python_neuronx.errors import redacted

KEY, SECRET = "AKIADUMMYDUMMYDUMMY0", "dummy/Dummy+dummyDUMMYdummyDUMMYdummy00"
S3 = f"s3://{KEY}:{SECRET}@bucket/llama"

SHOWN = [
    (S3, "s3://bucket/llama"),
    (f"s3://{KEY}:12/345@bucket/x", "s3://bucket/x"),
    (f"S3://{KEY}:{SECRET}@bucket", "S3://bucket"),
    (f"s3://{KEY}@bucket/x", "s3://bucket/x"),
    (f"s3:/{KEY}:12/345@bucket/x", "s3:/bucket/x"),
    ("https:/me:s3cr@host/x", "https:/host/x"),
    ("s3://plain/x,https://me:pw@host", "s3://plain/x,https://host"),
    ("s3://a:b@c,s3://d:e@f", "s3://c,s3://f"),
    ("https://me:s3cr@t@host:80/x", "https://host:80/x"),
    ("https://hf_dummy@host/x", "https://host/x"),
    ("http://me:pass/word@host/x", "http://host/x"),
    (
        "https://b.s3.amazonaws.com/k?X-Amz-Credential=AKIA%2F1&X-Amz-Signature=0a1b#x",
        "https://b.s3.amazonaws.com/k?X-Amz-Credential=***&X-Amz-Signature=***",
    ),
]
PLAIN = [
    "s3://bucket/llama@v2",
    "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/mine/x@y",
    "https://host:8080/@team/hf",
    "owner/name",
    "a:b@c",
    "s3:/bucket/llama@v2",
    "a mail to me@host, see C:/x",
    "see https://host/x, or write to me@host: is it 1=1?",
    "",
]


@pytest.mark.parametrize(("text", "shown"), SHOWN)
def test_credentials_in_a_uri_are_not_shown(text, shown):
    assert redacted(text) == shown
    assert (
        redacted(f"option 'x' is {text!r}; expected y@z")
        == f"option 'x' is {shown!r}; expected y@z"
    )
    assert redacted(f"{text}\n{text}") == f"{shown}\n{shown}"


@pytest.mark.parametrize("text", PLAIN)
def test_what_holds_none_is_shown_as_it_is(text):
    assert redacted(text) == text


@pytest.mark.parametrize(
    "part", ["://", "s3:/", "s3://:", "s3://a:b", ":", "/", "@", "?a", "?a=&", "http:/x:"]
)
def test_a_hostile_text_takes_no_longer_than_any(part):
    text = "s3://a:" + part * (2**20 // len(part))
    assert len(redacted(text)) <= len(text)
    assert redacted(text + " s3://K:S@b").endswith(" s3://b")


def every_kind():
    kinds = [errors.ServingError]
    for kind in kinds:  # grows
        kinds += kind.__subclasses__()
    return kinds


def test_every_503_says_when_to_try_again():
    for kind in every_kind():
        assert (kind.status == 503) == (kind.retry_after_s is not None), kind


def test_every_error_and_finding_is_without():
    made = [
        errors.UnknownOptionError(S3, S3, S3),
        errors.InvalidOptionError("x", S3, S3, S3),
        errors.ArtifactMismatchError({S3: (S3, S3)}, S3),
        errors.load_failure(ValueError(S3)),
        errors.ConfigError.collect([errors.ConfigError(S3), errors.ConfigError(f"{S3}.")]),
    ]
    with_message = set(every_kind()) - {type(error) for error in made} | {errors.ConfigError}
    found = Problems()
    for error in [*made, *(kind(S3) for kind in with_message)]:
        assert "DUMMY" not in str(error) + repr(error)
        assert "s3://bucket/llama" in str(error)
        found.add_error(error)
    found.add("warning", S3)
    found.add("note", S3)
    assert not any("DUMMY" in problem.message for problem in found)


def test_values_in_messages_are_without():
    assert shortened(S3) == "s3://bucket/llama"
    assert "DUMMY" not in str(shortened({"url": S3}))
    assert jsonable({"urls": [S3, 1], "none": None}) == {
        "urls": ["s3://bucket/llama", 1],
        "none": None,
    }
    assert as_property(S3) == "s3://bucket/llama"
    assert shortened({"a": 1}) == {"a": 1}
    long = f"https://me:{'DUMMY' * MAX_SHOWN}@host/x"
    assert shortened(long) == "https://host/x", "not cut before the password's end"

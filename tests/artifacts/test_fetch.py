"""Configurations from the hub and from S3, against doubles of both on this machine."""

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, HTTPServer

import huggingface_hub
import pytest

from djl_python_neuronx import artifacts
from djl_python_neuronx.artifacts import fetch
from djl_python_neuronx.artifacts.fetch import fetch_config, is_hub_id, local_folder, uri_scheme
from djl_python_neuronx.errors import ArtifactAccessError, ArtifactError, ArtifactNotFoundError
from tests.doubles import remote_doubles

RETRIES = pytest.mark.skipif(
    int(huggingface_hub.__version__.partition(".")[0]) < 1,
    reason="huggingface_hub before 1.0 retries whatever it is told, and sends any token",
)
CONFIG = {"model_type": "llama", "hidden_size": 64}
BYTES = json.dumps(CONFIG).encode()
KEYS = {
    "AWS_ACCESS_KEY_ID": "id",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "eu-west-1",
}


@pytest.fixture(autouse=True)
def nobodys_account(monkeypatch, tmp_path):
    """No login, no profile and no instance role of whoever runs the tests."""
    for name in [*KEYS, "AWS_PROFILE", "AWS_SESSION_TOKEN", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))


@pytest.fixture
def environ(tmp_path):
    """Variables of a machine with an empty cache; a test adds the endpoint."""
    return {"HF_HOME": str(tmp_path / "hf")}


def test_the_configuration_and_nothing_else_is_read_from_the_hub(environ):
    with remote_doubles.hub({"owner/model": BYTES}) as (url, log):
        assert fetch_config("owner/model", None, {**environ, "HF_ENDPOINT": url}) == CONFIG
    assert {path for _, path, _ in log} == {"/owner/model/resolve/main/config.json"}


def test_a_revision_is_asked_for(environ):
    with remote_doubles.hub({"owner/model": BYTES}) as (url, log):
        fetch_config("owner/model", "v1", {**environ, "HF_ENDPOINT": url})
    assert "/owner/model/resolve/v1/config.json" in {path for _, path, _ in log}


def test_what_is_no_id_is_not_asked_of_the_hub(environ):
    words = r"'a/b/c' is neither a local folder nor.*option\.model_id"
    with pytest.raises(ArtifactNotFoundError, match=words):
        fetch_config("a/b/c", None, environ)


@pytest.mark.parametrize("variable", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"])
def test_a_token_opens_a_gated_model(environ, variable):
    double = remote_doubles.hub({"owner/gated": BYTES}, gated={"owner/gated"}, tokens={"hf_good"})
    with double as (url, _):
        environ = {**environ, "HF_ENDPOINT": url, variable: "hf_good"}
        assert fetch_config("owner/gated", None, environ) == CONFIG


HUB_REFUSALS = [
    # model, revision, error, words of its message
    ("owner/gated", None, ArtifactAccessError, ["gated", "accept its terms", "HF_TOKEN"]),
    ("owner/absent", None, ArtifactNotFoundError, ["no model 'owner/absent'", "option.model_id"]),
    ("owner/model", "v9", ArtifactNotFoundError, ["no revision 'v9'", "option.revision"]),
    ("owner/empty", None, ArtifactNotFoundError, ["no config.json", "transformers"]),
    ("owner/broken", None, ArtifactError, ["not valid JSON"]),
    ("owner/list", None, ArtifactError, ["JSON list", "expected an object"]),
]


@pytest.mark.parametrize(("model", "revision", "error", "words"), HUB_REFUSALS)
def test_what_the_hub_refuses(environ, model, revision, error, words):
    models = {
        "owner/gated": BYTES,
        "owner/model": BYTES,
        "owner/empty": None,
        "owner/broken": b"{",
        "owner/list": b"[]",
    }
    with (
        remote_doubles.hub(models, gated={"owner/gated"}) as (url, _),
        pytest.raises(error) as caught,
    ):
        fetch_config(model, revision, {**environ, "HF_ENDPOINT": url})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("model", ["owner/absent", "/no/folder", "ftp://nowhere/model"])
def test_what_is_not_there_is_told_by_the_option_that_named_it(environ, tmp_path, model):
    origin = "option.speculative_draft_model"
    with remote_doubles.hub({}) as (url, _):
        environ = {**environ, "HF_ENDPOINT": url}
        with pytest.raises(ArtifactError, match=origin) as config:
            fetch_config(model, None, environ, origin=origin)
        with pytest.raises(ArtifactError, match=origin) as whole:
            fetch.fetch(model, environ=environ, root=tmp_path, origin=origin)
    for caught in (config, whole):
        assert "option.model_id" not in str(caught.value)


@RETRIES
def test_the_cache_serves_when_the_hub_is_away(environ, monkeypatch, caplog):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)  # between the hub client's retries
    with remote_doubles.hub({"owner/model": BYTES}) as (url, _):
        fetch_config("owner/model", None, {**environ, "HF_ENDPOINT": url})
    assert fetch_config("owner/model", None, {**environ, "HF_ENDPOINT": url}) == CONFIG
    no_folder = "there is no folder 'owner/other' here, and as an id of the hub: "
    with pytest.raises(ArtifactAccessError, match=f"{no_folder}.*cannot be reached"):
        fetch_config("owner/other", None, {**environ, "HF_ENDPOINT": url})
    assert sum(slept) < 2
    assert "etry" not in caplog.text


SECRET = "hf_5ecret"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        pytest.param(503, "cannot be reached (it answers 503)", marks=RETRIES),
        (418, "there is no folder 'owner/model' here, and as an id of the hub: "),
        (418, "HTTP status 418"),
    ],
)
def test_a_hub_that_is_out_of_order(environ, monkeypatch, status, words):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)

    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    environ = {**environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    try:
        with pytest.raises(ArtifactAccessError) as caught:
            fetch_config("owner/model", None, environ)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert words in str(caught.value)
    assert sum(slept) < 2


@pytest.mark.parametrize("variable", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"])
def test_a_token_with_a_line_end_is_a_token(environ, variable):
    double = remote_doubles.hub({"owner/gated": BYTES}, gated={"owner/gated"}, tokens={SECRET})
    with double as (url, _):
        environ = {**environ, "HF_ENDPOINT": url + "\n", variable: f" {SECRET}\n"}
        assert fetch_config("owner/gated", None, environ) == CONFIG


@pytest.mark.parametrize(
    "token",
    [
        f"{SECRET}\nX-Other: 1",
        f"{SECRET}\r\n{SECRET}",
        pytest.param(f"\0{SECRET}", marks=RETRIES),
        pytest.param(f"é{SECRET}", marks=RETRIES),
    ],
)
def test_a_token_that_no_header_takes_is_not_told(environ, token):
    with (
        remote_doubles.hub({"owner/model": BYTES}) as (url, _),
        pytest.raises(ArtifactAccessError, match="HF_TOKEN") as caught,
    ):
        fetch_config("owner/model", None, {**environ, "HF_ENDPOINT": url, "HF_TOKEN": token})
    assert SECRET not in "".join(traceback.format_exception(caught.value))


HOSTILE = [
    {"HF_ENDPOINT": "http://[x"},
    {"HF_ENDPOINT": "a\0b"},
    {"HF_ENDPOINT": "file:///etc"},
    {"HF_HUB_CACHE": "a\0b"},
]


@pytest.mark.parametrize("variables", HOSTILE, ids=str)
def test_a_variable_that_makes_no_sense_is_an_error_of_ours(environ, variables):
    with remote_doubles.hub({"owner/model": BYTES}) as (url, _):
        environ = {"HF_ENDPOINT": url, **environ, **variables}
        with pytest.raises(ArtifactAccessError, match=r"HF_ENDPOINT"):
            fetch_config("owner/model", None, environ)


@pytest.mark.parametrize(
    "call",
    [
        "fetch_config('owner/model', None, environ)",
        "fetch('owner/model', environ=environ, root=Path())",
    ],
)
def test_an_endpoint_that_the_hubs_library_refuses_to_be_imported_with(call):
    program = (
        "import os\n"
        "from pathlib import Path\n"
        "from djl_python_neuronx.artifacts.fetch import fetch, fetch_config\n"
        "from djl_python_neuronx.errors import ArtifactAccessError\n"
        "environ = dict(os.environ)\n"
        f"try: {call}\n"
        "except ArtifactAccessError as error: print(error)\n"
    )
    environ = {"HF_ENDPOINT": "http://[x", "PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    )
    assert "HF_ENDPOINT" in ran.stdout
    assert not ran.stderr


@pytest.mark.parametrize("model", ["owner/gated", "owner/absent"])
def test_the_password_of_an_endpoint_is_not_told(environ, model):
    with remote_doubles.hub({"owner/gated": BYTES}, gated={"owner/gated"}) as (url, _):
        endpoint = url.replace("://", f"://user:{SECRET}@")
        with pytest.raises(ArtifactError) as caught:
            fetch_config(model, None, {**environ, "HF_ENDPOINT": endpoint})
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert url in str(caught.value)


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_asks_nobody(environ, variable):
    with remote_doubles.hub({"owner/model": BYTES}) as (url, log):
        offline = {**environ, "HF_ENDPOINT": url, variable: "1\n"}
        with pytest.raises(ArtifactAccessError, match=rf"offline mode is on \({variable}\)"):
            fetch_config("owner/model", None, offline)
    assert not log


@pytest.mark.parametrize("folder", ["bucket/models/llama", "bucket/models/llama/"])
def test_the_configuration_is_read_from_s3(folder):
    pytest.importorskip("boto3", reason="needs the `s3` extra")
    with remote_doubles.s3({"bucket/models/llama/config.json": BYTES}) as (url, log):
        assert fetch_config(f"s3://{folder}", None, {**KEYS, "AWS_ENDPOINT_URL": url}) == CONFIG
    (entry,) = log
    assert entry[:2] == ("GET", "/bucket/models/llama/config.json")
    assert "Credential=id/" in entry[2]["Authorization"]
    assert "/eu-west-1/s3/" in entry[2]["Authorization"]


S3_REFUSALS = [
    ("s3://bucket/other", KEYS, ArtifactNotFoundError, ["no config.json", "NoSuchKey"]),
    ("s3://nowhere/x", KEYS, ArtifactNotFoundError, ["NoSuchBucket"]),
    ("s3://secret/x", KEYS, ArtifactAccessError, ["AccessDenied", "s3:GetObject"]),
    ("s3://bucket/broken", KEYS, ArtifactError, ["not valid JSON"]),
    ("s3://bucket/list", KEYS, ArtifactError, ["expected an object"]),
    ("s3://bucket/large", KEYS, ArtifactError, ["has more than 33554432 bytes"]),
    ("s3://", KEYS, ArtifactNotFoundError, ["names no bucket"]),
    ("s3://bucket/model", {}, ArtifactAccessError, ["credentials"]),
]


@pytest.mark.parametrize(("uri", "keys", "error", "words"), S3_REFUSALS)
def test_what_s3_refuses(uri, keys, error, words):
    pytest.importorskip("boto3", reason="needs the `s3` extra")
    objects = {
        "bucket/broken/config.json": b"{",
        "bucket/list/config.json": b"[1]",
        "bucket/large/config.json": b" " * (32 * 2**20 + 1),
        "secret/x/config.json": BYTES,
    }
    with (
        remote_doubles.s3(objects, denied={"secret"}) as (url, _),
        pytest.raises(error) as caught,
    ):
        fetch_config(uri, None, {**keys, "AWS_ENDPOINT_URL": url})
    for word in words:
        assert word in str(caught.value)


def test_s3_out_of_reach():
    pytest.importorskip("boto3", reason="needs the `s3` extra")
    with remote_doubles.s3({}) as (url, _):
        pass
    with pytest.raises(ArtifactAccessError, match="AWS_ENDPOINT_URL"):
        fetch_config("s3://bucket/model", None, {**KEYS, "AWS_ENDPOINT_URL": url})


def test_keys_with_a_line_end_are_keys():
    pytest.importorskip("boto3", reason="needs the `s3` extra")
    keys = {name: f" {value}\n" for name, value in KEYS.items()}
    with remote_doubles.s3({"bucket/m/config.json": BYTES}) as (url, log):
        environ = {**keys, "AWS_ENDPOINT_URL": f"{url}\n"}
        assert fetch_config("s3://bucket/m", None, environ) == CONFIG
    assert "Credential=id/" in log[0][2]["Authorization"]


@pytest.mark.parametrize(
    "variables",
    [
        {"AWS_ACCESS_KEY_ID": f"id\n{SECRET}"},
        {"AWS_SESSION_TOKEN": f"t\n{SECRET}"},
        {"AWS_SECRET_ACCESS_KEY": ""},
        {"AWS_ACCESS_KEY_ID": ""},
        {"AWS_PROFILE": SECRET},
        {"AWS_REGION": f"x y {SECRET}"},
        {"AWS_ENDPOINT_URL": f"http://user:{SECRET}@[x"},
    ],
    ids=str,
)
def test_keys_that_make_no_sense_are_not_told(variables):
    pytest.importorskip("boto3", reason="needs the `s3` extra")
    with (
        remote_doubles.s3({"bucket/m/config.json": BYTES}) as (url, _),
        pytest.raises(ArtifactAccessError, match="AWS") as caught,
    ):
        fetch_config("s3://bucket/m", None, {**KEYS, "AWS_ENDPOINT_URL": url, **variables})
    text = "".join(traceback.format_exception(caught.value))
    for word in (SECRET, "Credential=", "Signature="):
        assert word not in text


def test_s3_without_its_package(monkeypatch):
    for name in ("boto3", "boto3.s3.transfer"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"{artifacts.__name__}.s3", raising=False)
    monkeypatch.delattr(artifacts, "s3", raising=False)
    with pytest.raises(ArtifactAccessError, match=r"djl-python-neuronx\[s3\]"):
        fetch_config("s3://bucket/model", None, {})


@pytest.mark.parametrize("uri", ["djl://ai.djl/model", "gs://bucket/model", "https://host/model"])
def test_a_scheme_that_nobody_reads(uri):
    with pytest.raises(ArtifactError, match=r"expected|Give a local folder.*s3://"):
        fetch_config(uri, None, {})


@pytest.mark.parametrize("name", ["/no/such", "./x", "a/b/c", "a//b", "", "a b", "x" * 97, "a/b\n"])
def test_what_is_no_hub_id(name):
    assert not is_hub_id(name)
    with pytest.raises(ArtifactNotFoundError, match=r"owner/name"):
        fetch_config(name, None, {})


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Meta-Llama-3-8B", "a.b/c_d-1"])
def test_hub_ids(name):
    assert is_hub_id(name)


def test_s3_is_one_module(monkeypatch, tmp_path):
    class Memory:
        def read(self, uri, name, environ):
            return json.dumps({"model_type": uri + name + environ["X"]}).encode()

        def list_names(self, uri, environ):
            return ["config.json"]

        def fetch(self, uri, root, environ, *, selection, progress):
            root.mkdir()
            (root / "config.json").write_bytes(self.read(uri, "", environ))
            return root

    monkeypatch.setattr(fetch, "s3_module", lambda uri: Memory())
    environ = {"X": "b"}
    assert fetch_config("s3://a", None, environ) == {"model_type": "s3://aconfig.jsonb"}
    assert fetch.list_names("s3://a", environ, origin="here") == ["config.json"]
    folder = fetch.fetch("s3://a", environ=environ, root=tmp_path / "got")
    assert (folder / "config.json").read_bytes() == b'{"model_type": "s3://ab"}'


@pytest.mark.parametrize(
    ("model_id", "expected"),
    [("S3://bucket/x", "s3"), ("owner/name", None), ("C:\\model", None), ("/opt/s3://x", None)],
)
def test_schemes(model_id, expected):
    assert uri_scheme(model_id) == expected


def test_local_folders(tmp_path, monkeypatch):
    for name in ("base/inner", "here"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "base"
    assert local_folder(None, base) == base
    assert local_folder(None, None) is None
    assert local_folder("inner", base) == base / "inner"
    assert local_folder("here", base).resolve() == tmp_path / "here"
    assert local_folder(str(tmp_path / "here"), base) == tmp_path / "here"
    assert local_folder("owner/name", base) is None
    assert local_folder("s3://bucket/here", base) is None
    assert local_folder("a\0b", base) is None
    assert local_folder("n" * 5000, base) is None

"""The embedded server's edges on real sockets: API keys, CORS, TLS, the access log, the second port."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the `server` extra")
httpx = pytest.importorskip("httpx", reason="needs httpx")
trustme = pytest.importorskip("trustme", reason="needs trustme")

from djl_python_neuronx import cli  # noqa: E402
from djl_python_neuronx.config.options import ServingOptions  # noqa: E402
from djl_python_neuronx.config.sources import API_KEYS  # noqa: E402
from djl_python_neuronx.errors import ConfigError, UnauthorizedError  # noqa: E402
from djl_python_neuronx.server import http, keys, process  # noqa: E402
from djl_python_neuronx.server.app import Application, create_app  # noqa: E402
from djl_python_neuronx.server.http import PROBES, tls_context  # noqa: E402
from djl_python_neuronx.server.keys import read_keys  # noqa: E402
from djl_python_neuronx.server.models import Model  # noqa: E402
from djl_python_neuronx.server.process import Server  # noqa: E402
from djl_python_neuronx.server.responses import error_response  # noqa: E402
from djl_python_neuronx.service import Service  # noqa: E402
from djl_python_neuronx.telemetry import log_load_failure, setup_logging  # noqa: E402
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend  # noqa: E402
from tests.doubles.toy_service import toy_service  # noqa: E402
from tests.processes import PATIENCE_S, held_port, wait_until  # noqa: E402
from tests.server.raw_http import (  # noqa: E402
    CHUNKED,
    CLOSE,
    REQUEST,
    SHORT_S,
    connect,
    content,
    post,
    read_all,
    status,
    talk,
    wait_for_connections,
)
from tests.server.running import Running, answer, body, serving  # noqa: E402

KEY, OTHER = "sk-first-0123456789", "sk-second"
DIGESTS = read_keys(None, f"{KEY}, {OTHER}")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(api_keys=DIGESTS) as running:
        yield running


def extracted(line: str) -> dict[tuple[str, str, str], float]:
    """The metrics that CloudWatch Logs makes of a line, by namespace, model and name.

    Source: CloudWatch's user guide, "Specification: Embedded metric format".
    """
    event = json.loads(line)  # nothing before or after the object
    about = event["_aws"]
    assert abs(about["Timestamp"] / 1000 - time.time()) < PATIENCE_S
    (directive,) = about["CloudWatchMetrics"]
    assert directive.keys() == {"Namespace", "Dimensions", "Metrics"}
    assert directive["Dimensions"] == [["model"]]
    assert 0 < len(directive["Metrics"]) <= 100
    found = {}
    for metric in directive["Metrics"]:
        value = event[metric["Name"]]
        assert isinstance(value, (int, float))
        found[directive["Namespace"], event["model"], metric["Name"]] = value
    return found


def test_no_name_of_a_folder_looks_like_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging()
    name = "a\n2026-11-24 05:00:00,000 INFO fake\r\x1b[2J\x85\u2028b"
    logging.getLogger("djl_python_neuronx.x").info("compiled folder=%s", Path(name))
    log_load_failure(FileNotFoundError(2, "No such file", name))
    log_load_failure(ConfigError(f"two problems:\n  - {name}"))
    lines = capsys.readouterr().err.split("\n")
    assert all(line.isprintable() for line in lines)
    assert sum(line.startswith("20") for line in lines) == 3
    assert "    2026-11-24 05:00:00,000 INFO fake\\r\\x1b[2J\\x85\\u2028b" in lines
    assert any(line.startswith("    FileNotFoundError: ") for line in lines)


class TestCloudWatch:
    def test_lines_add_up_to_the_metrics(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(process, "LOG_METRICS_S", 0)
        setup_logging()
        seen: list[dict[tuple[str, str, str], float]] = []

        def total(name: str) -> float:
            lines = capsys.readouterr().err.splitlines()
            seen.extend(extracted(line) for line in lines if line.startswith('{"_aws"'))
            return sum(one.get(("chat/1", "toy", f"djl_neuronx_{name}"), 0) for one in seen)

        with serving(cloudwatch_namespace="chat/1", access_log="off") as server:
            wait_until(lambda: total("generated_tokens_total") == 0 and seen)
            other = json.dumps({"prompt": [5, 6], "max_tokens": 5}).encode()
            openai = post(other, CLOSE, path="/v1/completions")
            # Two values of the label `protocol`, which the lines do not have.
            for request in (post(REQUEST, CLOSE), post(REQUEST, CLOSE), openai):
                assert status(talk(server, request)) == 200
            wait_until(lambda: total("requests_total") == 3)
            # In the lines after these nothing is counted again.
            last = len(seen)
            wait_until(lambda: total("requests_total") == 3 and len(seen) > last)
            text = httpx.get(server.url + "/metrics", timeout=PATIENCE_S).text
        made = next(
            line
            for line in text.splitlines()
            if "_generated_tokens_total" in line and line[0] != "#"
        )
        assert total("generated_tokens_total") == float(made.split()[-1]) > 3
        assert total("request_seconds_count") == 3
        assert 0 < total("request_seconds_sum") < 3 * PATIENCE_S
        # Gauges are what they are at the time, in each line.
        assert {one["chat/1", "toy", "djl_neuronx_waiting_requests"] for one in seen} == {0}
        assert all(("chat/1", "toy", "djl_neuronx_slots_in_use") in one for one in seen)
        assert not {name for one in seen for *_, name in one if name.endswith("_bucket")}

    def test_without_a_namespace_there_are_none(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(process, "LOG_METRICS_S", 0)
        looked = threading.Event()
        log_metrics = Application.log_metrics

        async def noted(application: Application) -> None:
            await log_metrics(application)
            looked.set()

        monkeypatch.setattr(Application, "log_metrics", noted)
        setup_logging()
        with serving():
            assert looked.wait(PATIENCE_S)
        assert "_aws" not in capsys.readouterr().err


class TestKeys:
    @pytest.mark.parametrize(
        ("header", "admitted"),
        [
            (f"Authorization: Bearer {KEY}", True),
            (f"authorization: bearer   {OTHER}", True),
            (f"x-api-key: {OTHER}", True),
            (f"X-Api-Key:  {KEY}\r\nAuthorization: Bearer none", True),
            (f"x-api-key: none\r\nAuthorization: Bearer {KEY}", True),
            (f"x-api-key: Bearer {KEY}", False),
            ("x-api-key:", False),
            ("x-api-key: " + DIGESTS[0].hex(), False),
            ("Accept: */*", False),
            ("Authorization:", False),
            ("Authorization: Bearer", False),
            ("Authorization: Bearer ", False),
            (f"Authorization: {KEY}", False),
            (f"Authorization: Basic {KEY}", False),
            (f"Authorization: Bearer {KEY}x", False),
            (f"Authorization: Bearer {KEY[:-1]}", False),
            (f"Authorization: Bearer {KEY.upper()}", False),
            (f"Authorization: Bearer {KEY} {OTHER}", False),
            (f"Authorization: Bearer {KEY},{OTHER}", False),
            (f"Cookie: {KEY}", False),
            ("Authorization: Bearer \xe9", False),
            ("Authorization: Bearer " + DIGESTS[0].hex(), False),
        ],
    )
    def test_a_request_needs_one_of_the_keys(
        self, server: Running, header: str, admitted: bool
    ) -> None:
        client = connect(server)
        client.sendall(f"POST /invocations HTTP/1.1\r\nHost: toy\r\n{header}\r\n".encode("latin-1"))
        client.sendall(f"Content-Length: {len(REQUEST)}\r\n{CLOSE}\r\n\r\n".encode() + REQUEST)
        reply = read_all(client)
        if admitted:
            assert answer([5, 6]).encode() in reply
        else:
            assert (status(reply), content(reply)["type"]) == (401, "invalid_api_key")
            assert b"www-authenticate: Bearer\r\n" in reply

    def test_every_route_but_the_probes_needs_a_key(self, server: Running) -> None:
        paths = {route.path_format for route in create_app(server.application).routes}  # type: ignore[attr-defined]
        assert {"/ping", "/info", "/metrics", "/invocations", "/predictions/{model}"} <= paths
        for path in {*paths, "/nothing", "/docs"}:
            for method in ("GET", "POST", "OPTIONS"):
                found = httpx.request(method, server.url + path, timeout=PATIENCE_S)
                assert (found.status_code == 401) == (path not in PROBES), (method, path)
                if found.status_code == 401:  # in the shape of the path's protocol
                    shaped = error_response(UnauthorizedError(keys.MISSING), path=path)
                    assert found.content == shaped.body

    def test_the_body_of_a_refused_request_is_not_read(self, server: Running) -> None:
        client = connect(server)
        client.sendall(post(b"", "Content-Length: 1000", "Expect: 100-continue", length=False))
        reply = read_all(client)
        assert (status(reply), b"connection: close" in reply) == (401, True)

    def test_no_key_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        with serving(api_keys=DIGESTS) as server:
            for key in (KEY, "sk-wrong"):
                for header in (f"Authorization: Bearer {key}", f"x-api-key: {key}"):
                    talk(server, post(REQUEST, CLOSE, header, path=f"/nothing?key={key}"))
            wait_until(lambda: caplog.text.count("path=/nothing ") == 4)
        assert "sk-" not in caplog.text

    def test_all_keys_are_compared_whichever_matches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compared = []

        def compare(one: bytes, two: bytes) -> bool:
            compared.append((one, two))
            return one == two

        monkeypatch.setattr(keys.hmac, "compare_digest", compare)
        check = keys.KeyCheck(None, DIGESTS)  # type: ignore[arg-type]
        for key in (KEY, OTHER, "none"):
            compared.clear()
            found = check._admitted([(b"authorization", f"Bearer {key}".encode())])
            assert (found in DIGESTS) == (key != "none")
            assert [two for _, two in compared] == DIGESTS
            assert {len(one) for one, _ in compared} == {len(DIGESTS[0])}
            assert check._admitted([(b"x-api-key", key.encode())]) == found

    def test_keys_come_from_a_file_and_the_variable(self, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        file.write_text(f"# of team A\r\n{KEY}\r\n\n  # of B\n  {OTHER}  \n")
        assert read_keys(str(file), None) == DIGESTS
        assert read_keys(str(file), "third,") == [*DIGESTS, *read_keys(None, "third")]
        assert read_keys(None, None) == []

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("", "it has no API key"),
            ("# nothing\n\n", "it has no API key"),
            (f"{KEY}\nsk-two words\n", "part 2 is not an API key"),
            ("sk-caf\xe9", "part 1 is not an API key"),
            ("sk-\0", "part 1 is not an API key"),
        ],
    )
    def test_what_is_no_key_is_an_error_that_does_not_show_it(
        self, tmp_path: Path, text: str, says: str
    ) -> None:
        file = tmp_path / "keys"
        file.write_text(text)
        with pytest.raises(ConfigError, match=says) as caught:
            read_keys(str(file), None)
        assert str(file) in str(caught.value)
        assert "sk-" not in str(caught.value)

    @pytest.mark.parametrize("variable", ["", " , ", f"{KEY},two words"])
    def test_a_variable_without_keys_is_an_error(self, variable: str) -> None:
        with pytest.raises(ConfigError, match=API_KEYS) as caught:
            read_keys(None, variable)
        assert KEY not in str(caught.value)

    @pytest.mark.parametrize("name", ["missing", "folder", "keys\0"])
    def test_a_file_that_cannot_be_read_is_an_error(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "folder").mkdir()
        with pytest.raises(ConfigError, match=r"option\.api_key_file: .*one API key in each line"):
            read_keys(str(tmp_path / name), None)

    def test_the_command_reads_keys_and_no_later_process_gets_the_variable(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given: dict[str, Any] = {}
        monkeypatch.setattr(process, "serve", lambda load, **more: given.update(more) or 0)
        monkeypatch.setenv(API_KEYS, OTHER)
        (tmp_path / "keys").write_text(KEY)
        command = ["serve", str(tmp_path), "-o", f"api_key_file={tmp_path / 'keys'}"]
        assert cli.main(command) == 0
        assert given["api_keys"] == DIGESTS
        assert API_KEYS not in os.environ

    def test_a_wrong_file_ends_the_command(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["serve", str(tmp_path), "-o", "api_key_file=/nowhere/keys"]) == 1
        assert "option.api_key_file" in capsys.readouterr().err


SITE = "https://app.test"
PREFLIGHT = {
    "Origin": SITE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}
ALLOWED = "access-control-allow-origin"


class TestCors:
    def test_off_by_default(self) -> None:
        with serving() as server:
            url = server.url + "/invocations"
            found = httpx.post(url, json=body([5]), headers={"Origin": SITE}, timeout=PATIENCE_S)
            preflight = httpx.options(url, headers=PREFLIGHT, timeout=PATIENCE_S)
            assert (found.status_code, preflight.status_code) == (200, 405)
            assert not [name for name in (*found.headers, *preflight.headers) if "access-" in name]

    def test_a_page_of_an_allowed_site_may_use_the_server_with_its_key(self) -> None:
        with serving(api_keys=DIGESTS, cors_allow_origins=(SITE,)) as server:
            url = server.url + "/invocations"
            preflight = httpx.options(url, headers=PREFLIGHT, timeout=PATIENCE_S)
            assert (preflight.status_code, preflight.headers[ALLOWED]) == (200, SITE)
            assert "authorization" in preflight.headers["access-control-allow-headers"]
            for key, code in ((KEY, 200), ("wrong", 401)):  # a page can read the error too
                headers = {"Origin": SITE, "Authorization": f"Bearer {key}"}
                found = httpx.post(url, json=body([5]), headers=headers, timeout=PATIENCE_S)
                assert (found.status_code, found.headers[ALLOWED]) == (code, SITE)
            other = httpx.options(
                url, headers={**PREFLIGHT, "Origin": "https://evil.test"}, timeout=PATIENCE_S
            )
            assert (other.status_code, ALLOWED in other.headers) == (400, False)


@pytest.fixture(scope="module")
def authority() -> Any:
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """PEM files by name."""
    folder = tmp_path_factory.mktemp("tls")
    issued, other = authority.issue_cert("127.0.0.1"), authority.issue_cert("127.0.0.1")
    contents = {
        "chain": issued.cert_chain_pems[0],
        "key": issued.private_key_pem,
        "both": issued.private_key_and_cert_chain_pem,
        "other_key": other.private_key_pem,
        "authority": authority.cert_pem,
    }
    for name, pem in contents.items():
        pem.write_to_path(str(folder / name))
    (folder / "junk").write_text("no PEM")
    return {path.name: str(path) for path in folder.iterdir()} | {"missing": str(folder / "no")}


@pytest.fixture(scope="module")
def tls(files: dict[str, str]) -> ssl.SSLContext:
    context = tls_context(files["chain"], files["key"], None, None)
    assert context is not None
    return context


@pytest.fixture(scope="module")
def trusting(files: dict[str, str]) -> ssl.SSLContext:
    """A client's TLS context that trusts the authority."""
    return ssl.create_default_context(cafile=files["authority"])


def secure(server: Running, trusting: ssl.SSLContext, **options: int) -> ssl.SSLSocket:
    return trusting.wrap_socket(connect(server, **options), server_hostname="127.0.0.1")


def read_object(client: socket.socket) -> bytes:
    """An answer with a JSON object. The client closes, which a server that still reads waits for with TLS."""
    reply = b""
    while not reply.endswith(b"}"):
        part = client.recv(65536)
        assert part, reply
        reply += part
    client.close()
    return reply


@pytest.fixture
def no_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """asyncio logs what fails in a callback."""
    yield
    records = caplog.get_records("call")
    assert [one.getMessage() for one in records if one.levelno >= logging.ERROR] == []


@pytest.mark.usefixtures("no_errors")
class TestTls:
    def test_answers_and_streams(self, tls: ssl.SSLContext, trusting: ssl.SSLContext) -> None:
        with serving(tls=tls) as server:
            url = f"https://127.0.0.1:{server.port}/invocations"
            with httpx.Client(verify=trusting, timeout=PATIENCE_S) as client:
                for _ in range(2):  # on one connection
                    found = client.post(url, json=body([5, 6]))
                    assert found.json() == {"generated_text": answer([5, 6])}
                lines = client.post(url, json=body([5, 6], stream=True)).text.splitlines()
                assert json.loads(lines[-1])["generated_text"] == answer([5, 6])

    def test_other_clients_are_not_served(
        self, tls: ssl.SSLContext, files: dict[str, str], caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        with serving(tls=tls) as server:
            client = connect(server)
            client.sendall(post(REQUEST, CLOSE))
            with suppress(ConnectionResetError):
                assert read_all(client) == b""
            with pytest.raises(ssl.SSLCertVerificationError):
                secure(server, ssl.create_default_context())
            wait_for_connections(server, 0)
            assert caplog.text.count("tls_refused") == 2
            assert "Traceback" not in caplog.text

    def test_clients_show_a_certificate_if_authorities_are_given(
        self, files: dict[str, str], trusting: ssl.SSLContext
    ) -> None:
        mutual = tls_context(files["both"], None, None, files["authority"])
        showing = ssl.create_default_context(cafile=files["authority"])
        showing.load_cert_chain(files["both"])
        with serving(tls=mutual) as server:
            client = secure(server, showing)
            client.sendall(post(REQUEST, CLOSE))
            assert status(read_all(client)) == 200
            stranger = secure(server, trusting)
            reply = b""
            with suppress(OSError):
                stranger.sendall(post(REQUEST, CLOSE))
                reply = read_all(stranger)
            assert reply == b""
            wait_for_connections(server, 0)

    def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(
        self, tls: ssl.SSLContext, trusting: ssl.SSLContext
    ) -> None:
        """In one TCP segment, which a library that buffers sends."""
        with serving(tls=tls) as server:
            client = connect(server)
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            talking = trusting.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
            for _ in range(20):
                try:
                    talking.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    client.sendall(outgoing.read())
                    incoming.write(client.recv(65536))
            talking.write(post(REQUEST, CLOSE))
            client.sendall(outgoing.read())
            reply = b""
            while answer([5, 6]).encode() not in reply:
                incoming.write(client.recv(65536))
                with suppress(ssl.SSLWantReadError):
                    while part := talking.read(65536):
                        reply += part
            client.close()

    def test_a_slow_handshake_ends(self, tls: ssl.SSLContext, trusting: ssl.SSLContext) -> None:
        with serving(tls=tls, request_head_timeout=SHORT_S) as server:
            for sent in (b"", b"\x16\x03\x01"):
                client = connect(server)
                client.sendall(sent)
                assert read_all(client) == b""
            wait_for_connections(server, 0)

    @pytest.mark.parametrize("sent", [b"", b"POST /invoc"])
    def test_a_slow_head_ends(
        self, tls: ssl.SSLContext, trusting: ssl.SSLContext, sent: bytes
    ) -> None:
        with serving(tls=tls, request_head_timeout=SHORT_S) as server:
            client = secure(server, trusting)
            client.sendall(sent)
            if sent:
                assert content(read_object(client))["type"] == "request_timeout"
            else:
                assert read_all(client) == b""
            wait_for_connections(server, 0)

    def test_a_slow_body_and_an_idle_connection_end(
        self, tls: ssl.SSLContext, trusting: ssl.SSLContext
    ) -> None:
        with serving(tls=tls, request_body_timeout=SHORT_S, keep_alive_timeout=SHORT_S) as server:
            client = secure(server, trusting)
            client.sendall(post(REQUEST)[:-5])
            assert content(read_object(client))["type"] == "request_timeout"
            client = secure(server, trusting)
            client.sendall(post(REQUEST))
            assert status(read_all(client)) == 200
            wait_for_connections(server, 0)

    @pytest.mark.parametrize("chunked", [False, True])
    def test_who_sends_too_much_still_reads_the_answer(
        self, tls: ssl.SSLContext, trusting: ssl.SSLContext, chunked: bool
    ) -> None:
        much = b" " * 1_000_000
        sent = post(much)
        if chunked:
            sent = post(b"f4240\r\n" + much + b"\r\n0\r\n\r\n", CHUNKED, length=False)
        with serving(tls=tls, max_body_bytes=200_000) as server:
            client = secure(server, trusting)
            client.sendall(sent)
            assert content(read_object(client))["type"] == "body_too_large"
            wait_for_connections(server, 0)

    def test_a_client_that_does_not_read_is_dropped(
        self, tls: ssl.SSLContext, trusting: ssl.SSLContext
    ) -> None:
        spec = replace(TOY_SPEC, num_slots=2, max_model_len=4096, token_buckets=(4096,))
        backend = ToyBackend(spec)
        patient = 10 * PATIENCE_S
        with serving(backend, tls=tls, write_timeout=SHORT_S, keep_alive_timeout=patient) as server:
            loop = server.application.models[0].service.loop  # type: ignore[union-attr]
            client = secure(server, trusting, SO_RCVBUF=4096)
            (connection,) = wait_for_connections(server, 1)
            raw = connection._raw.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            client.sendall(post(json.dumps(body([5, 6], 4000, stream=True)).encode()))
            wait_until(lambda: len(backend.steps) > 3)
            wait_until(lambda: len(loop.streams) == 0 and not backend.acquired)
            wait_for_connections(server, 0)
            client.close()

    def test_a_client_that_reads_steadily_keeps_its_answer(
        self, tls: ssl.SSLContext, trusting: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also behind the end of the connection, where the whole answer waits in buffers."""
        monkeypatch.setattr(http, "LINGER_S", SHORT_S)
        spec = replace(TOY_SPEC, num_slots=2, max_model_len=2048, token_buckets=(2048,))
        with serving(ToyBackend(spec), tls=tls, write_timeout=1.0) as server:
            client = secure(server, trusting, SO_RCVBUF=4096)
            (connection,) = wait_for_connections(server, 1)
            raw = connection._raw.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            sent = json.dumps(body([5, 6], 1200, parameters={"details": True})).encode()
            client.sendall(post(sent, CLOSE))
            parts = []
            while part := client.recv(4096):
                parts.append(part)
                time.sleep(0.1)
            head, _, rest = b"".join(parts).partition(b"\r\n\r\n")
            assert f"content-length: {len(rest)}".encode() in head
            assert len(rest) > 65_536
            client.close()

    def test_connections_count_from_before_the_handshake(
        self, tls: ssl.SSLContext, trusting: ssl.SSLContext
    ) -> None:
        with serving(tls=tls, max_connections=1) as server:
            held = connect(server)
            wait_for_connections(server, 1)
            client = secure(server, trusting)
            client.sendall(post(REQUEST))
            assert content(read_object(client))["type"] == "queue_full"
            held.close()

    def test_a_stop_does_not_wait_for_idle_clients(
        self, tls: ssl.SSLContext, trusting: ssl.SSLContext, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Neither for one that is idle after a request nor for one in its handshake."""
        caplog.set_level(logging.INFO)
        with serving(tls=tls, keep_alive_timeout=10 * PATIENCE_S) as server:
            silent, idle = connect(server), secure(server, trusting)
            idle.sendall(post(REQUEST))
            while not idle.recv(65536).endswith(b"}"):
                pass
            wait_for_connections(server, 2)
            server.close()
            assert not server._server.server_state.connections
            assert "client_dropped" not in caplog.text  # by the limit of that wait
            assert (read_all(idle), silent.recv(1)) == (b"", b"")
            silent.close()

    def test_an_end_beside_the_loss_of_the_connection_is_no_error(
        self, tls: ssl.SSLContext, trusting: ssl.SSLContext
    ) -> None:
        """With TLS the socket is closed before the protocol hears of it."""
        with serving(tls=tls) as server:
            client = secure(server, trusting)
            client.sendall(post(REQUEST))
            assert client.recv(65536)
            (connection,) = wait_for_connections(server, 1)
            loop = connection.loop

            def lose() -> None:
                # The socket closes in the next round of the loop; `connection_lost` is called in the one after.
                connection._raw.abort()
                loop.call_soon(connection.end)

            loop.call_soon_threadsafe(lose)
            wait_for_connections(server, 0)
            client.close()

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (("missing", "key", None, None), "No such file"),
            (("chain", "missing", None, None), "No such file"),
            (("junk", "key", None, None), "PEM"),
            (("chain", "other_key", None, None), "(?i)key values mismatch"),
            (("chain", None, None, None), "PEM"),
            ((None, "key", None, None), "--ssl-certfile is missing"),
            ((None, None, "secret", None), "--ssl-certfile is missing"),
            ((None, None, None, "authority"), "--ssl-certfile is missing"),
            (("chain", "key", None, "missing"), "No such file"),
            (("chain", "key", None, "junk"), "ssl-ca-certs"),
        ],
    )
    def test_wrong_files_are_errors(
        self, files: dict[str, str], arguments: tuple[str | None, ...], says: str
    ) -> None:
        given = [files.get(name, name) if name else None for name in arguments]
        with pytest.raises(ConfigError, match=says) as caught:
            tls_context(*given)
        assert "secret" not in str(caught.value)

    def test_a_password_opens_the_key(self, files: dict[str, str], tmp_path: Path) -> None:
        from cryptography.hazmat.primitives import serialization as forms

        key = forms.load_pem_private_key(Path(files["key"]).read_bytes(), None)
        locked = tmp_path / "locked"
        locked.write_bytes(
            key.private_bytes(
                forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.BestAvailableEncryption(b"pw")
            )
        )
        assert tls_context(files["chain"], str(locked), "pw", None) is not None
        for password in (None, "wrong"):
            with pytest.raises(ConfigError, match="keyfile-password"):
                tls_context(files["chain"], str(locked), password, None)

    def test_the_command_takes_the_flags_of_uvicorn(
        self,
        files: dict[str, str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        given: dict[str, Any] = {}
        monkeypatch.setattr(process, "serve", lambda load, **more: given.update(more) or 0)
        command = ["serve", str(tmp_path), "--ssl-certfile", files["chain"]]
        assert cli.main([*command, "--ssl-keyfile", files["key"]]) == 0
        assert isinstance(given["tls"], ssl.SSLContext)
        assert cli.main(["serve", str(tmp_path)]) == 0
        assert given["tls"] is None
        assert cli.main([*command, "--ssl-keyfile", files["other_key"]]) == 1
        assert files["other_key"] in capsys.readouterr().err


def test_the_log_says_where_it_serves_and_how_many_keys_there_are(
    tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]

    runs = []

    def run(server: Server) -> None:
        runs.append(server)
        server.on_listening()
        wait_until(lambda: caplog.text.count("ready url") == len(runs))

    def load(*_: Any, **__: Any) -> Service:
        return toy_service(ToyBackend(TOY_SPEC))

    monkeypatch.setattr(Server, "run", run)
    # A loader that ends later than that ends the process.
    monkeypatch.setattr(process, "JOIN_S", PATIENCE_S)
    more: dict[str, Any] = {"host": "127.0.0.1", "port": 8443, "drain_s": 1.0}
    loads = [{Model("toy"): load} for _ in range(2)]
    serve = partial(process.serve, prepare=lambda: [()], exit_on_error=True, **more)
    assert serve(loads[0], tls=tls, api_keys=DIGESTS) == serve(loads[1]) == 0
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    urls = [line.partition("ready ")[2] for line in caplog.text.splitlines() if "ready url" in line]
    assert urls == [
        "url=https://127.0.0.1:8443/invocations model=toy api_keys=2",
        "url=http://127.0.0.1:8443/invocations model=toy api_keys=0",
    ]


def accesses(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    """The fields of the access log's lines so far."""
    lines = [record.getMessage() for record in caplog.records]
    found = [line.partition(" reason=")[0] for line in lines if line.startswith("access ")]
    words = [line.split(" ")[1:] for line in found]
    return [dict(word.split("=", 1) for word in line) for line in words]


class TestAccessLog:
    def test_each_request_is_one_line(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        with serving() as server:
            client = connect(server)
            client.sendall(post(REQUEST, "X-Request-Id: mine", path="/invocations?key=secret"))
            first = b""
            while not first.endswith(b"}"):
                first += client.recv(65536)
            client.sendall(post(b"{", CLOSE))
            second = read_all(client)
            wait_until(lambda: len(accesses(caplog)) == 2)
            good, bad = accesses(caplog)
        host, _, port = good["client"].partition(":")
        assert (host, port.isdigit()) == ("127.0.0.1", True)
        for line, reply, code in ((good, first, "200"), (bad, second, "400")):
            assert (line["method"], line["path"], line["status"]) == ("POST", "/invocations", code)
            assert (int(line["bytes"]), line["complete"]) == (len(reply), "True")
            assert 0 <= float(line["first_byte_ms"]) <= float(line["total_ms"])
        assert good["request_id"] == "mine"
        assert "secret" not in caplog.text

    def test_json_lines_are_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        setup_logging()
        with serving(access_log="json") as server:
            talk(server, post(REQUEST, CLOSE, 'X-Request-Id: "id"', path='/invocations?"'))
        lines = capsys.readouterr().err.splitlines()
        (line,) = [json.loads(line) for line in lines if line.startswith("{")]
        assert list(line) == [
            *("time", "client", "method", "path", "status", "bytes", "first_byte_ms"),
            *("request_id", "total_ms", "complete"),
        ]
        assert (line["status"], line["request_id"], line["complete"]) == (200, '"id"', True)
        assert line["time"].endswith("+00:00")

    def test_off(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        with serving(access_log="off") as server:
            assert status(talk(server, post(REQUEST, CLOSE))) == 200
        assert accesses(caplog) == []

    @pytest.mark.parametrize("form", ["text", "json", "off"])
    def test_a_refusal_is_one_line_with_its_reason(
        self, caplog: pytest.LogCaptureFixture, form: str
    ) -> None:
        caplog.set_level(logging.INFO)
        with serving(access_log=form, max_connections=1) as server, connect(server):
            error = content(talk(server, post(REQUEST, CLOSE)))["error"]
            logged = [one for one in caplog.records if one.name == "djl_python_neuronx.server.http"]
        (line,) = [one.getMessage() for one in logged]
        if form == "json":
            assert (json.loads(line)["status"], json.loads(line)["reason"]) == (503, error)
        else:
            assert "status=503 " in line
            assert line.endswith(f" reason={error!r}")

    def test_only_probes_that_fail_are_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        with serving() as server:
            for path in ("/ping", "/metrics", "/info"):
                assert httpx.get(server.url + path, timeout=PATIENCE_S).status_code == 200
            assert server.application.models[0].service is not None
            server.application.models[0].service.loop.close(0, 0)
            assert httpx.get(server.url + "/ping", timeout=PATIENCE_S).status_code == 503
            wait_until(lambda: len(accesses(caplog)) == 2)
        found = [(line["path"], line["status"]) for line in accesses(caplog)]
        assert found == [("/info", "200"), ("/ping", "503")]

    @pytest.mark.parametrize(
        ("sent", "method", "path", "code"),
        [
            (post(REQUEST)[:-5], "POST", "/invocations", "408"),
            (b"GET / HT", "-", "-", "408"),
            (b"GET / HTTP/1.1\r\nA: " + b"x" * 100_000, "-", "-", "431"),
            (post(REQUEST, CHUNKED), "POST", "/invocations", "400"),
            (post(b"zz\r\n", CHUNKED, length=False), "POST", "/invocations", "400"),
            (
                b"BREW /pot HTTP/1.1\r\nHost: a\r\n" + CLOSE.encode() + b"\r\n\r\n",
                "BREW",
                "/pot",
                "404",
            ),
        ],
    )
    def test_refused_requests_are_lines_too(
        self, caplog: pytest.LogCaptureFixture, sent: bytes, method: str, path: str, code: str
    ) -> None:
        caplog.set_level(logging.INFO)
        with serving(request_body_timeout=SHORT_S, request_head_timeout=SHORT_S) as server:
            reply = talk(server, sent)
            wait_until(lambda: accesses(caplog))
        (line,) = accesses(caplog)
        assert (line["method"], line["path"], line["status"]) == (method, path, code)
        assert (int(line["bytes"]), line["complete"]) == (len(reply), "True")

    def test_a_refusal_has_the_shape_of_its_path(self) -> None:
        with serving(request_body_timeout=SHORT_S) as server:
            path = "/v1/chat/completions"
            reply = talk(server, post(REQUEST, path=path)[:-5])
            error = json.loads(reply.partition(b"\r\n\r\n")[2])["error"]
            assert (status(reply), "body has not arrived" in error["message"]) == (408, True)
            sent = post(REQUEST, path=path)[:-5].replace(b"POST", b"HEAD")
            assert talk(server, sent).endswith(b"\r\n\r\n")

    def test_a_client_that_leaves_is_a_line(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        for stream, code in ((False, "499"), (True, "200")):
            backend = ToyBackend(replace(TOY_SPEC, num_slots=2))
            backend.hang_at = {3}
            caplog.clear()
            with serving(backend) as server:
                client = connect(server)
                client.sendall(post(json.dumps(body([5, 6], 100, stream=stream)).encode()))
                if stream:
                    assert client.recv(65536)
                assert backend.hanging.wait(PATIENCE_S)
                client.close()
                wait_until(lambda: accesses(caplog))
            (line,) = accesses(caplog)
            assert (line["status"], line["complete"]) == (code, "False")
            assert (int(line["bytes"]) > 0) == stream

    def test_a_client_cannot_write_lines_of_its_own(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        forged = "/%0aaccess%20client=1\\n\x7fstatus=200"
        with serving() as server:
            for path in (forged.replace("\x7f", ""), "/\r\nX", "/\x0b", "/" + "x" * 9999):
                sent = post(REQUEST, CLOSE, "X-Request-Id: a status=1", path=path)
                assert status(talk(server, sent)) in {400, 404}
            wait_until(lambda: len(accesses(caplog)) == 4)
        lines = [record.getMessage() for record in caplog.records if "access " in record.msg]
        assert not [line for line in lines if any(c in line for c in "\r\n\x0b\x7f")]
        assert {line["status"] for line in accesses(caplog)} <= {"400", "404"}
        assert max(map(len, lines)) < 500


@contextmanager
def with_admin(**more: Any) -> Iterator[tuple[Running, str]]:
    """A server with a second port, and the URL of that."""
    with held_port() as port, serving(admin_port=port, **more) as server:
        wait_until(lambda: len(server._server.servers) == 2)
        yield server, f"http://127.0.0.1:{port}"


class TestAdminPort:
    def test_metrics_and_info_move_there(self) -> None:
        with with_admin(api_keys=DIGESTS) as (server, admin):
            key = {"Authorization": f"Bearer {KEY}"}
            for path in ("/metrics", "/info"):
                assert httpx.get(admin + path, timeout=PATIENCE_S).status_code == 200
                first = httpx.get(server.url + path, headers=key, timeout=PATIENCE_S)
                assert first.status_code == 404
                assert f"GET {path}," not in first.json()["error"]
            for url in (admin, server.url):
                assert httpx.get(url + "/ping", timeout=PATIENCE_S).status_code == 200
            for path in ("/invocations", "/predictions/toy", "/v1/chat/completions"):
                found = httpx.post(admin + path, json=body([5]), timeout=PATIENCE_S)
                assert found.status_code == 404

    def test_it_answers_while_the_first_has_all_its_connections(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with with_admin(max_connections=1) as (server, admin):
            held = [connect(server) for _ in range(2)]
            wait_until(lambda: len(server._server.server_state.connections) >= 1)
            assert httpx.get(admin + "/metrics", timeout=PATIENCE_S).status_code == 200
            for client in held:
                client.close()

    def test_it_speaks_tls_too_and_ends_with_the_server(
        self, tls: ssl.SSLContext, trusting: ssl.SSLContext
    ) -> None:
        with with_admin(tls=tls) as (server, admin):
            with httpx.Client(verify=trusting, timeout=PATIENCE_S) as client:
                url = admin.replace("http:", "https:")
                assert client.get(url + "/metrics").status_code == 200
            server.close()
            with pytest.raises(httpx.ConnectError):
                httpx.get(admin + "/ping", timeout=PATIENCE_S)

    def test_a_port_in_use_ends_the_process(self, caplog: pytest.LogCaptureFixture) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            options = ServingOptions(admin_port=taken.getsockname()[1], admin_host="127.0.0.1")
            server = Server(Application(Model("toy", options)), "127.0.0.1", 0, 1.0)
            with pytest.raises(SystemExit) as caught:
                server.run()
        assert caught.value.code == 1
        assert f"option.admin_port={options.admin_port}" in caplog.text
        assert "already in use" in caplog.text


@pytest.mark.parametrize("ends", [False, True])
def test_a_port_that_closes_before_asyncio_listens_again(
    ends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio does so a second after it could accept no connection."""
    server = Server(Application(Model("toy", ServingOptions())), "127.0.0.1", 0, 1.0)
    server.should_exit = ends

    async def listen_again() -> None:
        loop: Any = asyncio.get_running_loop()
        loop.set_exception_handler(server._on_loop_error)
        closed = socket.socket()
        closed.close()
        loop.call_soon(loop._start_serving, asyncio.Protocol, closed)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(listen_again())
    assert ("_start_serving" in caplog.text) is not ends

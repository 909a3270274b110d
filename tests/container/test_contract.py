"""SageMaker's contract for containers, against `djl-neuronx serve` or the command in `CONTAINER_COMMAND`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from tests.clients.front import forward, front
from tests.clients.sdks import CHECKS, MODEL, check_sagemaker, lmi_body
from tests.container.sagemaker import (
    MAX_BODY_BYTES,
    Container,
    archive,
    missing,
    no_network,
)
from tests.processes import wait_gone, wait_until

if "CONTAINER_COMMAND" not in os.environ:
    pytest.importorskip("torch", reason="needs the `cpu` extra")

CHECK = CHECKS[0]
MAX_CONNECTIONS, SLOTS = 48, 8
RUNNING, WAITING = "djl_neuronx_slots_in_use", "djl_neuronx_waiting_requests"
ENDED = "djl_neuronx_requests_total"
LISTENS = "0A"  # net/tcp_states.h
PORT = {"SAGEMAKER_BIND_TO_PORT": "8097", "SAGEMAKER_SAFE_PORT_RANGE": "8097-8099"}
JSON = {"Content-Type": "application/json"}
CODE = {"code/inference.py": "raise SystemExit", "code/requirements.txt": "no-such-package"}
LONG = {"inputs": "1 2 3 4 5", "parameters": {"max_new_tokens": 400, "ignore_eos": True}}
MANY = {**LONG, "inputs": [LONG["inputs"]] * 128}
SHORT = {"inputs": "1 2 3 4 5", "parameters": {"max_new_tokens": 40, "ignore_eos": True}}


@pytest.fixture(scope="module", autouse=True)
def network():
    if why := missing():
        # A CI that cannot do this does not test the contract.
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(why)
    with no_network():
        yield


@pytest.fixture(scope="module")
def start(network, tmp_path_factory):
    """Start a container with a model.tar.gz; closed at the end."""
    opened = []

    def start(environ=(), *, namespace=True, **layout):
        work = tmp_path_factory.mktemp("container")
        model = archive(work / "model.tar.gz", **layout)
        opened.append(Container(work, model, environ, namespace=namespace))
        return opened[-1]

    yield start
    for container in opened:
        container.close()


@pytest.fixture(scope="module")
def container(start):
    """The container of most tests. It is asked as soon as a probe got 200."""
    options = {
        "OPTION_MAX_ROLLING_BATCH_SIZE": str(SLOTS),
        "OPTION_MAX_CONNECTIONS": str(MAX_CONNECTIONS),
        "HF_MODEL_ID": "/opt/ml/model",
        # Otherwise no prompt would have 6 MiB.
        "OPTION_N_POSITIONS": "16384",
        "OPTION_ENABLE_CHUNKED_PREFILL": "true",
        "OPTION_CONTEXT_LENGTH_ESTIMATE": "128,256",
    }
    config = json.loads((MODEL / "config.json").read_text()) | {"max_position_embeddings": 16384}
    more = {"config.json": json.dumps(config), **CODE}
    container = start({**PORT, **options}, more=more).wait_ready()
    assert ask(container) == CHECK["completion"]
    return container


def post(connection, body, headers=JSON):
    """Status, headers and body of an answer to a body, which is JSON unless it is bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", "/invocations", content, dict(headers))
    response = connection.getresponse()
    return response.status, response.headers, response.read()


def invoke(container, body, headers=JSON):
    """As `post`, with a connection of its own."""
    with closing(container.connect()) as connection:
        return post(connection, body, headers)


def ask(container):
    status, _, content = invoke(container, lmi_body(CHECK))
    assert status == 200, content
    return json.loads(content)["generated_text"]


def open_stream(container):
    """A connection and its response, of which the first bytes are here; and those."""
    connection = container.connect()
    connection.request("POST", "/invocations", json.dumps({**LONG, "stream": True}), JSON)
    response = connection.getresponse()
    assert response.status == 200
    return connection, response, response.read1(65536)


def metrics(container, *names):
    """The sum of metrics."""
    with closing(container.connect()) as connection:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(names))


def padded(size):
    """A body of this size."""
    content = json.dumps(lmi_body(CHECK)).encode()
    return content + b" " * (size - len(content))


def test_the_machine_is_sagemakers(container):
    """The server is process 1, without root's rights and a network; only /tmp can be written."""
    status = Path(f"/proc/{container.pid}/status").read_text()
    facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert facts["NSpid"].split()[-1] == "1"
    assert "0" not in facts["Uid"].split()
    network = Path(f"/proc/{container.pid}/net/dev").read_text().splitlines()[2:]
    assert [line.split(":")[0].strip() for line in network] == ["lo"]
    root = Path(f"/proc/{container.pid}/root")
    assert (root / "opt/ml/model/config.json").is_file()
    for folder in ("opt/ml/model", "usr"):
        with pytest.raises(OSError, match="Read-only file system"):
            (root / folder / f"new-{os.getpid()}").touch()
    with tempfile.NamedTemporaryFile(dir=root / "tmp"):
        """It can be made."""


def test_boto3(container):
    with front(forward(container.port)) as url:
        check_sagemaker(url)


@pytest.mark.parametrize(
    ("headers", "answers"),
    [
        ({"Content-Type": "application/json; charset=utf-8"}, "application/json"),
        ({"Content-Type": "application/json", "Accept": "application/json"}, "application/json"),
        ({"Content-Type": "application/json", "Accept": "*/*"}, "application/json"),
        ({}, "application/json"),
        ({"Content-Type": "text/plain"}, "application/json"),
    ],
)
def test_content_types(container, headers, answers):
    body = lmi_body(CHECK)
    if headers.get("Content-Type") == "text/plain":
        body = CHECK["prompt"].encode()
    status, given, content = invoke(container, body, headers)
    assert (status, given.get_content_type()) == (200, answers)
    assert json.loads(content) == {"generated_text": CHECK["completion"]}


def test_headers_of_sagemaker(container):
    headers = {**JSON, "X-Amzn-SageMaker-Inference-Id": "mine"}
    headers["X-Amzn-SageMaker-Custom-Attributes"] = "trace=7;accept=text/event-stream"
    status, given, content = invoke(container, lmi_body(CHECK, stream=True), headers)
    assert (status, given.get_content_type()) == (200, "text/event-stream")
    assert given["x-request-id"] == "mine"
    assert content.startswith(b"data:")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_up_to_the_limit_is_served_and_a_longer_one_refused(container, chunked):
    def pieces(content):
        return (content[at : at + 65536] for at in range(0, len(content), 65536))

    with closing(container.connect()) as other, closing(container.connect()) as connection:
        assert post(other, lmi_body(CHECK))[0] == 200
        for size, expected in ((MAX_BODY_BYTES, 200), (MAX_BODY_BYTES + 1, 413)):
            body = padded(size)
            content = pieces(body) if chunked else body
            connection.request("POST", "/invocations", content, JSON, encode_chunked=chunked)
            response = connection.getresponse()
            content = json.loads(response.read())
            assert response.status == expected, content
        assert content["type"] == "body_too_large"
        # The connection that was open before, as SageMaker keeps those of its other clients.
        assert other.sock is not None
        assert post(other, lmi_body(CHECK))[0] == 200


def test_a_stream_begins_before_it_ends(container):
    def runs():
        connection, response, first = open_stream(container)
        with closing(connection):
            running = metrics(container, RUNNING)
            rest = response.read()
        assert json.loads(first.splitlines()[0])["token"]["text"]
        lines = (first + rest).splitlines()
        assert len(lines) == LONG["parameters"]["max_new_tokens"]
        return running

    wait_until(runs)


def test_probes_are_answered_while_clients_have_all_connections(container):
    held = [container.connect() for _ in range(MAX_CONNECTIONS)]
    try:
        for connection in held:
            connection.connect()

        def is_full():
            return invoke(container, lmi_body(CHECK))[0] == 503

        wait_until(is_full)
        assert container.ping() == 200
        with ThreadPoolExecutor(len(held)) as clients:
            asked = clients.map(lambda connection: post(connection, LONG)[0], held)
            assert container.ping() == 200
            # 503 for those that were opened while a probe was answered.
            assert {200} <= set(asked) <= {200, 503}
    finally:
        for connection in held:
            connection.close()
    wait_until(lambda: not is_full())


def test_one_port_and_no_files(container):
    """Nothing listens beside the given port, and nothing is written but the log."""
    ports = set()
    for name in ("tcp", "tcp6"):
        lines = Path("/proc/thread-self/net", name).read_text().splitlines()[1:]
        rows = [line.split() for line in lines]
        ports |= {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTENS}
    assert ports == {container.port}
    root, user = Path(f"/proc/{container.pid}/root"), Path(f"/proc/{container.pid}").stat().st_uid
    folders = [root / folder for folder in ("tmp", "var/tmp", "dev/shm", "opt/ml")]
    # Not in other users' folders, of which this machine's /tmp may have thousands.
    which = f"-mindepth 1 ! -uid {user} -prune -o -type f -newerct @{container.started_s} -print"
    search = ["find", *folders, *which.split()]
    found = subprocess.run(search, capture_output=True, text=True, check=False).stdout
    assert found == ""


def test_all_probes_were_answered(container):
    """503 while it loads, then 200, through all that the tests before did."""
    first = container.pings.index(200)
    assert set(container.pings[:first]) <= {503}
    assert set(container.pings[first:]) == {200}


def test_sigterm_lets_running_requests_end(container):
    ended = metrics(container, ENDED)
    with ThreadPoolExecutor(2 * SLOTS) as clients:
        streams = [open_stream(container) for _ in range(SLOTS)]
        # Most of these wait for a slot.
        answers = clients.map(partial(invoke, container), [SHORT] * 2 * SLOTS)
        arrived = ended + 3 * SLOTS
        wait_until(lambda: metrics(container, RUNNING, WAITING, ENDED) >= arrived)
        processes = container.processes()
        container.stop()
        for connection, response, first in streams:
            with closing(connection):
                *_, last = (first + response.read()).splitlines()
                assert "generated_text" in json.loads(last)
        for status, _, content in answers:
            assert status == 200, content
    assert container.wait() == 0
    wait_gone(processes)
    with pytest.raises(ConnectionRefusedError), closing(socket.socket()) as late:
        late.connect(("127.0.0.1", container.port))


def test_sigterm_during_the_load(start):
    container = start()
    wait_until(lambda: container.pings, container.tail)
    container.stop()
    assert container.wait() == 0, container.tail()


@pytest.mark.nightly
def test_sigterm_ends_what_does_not_end(start):
    """Before SIGKILL, with an answer and status 0. It takes the whole drain."""
    container = start({"OPTION_MAX_ROLLING_BATCH_SIZE": "1"}).wait_ready()
    with ThreadPoolExecutor(4) as clients:
        answers = clients.map(partial(invoke, container), [MANY] * 4)
        wait_until(lambda: metrics(container, RUNNING, WAITING, ENDED) >= 4 * len(MANY["inputs"]))
        container.stop()
        for status, _, content in answers:
            assert (status, json.loads(content)["code"]) == (503, 503)
    assert container.wait() == 0, container.tail()


def test_an_answer_in_time_and_a_killed_server_that_leaves_no_process(start):
    """Without process ids of its own, where the system would end them all."""
    options = {
        "OPTION_REPLICAS": "2",
        "OPTION_MAX_ROLLING_BATCH_SIZE": "2",
        "OPTION_CPU_THREADS": "1",
    }
    environ = {"HF_MODEL_ID": "/opt/ml/model/tiny", "OPTION_MAX_REQUEST_SECONDS": "2", **options}
    container = start(environ, namespace=False, top="tiny/").wait_ready()
    assert container.port == 8080
    assert ask(container) == CHECK["completion"]
    parameters = {**LONG["parameters"], "details": True}
    status, _, content = invoke(container, {**MANY, "parameters": parameters})
    assert status == 200
    assert "time" in {answer["details"]["finish_reason"] for answer in json.loads(content)}
    processes = container.processes()
    assert len(processes) >= 5  # itself, and a guard and an engine for each copy
    os.kill(container.pid, signal.SIGKILL)
    wait_gone(processes)


def test_a_model_in_a_folder_that_nothing_names(start):
    container = start(top="tiny/")
    wait_until(lambda: container.status() is not None, container.tail)
    assert container.status() == 1
    assert "found tiny. Point to the folder that holds the model itself" in container.tail()

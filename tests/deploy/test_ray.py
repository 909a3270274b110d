"""Ray Serve: replicas that die, scale, and have prefixes, on a local cluster with the CPU and the simulated backend.

It needs Ray (`pip install 'ray[serve]'`); `make ray` has an environment with it. The oracle of texts is the example
model's own list of completions, that of simulated streams the number of tokens that a request asks for.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import yaml

from djl_python_neuronx.errors import ServingError
from tests import effort, known_answers
from tests.doubles.lora_adapters import save_merged, write_adapter
from tests.processes import command_line, descendants, held_port, wait_gone, wait_until

pytest.importorskip("ray", reason="needs the extra `ray`")
from transformers import AutoTokenizer

from tests.backends.tnx_engine import reference
from tests.doubles.tiny_models import load_reference

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny-llama"
MODULES = ROOT / "deploy" / "ray"
KEY = "key-of-a-test"
AUTHORIZED = {"authorization": f"Bearer {KEY}"}
STEP_MS = 50
LOST = "the replica that ran this request has ended"


def checks(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TINY / name).read_text("utf-8").splitlines()]


class Cluster:
    """A Ray cluster in processes of this one, and an application with two models in it."""

    def __init__(self, port: int, keys: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        shared = {"api_key_file": str(keys), "page": False}
        right = {"model_loader": "cpu", "max_rolling_batch_size": 16, "enable_prefix_caching": True}
        self.adapter = write_adapter(keys.parent / "adapters" / "sql")
        right |= {"enable_lora": True, "adapters": {"sql": str(self.adapter)}}
        slow = {"model_loader": "sim", "sim_step_ms": STEP_MS, "model_name": "slow"}
        self.args: dict[str, Any] = {
            "accept_s": 60,
            "models": [
                {"model": str(TINY), "options": {**shared, **right}},
                {
                    "model": str(TINY),
                    "options": {**shared, **slow, "max_rolling_batch_size": 4},
                    "ray_actor_options": {"num_cpus": 0.5},
                },
            ],
        }

    def deploy(self) -> None:
        """Deploy `args` as `serve deploy` does, and wait until all replicas run."""
        from ray import serve
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        scaling = {
            "min_replicas": 1,
            "max_replicas": 3,
            "target_ongoing_requests": 4,
            "upscale_delay_s": 1,
            "downscale_delay_s": 2,
            "look_back_period_s": 2,
            "metrics_interval_s": 1,
            "policy": {"policy_function": "neuronx_routing:replicas_by_load"},
        }
        application = {
            "name": "llm",
            "route_prefix": "/",
            "import_path": "neuronx_serve:build",
            "args": self.args,
            "deployments": [
                {"name": "tiny-llama", "num_replicas": 2},
                {"name": "slow", "autoscaling_config": scaling},
            ],
        }
        _get_global_client().deploy_apps(ServeDeploySchema(applications=[application]))

        def state() -> Any:
            return serve.status().applications["llm"]

        running = ("RUNNING", "DEPLOY_FAILED")
        wait_until(lambda: state().status in running, lambda: str(state()), patience_s=300)
        assert state().status == "RUNNING", state()

    @staticmethod
    def replicas(model: str) -> list[int]:
        """The process ids of a model's replicas."""
        title = f"ray::ServeReplica:llm:{model}"
        return [pid for pid in descendants(os.getpid()) if command_line(pid)[0].startswith(title)]

    def states(self, model: str) -> dict[str, int]:
        """The number of a model's replicas in each state."""
        from ray import serve

        return serve.status().applications["llm"].deployments[model].replica_states

    def wait_running(self, model: str, count: int) -> None:
        """Wait until a model has so many replicas, and none that starts or stops."""
        wait_until(
            lambda: self.states(model) == {"RUNNING": count},
            lambda: str(self.states(model)),
            patience_s=300,
        )

    def post(self, path: str, body: dict[str, Any], **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=AUTHORIZED, timeout=120, **more)

    def metric(self, name: str, model: str) -> dict[str, float]:
        """The sum of a metric's samples, by the replica."""
        from prometheus_client.parser import text_string_to_metric_families

        answer = httpx.get(self.url + "/metrics", headers=AUTHORIZED, timeout=60)
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(answer.text):
            for one in family.samples:
                if one.name == f"djl_neuronx_{name}" and one.labels["model"] == model:
                    replica = one.labels["replica"]
                    found[replica] = found.get(replica, 0.0) + one.value
        return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch, held_port() as port:
        # Not `tmp_path`: the names of Ray's sockets would be too long.
        folder = Path(tempfile.mkdtemp(prefix="ray-"))
        (folder / "token").write_text(secrets.token_hex(32))
        (folder / "keys").write_text(KEY)
        variables = {
            "PYTHONPATH": f"{ROOT}:{MODULES}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
            "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
            "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
        }
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.syspath_prepend(str(MODULES))
        import ray
        from ray import serve

        try:
            ray.init(
                num_cpus=12,
                resources={"neuron_cores": 4},
                include_dashboard=False,
                object_store_memory=100_000_000,
                _temp_dir=str(folder / "r"),
                log_to_driver=False,
                namespace="serve",
            )
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            cluster = Cluster(port, folder / "keys")
            cluster.deploy()
            yield cluster
        finally:
            pids = descendants(os.getpid())
            if ray.is_initialized():  # else it would start another cluster
                with suppress(Exception):
                    serve.shutdown()
            ray.shutdown()
            wait_gone(pids)
            shutil.rmtree(folder, ignore_errors=True)


def test_the_known_answers_of_the_readme(cluster):
    for path, headers, body, wanted in known_answers.shown():
        body = {**body, "model": "tiny-llama"}
        answer = cluster.post(path, body)
        assert headers.items() <= {"content-type": "application/json"}.items()
        assert [
            known_answers.rounded(json.loads(one)) for one in answer.text.splitlines()
        ] == wanted


def test_routes_keys_and_errors_are_those_of_the_server(cluster):
    get = httpx.Client(base_url=cluster.url, headers=AUTHORIZED, timeout=60).get
    listed = get("/v1/models").json()["data"]
    names = [one["id"] for one in listed if one["parent"] is None]
    assert [one["id"] for one in listed] == ["tiny-llama", "sql", "slow"]
    assert names == ["tiny-llama", "slow"]
    assert get("/v1/models/slow").json()["id"] == "slow"
    assert [one["model"] for one in get("/info").json()] == names
    assert httpx.get(cluster.url + "/ping").json() == {
        "status": "healthy",
        "models": dict.fromkeys(names, "ready"),
    }
    for path in ("/metrics", "/v1/models", "/nothing"):
        assert httpx.get(cluster.url + path).status_code == 401, path
    found = {
        "no key": httpx.post(cluster.url + "/invocations", json={"inputs": "1"}),
        "no model": cluster.post("/invocations", {"inputs": "1"}),
        "another model": cluster.post("/v1/completions", {"model": "gpt-4", "prompt": "1"}),
        "a wrong value": cluster.post("/predictions/tiny-llama", {"inputs": 3}),
        "no JSON": httpx.post(cluster.url + "/invocations", content=b"{", headers=AUTHORIZED),
        "too long": cluster.post("/predictions/tiny-llama", {"inputs": "1 " * 4_000_000}),
        "no route": cluster.post("/v1/embeddings", {"model": "tiny-llama"}),
    }
    statuses = {name: answer.status_code for name, answer in found.items()}
    assert statuses == {
        "no key": 401,
        "no model": 400,
        "another model": 404,
        "a wrong value": 400,
        "no JSON": 400,
        "too long": 413,
        "no route": 404,
    }
    assert found["another model"].json()["error"]["code"] == "model_not_found"
    ids = cluster.post("/predictions/tiny-llama", {"inputs": "1 2"}).headers.get_list(
        "x-request-id"
    )
    assert len(ids) == 1


def test_an_adapters_name_reaches_its_model(cluster, tmp_path):
    """With several models behind one gateway. The oracle is the model with the adapter in its weights."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    ids = tokenizer.encode("15 20 25 30")
    texts = [
        tokenizer.decode(reference(load_reference(model), ids, 8).tokens)
        for model in (TINY, save_merged(TINY, cluster.adapter, tmp_path / "merged"))
    ]
    assert len({*texts}) == 2
    asked = {"prompt": "15 20 25 30", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    for path, model, text in (
        ("/v1/completions", "tiny-llama", texts[0]),
        ("/v1/completions", "sql", texts[1]),
        ("/predictions/sql", "sql", texts[1]),
    ):
        answer = httpx.post(
            cluster.url + path, json={**asked, "model": model}, headers=AUTHORIZED, timeout=60
        )
        assert answer.json()["choices"][0]["text"] == text, path
        assert answer.json()["model"] == model
    found = httpx.get(cluster.url + "/v1/models", headers=AUTHORIZED, timeout=60).json()["data"]
    assert [one["parent"] for one in found if one["id"] == "sql"] == ["tiny-llama"]


def test_openais_client_reads_a_stream_as_it_comes(cluster):
    client = openai.OpenAI(base_url=cluster.url + "/v1", api_key=KEY, max_retries=0)
    stream = client.completions.create(model="slow", prompt="1 2", max_tokens=60, stream=True)
    next(iter(stream))
    assert sum(cluster.metric("slots_in_use", "slow").values()) == 1  # it is not at its end
    assert sum(1 for _ in stream) >= 59
    (check,) = [one for one in checks("chat_checks.jsonl") if one["completion"] == " 1"][:1] or [
        checks("chat_checks.jsonl")[0]
    ]
    answer = client.chat.completions.create(
        model="tiny-llama", messages=check["messages"], temperature=0
    )
    assert answer.choices[0].message.content == check["completion"]


def test_a_client_that_leaves_frees_its_slot(cluster):
    body = {"model": "slow", "prompt": "1 2", "max_tokens": 400, "stream": True}
    url = cluster.url + "/v1/completions"
    for more in ({}, {"x-request-disconnect-disabled": "?1"}):
        headers = {**AUTHORIZED, **more}
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
            next(answer.iter_bytes())
        wait_until(lambda: not sum(cluster.metric("slots_in_use", "slow").values()), patience_s=15)
    with suppress(httpx.ReadTimeout):
        httpx.post(url, json={**body, "stream": False}, headers=AUTHORIZED, timeout=1)
        pytest.fail("20 s of steps are over")
    wait_until(lambda: not sum(cluster.metric("slots_in_use", "slow").values()), patience_s=15)


def test_a_conversation_goes_on_where_its_prefix_is(cluster):
    """Of conversations that are interleaved, over two replicas which both have some."""
    asked = checks("chat_checks.jsonl")
    begun = {one["messages"][0]["content"]: one for one in asked if len(one["messages"]) == 1}
    conversations = [[*one["messages"]] for one in begun.values()][:12]
    assert len(conversations) >= 8
    before = cluster.metric("requests_total", "tiny-llama")

    def turn(messages: list[dict[str, str]]) -> int:
        body = {"model": "tiny-llama", "messages": messages, "temperature": 0, "max_tokens": 20}
        answer = cluster.post("/v1/chat/completions", body).json()
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "3 + 4 ="}]
        return answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(turn, conversations))
        cached = [*pool.map(turn, conversations), *pool.map(turn, conversations)]
    assert all(cached), cached
    after = cluster.metric("requests_total", "tiny-llama")
    assert all(after[one] > before.get(one, 0) for one in after), (before, after)
    assert len(after) == 2


def asked(cluster: Cluster, check: dict[str, Any], *, stream: bool, lost: list[str]) -> str:
    """Send one request until it has a whole answer; returns the text. `lost` gets the errors before."""
    body = {
        "inputs": check["prompt"],
        "parameters": {"max_new_tokens": check["max_new_tokens"]},
        "stream": stream,
    }
    for _ in range(50):
        answer = cluster.post("/predictions/tiny-llama", body)
        last = json.loads(answer.text.splitlines()[-1])
        if answer.status_code == 503:
            assert int(answer.headers["retry-after"]) > 0
            time.sleep(0.2)
        else:
            assert answer.status_code == 200, answer.text
            if "error" not in last:
                text: str = last["generated_text"]
                return text
            assert stream, answer.text
        assert last["code"] == 503, last
        lost.append(last["error"])
    pytest.fail(f"no answer after 50 times: {lost}")


class Traffic:
    """Requests whose answers are known, from several clients at once."""

    def __init__(self, cluster: Cluster, count: int) -> None:
        self.known = random.Random(1).choices(checks("checks.jsonl"), k=count)
        self.cluster, self.lost = cluster, []
        self.wrong: list[str] = []

    def run(self, then: Callable[[], None]) -> None:
        """Send all; after a quarter of them call `then` once."""
        with ThreadPoolExecutor(12) as pool:
            sent = [pool.submit(self._ask, number) for number in range(len(self.known))]
            for number, ended in enumerate(as_completed(sent, timeout=500)):
                ended.result()
                if number == len(self.known) // 4:
                    then()
        assert self.wrong == []

    def _ask(self, number: int) -> None:
        known = self.known[number]
        text = asked(self.cluster, known, stream=number % 2 == 0, lost=self.lost)
        if text != known["completion"]:
            self.wrong.append(f"{known}: {text!r}")


def test_a_replica_is_killed(cluster):
    """Each of 400 requests has its right answer, at once or again after a 503 or a stream with an error."""
    before = cluster.replicas("tiny-llama")
    victim = before[0]
    its_processes = descendants(victim)
    assert len(before) == 2
    assert len(its_processes) > 2  # the guard, the engine, those of texts
    traffic = Traffic(cluster, effort.examples(400))

    def kill() -> None:
        traffic.lost.clear()
        os.kill(victim, signal.SIGKILL)

    traffic.run(kill)
    # Of few requests the replica may have had none in that moment.
    assert traffic.lost or len(traffic.known) < 400
    assert all(LOST in one for one in traffic.lost), traffic.lost
    wait_gone([victim, *its_processes])
    cluster.wait_running("tiny-llama", 2)
    assert victim not in cluster.replicas("tiny-llama")


@pytest.mark.nightly
def test_an_update_loses_no_request(cluster):
    """Replicas are replaced one after the other, and the gateway too."""
    before = cluster.replicas("")
    traffic = Traffic(cluster, 400)

    def update() -> None:
        cluster.args["models"][0]["options"]["max_waiting"] = 500
        cluster.deploy()

    traffic.run(update)
    assert traffic.lost == []
    assert not set(before) & set(cluster.replicas(""))


@pytest.mark.parametrize("stream", effort.some(["sse", None, "jsonlines"], 0))
def test_the_only_replica_is_killed_below_a_request(cluster, stream):
    """Before the first byte it is a 503, after it an error at the stream's end."""
    cluster.wait_running("slow", 1)
    body = {"inputs": "1 2", "parameters": {"max_new_tokens": 400}, "stream": stream is not None}
    accept = {"accept": "text/event-stream"} if stream == "sse" else {}
    url, parts = cluster.url + "/predictions/slow", []
    headers = {**AUTHORIZED, **accept}

    def kill() -> None:
        wait_until(lambda: sum(cluster.metric("slots_in_use", "slow").values()) == 1)
        (pid,) = cluster.replicas("slow")
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with httpx.stream("POST", url, json=body, headers=headers, timeout=120) as answer:
        parts = list(answer.iter_lines())
    killer.join()
    if stream is None:
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert LOST in json.loads(parts[0])["error"]
        return
    assert answer.status_code == 200
    assert len(parts) > 1
    last = [one for one in parts if one][-1]
    if stream == "sse":
        assert "event: error" in parts
        last = last.removeprefix("data: ")
    assert LOST in json.loads(last)["error"]


@pytest.mark.nightly
def test_the_only_gateway_is_killed(cluster):
    """Its answers break off, new requests wait for the next gateway, and replicas run the old ones to their end."""
    cluster.wait_running("slow", 1)
    length, ends, passed = 300, [], cluster.metric("requests_total", "slow")
    body = {"inputs": "1 2", "parameters": {"max_new_tokens": length}}

    def begun() -> bool:
        return sum(cluster.metric("slots_in_use", "slow").values()) == 2

    def stream() -> None:
        url = cluster.url + "/predictions/slow"
        more = {"json": {**body, "stream": True}, "headers": AUTHORIZED, "timeout": 120}
        with httpx.stream("POST", url, **more) as answer:
            ends.extend(answer.iter_lines())

    with ThreadPoolExecutor(2) as pool:
        streamed, whole = pool.submit(stream), pool.submit(cluster.post, "/predictions/slow", body)
        wait_until(begun)
        (gateway,) = cluster.replicas("gateway")
        os.kill(gateway, signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            streamed.result()
        assert ends
        assert "finish_reason" not in ends[-1]
        assert whole.result().status_code == 500
        assert cluster.post("/predictions/tiny-llama", {"inputs": "1 2"}).status_code == 200
    cluster.wait_running("gateway", 1)

    def ended() -> float:
        after = cluster.metric("requests_total", "slow")
        return sum(after.values()) - sum(passed.values())

    wait_until(lambda: ended() == 2, patience_s=60)
    assert not begun()


@pytest.mark.nightly
def test_replicas_follow_the_load_and_no_stream_is_lost(cluster):
    """1 to 3 replicas and back to 1, while streams run on those that are stopped."""
    cluster.wait_running("slow", 1)

    def stream(prompt: int, seconds: int) -> None:
        length = seconds * 1000 // STEP_MS
        body = {"inputs": f"{prompt}", "parameters": {"max_new_tokens": length}, "stream": True}
        lines = cluster.post("/predictions/slow", body).text.splitlines()
        assert "error" not in json.loads(lines[-1]), lines[-1]
        assert json.loads(lines[-1])["details"]["generated_tokens"] == length

    def busy() -> list[float]:
        time.sleep(0.2)
        return [one for one in cluster.metric("slots_in_use", "slow").values() if one]

    def round_trip(pool: ThreadPoolExecutor) -> int:
        """Return the number of streams that ran on replicas which were being stopped."""
        # All have one home, which has four slots: the others go where there is less to do.
        burst: list[Future[None]] = []

        def fed(count: int) -> bool:
            """Keep so many streams open, until there are three replicas."""
            missing = count - sum(not one.done() for one in burst)
            burst.extend(pool.submit(stream, 0, 10) for _ in range(missing))
            time.sleep(0.2)
            return cluster.states("slow") == {"RUNNING": 3}

        wait_until(lambda: fed(12), patience_s=250)
        fed(28)
        wait_until(lambda: busy() == [4.0, 4.0, 4.0])
        processes = {pid: descendants(pid) for pid in cluster.replicas("slow")}
        assert len(processes) == 3
        last = [pool.submit(stream, number, 25) for number in range(8)]
        for one in burst:
            one.result()
        wait_until(lambda: cluster.states("slow").get("STOPPING", 0))
        # Metrics are those of the others.
        stopping = sum(not one.done() for one in last) - sum(busy())
        for one in last:
            one.result()
        cluster.wait_running("slow", 1)
        (kept,) = cluster.replicas("slow")
        wait_gone(
            [each for pid, all_of in processes.items() if pid != kept for each in (pid, *all_of)]
        )
        return stopping

    with ThreadPoolExecutor(40) as pool:
        # Ray may choose one without a stream.
        assert any(round_trip(pool) > 0 for _ in range(3))


class Messages:
    """A replica's messages, as Ray gives them; an error is raised, and behind the last one nothing comes."""

    def __init__(self, *steps: Any, ends: bool = True) -> None:
        self.steps, self.ends, self.cancelled = [*steps], ends, False

    async def __anext__(self) -> Any:
        if not self.steps:
            if not self.ends:
                await asyncio.Event().wait()
            raise StopAsyncIteration
        if isinstance(step := self.steps.pop(0), BaseException):
            raise step
        return step

    def cancel(self) -> None:
        self.cancelled = True


def head(kind: str) -> dict[str, Any]:
    headers = [(b"content-type", kind.encode()), (b"x-request-id", b"r1")]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def part(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def test_each_end_of_a_replica_is_a_503_or_an_error_that_is_seen(modules):
    from neuronx_serve import _Passed
    from ray.exceptions import ActorDiedError, ActorUnavailableError
    from ray.serve._private.common import DeploymentID
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

    died, full = ActorDiedError(), BackPressureError(num_queued_requests=1, max_queued_requests=1)
    gone, away = (
        DeploymentUnavailableError(DeploymentID("d")),
        ActorUnavailableError("no", b"1" * 16),
    )

    def answered(messages: Messages, path: str = "/v1/completions") -> tuple[str, str]:
        """The error, and the body."""
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        async def run() -> str:
            never = asyncio.Event().wait
            try:
                await _Passed(messages, path, 0.05)({}, never, send)
            except (ServingError, ConnectionError) as error:
                return f"{getattr(error, 'status', '')} {type(error).__name__}"
            return "" if sent[-1].get("more_body", False) is False else "open"

        end = asyncio.run(run())
        assert all((b"x-request-id", b"r1") not in one.get("headers", ()) for one in sent)
        return end, b"".join(one.get("body", b"") for one in sent).decode()

    whole, begun = part(b"{}", more=False), part(b"data: 1\n\n")
    events, lines = head("text/event-stream; charset=utf-8"), head("application/jsonlines")
    refused = "503 BackendUnavailableError"
    table = [
        (Messages([], [head("application/json"), whole]), "", "{}"),
        (Messages(ends=False), refused, ""),
        (Messages(full), "503 QueueFullError", ""),
        (Messages(gone), refused, ""),
        (Messages(died), refused, ""),
        (Messages([], away), refused, ""),
        (Messages([]), refused, ""),
        (Messages([], [head("application/json")], died), " ConnectionAbortedError", ""),
        (Messages([], [head("application/json")]), " ConnectionAbortedError", ""),
    ]
    for messages, end, body in table:
        steps = [*messages.steps]
        assert answered(messages) == (end, body), steps
        assert messages.cancelled == bool(end), steps
    for start, path in (
        (events, "/v1/completions"),
        (events, "/v1/messages"),
        (lines, "/invocations"),
    ):
        for last in ((died,), (), ([begun], died)):
            end, body = answered(Messages([], [start, begun], *last), path)
            told = json.loads(body.rstrip("\n").rpartition("\n")[2].removeprefix("data: "))
            assert end == ""
            assert body.startswith("data: 1\n\n")
            assert ("\n\nevent: error\ndata: " in body) == (start is events)
            assert LOST in json.dumps(told)
            assert (told.get("type") == "error") == (path == "/v1/messages")


def test_the_turns_of_a_conversation_begin_alike(modules):
    from neuronx_serve import beginning

    def user(text: Any) -> dict[str, Any]:
        return {"role": "user", "content": text}

    system, answer = {"role": "system", "content": "s"}, {"role": "assistant", "content": "b"}
    long = "word " * 100
    alike = [
        [{"messages": [user("a")]}, {"messages": [user("a"), answer, user("c")]}],
        [{"messages": [system, user("a")]}, {"messages": [system, user("a"), answer, user("c")]}],
        [
            {"system": "s", "messages": [user("x")]},
            {"system": "s", "messages": [user("x"), answer]},
        ],
        [{"messages": [user([{"type": "text", "text": "p"}])]}, {"messages": [user("p"), answer]}],
        [{"input": "q"}, {"input": [user("q"), answer, user("r")]}],
        [{"prompt": long}, {"prompt": long + "more"}],
        [{"inputs": "i" + long}, {"inputs": "i" + long + "more"}],
        [{"prompt": [1, 2, 3]}, {"prompt": [1, 2, 3], "max_tokens": 4}],
        [{}, {"model": "m"}, {"prompt": ""}, {"messages": []}],
    ]
    digests = [{beginning(one) for one in turns} for turns in alike]
    assert [len(one) for one in digests] == [1] * len(alike)
    assert len(set.union(*digests)) == len(alike)
    assert digests[-1] == {""}


def test_a_home_whose_slots_are_taken_comes_last(modules):
    """Also if Ray's count of its requests is forgotten, or lacks those of other gateways."""
    from neuronx_routing import PrefixRouter
    from neuronx_serve import Replica
    from ray.serve._private.common import DeploymentID, ReplicaID
    from ray.serve._private.request_router.common import ReplicaQueueLengthCache

    now_s, slots = 0.0, 4
    router = object.__new__(PrefixRouter)
    router._replica_queue_len_cache = ReplicaQueueLengthCache(get_curr_time_s=lambda: now_s)

    def stats(running: int) -> dict[str, Any]:
        """Of a replica with so many sequences."""
        loop = SimpleNamespace(
            streams=range(running), spec=SimpleNamespace(num_slots=slots // 2), copies=[1, 2]
        )
        replica = object.__new__(Replica.func_or_class)
        replica.model = SimpleNamespace(services=[SimpleNamespace(loop=loop)], problem="")
        assert replica.record_replica_metadata() == {"slots": slots}
        return replica.record_routing_stats()

    replicas = [
        SimpleNamespace(
            replica_id=ReplicaID(name, DeploymentID("d")),
            routing_stats=stats(0),
            replica_metadata={"slots": slots},
            max_ongoing_requests=slots + 1000,
        )
        for name in "abc"
    ]
    pending = SimpleNamespace(
        metadata=SimpleNamespace(session_id="x"), routing_context=SimpleNamespace()
    )

    def chosen() -> list[list[Any]]:
        return asyncio.run(router.choose_replicas(replicas, pending))

    ((home,), _) = chosen()

    def is_first() -> bool:
        ranks = chosen()
        assert [home] in ranks
        return ranks[0] == [home]

    router.replica_queue_len_cache.update(home.replica_id, slots - 1)
    assert is_first()
    router.replica_queue_len_cache.update(home.replica_id, slots)
    assert not is_first()
    home.routing_stats = stats(slots)
    now_s = 60.0
    assert router.replica_queue_len_cache.get(home.replica_id) is None
    assert home not in chosen()[0]
    router.replica_queue_len_cache.update(home.replica_id, 1)
    assert home not in chosen()[0]
    all_stats = [one.routing_stats for one in replicas]
    for one in replicas:
        one.routing_stats = stats(slots)
    assert len(chosen()[0]) == 2
    for one, own in zip(replicas, all_stats, strict=True):
        one.routing_stats = own
    home.routing_stats = stats(slots - 1)
    assert is_first()


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the modules of `deploy/ray` be imported."""
    monkeypatch.syspath_prepend(str(MODULES))


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """A folder with the configuration of Llama 3 8B, for plans."""
    shutil.copy(ROOT / "tests/planning/models/llama-3-8b.json", tmp_path / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path / name)
    return str(tmp_path)


def built(args: dict[str, Any]) -> dict[str, Any]:
    """The deployments that Ray is given, by name."""
    import neuronx_serve

    gateway = neuronx_serve.build(args)._bound_deployment
    replicas = [one._bound_deployment for one in gateway.init_args[2:]]
    return {one.name: one for one in (gateway, *replicas)}


def test_a_deployment_has_the_plans_cores_and_limits(cluster, llama):
    """Two copies of degree 4; Ray gives each replica its cores by number."""
    import ray

    options = {
        "tensor_parallel_degree": 4,
        "replicas": 2,
        "max_rolling_batch_size": 8,
        "max_waiting": 10,
        "n_positions": 2048,
        "model_name": "llama",
    }
    model = {"model": llama, "instance": "inf2.48xlarge", "options": options}
    found = built({"models": [model], "drain_s": 50})
    replica = found["llama"]
    assert replica.ray_actor_options["resources"] == {"neuron_cores": 8}
    assert replica.max_ongoing_requests == 2 * (8 + 10)
    for one in found.values():
        assert one._deployment_config.graceful_shutdown_timeout_s > 50

    @ray.remote(num_cpus=0, resources={"neuron_cores": 2})
    class Actor:
        def cores(self) -> str:
            return os.environ["NEURON_RT_VISIBLE_CORES"]

    actors = Actor.remote(), Actor.remote()
    assert sorted(ray.get([one.cores.remote() for one in actors])) == ["0,1", "2,3"]
    refused = {
        "admin_port": [{**model, "options": {**options, "admin_port": 9000}}],
        "cloudwatch_namespace": [{**model, "options": {**options, "cloudwatch_namespace": "a"}}],
        "one name": [model, model],
        "page holds for": [model, {**model, "options": {"model_name": "b", "page": False}}],
        "4 NeuronCores are needed": [{**model, "instance": "inf2.xlarge"}],
        "no_such": [{**model, "options": {"no_such": 1}}],
    }
    for text, models in refused.items():
        with pytest.raises(ValueError, match=text):
            built({"models": models})


@pytest.mark.parametrize("name", ["serve-config.yaml", "rayservice.yaml"])
def test_the_examples_are_what_ray_and_the_plan_accept(name, llama, modules):
    from ray.serve.schema import ServeDeploySchema

    config, worker = yaml.safe_load((MODULES / name).read_text()), None
    if "spec" in config:
        spec = config["spec"]
        (worker,) = spec["rayClusterConfig"]["workerGroupSpecs"]
        config = yaml.safe_load(spec["serveConfigV2"])
    (application,) = ServeDeploySchema(**config).applications
    (model,) = application.args["models"]
    found = built({**application.args, "models": [{**model, "model": llama}]})
    assert {one.name for one in application.deployments} <= set(found)
    cores = found["llama-3-8b"].ray_actor_options["resources"]["neuron_cores"]
    assert cores == 8
    for one in application.deployments:
        scaling = one.autoscaling_config
        if isinstance(scaling, dict):
            slots = model["options"]["max_rolling_batch_size"]
            assert scaling["target_ongoing_requests"] == 0.75 * slots
    if worker is not None:
        pod = worker["template"]["spec"]
        limits = pod["containers"][0]["resources"]["limits"]
        wanted = {one.name: one.num_replicas for one in application.deployments}
        assert int(limits["aws.amazon.com/neuroncore"]) >= cores * wanted["llama-3-8b"]
        graceful = found["llama-3-8b"]._deployment_config.graceful_shutdown_timeout_s
        assert pod["terminationGracePeriodSeconds"] > graceful


def test_the_images_user_is_the_owner_of_its_cache():
    page = (ROOT / "docs" / "ray.md").read_text("utf-8")
    (image,) = re.findall(r"^FROM djl-python-neuronx:(\w+)$", page, re.M)
    base = (ROOT / "docker" / f"Dockerfile.{image}").read_text("utf-8")
    owner = re.findall(r"^USER (.*)$", base, re.M)[-1]
    assert re.findall(r"^USER (.*)$", page, re.M)[-1] == owner

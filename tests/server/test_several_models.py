"""Several models behind one server process, over HTTP: each answers for itself, whatever becomes of the others.

`tiny` is the example model, and the texts of `checks.jsonl` are right. `twin` has two copies and other weights, whose
greedy tokens transformers computes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from contextlib import contextmanager
from itertools import takewhile
from typing import NamedTuple

import pytest

from tests.clients.answers import FORMS, MODEL, ROOT, Question, judge
from tests.clients.embedded import Embedded
from tests.processes import engines, engines_of, wait_until

pytest.importorskip("uvicorn", reason="needs the `server` extra")
torch = pytest.importorskip("torch", reason="needs the `cpu` extra")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from tests.backends.tnx_engine import reference  # noqa: E402
from tests.doubles.tiny_models import load_reference  # noqa: E402

PATIENCE_S = 120.0
"""How long a hang lasts before it fails a test; nothing that works waits for its end."""
NUM_TOKENS = 16
NUM_CLIENTS = 12
PAUSE_S = 0.3
SLOTS = 2
OPTIONS = {"model_loader": "cpu", "max_rolling_batch_size": SLOTS, "dtype": "fp32"}
PROMPTS = (
    "15 20 25 30",
    "28 30 32 34",
    "430 435 440 445",
    "m n o",
    "B C D E F G H",
    "g h i j k l m n o p q r",
)
"""The three models go on in different ways, without special tokens or parts of characters."""
COPIES = {"tiny": 1, "twin": 2}
TOKENIZER = AutoTokenizer.from_pretrained(MODEL)
EOS = (1, 6)
CHAT = [{"role": "user", "content": "1 2 3"}]


def save_twin(folder, seed):
    """Write the example model with noise on its weights."""
    shutil.copytree(MODEL, folder)
    tensors, generator = load_file(MODEL / "model.safetensors"), torch.Generator().manual_seed(seed)
    for name, weight in tensors.items():
        noise = torch.randn(weight.shape, generator=generator)
        tensors[name] = weight + 0.15 * noise * weight.std(correction=0)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "serving.properties").write_text("option.replicas=2\n")
    return folder


def right_texts(folder):
    """Greedy answers of the weights in a folder: to each of `PROMPTS`, and to `CHAT` until its end."""
    model = load_reference(folder)
    chat = TOKENIZER.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    made = [
        reference(model, ids, NUM_TOKENS).tokens for ids in [*map(TOKENIZER.encode, PROMPTS), chat]
    ]
    made[-1] = list(takewhile(lambda token: token not in EOS, made[-1]))
    return TOKENIZER.batch_decode(made)


class Answered(NamedTuple):
    """The outcome of a request."""

    model: str
    outcome: str
    sent_s: float
    ended_s: float


class Server(Embedded):
    """The server of both models."""

    def __init__(self, work):
        self.twin, self.next_twin = save_twin(work / "twin", 0), save_twin(work / "next", 1)
        (work / "tiny").symlink_to(MODEL)
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # threads for so little work wait for each other
        texts = [right_texts(folder) for folder in (MODEL, self.twin, self.next_twin)]
        torch.set_num_threads(num_threads)
        *both, _ = zip(*texts, strict=True)
        assert all(len({*each}) == 3 for each in both), both
        parameters = (("max_new_tokens", NUM_TOKENS), ("ignore_eos", True))
        self.chats = {"tiny": texts[0][-1], "twin": texts[1][-1]}
        self.right = {}
        """Texts of each question; those of the next weights come after those of now."""
        for prompt, (tiny, *twins) in zip(PROMPTS, both, strict=True):
            self.right[Question(prompt, parameters, model="tiny")] = [tiny]
            self.right[Question(prompt, parameters, model="twin")] = twins
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        super().__init__(OPTIONS, work, environ, models=[work / "tiny", self.twin])

    def until(self, condition):
        wait_until(condition, lambda: self.said)

    def get(self, path):
        return self.send("GET", path, b"", {}, time.monotonic() + PATIENCE_S)

    def call(self, path, **body):
        """POST it. Returns the status and the JSON of the answer."""
        deadline_s = time.monotonic() + PATIENCE_S
        reply = self.send("POST", path, json.dumps(body).encode(), {}, deadline_s)
        return reply.status, json.loads(reply.data)

    def samples(self, name, model):
        """The values of a metric of a model."""
        lines = self.get("/metrics").data.decode().splitlines()
        return [
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(f"djl_neuronx_{name}{{") and f'model="{model}"' in line
        ]

    def until_asked(self, found, model):
        """Wait for an answer to a request that is sent from now on."""
        now_s = time.monotonic()
        self.until(lambda: any(each.model == model and each.sent_s > now_s for each in [*found]))

    @contextmanager
    def asked(self, pauses):
        """Clients that ask until the end; yields the list that gets what became of each request.

        `pauses` is set: each waits a while after an answer, because it has the CPU that a load needs.
        """
        found, over = [], threading.Event()

        def ask(number):
            pick = random.Random(number)
            while not over.is_set():
                question, form = pick.choice([*self.right]), pick.choice(FORMS)
                sent_s = time.monotonic()
                reply = self.ask(question, form)
                outcomes = [judge(reply, form, text) for text in self.right[question]]
                right = [i for i, outcome in enumerate(outcomes) if outcome == "right"]
                outcome = f"right {right[0]}" if right else outcomes[0]
                found.append(Answered(question.model, outcome, sent_s, time.monotonic()))
                over.wait(PAUSE_S if pauses.is_set() else 0)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield found
        finally:
            over.set()
            for thread in threads:
                thread.join()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    door = Server(tmp_path_factory.mktemp("models"))
    try:
        door.wait_ready()
        yield door
    finally:
        door.kill()


@pytest.mark.parametrize("model", COPIES)
def test_each_way_to_name_a_model_gets_its_answer(server, model):
    question, (text, *_) = next(one for one in server.right.items() if one[0].model == model)
    prompt, parameters = question.prompt, dict(question.parameters)
    lmi = {"inputs": prompt, "parameters": parameters}
    openai = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "model": model}
    assert server.call("/invocations", **lmi, model=model) == (200, {"generated_text": text})
    for path in (f"/predictions/{model}", f"/models/{model}/invoke"):
        assert server.call(path, **lmi) == (200, {"generated_text": text})
        assert server.call(path, **lmi, model=model) == (200, {"generated_text": text})
    assert server.call("/generate", **lmi, model=model) == (200, {"generated_text": text})
    _, found = server.call("/generate", prompt=prompt, **openai)
    assert found == {"text": [prompt + text]}
    _, found = server.call("/v1/completions", prompt=prompt, **openai)
    assert (found["model"], found["choices"][0]["text"]) == (model, text)
    for path in ("/v1/chat/completions", "/invocations"):
        _, found = server.call(path, messages=CHAT, **{**openai, "ignore_eos": False})
        assert found["model"] == model
        assert found["choices"][0]["message"]["content"] == server.chats[model]
    _, found = server.call("/tokenize", prompt=prompt, model=model)
    assert found["tokens"] == TOKENIZER.encode(prompt)


def test_a_request_for_no_model_or_an_unknown_one_is_refused_with_the_names(server):
    lmi = {"inputs": "1 2", "parameters": {"max_new_tokens": 2}}
    for path, body, status in (
        ("/invocations", lmi, 400),
        ("/v1/completions", {"prompt": "1 2"}, 400),
        ("/invocations", {**lmi, "model": "other"}, 404),
        ("/predictions/other", lmi, 404),
    ):
        found, answer = server.call(path, **body)
        assert found == status, answer
        assert "'tiny'" in str(answer)
        assert "'twin'" in str(answer)
    listed = json.loads(server.get("/v1/models").data)["data"]
    assert [entry["id"] for entry in listed] == [*COPIES]


def test_a_copy_that_is_killed_costs_nothing(server):
    killed, living = engines_of(server.front, server.twin)
    pauses = threading.Event()
    with server.asked(pauses) as found:
        server.until(lambda: {each.model for each in found} == {*COPIES})
        os.kill(killed, signal.SIGKILL)
        pauses.set()
        server.until(lambda: sum(server.samples("engine_deaths_total", "twin")) == 1)
        assert server.get("/ping").status == 200
        server.until(lambda: "engine_restarted" in server.log_text)
        server.until_asked(found, "twin")
    assert {each.outcome for each in found} == {"right 0"}
    assert sum(server.samples("engine_deaths_total", "tiny")) == 0
    after = engines_of(server.front, server.twin)
    assert len(after) == COPIES["twin"]
    assert living in after


def test_a_reload_fails_no_request_and_changes_the_text_of_a_changed_model_alone(server):
    before, pauses = {*engines(server.front)}, threading.Event()
    pauses.set()
    with server.asked(pauses) as found:
        server.until(lambda: {each.model for each in found} == {*COPIES})
        (server.next_twin / "model.safetensors").replace(server.twin / "model.safetensors")
        os.kill(server.front, signal.SIGHUP)
        for model in COPIES:
            server.until(lambda name=model: f"reloaded model={name}" in server.log_text)
            server.until_asked(found, model)
    after = {*engines(server.front)}
    assert len(after) == 3
    assert not before & after
    outcomes = {(each.model, each.outcome) for each in found}
    assert outcomes == {("tiny", "right 0"), ("twin", "right 0"), ("twin", "right 1")}
    # Copy by copy, but a text that has changed does not change back.
    changed_s = min(each.ended_s for each in found if each.outcome == "right 1")
    late = [each for each in found if each.model == "twin" and each.sent_s > changed_s]
    assert {each.outcome for each in late} == {"right 1"}

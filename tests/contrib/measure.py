"""A model of `contrib/models` behind this package's server, and its logits beside those of transformers.

Every step's logits are kept with the tokens that the slot then held. Transformers reads the same tokens, so one wrong
token does not spoil what follows: the comparison is teacher-forced, whatever was sampled.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from djl_python_neuronx.backends.base import Backend, Float32Array, ModelSpec, Step, StepOutput
from djl_python_neuronx.errors import ServingError
from djl_python_neuronx.server.app import Application
from djl_python_neuronx.server.models import Model
from tests.backends.nxdi_plans import loaded, obtained
from tests.contrib.checkpoints import FOLDERS, VOCAB_SIZE, load_reference, save_checkpoint
from tests.doubles.toy_service import toy_service
from tests.doubles.toy_tokenizer import ToyTokenizer
from tests.server.running import Running

ROUNDS = 3
"""Requests for each slot."""
BOUND = 1e-4
"""Of the largest logit. Of these models float32 alone differs from float64 by up to 2e-5 of it, and what was once
wrong by 3e-2 or more."""


class AnswerError(Exception):
    """The server has answered with an error."""


@dataclass
class Text:
    """The tokens of one sequence in a slot, and the logits that followed each."""

    slot: int
    tokens: list[int] = field(default_factory=list)
    logits: dict[int, Float32Array] = field(default_factory=dict)
    """Number of tokens read to float32[V]."""


class Recorder:
    """A backend that keeps every step's logits."""

    def __init__(self, backend: Backend) -> None:
        """No text is known. `backend`: its logits come to the host."""
        self._backend = backend
        self._live: dict[int, Text] = {}
        self.texts: list[Text] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def run(self, step: Step) -> StepOutput:
        output = self._backend.run(step)
        assert output.logits is not None
        [(_, rows)] = step.parts
        for row, slot in enumerate(rows.slots.tolist()):
            if rows.starts[row] == 0:
                self._live[slot] = Text(slot)
                self.texts.append(self._live[slot])
            text = self._live[slot]
            assert len(text.tokens) == rows.starts[row]
            text.tokens += rows.input_ids[row, : rows.lens[row]].tolist()
            text.logits[len(text.tokens)] = output.logits[row, -1].copy()
        return output


@dataclass(frozen=True)
class Request:
    """A prompt, without the token that the tokenizer puts before it."""

    prompt: list[int]
    num_tokens: int
    seed: int | None
    """None: greedy."""

    @property
    def body(self) -> dict[str, Any]:
        """The request of LMI."""
        sampled = {"do_sample": True, "temperature": 2.0, "seed": self.seed}
        parameters = {
            "max_new_tokens": self.num_tokens,
            "ignore_eos": True,
            "details": True,
            **(sampled if self.seed is not None else {}),
        }
        return {"inputs": "".join(f"<{id}>" for id in self.prompt), "parameters": parameters}


def requests(spec: ModelSpec) -> list[Request]:
    """Requests for several times the slots, with prompts around each bucket; two fill their slots, half are sampled."""
    draw, longest = random.Random(7), spec.prefill_buckets[-1]
    edges = {2, longest} | {b + more for b in spec.prefill_buckets for more in (-1, 0, 1)}
    lengths = sorted(length for length in edges if length <= longest)
    lengths += [draw.randint(3, longest) for _ in range(ROUNDS * spec.num_slots - len(lengths))]
    draw.shuffle(lengths)
    made = []
    for i, length in enumerate(lengths):
        room = spec.max_model_len - length
        prompt = draw.choices(range(3, VOCAB_SIZE), k=length - 1)
        num_tokens = room if i in (0, 5) else draw.randint(2, room)
        made.append(Request(prompt, num_tokens, i if i % 2 else None))
    return made


def serve(backend: Backend) -> tuple[list[Text], list[tuple[Request, list[int]]]]:
    """Send `requests` through HTTP at once; returns what ran, and each request with the tokens of its answer.

    Raises:
        AnswerError: an answer is an error.
    """
    recorder: Any = Recorder(backend)
    service = toy_service(recorder, tokenizer=ToyTokenizer(VOCAB_SIZE))
    application = Application(Model("tiny"))
    application.models[0].service = service
    server = Running(application)

    def ask(request: Request) -> tuple[Request, list[int]]:
        response = httpx.post(f"{server.url}/invocations", json=request.body, timeout=300)
        if response.status_code != httpx.codes.OK:
            raise AnswerError(response.text)
        return request, [token["id"] for token in response.json()["details"]["tokens"]]

    try:
        sent = requests(backend.spec)
        with ThreadPoolExecutor(len(sent)) as clients:
            return recorder.texts, list(clients.map(ask, sent))
    finally:
        server.close()
        service.close()


@dataclass(frozen=True)
class Comparison:
    """Logits and tokens beside those of transformers."""

    num_tokens: int
    num_wrong: int
    """Tokens after which another one is best, and not by a tie."""
    worst: float
    """The largest difference of two logits."""
    bound: float
    first: str
    """The first difference above the bound; empty: there is none."""


@torch.no_grad()
def compare(
    texts: Sequence[Text], answers: Sequence[tuple[Request, list[int]]], model: Any
) -> Comparison:
    """Compare each text's logits, and the tokens of greedy answers, with those of a model of transformers."""
    wanted = [model(torch.tensor([text.tokens])).logits[0].float().numpy() for text in texts]
    bound = BOUND * max(float(np.abs(logits).max()) for logits in wanted)
    worst, first, num_tokens, num_wrong = 0.0, "", 0, 0
    for text, logits in zip(texts, wanted, strict=True):
        for i, (length, found) in enumerate(text.logits.items()):
            expected = logits[length - 1]
            off = float(np.abs(found - expected).max())
            num_tokens += 1
            num_wrong += bool(expected.max() - expected[int(found.argmax())] > bound)
            worst = max(worst, off)
            if not (off <= bound or first):  # NaN is no difference that is small
                kind = "decode" if i else "prefill"
                first = f"{kind} in slot {text.slot}, position {length - 1}: a logit differs by {off:.1g}"
    if not first:
        check_answers(texts, wanted, answers, bound)
    return Comparison(num_tokens, num_wrong, worst, bound, first)


def check_answers(
    texts: Sequence[Text],
    wanted: Sequence[Float32Array],
    answers: Sequence[tuple[Request, list[int]]],
    bound: float,
) -> None:
    """Each answer is a text that ran, to its end, and a greedy one has transformers' best tokens.

    Each slot held several of them, so most joined while others decoded.
    """
    assert min(Counter(text.slot for text in texts).values()) > 1
    assert len(texts) == len(answers) == len({text.slot for text in texts}) * ROUNDS
    of_text = {tuple(text.tokens): logits for text, logits in zip(texts, wanted, strict=True)}
    for request, tokens in answers:
        assert len(tokens) == request.num_tokens
        logits = of_text[(1, *request.prompt, *tokens[:-1])][len(request.prompt) :]
        if request.seed is None:
            chosen = logits[np.arange(len(tokens)), tokens]
            assert (logits.max(axis=1) - chosen <= bound).all()


def measure(folder: Path, degree: int, work: Path) -> Comparison | str:
    """Run the tiny model of a folder below `contrib/models` as a start does: options, plan, compile, load, HTTP.

    Returns the error if it does not load or answer. `work`: an empty folder.
    """
    tiny = FOLDERS[folder.name]
    checkpoint = save_checkpoint(folder.name, work / "model")
    model = load_reference(checkpoint)
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **tiny.written}))
    try:
        made = obtained(
            checkpoint,
            work,
            nxdi_model_code=str(folder),
            nxdi_model_code_unverified="true",
            trust_remote_code="true",
            tensor_parallel_degree=str(degree),
            **tiny.options,
        )
        with loaded(made.plan, made.folder) as backend:
            texts, answers = serve(backend)
    except (ServingError, AnswerError) as error:
        return str(error)
    return compare(texts, answers, model)

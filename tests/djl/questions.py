"""Questions to the example model through DJL, and the text of an answer."""

from __future__ import annotations

import json

from tests.djl.folders import MODEL
from tests.doubles.toy_backend import expected
from tests.doubles.toy_tokenizer import TOKENIZER

CHECKS = [json.loads(line) for line in (MODEL / "checks.jsonl").read_text().splitlines()]
COUNT = "1 2 3 4 5"


def body(prompt=COUNT, num_tokens=20, *, stream=False, **parameters):
    parameters = {"max_new_tokens": num_tokens, **parameters}
    return {"inputs": prompt, "parameters": parameters, "stream": stream}


def generated(answer):
    """The text of a whole answer or of a stream's last line."""
    answer.wait()
    assert (answer.status, answer.errors) == (200, []), answer.content
    return json.loads(answer.content.splitlines()[-1])["generated_text"]


def ask(java, model, texts, num_requests=3):
    """Right answers to some requests at once. `texts`: those of the checks."""
    checks = CHECKS[:num_requests]
    bodies = [body(check["prompt"], check["max_new_tokens"]) for check in checks]
    answers = java.submit(model, *bodies)
    assert [generated(answer) for answer in answers] == texts[:num_requests]


LONG = body(num_tokens=400, ignore_eos=True, stream=True)


TOY_TEXT = TOKENIZER.decode(expected([1, 5, 6], 100))


def toy_body(*, stream=False):
    """A request to the toy model, which answers `TOY_TEXT`."""
    parameters = {"max_new_tokens": 100, "ignore_eos": True}
    return {"inputs": "<5><6>", "parameters": parameters, "stream": stream}

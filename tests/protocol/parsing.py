"""Bodies parsed for the toy model, and answers to them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.engine.detokenizer import TextStream
from djl_python_neuronx.protocol import parse_body
from djl_python_neuronx.protocol.base import (
    ParseContext,
    ParsedRequest,
)
from djl_python_neuronx.types import RENDERING, FinishReason, Rendering, TokenOutput
from tests.doubles.chat_model import ChatTokenizer
from tests.doubles.toy_tokenizer import TOKENIZER, ToyTokenizer

SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.9,
    "min_p": 0.1,
    "typical_p": 0.8,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.25,
    "frequency_penalty": -1.5,
    "logit_bias": {"5": -100, "299": 2.5},
    "allowed_token_ids": [5, 6, 299],
    "bad_words": ["<5><6>", " <7>"],
    "bad_words_ids": [[8, 9], [10]],
    "suppress_tokens": [11],
    "begin_suppress_tokens": [12, 13],
    "no_repeat_ngram_size": 3,
    "min_new_tokens": 2,
    "min_length": 1,
    "seed": 11,
}
"""Every sampling parameter as a request has it; `SAMPLED` is what becomes of it."""
SAMPLED: dict[str, Any] = {
    **SAMPLING,
    "logit_bias": ((5, -100), (299, 2.5)),
    "allowed_token_ids": (5, 6, 299),
    # The toy's tokenizer makes a token of a space, so words within a text are longer: vLLM leaves those out.
    "bad_words": ((5, 6), (7,)),
    "bad_words_ids": ((8, 9), (10,)),
    "suppress_tokens": (11,),
    "begin_suppress_tokens": (12, 13),
}


class NotingTokenizer(ToyTokenizer):
    """Keeps what a template would get."""

    messages: Sequence[Mapping[str, Any]] = ()
    rendering = RENDERING

    def __init__(self, template: str = "") -> None:
        super().__init__()
        self.template = template

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_chars: int | None = None,
        rendering: Rendering = RENDERING,
    ) -> list[int]:
        self.messages, self.rendering = messages, rendering
        return super().encode_chat(messages)


def parse(payload: object, **context: Any) -> ParsedRequest:
    body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    facts = {field.name for field in dataclasses.fields(ParseContext)}
    settings = {name: context.pop(name) for name in context.keys() - facts}
    options = ServingOptions(**{"model_name": "toy", **settings})
    given = {"tokenizer": TOKENIZER, "request_id": "r", "options": options, "vocab_size": 300}
    context = {**given, **context}
    return parse_body(body, ParseContext(**context))


def answered(
    payload: Mapping[str, Any],
    *texts: str,
    tokenizer: ChatTokenizer | None = None,
    reason: FinishReason = FinishReason.EOS,
    path: str = "/v1/chat/completions",
    **context: Any,
) -> bytes:
    """The answer to a request of whose sequences each has one of the texts, a byte a token, and eos."""
    tokenizer = tokenizer or ChatTokenizer()
    parsed = parse(payload, tokenizer=tokenizer, path=path, **context)
    written = b""
    for request, text in zip(parsed.requests, texts, strict=True):
        stream = TextStream(request, tokenizer)
        ids = tokenizer.encode(text, special=False) + [2] * (reason is FinishReason.EOS)
        for i, token_id in enumerate(ids, 1):
            ended = reason if i == len(ids) else None
            output = TokenOutput(request.request_id, [token_id], ended, logprobs=[-0.5])
            delta = stream.feed(output)
            assert delta is not None
            written += parsed.formatter.feed(delta)
            if delta.finished:
                break
    return written

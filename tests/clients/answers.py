"""Questions to the example model, and the judgement of an answer to them."""

from __future__ import annotations

import json
import random
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "tiny-llama"
FORMS = ("json", "jsonlines", "sse")
SSE = "text/event-stream"
CLEAN_STATUSES = (408, 500, 503)

_OWN = json.loads((MODEL / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
TOOL_TEMPLATE = _OWN.replace(
    "{{ bos_token }}",
    "{{ bos_token }}{% if tools %}<|system|> {% for tool in tools %}{{ tool.function.name }} {% endfor %}<|end|>"
    '{% endif %}{# <tool_call>{"name" #}',
)
"""The example model's chat template, which lists tools too: their names, because the model's context is short."""


@dataclass(frozen=True)
class Question:
    """A prompt with its parameters."""

    prompt: str
    parameters: tuple[tuple[str, Any], ...]
    known: str | None = None
    """The text, if the example model's folder has it."""
    model: str | None = None
    """The model's name, for a server of several."""

    def body(self, form: str) -> bytes:
        """The request's body."""
        fields = {"inputs": self.prompt, "parameters": dict(self.parameters)}
        named = {} if self.model is None else {"model": self.model}
        return json.dumps({**fields, **named, "stream": form != "json"}).encode()


@dataclass(frozen=True)
class Reply:
    """The answer until its end, or until the deadline."""

    status: int
    data: bytes
    timed_out: bool = False
    """The deadline came, or the client left."""
    broken: str | None = None
    """How the connection failed."""
    headers: Mapping[str, str] = field(default_factory=dict)


def questions(count: int, pick: random.Random) -> list[Question]:
    """Distinct questions: known ones, greedy ones of any length, seeded ones."""
    lines = (MODEL / "checks.jsonl").read_text(encoding="utf-8").splitlines()
    checks = pick.sample([json.loads(line) for line in lines], count)
    found = []
    for i, check in enumerate(checks):
        length = ("max_new_tokens", check["max_new_tokens"])
        if i % 3 == 0:
            found.append(Question(check["prompt"], (length,), check["completion"]))
            continue
        parameters = [("max_new_tokens", pick.randint(1, 150)), ("ignore_eos", True)]
        if i % 3 == 2:
            sampling = pick.choice(({"top_k": 40}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.95}))
            parameters += [
                ("do_sample", True),
                ("temperature", 1.5),
                ("seed", i),
                *sampling.items(),
            ]
        found.append(Question(check["prompt"], tuple(parameters)))
    return found


def judge(
    reply: Reply,
    form: str,
    text: str,
    *,
    leaves: bool = False,
    statuses: Container[int] = CLEAN_STATUSES,
) -> str:
    """The outcome of a request whose right answer is `text`; "wrong: …" says what is wrong.

    `statuses`: those of an error. Which error a request may get is for the caller to say.
    """
    if reply.timed_out and not leaves:
        return f"wrong: no end in time, status {reply.status}, {reply.data[-200:]!r}"
    if reply.broken:
        return f"wrong: connection broken ({reply.broken}) after {reply.data[-200:]!r}"
    if reply.timed_out and reply.status in (0, 200) and (form == "json" or not reply.data):
        return "left"
    try:
        if reply.status != 200:
            return _refusal(reply, statuses)
        return _whole(reply, text) if form == "json" else _streamed(reply, form, text)
    except (ValueError, KeyError, TypeError) as error:
        return f"wrong: not an answer, status {reply.status} ({type(error).__name__}: {error}): {reply.data[-200:]!r}"


def _refusal(reply: Reply, statuses: Container[int]) -> str:
    if reply.timed_out:
        return "left"
    found = json.loads(reply.data)
    if reply.status not in statuses or found["code"] != reply.status or not found["error"]:
        return f"wrong: status {reply.status}: {reply.data[-200:]!r}"
    retry_after = {name.lower(): value for name, value in reply.headers.items()}.get("retry-after")
    if found.get("type") == "queue_full" and not int(retry_after or 0) > 0:
        return f"wrong: queue_full with Retry-After {retry_after}"
    return f"error {reply.status} {found.get('type', '')}".rstrip()


def _whole(reply: Reply, text: str) -> str:
    found = json.loads(reply.data)
    if "code" in found:
        return f"error in body {found['code']} {found.get('type', '')}".rstrip()
    if found["generated_text"] != text:
        return f"wrong: text {found['generated_text']!r}, expected {text!r}"
    return "right"


def _streamed(reply: Reply, form: str, text: str) -> str:
    # A row of a batch has no status of its own in plain mode: its error is the whole body.
    if reply.data.startswith(b'{"code"'):
        return _whole(reply, text)
    separator, prefix = ("\n\n", "data:") if form == "sse" else ("\n", "")
    *events, rest = reply.data.decode(errors="replace").split(separator)
    found = [json.loads(event.removeprefix(prefix)) for event in events]
    made = "".join(event["token"]["text"] for event in found if "token" in event)
    if not text.startswith(made):
        return f"wrong: stream {made!r}, expected {text!r}"
    if reply.timed_out:
        return "left"
    if rest or not found:
        return f"wrong: the stream ends with {rest!r}"
    last = found[-1]
    if "code" in last:
        return (
            f"error event {last['code']} {last.get('type', '')}".rstrip()
            if last["error"]
            else "wrong: no error"
        )
    if last["generated_text"] != text or made != text:
        return f"wrong: stream {made!r} and text {last['generated_text']!r}, expected {text!r}"
    return "right"

"""Interface of wire protocols (a parser and a formatter) and of the service that runs their requests."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

from typing_extensions import TypedDict

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.engine.detokenizer import Delta
from djl_python_neuronx.engine.replicas import Replicas
from djl_python_neuronx.engine.streams import Generation
from djl_python_neuronx.errors import (
    PROMPT,
    BodyTooLargeError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    ServingError,
    UnknownModelError,
    json_type,
)
from djl_python_neuronx.types import RENDERING, GenerationRequest, Rendering, Tokenizer

_P = ParamSpec("_P")
_T = TypeVar("_T")
MOST_INLINE = 4096
"""Tokens of prompts and characters of grammars, all of a request together, up to which they are checked and encoded in
the event loop: 0.3 ms at most."""
UNNAMED = frozenset({"dummy", "tgi"})
"""Model names that huggingface_hub's client sends when its user gave a URL: it has no other way to leave it out. The
one in JavaScript sends the URL."""
_URLS = ("http://", "https://")
ADAPTER = "x-amzn-sagemaker-adapter-identifier"
"""SageMaker's header for the name of an adapter."""
ESCAPE_BYTES = 6
"""Most bytes of JSON for a byte of text: an escape such as \\u0041."""
BESIDE_PROMPT_BYTES = 2**20
"""Most bytes of a body beside its prompt: more than `MAX_STOP_STRINGS` of them need."""


MAX_SEQUENCES = 128
"""Most sequences of one request: one client must not fill the queue with one body."""
MAX_LISTED = 256
"""Most tokens that an answer lists for a step, in all of its sequences: it keeps them until its end, 200 bytes each."""
MAX_SCORED = 2**19
"""Most tokens that the scores of a request's prompts list: an answer keeps them until its end, 550 bytes each."""
_CLIENT_ID = re.compile(r"[!-~]{1,128}")
"""Client ids that are used as they are: those that fit into a header and a log line."""
_REQUEST_IDS = itertools.count(1)
"""Of all models of the process, whose requests are in one log."""
_SEED_STEP = 0x9E3779B97F4A7C15
"""Between the seeds of the answers to one prompt. With 1 the second answer would be the first one of the next seed."""


def client_label(sent: str | None) -> str:
    """The client's own id of a request; empty if it has sent none that can be used."""
    return sent if sent and _CLIENT_ID.fullmatch(sent) else ""


def new_id() -> str:
    """An id of a request."""
    return f"r{next(_REQUEST_IDS)}"


class Formatter(Protocol):
    """The response of one request as it grows: deltas in, bytes out. Used by one thread at a time."""

    content_type: str

    def feed(self, delta: Delta) -> bytes:
        """The bytes to send for a delta; b"" if there is nothing to send yet.

        A streaming formatter returns bytes as text becomes readable, the others return all of it at the last delta.
        An error is returned in the shape of the format.
        """


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed and validated request, with the formatter for its response.

    It may have several sequences, each a request to the engine. The answer ends with the last of them, or with an error
    of one.
    """

    requests: Sequence[GenerationRequest]
    formatter: Formatter
    stream: bool
    """True if the client reads the response as a stream."""
    thread: Executor | None = None
    """The thread of a formatter that takes its time: never to be fed in an event loop."""

    @property
    def request(self) -> GenerationRequest:
        """The first sequence: the only one, or the one that names the request in logs."""
        return self.requests[0]

    async def run(self, feed: Callable[[Delta], _T], delta: Delta) -> _T:
        """The result of `feed`, which feeds the formatter, in a running event loop."""
        if self.thread is None:
            return feed(delta)
        return await asyncio.get_running_loop().run_in_executor(self.thread, feed, delta)


@dataclass(frozen=True)
class ParseContext:
    """Inputs of a parser besides the payload."""

    tokenizer: Tokenizer
    request_id: str = field(default_factory=new_id)
    arrived_s: float = field(default_factory=time.monotonic)
    client_id: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Request headers by lower-case name."""
    path: str = ""
    """Path of the URL; empty under DJL Serving, where the body alone selects the protocol."""
    options: ServingOptions = field(default_factory=ServingOptions)
    max_model_len: int = 0
    """Tokens of prompt and output together."""
    vocab_size: int = 0
    longest_prompt: int = 0
    """Most tokens of a prompt; 0 if that is not known."""
    max_prompt_chars: int | None = None
    """Longer text cannot fit, whatever its tokens are. It is rejected before tokenising, which could take seconds."""
    with_defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    """Adds the sampling parameters of the deployment to those of a request: `engine.limits.with_defaults`."""
    default_max_tokens: int | None = None
    """Most tokens of a request that sets none, by the model's author."""
    adapters: Mapping[str, int] = field(default_factory=dict)
    """The places of the model's adapters by their names."""
    adapter: str | Sequence[str] = ""
    """The adapter that the request names: one for all of its prompts, or one for each; "" is the model itself."""
    has_logprobs: bool = True
    """True if log-probabilities are available. With on-device sampling they are null in streams, and `details` are
    rejected."""

    def checked_adapter(self, name: object, param: str = "adapters") -> str:
        """The name of an adapter, "" for null.

        Raises:
            RequestError: it is no name of one; `param` is the field that has it.
        """
        if name is None or name == "" or (isinstance(name, str) and name in self.adapters):
            return name or ""
        listed = ", ".join(map(repr, self.adapters)) or "none; see option.enable_lora"
        sent = repr(name[:200]) if isinstance(name, str) else json_type(name)
        msg = f"{param} names {sent}, which is no adapter of this model; it has {listed}"
        raise RequestError(msg, param=param)

    def answering_model(self, named: str | None) -> str:
        """The name of a model in an answer: that of the request's only adapter, or what the request has `named`."""
        names = self.options.model_names
        adapter = self.adapter if isinstance(self.adapter, str) else ""
        return adapter or (named if named in names else None) or names[0]

    def check_size(self, body: bytes) -> None:
        """Refuse a body above the limit, or above what a prompt that fits can need.

        Parsing holds the GIL, for 5 ms of 5 MB.

        Raises:
            BodyTooLargeError: the body is longer.
        """
        if len(body) > self.options.max_body_bytes:
            raise BodyTooLargeError(over_limit(self.options.max_body_bytes))
        if self.max_prompt_chars is None:
            return
        most = ESCAPE_BYTES * self.max_prompt_chars + BESIDE_PROMPT_BYTES
        if len(body) > most:
            msg = (
                f"the body has {len(body)} bytes, and no prompt that fits this deployment needs more than {most}; "
                "shorten it, or raise option.n_positions or option.context_length_estimate"
            )
            raise BodyTooLargeError(msg)

    def encode(
        self, text: str | list[Any], name: str = "the prompt", *, special: bool = True
    ) -> list[int]:
        """The token ids of a prompt: of its text, or as they were sent.

        `name` is its name in the error; `special`: see `Tokenizer.encode`.

        Raises:
            RequestError: a list has other values than ids of the model.
            PromptTooLongError: the text is longer than any prompt that fits.
        """
        if isinstance(text, list):
            if not set(map(type, text)) <= {int}:
                msg = (
                    f"{name} is a list with other values than integers; expected text or token ids"
                )
                raise RequestError(msg, PROMPT)
            # Here because they may be decoded: with `echo`, and to detokenise them.
            outside = [one for one in text if not 0 <= one < self.vocab_size]
            if outside:
                last = self.vocab_size - 1
                msg = f"{name} has the token id {outside[0]}; expected ids of the model, from 0 to {last}"
                raise RequestError(msg, PROMPT)
            return text
        self._check_length(len(text), name)
        return self.tokenizer.encode(text, special=special)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], rendering: Rendering = RENDERING
    ) -> list[int]:
        """The token ids of a conversation in the model's chat template; see `Tokenizer.encode_chat`.

        Raises:
            PromptTooLongError: the contents are longer than any prompt that fits.
            RequestError: the model has no chat template, or it refuses the messages or a variable.
        """
        contents = [one["content"] for one in messages]
        texts = [part["text"] for parts in contents if isinstance(parts, list) for part in parts]
        texts += [content for content in contents if isinstance(content, str)]
        self._check_length(sum(map(len, texts)), "the conversation")
        variables = {**(self.options.chat_template_kwargs or {}), **rendering.variables}
        return self.tokenizer.encode_chat(
            messages,
            max_chars=self.max_prompt_chars,
            rendering=rendering._replace(variables=variables),
        )

    def _check_length(self, num_chars: int, name: str) -> None:
        if self.max_prompt_chars is not None and num_chars > self.max_prompt_chars:
            msg = (
                f"{name} has {num_chars} characters, more than any prompt that fits this deployment; "
                "shorten it, or raise option.n_positions or option.context_length_estimate"
            )
            raise PromptTooLongError(msg)

    def requests(
        self,
        common: GenerationRequest,
        prompts: Sequence[str | list[Any]],
        *,
        count: int = 1,
        truncate: int | None = None,
        side: str = "left",
        special: bool = True,
        count_name: str = "n",
        scores_once: bool = True,
    ) -> list[GenerationRequest]:
        """`count` requests for each prompt, text or token ids, otherwise as `common`; the first one has its id.

        The first request of a prompt has the seed of `common`, each further one a seed that follows from it.

        `truncate`: so many tokens of a prompt are kept, as in TGI and vLLM; -1: as many as the deployment takes. A
        prompt that is truncated on the `side` "left" keeps its end, without its BOS. `special`: see `Tokenizer.encode`.
        `scores_once`: the first request of a prompt scores it for the others, unless only scores could serve these.

        Raises:
            RequestError: there are more than `MAX_SEQUENCES` requests, they list more than `MAX_LISTED` tokens for a
                step or `MAX_SCORED` for the prompts, a list has other values than integers, or there are not as many
                adapters as prompts.
            PromptTooLongError: a text is longer than any prompt that fits.
        """
        number = len(prompts) * count
        if number > MAX_SEQUENCES:
            msg = (
                f"the request has {number} sequences (prompts: {len(prompts)}, {count_name}: {count}); "
                f"expected at most {MAX_SEQUENCES}"
            )
            raise RequestError(msg, count_name if count > 1 else PROMPT)
        most = max(common.top_logprobs, common.scores_prompt or 0)
        listed = number * (1 + most)
        if most and listed > MAX_LISTED:
            msg = (
                f"{number} sequences with {most} of the most likely tokens list {listed} "
                f"tokens for a step; expected at most {MAX_LISTED}"
            )
            raise RequestError(msg)
        seed = common.sampling.seed
        samplings = [common.sampling] + [
            replace(common.sampling, seed=None if seed is None else (seed + j * _SEED_STEP) % 2**64)
            for j in range(1, count)
        ]
        if truncate == -1:
            room = self.max_model_len - (common.max_new_tokens or 1)
            truncate = max(1, min(self.longest_prompt, room)) if self.longest_prompt else None
        adapters = self._adapters(len(prompts))
        found: list[GenerationRequest] = []
        for i, prompt in enumerate(prompts):
            name = f"prompt {i + 1} of {len(prompts)}" if len(prompts) > 1 else common.prompt_name
            if truncate is not None and isinstance(prompt, str) and self.max_prompt_chars:
                # Text beyond that is of no token that is kept: tokenising it takes time, and is refused.
                prompt = _kept(prompt, self.max_prompt_chars, side)
            prompt_ids = self.encode(prompt, name, special=special)
            if truncate is not None:
                prompt_ids = _kept(prompt_ids, truncate, side)
            place = self.adapters.get(adapters[i], 0)
            one = replace(
                common,
                prompt_ids=prompt_ids,
                prompt_name=name,
                adapter=place,
                adapter_name=adapters[i],
            )
            fits = len(prompt_ids) <= self.longest_prompt
            once = scores_once and common.max_new_tokens != 0 and fits
            scores = [common.scores_prompt, *[None if once else common.scores_prompt] * (count - 1)]
            for sampling, scored in zip(samplings, scores, strict=True):
                request_id = f"{common.request_id}.{len(found)}" if found else common.request_id
                found.append(
                    replace(one, request_id=request_id, sampling=sampling, scores_prompt=scored)
                )
        _check_scores(found)
        return found

    def _adapters(self, count: int) -> Sequence[str]:
        """The adapter of each of so many prompts."""
        adapters = [self.adapter] * count if isinstance(self.adapter, str) else self.adapter
        if len(adapters) != count:
            msg = f"adapters has {len(adapters)} names for {count} prompts; expected one for each, or a text"
            raise RequestError(msg, param="adapters")
        return adapters


def _check_scores(requests: Sequence[GenerationRequest]) -> None:
    scored = [one for one in requests if one.scores_prompt is not None]
    listed = sum([len(one.prompt_ids) * (1 + (one.scores_prompt or 0)) for one in scored])
    if listed > MAX_SCORED:
        msg = (
            f"the scores of {len(scored)} prompts list {listed} tokens (each one of a prompt, and the most likely in "
            f"its place); expected at most {MAX_SCORED}. Send fewer or shorter prompts, or ask for fewer likely tokens"
        )
        raise RequestError(msg, PROMPT)


_Kept = TypeVar("_Kept", str, list[Any])


def _kept(prompt: _Kept, count: int, side: str) -> _Kept:
    return prompt[:count] if side == "right" else prompt[-count:]


def named_model(payload: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The name of the model in a payload. None if it has none, or a URL or one of `UNNAMED` that is not of `names`.

    Raises:
        RequestError: it is no string.
    """
    name = payload.get("model")
    if not isinstance(name, (str, type(None))):
        msg = f"model is {json_type(name)}; expected a string, the name of a model"
        raise RequestError(msg, param="model")
    is_url = name is not None and name.startswith(_URLS)
    return None if (name in UNNAMED or is_url) and name not in names else name


def check_model(name: str | None, names: Sequence[str]) -> None:
    """Raises `UnknownModelError` if a request names a model that has another name."""
    if name is not None and name not in names:
        msg = f"unknown model {name[:200]!r}; this server serves {', '.join(map(repr, names))}"
        raise UnknownModelError(msg, param="model")


def over_limit(limit: int) -> str:
    """The message for a body of more than `limit` bytes."""
    return f"the body is larger than {limit} bytes, the limit; shorten it, or raise option.max_body_bytes"


class ErrorFields(TypedDict):
    """An error in LMI's shape: ``{"code": 413, "error": "…", "type": "prompt_too_long"}``."""

    code: int
    error: str
    type: str


def error_fields(error: ServingError) -> dict[str, Any]:
    """The `ErrorFields` of an error."""
    return {"code": error.status, "error": str(error), "type": error.code}


class WireProtocol(Protocol):
    """A class in a module of `protocol/`, with one instance in `PROTOCOLS`."""

    name: str
    outline: str
    """Outline of a payload, for error messages."""
    key: str
    """A key that payloads of this protocol have."""
    paths: tuple[str, ...] = ()
    """Routes of its own in the embedded server. Only protocols with the path of a request can parse its payload."""
    anywhere: bool = True
    """True if it can parse payloads on routes that no protocol has, and under DJL Serving."""
    names_model: bool = True
    """False if the name of a model in a payload means nothing where one model is served."""

    requests: Mapping[str, Any]
    """Types of a body by media type, for the OpenAPI document: models, or TypedDicts of typing_extensions."""
    answers: Mapping[str, Any]
    """Types of an answer by media type; of a stream the type of its parts."""
    error: Any = ErrorFields
    """Type of an answer that is an error as a whole."""

    def is_allowed(self, options: ServingOptions) -> bool:  # noqa: ARG002
        """True if the options allow this protocol on routes that no protocol has."""
        return True

    def detect(self, payload: Mapping[str, Any], context: ParseContext) -> bool:  # noqa: ARG002
        """True if the payload is of this protocol."""
        return self.key in payload

    def parse(self, payload: Mapping[str, Any], context: ParseContext) -> ParsedRequest:
        """Validate and tokenise.

        Raises:
            RequestError: the payload is invalid; the message names the field.
        """

    def answer_error(self, error: ServingError) -> tuple[int, Mapping[str, Any]]:
        """HTTP status and body of an answer that is an error as a whole."""
        return error.status, error_fields(error)


class Serving(Protocol):
    """The part of a `Service` that request handlers use."""

    @property
    def loop(self) -> Replicas:
        """The copies that requests are submitted to."""

    @property
    def threads(self) -> Executor:
        """The threads that parse requests."""

    def parse(
        self,
        body: bytes,
        *,
        request_id: str | None,
        headers: Mapping[str, str],
        path: str = "",
        payload: dict[str, Any] | None = None,
    ) -> ParsedRequest:
        """Parse and validate a body. `payload`: see `parse_body`."""


class Threads(ThreadPoolExecutor):
    """Threads that exist from the start: a full address space refuses new ones."""

    def __init__(
        self,
        count: int,
        name: str,
        most: Callable[[], float] = lambda: math.inf,
        on_full: Callable[[ServingError], None] = lambda _error: None,
    ) -> None:
        """`most`: calls that may run or wait at once. `on_full` gets the error of each one more."""
        super().__init__(count, name)
        self._most, self._on_full, self._open = most, on_full, set[Future[Any]]()
        begin, present = super().submit, threading.Barrier(count)
        wait([begin(present.wait, 10.0) for _ in range(count)])

    def submit(self, call: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """See `Executor`; in addition raises `QueueFullError`."""
        if len(self._open) >= (most := self._most()):
            msg = (
                f"{len(self._open)} requests wait for chat template or tokenizer, of at most {most}; retry later, or "
                "raise option.max_waiting"
            )
            error = QueueFullError(msg)
            self._on_full(error)
            raise error
        made = super().submit(call, *args, **kwargs)
        self._open.add(made)
        made.add_done_callback(self._open.discard)
        return made


async def parse(
    service: Serving,
    body: bytes,
    *,
    request_id: str | None,
    headers: Mapping[str, str],
    path: str = "",
    payload: dict[str, Any] | None = None,
) -> ParsedRequest:
    """Parse a body in a running event loop, on a thread: a template or a tokenizer may take `option.text_timeout`.

    Raises:
        ServingError: the request was rejected.
    """
    work = partial(
        service.parse, body, request_id=request_id, headers=headers, path=path, payload=payload
    )
    held, event_loop = [work], asyncio.get_running_loop()
    try:
        return await event_loop.run_in_executor(service.threads, lambda: held.pop()())
    finally:
        held.clear()  # else a call that is cancelled keeps the body until its turn comes


async def generate(service: Serving, parsed: ParsedRequest) -> Generation:
    """Submit a parsed request in a running event loop; long prompts and grammars are checked and encoded on a thread.

    Raises:
        ServingError: the request was rejected.
    """
    work = partial(service.loop.prepare, *parsed.requests)
    size = sum(len(one.prompt_ids) + len(one.grammar or "") for one in parsed.requests)
    group = work() if size <= MOST_INLINE else await asyncio.to_thread(work)
    return service.loop.generate(group)

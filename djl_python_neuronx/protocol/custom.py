"""Formatters of a model folder's `model.py`: the operator's own functions around the wire protocols.

The input formatter changes the payload of a request, the output formatter its answer. What they get follows from their
signatures (docs/protocols.md). DJL Serving's engine imports `model.py` and passes the functions with its first call; in
the embedded server `load` imports it. As under DJL Serving they are called one at a time, but never in an event loop.
Nothing in Python stops a call that hangs: its thread is left to itself, and the next call gets a new one.

Source: djl-serving 0.29 to 0.36, python_sync_engine.py, input_parser.py, output_formatter.py, request.py,
custom_formatter_handling.py, vllm_async_service.py.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import re
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, wait
from dataclasses import replace
from functools import partial
from importlib import import_module, machinery, util
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any, TypeVar

import orjson

from djl_python_neuronx.config.own_code import FILE_NAME, KINDS, READS, WRITES, formatters
from djl_python_neuronx.engine.detokenizer import Delta, Token
from djl_python_neuronx.errors import (
    ArtifactError,
    FormatterError,
    ServingError,
    UnsupportedParameterError,
)
from djl_python_neuronx.protocol.base import ParseContext, ParsedRequest
from djl_python_neuronx.types import Tokenizer

logger = logging.getLogger(__name__)

_MODULE = "djl_neuronx_model_py"
_DOCUMENT = re.compile(rb"(?m)^(data: ?)?(\{.*\}|\[\{.*\}\])$")
"""An object of JSON, or a list of them: a whole answer, a line, or the data of an event."""

MOST_HANGING = 8
"""Calls that may hang at once: each has a thread, which shares the GIL with the streams if it does not sleep."""
_Function = Callable[..., Any]
_T = TypeVar("_T")


class CustomFormatters:
    """The functions of one model."""

    def __init__(
        self,
        functions: Mapping[str, _Function],
        tokenizer: Tokenizer,
        limit_s: float = math.inf,
        threads: Executor | None = None,
    ) -> None:
        """`functions`: one or both of `KINDS`. `limit_s`: of a call. `threads`: those that wait for calls."""
        self._threads, self._limit_s = threads, limit_s
        self._turn = threading.Lock()
        """Held during a call."""
        self._hanging: list[Future[Any]] = []
        """Calls that were given up and may still run."""
        self._begin()
        self._read, self._write = map(functions.get, KINDS)
        self._reads_item = _types(self._read)[:1] == ["Input"]
        self._takes_tokens = _takes_tokens(self._write)
        self._tokenizer = None
        if self._read is not None:
            # A copy, because padding and truncation are a state of the tokenizer.
            self._tokenizer = copy.deepcopy(getattr(tokenizer, "library", tokenizer))

    def parse(
        self, body: bytes, context: ParseContext, decode: _Function, parse: _Function
    ) -> ParsedRequest:
        """Parse a body with the functions around it. `decode` makes a payload of it, and `parse` a `ParsedRequest`.

        Raises:
            RequestError: from `decode` and `parse`; or the answer has several sequences, and the output formatter takes
                the tokens of one.
            FormatterError: the input formatter failed.
        """
        made, label = None, context.client_id or context.request_id
        if self._reads_item:
            from djl_python import Input

            payload = Input()
            payload.properties.update(context.headers)
            payload.content.add("data", bytearray(body))
        else:
            payload = decode(body, context)
        if self._read is not None:
            read = partial(self._read, payload, tokenizer=self._tokenizer)
            payload, made = self.guarded(READS, label, lambda: _payload(read()))
        parsed: ParsedRequest = parse(payload, context)
        if self._write is None:
            return parsed
        if not self._takes_tokens:
            documents = _Documents(parsed, self._write, self)
            return replace(parsed, formatter=documents, thread=self._threads)
        if len(parsed.requests) > 1:
            msg = (
                f"the request has {len(parsed.requests)} sequences, and the output formatter of model.py takes the "
                "tokens of one; send one request for each"
            )
            raise UnsupportedParameterError(msg)
        request = replace(parsed.request, logprobs=context.has_logprobs)
        made = _request_input(payload) if made is None else made
        formatter = self.guarded(WRITES, label, partial(_Tokens, parsed, self._write, self, made))
        return replace(parsed, requests=[request], formatter=formatter, thread=self._threads)

    def guarded(self, kind: str, label: str, call: Callable[[], _T]) -> _T:
        """Call a function of `model.py`. Whatever it raises becomes an error of this one request.

        Raises:
            ServingError: the function raised it.
            FormatterError: it raised anything else, or takes more than the limit.
        """
        made = self._called(kind, call)
        error = made.exception()
        if error is None or isinstance(error, ServingError):
            return made.result()
        name, places = type(error).__name__, "".join(traceback.format_tb(error.__traceback__))
        # Without the message, which may quote the prompt.
        logger.error(
            "formatter_failed kind=%s request_id=%s error=%s\n%s", kind, label, name, places
        )
        msg = f"the {kind} of model.py failed ({name}); the server's log says where"
        raise FormatterError(msg)

    def _called(self, kind: str, call: Callable[[], _T]) -> Future[_T]:
        """The finished future of a call, with its result or error.

        Raises:
            FormatterError: it takes more than the limit, or too many hang.
        """
        made = Future[_T]()
        with self._turn:
            self._hanging = [one for one in self._hanging if not one.done()]
            if len(self._hanging) >= MOST_HANGING:
                msg = f"{MOST_HANGING} calls of model.py hang; correct model.py, and start the server again"
                raise FormatterError(msg)
            self._calls.put((made, call))
            wait([made], min(self._limit_s, threading.TIMEOUT_MAX))
            if made.done():
                return made
            self._hanging.append(made)
            self._calls.put(None)  # ends the thread, if the call ever does
            self._begin()
        msg = (
            f"the {kind} of model.py takes more than {self._limit_s:g} s (option.text_timeout); correct it, or "
            "raise the option. Its thread cannot be stopped"
        )
        logger.error("formatter_hangs: %s", msg)
        raise FormatterError(msg)

    def _begin(self) -> None:
        """Start the thread of the next calls."""
        self._calls = SimpleQueue[Any]()
        threading.Thread(
            target=_run, args=(self._calls,), name="djl-neuronx-model-py", daemon=True
        ).start()


def _run(calls: SimpleQueue[Any]) -> None:
    while (one := calls.get()) is not None:
        made, call = one
        try:
            made.set_result(call())
        except BaseException as error:  # noqa: BLE001  (sys.exit() would end the thread)
            made.set_exception(error)
        del made, call, one  # which have a prompt


class _Documents:
    """An output formatter that takes each object of the protocol's answer: the whole, or one of a stream."""

    def __init__(self, parsed: ParsedRequest, write: _Function, custom: CustomFormatters) -> None:
        self.content_type = parsed.formatter.content_type
        self._parsed, self._write, self._custom = parsed, write, custom

    def feed(self, delta: Delta) -> bytes:
        """See `Formatter`. An error has the protocol's own shape."""
        if delta.error is not None:
            return self._parsed.formatter.feed(delta)
        label = self._parsed.request.label
        return self._custom.guarded(WRITES, label, partial(self._write_all, delta))

    def _write_all(self, delta: Delta) -> bytes:
        return _DOCUMENT.sub(self._write_match, self._parsed.formatter.feed(delta))

    def _write_match(self, match: re.Match[bytes]) -> bytes:
        content = orjson.loads(match[2])
        if isinstance(content, dict):
            return (match[1] or b"") + _encoded(self._write(content))
        return b"[" + b",".join([_encoded(self._write(each)) for each in content]) + b"]"


class _Tokens(_Documents):
    """An output formatter that takes each token: in DJL's `RequestOutput`, or as the first of six arguments."""

    def __init__(
        self,
        parsed: ParsedRequest,
        write: _Function,
        custom: CustomFormatters,
        made: Any,  # noqa: ANN401
    ) -> None:
        from djl_python.request import Request

        super().__init__(parsed, write, custom)
        self.content_type = "text/plain; charset=utf-8"
        made.request_id, made.output_formatter = parsed.request.request_id, write
        self._request = Request(made)

    def _write_all(self, delta: Delta) -> bytes:
        from djl_python.request_io import Token as DjlToken

        texts, tokens = [], delta.tokens
        if delta.finished and not tokens:
            tokens = (Token(-1, delta.text, None, True),)
        for i, token in enumerate(tokens, 1):
            last = delta.finish_reason if i == len(tokens) else None
            reason = None if last is None else last.value
            self._request.set_next_token(DjlToken(*token[:4]), last is not None, reason)
            texts.append(_encoded(self._request.get_next_token()))
            self._request.reset_next_token()
        return b"".join(texts)


def load(folder: Path) -> dict[str, _Function]:
    """Import `model.py` of a folder whose code is trusted, if it names a decorator. Returns its functions by kind.

    Raises:
        ArtifactError: it cannot be read or imported.
    """
    path = folder / FILE_NAME
    try:
        if not formatters(folder):
            return {}
        sys.path.append(str(folder))  # as under DJL Serving: it may import what lies beside it
        if "djl_python" not in sys.modules and util.find_spec("djl_python") is None:
            _stand_in()
        module = sys.modules[_MODULE] = ModuleType(_MODULE)
        machinery.SourceFileLoader(_MODULE, str(path)).exec_module(module)
        found = [one for one in vars(module).values() if callable(one)]
        functions = {kind: one for kind in KINDS for one in found if hasattr(one, f"is_{kind}")}
        if _takes_tokens(functions.get(WRITES)):
            import_module("djl_python.request")
    except Exception as error:
        msg = (
            f"{path} cannot be imported ({type(error).__name__}: {error}). Outside DJL Serving djl_python has the two "
            "decorators only; for its classes add the folder engines/python/setup of djl-serving to PYTHONPATH"
        )
        raise ArtifactError(msg) from error
    return functions


def _stand_in() -> None:
    """Stand in for `djl_python`, which is on no registry, with its two decorators."""
    sys.modules["djl_python"] = ModuleType("djl_python")
    for place, kind in zip(("input_parser", "output_formatter"), KINDS, strict=True):
        module = sys.modules[f"djl_python.{place}"] = ModuleType(f"djl_python.{place}")
        setattr(module, kind, partial(_mark, f"is_{kind}"))


def _mark(name: str, function: _Function) -> _Function:
    setattr(function, name, True)
    return function


def _request_input(payload: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """DJL's `RequestInput` of a payload that no input formatter has made one of."""
    from djl_python.request_io import TextInput

    parameters = {**payload, **(payload.get("parameters") or {})}
    text = payload.get("inputs", payload.get("prompt"))
    return TextInput(input_text=text, parameters=parameters)


def _takes_tokens(function: _Function | None) -> bool:
    """True for an output formatter that needs DJL's classes."""
    taken = _types(function)
    return len(taken) >= 6 or taken[:1] in (["RequestOutput"], ["TextGenerationOutput"])


def _types(function: _Function | None) -> list[str]:
    """The names of the types of a function's parameters."""
    parameters = [] if function is None else inspect.signature(function).parameters.values()
    kinds = [getattr(one.annotation, "__name__", str(one.annotation)) for one in parameters]
    return [kind.rpartition(".")[2] for kind in kinds]


def _payload(made: Any) -> tuple[dict[str, Any], Any]:  # noqa: ANN401
    """The payload that an input formatter has returned, as plain JSON, and its `RequestInput` if it is one."""
    fields, is_input = made, hasattr(made, "input_text")
    if is_input:
        fields = {"inputs": made.input_text, "parameters": made.parameters}
    _check_type(READS, fields, dict)
    return orjson.loads(orjson.dumps(fields)), made if is_input else None


def _encoded(made: Any) -> bytes:  # noqa: ANN401
    """The result of an output formatter, in UTF-8."""
    _check_type(WRITES, made, (dict, str, bytes))
    if isinstance(made, dict):
        return orjson.dumps(made)
    return (made.decode() if isinstance(made, bytes) else made).encode()


def _check_type(kind: str, made: object, expected: type | tuple[type, ...]) -> None:
    if not isinstance(made, expected):
        msg = f"the {kind} of model.py returned {type(made).__name__}; expected a dict"
        raise FormatterError(msg)

"""Tokenizers of model folders, from transformers, behind the `Tokenizer` protocol."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any

from djl_python_neuronx.artifacts.folder import read_json
from djl_python_neuronx.errors import (
    PROMPT,
    ArtifactAccessError,
    ArtifactError,
    ArtifactNotFoundError,
    BackendUnavailableError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    ServingError,
    UnsupportedParameterError,
)
from djl_python_neuronx.grammar import checked
from djl_python_neuronx.types import RENDERING, Rendering

logger = logging.getLogger(__name__)

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_SUFFIXES = (".model", ".tiktoken")


def has_vocabulary(names: Iterable[str]) -> bool:
    """True if one of the files beside config.json is a tokenizer's."""
    return any(name in _VOCABULARIES or name.endswith(_SUFFIXES) for name in names)


def no_tokenizer(folder: Path) -> str:
    """The message for a folder without a tokenizer, without a full stop."""
    return (
        f"no tokenizer in {folder}: expected one of {', '.join(_VOCABULARIES)}, *.model or *.tiktoken. "
        "Copy the tokenizer's files beside config.json"
    )


_TEMPLATES = (
    "chat_template.jinja or tokenizer_config.json of the model folder, or option.chat_template"
)
_LISTS_PARTS = re.compile(
    r"""for\s+\w+\s+in\s+(?:\w+[.\[]['"]?)?content['"]?\]?\s*(?:-?%|\||if\b)"""
)
"""A template that takes the parts of a content one by one."""
_ADDS_ARGUMENTS = re.compile(r"""arguments(?:['"]\])?\s*\+""")
"""A template that adds the arguments of a call to text, as DeepSeek's."""
_TOOL_DEFAULTS = {"description": "", "parameters": {"type": "object", "properties": {}}}
"""Values that a tool may leave out and some templates add to text."""
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_CONCATENATING = {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}
_SAMPLE_SIZE = 1000
_IMPORTING = threading.Lock()
"""Held while transformers is imported: a second thread would find it without its names."""


def make_pieces(
    vocab: Mapping[str, int],
    added: Mapping[int, str],
    decoder: Mapping[str, Any],
    *,
    special_ids: Collection[int],
    decode: Callable[[Sequence[int]], str],
) -> list[bytes] | None:
    """UTF-8 bytes of every id (empty for special and unused ones), or None if text is not their concatenation.

    Text can then grow by concatenation instead of decoding again. `added` tokens replace those of `vocab` with the same
    id. `decoder` is that part of tokenizer.json. The result is compared with `decode` on all added tokens and on a
    sample of the others, without the start of the text, because many decoders drop a space there.
    """
    rule = _rule(decoder)
    if rule is None or not vocab:
        return None
    pieces = [b""] * (max(*vocab.values(), *added) + 1)
    for token, token_id in vocab.items():
        pieces[token_id] = rule(token)
    for token_id, token in added.items():
        pieces[token_id] = b"" if token_id in special_ids else rule(token)
    sample = {*range(0, len(pieces), len(pieces) // _SAMPLE_SIZE + 1), *added}
    ids = [token_id for token_id in sorted(sample) if _is_text(pieces[token_id])]
    text = b"".join(pieces[token_id] for token_id in ids).decode()
    return pieces if decode(ids).lstrip(" ") == text.lstrip(" ") else None


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def _rule(decoder: Mapping[str, Any]) -> Callable[[str], bytes] | None:
    """The function by which a decoder turns a token into bytes; None if that depends on the tokens around it."""
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level
    if not set(kinds) <= _CONCATENATING or any(
        "Regex" in step.get("pattern", {}) for step in steps
    ):
        return None
    swaps = [_swap(step) for step in steps if step["type"] in {"Replace", "Metaspace"}]
    has_bytes = "ByteFallback" in kinds

    def sentencepiece(token: str) -> bytes:
        if has_bytes and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in swaps:
            token = token.replace(old, new)
        return token.encode()

    return sentencepiece


def _swap(step: Mapping[str, Any]) -> tuple[str, str]:
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    return step["pattern"]["String"], step["content"]


def _byte_alphabet() -> dict[int, int]:
    """Code point that a byte-level vocabulary writes for a byte -> the byte.

    Source: GPT-2's encoder: printable Latin-1 characters stand for themselves, code points from U+0100 on for the other
    bytes, in order. Other characters map to one that Latin-1 lacks.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {
        **dict.fromkeys(others, 0xFFFF),
        **{byte: byte for byte in printable},
        **{0x100 + rank: byte for rank, byte in enumerate(others)},
    }


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_BYTE_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        # An added token in plain text: the library's decoder keeps it as it is, too.
        return token.encode()


@contextmanager
def _no_panic() -> Iterator[None]:
    """Raise an error instead of a panic of the Rust library, which is no `Exception`: a regex that backtracks too long.

    Raises:
        ServingError: the library has panicked.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        logger.exception("tokenizer_panicked")
        msg = "the model's tokenizer failed on this text, and the log says why; shorten or change the text"
        raise ServingError(msg) from None


def for_template(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Messages with the roles that a template knows, and with the contents' parts as lines unless it takes the user's.

    Arguments of calls are JSON, where they are text as it is, if it adds them to text, otherwise objects. Results have
    the names of their calls, which Hermes' needs.
    """
    renamed = {} if "developer" in template else {"developer": "system"}
    takes_parts, adds_arguments = _LISTS_PARTS.search(template), _ADDS_ARGUMENTS.search(template)
    names, found = dict[Any, str](), []
    for message in messages:
        changed = {**message, "role": renamed.get(message["role"], message["role"])}
        # A loop may be in the branch of the user alone, as in Mistral Small's.
        has_parts = isinstance(message["content"], list)
        if has_parts and not (takes_parts and message["role"] == "user"):
            changed["content"] = "\n".join(part["text"] for part in message["content"])
        calls = message.get("tool_calls", ())
        names.update((call.get("id"), call["function"]["name"]) for call in calls)
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            changed.setdefault("name", names[message.get("tool_call_id")])
        if calls:
            changed["tool_calls"] = [_call(one, as_text=bool(adds_arguments)) for one in calls]
        found.append(changed)
    return found


def _call(call: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    """A call with its arguments as JSON or as an object."""
    function = {**call["function"]}
    given = function["arguments"]
    if as_text and not isinstance(given, str):
        function["arguments"] = json.dumps(given, ensure_ascii=False)
    elif isinstance(given, str) and not as_text:
        function["arguments"] = json.loads(given, parse_float=_finite)
    return {**call, "function": function}


def _finite(number: str) -> float:
    """The nearest number that JSON can write."""
    return max(-sys.float_info.max, min(float(number), sys.float_info.max))


def _complete(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with all that templates may add to text."""
    given = {key: value for key, value in tool["function"].items() if value is not None}
    return {**tool, "function": {**_TOOL_DEFAULTS, **given}}


class TokenTable:
    """Facts about a tokenizer's tokens: the part of `Tokenizer` for which only `decode` may run the library."""

    pieces: Sequence[bytes] | None = None
    template = ""

    def __init__(
        self, special: Mapping[str, int], special_ids: frozenset[int], eos_id: int | None
    ) -> None:
        """`special`: ids of the special tokens by their text."""
        self.special, self.special_ids, self.eos_id = special, special_ids, eos_id

    def special_id(self, text: str) -> int | None:
        """See `Tokenizer`."""
        return self.special.get(text)

    def decode(self, ids: Sequence[int], *, skip: bool = True, spaces: bool = False) -> str:
        """See `Tokenizer`."""
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer`."""
        known = self._token_bytes
        if token_id in known:
            return known[token_id]
        if self.pieces is not None:
            return self.pieces[token_id] if token_id < len(self.pieces) else b""
        try:
            # The library drops the space of a first token, and keeps that of a second.
            first, both = self.decode([token_id]), self.decode([token_id, token_id])
            known[token_id] = both[len(first) :].encode(errors="replace")
        except (BackendUnavailableError, QueueFullError):
            raise
        except Exception:  # noqa: BLE001  (the model may be padded beyond a vocabulary in the library's Python)
            known[token_id] = b""
        return known[token_id]

    @cached_property
    def _token_bytes(self) -> dict[int, bytes]:
        """The bytes of special tokens, and without `pieces` of those that were decoded so far."""
        return {token_id: text.encode() for text, token_id in self.special.items()}

    def grammar(self, kind: str, text: str) -> str:
        """See `Tokenizer`."""
        return checked(kind, text)

    def close(self) -> None:
        """See `Tokenizer`."""


class PythonTokenizer(TokenTable):
    """Any tokenizer of transformers, through its Python interface, one thread at a time. Translates its errors."""

    def __init__(self, library: Any) -> None:  # noqa: ANN401
        self.library = library
        self._lock = threading.Lock()
        special = dict(zip(library.all_special_tokens, library.all_special_ids, strict=True))
        super().__init__(special, frozenset(library.all_special_ids), library.eos_token_id)
        with suppress(AttributeError, ValueError):  # there is none, or none by default
            self.template = library.get_chat_template(tools=[])
        bos_id = library.bos_token_id
        self._added_bos_id = (
            bos_id
            if bos_id is not None and self._encode("", special=True)[:1] == [bos_id]
            else None
        )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """See `Tokenizer`.

        Raises:
            RequestError: the text is not valid Unicode, or has symbols that the vocabulary lacks.
        """
        ids = self._checked_encode(text, special=special)
        # A prompt from a chat template begins with the BOS token that the tokenizer adds again.
        bos_id = self._added_bos_id
        if special and bos_id is not None and ids[:2] == [bos_id, bos_id]:
            del ids[0]
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_chars: int | None = None,
        rendering: Rendering = RENDERING,
    ) -> list[int]:
        """See `Tokenizer`."""
        return self.encode_rendered(self.render(messages, rendering), max_chars)

    def encode_rendered(self, text: str, max_chars: int | None = None) -> list[int]:
        """The ids of a rendered template. It writes every special token, BOS included, so none is added.

        Raises:
            PromptTooLongError: it has more than `max_chars` characters.
            RequestError: see `encode`.
        """
        if max_chars is not None and len(text) > max_chars:
            msg = (
                f"the conversation in the model's chat template has {len(text)} characters, more than any prompt that "
                "fits this deployment; shorten it, raise option.n_positions or option.context_length_estimate, or "
                "correct the template"
            )
            raise PromptTooLongError(msg)
        return self._checked_encode(text, special=False)

    def render(
        self, messages: Sequence[Mapping[str, Any]], rendering: Rendering = RENDERING
    ) -> str:
        """The text of a conversation in the model's chat template.

        Raises:
            UnsupportedParameterError: the model has no chat template.
            RequestError: the template refuses the messages, or a variable is the server's own.
        """
        try:
            return self._render(messages, rendering)
        except RequestError:
            tools = [_complete(one) for one in rendering.tools]
            if tools == [*rendering.tools]:
                raise
            return self._render(messages, rendering._replace(tools=tools))

    def _render(self, messages: Sequence[Mapping[str, Any]], rendering: Rendering) -> str:
        try:
            template = self.library.get_chat_template(tools=rendering.tools or None)
        except ValueError as error:
            msg = (
                "this model has no chat template, so it cannot take messages; expected plain text. "
                "Send a prompt, or set option.chat_template."
            )
            raise UnsupportedParameterError(msg, param="messages") from error
        self._check_variables(rendering.variables)
        try:
            text: str = self.library.apply_chat_template(
                for_template(messages, template),
                tokenize=False,
                add_generation_prompt=rendering.begins_turn,
                **({"continue_final_message": True} if rendering.continues else {}),
                **({"tools": [*rendering.tools]} if rendering.tools else {}),
                **rendering.variables,
            )
        except MemoryError:
            raise
        except ImportError as error:
            msg = "chat templates need jinja2 3.1.6 or newer; expected it installed. Run `pip install 'jinja2>=3.1.6'`."
            raise ArtifactError(msg) from error
        except Exception as error:
            import jinja2

            # Only a sentence of the template itself is quoted: other messages may quote the prompt.
            reason = str(error) if str(error) and str(error) in template else type(error).__name__
            given = "messages or tools" if rendering.tools else "messages"
            refusal = f"the model's chat template refuses these {given}: {reason.rstrip('.!?')}"
            msg = f"{refusal}. Correct their roles, order or content."
            if isinstance(error, jinja2.TemplateSyntaxError):
                msg = (
                    "the model's chat template is not valid Jinja, and every chat request fails: line "
                    f"{error.lineno}: {(error.message or '')[:200]}. Correct it in {_TEMPLATES}."
                )
            elif type(error) is not jinja2.TemplateError:  # which is that of `raise_exception`
                msg = (
                    f"the model's chat template fails on these {given} ({reason[:200]}). Correct it in {_TEMPLATES}, "
                    "or their roles, order or content."
                )
            raise RequestError(msg, param=None if rendering.tools else "messages") from error
        return text

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        if not variables:
            return
        arguments = signature(self.library.apply_chat_template).parameters
        own = {"self", "messages", "conversations", *self.library.special_tokens_map, *arguments}
        for name in own.intersection(variables):
            msg = f"chat_template_kwargs has {name!r}, which the server sets itself; leave it out"
            raise RequestError(msg, param=f"chat_template_kwargs.{name}")

    def decode(self, ids: Sequence[int], *, skip: bool = True, spaces: bool = False) -> str:
        """See `Tokenizer`."""
        with self._lock:
            text: str = self.library.decode(
                list(ids),
                skip_special_tokens=skip,
                clean_up_tokenization_spaces=False,
                spaces_between_special_tokens=spaces,
            )
        return text

    def _checked_encode(self, text: str, *, special: bool) -> list[int]:
        try:
            return self._encode(text, special=special)
        except (ServingError, MemoryError):
            raise
        except Exception as error:
            msg = (
                f"the text cannot be tokenised ({type(error).__name__}); expected valid Unicode in symbols that the "
                "model knows. Remove lone surrogates (\\ud800 to \\udfff) and foreign symbols."
            )
            raise RequestError(msg, PROMPT) from error

    def _encode(self, text: str, *, special: bool) -> list[int]:
        with self._lock:
            return list(
                self.library.encode(
                    text, add_special_tokens=special, truncation=False, verbose=False
                )
            )


class FastTokenizer(PythonTokenizer):
    """A tokenizer of the `tokenizers` library, called without transformers' Python around it.

    Threads share it: encoding and decoding only read, after padding and truncation are switched off.
    """

    def __init__(self, library: Any) -> None:  # noqa: ANN401
        self._backend = library.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        super().__init__(library)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special = {token.content: i for i, token in added.items() if token.special}
        decoder = self._backend.decoder
        self.pieces = make_pieces(
            self._backend.get_vocab(),
            {token_id: token.content for token_id, token in added.items()},
            # A decoder pickles as its part of tokenizer.json; the whole would take 0.3 s more at 128k tokens.
            json.loads(decoder.__getstate__()) if decoder is not None else {},
            special_ids=self.special_ids,
            decode=self.decode,
        )

    @_no_panic()
    def decode(self, ids: Sequence[int], *, skip: bool = True, spaces: bool = False) -> str:  # noqa: ARG002
        """See `Tokenizer`."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip)
        return text

    @_no_panic()
    def _encode(self, text: str, *, special: bool) -> list[int]:
        # Not `encode`: it holds the GIL all the time (tokenizers 0.20.3 to 0.23.3, 1.6 s for 1.6 MB of text, here
        # 5 ms), and without the offsets, which nobody reads, it takes half as long.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)


@_no_panic()
def load_tokenizer(
    folder: Path,
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
    needs_torch: bool = True,
    chat_template: str | None = None,
) -> PythonTokenizer:
    """Load the tokenizer of a model folder.

    `needs_torch`: false in a process that loads no model; see `_without_torch`. `chat_template`: in place of its own.

    Raises:
        ArtifactNotFoundError: the folder has no tokenizer.
        ArtifactAccessError: its files cannot be read.
        ArtifactError: the tokenizer cannot be loaded from them.
    """
    try:
        library = _load(folder, trust_remote_code, revision, needs_torch)
        if chat_template is not None:
            library.chat_template = chat_template
        return (
            FastTokenizer(library)
            if getattr(library, "is_fast", False)
            else PythonTokenizer(library)
        )
    except ArtifactError:
        raise
    except PermissionError as error:
        msg = f"the tokenizer in {folder} cannot be read: {error.strerror}. Give this user access."
        raise ArtifactAccessError(msg) from error
    except Exception as error:
        # The library raises errors of every type, and its pure Python classes run the model author's code.
        why = f"{type(error).__name__}: {error}"
        with suppress(OSError):
            try:
                json.loads((folder / "tokenizer.json").read_bytes())
            except ValueError as invalid:
                why = f"tokenizer.json is not valid JSON: {invalid}"
        if (
            "trust_remote_code" in why
        ):  # that sentence calls the folder's name a repository of the Hub
            why = "auto_map in tokenizer_config.json or config.json names its own code"
        msg = (
            f"the tokenizer in {folder} cannot be loaded ({why}). Check that its files are complete; a tokenizer with "
            "its own code needs option.trust_remote_code=true: read the code first."
        )
        raise ArtifactError(msg) from error


@contextmanager
def _without_torch() -> Iterator[None]:
    """Hide torch while transformers is imported: it takes seconds, and no tokenizer of the library needs it.

    The transformers of this process has no models then. Nothing is hidden if it or torch is imported already.
    """
    if sys.modules.keys() & {"torch", "transformers"}:
        yield
        return
    logging.getLogger("transformers").addFilter(lambda entry: "PyTorch" not in entry.getMessage())
    # Importing a name with None raises. Of the library's own switches, USE_TORCH=0, version 5 has none.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]


def import_transformers(*, needs_torch: bool) -> tuple[Any, Any]:
    """The two classes that load tokenizers. `needs_torch`: see `load_tokenizer`."""
    with _IMPORTING, nullcontext() if needs_torch else _without_torch():
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    return AutoTokenizer, PreTrainedTokenizerFast


def _load(folder: Path, trust_remote_code: bool, revision: str | None, needs_torch: bool) -> Any:  # noqa: ANN401
    names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    # Checked here because transformers 5 makes an empty tokenizer of nothing. Code of the model's own may need none.
    if not trust_remote_code and not has_vocabulary(names):
        msg = f"{no_tokenizer(folder)}."
        raise ArtifactNotFoundError(msg)

    AutoTokenizer, PreTrainedTokenizerFast = import_transformers(needs_torch=needs_torch)  # noqa: N806
    config = read_json(folder / "tokenizer_config.json") if "tokenizer_config.json" in names else {}
    # transformers 5 saves the class name TokenizersBackend, unknown to 4.x; both mean tokenizer.json as it is.
    plain = config.get("tokenizer_class") in {"TokenizersBackend", "PreTrainedTokenizerFast"}
    source = PreTrainedTokenizerFast if plain and "tokenizer.json" in names else AutoTokenizer
    library = source.from_pretrained(
        folder, trust_remote_code=trust_remote_code, revision=revision or "main"
    )
    # Newer versions save the template in a separate file, which 4.45 does not read.
    if library.chat_template is None and "chat_template.jinja" in names:
        library.chat_template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return library

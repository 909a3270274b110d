"""Tokenizers of transformers behind our `Tokenizer` protocol. Their errors end here."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from djl_python_neuronx.artifacts.pieces import make_pieces
from djl_python_neuronx.errors import ArtifactError, RequestError, UnsupportedParameterError


class PythonTokenizer:
    """Any tokenizer of transformers, through its Python interface, one thread at a time."""

    pieces: Sequence[bytes] | None = None

    def __init__(self, library: Any) -> None:  # noqa: ANN401
        self._library = library
        self._lock = threading.Lock()
        self.special_ids = frozenset(library.all_special_ids)
        self._special = dict(zip(library.all_special_tokens, library.all_special_ids, strict=True))
        self.eos_id: int | None = library.eos_token_id
        bos_id = library.bos_token_id
        self._added_bos_id = (
            bos_id
            if bos_id is not None and self._encode("", special=True)[:1] == [bos_id]
            else None
        )

    def special_id(self, text: str) -> int | None:
        """See `Tokenizer`."""
        return self._special.get(text)

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`.

        Raises:
            RequestError: the text is not valid Unicode, or has symbols that the vocabulary lacks.
        """
        ids = self._checked_encode(text, special=True)
        # A prompt that went through a template begins with the BOS that the tokenizer adds again.
        if self._added_bos_id is not None and ids[:2] == [self._added_bos_id, self._added_bos_id]:
            del ids[0]
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """See `Tokenizer`. The template writes every special token, BOS too, so none is added.

        Raises:
            UnsupportedParameterError: the model has no chat template.
            RequestError: the template refuses the messages.
        """
        try:
            template = self._library.get_chat_template()
        except ValueError as error:
            msg = (
                "this model has no chat template, so it cannot take messages; expected plain text. "
                "Send a prompt, or add chat_template to the model's tokenizer_config.json."
            )
            raise UnsupportedParameterError(msg) from error
        try:
            text = self._library.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except ImportError as error:
            msg = "chat templates need jinja2 3.1 or newer; expected it installed. Run `pip install 'jinja2>=3.1'`."
            raise ArtifactError(msg) from error
        except Exception as error:
            # Only a sentence of the template itself is repeated: other messages may quote the prompt.
            reason = str(error) if str(error) and str(error) in template else type(error).__name__
            msg = f"the model's chat template refuses these messages: {reason}. Correct their roles, order or content."
            raise RequestError(msg) from error
        return self._checked_encode(text, special=False)

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        with self._lock:
            text: str = self._library.decode(
                list(ids),
                skip_special_tokens=True,
                clean_up_tokenization_spaces=False,
                spaces_between_special_tokens=False,
            )
        return text

    def _checked_encode(self, text: str, *, special: bool) -> list[int]:
        try:
            return self._encode(text, special=special)
        except Exception as error:
            msg = (
                f"the text cannot be tokenised ({type(error).__name__}); expected valid Unicode in symbols that the "
                "model knows. Remove lone surrogates (\\ud800 to \\udfff) and foreign symbols."
            )
            raise RequestError(msg) from error

    def _encode(self, text: str, *, special: bool) -> list[int]:
        with self._lock:
            return list(
                self._library.encode(
                    text, add_special_tokens=special, truncation=False, verbose=False
                )
            )


class FastTokenizer(PythonTokenizer):
    """A tokenizer of the `tokenizers` library, called without transformers' Python around it.

    Threads share it: encoding and decoding only read, once padding and truncation are switched off.
    """

    def __init__(self, library: Any) -> None:  # noqa: ANN401
        self._backend = library.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        super().__init__(library)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._special = {token.content: i for i, token in added.items() if token.special}
        decoder = self._backend.decoder
        self.pieces = make_pieces(
            self._backend.get_vocab(with_added_tokens=False),
            {token_id: token.content for token_id, token in added.items()},
            # A decoder pickles as its part of tokenizer.json; the whole would take 0.3 s more at 128k tokens.
            json.loads(decoder.__getstate__()) if decoder is not None else {},
            special_ids=self.special_ids,
            decode=self.decode,
        )

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text

    def _encode(self, text: str, *, special: bool) -> list[int]:
        # Not `encode`: it holds the GIL all the time (tokenizers 0.20.3 to 0.23.3, 1.6 s for 1.6 MB of text, here
        # 5 ms), and without the offsets, which nobody reads, it takes half as long.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)

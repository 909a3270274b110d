"""Grammars in the engine: each is compiled once for the model's vocabulary, and narrows the masks of its sequences."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any

from djl_python_neuronx.backends.base import ModelSpec
from djl_python_neuronx.engine.masks import UInt32Array, bits_of
from djl_python_neuronx.errors import RequestError, ServingError, UnsupportedParameterError
from djl_python_neuronx.grammar import HEADER, Vocabulary, matcher, reason
from djl_python_neuronx.types import EngineRequest

logger = logging.getLogger(__name__)

MASK_S, BURST_S = 0.002, 0.1
"""Most processor time of a mask on average, and by how much some may exceed it together: the whole batch waits.
Usual ones take 0.1 ms, and 0.5 ms in one of a hundred (MaskBench); the first one of an enum of 2,000 words takes 9."""
_SPECIAL = re.compile(rb"\xff\[(\d+)]")
"""A special token in the library's bytes."""
MOST_COMPILED = 32
"""Compiled grammars that are kept."""


@contextmanager
def _panics() -> Iterator[None]:
    """Raise the library's failures, panics included, which are no Exceptions, as errors of a request."""
    try:
        yield
    except ServingError:
        raise
    except BaseException as error:
        logger.exception("grammar_failed")
        msg = f"the grammar cannot be enforced: llguidance failed ({type(error).__name__}: {error}); leave it out"
        raise UnsupportedParameterError(msg) from error


class Grammar:
    """The grammar of one sequence, as a `Constraint`: the first of its sequence, because it writes all bits."""

    def __init__(self, grammars: Grammars, request: EngineRequest) -> None:
        """Compile it, unless `grammars` has it."""
        text = str(request.grammar)
        self._tables, self._matcher = grammars.tables, grammars.compiled(text).deep_copy()
        self._forcing = None
        """The same with forced bytes, where they are of use."""
        if grammars.spec.num_speculative_tokens:
            self._forcing = grammars.compiled(text.removeprefix(HEADER)).deep_copy()
        eos_ids, size = grammars.eos_ids, grammars.spec.vocab_size
        ends = {one for one in request.stop_token_ids if one < size}
        ends |= frozenset() if request.ignore_eos else eos_ids
        self._all_ends = ends | eos_ids
        self._others = ~bits_of([*self._all_ends, grammars.end_id], size)
        self._ends, self._eos = bits_of([*ends], size), bits_of([*eos_ids], size)
        self._num_read, self._left_s = 0, BURST_S

    def narrow(self, bits: UInt32Array, output_ids: list[int]) -> None:
        """See `Constraint`. Ends may follow where the text may end, ignored eos where nothing else may.

        Raises:
            RequestError: the grammar exceeds a limit.
        """
        new, self._num_read = output_ids[self._num_read :], len(output_ids)
        if new and new[-1] in self._all_ends:
            return  # the sequence has ended
        address = bits.ctypes.data  # before the clock starts: it may begin a garbage collection
        begun_s = time.thread_time()
        self._matcher.consume_tokens(new)
        if self._forcing is not None:
            self._forcing.consume_tokens(new)
        self._matcher.unsafe_compute_mask_ptr(address, bits.nbytes)
        taken_s = time.thread_time() - begun_s
        self._left_s = min(BURST_S, self._left_s + MASK_S * max(1, len(new)) - taken_s)
        if self._left_s < 0 or self._matcher.is_error():
            why = reason(self._matcher)
            if self._left_s < 0:
                why = f"its masks take more than {MASK_S * 1000:g} ms"
            msg = f"the grammar exceeds its limits at this place of the text: {why}; simplify it"
            raise RequestError(msg)
        bits &= self._others
        if self._matcher.is_accepting():
            bits |= self._ends
            if not bits.any():
                bits |= self._eos

    def forced(self, most: int) -> list[int]:
        """Up to `most` tokens of the text that alone may follow what `narrow` has read, in one of its divisions."""
        if self._forcing is None:
            return []
        try:
            ids = list[int]()
            forced = self._forcing.deep_copy().compute_ff_bytes()
            for i, part in enumerate(_SPECIAL.split(forced)):
                text = part.decode(errors="ignore")
                ids += [int(text)] if i % 2 else self._tables.greedy_tokenize(text)
        except BaseException:  # (a border: a panic of the library must not cost a step)
            logger.exception("no_forced_text")
            self._forcing = None
            return []
        return ids[:most]


class Grammars:
    """The compiled grammars of an engine. For its receiving thread: to compile one takes up to half a second."""

    def __init__(self, tokens: Sequence[str], special_ids: Sequence[int], spec: ModelSpec) -> None:
        """`tokens`: bytes of each id as Latin-1 text; see `Vocabulary`."""
        self.spec, count = spec, spec.vocab_size
        self._tokens = [*tokens[:count], *[""] * (count - len(tokens))]
        self.eos_ids = frozenset(one for one in spec.eos_ids if one < count)
        self._special_ids = self.eos_ids.union(one for one in special_ids if one < count)
        self.end_id = min(self.eos_ids or self._special_ids, default=0)
        """The token that the library ends a text with."""
        self.compiled = lru_cache(MOST_COMPILED)(self._compile)

    @cached_property
    def tables(self) -> Any:  # noqa: ANN401
        """The library's tables, see `Vocabulary`: made by the first request with a grammar, or before it.

        Raises:
            UnsupportedParameterError: the library is missing, or has failed.
        """
        texts = [token.encode("latin-1") for token in self._tokens]
        with _panics():
            return Vocabulary(texts, [*self._special_ids, self.end_id], self.end_id).tables

    def new(self, request: EngineRequest) -> Grammar:
        """The grammar of a request's sequence.

        Raises:
            RequestError: the library cannot use it, or has failed.
        """
        with _panics():
            return Grammar(self, request)

    def _compile(self, grammar: str) -> Any:  # noqa: ANN401
        """A matcher at the beginning of a grammar.

        Raises:
            RequestError: this vocabulary has no text of it.
        """
        compiled = matcher(grammar, self.tables)
        compiled.compute_bitmask()
        if compiled.is_error():
            msg = f"the grammar cannot be fulfilled by this model's tokens: {reason(compiled)}; change it"
            raise RequestError(msg)
        return compiled

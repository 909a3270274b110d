"""Grammars in the engine: each is compiled once for the model's vocabulary, and narrows the masks of its sequences."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from djl_python_neuronx.backends.base import ModelSpec
from djl_python_neuronx.engine.masks import UInt32Array
from djl_python_neuronx.errors import RequestError, ServingError
from djl_python_neuronx.grammar import HEADER, matcher, reason, vocabulary
from djl_python_neuronx.types import EngineRequest

MOST_MASK_S = 0.02
"""Most processor time of a mask, and of each token before it: the whole batch waits for it. Usual ones take 0.1 ms, and
0.5 ms in one of a hundred (MaskBench)."""
MOST_COMPILED = 32
"""Compiled grammars that are kept."""


class Grammar:
    """The grammar of one sequence, as a `Constraint`: the first of its sequence, because it writes all bits."""

    def __init__(
        self,
        compiled: Any,  # noqa: ANN401
        end_ids: frozenset[int],
        eos_ids: frozenset[int],
        end_id: int,
        forcing: tuple[Any, Any] | None = None,
    ) -> None:
        """`end_ids` may end the text wherever the grammar does, `eos_ids` where nothing else may follow.

        `end_id`: the one that `compiled` ends with. `forcing`: the same without `HEADER`, and the
        vocabulary, for `forced`.
        """
        self._forcing = forcing
        self._matcher, self._end_ids, self._eos_ids = compiled, end_ids, eos_ids
        self._replaced_ids = end_ids | eos_ids | {end_id}
        self._num_read = 0
        self._is_slow = False

    @property
    def error(self) -> ServingError | None:
        """The error of a grammar that has exceeded a limit: its mask is empty then."""
        if not self._is_slow and not self._matcher.is_error():
            return None
        why = (
            f"a mask takes more than {MOST_MASK_S:g} s" if self._is_slow else reason(self._matcher)
        )
        msg = f"the grammar exceeds its limits at this place of the text: {why}; simplify it"
        return RequestError(msg)

    def narrow(self, bits: UInt32Array, output_ids: list[int]) -> None:
        """See `Constraint`."""
        new, self._num_read = output_ids[self._num_read :], len(output_ids)
        if new and new[-1] in self._end_ids | self._eos_ids:
            return  # the sequence has ended
        begun_s = time.thread_time()
        self._matcher.consume_tokens(new)
        if self._forcing is not None:
            self._forcing[0].consume_tokens(new)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._is_slow = time.thread_time() - begun_s > MOST_MASK_S * (1 + len(new))
        if self._is_slow or self._matcher.is_error():
            bits[:] = 0
            return
        _set(bits, self._replaced_ids, False)
        if self._matcher.is_accepting():
            _set(bits, self._end_ids, True)
            if not bits.any():
                _set(bits, self._eos_ids, True)

    def forced(self, most: int) -> list[int]:
        """Up to `most` tokens of the text that alone may follow what `narrow` has read, in one of its divisions."""
        if self._forcing is None:
            return []
        matcher, tables = self._forcing
        text = matcher.deep_copy().compute_ff_bytes().decode(errors="ignore")
        ids: list[int] = tables.greedy_tokenize(text)[:most]
        return ids


def _set(bits: UInt32Array, token_ids: frozenset[int], value: bool) -> None:
    for token_id in token_ids:
        bit = np.uint32(1 << token_id % 32)
        if value:
            bits[token_id // 32] |= bit
        else:
            bits[token_id // 32] &= ~bit


class Grammars:
    """Compiles the grammars of an engine. For its receiving thread: it takes up to half a second."""

    def __init__(self, tokens: Sequence[str], special_ids: Sequence[int], spec: ModelSpec) -> None:
        """`tokens`: bytes of each id as Latin-1 text; see `vocabulary`."""
        self._count = count = spec.vocab_size
        self._speculates = spec.num_speculative_tokens > 0
        self._tokens = [*tokens[:count], *[""] * (count - len(tokens))]
        self._eos_ids = frozenset(one for one in spec.eos_ids if one < count)
        self._special_ids = self._eos_ids.union(one for one in special_ids if one < count)
        self._end_id = min(self._eos_ids or self._special_ids, default=0)
        self._compiled = lru_cache(MOST_COMPILED)(self._compile)

    @cached_property
    def tables(self) -> Any:  # noqa: ANN401
        """The library's tables, see `vocabulary`: made by the first request with a grammar, or before it."""
        special_ids = [*self._special_ids, self._end_id]
        texts = [token.encode("latin-1") for token in self._tokens]
        return vocabulary(texts, special_ids, self._end_id)

    def new(self, request: EngineRequest) -> Grammar:
        """The grammar of a request that has one, at its beginning.

        Raises:
            ServingError: it cannot be compiled for this vocabulary.
        """
        assert request.grammar is not None  # noqa: S101  (narrowing for mypy: it has one)
        compiled = self._compiled(request.grammar).deep_copy()
        end_ids = frozenset(one for one in request.stop_token_ids if one < self._count)
        if not request.ignore_eos:
            end_ids |= self._eos_ids
        forcing = None
        if self._speculates:
            other = self._compiled(request.grammar.removeprefix(HEADER)).deep_copy()
            forcing = other, self.tables
        return Grammar(compiled, end_ids, self._eos_ids, self._end_id, forcing)

    def _compile(self, grammar: str) -> Any:  # noqa: ANN401
        compiled = matcher(grammar, self.tables)
        compiled.compute_bitmask()
        if compiled.is_error():
            msg = f"the grammar cannot be fulfilled by this model's tokens: {reason(compiled)}; change it"
            raise RequestError(msg)
        return compiled

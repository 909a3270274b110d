"""One request under generation."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Ids
from dataclasses import replace

from djl_python_neuronx.backends.base import ModelSpec
from djl_python_neuronx.engine.grammars import Grammar
from djl_python_neuronx.engine.limits import longest_prompt, sampled_on_host
from djl_python_neuronx.types import EngineRequest, FinishReason


class Sequence:
    """The tokens of one request and its state; owned by the engine thread."""

    def __init__(
        self,
        request: EngineRequest,
        spec: ModelSpec,
        grammar: Grammar | None = None,
        *,
        arrived_s: float,
    ) -> None:
        """`arrived_s`: the time at which the engine got it, by the clock of `Scheduler`."""
        self.request = request
        self.grammar = grammar
        self.on_host = sampled_on_host(request, spec)
        """The host samples its tokens from logits, not the device: all of them, so that its history is complete."""
        self.output_ids: list[int] = [*request.given_ids]
        self.slot: int | None = None
        self.finish_reason: FinishReason | None = None
        self.prefill_ids: Ids[int] = request.prompt_ids
        """The tokens that prefills run: the known ones, as many as one may hold. Decode steps run the rest."""
        if request.given_ids:
            known_ids = [*request.prompt_ids, *request.given_ids]
            self.prefill_ids = known_ids[: longest_prompt(spec)]
        self.scores_prompt = None if request.given_ids else request.scores_prompt
        """See `EngineRequest`. Given tokens followed the scores of the prompt."""
        self.score_columns = 0 if self.scores_prompt is None else spec.score_columns
        """Tokens of each chunk of a prompt that prefills score, else 0."""
        if self.scores_prompt is not None and not self.score_columns:
            self.prefill_ids = request.prompt_ids[:1]
        self.num_cached = 0
        """Tokens of the prefill in the cache: those that the backend already had, then every chunk that has run."""
        self.num_ahead = self.prompt_len + len(self.output_ids) - len(self.prefill_ids)
        """Known tokens behind those that the next call runs, or the last chunk: only with 0 a token is sampled."""
        sampling, wanted = request.sampling, request.max_new_tokens
        drawn = secrets.randbits(63) if request.seed is None else request.seed
        self.seed = drawn if sampling.seed is None else sampling.seed
        # On the host too: logprobs must not change what a request's tokens are drawn from.
        self.sampling = replace(sampling, top_k=sampling.top_k or spec.default_top_k or 0)
        self.arrived_s = arrived_s
        # A text ends with its grammar even if it ignores eos.
        ends = grammar is not None or not request.ignore_eos
        self.end_ids = _known(request.stop_token_ids | spec.eos_ids, spec)
        """Eos, and the tokens that end it like eos. The tokenizer may have some that the model lacks."""
        self.stop_ids = self.end_ids if ends else _known(request.stop_token_ids, spec)
        fits = spec.max_model_len - len(request.prompt_ids)
        self.max_new_tokens = fits if wanted is None else min(wanted, fits)

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.request.request_id

    @property
    def held_slot(self) -> int:
        """The slot of a sequence that has one."""
        assert self.slot is not None  # noqa: S101  (narrowing for mypy: the scheduler has set it)
        return self.slot

    @property
    def prefix_key(self) -> tuple[Ids[int], int, str]:
        """The tokens of its prefill, and those with whom it may share them: see `Backend.cached`."""
        request = self.request
        # Scores need the logits of all tokens: none of those may be in the cache.
        ids = self.prefill_ids[:1] if self.score_columns else self.prefill_ids
        return ids, request.adapter, request.cache_salt

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def num_uncached(self) -> int:
        """Tokens that a prefill must still run."""
        return len(self.prefill_ids) - self.num_cached

    @property
    def next_position(self) -> int:
        """Cache position of the token that the next decode step writes: the newest, unless known ones are ahead."""
        return self.prompt_len + len(self.output_ids) - 1 - self.num_ahead

    @property
    def next_id(self) -> int:
        """The token at `next_position`."""
        place = len(self.output_ids) - 1 - self.num_ahead
        return self.output_ids[place] if place >= 0 else self.request.prompt_ids[place]

    @property
    def num_missing(self) -> int:
        """Tokens still to generate, unless it ends before."""
        return self.max_new_tokens - len(self.output_ids)

    def tokens_from(self, position: int) -> list[int]:
        """Tokens of prompt and output from a position on; the prompt is not copied if all of them are output."""
        if position >= self.prompt_len:
            return self.output_ids[position - self.prompt_len :]
        return [*self.request.prompt_ids[position:], *self.output_ids]

    def take(self, token_ids: list[int]) -> tuple[int, ...]:
        """Append tokens up to one below 0, or up to the one that ends the sequence; returns those appended."""
        taken: tuple[int, ...] = ()
        if self.max_new_tokens == 0:
            self.finish_reason = FinishReason.LENGTH
            return taken
        for token_id in token_ids:
            if token_id < 0:
                break
            taken += (token_id,)
            self.output_ids.append(token_id)
            if token_id in self.stop_ids:
                self.finish_reason = FinishReason.EOS
            elif len(self.output_ids) >= self.max_new_tokens:
                self.finish_reason = FinishReason.LENGTH
            else:
                continue
            break
        return taken


def _known(ids: frozenset[int], spec: ModelSpec) -> frozenset[int]:
    return frozenset(one for one in ids if one < spec.vocab_size)

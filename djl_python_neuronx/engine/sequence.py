"""One request under generation."""

from __future__ import annotations

import secrets
import time
from dataclasses import replace

from djl_python_neuronx.backends.base import ModelSpec
from djl_python_neuronx.engine.limits import sampled_on_host
from djl_python_neuronx.types import EngineRequest, FinishReason


class Sequence:
    """The tokens of one request and its state; owned by the engine thread."""

    def __init__(self, request: EngineRequest, spec: ModelSpec) -> None:
        self.request = request
        self.on_host = sampled_on_host(request, spec)
        """The host samples its tokens from logits, not the device: all of them, so that its history is complete."""
        self.output_ids: list[int] = []
        self.slot: int | None = None
        self.finish_reason: FinishReason | None = None
        self.num_cached = 0
        """Prompt tokens in the cache: those that the backend already had, then every chunk that has run."""
        sampling, wanted = request.sampling, request.max_new_tokens
        self.seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        # On the host too: logprobs must not change what a request's tokens are drawn from.
        self.sampling = replace(sampling, top_k=sampling.top_k or spec.default_top_k or 0)
        self.arrived_s = time.monotonic()
        eos_ids: frozenset[int] = frozenset() if request.ignore_eos else spec.eos_ids
        self.stop_ids = request.stop_token_ids | eos_ids
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
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def num_uncached(self) -> int:
        """Prompt tokens that a prefill must still run."""
        return self.prompt_len - self.num_cached

    @property
    def next_position(self) -> int:
        """Cache position of the newest token, which is not yet in the cache: the next decode step writes it."""
        return self.prompt_len + len(self.output_ids) - 1

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
        """Append generated tokens up to a -1, or up to the one that ends the sequence; returns those appended."""
        taken: tuple[int, ...] = ()
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

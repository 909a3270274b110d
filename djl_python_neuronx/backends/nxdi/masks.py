"""The mask of a prompt's prefix, which NxD Inference leaves out where it runs no kernel.

A graph for a prompt with a prefix reads as many positions of the cache as its bucket has, whatever the prefix has of
them. The kernel gets their number; without it the library weighs all (0.4 to 0.9, modules/attention/attention_base.py,
`perform_prefix_prefill`), and the answer is wrong. Its attention of a decode computes the same with a mask.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

_ATTENTION = "neuronx_distributed_inference.modules.attention.attention_base"
_NAME = "perform_prefix_prefill"


def mask_prefixes() -> None:
    """Mask the prefix in each graph that is traced in this process from now on. Idempotent."""
    attention = importlib.import_module(_ATTENTION).NeuronAttentionBase
    own = getattr(attention, _NAME)
    if own.__module__ != __name__:
        setattr(attention, _NAME, masked(own))


def masked(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return the library's `perform_prefix_prefill` with a mask. `own`: its own one, which the kernels are run by."""

    def perform_prefix_prefill(
        self: Any,  # noqa: ANN401
        queries: Any,  # noqa: ANN401
        keys: Any,  # noqa: ANN401
        values: Any,  # noqa: ANN401
        q_len: int,
        bsz: int,
        attention_mask: Any,  # noqa: ANN401
        past_key_value: Any,  # noqa: ANN401
        active_mask: Any,  # noqa: ANN401
    ) -> tuple[Any, Any]:
        strategy = self.get_flash_attention_strategy(q_len, has_attention_mask=False)
        if strategy.name != "NONE" or not self.neuron_config.is_prefix_caching:
            cached = attention_mask, past_key_value, active_mask
            output: tuple[Any, Any] = own(self, queries, keys, values, q_len, bsz, *cached)
            return output
        read = attention_mask[:, None, None, :].bool()
        new = queries, keys, values, None
        answer = self.compute_for_token_gen(
            *new, past_key_value, read, active_mask, is_prefix_caching=True
        )
        return answer, strategy

    return perform_prefix_prefill

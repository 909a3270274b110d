"""Architectures that transformers-neuronx has no right class for, as classes that it has, with rearranged weights.

Source: transformers-neuronx 0.13, gptneox/model.py and gpt2/model.py; transformers 4.57, modeling_gptj.py and
modeling_gpt_bigcode.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import Parameter
from transformers_neuronx.gpt2.model import (
    GPT2Block,
    GPT2ForSampling,
    GPT2ForSamplingWithContextBroadcasting,
)
from transformers_neuronx.gptj.model import GPTJBlock, GPTJTransformer
from transformers_neuronx.gptneox.model import GPTNeoXForSampling, GPTNeoXLayer
from transformers_neuronx.module import LowMemoryModuleList


class GptJ(GPTNeoXForSampling):  # type: ignore[misc]
    """GPT-J as GPT-NeoX: one norm for both branches, no biases in attention, the head's bias added on the host.

    The library's own GPTJForSampling lets each token attend to the first position alone.
    """

    def __init__(self, config: Any, **keywords: Any) -> None:  # noqa: ANN401
        """`config`: transformers' `GPTJConfig`."""
        head_dim = config.n_embd // config.n_head
        as_neox = SimpleNamespace(
            hidden_act=config.activation_function,
            hidden_size=config.n_embd,
            num_attention_heads=config.n_head,
            num_hidden_layers=config.n_layer,
            max_position_embeddings=config.n_positions,
            # The library multiplies by head_dim and cuts off; a half more keeps rounding from losing a dimension.
            rotary_pct=(config.rotary_dim + 0.5) / head_dim,
            rotary_emb_base=10000,
            vocab_size=config.vocab_size,
            eos_token_id=config.eos_token_id,
            use_parallel_residual=True,
            intermediate_size=config.n_inner or 4 * config.n_embd,
        )
        super().__init__(as_neox, **keywords)
        # Modules are named as the checkpoint's weights are; an attribute that is not a module has no weights.
        self.transformer, self.lm_head = GPTJTransformer(self.config), self.embed_out
        del self.gpt_neox, self.embed_out
        layers = [_GptJLayer(self.config, block) for block in self.transformer.h]
        self.gpt_neox: Any = SimpleNamespace(embed_in=self.transformer.wte, layers=layers)
        self.ln_lm_head.final_layer_norm = self.transformer.ln_f

    def get_tied_parameters(self) -> list[tuple[Parameter, ...]]:
        """Return the weights that a checkpoint may hold once."""
        return [(self.transformer.wte.weight, self.lm_head.weight)]

    def get_base_model(self) -> Any:  # noqa: ANN401
        """Return the module whose name a checkpoint may leave out."""
        return self.transformer

    def to_neuron(self) -> None:
        """Put the model on the device; the head's bias stays."""
        self.lm_head.materialize()
        self._bias = self.lm_head.bias.detach().float()
        super().to_neuron()

    def forward(self, *inputs: Any) -> torch.Tensor:  # noqa: ANN401
        """Return float32[B, V] logits."""
        logits: torch.Tensor = super().forward(*inputs) + self._bias
        return logits


class _GptJLayer(GPTNeoXLayer):  # type: ignore[misc]
    def __init__(self, config: Any, block: GPTJBlock) -> None:  # noqa: ANN401
        super().__init__(config)
        self.block = block
        self.input_layernorm = self.post_attention_layernorm = block.ln_1
        self.mlp.dense_h_to_4h, self.mlp.dense_4h_to_h = block.mlp.fc_in, block.mlp.fc_out

    def materialize(self) -> None:
        super().materialize()
        mine, theirs = self.attention, self.block.attn
        q, k, v = (proj.weight.detach() for proj in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
        fused = fuse_rotary(q, k, v, self.config.n_head, self.config.rotary_dim)
        mine.query_key_value.weight = _parameter(fused)
        mine.query_key_value.bias = _parameter(fused.new_zeros(len(fused)))
        mine.dense.weight = theirs.out_proj.weight
        mine.dense.bias = _parameter(fused.new_zeros(fused.shape[1]))


class GptBigCode(GPT2ForSamplingWithContextBroadcasting):  # type: ignore[misc]
    """GPT-BigCode as GPT-2: projections transposed, and one head of keys and values where `multi_query` is set."""

    def __init__(self, config: Any, **keywords: Any) -> None:  # noqa: ANN401
        """`config`: transformers' `GPTBigCodeConfig`."""
        config.n_kv_head = 1 if config.multi_query else config.n_head
        super().__init__(config, **keywords)
        blocks = (_BigCodeBlock(self.config) for _ in range(config.n_layer))
        self.chkpt_model.transformer.h = LowMemoryModuleList(blocks)

    # Of GPT-2's two classes only the other one reads fewer heads of keys than of queries.
    load_weights = GPT2ForSampling.load_weights
    maybe_nullify_embeddings = GPT2ForSampling.maybe_nullify_embeddings


class _BigCodeBlock(GPT2Block):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:  # noqa: ANN401
        super().__init__(config)
        self.num_heads, self.num_kv_heads = config.n_head, config.n_kv_head

    def materialize(self) -> None:
        super().materialize()
        fused = self.attn.c_attn
        if self.num_kv_heads > 1:
            fused.weight = _parameter(ungroup(fused.weight.detach(), self.num_heads))
            fused.bias = _parameter(ungroup(fused.bias.detach(), self.num_heads))
        for linear in (fused, self.attn.c_proj, self.mlp.c_fc, self.mlp.c_proj):
            linear.weight = _parameter(linear.weight.detach().T)


def _parameter(tensor: torch.Tensor) -> Parameter:
    return Parameter(tensor, requires_grad=False)


def fuse_rotary(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, num_heads: int, rotary_dim: int
) -> torch.Tensor:
    """Return the projections [H, H] of a GPT-J as GPT-NeoX' one [3 * H, H]: query, key, value of the first head, ...

    GPT-J rotates the pairs (0, 1), (2, 3) ... of the first `rotary_dim` dimensions of a head, GPT-NeoX (0, n / 2),
    (1, n / 2 + 1) ...: the dimensions of queries and keys are reordered alike, which leaves their products as they are.
    """
    places = torch.arange(len(query) // num_heads)
    pairs = places[:rotary_dim]
    order = torch.cat((pairs[::2], pairs[1::2], places[rotary_dim:]))
    q, k, v = (tensor.reshape(num_heads, len(places), -1) for tensor in (query, key, value))
    return torch.stack((q[:, order], k[:, order], v), dim=1).flatten(0, 2)


def ungroup(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return rows [3 * H, ...] ordered by head as GPT-2 has them: all queries, all keys, all values."""
    grouped = rows.reshape(num_heads, 3, len(rows) // num_heads // 3, *rows.shape[1:])
    return grouped.transpose(0, 1).flatten(0, 2)

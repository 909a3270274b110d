"""Tiny draft models of EAGLE and EAGLE3 with random weights, in the files that their authors publish.

EAGLE: one llama layer without its first norm, behind a linear layer that joins an embedding and the model's last state;
no output projection. EAGLE3: `midlayer` with two norms, behind a linear layer over three states of the model; no
embeddings, and an output projection for some tokens only (`d2t` is what each token's id is above its own).
Sources: Li et al. 2024 and 2025; github.com/SafeAILab/EAGLE, eagle/model/cnets1.py and cnets.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_STD = 0.3


def save_eagle(
    directory: Path, model: Path, *, kind: str, num_tokens: int | None = None, seed: int = 3
) -> Path:
    """Write a draft for the llama in `model`; `num_tokens`: those that an EAGLE3 draft proposes. Returns its folder."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    torch.manual_seed(seed)
    hidden, inner, tokens = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = hidden // heads
    eagle3 = kind == "eagle3"
    wide, layer = (2 * hidden, "midlayer") if eagle3 else (hidden, "layers.0")
    shapes = {
        "self_attn.q_proj": (heads * head, wide),
        "self_attn.k_proj": (kv_heads * head, wide),
        "self_attn.v_proj": (kv_heads * head, wide),
        "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    weights = {
        f"{layer}.{name}.weight": _STD * torch.randn(shape) for name, shape in shapes.items()
    }
    weights[f"{layer}.post_attention_layernorm.weight"] = torch.ones(hidden)
    weights["fc.weight"] = _STD * torch.randn(hidden, (3 if eagle3 else 2) * hidden)
    config |= {"num_hidden_layers": 1}
    if eagle3:
        count = num_tokens or tokens
        chosen = torch.randperm(tokens)[:count].sort().values
        for name in (f"{layer}.input_layernorm", f"{layer}.hidden_norm", "norm"):
            weights[f"{name}.weight"] = torch.ones(hidden)
        weights["lm_head.weight"] = _STD * torch.randn(count, hidden)
        weights["d2t"] = chosen - torch.arange(count)
        weights["t2d"] = torch.isin(torch.arange(tokens), chosen)
        config |= {"draft_vocab_size": count, "architectures": ["LlamaForCausalLMEagle3"]}
    else:
        weights["embed_tokens.weight"] = _STD * torch.randn(tokens, hidden)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def turn(weights: Path, size: float, *, seed: int = 5) -> None:
    """Make the model in a llama's file predict the token after the newest, but for its layers' part of `size`.

    Tokens lie on circles, and the output projection looks one step further: so a draft can learn it with one linear
    layer.
    """
    tensors = load_file(weights)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    count, hidden = tensors[names[0]].shape
    angles = torch.arange(count)[:, None] * torch.arange(1, hidden // 2 + 1) * 2 * torch.pi / count
    circles = torch.cat([angles.cos(), angles.sin()], dim=1)
    tensors |= {names[0]: circles, names[1]: circles.roll(1, dims=0)}
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = size * value
    save_file(tensors, weights, {"format": "pt"})


def learn(weights: Path, model: Path, size: float) -> None:
    """Make the draft in an EAGLE's or EAGLE3's file predict as `turn` made its model, but for a part of `size`."""
    tensors, of_model = load_file(weights), load_file(model)
    circles, head = of_model["model.embed_tokens.weight"], of_model["lm_head.weight"]
    hidden = circles.shape[1]
    fc = size * tensors["fc.weight"]
    if "d2t" in tensors:
        # From the last of the three states to that one token further.
        fc[:, 2 * hidden :] += torch.linalg.lstsq(circles, circles.roll(-1, dims=0)).solution.T
        ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        tensors["lm_head.weight"] = head[ids]
    else:
        fc[:, :hidden] += torch.eye(hidden)
        tensors["embed_tokens.weight"] = circles
    tensors["fc.weight"] = fc.contiguous()
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = size * value
    save_file(tensors, weights, {"format": "pt"})


class EagleReference:
    """The drafts of EAGLE or EAGLE3 by their papers: everything computed again for each token, in float32."""

    def __init__(self, draft: Path, model: Any) -> None:
        """`model`: of transformers, which it drafts for."""
        self._config = json.loads((draft / "config.json").read_text())
        weights = load_file(draft / "model.safetensors")
        self._weights = {
            name.replace("midlayer.", "layers.0."): one for name, one in weights.items()
        }
        self._model, self._is_third = model, "d2t" in weights
        self._embedding = self._weights.get(
            "embed_tokens.weight", model.get_input_embeddings().weight
        )

    @torch.no_grad()
    def propose(self, tokens: list[int], count: int) -> list[int]:
        """Draft tokens after `tokens`, of which the model has not read the last."""
        out = self._model.model(torch.tensor([tokens[:-1]]), output_hidden_states=True)
        layers = self._model.config.num_hidden_layers
        states = out.last_hidden_state[0]
        if self._is_third:
            below = [out.hidden_states[i][0] for i in (2, layers // 2, layers - 3)]
            states = torch.cat(below, dim=1) @ self._weights["fc.weight"].T
        drafts: list[int] = []
        for _ in range(count):
            inputs = self._embedding[torch.tensor([*tokens[1:], *drafts])]
            state = self._layer(inputs, states)[-1:]
            states = torch.cat([states, state])
            drafts.append(self._best(state[0]))
        return drafts

    def _best(self, state: torch.Tensor) -> int:
        if not self._is_third:
            return int((self._model.lm_head.weight @ state).argmax())
        chosen = int((self._weights["lm_head.weight"] @ self._norm(state, "norm")).argmax())
        return chosen + int(self._weights["d2t"][chosen])

    def _layer(self, inputs: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        if self._is_third:
            residual, both = states, [(inputs, "input_layernorm"), (states, "hidden_norm")]
            read = torch.cat([self._norm(value, f"layers.0.{name}") for value, name in both], dim=1)
        else:
            residual = read = torch.cat([inputs, states], dim=1) @ self._weights["fc.weight"].T
        found = residual + self._attention(read)
        normed = self._norm(found, "layers.0.post_attention_layernorm")
        gate, up = (normed @ self._of(f"mlp.{name}_proj").T for name in ("gate", "up"))
        return found + (torch.nn.functional.silu(gate) * up) @ self._of("mlp.down_proj").T

    def _attention(self, read: torch.Tensor) -> torch.Tensor:
        heads, length = self._config["num_attention_heads"], len(read)
        query, key, value = (
            (read @ self._of(f"self_attn.{name}_proj").T)
            .view(length, -1, self._head)
            .transpose(0, 1)
            for name in "qkv"
        )
        query, key = self._rotate(query), self._rotate(key)
        key, value = (one.repeat_interleave(heads // len(one), dim=0) for one in (key, value))
        scores = query @ key.transpose(1, 2) / self._head**0.5
        scores += torch.full((length, length), -torch.inf).triu(1)
        out = (scores.softmax(-1) @ value).transpose(0, 1).reshape(length, -1)
        return out @ self._of("self_attn.o_proj").T

    def _rotate(self, values: torch.Tensor) -> torch.Tensor:
        half = self._head // 2
        speeds = 10000.0 ** -(torch.arange(half) / half)
        angles = torch.arange(values.shape[1])[:, None] * speeds
        first, second = values[..., :half], values[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    @property
    def _head(self) -> int:
        return int(self._config["hidden_size"] // self._config["num_attention_heads"])

    def _of(self, name: str) -> torch.Tensor:
        return self._weights[f"layers.0.{name}.weight"]

    def _norm(self, values: torch.Tensor, name: str) -> torch.Tensor:
        scale = (values**2).mean(-1, keepdim=True) + self._config["rms_norm_eps"]
        return self._weights[f"{name}.weight"] * values * scale.rsqrt()

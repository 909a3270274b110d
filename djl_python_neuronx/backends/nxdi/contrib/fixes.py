"""Fixes of models that lie outside NxD Inference, from outside: each changes a module right after its import.

A row of planning/nxdi/contrib.toml names its fix. This file is part of the compile key of all that have one.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, Final

Fix = Callable[[ModuleType], None]


def _application(module: ModuleType) -> Any:  # noqa: ANN401
    """Return the class of the application that a module defines."""
    found = (each for name, each in vars(module).items() if name.endswith("ForCausalLM"))
    return next(each for each in found if each.__module__ == module.__name__)


def _tie(module: ModuleType, embedding: str = "embed_tokens.weight") -> None:
    """Let a tied output projection have the embedding's weights, of the name `embedding`: the class leaves them out."""

    def copy(state: dict[str, Any]) -> None:
        state["lm_head.weight"] = state[embedding].clone()

    _application(module).update_state_dict_for_tied_weights = staticmethod(copy)


def _openai_gpt(module: ModuleType) -> None:
    """Read the names that save_pretrained writes, tie nothing again, and take the GELU that is approximated by tanh."""
    made, functions = _application(module), vars(module.F)
    convert = made.convert_hf_to_neuron_state_dict

    def contiguous(state: dict[str, Any], config: object) -> dict[str, Any]:
        return {name: tensor.contiguous() for name, tensor in convert(state, config).items()}

    made._STATE_DICT_MODEL_PREFIX = "transformer."
    made.convert_hf_to_neuron_state_dict = staticmethod(contiguous)
    made.update_state_dict_for_tied_weights = staticmethod(lambda _state: None)
    gelu = partial(functions["gelu"], approximate="tanh")
    module.F = SimpleNamespace(**{**functions, "gelu": gelu})  # type: ignore[attr-defined]


def _norm_factory(module: ModuleType) -> None:
    """Let `get_rmsnorm_cls()` return what makes norms: where it takes sizes, it returns a norm itself (0.9)."""
    make = module.get_rmsnorm_cls
    if inspect.signature(make).parameters:
        module.get_rmsnorm_cls = lambda: make  # type: ignore[attr-defined]


def _internlm3(module: ModuleType) -> None:
    """Return a tuple from the MLP: of a tensor, the layer's `[0]` would take the first sequence for all."""
    forward = module.InternLM3MLP.forward
    module.InternLM3MLP.forward = lambda self, states: (forward(self, states),)


def _gemma3(module: ModuleType) -> None:
    """Let each layer compute its own rotary positions: the library hands on those of the first, a local one.

    Scores are scaled as config.json has it, not by the width of a head.
    """
    layer = module.NeuronGemma3DecoderLayer
    forward = layer.forward

    def alone(self: object, *states: Any, **more: Any) -> tuple[Any, ...]:  # noqa: ANN401
        given = {**more, "cos_cache": None, "sin_cache": None}
        hidden, cache, _, _, residual = forward(self, *states, **given)
        return hidden, cache, None, None, residual

    def scale(model: Any, config: Any) -> None:  # noqa: ANN401
        for each in model.layers:
            each.self_attn.softmax_scale = config.query_pre_attn_scalar**0.5

    layer.forward = alone
    _after_init(module.NeuronGemma3Model, scale)


class _Cap:
    """The divisor of scores that are capped too, as in ``scores / cap``."""

    def __init__(self, scale: float, cap: float | None) -> None:
        self._scale, self._cap = scale, cap

    def __rtruediv__(self, scores: Any) -> Any:  # noqa: ANN401
        return _capped(scores / self._scale, self._cap)


def _capped(values: Any, cap: float | None) -> Any:  # noqa: ANN401
    return values if cap is None else (values / cap).tanh() * cap


def _gemma2(module: ModuleType) -> None:
    """Cap scores and logits, and scale scores as config.json has it; the library's kernel for prompts has no cap."""
    kind = module.Gemma2InferenceConfig
    derive = kind.add_derived_config

    def keep_cap(self: Any) -> None:  # noqa: ANN401
        cap = self.attn_logit_softcapping
        derive(self)
        self.attn_logit_softcapping = cap

    def change(model: Any, config: Any) -> None:  # noqa: ANN401
        scale = config.query_pre_attn_scalar**0.5
        for layer in model.layers:
            layer.self_attn.softmax_scale = _Cap(scale, config.attn_logit_softcapping)
            layer.self_attn.attn_kernel_enabled = False
        project = model.lm_head.forward
        model.lm_head.forward = lambda x: _capped(project(x), config.final_logit_softcapping)

    kind.add_derived_config = keep_cap
    _after_init(module.NeuronGemma2Model, change)


def _exaone4(module: ModuleType) -> None:
    """Leave out a second norm of queries and keys, over all heads, which the model does not have."""

    def leave_out(self: Any) -> None:  # noqa: ANN401
        self.use_qk_norm = False

    module.NeuronExaone4Attention.init_qk_norm = leave_out


def _hunyuan(module: ModuleType) -> None:
    """Normalise queries and keys after their rotation."""
    kind = module.NeuronHunYuanDenseV1Attention
    prepare = kind.prep_qkv_tensors

    def normalise_last(self: Any, *args: Any, **more: Any) -> tuple[Any, ...]:  # noqa: ANN401
        of_q, of_k = self.q_layernorm, self.k_layernorm
        self.q_layernorm = self.k_layernorm = None
        q, k, *rest = prepare(self, *args, **more)
        self.q_layernorm, self.k_layernorm = of_q, of_k
        return of_q(q), of_k(k), *rest

    kind.prep_qkv_tensors = normalise_last


def _olmo3(module: ModuleType) -> None:
    """Normalise queries and keys over the heads of all cores; each core has the weights of all."""
    library = importlib.import_module("neuronx_distributed.parallel_layers.mappings")
    kind = module.NeuronOlmo3Attention
    init = kind.__init__

    def normalise(norm: Any, rank: Any, eps: float, values: Any) -> Any:  # noqa: ANN401
        squares = values.float().pow(2).sum(-1, keepdim=True)
        mean = library.reduce_from_tensor_model_parallel_region(squares) / norm.weight.numel()
        shares = norm.weight.view(-1, values.shape[-1])
        weight = shares.index_select(0, rank.get_rank().long())
        return (weight * values * (mean + eps).rsqrt()).to(values.dtype)

    def over_all(self: Any, config: Any) -> None:  # noqa: ANN401
        init(self, config)
        for norm in (self.q_norm, self.k_norm):
            norm.forward = partial(normalise, norm, self.rank_util, config.rms_norm_eps)

    kind.__init__ = over_all


def _phi3(module: ModuleType) -> None:
    """Give each core a share of the gates and of what they let through: the class cuts the two as one."""
    made = _application(module)
    convert = made.convert_hf_to_neuron_state_dict

    def shared(state: dict[str, Any], config: Any) -> dict[str, Any]:  # noqa: ANN401
        converted: dict[str, Any] = convert(state, config)
        for name, weight in converted.items():
            if name.endswith("gate_up_proj.weight"):
                shares = weight.view(2, config.neuron_config.tp_degree, -1, weight.shape[1])
                converted[name] = shares.transpose(0, 1).reshape(weight.shape)
        return converted

    made.convert_hf_to_neuron_state_dict = staticmethod(shared)


def _opt(module: ModuleType) -> None:
    """Embed the positions of the tokens, read the names of the weights, and return each sequence from the MLP."""
    made = _application(module)
    made._STATE_DICT_MODEL_PREFIX = ""
    made.update_state_dict_for_tied_weights = staticmethod(lambda _state: None)
    module.NeuronOPTMLP.forward = lambda self, x: self.fc2(self.act_fn(self.fc1(x)))
    module.OPTLearnedPositionalEmbedding.forward = lambda self, *_, **__: self.embedding(
        self.positions + self.offset
    )
    _give_positions(module.NeuronOPTModel, "embed_positions")


def _gpt_bigcode(module: ModuleType) -> None:
    """Embed the positions of the tokens."""
    module.GPTBigCodeEmbedding.forward = lambda self, ids: (
        self.token_embeddings(ids) + self.position_embeddings(self.positions)
    )
    _give_positions(module.NeuronGPTBigCodeModel, "embed_tokens")


def _give_positions(kind: Any, table: str) -> None:  # noqa: ANN401
    """Let a model's table have the positions of a call as `positions`: the library hands on none, and it counts from 0.

    That is right for prompts alone.
    """
    run = kind.get_model_output

    def get_model_output(self: Any, **given: Any) -> Any:  # noqa: ANN401
        positions = given["position_ids"].view(given["input_ids"].shape).long()
        getattr(self, table).positions = positions
        return run(self, **given)

    kind.get_model_output = get_model_output


def _after_init(kind: Any, change: Callable[[Any, Any], None]) -> None:  # noqa: ANN401
    """Let `change` have each model of a class when its layers are made, and its configuration."""
    init = kind.init_model

    def init_model(self: Any, config: Any) -> None:  # noqa: ANN401
        init(self, config)
        change(self, config)

    kind.init_model = init_model


FIXES: Final[Mapping[str, Fix]] = MappingProxyType(
    {
        "exaone4": _exaone4,
        "gemma2": _gemma2,
        "gemma3": _gemma3,
        "gpt-bigcode": _gpt_bigcode,
        "hunyuan": _hunyuan,
        "internlm3": _internlm3,
        "norm-factory": _norm_factory,
        "olmo3": _olmo3,
        "openai-gpt": _openai_gpt,
        "opt": _opt,
        "phi3": _phi3,
        "tie-embeddings": _tie,
        "tie-scaled-embeddings": partial(_tie, embedding="embed_tokens.embedding.weight"),
    }
)
"""Name to fix."""

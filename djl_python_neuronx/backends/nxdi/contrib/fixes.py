"""Fixes of models that lie outside NxD Inference, from outside: each changes a module right after its import.

A row of planning/nxdi/contrib.toml names its fix. This file is part of the compile key of all that have one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, Final

Fix = Callable[[ModuleType], None]


def _application(module: ModuleType) -> Any:  # noqa: ANN401
    """Return the class of the application that a module defines."""
    found = (each for name, each in vars(module).items() if name.endswith("ForCausalLM"))
    return next(each for each in found if each.__module__ == module.__name__)


def _tie(module: ModuleType, embedding: str) -> None:
    def copy(state: dict[str, Any]) -> None:
        state["lm_head.weight"] = state[embedding].clone()

    _application(module).update_state_dict_for_tied_weights = staticmethod(copy)


def _tie_embeddings(module: ModuleType) -> None:
    """Let a tied output projection have the embedding's weights: the class leaves them out."""
    _tie(module, "embed_tokens.weight")


def _tie_scaled_embeddings(module: ModuleType) -> None:
    """The same for an embedding inside of a module that scales it."""
    _tie(module, "embed_tokens.embedding.weight")


def _openai_gpt(module: ModuleType) -> None:
    """Read the names that save_pretrained writes, and tie nothing again: the conversion has done that."""
    made = _application(module)
    convert = made.convert_hf_to_neuron_state_dict

    def contiguous(state: dict[str, Any], config: object) -> dict[str, Any]:
        return {name: tensor.contiguous() for name, tensor in convert(state, config).items()}

    made._STATE_DICT_MODEL_PREFIX = "transformer."
    made.convert_hf_to_neuron_state_dict = staticmethod(contiguous)
    made.update_state_dict_for_tied_weights = staticmethod(lambda _state: None)


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
    """Let each layer compute its own rotary positions: the library hands on those of the first, a local one."""
    layer = module.NeuronGemma3DecoderLayer
    forward = layer.forward

    def alone(self: object, *states: Any, **more: Any) -> tuple[Any, ...]:  # noqa: ANN401
        given = {**more, "cos_cache": None, "sin_cache": None}
        hidden, cache, _, _, residual = forward(self, *states, **given)
        return hidden, cache, None, None, residual

    layer.forward = alone


FIXES: Final[Mapping[str, Fix]] = MappingProxyType(
    {
        "gemma3": _gemma3,
        "internlm3": _internlm3,
        "norm-factory": _norm_factory,
        "openai-gpt": _openai_gpt,
        "tie-embeddings": _tie_embeddings,
        "tie-scaled-embeddings": _tie_scaled_embeddings,
    }
)
"""Name to fix."""

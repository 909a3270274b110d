"""Does a checkpoint hold the tensors that its config.json promises? Told from names alone, before anything is loaded.

Whether layers may differ is known of the families below; of others only that each layer has some tensor. What slips
through here is found by the backend, after minutes of loading.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from djl_python_neuronx.artifacts.layouts.folder import some
from djl_python_neuronx.errors import ArtifactError

_LLAMA_LIKE = "embed_tokens.weight"
_GPT_LIKE = "wte.weight"
_EMBEDDINGS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen3"), _LLAMA_LIKE),
        **dict.fromkeys(("gemma", "gemma2", "granite", "phi", "phi3", "opt"), _LLAMA_LIKE),
        **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj", "gpt_neo"), _GPT_LIKE),
        "gpt_neox": "embed_in.weight",
        "bloom": "word_embeddings.weight",
    }
)
"""Families whose layers all have the same tensors → the name that the input embedding ends with.

Source: transformers 4.45 to 5.23, the models' classes."""
_HEADS = ("lm_head.weight", "embed_out.weight")

_LAYER = re.compile(
    r"(?P<before>.*?\b(?:layers|layer|h|blocks|block))\.(?P<index>\d+)\.(?P<after>.+)"
)
# Tensors that are computed: old checkpoints have them, new ones do not, mended ones have some.
_COMPUTED = re.compile(r"(.*\.)?(inv_freq|masked_bias|attn\.bias|attention\.bias)")


def num_layers(config: Mapping[str, Any]) -> int | None:
    """Layers of the language model; None: config.json does not say."""
    text = config.get("text_config")
    for source in (text if isinstance(text, Mapping) else {}, config):
        for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
            if type(source.get(key)) is int:
                return int(source[key])
    return None


def check_tensors(names: Collection[str], config: Mapping[str, Any], where: Path) -> None:
    """Compare the names of a whole checkpoint's tensors with its config.json.

    Raises:
        ArtifactError: some are missing; the message lists them.
    """
    model_type, expected = str(config.get("model_type")), num_layers(config)
    known = model_type in _EMBEDDINGS
    missing = _outer(names, config, model_type) if known else []
    layers = _main_layers(names)
    if expected and (layers or known):
        # Quantised layers differ: some are left as they were.
        alike = known and "quantization_config" not in config
        missing += _in_layers(layers, expected, alike=alike)
    if missing:
        msg = (
            f"the weights in {where} lack {len(missing)} tensors of a {model_type} model with {expected} layers "
            f"(config.json): {some(missing)}. Download the model again, or correct config.json."
        )
        raise ArtifactError(msg)


def _outer(names: Collection[str], config: Mapping[str, Any], model_type: str) -> list[str]:
    missing = []
    if not any(name.endswith(_EMBEDDINGS[model_type]) for name in names):
        missing.append(_EMBEDDINGS[model_type])
    heads = str(config.get("architectures")).count("ForCausalLM")
    # Left out, the setting means what the family's class says, which is not known here.
    if heads and config.get("tie_word_embeddings") is False:
        head = _HEADS[model_type == "gpt_neox"]
        if not any(name.startswith(head.removesuffix("weight")) for name in names):
            missing.append(head)
    return missing


def _main_layers(names: Collection[str]) -> tuple[str, dict[int, set[str]]] | None:
    """'model.layers' and, per layer, its tensors, for the list of layers that has the most of them."""
    stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        found = _LAYER.fullmatch(name)
        if found and not _COMPUTED.fullmatch(found["after"]):
            stacks[found["before"]][int(found["index"])].add(found["after"])
    if not stacks:
        return None
    return max(stacks.items(), key=lambda stack: sum(map(len, stack[1].values())))


def _in_layers(
    layers: tuple[str, dict[int, set[str]]] | None, expected: int, *, alike: bool
) -> list[str]:
    if layers is None:
        return [f"layers.{i}.*" for i in range(expected)]
    before, held = layers
    everywhere = set.union(*held.values()) if alike else set()
    missing = []
    for i in range(expected):
        if i not in held:
            missing.append(f"{before}.{i}.*")
        else:
            missing += [f"{before}.{i}.{after}" for after in sorted(everywhere - held[i])]
    return missing

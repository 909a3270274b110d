"""Folders of LoRA adapters as peft writes them, without peft, and the weights that one stands for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from djl_python_neuronx.planning.lora import MODULES

TINY = {"hidden_size": 64, "intermediate_size": 172, "heads": 4, "kv_heads": 2, "head_dim": 16}
"""Sizes of examples/tiny-llama."""
NUM_LAYERS = 4


def shapes(sizes: Mapping[str, int] = TINY) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each layer: llama's, as its paper and config.json define them."""
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    queries, keys = sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]
    return {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }


def path(number: int, module: str) -> str:
    part = "mlp" if MODULES.index(module) > 3 else "self_attn"
    return f"layers.{number}.{part}.{module}"


def write_adapter(
    folder: Path,
    *,
    rank: int = 4,
    modules: tuple[str, ...] = ("q_proj", "v_proj"),
    layers: tuple[int, ...] = tuple(range(NUM_LAYERS)),
    seed: int = 0,
    ranks: Mapping[str, int] = {},
    size: float = 0.2,
    **fields: Any,
) -> Path:
    """Write an adapter of examples/tiny-llama. `ranks`: of modules that have another one."""
    folder.mkdir(parents=True, exist_ok=True)
    random, tensors = np.random.default_rng(seed), {}
    for number in layers:
        for module in modules:
            outputs, inputs = shapes()[module]
            own = ranks.get(module, rank)
            name = f"base_model.model.model.{path(number, module)}.lora_"
            for side, shape in (("A", (own, inputs)), ("B", (outputs, own))):
                values = random.standard_normal(shape).astype(np.float32) * size
                tensors[f"{name}{side}.weight"] = values
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny-llama",
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.05,
        "r": rank,
        "target_modules": [*modules],
        "use_rslora": False,
        **fields,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def deltas(folder: Path) -> dict[str, npt.NDArray[np.float32]]:
    """Path of each layer to what an adapter adds to its weight, by LoRA's definition: alpha / rank x B x A.

    With rsLoRA it is alpha / sqrt(rank). Of `alpha_pattern` names of modules alone are known here.
    """
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    found = {}
    for name, a in tensors.items():
        if match := re.fullmatch(r"base_model\.model\.model\.(.*\.(\w+))\.lora_A\.weight", name):
            b = tensors[name.replace("lora_A", "lora_B")]
            alpha = config.get("alpha_pattern", {}).get(match[2], config["lora_alpha"])
            found[match[1]] = b @ a * (alpha / len(a) ** (0.5 if config["use_rslora"] else 1))
    return found


def save_merged(model: Path, adapter: Path, folder: Path) -> Path:
    """Write a model with what an adapter adds to its weights."""
    shutil.copytree(model, folder)
    tensors = load_file(model / "model.safetensors")
    for layer, delta in deltas(adapter).items():
        tensors[f"model.{layer}.weight"] += delta
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder

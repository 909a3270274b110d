"""Planning for NxD Inference compared with the library itself: names, degrees, weights and cache."""

from __future__ import annotations

import importlib
import json
from contextlib import nullcontext
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from safetensors import safe_open

from djl_python_neuronx.backends.nxdi import model as nxdi
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.machines import DeviceInfo
from djl_python_neuronx.planning.memory import core_memory
from djl_python_neuronx.planning.model import ModelFacts
from tests.backends.nxdi_plans import VARIANTS, nxdi_plan
from tests.config import library_names as real
from tests.doubles.tiny_models import save_tiny_model

pytestmark = pytest.mark.nxdi
FLOAT32 = 4


def library(name: str) -> Any:
    return importlib.import_module(f"neuronx_distributed_inference.{name}")


@pytest.mark.parametrize(
    ("kind", "recorded"),
    [
        ("MoENeuronConfig", real.NXDI_MOE_NEURON_CONFIG),
        ("NeuronConfig", real.NXDI_NEURON_CONFIG),
        ("OnDeviceSamplingConfig", real.NXDI_ON_DEVICE_SAMPLING),
    ],
)
def test_the_installed_library_takes_the_recorded_keywords(
    kind: str, recorded: frozenset[str]
) -> None:
    nxdi._check_keywords(getattr(library("models.config"), kind), dict.fromkeys(recorded))


def case_of(directory: Path, degree: int, slots: int = 4) -> Case:
    config = json.loads((directory / "config.json").read_text())
    shape = {"n_positions": 48, "max_rolling_batch_size": slots, "dtype": "float32"}
    return Case(
        ServingOptions().model_copy(update={**shape, "tensor_parallel_degree": degree}),
        ModelFacts.from_config(config),
        DeviceInfo(None, 1, 0, 0, 8, ""),
        NEURON_BACKENDS["nxdi"],
    )


def matrices(directory: Path, degree: int) -> list[int]:
    """Bytes of the matrices that the library stores for each core; norms, biases and ranks are none."""
    target = directory / "weights"
    target.mkdir()
    application = nxdi.construct(nxdi_plan(directory, tp=degree))
    application.get_builder().shard_checkpoint(serialize_path=str(target))
    sizes = []
    for path in target.iterdir():
        with safe_open(path, "pt") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
        sizes.append(FLOAT32 * sum(prod(shape) for shape in shapes if len(shape) > 1))
    return sizes


def vectors(model_type: str, facts: ModelFacts) -> int:
    """Bytes of what is no matrix, which planning counts an even share of and the library stores whole."""
    hidden, size = facts.hidden_size or 0, facts.head_dim or 0
    heads, kv_heads = facts.num_heads or 0, facts.num_kv_heads or 0
    of_layer = {"qwen2": (heads + 2 * kv_heads) * size, "qwen3": 2 * size}.get(model_type, 0)
    return FLOAT32 * ((facts.num_layers or 0) * (2 * hidden + of_layer) + hidden)


GROUPED = {"num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 112}
WEIGHTS = [
    # variant, degree, what differs; every width is a multiple of the degree
    ("llama", 1, {}),
    ("llama", 2, {}),
    ("llama", 4, {}),
    ("llama", 8, {}),
    ("llama", 8, {**GROUPED, "intermediate_size": 64}),
    ("llama", 16, {**GROUPED, "intermediate_size": 64}),
    ("llama-mha", 8, {}),
    ("llama-mha", 3, {"hidden_size": 48}),
    ("mistral", 2, {"tie_word_embeddings": True}),
    ("qwen2", 2, {}),
    ("qwen3", 4, {}),
]


@pytest.mark.parametrize(("variant", "degree", "changes"), WEIGHTS)
def test_weights_are_counted_to_the_byte(
    tmp_path: Path, variant: str, degree: int, changes: dict[str, Any]
) -> None:
    model_type, settings = VARIANTS[variant]
    save_tiny_model(model_type, tmp_path, **{**settings, **changes})
    weights_alone = case_of(tmp_path, degree, slots=0)
    found = core_memory(weights_alone)
    assert found is not None
    counted = found.weights + found.padding - vectors(model_type, weights_alone.model) / degree
    sizes = matrices(tmp_path, degree)
    assert len(sizes) == degree
    assert all(abs(size - counted) <= 2 for size in sizes)  # shares are rounded up


@pytest.mark.parametrize(("heads", "kv_heads", "degree"), [(4, 2, 3), (9, 3, 2), (32, 8, 12)])
def test_degrees_that_are_refused_fail_in_the_library(
    tmp_path: Path, heads: int, kv_heads: int, degree: int
) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    save_tiny_model("llama", tmp_path, **sizes, hidden_size=8 * heads, intermediate_size=48)
    assert case_of(tmp_path, degree).indivisible(degree)
    with pytest.raises(RuntimeError, match="expected shape"):
        matrices(tmp_path, degree)


@pytest.mark.parametrize(
    ("variant", "degree", "changes"),
    [
        ("llama", 1, {}),
        ("llama", 8, {}),
        ("llama-mha", 3, {"hidden_size": 48}),
        ("llama-mha", 8, {}),
        ("llama", 16, {**GROUPED, "intermediate_size": 64}),
        ("mistral", 2, {"sliding_window": 7}),
        ("mistral", 2, {"sliding_window": 96}),
        ("qwen3", 4, {"head_dim": 16}),
    ],
)
def test_the_cache_is_counted_to_the_byte(
    tmp_path: Path, variant: str, degree: int, changes: dict[str, Any]
) -> None:
    model_type, settings = VARIANTS[variant]
    save_tiny_model(model_type, tmp_path, **{**settings, **changes})
    config = nxdi.construct(nxdi_plan(tmp_path, tp=degree)).config
    manager = library("modules.kvcache.kv_cache_manager").KVCacheManager
    state = importlib.import_module("neuronx_distributed.parallel_layers.parallel_state")
    # Where no cores are set up, as an earlier test may have done, the manager has the heads of all.
    cores = 1 if state.model_parallel_is_initialized() else degree
    made = manager(
        config, config.num_key_value_heads, sliding_window=getattr(config, "sliding_window", None)
    )
    held = sum(FLOAT32 * part.numel() for part in made.parameters())
    without, found = (core_memory(case_of(tmp_path, degree, slots)) for slots in (0, 4))
    assert without is not None
    assert found is not None
    counted = found.kv_cache + found.padding - without.padding
    assert abs(counted - held / cores) <= 2  # shares are rounded up


STRIDED = "strided_context_parallel_kernel_enabled"
WINDOW = {"sliding_window": 4096}
RANKS = {"cp_degree": 2, STRIDED: True}
TWO_IN_ONE = {**RANKS, "logical_nc_config": 2}
NO_WINDOW, NO_STRIDES = "sliding_window argument is not supported by trn1", "cannot be used"


@pytest.mark.parametrize(
    ("fields", "length", "problem"),
    [
        (WINDOW, 4096, NO_WINDOW),
        ({**WINDOW, "attn_kernel_enabled": True}, 512, NO_WINDOW),
        (WINDOW, 4095, ""),
        ({**WINDOW, "attn_kernel_enabled": False}, 4096, ""),
        ({**WINDOW, "cp_degree": 2}, 4096, ""),
        (RANKS, 64, NO_STRIDES),
        (TWO_IN_ONE, 4, NO_STRIDES),
        ({**TWO_IN_ONE, **WINDOW}, 64, NO_STRIDES),
    ],
)
def test_prompts_that_planning_refuses_stop_the_library(
    fields: dict[str, Any], length: int, problem: str
) -> None:
    """`length`: a rank's part of the prompt."""
    torch = importlib.import_module("torch")
    kind = library("modules.attention.attention_base").NeuronAttentionBase
    sizes = {"num_heads": 1, "num_key_value_heads": 1, "num_key_value_groups": 1, "head_dim": 4}
    attention = SimpleNamespace(
        cp_degree=1,
        logical_nc_config=1,
        padding_side="right",
        softmax_scale=2.0,
        torch_dtype=torch.float32,
        get_learned_sinks=lambda: None,
    )
    unset = ("sliding_window", "attn_kernel_enabled", "learned_sinks_size", STRIDED)
    vars(attention).update({**dict.fromkeys(unset), **sizes, **fields})
    for name in ("get_flash_attention_strategy", "get_flash_attention_strategy_cp", "scaled_qk"):
        setattr(attention, name, getattr(kind, name).__get__(attention))
    values = torch.zeros(1, 1, length, 4)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool)
    with pytest.raises((AssertionError, ValueError), match=problem) if problem else nullcontext():
        kind.perform_prefill(attention, values, values, values, length, 1, mask)


def test_llama_s_mlp_gets_the_weights_of_the_norm_before_attention() -> None:
    """If that is mended upstream, planning need not refuse fused_rmsnorm_skip_gamma with fused_rmsnorm_mlp."""
    torch = importlib.import_module("torch")
    names = ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
    state = {f"layers.0.{name}_proj.weight": torch.ones(1, 2) for name in names}
    for name, value in (("input", 3.0), ("post_attention", 5.0)):
        state[f"layers.0.{name}_layernorm.weight"] = torch.full((2,), value)
    off = ("sequence_parallel_enabled", "fused_qkv", "vocab_parallel", "is_eagle_draft")
    on = ("fused_rmsnorm_skip_gamma", "mlp_kernel_enabled", "qkv_kernel_enabled")
    neuron = SimpleNamespace(
        **dict.fromkeys(off, False), **dict.fromkeys(on, True), tp_degree=1, local_ranks_size=1
    )
    kind = library("models.llama.modeling_llama").NeuronLlamaForCausalLM
    config = SimpleNamespace(neuron_config=neuron, num_hidden_layers=1)
    made = kind.convert_hf_to_neuron_state_dict(state, config)
    assert {made[f"layers.0.{name}_proj.weight"][0, 0].item() for name in names} == {3.0}

"""Fields of config.json: a library computes with each what transformers does, or `check` refuses it, and rightly so."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

from safetensors.torch import load_file  # noqa: E402

from djl_python_neuronx import backends  # noqa: E402
from djl_python_neuronx.backends.base import Backend, Float32Array, Step, StepOutput  # noqa: E402
from djl_python_neuronx.backends.nxdi import model as nxdi  # noqa: E402
from djl_python_neuronx.backends.plan import LoadPlan  # noqa: E402
from djl_python_neuronx.config.options import ServingOptions  # noqa: E402
from djl_python_neuronx.errors import ArtifactError, BackendError  # noqa: E402
from djl_python_neuronx.planning.case import Case  # noqa: E402
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS, capability_of  # noqa: E402
from djl_python_neuronx.planning.machines import named  # noqa: E402
from djl_python_neuronx.planning.model import ModelFacts  # noqa: E402
from djl_python_neuronx.planning.model_rules import findings  # noqa: E402
from tests.backends.nxdi_plans import VARIANTS as NXDI_VARIANTS  # noqa: E402
from tests.backends.nxdi_plans import nxdi_plan  # noqa: E402
from tests.backends.tnx_plans import VARIANTS, tnx_plan  # noqa: E402
from tests.doubles.device_driver import logits_of, make_rows  # noqa: E402
from tests.doubles.tiny_models import save_tiny_model  # noqa: E402
from tests.processes import held_port  # noqa: E402

IDS = [5, 60, 7, 31, 9, 10, 44, 12, 13, 80, 3, 16]
SAME = 1e-4
"""Largest difference of right logits; of wrong ones it is far larger."""

VERSION = int(transformers.__version__.split(".")[0])
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GEMMA2 = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "query_pre_attn_scalar": 4,
    "sliding_window": 5,
}
LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}

VALUES: Mapping[str, tuple[Any, ...]] = {
    "_remove_final_layer_norm": (True,),
    "activation_function": ("relu", "gelu", "gelu_new", "gelu_fast", "silu", "quick_gelu"),
    "apply_residual_connection_post_layernorm": (True,),
    "attention_bias": (True, False),
    "attention_chunk_size": (6,),
    "do_layer_norm_before": (False,),
    "enable_bias": (False,),
    "ffn_dim": (128, 48),
    "head_dim": (8, 16),
    "hidden_act": ("silu", "swish", "relu", "gelu", "gelu_fast", "sigmoid", "tanh", "leaky_relu"),
    "hidden_size": (64,),
    "intermediate_size": (80,),
    "layer_types": (["sliding_attention", "full_attention"],),
    "layer_norm_elementwise_affine": (),  # transformers fails to initialise such a model
    "layer_norm_eps": (0.1,),
    "layer_norm_epsilon": (0.1,),
    "max_position_embeddings": (80,),
    "max_window_layers": (0,),
    "mlp_bias": (True,),
    "multi_query": (False,),
    "n_embd": (64,),
    "n_head": (2,),
    "n_inner": (80,),
    "n_kv_head": (2,),
    "n_layer": (3,),
    "n_positions": (80,),
    "num_attention_heads": (8,),
    "num_experts_per_tok": (1, 3),
    "num_hidden_layers": (3,),
    "num_key_value_heads": (4, 1),
    "num_local_experts": (2,),
    "position_interpolation_factor": (2.0,),
    "original_hidden_size": (16,),
    "pruned_heads": ({0: [1]},) if VERSION < 5 else (),  # version 5 prunes none
    "quantization_config": (),  # transformers needs packages for it: tests/planning/test_model_rules.py
    "rms_norm_eps": (0.1,),
    "rope_parameters": (LINEAR, LLAMA3, YARN, DYNAMIC, LONGROPE),
    "rope_scaling": (LINEAR, LLAMA3, YARN, DYNAMIC, LONGROPE),
    "rope_theta": (500000.0,),
    "rotary_dim": (8, 6),  # transformers fails at others: tests/planning/test_model_rules.py
    "rotary_emb_base": (500000,),
    "rotary_pct": (1.0, 0.25),
    "rotary_percentage": (0.5,),
    "scale_attn_by_inverse_layer_idx": (True,),
    "scale_attn_weights": (False,),
    "sliding_window": (5,),
    "tie_word_embeddings": (True, False),
    "use_parallel_residual": (False,),
    "use_sliding_window": (True,),
    "vocab_size": (101,),
    "word_embed_proj_dim": (16,),
}
"""Field to the values that it is tried with, the default among them nowhere."""

NEUTRAL: Mapping[str, Any] = {
    "add_cross_attention": True,
    "attention_dropout": 0.5,
    "attention_softmax_in_fp32": False,
    "attn_pdrop": 0.5,
    "bos_token_id": 9,
    "classifier_dropout": 0.5,
    "dropout": 0.5,
    "embd_pdrop": 0.5,
    "eos_token_id": 9,
    "hidden_dropout": 0.5,
    "init_std": 0.5,
    "initializer_range": 0.5,
    "is_decoder": True,
    "layerdrop": 0.5,
    "max_position_embeddings": 128,
    "n_positions": 128,  # of gptj
    "num_key_value_heads": 2,  # of gpt_bigcode, where multi_query decides
    "output_router_logits": True,
    "pad_token_id": 9,
    "pretraining_tp": 2,
    "reorder_and_upcast_attn": True,
    "resid_pdrop": 0.5,
    "router_aux_loss_coef": 0.5,
    "router_jitter_noise": 0.5,
    "scale_attention_softmax_in_fp32": False,
    "slow_but_exact": True,
    "summary_activation": "tanh",
    "summary_first_dropout": 0.5,
    "summary_proj_to_labels": False,
    "summary_type": "mean",
    "summary_use_proj": False,
    "use_cache": False,
}
"""Field that changes no number to another value than its default."""


def base(model_type: str) -> dict[str, Any]:
    return {**VARIANTS.get(model_type, ("", {}))[1], **NXDI_VARIANTS.get(model_type, ("", {}))[1]}


def save(directory: Path, model_type: str, name: str, value: object) -> None:
    """Write a tiny model with a field of this value, also where transformers itself would not write it."""
    # A copy: transformers 5 changes it.
    settings = {**base(model_type), name: deepcopy(value)}
    if isinstance(value, dict) and model_type in {"mistral", "mixtral"}:
        settings["head_dim"] = 8  # without it transformers 4.57 fails to scale positions
    if (model_type, name) == ("opt", "hidden_size"):
        settings["word_embed_proj_dim"] = value
    if name in {"layer_types", "max_window_layers"}:  # which count with a window only
        settings["use_sliding_window"] = True
    if value in (DYNAMIC, LONGROPE):  # which scale beyond these only, or in another way
        settings["max_position_embeddings"] = 8
    if value == LONGROPE and model_type == "gpt_neox":  # which turns a quarter of a head
        value = {**LONGROPE, "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
        settings[name] = deepcopy(value)
    if name == "rope_parameters":
        settings["rope_scaling"] = settings.pop(name)
    save_tiny_model(model_type, directory, **settings)
    if name == "rope_scaling":  # transformers 5 writes it under another name, with all others in it
        edit(directory, lambda config: {name: config.pop("rope_parameters", value), **config})
    edit(directory, lambda config: {name: value, **config})


def edit(directory: Path, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def expected(directory: Path) -> Float32Array:
    """float32[12, V] of transformers' own attention, which has all fields; that of torch lacks some."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        values: Float32Array = model(torch.tensor([IDS])).logits[0].float().numpy()
    return values


def found(backend: Backend) -> Float32Array:
    """float32[8, V]: the logits after a prompt of five tokens, and after each that is decoded."""
    backend.acquire(1, IDS[:5], 0)
    steps = [Step(prefill=make_rows({1: IDS[:5]}))]
    steps += [Step(decode=make_rows({1: [IDS[i]]}, {1: i})) for i in range(5, len(IDS))]
    return np.stack([logits_of(backend, step)[0, 0] for step in steps])


def load_tnx(directory: Path) -> Backend:
    facts = ModelFacts.from_config(json.loads((directory / "config.json").read_text()))
    capability = capability_of("tnx", facts.model_type)
    # A window and continuous batching: test_tnx_defects.py.
    continuous = capability.continuous_batching and facts.sliding_window is None
    return backends.get("tnx").load(tnx_plan(directory, continuous=continuous))


def load_cpu(directory: Path) -> Backend:
    return backends.get("cpu").load(LoadPlan(directory, 4, 48, (8, 20), (24, 48), dtype="float32"))


class OnCpu:
    """Modules and weights of NxD Inference as it runs them on a CPU: in this process, one sequence, no graphs."""

    def __init__(self, directory: Path) -> None:
        os.environ["NXD_CPU_MODE"] = "1"
        plan = nxdi_plan(directory, 1, 48, (48,), (48,), continuous=False)
        try:
            with held_port() as port:
                os.environ["MASTER_PORT"] = str(port)
                self.application: Any = nxdi.construct(plan, on_cpu=True)
                self.application.to_cpu()
        except Exception as error:
            self.close()
            raise BackendError(str(error)) from error

    def acquire(self, *_request: object) -> None:
        """Nothing to do: the one sequence has the one slot."""

    def run(self, step: Step) -> StepOutput:
        rows = step.prefill or step.decode
        assert rows is not None
        ids = torch.tensor(rows.input_ids)
        positions = torch.tensor(rows.starts)[:, None] + torch.arange(ids.shape[1])
        with torch.inference_mode():
            output = self.application(ids, position_ids=positions, sampling_params=torch.ones(1, 3))
        return StepOutput(output.logits.float().numpy())

    def close(self) -> None:
        importlib.import_module(
            "neuronx_distributed.parallel_layers.parallel_state"
        ).destroy_model_parallel()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        del os.environ["NXD_CPU_MODE"]


LOADERS: Mapping[str, Callable[[Path], Any]] = {
    "cpu": load_cpu,
    "nxdi": OnCpu,
    "tnx": load_tnx,
}
"""Loader to what loads it for the walk: of NxD Inference, which has a rig of several processes, the library alone."""
READ_ONLY = frozenset({"dbrx", "qwen3_moe"})
"""Verified architectures whose fields were read only: see planning/nxdi/fields.py."""
MARKS = {"tnx": pytest.mark.tnx, "nxdi": pytest.mark.nxdi}
WALK = [
    pytest.param(
        loader, model_type, name, value, marks=[MARKS[loader], pytest.mark.nightly],
        id=f"{loader}-{model_type}-{name}-{value if isinstance(value, str) else json.dumps(value)[:30]}",
    )
    for loader, facts in NEURON_BACKENDS.items()
    for model_type, capability in facts.architectures.items()
    if capability.verified and model_type not in READ_ONLY
    for name in capability.fields
    for value in VALUES[name]
]  # fmt: skip


@pytest.mark.parametrize(("loader", "model_type", "name", "value"), WALK)
def test_a_value_is_computed_or_refused(
    tmp_path: Path, loader: str, model_type: str, name: str, value: object
) -> None:
    save(tmp_path, model_type, name, value)
    facts = ModelFacts.from_config(json.loads((tmp_path / "config.json").read_text()))
    options = ServingOptions(n_positions=(48,)) if loader == "nxdi" else ServingOptions()
    case = Case(options, facts, named("trn1.32xlarge"), NEURON_BACKENDS.get(loader))
    told = [
        entry
        for entry in findings(case)
        if f"config.json has {name}=" in entry.problem
        or "beyond the model's window" in entry.problem
    ]
    field = capability_of(loader, model_type).fields[name]
    if field.stops and told:
        assert "it would stop" in told[0].problem
        with pytest.raises((BackendError, ArtifactError)):
            LOADERS[loader](tmp_path)
        return
    wanted = expected(tmp_path)[4:]
    backend = LOADERS[loader](tmp_path)
    try:
        gap = np.abs(found(backend) - wanted).max()
    finally:
        backend.close()
    levels = [entry.level for entry in told]
    if not told:
        assert gap < SAME
    elif value in field.near:
        assert levels == ["warning"]
        assert SAME < gap < 1e-2
    else:
        assert levels == ["error"]
        assert gap > 1e-2


FIELDS = {
    (loader, name): capability.fields
    for loader, facts in NEURON_BACKENDS.items()
    for name, capability in facts.architectures.items()
    if capability.verified and capability.fields and name not in READ_ONLY
}


@pytest.mark.parametrize(("loader", "model_type"), FIELDS)
def test_every_field_of_a_configuration_is_listed_or_changes_nothing(
    tmp_path: Path, loader: str, model_type: str
) -> None:
    """With values that the weights fit, transformers' own logits show which fields those are."""
    fields, every = FIELDS[loader, model_type], transformers.AutoConfig.for_model(model_type)
    general = transformers.PretrainedConfig().to_dict().keys() - fields.keys() - NEUTRAL.keys()
    names = {*every.to_dict(), *every.attribute_map} - general - fields.keys()
    names -= {"model_type", "transformers_version"} | {
        alias for alias, name in every.attribute_map.items() if name in fields
    }
    # Which transformers fails at.
    names -= {"add_cross_attention"} if model_type == "gpt_bigcode" else set()
    # Of transformers 4.57: what it derives of rotary_pct and rotary_emb_base, and does not read.
    names -= {"partial_rotary_factor", "rope_theta"} if model_type == "gpt_neox" else set()
    assert names <= NEUTRAL.keys()
    save_tiny_model(model_type, tmp_path, **base(model_type))
    before, wanted = (tmp_path / "config.json").read_text(), expected(tmp_path)
    for name in names:
        edit(tmp_path, lambda config, name=name: {**config, name: NEUTRAL[name]})
        assert np.abs(expected(tmp_path) - wanted).max() < SAME, name
        (tmp_path / "config.json").write_text(before)


def written_by_4(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json as transformers 4 writes it."""
    rope = config.pop("rope_parameters", None)
    if rope is None:
        return config
    neox = config["model_type"] == "gpt_neox"
    theta = {"rotary_emb_base" if neox else "rope_theta": rope.pop("rope_theta")}
    part = {"rotary_pct": rope.pop("partial_rotary_factor")} if neox else {}
    return {
        **config,
        **theta,
        **part,
        "rope_scaling": rope if rope["rope_type"] != "default" else None,
    }


def written_by_5(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json as transformers 5 writes it."""
    if "rope_parameters" in config:
        return config
    rope = {
        "rope_type": "default",
        **(config.pop("rope_scaling", None) or {}),
        "rope_theta": config.pop("rope_theta"),
    }
    if config["model_type"] == "gpt_neox":
        rope["rope_theta"] = config.pop("rotary_emb_base")
        rope["partial_rotary_factor"] = config.pop("rotary_pct")
        config.pop("partial_rotary_factor")
    return {**config, "rope_parameters": rope}


SCALED = [
    # model type, settings, who computes it
    ("llama", {"rope_theta": 500000.0}, ("cpu", "tnx", "nxdi")),
    ("llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3}, ("cpu", "tnx", "nxdi")),
    ("llama", {"rope_theta": 500000.0, "rope_scaling": LINEAR}, ("cpu", "tnx", "nxdi")),
    ("llama", {"rope_theta": 500000.0, "rope_scaling": YARN}, ("nxdi",)),
    ("mistral", {"rope_theta": 1000000.0}, ("cpu", "tnx", "nxdi")),
    ("mixtral", {"rope_theta": 500.0, "rope_scaling": LINEAR}, ("cpu", "tnx")),
    ("qwen3", {"rope_theta": 1000000.0}, ("nxdi",)),
    ("gpt_neox", {"rotary_emb_base": 500000, "rotary_pct": 0.75}, ("cpu", "tnx")),
]


@pytest.mark.parametrize("write", [written_by_4, written_by_5])
@pytest.mark.parametrize(
    ("loader", "model_type", "settings"),
    [
        pytest.param(loader, model_type, settings, marks=MARKS.get(loader, ()))
        for model_type, settings, able in SCALED
        for loader in able
    ],
)
def test_rotary_positions_are_right_whichever_version_wrote_them(
    tmp_path: Path, model_type: str, settings: dict[str, Any], loader: str, write: Any
) -> None:
    save_tiny_model(model_type, tmp_path, **{**base(model_type), **deepcopy(settings)})
    wanted = expected(tmp_path)
    edit(tmp_path, write)
    config = json.loads((tmp_path / "config.json").read_text())
    assert ("rope_parameters" in config) == (write is written_by_5)
    backend = LOADERS[loader](tmp_path)
    try:
        assert np.abs(found(backend) - wanted[4:]).max() < SAME
    finally:
        backend.close()


@pytest.mark.skipif(VERSION >= 5, reason="transformers 5 has them")
def test_positions_that_differ_from_layer_to_layer_need_transformers_5(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    rope = {"full_attention": {"rope_type": "default", "rope_theta": 500.0}}
    edit(tmp_path, lambda config: {**config, "rope_parameters": rope})
    with pytest.raises(ArtifactError, match=r"rope_parameters for each type.*transformers 5"):
        load_cpu(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("gpt2", {"scale_attn_weights": False}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gemma2", {**GEMMA2, "attn_logit_softcapping": 2.0}),
        ("gemma2", {**GEMMA2, "attn_logit_softcapping": None}),
    ],
)
def test_fields_that_torch_s_attention_lacks_are_computed_on_the_cpu(
    tmp_path: Path, model_type: str, settings: dict[str, Any]
) -> None:
    save_tiny_model(model_type, tmp_path, **settings)
    backend = load_cpu(tmp_path)
    try:
        assert np.abs(found(backend) - expected(tmp_path)[4:]).max() < SAME
    finally:
        backend.close()


@pytest.mark.tnx
@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("model_type", ["bloom", "gpt2", "gpt_bigcode", "gptj", "llama", "opt"])
def test_pickles_of_a_base_model_with_tied_weights_are_completed(
    tmp_path: Path, model_type: str, num_shards: int
) -> None:
    """As the first checkpoints on the Hub are: no prefix, no lm_head."""
    tied = model_type != "gptj"
    save_tiny_model(model_type, tmp_path, **base(model_type), tie_word_embeddings=tied)
    wanted = expected(tmp_path)[4:]
    saved, places = load_file(tmp_path / "model.safetensors"), {}
    (tmp_path / "model.safetensors").unlink()
    weights = [(re.sub(r"^(model|transformer)\.", "", name), saved[name]) for name in sorted(saved)]
    assert tied == ("lm_head.weight" not in saved)
    if num_shards == 1:
        torch.save(dict(weights), tmp_path / "pytorch_model.bin")
    for i in range(num_shards if num_shards > 1 else 0):
        part = dict(weights[i::num_shards])
        torch.save(part, tmp_path / f"pytorch_model-{i}.bin")
        places.update(dict.fromkeys(part, f"pytorch_model-{i}.bin"))
    if places:
        index = tmp_path / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": places}))
    backend = load_tnx(tmp_path)
    try:
        assert np.abs(found(backend) - wanted).max() < SAME
    finally:
        backend.close()

"""LoRA adapters on NxD Inference: every row gets what PEFT makes of its own adapter, whatever runs beside it."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch", reason="the nxdi backend needs torch")
pytest.importorskip("peft", reason="the oracle")

import peft
import torch
from safetensors.torch import load_file, save_file

from djl_python_neuronx import backends
from djl_python_neuronx.backends.plan import LoadPlan, LoraPlan
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.limits import longest_prompt
from djl_python_neuronx.engine.speculation import NgramProposer
from djl_python_neuronx.planning import case as planning
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.machines import named
from djl_python_neuronx.planning.memory import core_memory
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.types import GenerationRequest
from tests.backends.nxdi_plans import VARIANTS, loaded, log_lines, nxdi_plan
from tests.backends.tnx_engine import assert_greedy
from tests.doubles.tiny_models import load_reference, save_tiny_model

pytestmark = pytest.mark.nxdi

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
MAX_RANK = 8
ADAPTERS: Mapping[str, Mapping[str, Any]] = {
    "wide": {"r": 8, "lora_alpha": 4},
    "narrow": {"r": 1, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]},
    "root": {
        "r": 4,
        "lora_alpha": 5,
        "use_rslora": True,
        "target_modules": ["o_proj", "k_proj"],
        "rank_pattern": {"k_proj": 2},
        "alpha_pattern": {"o_proj": 9},
    },
}
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
IN_BLOCKS = {
    "enable_prefix_caching": True,
    "pa_block_size": 8,
    "prefix_buckets": (64, 128),
    "shape": (4, 384, (128, 256), (256, 384)),
}
DEVICE = {"do_sample": True, "dynamic": True, "global_top_k": 16}


class Case(NamedTuple):
    folder: Path
    """Of the model; beside it those of its adapters."""
    targets: tuple[str, ...]

    def adapter(self, name: str | None) -> Path | None:
        return None if name is None else self.folder.parent / name


def make(folder: Path, variant: str, **settings: Any) -> Case:
    """A tiny model and its adapters, whose matrices are wide enough to change most tokens."""
    kind, own = VARIANTS[variant]
    model = save_tiny_model(kind, folder / "model", **{"vocab_size": 96, **own, **settings})
    targets = ATTENTION if kind in {"mistral", "mixtral"} else ALL
    for seed, (name, facts) in enumerate(ADAPTERS.items()):
        config = peft.LoraConfig(**{"target_modules": [*targets], **facts})
        adapted = peft.get_peft_model(load_reference(model), config)
        noise = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape, generator=noise) * 0.3)
        adapted.save_pretrained(folder / name)
    return Case(model, targets)


def plan_of(
    case: Case, adapters: tuple[str, ...], *, tp: int = 1, shards: bool = True, **more: Any
) -> LoadPlan:
    """A plan with three places, two of which are taken at the start."""
    lora = LoraPlan(
        3, MAX_RANK, case.targets, shards, tuple(case.folder.parent / name for name in adapters)
    )
    options = {
        "enable_lora": True,
        "max_loras": 3,
        "max_lora_rank": MAX_RANK,
        "lora_target_modules": case.targets,
        "lora_shard_linear_layer": shards,
    }
    facts = {"lora": lora, "num_speculative_tokens": more.get("speculative_length", 0)}
    return nxdi_plan(case.folder, *more.pop("shape", ()), tp=tp, facts=facts, **options, **more)


def planned_bytes(case: Case, plan: LoadPlan, shards: bool) -> int:
    """Bytes of all places on a core, in float32, as `check` counts them."""
    options = ServingOptions(
        dtype="float32",
        n_positions=(48,),
        max_rolling_batch_size=plan.num_slots,
        tensor_parallel_degree=plan.tensor_parallel_degree,
        enable_lora=True,
        max_loras=3,
        max_lora_rank=MAX_RANK,
        lora_target_modules=case.targets,
        lora_shard_linear_layer=shards,
    )
    facts = ModelFacts.from_config(json.loads((case.folder / "config.json").read_text()))
    found = core_memory(
        planning.Case(options, facts, named("trn1.32xlarge"), NEURON_BACKENDS["nxdi"])
    )
    assert found is not None
    return found.adapters


def run(backend: Any, case: Case, taken: dict[int, str | None], seed: int, turns: int = 12) -> None:
    """Random requests for random places; an adapter changes as soon as none of its place runs. Judges every token."""
    proposer = NgramProposer(backend.spec, 2) if backend.spec.num_speculative_tokens else None
    draw, engine = random.Random(seed), Engine(backend, proposer=proposer)
    # With blocks, prompts begin alike: only those of one adapter may share.
    begun = [[7] * 64, [7] * 40] if backend.spec.prefix_buckets else [[]]
    asked: dict[str, tuple[str | None, list[int]]] = {}
    running: dict[str, int] = {}
    found: dict[str, list[int]] = defaultdict(list)
    swaps = 0
    for turn in range(3 * turns):
        if turn < turns:
            place = draw.choice([0, *taken])
            longest = longest_prompt(backend.spec)
            length = draw.choice((1, 2, 7, 8, 9, longest))
            prompt = [*draw.choice(begun), *draw.choices(range(3, 90), k=length)][:longest]
            name = str(turn)
            asked[name] = taken.get(place), prompt
            running[name] = place
            engine.add(
                GenerationRequest(
                    name, prompt, max_new_tokens=draw.randint(1, 14), ignore_eos=True, adapter=place
                )
            )
        for place in taken:
            if draw.random() < 0.3 and place not in running.values():
                taken[place] = draw.choice([*ADAPTERS, None])
                busy = engine.has_work
                engine.set_adapter(place, case.adapter(taken[place]))
                swaps += busy
        for _ in range(draw.randint(1, 4) if turn < turns else 100):
            for output in engine.step().outputs if engine.has_work else ():
                assert output.error is None, output.error
                found[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    del running[output.request_id]
    assert not engine.has_work
    assert len(begun) == 1 or backend.cached([*begun[0], 3], 0), "no prefix is shared"
    assert swaps or backend.spec.num_slots == 1, "no adapter has changed while others ran"
    models: dict[str | None, Any] = {None: load_reference(case.folder)}
    changed = 0
    for name, (adapter, prompt) in asked.items():
        if adapter not in models:
            models[adapter] = peft.PeftModel.from_pretrained(
                load_reference(case.folder), case.adapter(adapter)
            )
        assert_greedy(models[adapter], prompt, found[name])
        changed += adapter is not None
    assert changed


CASES: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "a step ahead": (
        "llama3-rope",
        {},
        {"on_device_generation": DEVICE, "output_logits": True, "async_execution": True},
    ),
    # Biases; each core has one of two KV heads.
    "two cores": ("qwen2", {}, {"tp": 2}),
    # Four cores: a head is padded behind each KV head's three, and two cores have the same KV head.
    "padded heads": ("llama", SIX_HEADS, {"tp": 4, "shards": False}),
    "static batches": ("qwen3", {}, {"continuous": False, "prefill_buckets": (8, 47)}),
    "drafts": ("llama", {}, {"ngram_prompt_lookup_max": 2, "speculative_length": 3}),
    "shared prefixes": ("llama", {"max_position_embeddings": 384}, IN_BLOCKS),
    "one slot": ("llama-mha", {}, {"num_slots": 1}),
    "a window": ("mistral-window", {}, {}),
    "experts": ("mixtral", {}, {"tp": 2}),
}
"""Name → variant, settings of its model, and the plan."""


@pytest.mark.parametrize("name", CASES)
def test_each_row_gets_its_own_adapter_beside_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Random traffic for three places whose adapters change meanwhile."""
    log = tmp_path / "rig.log"
    monkeypatch.setenv("NXDI_RIG_LOG", str(log))
    variant, settings, more = CASES[name]
    case = make(tmp_path, variant, **settings)
    taken: dict[int, str | None] = {1: "wide", 2: "narrow", 3: None}
    plan = plan_of(case, ("wide", "narrow"), **more)
    with loaded(plan) as backend:
        assert (backend.spec.num_adapters, backend.spec.changes_adapters) == (3, True)
        weights = backend._model.application.traced_model.nxd_model.weights
        sizes = [tensor.numel() * 4 for key, tensor in weights[0].items() if ".lora_" in key]
        assert sum(sizes) == planned_bytes(case, plan, more.get("shards", True))
        for seed in range(2):
            run(backend, case, taken, seed)
    ran = {line["model"] for line in log_lines(log, "run")}
    assert ("speculation_model" in ran) == (name == "drafts")


def test_a_compiled_output_takes_any_adapters(tmp_path: Path) -> None:
    """Divided weights hold places without adapters; a start fills them."""
    case, output = make(tmp_path, "llama"), tmp_path / "output"
    output.mkdir()
    plan = plan_of(case, ("wide", "narrow"), tp=2)
    backends.compiler("nxdi").compile(replace(plan, presharded=True), output)
    weights = load_file(output / "weights" / "tp1_sharded_checkpoint.safetensors")
    matrices = [tensor for name, tensor in weights.items() if ".lora_" in name]
    assert matrices
    assert not any(tensor.any() for tensor in matrices)
    for names in ("wide", "narrow"), ("root",):
        taken: dict[int, str | None] = {1: None, 2: None, 3: None, **dict(enumerate(names, 1))}
        again = replace(plan_of(case, names, tp=2), kind="ranks")
        with loaded(again, output) as backend:
            run(backend, case, taken, len(names))


def test_an_adapter_that_overflows_spoils_no_row_beside_it(tmp_path: Path) -> None:
    """Its blocks, which NaN fills, are overwritten before a row of the base model gets them."""
    case = make(tmp_path, "llama", max_position_embeddings=384)
    matrices = case.folder.parent / "wide" / "adapter_model.safetensors"
    save_file(
        # Finite, but the product of both is not.
        {name: torch.full_like(one, 1e30) for name, one in load_file(matrices).items()},
        matrices,
    )
    plan = plan_of(case, ("wide", "narrow"), **IN_BLOCKS, on_device_generation={"do_sample": False})
    found: dict[str, list[int]] = defaultdict(list)
    model, prompts = load_reference(case.folder), {}
    with loaded(plan) as backend:
        engine = Engine(backend)

        def run_steps(most: int) -> None:
            while engine.has_work and most:
                most -= 1
                for output in engine.step().outputs:
                    assert output.error is None or output.request_id not in prompts
                    found[output.request_id] += output.token_ids

        def add(name: str, prompt: list[int], most: int, place: int) -> None:
            engine.add(
                GenerationRequest(name, prompt, max_new_tokens=most, ignore_eos=True, adapter=place)
            )

        add("before", [9] * 100, 4, 1)
        run_steps(100)
        for i in range(6):
            add(f"bad {i}", [20 + i, 22, 23, 24, 25, 26, 27], 5, 1)
            run_steps(1)
            prompts[f"base {i}"] = [token + i for token in range(11, 18)]
            add(f"base {i}", prompts[f"base {i}"], 12, 0)
            run_steps(100)
    for name, prompt in prompts.items():
        assert len(found[name]) == 12
        assert_greedy(model, prompt, found[name])

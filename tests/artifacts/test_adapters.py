"""LoRA adapters: what is read of their files, and what is refused before anything is loaded."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from djl_python_neuronx.artifacts import adapters
from djl_python_neuronx.errors import ArtifactError, ArtifactNotFoundError
from djl_python_neuronx.planning.lora import MODULES, adapter_values
from djl_python_neuronx.planning.model import ModelFacts
from tests.doubles.lora_adapters import TINY, path, shapes, write_adapter
from tests.effort import examples

FACTS = ModelFacts.from_config(
    json.loads((Path(__file__).parents[2] / "examples/tiny-llama/config.json").read_text())
)
PREFIX = "base_model.model.model."


def with_tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """A change of the tensors of a folder."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / adapters.WEIGHTS)
        change(tensors)
        save_file(tensors, folder / adapters.WEIGHTS)

    return apply


def with_fields(**fields: Any) -> Callable[[Path], object]:
    """A change of the configuration; a value of `...` removes its field."""

    def apply(folder: Path) -> None:
        config = {**json.loads((folder / adapters.CONFIG).read_text()), **fields}
        kept = {name: value for name, value in config.items() if value is not ...}
        (folder / adapters.CONFIG).write_text(json.dumps(kept))

    return apply


def renamed(old: str, new: str) -> Callable[[Path], object]:
    name = PREFIX + old
    return with_tensors(lambda tensors: tensors.update({new: tensors.pop(name)}))


def added(name: str, *shape: int, dtype: Any = np.float32) -> Callable[[Path], object]:
    return with_tensors(lambda tensors: tensors.update({name: np.ones(shape, dtype)}))


FIELDS = sorted({*adapters._READ, *adapters._SAME, "use_dora", "lora_bias"})
Q0 = "layers.0.self_attn.q_proj"
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (lambda folder: (folder / adapters.WEIGHTS).unlink(), "missing"),
    "cut off": (
        lambda folder: (folder / adapters.WEIGHTS).write_bytes(
            (folder / adapters.WEIGHTS).read_bytes()[:-9]
        ),
        "cut off",
    ),
    "no configuration": (lambda folder: (folder / adapters.CONFIG).unlink(), "adapter_config.json"),
    "no JSON": (lambda folder: (folder / adapters.CONFIG).write_text("{"), "not valid JSON"),
    "another method": (with_fields(peft_type="IA3"), "peft_type is 'IA3'"),
    "no method": (with_fields(peft_type=...), "peft_type is 'missing'"),
    **{
        f"{name}={value}": (
            with_fields(**{name: value}),
            f"{name} is {value!r}, which is not served",
        )
        for name, value in {
            "use_dora": True,
            "bias": "all",
            "lora_bias": True,
            "modules_to_save": ["lm_head"],
            "trainable_token_indices": [5],
            "layer_replication": [[0, 2]],
            "init_lora_weights": "pissa_niter_16",
            "target_parameters": ["experts.gate_up_proj"],
            "alora_invocation_tokens": [1],
            "a_field_of_a_later_version": {"a": 1},
        }.items()
    },
    "olora": (with_fields(init_lora_weights="olora"), "init_lora_weights"),
    "no targets": (with_fields(target_modules=...), "target_modules is empty or missing"),
    "null as targets": (with_fields(target_modules=None), "target_modules is empty or missing"),
    "fewer targets than tensors": (
        with_fields(target_modules=["q_proj"]),
        "has tensors of layers.0.self_attn.v_proj",
    ),
    "fewer layers than tensors": (
        with_fields(layers_to_transform=[0, 1, 2]),
        "has tensors of layers.3.self_attn.q_proj",
    ),
    "no rank": (with_fields(r=0), "r is 0"),
    "no alpha": (with_fields(lora_alpha=...), "lora_alpha is None"),
    "infinite alpha": (with_fields(lora_alpha=float("inf")), "lora_alpha is inf"),
    "a true rank": (with_fields(r=True), "r is True"),
    "a huge alpha": (with_fields(lora_alpha=10**400), "lora_alpha is '1000"),
    "an alpha that float32 lacks": (with_fields(lora_alpha=1e308), "lora_alpha is 1e+308"),
    "a huge pattern": (with_fields(alpha_pattern={"q_proj": 10**400}), "expected numbers above 0"),
    "nested layers": (with_fields(layers_to_transform=[[0]]), "layers_to_transform is [[0]]"),
    "a broken layer": (with_fields(layers_to_transform=1.5), "layers_to_transform is 1.5"),
    "nested targets": (with_fields(target_modules=[["q_proj"]]), "target_modules is [['q_proj']]"),
    "a pattern": (with_fields(alpha_pattern={".*q_proj$": 3}), "alpha_pattern has regular expr"),
    "a wrong pattern": (with_fields(rank_pattern={"q_proj": "3"}), "expected numbers above 0"),
    "another rank": (with_fields(r=3), "expected rank 3"),
    "another rank of a module": (with_fields(rank_pattern={"v_proj": 2}), "expected rank 2"),
    "no B": (with_tensors(lambda all_: all_.pop(f"{PREFIX}{Q0}.lora_B.weight")), "two matrices"),
    "a row": (added(f"{PREFIX}{Q0}.lora_A.weight", 4), "two matrices"),
    "integers": (
        added(f"{PREFIX}{Q0}.lora_A.weight", 4, 64, dtype=np.int32),
        "has the type I32",
    ),
    "a magnitude": (added(f"{PREFIX}{Q0}.lora_magnitude_vector", 4), "lora_magnitude_vector"),
    "an embedding": (added(f"{PREFIX}embed_tokens.lora_embedding_A", 4, 9), "lora_embedding_A"),
    "a saved module": (added("base_model.model.lm_head.weight", 4, 9), "lm_head.weight"),
    "a matrix twice": (added(f"model.{Q0}.lora_A.weight", 4, 64), "lora_A"),
    "nothing": (with_tensors(dict.clear), "no tensors"),
    "other outputs": (
        added(f"{PREFIX}{Q0}.lora_B.weight", 65, 4),
        "(65, 64) outputs and inputs, the model's has (64, 64)",
    ),
    "a layer too many": (
        renamed(f"{Q0}.lora_A.weight", f"{PREFIX}layers.4.self_attn.q_proj.lora_A.weight"),
        "two matrices",
    ),
    "a layer that is missing": (
        with_tensors(lambda all_: [all_.pop(f"{PREFIX}{Q0}.lora_{side}.weight") for side in "AB"]),
        f"lacks the tensors of {Q0}",
    ),
    "a layer of the listed ones that is missing": (
        with_fields(target_modules=["q_proj", "v_proj", "o_proj"]),
        "lacks the tensors of layers.0.self_attn.o_proj",
    ),
}


def checked(folder: Path, max_rank: int = 4, modules: tuple[str, ...] = ()) -> adapters.Adapter:
    adapter = adapters.read(folder, "sql")
    adapters.check(adapter, FACTS, max_rank, modules)
    return adapter


def test_what_is_not_served_is_refused_by_name(tmp_path: Path, subtests: Any) -> None:
    for i, (case, (change, problem)) in enumerate(REFUSED.items()):
        with subtests.test(case):
            folder = write_adapter(tmp_path / str(i))
            checked(folder)
            change(folder)
            with pytest.raises(ArtifactError) as caught:
                checked(folder)
            assert problem in str(caught.value)


_SCALARS = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    st.sampled_from(
        [0, 1, 4, 10**400, -(10**400), 1e308, float("nan"), "q_proj", "\ud800", "x" * 9999]
    ),
)
_ANYTHING = st.recursive(
    _SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("q_proj"), inner)
)


@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(), _ANYTHING, max_size=4), st.booleans())
@settings(
    max_examples=examples(200),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_whatever_a_configuration_has_it_is_taken_or_refused(
    tmp_path: Path, fields: dict[str, Any], pickled: bool
) -> None:
    folder = tmp_path / str(pickled)
    if not folder.exists():
        write_adapter(folder)
        if pickled:
            torch = pytest.importorskip("torch")
            (folder / adapters.WEIGHTS).unlink()
            torch.save({}, folder / adapters.PICKLES[0])
    config = json.loads((folder / adapters.CONFIG).read_text())
    try:
        (folder / adapters.CONFIG).write_text(json.dumps({**config, **fields}))
        adapter = checked(folder)
    except ArtifactError as error:
        str(error).encode()
    else:
        assert adapter.rank == 4
        assert all(np.isfinite(np.float32(adapter.scaling(layer))) for layer in adapter.layers)
    finally:
        (folder / adapters.CONFIG).write_text(json.dumps(config))


def test_unknown_layers_ranks_and_modules_are_refused(tmp_path: Path, subtests: Any) -> None:
    plain = write_adapter(tmp_path / "plain", rank=8)
    experts = replace(FACTS, num_experts=4)
    mlp = write_adapter(tmp_path / "mlp", modules=("up_proj",))
    deep = write_adapter(tmp_path / "deep", layers=(0, 4))
    cases: list[tuple[Path, ModelFacts, int, tuple[str, ...], str]] = [
        (plain, FACTS, 7, (), "its rank is 8, above max_lora_rank 7"),
        (
            plain,
            FACTS,
            8,
            ("q_proj", "o_proj"),
            "it changes v_proj; option.lora_target_modules has q_proj, o_proj",
        ),
        (deep, FACTS, 8, (), "layers.4.self_attn.q_proj"),
        (mlp, experts, 8, (), "layers.0.mlp.up_proj"),
        (plain, replace(FACTS, hidden_size=None), 8, (), "none whose sizes"),
        (plain, replace(FACTS, num_kv_heads=4), 8, (), "layers.0.self_attn.v_proj has (32, 64)"),
        (plain, replace(FACTS, num_layers=2**60), 8, (), "lacks the tensors of"),
    ]
    for folder, facts, rank, modules, problem in cases:
        with subtests.test(problem):
            adapter = adapters.read(folder, "sql")
            with pytest.raises(ArtifactError) as caught:
                adapters.check(adapter, facts, rank, modules)
            assert problem in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"use_rslora": True},
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": ["self_attn.q_proj", *(f"model.{path(i, 'v_proj')}" for i in range(4))]},
        {"init_lora_weights": "gaussian", "loftq_config": {}, "megatron_core": "megatron.core"},
        {"fan_in_fan_out": True, "eva_config": None, "init_lora_weights": False},
        {"layers_to_transform": [1, 2], "layers": (1, 2), "layers_pattern": "layers"},
        {"layers_to_transform": 0, "layers": (0,)},
        {"exclude_modules": [path(0, "q_proj")], "layers": (1, 2, 3)},
        {"rank": 2, "rank_pattern": {path(1, "q_proj"): 2, "q_proj": 3}, "ranks": {"q_proj": 3}},
    ],
    ids=str,
)
def test_what_peft_writes_of_two_matrices_for_a_layer_is_taken(tmp_path: Path, fields: Any) -> None:
    if "rank_pattern" in fields:
        fields["rank_pattern"].pop(path(1, "q_proj"))
    assert checked(write_adapter(tmp_path, **fields)).modules == ("q_proj", "v_proj")


def test_facts(tmp_path: Path) -> None:
    fields = {"ranks": {"v_proj": 9}, "rank_pattern": {"v_proj": 9}}
    adapter = checked(write_adapter(tmp_path, alpha_pattern={path(1, "v_proj"): 3}, **fields), 9)
    assert (adapter.rank, adapter.folder) == (9, tmp_path)
    assert len(adapter.layers) == 8
    found = [adapter.scaling(path(i, name)) for i in (0, 1) for name in ("q_proj", "v_proj")]
    assert found == [8 / 4, 8 / 9, 8 / 4, 3 / 9]
    adapter = checked(write_adapter(tmp_path, use_rslora=True))
    assert adapter.scaling(path(0, "q_proj")) == 8 / 2
    sizes = sum(4 * (one + two) for one, two in shapes(TINY).values())
    assert adapter_values(FACTS, 4, MODULES) == 4 * sizes
    assert adapter_values(FACTS, 4, ("v_proj",)) == 4 * 4 * (32 + 64)


def test_pickled_tensors_are_looked_at_and_not_loaded(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / adapters.WEIGHTS).rename(folder / adapters.PICKLES[0])

    class Program:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "run",)

    (folder / adapters.PICKLES[0]).write_bytes(pickle.dumps(Program()))
    with pytest.raises(ArtifactError, match=r"may hold code|not a whole file"):
        adapters.read(folder, "a")
    assert not (tmp_path / "run").exists()


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / adapters.CONFIG).rename(tmp_path / "elsewhere.json")
    (folder / adapters.CONFIG).symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ArtifactError, match="link out of the model's folder"):
        adapters.read(folder, "a")
    with pytest.raises(ArtifactNotFoundError):
        adapters.read(tmp_path / "nothing", "a")

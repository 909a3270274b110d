"""The matrices of an adapter on each core: together with the others they change a layer's outputs as PEFT does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest

pytest.importorskip("torch", reason="the nxdi backend needs torch")

import torch

from djl_python_neuronx.backends.nxdi.adapters import Places

SIZE, HIDDEN, INNER, MAX_RANK, RANK = 2, 12, 8, 4, 3
PLACES = 3
BLOCKS = {
    "q_proj": "self_attn.qkv_proj",
    "k_proj": "self_attn.qkv_proj",
    "o_proj": "self_attn.o_proj",
}


class Case(NamedTuple):
    """Heads of a model, and those of each core: their number, or None for one of zeros."""

    heads: int
    kv_heads: int
    on_cores: tuple[tuple[int | None, ...], ...]
    kv_on_cores: tuple[tuple[int | None, ...], ...]


# As the layouts in modules/attention/gqa.py draw them.
CASES = {
    "one core": Case(4, 2, ((0, 1, 2, 3),), ((0, 1),)),
    "even": Case(4, 2, ((0, 1), (2, 3)), ((0,), (1,))),
    "copied": Case(4, 1, ((0, 1), (2, 3)), ((0,), (0,))),
    "padded behind each KV head": Case(
        6, 2, ((0, 1), (2, None), (3, 4), (5, None)), ((0,), (0,), (1,), (1,))
    ),
    "padded at the end": Case(3, 3, ((0, 1), (2, None)), ((0, 1), (2, None))),
}


def columns(heads: tuple[int | None, ...], whole: torch.Tensor) -> torch.Tensor:
    """The columns of these heads; `whole`: those of all heads."""
    zeros = whole.new_zeros(len(whole), SIZE)
    parts = [zeros if one is None else whole[:, one * SIZE : (one + 1) * SIZE] for one in heads]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("shards", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_the_cores_together_have_an_adapter(name: str, shards: bool) -> None:
    case = CASES[name]
    cores = len(case.on_cores)
    outputs, keys = len(case.on_cores[0]) * SIZE, len(case.kv_on_cores[0]) * SIZE
    sides = {"q_proj": outputs, "k_proj": keys, "o_proj": outputs, "up_proj": INNER // cores}
    sides["down_proj"] = INNER // cores
    whole = HIDDEN // (cores if shards else 1)
    weights: list[dict[str, torch.Tensor]] = [{} for _ in range(cores)]
    names = {}
    for projection, side in sides.items():
        block = BLOCKS.get(projection, "mlp")
        names[projection] = f"layers.1.{block}.{projection}"
        of_rows = projection in {"o_proj", "down_proj"}
        one, two = (side, whole) if of_rows else (whole, side)
        for own in weights:
            own[f"{names[projection]}.lora_A.weight"] = torch.zeros(PLACES, one, MAX_RANK)
            own[f"{names[projection]}.lora_B.weight"] = torch.zeros(PLACES, MAX_RANK, two)
            own[f"{names[projection]}.lora_B.weight_active"] = torch.zeros(2, MAX_RANK, two)
    application = SimpleNamespace(
        traced_model=SimpleNamespace(nxd_model=SimpleNamespace(weights=weights)),
        config=SimpleNamespace(num_key_value_heads=case.kv_heads),
        neuron_config=SimpleNamespace(lora_config=SimpleNamespace(lora_shard_linear_layer=shards)),
    )
    queries, kv = case.heads * SIZE, case.kv_heads * SIZE
    shapes = {
        "self_attn.q_proj": (queries, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, queries),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    noise = torch.Generator().manual_seed(0)
    changes, matrices = {}, {}
    for path, (outs, ins) in shapes.items():
        one, two = (torch.randn(*shape, generator=noise) for shape in ((RANK, ins), (outs, RANK)))
        matrices[f"layers.1.{path}.lora_A"], matrices[f"layers.1.{path}.lora_B"] = one, two
        changes[path.rpartition(".")[2]] = (two @ one).T
    places = Places(application)
    places.write(2, {key: matrix * 7 for key, matrix in matrices.items()})
    places.write(2, matrices)

    def parts(projection: str, kind: str) -> list[torch.Tensor]:
        return [own[f"{names[projection]}.lora_{kind}.weight"][2] for own in weights]

    def gathered(projection: str, kind: str, rank: int) -> torch.Tensor:
        """The matrix that is whole on each core, divided in memory or not."""
        found = parts(projection, kind)
        return torch.cat(found, 0 if kind == "A" else 1) if shards else found[rank]

    for rank in range(cores):
        inner = slice(rank * INNER // cores, (rank + 1) * INNER // cores)
        wanted = {
            "q_proj": columns(case.on_cores[rank], changes["q_proj"]),
            "k_proj": columns(case.kv_on_cores[rank], changes["k_proj"]),
            "up_proj": changes["up_proj"][:, inner],
        }
        for projection, change in wanted.items():
            found = gathered(projection, "A", rank) @ parts(projection, "B")[rank]
            torch.testing.assert_close(found, change, msg=f"{projection} on core {rank}")
        of_rows = {
            "o_proj": columns(case.on_cores[rank], changes["o_proj"].T).T,
            "down_proj": changes["down_proj"][inner],
        }
        for projection, change in of_rows.items():
            found = parts(projection, "A")[rank] @ gathered(projection, "B", rank)
            torch.testing.assert_close(found, change, msg=f"{projection} on core {rank}")
        for key, weight in weights[rank].items():
            others = weight if key.endswith("_active") else weight[[0, 1]]
            assert not others.any(), key
    places.write(2, {})
    assert not any(weight.any() for own in weights for weight in own.values())

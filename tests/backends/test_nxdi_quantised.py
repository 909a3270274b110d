"""Weights and a cache in 8 bits with NxD Inference itself, against transformers with what the library stored."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from djl_python_neuronx.backends.base import Step  # noqa: E402
from djl_python_neuronx.backends.nxdi.model import QUANTISED  # noqa: E402
from djl_python_neuronx.loading import compiled as graphs  # noqa: E402
from djl_python_neuronx.loading import output_weights  # noqa: E402
from djl_python_neuronx.loading.partition import compile_model  # noqa: E402
from djl_python_neuronx.planning.machines import named  # noqa: E402
from tests.backends.nxdi_plans import (  # noqa: E402
    SETTINGS,
    compile_here,
    environ_of,
    loaded,
    obtained,
    save_variant,
)
from tests.backends.tnx_engine import assert_like_alone  # noqa: E402
from tests.doubles.device_driver import logits_of, make_rows  # noqa: E402
from tests.doubles.tiny_models import load_reference  # noqa: E402
from tests.server.running import TINY_LLAMA  # noqa: E402

pytestmark = pytest.mark.nxdi

TYPES = {"static_int8": torch.int8, "static_fp8": torch.float8_e4m3fn}


def by_definition(stored: Path, checkpoint: Path, into: Path) -> dict[str, torch.dtype]:
    """Write the model with the weights that are stored, those in 8 bits times their scales; returns their types."""
    shutil.copytree(checkpoint, into)
    tensors = load_file(into / "model.safetensors")
    files = [load_file(file) for file in stored.glob("*.safetensors")]
    quantised = {name: one for file in files for name, one in file.items()}
    types = {}
    for name in tensors:
        # The library leaves out the prefix of the layers.
        values = quantised[name.removeprefix("model.")]
        types[name] = values.dtype
        if values.dtype in TYPES.values():
            scale = quantised[name.removeprefix("model.").removesuffix("weight") + "scale"]
            tensors[name] = values.float() * scale
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    return types


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("name", "quantize", "degree", "more"),
    [
        ("llama", "static_int8", 1, {}),
        ("llama", "static_int8", 2, {"quantization_type": "per_tensor_symmetric"}),
        ("llama", "static_int8", 2, {"fuse_qkv": "true", "modules_to_not_convert": "lm_head,mlp"}),
        ("llama", "static_fp8", 2, {"kv_cache_quantize": "fp8"}),
        ("tied", "static_fp8", 1, {}),
        ("tied", "static_int8", 2, {"quantization_type": "per_tensor_symmetric"}),
        ("mistral-window", "static_int8", 2, {"rolling_batch_strategy": "naive_rolling_batch"}),
        ("qwen3", "static_fp8", 1, {"async_execution": "true", "on_device_generation": "true"}),
    ],
)
def test_each_token_is_that_of_the_stored_weights(
    name: str, quantize: str, degree: int, more: dict[str, str], tmp_path: Path
) -> None:
    variant = "llama" if name == "tied" else name
    folder = save_variant(variant, tmp_path / "model", tie_word_embeddings=name == "tied")
    before = content(folder)
    options = {"quantize": quantize, "tensor_parallel_degree": str(degree), **more}
    compiled = obtained(folder, tmp_path, **options)
    assert content(folder) == before
    assert compiled.folder is not None
    types = by_definition(compiled.folder / QUANTISED, folder, tmp_path / "plain")
    kept = {"embed_tokens", "norm", "bias"}
    if more.get("quantization_type") != "per_tensor_symmetric" or name == "tied":
        kept.add("lm_head")
    kept |= {"mlp"} if "mlp" in more.get("modules_to_not_convert", "") else set()
    for key, dtype in types.items():
        assert (dtype == torch.float32) == any(part in key for part in kept), key
        assert dtype in {torch.float32, TYPES[quantize]}
    with loaded(compiled.plan, compiled.folder) as backend:
        if "kv_cache_quantize" not in more:
            reference = load_reference(tmp_path / "plain")
            assert assert_like_alone(backend, reference, 3, num_requests=8) > 50
            return
        assert errors(backend, load_reference(tmp_path / "plain"))[0] < CAST
    again = obtained(folder, tmp_path, **options)
    assert (again.folder, again.cache_hit) == (compiled.folder, True)


def test_an_output_has_the_weights_of_the_cores_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_variant("llama", tmp_path / "model")
    (folder / "tokenizer.json").write_bytes((TINY_LLAMA / "tokenizer.json").read_bytes())
    options = {"quantize": "static_int8", "tensor_parallel_degree": "2"}
    compiled = obtained(folder, tmp_path, **options)
    assert compiled.folder is not None
    by_definition(compiled.folder / QUANTISED, folder, tmp_path / "plain")
    monkeypatch.setattr(output_weights, "compile_guarded", compile_here)
    monkeypatch.setattr(graphs, "compile_guarded", compile_here)
    environ = environ_of(tmp_path)
    machine = named("trn1.32xlarge")
    settings = {**SETTINGS, **options}
    out = tmp_path / "out"
    compile_model(str(folder), str(out), environ=environ, overrides=settings, machine=machine)
    assert not list(out.rglob(QUANTISED))
    for rank in range(2):
        weights = load_file(
            out / "compiled" / "weights" / f"tp{rank}_sharded_checkpoint.safetensors"
        )
        assert torch.int8 in {one.dtype for one in weights.values()}
    shutil.rmtree(folder)
    shutil.rmtree(tmp_path / "cache")
    served = obtained(out, tmp_path / "elsewhere", tensor_parallel_degree="2")
    assert served.folder == out / "compiled"
    with loaded(served.plan, served.folder) as backend:
        reference = load_reference(tmp_path / "plain")
        assert assert_like_alone(backend, reference, 3, num_requests=8) > 50


class CastCache(transformers.DynamicCache):
    """Keys and values of earlier calls are cast to fp8 and back; those of a call are as they were computed."""

    def update(self, keys: Any, values: Any, layer: int, *more: Any, **others: Any) -> Any:
        whole = super().update(keys, values, layer, *more, **others)
        length = whole[0].shape[2] - keys.shape[2]

        def cast(states: Any) -> Any:
            before = states[:, :, :length].to(torch.float8_e4m3fn).to(states.dtype)
            return torch.cat([before, states[:, :, length:]], 2)

        return tuple(map(cast, whole))


CAST = 0.02
"""Mean error of a logit: a key that lies between two numbers of fp8 may be rounded either way."""


@torch.no_grad()
def errors(backend: Any, model: Any) -> tuple[float, float]:
    """Mean differences of the logits of decodes from the model with a cache in fp8, and from the model without."""
    draw = random.Random(1)
    prompts = {slot: draw.choices(range(3, 90), k=5 + 3 * slot) for slot in range(4)}
    for slot, prompt in prompts.items():
        assert backend.acquire(slot, prompt, 0) == 0
        backend.run(Step(prefill=make_rows({slot: prompt})))
    following = {slot: draw.choices(range(3, 90), k=16) for slot in prompts}
    found: list[Any] = [[], []]
    caches: dict[int, Any] = {slot: (CastCache(), transformers.DynamicCache()) for slot in prompts}
    for slot, pair in caches.items():
        for cache in pair:
            model(torch.tensor([prompts[slot]]), past_key_values=cache)
    for i in range(16):
        starts = {slot: len(prompt) + i for slot, prompt in prompts.items()}
        rows = make_rows({slot: following[slot][i : i + 1] for slot in prompts}, starts)
        logits = torch.from_numpy(logits_of(backend, Step(decode=rows)))[:, 0]
        for slot, pair in caches.items():
            for cache, differences in zip(pair, found, strict=True):
                ids = torch.tensor([following[slot][i : i + 1]])
                wanted = model(ids, past_key_values=cache).logits[0, -1]
                differences.append((logits[slot] - wanted).abs().mean().item())
    backend.release(list(prompts))
    return tuple(sum(one) / len(one) for one in found)  # type: ignore[return-value]


@pytest.mark.parametrize("degree", [1, 2])
def test_keys_and_values_are_cast_to_fp8(degree: int, tmp_path: Path) -> None:
    folder = save_variant("llama", tmp_path / "model")
    compiled = obtained(
        folder, tmp_path, kv_cache_quantize="fp8", tensor_parallel_degree=str(degree)
    )
    with loaded(compiled.plan, compiled.folder) as backend:
        cast, plain = errors(backend, load_reference(folder))
    assert cast < CAST
    assert plain > 3 * cast

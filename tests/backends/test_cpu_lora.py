"""LoRA on the CPU backend, against the definition: a model whose weights have the adapter merged into them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the cpu backend needs torch")
pytest.importorskip(
    "transformers", "4.57", reason="the cpu backend needs transformers 4.57 or newer"
)

from djl_python_neuronx import backends  # noqa: E402
from djl_python_neuronx.backends.base import Backend, Step  # noqa: E402
from djl_python_neuronx.backends.plan import LoadPlan, LoraPlan  # noqa: E402
from djl_python_neuronx.engine.core import Engine  # noqa: E402
from djl_python_neuronx.errors import ArtifactError, BackendError  # noqa: E402
from djl_python_neuronx.planning.lora import MODULES  # noqa: E402
from djl_python_neuronx.types import EngineRequest  # noqa: E402
from tests.backends.tnx_engine import assert_greedy  # noqa: E402
from tests.doubles.device_driver import logits_of, make_rows  # noqa: E402
from tests.doubles.lora_adapters import deltas, write_adapter  # noqa: E402
from tests.doubles.tiny_models import load_reference, save_tiny_model  # noqa: E402

MODEL = Path(__file__).parents[2] / "examples" / "tiny-llama"
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"rank": 4},
    "every module": {"rank": 8, "modules": MODULES, "seed": 1},
    "rslora": {"rank": 3, "seed": 2, "use_rslora": True},
    "other alphas": {"rank": 4, "seed": 3, "alpha_pattern": {"v_proj": 20, "layers.9.q_proj": 1}},
    "other ranks": {"rank": 4, "seed": 4, "rank_pattern": {"v_proj": 2}, "ranks": {"v_proj": 2}},
    "some layers": {"rank": 2, "seed": 5, "layers": (1, 3), "layers_to_transform": [1, 3]},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, **KINDS[name]) for name in KINDS}


@cache
def merged(folder: Path | None) -> Any:
    """The model with an adapter merged into its weights."""
    model = load_reference(MODEL)
    with torch.inference_mode():
        for layer, delta in (deltas(folder) if folder else {}).items():
            model.model.get_submodule(layer).weight += torch.from_numpy(delta)
    return model


def load(*adapters: Path, model: Path = MODEL, max_loras: int = 8, **more: Any) -> Backend:
    lora = LoraPlan(max_loras, 16, MODULES, adapters=adapters)
    return backends.get("cpu").load(LoadPlan(model, 4, 128, (16, 64), lora=lora, **more))


def last_logits(backend: Backend, prompts: Mapping[int, list[int]], places: list[int]) -> Any:
    """float32[B, V] behind prompts that are prefilled together; all slots are free again then."""
    for slot, prompt in prompts.items():
        backend.acquire(slot, prompt, places[slot])
    rows = make_rows(prompts)
    rows.adapters = np.array(places, np.int32)
    values = logits_of(backend, Step(prefill=rows))[:, 0]
    backend.release([*prompts])
    return values


def expected_logits(folder: Path | None, prompt: list[int]) -> Any:
    with torch.inference_mode():
        return merged(folder)(torch.tensor([prompt])).logits[0, -1].numpy()


def test_each_row_of_a_batch_has_its_own_adapter_or_none(folders: Mapping[str, Path]) -> None:
    backend, kinds = load(*folders.values()), [None, *folders.values()]
    prompts = {slot: [5 + slot, *range(9, 20 + slot)] for slot in range(4)}
    for places in ([0, 1, 2, 3], [4, 0, 5, 6], [2, 2, 2, 2], [6, 0, 6, 0], [0, 0, 0, 0]):
        found = last_logits(backend, prompts, places)
        for slot, place in enumerate(places):
            want = expected_logits(kinds[place], prompts[slot])
            np.testing.assert_allclose(found[slot], want, atol=2e-4, err_msg=f"place {place}")
    base = expected_logits(None, prompts[0])
    for name, folder in folders.items():
        changed = np.abs(expected_logits(folder, prompts[0]) - base).max()
        assert changed > 0.05, f"the test's adapter {name} changes next to nothing"


def test_the_output_is_pefts_own(folders: Mapping[str, Path]) -> None:
    peft = pytest.importorskip("peft", reason="its own output is compared")
    backend, prompt = load(*folders.values()), [*range(9, 30)]
    for place, folder in enumerate(folders.values(), 1):
        model = peft.PeftModel.from_pretrained(load_reference(MODEL), folder).eval()
        with torch.inference_mode():
            own = model(torch.tensor([prompt])).logits[0, -1].numpy()
        found = last_logits(backend, {0: prompt}, [place])[0]
        np.testing.assert_allclose(found, own, atol=2e-4, err_msg=folder.name)


@pytest.mark.parametrize("more", [{}, {"mixed_steps": True}], ids=["plain", "mixed steps"])
def test_texts_of_a_mixed_load_are_those_of_each_alone(
    folders: Mapping[str, Path], more: dict[str, Any]
) -> None:
    """Random prompts with common beginnings, also of other adapters: no adapter's keys serve another."""
    engine = Engine(load(*folders.values(), prefix_caching=True, **more))
    kinds, chosen = [None, *folders.values()], random.Random(7)
    requests = []
    for number in range(40):
        prompt = [*range(9, 9 + chosen.randint(9, 40)), chosen.randint(5, 390)]
        place = chosen.randint(0, len(folders))
        requests.append(
            EngineRequest(str(number), prompt, max_new_tokens=6, ignore_eos=True, adapter=place)
        )
    texts: dict[str, list[int]] = {one.request_id: [] for one in requests}
    cached = 0
    waiting = requests.copy()
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), chosen.randint(0, 2))):
            engine.add(waiting.pop())
        result = engine.step()
        cached += sum(result.info.cached.values()) if result.info else 0
        for output in result.outputs:
            assert output.error is None
            texts[output.request_id] += output.token_ids
    assert cached > 100
    for one in requests:
        assert_greedy(merged(kinds[one.adapter]), one.prompt_ids, texts[one.request_id])


def test_an_adapter_that_is_changed_leaves_no_trace(folders: Mapping[str, Path]) -> None:
    plain, full = folders["plain"], folders["every module"]
    backend, prompt = load(plain, prefix_caching=True), [*range(9, 30)]
    for place, folder in ((1, plain), (1, full), (1, plain), (2, full), (1, None), (1, full)):
        if (place, folder) != (1, plain) or backend.cached([*prompt, 5], 1):
            backend.set_adapter(place, folder)
            assert backend.cached([*prompt, 5], place) == 0
        found = last_logits(backend, {0: prompt}, [place])[0]
        np.testing.assert_allclose(found, expected_logits(folder, prompt), atol=2e-4)
        assert backend.cached([*prompt, 5], place) == len(prompt)


def test_what_cannot_be_loaded_is_refused_and_leaves_the_place_empty(
    folders: Mapping[str, Path], tmp_path: Path
) -> None:
    plain = folders["plain"]
    backend, prompt = load(plain, max_loras=2), [*range(9, 30)]
    for place in (0, 3, -1):
        with pytest.raises(BackendError, match="does not exist"):
            backend.set_adapter(place, plain)
    wide = write_adapter(tmp_path / "wide")
    config = json.loads((wide / "adapter_config.json").read_text())
    (wide / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    cases: dict[Path, str] = {tmp_path / "missing": "missing", wide: "use_dora"}
    cases[write_adapter(tmp_path / "deep", layers=(0, 4))] = "layers.4"
    for folder, problem in cases.items():
        backend.set_adapter(1, plain)
        with pytest.raises(ArtifactError, match=problem):
            backend.set_adapter(1, folder)
        found = last_logits(backend, {0: prompt}, [1])[0]
        np.testing.assert_allclose(found, expected_logits(None, prompt), atol=2e-4)


def test_a_model_without_such_layers_serves_none(
    folders: Mapping[str, Path], tmp_path: Path
) -> None:
    model = save_tiny_model("gpt2", tmp_path / "gpt2", n_positions=128)
    with pytest.raises(ArtifactError, match=r"layers\.0\.self_attn\.q_proj"):
        load(folders["plain"], model=model)

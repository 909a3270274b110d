"""NxD Inference with a draft model in its graphs: tokens are those that there are without it."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the nxdi backend needs torch")

from djl_python_neuronx.backends.base import Backend, Step, StepOutput, Want  # noqa: E402
from djl_python_neuronx.engine.core import Engine  # noqa: E402
from djl_python_neuronx.errors import ArtifactMismatchError  # noqa: E402
from djl_python_neuronx.loading import compiled as graphs  # noqa: E402
from djl_python_neuronx.loading.compiled import obtain  # noqa: E402
from djl_python_neuronx.loading.partition import compile_model  # noqa: E402
from djl_python_neuronx.loading.prepare import prepare_or_raise  # noqa: E402
from djl_python_neuronx.planning.machines import named  # noqa: E402
from djl_python_neuronx.types import GenerationRequest  # noqa: E402
from tests.backends.nxdi_plans import (  # noqa: E402
    SETTINGS,
    compile_here,
    loaded,
    obtained,
    save_variant,
)
from tests.backends.tnx_engine import assert_like_alone  # noqa: E402
from tests.doubles.eagle_models import EagleReference, learn, save_eagle, turn  # noqa: E402
from tests.doubles.tiny_models import load_reference, save_tiny_model  # noqa: E402
from tests.doubles.toy_tokenizer import TOKENIZER  # noqa: E402

pytestmark = pytest.mark.nxdi

DRAFTS = 3
EAGLE3 = {"sequence_parallel": "true", "neuron_cc_pipeline_factor": "1"}


class Counting:
    """Counts the tokens of a backend's decodes."""

    def __init__(self, backend: Backend) -> None:
        self._run, self.tokens = backend.run, list[int]()
        backend.run = self.run  # type: ignore[method-assign]

    def run(self, step: Step) -> StepOutput:
        output = self._run(step)
        if step.decode is not None:
            assert output.ids is not None
            self.tokens += np.count_nonzero(output.ids >= 0, axis=1).tolist()
        return output


def forget_draft_group() -> None:
    """A process has one draft group, of one size, for good: a model's. Tests load several."""
    state = importlib.import_module("neuronx_distributed.parallel_layers.parallel_state")
    for name in ("GROUP", "GROUP_SPMD", "GROUP_SIZE"):
        setattr(state, f"_SPECULATIVE_DRAFT_{name}", None)


def drafting(folder: Path, store: Path, draft: Path, **settings: str) -> Any:
    forget_draft_group()
    names = {"speculative_draft_model": str(draft), "speculative_length": str(DRAFTS)}
    return obtained(folder, store, **names, **settings)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("the same", {}),
        ("another", {"tensor_parallel_degree": "2"}),
    ],
    ids=["good", "bad"],
)
def test_any_traffic_gives_what_transformers_gives(
    tmp_path: Path, kind: str, settings: dict[str, str]
) -> None:
    folder = draft = save_variant("llama", tmp_path / "model")
    if kind == "another":
        draft = save_tiny_model(
            "llama", tmp_path / "draft", vocab_size=96, hidden_size=16, num_hidden_layers=1
        )
    made = drafting(folder, tmp_path, draft, **settings)
    with loaded(made.plan, made.folder) as backend:
        assert (backend.spec.num_fused_drafts, backend.spec.outputs) == (DRAFTS, Want.TOKENS)
        counting = Counting(backend)
        assert assert_like_alone(backend, load_reference(folder), seed=1, num_requests=20) > 200
        mean = np.mean(counting.tokens)
        assert mean > 3 if kind == "the same" else mean < 2


def eagle_pair(place: Path, kind: str) -> tuple[Path, Path]:
    """A model and a draft of which some tokens stand."""
    layers, size = (7, 0.05) if kind == "eagle3" else (2, 0.12)
    folder = save_variant("llama", place / "model", num_hidden_layers=layers)
    turn(folder / "model.safetensors", size)
    draft = save_eagle(place / "draft", folder, kind=kind, num_tokens=90)
    learn(draft / "model.safetensors", folder / "model.safetensors", 0.1)
    return folder, draft


@pytest.fixture(scope="module", params=["eagle", "eagle3"])
def eagle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model, its draft, and the backend with both."""
    kind, place = request.param, tmp_path_factory.mktemp(request.param)
    folder, draft = eagle_pair(place, kind)
    degree = {"tensor_parallel_degree": "2", **EAGLE3} if kind == "eagle3" else {}
    made = drafting(folder, place, draft, draft_model_kind=kind, **degree)
    with loaded(made.plan, made.folder) as backend:
        yield backend, load_reference(folder), draft


def test_eagle_gives_what_transformers_gives(eagle: Any) -> None:
    backend, model, _ = eagle
    counting = Counting(backend)
    assert assert_like_alone(backend, model, seed=2, num_requests=16) > 200
    assert 1.3 < np.mean(counting.tokens) < 3.8


def test_eagle_drafts_what_its_paper_defines(eagle: Any) -> None:
    """Of prompts as long as a graph or one token, too: each step accepts what drafts by the definition get."""
    backend, model, draft = eagle
    reference = EagleReference(draft, model)
    for length in (1, 2, 7, 8, 9, 19, 20):
        prompt = [(5 * length + 3 * i) % 90 + 3 for i in range(length)]
        counting, engine = Counting(backend), Engine(backend)
        engine.add(GenerationRequest("a", prompt, max_new_tokens=24, ignore_eos=True))
        tokens: list[int] = []
        while engine.has_work:
            tokens += [token for one in engine.step().outputs for token in one.token_ids]
        wanted, at = [], 1
        while at < len(tokens):
            proposed = reference.propose([*prompt, *tokens[:at]], DRAFTS)
            right = [a == b for a, b in zip(proposed, tokens[at:], strict=False)]
            right += [False] * (DRAFTS + 1 - len(right))
            wanted.append(right.index(False) + 1)
            at += wanted[-1]
        # The last step may accept more than there were to generate.
        assert counting.tokens[:-1] == wanted[:-1], length


def write_tokenizer(folder: Path) -> None:
    """Write the tokenizer that a compile needs, of a word for each id."""
    words = {f"t{i}": i for i in range(96)}
    tokenizers = importlib.import_module("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_compiled_output_has_the_draft_and_refuses_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its divided weights hold both models: neither checkpoint is needed."""
    folder, draft = eagle_pair(tmp_path, "eagle")
    write_tokenizer(folder)
    environ = {**os.environ, "NEURON_COMPILE_CACHE_URL": str(tmp_path / "cache")}
    settings = {
        **SETTINGS,
        "speculative_draft_model": str(draft),
        "draft_model_kind": "eagle",
        "speculative_length": str(DRAFTS),
    }
    monkeypatch.setattr(graphs, "compile_guarded", compile_here)
    machine, output = named("trn1.32xlarge"), tmp_path / "output"
    forget_draft_group()
    compile_model(str(folder), str(output), environ=environ, overrides=settings, machine=machine)
    reference = load_reference(folder)
    shutil.rmtree(folder)
    shutil.rmtree(draft)
    shutil.rmtree(tmp_path / "cache")
    found = prepare_or_raise(None, output, environ=environ, machine=machine)
    made = obtain(found, lambda: TOKENIZER)
    assert (made.plan.kind, made.plan.fused_draft) == ("ranks", output / "draft")
    forget_draft_group()
    with loaded(made.plan, made.folder) as backend:
        assert assert_like_alone(backend, reference, seed=3) > 100
    other = save_eagle(tmp_path / "other", output, kind="eagle", seed=9)
    with pytest.raises(ArtifactMismatchError, match="draft_digest"):
        prepare_or_raise(
            None,
            output,
            environ=environ,
            machine=machine,
            overrides={"speculative_draft_model": str(other)},
        )

"""Programs that were compiled before: loading them compiles nothing, and other programs are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the tnx backend needs torch")

from djl_python_neuronx.backends import tnx
from djl_python_neuronx.errors import ArtifactError, BackendError
from tests.backends.tnx_engine import reference
from tests.backends.tnx_plans import VARIANTS, cached_in, tnx_plan
from tests.doubles.device_driver import Driver, assert_same
from tests.doubles.tiny_models import load_reference, save_tiny_model

pytestmark = pytest.mark.tnx

AGAIN = """
import sys
from pathlib import Path
from djl_python_neuronx.backends import tnx
from tests.backends.tnx_plans import cached_in, tnx_plan
from tests.doubles.device_driver import Driver
model, cache, compiled = map(Path, sys.argv[1:4])
backend = tnx.load(cached_in(cache, tnx_plan(model, **eval(sys.argv[4]))), compiled)
print(Driver(backend).alone([5, 6, 7], 12).tokens)
"""


def compilations(cache: Path) -> int:
    return len(list(cache.rglob("MODULE_*")))


@pytest.mark.parametrize("way", [{}, {"block_size": 8}], ids=["rows", "blocks"])
def test_what_was_compiled_is_loaded_by_a_new_process_without_compiling(
    tmp_path: Path, way: dict[str, int]
) -> None:
    model, compiled = save_tiny_model("llama", tmp_path / "model"), tmp_path / "compiled"
    compiled.mkdir()
    first, second = tmp_path / "first", tmp_path / "second"
    plan = tnx_plan(model, **way)
    tnx.compile(cached_in(first, plan), compiled)
    num_graphs = compilations(first)
    # Two buckets of prompts and two of tokens; of each prompt bucket one for each number of blocks.
    assert num_graphs == len(list(compiled.glob("*.neff"))) == 4
    command = [sys.executable, "-c", AGAIN, str(model), str(second), str(compiled), repr(way)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    assert compilations(second) == 0
    backend = tnx.load(cached_in(first, plan))
    assert run.stdout.splitlines()[-1] == str(Driver(backend).alone([5, 6, 7], 12).tokens)
    assert compilations(first) == num_graphs  # the cache had them all


@pytest.mark.parametrize("name", ["opt", "gpt_bigcode"])
def test_programs_of_another_plan_are_refused(tmp_path: Path, name: str) -> None:
    model, compiled = save_tiny_model(name, tmp_path, **VARIANTS[name][1]), tmp_path / "c"
    compiled.mkdir()
    tnx.compile(tnx_plan(model, continuous=False), compiled)
    tnx.load(tnx_plan(model, continuous=False), compiled).close()
    other = tnx_plan(model, prefill_buckets=(16, 20), continuous=False)
    with pytest.raises(ArtifactError, match="Compile it again"):
        tnx.load(other, compiled)


@pytest.mark.parametrize("name", ["gpt_neox", "gptj"])
def test_gpt_neox_says_that_its_programs_cannot_be_stored(tmp_path: Path, name: str) -> None:
    save_tiny_model(name, tmp_path, **VARIANTS[name][1])
    with pytest.raises(BackendError, match="compiled_graph_path"):
        tnx.compile(tnx_plan(tmp_path, continuous=False), tmp_path)


def test_missing_cores_are_told(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path, num_attention_heads=16, num_key_value_heads=16)
    with pytest.raises(BackendError, match="tensor_parallel_degree"):
        tnx.load(tnx_plan(tmp_path, tp=16))


def test_compilers_version_is_told() -> None:
    assert tnx.compiler_version()[0].isdigit()


def test_the_compilers_version_takes_no_import_of_the_library() -> None:
    program = (
        "import sys; from djl_python_neuronx import backends; backends.get('tnx').compiler_version();"
        "sys.exit(bool({'torch', 'transformers_neuronx'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_flags_reach_the_compiler(tmp_path: Path) -> None:
    model, cache = save_tiny_model("llama", tmp_path / "model"), tmp_path / "cache"
    plan = tnx_plan(model, 1, 16, (16,), (16,))
    arguments = replace(
        plan.arguments,
        compiler_flags=("-O1",),
        environment={"NEURON_COMPILE_CACHE_URL": str(cache)},
    )
    tnx.load(replace(plan, arguments=arguments)).close()
    written = [path.read_text() for path in cache.rglob("compile_flags.json")]
    assert written
    assert all("-O1" in text for text in written)
    assert "-O1" not in os.environ.get("NEURON_CC_FLAGS", "")


@pytest.mark.parametrize("tp", [1, 2])
def test_weights_are_stored_as_the_cores_take_them(tmp_path: Path, tp: int) -> None:
    model, compiled = save_tiny_model("llama", tmp_path / "model"), tmp_path / "compiled"
    compiled.mkdir()
    plan = replace(tnx_plan(model, tp=tp, on_device_embedding=True), presharded=True)
    tnx.compile(plan, compiled)
    wanted = reference(load_reference(model), [5, 6, 7], 12)
    (model / "model.safetensors").unlink()
    backend = tnx.load(plan, compiled)
    assert_same(Driver(backend).alone([5, 6, 7], 12), wanted)
    backend.close()

"""The folder as registry, the plan, and the count of cores: nothing here needs torch."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from djl_python_neuronx import backends
from djl_python_neuronx.backends import BackendModule, CompilingModule
from djl_python_neuronx.backends.env import count_cores
from djl_python_neuronx.backends.plan import LoraPlan
from djl_python_neuronx.backends.tnx.model import CLASSES
from djl_python_neuronx.config.step_times import StepTimes
from djl_python_neuronx.errors import BackendUnavailableError, IncompatibleOptionsError
from djl_python_neuronx.planning.arguments import LibraryArguments
from djl_python_neuronx.planning.nxdi.contrib import Code
from djl_python_neuronx.planning.tnx.capabilities import TNX

PLAN = backends.LoadPlan(Path("/nowhere"), 2, 64, (16, 32))


FUNCTIONS = {"load"}
COMPILING = FUNCTIONS | {"compile", "uncompilable", "compiler_version"}


def test_every_package_is_a_backend_and_every_module_beside_them_is_none() -> None:
    folder = Path(backends.__file__).parent
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    assert set(backends.names()) == packages == {"cpu", "nxdi", "sim", "tnx"}
    loads = [path.name for path in folder.glob("*.py") if "\ndef load(" in path.read_text()]
    assert not loads


@pytest.mark.parametrize("name", backends.names())
def test_a_backend_has_the_functions_of_its_protocol(name: str) -> None:
    """mypy cannot tell what a module that is imported by name has."""
    module = backends.get(name)
    needed = FUNCTIONS if backends.compiler(name) is None else COMPILING
    protocol = BackendModule if backends.compiler(name) is None else CompilingModule
    for function in needed:
        wanted = inspect.signature(getattr(protocol, function)).parameters
        assert [*inspect.signature(getattr(module, function)).parameters] == [*wanted][1:]
    assert backends.compiler("cpu") is None
    assert backends.compiler("nxdi") is not None
    assert backends.compiler("tnx") is not None


def test_there_is_a_class_for_each_architecture_that_planning_lets_through() -> None:
    assert CLASSES.keys() == TNX.keys()


def test_an_unknown_name_is_refused_with_what_there_is() -> None:
    with pytest.raises(BackendUnavailableError, match=r"'cpuu' .* cpu.*did you mean 'cpu'"):
        backends.get("cpuu").load(PLAN)


def test_a_missing_package_is_named_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = f"{backends.__name__}.cpu"
    for name in [*sys.modules]:
        if name.startswith(package) or name.split(".")[0] == "torch":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(backends, "cpu", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BackendUnavailableError, match=r"torch.*pip install .*\[cpu\]") as caught:
        backends.get("cpu").load(PLAN)
    assert caught.value.status == 503


def test_importing_every_backend_imports_no_torch() -> None:
    program = (
        "import sys, djl_python_neuronx.backends as b; [b.get(name) for name in b.names()];"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("at_start", [True, False])
def test_a_new_python_is_customised_as_this_one(tmp_path: Path, at_start: bool) -> None:
    """Packages may be importable only after that; but a folder that came later, as a model's may, has no say."""
    (tmp_path / "sitecustomize.py").write_text("print('customised', flush=True)")
    (tmp_path / "tool.py").write_text("def main(): print('runs')")
    program = (
        f"import subprocess, sys; sys.path.append({str(tmp_path)!r}); from djl_python_neuronx import backends;"
        "sys.exit(subprocess.run(backends.python_command('tool')).returncode)"
    )
    path = os.pathsep.join([str(tmp_path)] * at_start + [*filter(None, sys.path)])
    environ = {**os.environ, "PYTHONPATH": path}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["customised"] * 2 * at_start + ["runs"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_slots": 0}, "num_slots is 0"),
        ({"prefill_buckets": ()}, "prefill_buckets are empty"),
        ({"prefill_buckets": (32, 16)}, r"prefill_buckets are \(32, 16\); .* 1 to 64"),
        ({"prefill_buckets": (16, 128)}, r"prefill_buckets are \(16, 128\); .* 1 to 64"),
        ({"token_buckets": (16, 32)}, "token_buckets end with 32; expected .* 64"),
        ({"mixed_steps": True, "num_slots": 32}, "32 tokens .* which the decodes of 32 slots"),
        ({"token_buckets": (0, 64)}, r"token_buckets are \(0, 64\)"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(changes: dict[str, Any], named: str) -> None:
    fields = {"num_slots": 2, "max_model_len": 64, "prefill_buckets": (16, 32), **changes}
    with pytest.raises(IncompatibleOptionsError, match=named):
        backends.LoadPlan(Path("/nowhere"), **fields)


def test_a_plan_crosses_to_another_process_as_it_is() -> None:
    arguments = LibraryArguments(
        constructor={"n_positions": [32, 64], "amp": "bf16", "unroll": None},
        neuron_config={"on_device_generation": {"top_p": 1.0, "dynamic": True, "top_k": [1, 2]}},
        calls={"to_neuron": {}, "enable_speculative_decoder": {"batch_sizes": [2]}},
        compiler_flags=("-O1", "--a=b c"),
        environment={"NEURON_COMPILE_CACHE_URL": "/ä b"},
    )
    plan = backends.LoadPlan(
        Path("/ä b"), 2, 64, (16, 32), (32, 64), "bfloat16", "presharded", 4, 8, True,
        Code(Path("/code"), "ab", "Class", foreign_graphs=True), "main", 3,
        StepTimes(prefill={64: 1.5}, decode={64: 2.0}), frozenset({1, 2}), 3, True, True, "global_top_k",
        LoraPlan(2, 8, ("q_proj",), True, (Path("/sql"),)), 6, True, arguments, Path("/draft"),
    )  # fmt: skip
    plans = TypeAdapter(backends.LoadPlan)
    default = backends.LoadPlan(Path(), 1, 1, (1,))
    for entry in fields(plan):
        assert getattr(plan, entry.name) != getattr(default, entry.name), "nothing is left out here"
    for one in (plan, default):
        crossed = plans.validate_json(plans.dump_json(one))
        assert crossed == one
        assert repr(crossed) == repr(one)
        assert [*crossed.arguments.calls] == [*one.arguments.calls]


def kernel_files(root: Path, threads_per_core: int, quota: str | None) -> Path:
    """A /sys with the process's CPUs grouped into cores of so many threads."""
    usable = sorted(os.sched_getaffinity(0))
    for i, cpu in enumerate(usable):
        folder = root / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        first = usable[i - i % threads_per_core]
        (folder / "thread_siblings_list").write_text(f"{first}-{first + threads_per_core - 1}\n")
    if quota is not None:
        (root / "fs/cgroup").mkdir(parents=True)
        (root / "fs/cgroup/cpu.max").write_text(quota)
    return root


def test_cores_are_counted_within_affinity_and_quota(tmp_path: Path) -> None:
    usable = len(os.sched_getaffinity(0))
    assert count_cores(tmp_path) == usable
    assert count_cores(kernel_files(tmp_path / "whole", 1, "max 100000\n")) == usable
    assert count_cores(kernel_files(tmp_path / "pairs", 2, None)) == -(-usable // 2)
    assert count_cores(kernel_files(tmp_path / "quota", 1, "150000 100000\n")) == 1
    assert count_cores(kernel_files(tmp_path / "small", 1, "20000 100000\n")) == 1
    assert count_cores() >= 1

"""Verification on the libraries: sound models are right, and planted faults are named by their places."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the reference needs torch")

from djl_python_neuronx import backends, cli
from djl_python_neuronx.backends import LoadPlan
from djl_python_neuronx.backends.base import Backend
from djl_python_neuronx.verify.judge import judge
from djl_python_neuronx.verify.scenarios import run_scenarios
from tests.backends.nxdi_plans import loaded, nxdi_plan, save_variant
from tests.backends.tnx_plans import tnx_plan
from tests.doubles import neuron_machine
from tests.server.running import TINY_LLAMA
from tests.verify.planted import FAULTS, assert_named, planted_in

WAYS: Mapping[str, Mapping[str, Any]] = {
    "nxdi": {},
    "nxdi bf16": {"dtype": "bfloat16"},
    "nxdi static": {"continuous": False},
    "nxdi few": {"token_generation_batches": [1, 2]},
    "nxdi tp2": {"tp": 2},
    "nxdi greedy": {"on_device_generation": {"do_sample": False}},
    "nxdi dynamic": {"on_device_generation": {"dynamic": True}},
    "nxdi mixed": {"on_device_generation": {"dynamic": True}, "output_logits": True},
    "nxdi fixed": {"on_device_generation": {"do_sample": True, "top_k": 8, "temperature": 0.8}},
    "tnx": {},
    "tnx bf16": {"dtype": "bfloat16"},
    "tnx static": {"continuous": False},
    "tnx tp2": {"tp": 2},
    "tnx chunks": {"block_size": 8},
    "tnx drafts": {"num_speculative_tokens": 2},
    "tnx dynamic": {"on_device_generation": {"dynamic": True, "do_sample": True, "top_k": 16}},
}
PLACES = {
    "nxdi greedy": set(),
    "nxdi dynamic": {"device"},
    "nxdi mixed": {"device", "host"},
    "nxdi fixed": {"device"},
    "tnx dynamic": {"device"},
}
"""Where draws are made, if not on the host."""
EVERY_CHANGE = {"nxdi bf16", "nxdi mixed", "tnx bf16", "tnx dynamic"}
"""The others are run at night."""


def marked(name: str, *more: Any) -> Any:
    library = getattr(pytest.mark, name.partition(" ")[0])
    marks = [library, *([] if name in EVERY_CHANGE else [pytest.mark.nightly])]
    return pytest.param(name, *more, marks=marks, id="-".join([name, *map(str, more)]))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_variant("llama", tmp_path_factory.mktemp("llama"))


def plan_of(name: str, folder: Path) -> LoadPlan:
    given = {**WAYS[name]}
    facts = {"dtype": given.get("dtype", "float32"), "eos_ids": frozenset({1})}
    if name.startswith("nxdi"):
        return nxdi_plan(folder, 4, 48, (8, 20), (24, 48), facts=facts, **given)
    return replace(tnx_plan(folder, 4, 48, (8, 20), (24, 48), **given), **facts)


@contextmanager
def running(plan: LoadPlan, name: str) -> Iterator[Backend]:
    if name.startswith("nxdi"):
        with loaded(plan) as backend:
            yield backend
    else:
        with closing(backends.get("tnx").load(plan)) as backend:
            yield backend


@pytest.mark.parametrize("name", [marked(name) for name in WAYS])
def test_a_sound_model_is_right(name: str, checkpoint: Path) -> None:
    plan = plan_of(name, checkpoint)
    with running(plan, name) as backend:
        record = run_scenarios(backend, quick=True)
    found = judge(record, plan)
    assert found["findings"] == []
    places = {draws["place"] for draws in found["draws"]}
    assert places == PLACES.get(name, {"host"})
    placed = [seen for seen in record.seen if seen.graph is not None]
    assert {seen.slot for seen in placed} == {0, 1, 2, 3}
    assert max(seen.position for seen in placed) == 47


PLANTED = (
    "a wrong rope base",
    "a swapped head",
    "a stale line of the cache",
    "a bucket off by one",
    "a sampler that ignores top_p",
)
IN = ("nxdi bf16", "tnx bf16", "nxdi", "tnx")


@pytest.mark.parametrize(
    ("name", "planted"), [marked(name, planted) for name in IN for planted in PLANTED]
)
def test_a_planted_fault_is_named_by_its_place(
    name: str, planted: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, fault = plan_of(name, checkpoint), FAULTS[planted]
    found = planted_in(plan, fault, tmp_path, monkeypatch, lambda made: running(made, name))
    assert_named(found, fault)


COMMAND = {
    "nxdi": ("context_length_estimate=64", "output_logits=true", "on_device_generation=true"),
    "tnx": ("context_length_estimate=64",),
}


@pytest.fixture
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores, and an empty compile store."""
    machine = f"{neuron_machine.FOLDER / 'bin'}:{os.environ['PATH']}"
    for variable, value in {
        "PATH": machine,
        "NEURON_RT_NUM_CORES": "2",
        "NEURON_COMPILE_CACHE_URL": str(tmp_path / "store"),
        "DJL_CACHE_DIR": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(variable, value)


@pytest.mark.nightly
@pytest.mark.usefixtures("_machine")
@pytest.mark.parametrize("name", [marked(name) for name in COMMAND])
def test_the_command_compiles_loads_and_reports(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In processes of their own, with the library's files in the compile store; the second run compiles nothing."""
    options = (
        *COMMAND[name],
        f"model_loader={name}",
        "tensor_parallel_degree=2",
        "n_positions=128",
        "max_rolling_batch_size=2",
        "dtype=bf16",
    )
    flags = [word for option in options for word in ("-o", option)]
    arguments = [
        "verify",
        str(TINY_LLAMA),
        *flags,
        "--layers",
        "2",
        "--quick",
        "--output",
        str(tmp_path),
    ]
    for compiles in (True, False):
        status = cli.main([*arguments, "--log-level", "info"])
        shown = capsys.readouterr()
        assert status == 0, shown.out + shown.err
        assert ("compile_needed" in shown.err) == compiles
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["compared"].startswith(f"the first 2 of 4 layers alone, by {name} on 2 Neuron")
    assert report["machine"]["cores"] == 2
    assert not [*(tmp_path / "cache").rglob("verify-*")]


@pytest.mark.nightly
@pytest.mark.nxdi
@pytest.mark.usefixtures("_machine")
def test_an_output_with_cut_weights_is_compared_with_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, options = str(tmp_path / "output"), ["tensor_parallel_degree=2", "n_positions=64"]
    more = ["model_loader=nxdi", "max_rolling_batch_size=2", "context_length_estimate=32"]
    flags = [word for option in (*options, *more, "dtype=fp32") for word in ("-o", option)]
    assert cli.main(["compile", str(TINY_LLAMA), *flags, "--output", output]) == 0
    assert cli.main(["verify", output, "--quick"]) == 1
    assert "name the model that was compiled in --checkpoint" in capsys.readouterr().err
    arguments = ["verify", output, "--quick", "--checkpoint", str(TINY_LLAMA)]
    status = cli.main(arguments)
    shown = capsys.readouterr()
    assert status == 0, shown.out + shown.err
    assert "all layers, cut weights, by nxdi on 2 NeuronCores" in shown.out

"""Loading from end to end: where models come from, what is compiled when, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from djl_python_neuronx.errors import (
    ArtifactMismatchError,
    ArtifactNotFoundError,
    BackendError,
    CompileError,
    InvalidOptionError,
)
from djl_python_neuronx.loading.compile_process import CompileProgress
from djl_python_neuronx.loading.compiled import obtain
from djl_python_neuronx.loading.mismatch import has_own_graphs
from djl_python_neuronx.loading.partition import compile_model
from djl_python_neuronx.loading.prepare import LoadProgress, prepare_or_raise
from djl_python_neuronx.planning import backend_choice as loaders
from djl_python_neuronx.planning import machines, plan
from djl_python_neuronx.planning.backend_choice import Library
from tests.artifacts.s3_proxy import wait_until
from tests.artifacts.test_guard import alive
from tests.neuron_machine import GRAPHS, TINY, load

pytest_plugins = ["tests.neuron_fixtures"]

ROOT = Path(__file__).parents[2]


def compiled(machine, options, /, **more):
    """Everything up to the graphs."""
    environ = machine.environ
    prepared = prepare_or_raise(None, TINY, environ=environ, overrides=options, **more)
    return obtain(prepared, prepared.load_tokenizer)


def test_a_second_start_compiles_nothing(machine, options):
    seen: list[CompileProgress] = []
    assert load(machine, options, progress=LoadProgress(compile=seen.append)) == (0, 1)
    assert machine.compiled() == GRAPHS
    assert (seen[0].num_done, seen[-1].num_done, seen[-1].num_graphs) == (0, 3, 3)
    assert load(machine, options) == (1, 0)
    assert machine.compiled() == GRAPHS


def test_a_changed_option_names_itself_and_may_be_allowed(machine, options):
    compiled(machine, options)
    other = {**options, "max_rolling_batch_size": "4"}
    with pytest.raises(ArtifactMismatchError) as caught:
        compiled(machine, other)
    assert caught.value.differences == {"max_rolling_batch_size": (2, 4)}
    assert machine.compiled() == GRAPHS
    # What no graph depends on is no difference.
    compiled(machine, {**options, "max_waiting": "7", "predict_timeout": "9"})
    assert machine.compiled() == GRAPHS
    compiled(machine, {**other, "on_mismatch": "recompile"})
    assert machine.compiled() == 2 * GRAPHS


def test_a_model_that_drafted_for_another_one_is_served_alone(machine, options, tmp_path):
    """Nobody asked for the lengths and slots that it was compiled for then."""
    draft = shutil.copytree(TINY, tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "of_its_own": True}))
    speculating = {**options, "speculative_draft_model": str(draft), "speculative_length": "3"}
    assert load(machine, speculating) == (0, 2)
    assert load(machine, {**options, "max_rolling_batch_size": "4"}, draft) == (0, 1)
    with pytest.raises(ArtifactMismatchError) as caught:
        load(machine, {**options, "max_rolling_batch_size": "3"}, draft)
    assert caught.value.differences == {"max_rolling_batch_size": (4, 3)}
    # What fits is shared.
    assert load(machine, options, draft) == (1, 0)
    other = {**speculating, "max_rolling_batch_size": "4", "on_mismatch": "recompile"}
    assert load(machine, other) == (1, 1)


def test_another_compiler_names_itself(machine, options):
    compiled(machine, options)
    machine.set(TOYC_VERSION="2.0")
    with pytest.raises(ArtifactMismatchError) as caught:
        compiled(machine, options)
    assert caught.value.differences == {"compiler_version": ("1.0", "2.0")}


def test_other_flags_of_the_compiler_name_themselves(machine, options):
    machine.set(NEURON_CC_FLAGS="-O1 --model-type transformer")
    compiled(machine, options)
    # Where the compiler keeps its cache is no difference.
    machine.set(
        NEURON_CC_FLAGS=f"-O1 --cache_dir={options['compiled_graph_path']} --model-type transformer"
    )
    compiled(machine, options)
    assert machine.compiled() == GRAPHS
    machine.set(NEURON_CC_FLAGS="-O2")
    with pytest.raises(ArtifactMismatchError) as caught:
        compiled(machine, options)
    before = ["-O1", "--model-type", "transformer"]
    assert caught.value.differences == {"cc_flags": (before, ["-O2"])}
    compiled(machine, {**options, "on_mismatch": "recompile"})
    assert machine.compiled() == 2 * GRAPHS


def test_flags_that_no_shell_takes_are_refused(machine, options):
    machine.set(NEURON_CC_FLAGS="-O1 '--oops")
    with pytest.raises(InvalidOptionError, match="NEURON_CC_FLAGS"):
        compiled(machine, options)


def test_another_version_of_the_library_names_itself(machine, options, monkeypatch):
    def install(version):
        library = Library("transformers-neuronx", version, "installed")
        monkeypatch.setattr(
            plan, "libraries", lambda: {**loaders.libraries(), library.name: library}
        )

    install("0.12")
    compiled(machine, options)
    install("0.13")
    with pytest.raises(ArtifactMismatchError) as caught:
        compiled(machine, options)
    assert caught.value.differences == {"library_version": ("0.12", "0.13")}


def test_a_machine_of_another_kind_names_itself(machine, options):
    compiled(machine, options, machine=machines.named("inf2.xlarge"))
    with pytest.raises(ArtifactMismatchError) as caught:
        compiled(machine, options, machine=machines.named("trn2.48xlarge"))
    assert caught.value.differences["target"] == ("inf2", "trn2")


def test_a_machine_that_is_named_has_the_cores_that_variables_leave(machine, options):
    environ = {**machine.environ, "NEURON_RT_VISIBLE_CORES": "4-7", "NEURON_RT_NUM_CORES": ""}
    for named in (None, machines.named("inf2.48xlarge")):
        prepared = prepare_or_raise(None, TINY, environ=environ, overrides=options, machine=named)
        assert prepared.machine.limited_by == "NEURON_RT_VISIBLE_CORES=4-7"
    assert prepared.machine.visible_cores == 4


def test_a_limit_that_is_not_understood_is_told(machine, options, caplog):
    environ = {**machine.environ, "NEURON_RT_VISIBLE_CORES": "zero", "NEURON_RT_NUM_CORES": ""}
    prepared = prepare_or_raise(
        None, TINY, environ=environ, overrides=options, machine=machines.named("inf2.48xlarge")
    )
    assert prepared.machine.limited_by is None
    assert "NEURON_RT_VISIBLE_CORES=zero is ignored" in caplog.text


@pytest.mark.parametrize("named", [None, machines.named("inf2.48xlarge")], ids=["here", "named"])
def test_cores_that_there_are_not_are_a_warning_of_a_start(machine, options, caplog, named):
    environ = {**machine.environ, "NEURON_RT_VISIBLE_CORES": "90-91", "NEURON_RT_NUM_CORES": ""}
    prepare_or_raise(None, TINY, environ=environ, overrides=options, machine=named)
    (record,) = (record for record in caplog.records if "has no core 91" in record.getMessage())
    assert record.levelname == "WARNING"


def test_what_is_assumed_of_the_machine_is_a_warning_of_a_start(machine, options, caplog):
    assumed = replace(machines.named("inf2.48xlarge"), assumed="neuron-ls does not list the cores")
    prepare_or_raise(None, TINY, environ=machine.environ, overrides=options, machine=assumed)
    (record,) = (record for record in caplog.records if assumed.assumed in record.getMessage())
    assert record.levelname == "WARNING"


def test_a_draft_model_that_is_not_there_keeps_its_error():
    drafts = {"speculative_draft_model": "/nope/x", "speculative_length": "2"}
    with pytest.raises(ArtifactNotFoundError, match=r"^the draft model: .*/nope/x") as caught:
        prepare_or_raise(None, TINY, environ={}, overrides=drafts)
    assert caught.value.code == "artifact_not_found"


def test_what_the_compiler_says_arrives(machine, options):
    machine.set(TOYC_FAIL="the compiler found no tiling; see its log")
    with pytest.raises(CompileError, match="no tiling"):
        compiled(machine, options)


def test_graphs_that_cannot_be_kept_are_left_to_the_load(machine, options, tmp_path):
    machine.set(TOYC_UNCOMPILABLE="this class has no save()")
    assert load(machine, options) == (0, 0)
    with pytest.raises(BackendError, match=r"no save\(\)"):
        compile_model(str(TINY), str(tmp_path / "out"), environ=machine.environ, overrides=options)
    assert machine.compiled() == []


KILLED = """
import sys
from pathlib import Path
from tests import neuron_machine
neuron_machine.place_backend()
from djl_python_neuronx.service import Service
Service.load(None, Path(sys.argv[1]), overrides=dict(pair.split("=", 1) for pair in sys.argv[2:]))
"""


def test_a_killed_compile_ends_whole_and_resumes(machine, options):
    machine.set(TOYC_STOP_AT=GRAPHS[1])
    pairs = [f"{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-c", KILLED, str(TINY), *pairs]
    temporary = machine.folder / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(command, cwd=ROOT, env={**machine.environ, "TMPDIR": str(temporary)})
    wait_until(lambda: process.poll() is not None or machine.compiled() == GRAPHS[:2], "two graphs")
    assert process.poll() is None
    pid = machine.compiler_pid()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: not alive(pid), "the compiler's end with its starter")
    assert not list(temporary.iterdir())
    machine.set(TOYC_STOP_AT="")
    compiled(machine, options)
    assert machine.compiled() == [*GRAPHS[:2], *GRAPHS[1:]]


def test_saved_graphs_are_used_as_they_are(machine, options, tmp_path):
    folder = compiled(machine, options).folder
    loose = tmp_path / "loose"
    loose.mkdir()
    for name in GRAPHS:
        (loose / name).write_bytes((folder / name).read_bytes())
    machine.set(SERVING_DOWNLOAD_DIR=tmp_path / "elsewhere")
    found = compiled(machine, {**options, "compiled_graph_path": str(loose)})
    assert found.folder == loose
    assert machine.compiled() == GRAPHS


def test_graphs_that_another_program_compiled_are_told_from_ours(machine, options, tmp_path):
    def obtained(model, **more):
        settings = {**options, **more}
        prepared = prepare_or_raise(None, model, environ=machine.environ, overrides=settings)
        found = obtain(prepared, prepared.load_tokenizer)
        assert machine.compiled() == GRAPHS
        return found

    ours = obtained(TINY)
    output, elsewhere = tmp_path / "output", tmp_path / "elsewhere"
    compile_model(str(TINY), str(output), environ=machine.environ, overrides=options)
    shutil.copytree(TINY, elsewhere)
    shutil.copytree(ours.folder, elsewhere / "compiled")
    (elsewhere / "compiled" / "manifest.json").unlink()
    (elsewhere / "manifest.json").write_text('{"name": "of another program"}')
    named, taken_over = {"compiled_graph_path": str(elsewhere / "compiled")}, tmp_path / "taken"
    both = {**options, **named}
    compile_model(str(TINY), str(taken_over), environ=machine.environ, overrides=both)
    for found, folder, foreign in (
        (ours, ours.folder, False),
        (obtained(output), output / "compiled", False),
        (obtained(TINY, compiled_graph_path=str(ours.folder)), ours.folder, False),
        (obtained(elsewhere), elsewhere / "compiled", True),
        (obtained(TINY, **named), elsewhere / "compiled", True),
        (obtained(taken_over), taken_over / "compiled", True),
    ):
        assert (found.folder, has_own_graphs(found.folder)) == (folder, not foreign)


def test_a_backend_that_compiles_nothing_asks_for_no_flags():
    environ = {"NEURON_CC_FLAGS": "'x"}
    prepared = prepare_or_raise(None, TINY, environ=environ, overrides={"model_loader": "cpu"})
    found = obtain(prepared, prepared.load_tokenizer)
    assert (found.folder, dict(found.facts.graph_options)) == (None, {})


def test_a_folder_that_is_not_there_is_named_by_the_argument(tmp_path):
    with pytest.raises(ArtifactNotFoundError, match="Correct the model argument"):
        prepare_or_raise(None, tmp_path / "nothere", environ={})

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
from safetensors.numpy import load_file, save_file

from tests.processes import engines

pytest.importorskip("torch", reason="torch is not installed")

from djl_python_neuronx.engine.streams import BlockingQueue
from djl_python_neuronx.errors import (
    ArtifactMismatchError,
    ArtifactNotFoundError,
    BackendError,
    BackendUnavailableError,
    CompileError,
    ConfigError,
    InvalidOptionError,
)
from djl_python_neuronx.loading import compiled as compiled_module
from djl_python_neuronx.loading.check import check_all
from djl_python_neuronx.loading.compile_process import CompileProgress
from djl_python_neuronx.loading.compiled import obtain
from djl_python_neuronx.loading.mismatch import has_own_graphs
from djl_python_neuronx.loading.partition import compile_model
from djl_python_neuronx.loading.prepare import prepare_or_raise
from djl_python_neuronx.loading.situation import LoadProgress, Purpose
from djl_python_neuronx.planning import backend_choice as loaders
from djl_python_neuronx.planning import machines, plan
from djl_python_neuronx.planning.backend_choice import Library
from djl_python_neuronx.planning.machines import DeviceInfo
from djl_python_neuronx.service import Service, _files
from tests.doubles.neuron_machine import GRAPHS, TINY, load
from tests.doubles.s3_proxy import wait_until
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend
from tests.doubles.toy_service import toy_service
from tests.processes import alive

pytest_plugins = ["tests.doubles.neuron_fixtures"]

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


def needed(caplog):
    """The one warning of a start that a compile is needed."""
    records = [record for record in caplog.records if record.levelname == "WARNING"]
    (text,) = (text for record in records if "compile_needed" in (text := record.getMessage()))
    caplog.clear()
    return text


def test_a_changed_option_compiles_anew_and_names_itself(machine, options, caplog):
    compiled(machine, options)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    # What no graph depends on is no difference.
    compiled(machine, {**options, "max_waiting": "7", "predict_timeout": "9"})
    assert machine.compiled() == GRAPHS
    compiled(machine, {**options, "max_rolling_batch_size": "4"})
    text = needed(caplog)
    assert "max_rolling_batch_size: compiled 2, wanted 4 (command line)" in text
    assert "To use these set max_rolling_batch_size=2. A start compiles, about 1 min" in text
    assert machine.compiled() == 2 * GRAPHS
    compiled(machine, {**options, "max_rolling_batch_size": "2"})
    assert machine.compiled() == 2 * GRAPHS


def test_a_start_that_must_not_compile_says_what_differs(machine, options, tmp_path):
    forbid = {**options, "compilation": "forbid"}
    with pytest.raises(ArtifactNotFoundError, match="has no graphs of this model") as caught:
        compiled(machine, forbid)
    assert "compilation=forbid (command line)" in str(caught.value)
    compiled(machine, options)
    compiled(machine, forbid)
    with pytest.raises(ArtifactNotFoundError, match="max_rolling_batch_size: compiled 2, wanted 4"):
        compiled(machine, {**forbid, "max_rolling_batch_size": "4"})
    (folder,) = (path.parent for path in tmp_path.glob("cache/djl-neuronx/*/manifest.json"))
    (folder / GRAPHS[0]).write_text("damaged")
    with pytest.raises(ArtifactNotFoundError, match=f"changed {GRAPHS[0]}"):
        compiled(machine, forbid)
    assert machine.compiled() == GRAPHS
    # An explicit compile compiles, and what it writes is served and keeps the option.
    out = tmp_path / "out"
    compile_model(str(TINY), str(out), environ=machine.environ, overrides=forbid)
    assert machine.compiled() == 2 * GRAPHS
    assert "option.compilation=forbid" in (out / "serving.properties").read_text()
    assert load(machine, {}, out) == (0, 0)
    # Without a store its graphs are the compiler's own, which nobody can look up.
    machine.set(TOYC_UNCOMPILABLE="this class has no save()")
    with pytest.raises(ArtifactNotFoundError, match=r"no save\(\)"):
        compiled(machine, forbid)


def test_a_draft_model_that_must_not_be_compiled(machine, options, tmp_path):
    draft = shutil.copytree(TINY, tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "of_its_own": True}))
    compiled(machine, options)
    drafts = {"speculative_draft_model": str(draft), "compilation": "forbid"}
    prepared = prepare_or_raise(
        None, TINY, environ=machine.environ, overrides={**options, **drafts}
    )
    with pytest.raises(ArtifactNotFoundError, match="compilation=forbid"):
        obtain(prepared.draft, prepared.load_tokenizer)


def test_a_damaged_compile_is_made_again_with_a_warning(machine, options, caplog):
    folder = compiled(machine, options).folder
    (folder / GRAPHS[0]).unlink()
    compiled(machine, options)
    assert f"are damaged: the files in {folder}" in needed(caplog)
    assert machine.compiled() == 2 * GRAPHS
    compiled(machine, options)
    assert machine.compiled() == 2 * GRAPHS


@pytest.mark.parametrize("name", ["compiled_graph_path", "draft_model_compiled_path"])
def test_a_folder_that_is_not_there_is_refused(machine, options, tmp_path, name):
    missing = {name: str(tmp_path / "typing-error")}
    drafts = {"speculative_draft_model": str(TINY), "speculative_length": "2"}
    with pytest.raises(ConfigError, match=rf"^{name}=.*typing-error \(command line\): .*mkdir -p"):
        compiled(machine, {**options, **drafts, **missing})
    # Ignored without a use.
    unused = {"model_loader": "cpu"} if name == "compiled_graph_path" else {}
    compiled(machine, {**options, **missing, **unused})


def test_a_folder_that_a_variable_names_is_made_with_a_warning(machine, options, tmp_path, caplog):
    """As the compiler makes its own cache, whose variable it is."""
    machine.set(NEURON_COMPILE_CACHE_URL=tmp_path / "new")
    unset = {name: value for name, value in options.items() if name != "compiled_graph_path"}
    assert compiled(machine, unset).folder.is_relative_to(tmp_path / "new")
    (record,) = (
        record for record in caplog.records if "compile_store place" in record.getMessage()
    )
    assert record.levelname == "WARNING"
    assert "origin='environment NEURON_COMPILE_CACHE_URL' new=True" in record.getMessage()


def test_a_relative_folder_is_beside_the_model_for_its_draft_too(machine, options, tmp_path):
    model = shutil.copytree(TINY, tmp_path / "model")
    (model / "cache").mkdir()
    drafts = {"speculative_draft_model": str(TINY), "speculative_length": "2"}
    assert load(machine, {**options, **drafts, "compiled_graph_path": "cache"}, model) == (0, 2)
    assert len(list(model.glob("cache/djl-neuronx/*/manifest.json"))) == 2


def test_a_model_that_drafted_for_another_one_is_served_alone(machine, options, tmp_path, caplog):
    """Nobody asked for the lengths and slots that it was compiled for then."""
    draft = shutil.copytree(TINY, tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "of_its_own": True}))
    speculating = {**options, "speculative_draft_model": str(draft), "speculative_length": "3"}
    assert load(machine, speculating) == (0, 2)
    assert load(machine, {**options, "max_rolling_batch_size": "4"}, draft) == (0, 1)
    caplog.clear()
    assert load(machine, {**options, "max_rolling_batch_size": "3"}, draft) == (0, 1)
    assert "max_rolling_batch_size: compiled 4, wanted 3 (command line). " in needed(caplog)
    # What fits is shared.
    assert load(machine, options, draft) == (1, 0)
    assert load(machine, {**speculating, "max_rolling_batch_size": "4"}) == (1, 1)


def test_another_compiler_names_itself(machine, options, caplog):
    compiled(machine, options)
    machine.set(TOYC_VERSION="2.0")
    compiled(machine, options)
    assert ": compiler_version: compiled '1.0', wanted '2.0'. A start" in needed(caplog)
    # No option brings back what another compiler has made.
    machine.set(TOYC_VERSION="3.0")
    compiled(machine, {**options, "max_rolling_batch_size": "4"})
    text = needed(caplog)
    assert "max_rolling_batch_size: compiled 2, wanted 4" in text
    assert "To use these set" not in text


def test_other_flags_of_the_compiler_name_themselves(machine, options, caplog):
    machine.set(NEURON_CC_FLAGS="-O1 --model-type transformer")
    compiled(machine, options)
    # Where the compiler keeps its cache is no difference.
    machine.set(
        NEURON_CC_FLAGS=f"-O1 --cache_dir={options['compiled_graph_path']} --model-type transformer"
    )
    compiled(machine, options)
    assert machine.compiled() == GRAPHS
    machine.set(NEURON_CC_FLAGS="-O2")
    compiled(machine, options)
    before = ["-O1", "--model-type", "transformer"]
    assert f": cc_flags: compiled {before}, wanted ['-O2']. A start" in needed(caplog)
    assert machine.compiled() == 2 * GRAPHS


def test_flags_that_no_shell_takes_are_refused(machine, options):
    machine.set(NEURON_CC_FLAGS="-O1 '--oops")
    with pytest.raises(InvalidOptionError, match="NEURON_CC_FLAGS"):
        compiled(machine, options)


def test_another_version_of_the_library_names_itself(machine, options, monkeypatch, caplog):
    def install(version):
        library = Library("transformers-neuronx", version, "installed")
        monkeypatch.setattr(
            plan, "libraries", lambda: {**loaders.libraries(), library.name: library}
        )

    install("0.12")
    compiled(machine, options)
    install("0.13")
    compiled(machine, options)
    assert ": library_version: compiled '0.12', wanted '0.13'. A start" in needed(caplog)
    versions = {"transformers": "4.57.6", "torch-neuronx": "2.9"}
    monkeypatch.setattr(
        plan, "installed_versions", lambda names: {name: versions[name] for name in names}
    )
    compiled(machine, options)
    changed = needed(caplog)
    assert "torch_neuronx_version: compiled (absent), wanted '2.9'" in changed
    assert "transformers_version: compiled" in changed


def test_graphs_that_the_user_names_are_held_to_their_settings(
    machine, options, tmp_path, monkeypatch
):
    folder = compiled(machine, options).folder
    named = {**options, "compiled_graph_path": str(folder), "max_rolling_batch_size": "4"}
    with pytest.raises(ArtifactMismatchError) as caught:
        compiled(machine, named)
    assert caught.value.differences == {"max_rolling_batch_size": (2, 4)}
    monkeypatch.setattr(compiled_module, "NEURON_CACHE", tmp_path / "own")
    again = compiled(machine, {**named, "on_mismatch": "recompile"}).folder
    assert again.is_relative_to(tmp_path / "own")
    assert (machine.compiled(), (folder / "manifest.json").exists()) == (2 * GRAPHS, True)


def test_what_was_compiled_before_versions_were_facts_is_served(machine, options, tmp_path):
    """As a model, and as graphs that `compiled_graph_path` names."""
    out = tmp_path / "out"
    compile_model(str(TINY), str(out), environ=machine.environ, overrides=options)
    graphs = compiled(machine, options).folder
    for folder in (out, graphs):
        path = folder / "manifest.json"
        content = json.loads(path.read_text())
        assert content["facts"]["graph_options"].pop("transformers_version")
        path.unlink()  # the output's graphs are links to the store's
        path.write_text(json.dumps(content))
    assert compiled(machine, {**options, "compiled_graph_path": str(graphs)}).folder == graphs
    assert load(machine, {}, out) == (0, 0)
    assert machine.compiled() == GRAPHS


def test_cores_that_nobody_counts_are_a_warning(machine, options, caplog):
    unknown = DeviceInfo(None, 1, 0, 0, 4, "1 device, no neuron-ls")
    prepare_or_raise(None, TINY, environ=machine.environ, overrides=options, machine=unknown)
    assert "the number of NeuronCores is not known" in caplog.text


def test_without_a_device_nothing_is_compiled_for_a_start_here(
    machine, options, monkeypatch, caplog
):
    nothing = replace(machines.named("inf2.xlarge"), neuron_devices=0, neuron_cores=0)
    monkeypatch.setattr(machines, "detect", lambda environ: replace(nothing, visible_cores=0))
    with pytest.raises(BackendUnavailableError, match="no Neuron device is visible here"):
        compiled(machine, {**options, "tensor_parallel_degree": "8"})
    assert machine.compiled() == []
    compiled(machine, options, purpose=Purpose.COMPILE)
    assert "cores and memory are not checked" in caplog.text


def test_a_machine_of_another_kind_names_itself(machine, options, caplog):
    compiled(machine, options, machine=machines.named("inf2.xlarge"))
    compiled(machine, options, machine=machines.named("trn2.48xlarge"))
    assert "target: compiled 'inf2', wanted 'trn2'" in needed(caplog)


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


def test_copies_load_the_same_graphs_each_on_its_own_cores(machine, options):
    """Also with a limit for all of them together, which must not contradict."""
    environ = {**machine.environ, "NEURON_RT_NUM_CORES": "2"}
    others = engines(os.getpid())  # of services that serve several tests
    service = Service.load(None, TINY, environ=environ, overrides={**options, "replicas": "max"})
    try:
        assert machine.compiled() == GRAPHS
        assert [copy.cores for copy in service.loop.copies] == ["0", "1"]
        assert [copy.alive for copy in service.loop.copies] == [True, True]
        limits = []
        started: set[int] = set()

        def are_listed() -> bool:
            """/proc may leave out a child when the thread that has started it ends."""
            started.update({*engines(os.getpid())}.difference(others))
            return len(started) > 1

        wait_until(are_listed, "both engines in /proc")
        for engine in started:
            pairs = Path(f"/proc/{engine}/environ").read_text().split("\0")
            limits += [pair for pair in pairs if pair.startswith("NEURON_RT_")]
        assert sorted(limits) == ["NEURON_RT_VISIBLE_CORES=0", "NEURON_RT_VISIBLE_CORES=1"]
        inbox = BlockingQueue()
        for _ in service.loop.copies:
            body = b'{"inputs": "1 + 1 =", "parameters": {"max_new_tokens": 4}}'
            service.loop.submit(service.parse(body).request, inbox)
        deltas = []
        while sum(delta.finished for delta in deltas) < 2:
            deltas += inbox.drain(60)
        texts = [
            "".join(delta.text for delta in deltas if delta.request_id == name)
            for name in {delta.request_id for delta in deltas}
        ]
        assert texts == [texts[0]] * 2
        assert texts[0]
    finally:
        service.close()


def test_nothing_is_started_before_it_is_wanted(machine, options):
    before, others = toy_service(ToyBackend(TOY_SPEC)), engines(os.getpid())
    service = Service.load(
        None, TINY, environ=machine.environ, overrides=options, placed=("1",), before=before
    )
    before.close()
    assert service.metrics is before.metrics
    name = "djl_neuronx_compile_cache_misses_total"
    assert service.metrics.registry.get_sample_value(name) == 1
    assert machine.compiled() == GRAPHS
    assert engines(os.getpid()) == others
    assert not service.loop.alive
    service.loop.start(0)
    assert service.loop.alive
    assert len(engines(os.getpid())) == len(others) + 1
    service.loop.retire(0)
    assert engines(os.getpid()) == others
    service.close()


def test_a_model_is_the_same_while_its_files_are(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    (folder / "link").symlink_to("nowhere")
    found = [_files(folder), _files(folder)]
    for change in (
        lambda: os.utime(folder / "config.json", (1, 1)),
        lambda: (folder / "tokenizer.json").write_text("{}"),
        lambda: (folder / "new").touch(),
        lambda: (folder / "new").unlink(),
    ):
        change()
        found.append(_files(folder))
    assert found[0] == found[1]
    assert len({*found}) == 4, "the last change was that of the one before"
    assert found[-1] == found[-3]


KILLED = """
import sys
from pathlib import Path
from tests.doubles import neuron_machine
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


def test_stored_graphs_wait_for_no_tokenizer_while_the_weights_are_read_ahead(
    machine, options, caplog, tmp_path
):
    model = shutil.copytree(TINY, tmp_path / "model")
    weights = model / "model.safetensors"
    # Of a size that no other test's reads log.
    save_file(load_file(weights), weights, {"format": "pt", "test": "read ahead"})
    size = weights.stat().st_size
    assert size != (TINY / "model.safetensors").stat().st_size
    caplog.set_level("INFO")
    for number, hit in enumerate((False, True), 1):
        prepared = prepare_or_raise(None, model, environ=machine.environ, overrides=options)
        tokenizer = (lambda: pytest.fail("needed")) if hit else prepared.load_tokenizer
        assert obtain(prepared, tokenizer).cache_hit is hit
        line = f"read_ahead bytes={size} of={size}"
        wait_until(lambda: caplog.text.count(line) == number, f"start {number}")  # noqa: B023


def test_a_backend_that_compiles_nothing_asks_for_no_flags():
    environ = {"NEURON_CC_FLAGS": "'x"}
    prepared = prepare_or_raise(None, TINY, environ=environ, overrides={"model_loader": "cpu"})
    found = obtain(prepared, prepared.load_tokenizer)
    assert (found.folder, dict(found.facts.graph_options)) == (None, {})


def test_a_folder_that_is_not_there_is_named_by_the_argument(tmp_path):
    with pytest.raises(ArtifactNotFoundError, match="Correct the model argument"):
        prepare_or_raise(None, tmp_path / "nothere", environ={})


def test_models_are_loaded_with_the_degree_that_they_were_placed_for(machine, options, tmp_path):
    """Alone the model would take both cores of the machine."""
    other = shutil.copytree(TINY, tmp_path / "other")
    del options["tensor_parallel_degree"]
    known = {"environ": machine.environ, "overrides": options}
    placement = check_all([str(TINY), str(other)], purpose=Purpose.SERVE, **known)
    placement.raise_errors()
    assert placement.placed == (("0",), ("1",))
    before = toy_service(ToyBackend(TOY_SPEC))
    for cores, model in (((), None), *zip(placement.placed, placement.models, strict=True)):
        service = Service.load(None, TINY, prepared=model, placed=cores, before=before, **known)
        assert service.options.tensor_parallel_degree == (1 if cores else 2)
        service.close()
    before.close()

"""`djl-neuronx check` of folders that hold something compiled: judged as a start judges them."""

import json
import shutil
from functools import partial

import pytest
from safetensors.numpy import load_file, save_file

from djl_python_neuronx import backends
from djl_python_neuronx.artifacts import fetch
from djl_python_neuronx.artifacts import manifest as manifests
from djl_python_neuronx.artifacts.formats import detect
from djl_python_neuronx.artifacts.manifest import CompileFacts, Manifest
from djl_python_neuronx.artifacts.store import CompileStore
from djl_python_neuronx.errors import ArtifactNotFoundError
from djl_python_neuronx.loading import check as check_module
from djl_python_neuronx.loading import judge as judge_module
from djl_python_neuronx.loading import prepare as prepare_module
from djl_python_neuronx.loading.compile_facts import compile_facts
from djl_python_neuronx.loading.report import as_json
from djl_python_neuronx.planning import plan
from djl_python_neuronx.planning.backend_choice import Library
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.plan import graph_options
from tests.artifacts import folders
from tests.doubles import remote_doubles
from tests.loading.checking import INF2, LAPTOP, TINY, folder, printed, run

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
PINNED = {"tensor_parallel_degree": "2", "n_positions": "128", "max_rolling_batch_size": "2"}
GRAPHS = {**PINNED, "context_length_estimate": "128", "model_loader": "tnx"}


def output(path, loader, effective_options, graphs=None, version="2.0", target="inf2", **more):
    """tiny-llama as `djl-neuronx compile` writes it, without what was compiled."""
    path.mkdir()
    for name in FILES:
        shutil.copy(TINY / name, path)
    facts = CompileFacts(
        graph_options=graphs or {},
        artifact_digest="sampled:0",
        compiler="neuronx-cc",
        compiler_version=version,
        target=target,
    )
    options = {"model_loader": loader, **effective_options}
    written = Manifest.of(
        path, facts, effective_options=options, packages={}, layout="huggingface", **more
    )
    manifests.write(path, written)
    return path


@pytest.fixture
def compiled(tmp_path):
    """An output for tnx on two cores of an inf2, with a version of the library."""
    planned = run(TINY, machine="inf2.xlarge", **GRAPHS).resolved.options
    recorded = {**graph_options(planned, "tnx"), "library_version": "0.13"}
    return output(
        tmp_path / "output", "tnx", {**planned.model_dump(mode="json"), "model_loader": "tnx"},
        recorded,
    )  # fmt: skip


@pytest.fixture
def at_hand(monkeypatch):
    """Sets the machine that this runs on, and the versions of library and compiler there."""

    def place(machine, library=None, compiler=None):
        versions = {"transformers-neuronx": library, "neuronx-cc": compiler}
        versions |= {"torch-neuronx": None, "neuronx-distributed-inference": None}
        found = {
            name: Library(name, version, "installed" if version else "missing")
            for name, version in versions.items()
        }
        monkeypatch.setattr(check_module.machines, "detect", lambda **kwargs: machine)
        for module in (check_module, judge_module, prepare_module, plan):
            monkeypatch.setattr(module, "libraries", lambda: found)
        monkeypatch.setattr(backends.get("tnx"), "compiler_version", lambda: compiler)

    return place


def mismatches(report):
    """The names of what differs, in the errors of a report."""
    told = [entry for entry in report.findings if "compiled for other settings" in entry.message]
    assert all(entry.level == "error" for entry in told)
    return {name for entry in told for name in entry.options}


def test_an_output_that_model_id_names_keeps_its_pins(tmp_path, at_hand):
    at_hand(LAPTOP)
    pins = {"n_positions": 64, "max_rolling_batch_size": 3, "trust_remote_code": True}
    path = output(tmp_path / "output", "cpu", pins)
    (tmp_path / "other").mkdir()
    report = run(tmp_path / "other", model_id=str(path))
    assert report.findings.messages("error") == ()
    options = report.resolved.options
    assert (options.n_positions, options.max_rolling_batch_size) == (64, 3)
    assert not options.trust_remote_code
    assert report.resolved.origins["n_positions"] == f"what {path} was compiled for"
    assert report.prepared.backend == "cpu"
    other = run(tmp_path / "other", model_id=str(path), n_positions="128").resolved.options
    assert (other.n_positions, other.max_rolling_batch_size) == (128, 3)


@pytest.mark.parametrize("has_file", [True, False])
def test_an_output_in_s3_is_planned_as_the_folder_is(compiled, tmp_path, at_hand, has_file):
    """Its manifest fixes the options, and no compile is planned."""
    pytest.importorskip("boto3", reason="needs the `s3` extra")
    at_hand(LAPTOP)
    (compiled / "compiled").mkdir()
    (compiled / "compiled" / "graph.neff").write_bytes(b"graph")
    if has_file:
        text = "".join(f"option.{name}={value}\n" for name, value in GRAPHS.items())
        (compiled / "serving.properties").write_text(text)
    (compiled / "manifest.json").replace(tmp_path / "manifest.json")
    old = manifests.read(tmp_path)
    options = {"effective_options": old.effective_options, "layout": "huggingface"}
    manifests.write(compiled, Manifest.of(compiled, old.facts, packages={}, **options))
    names = ("config.json", "manifest.json", *["serving.properties"] * has_file)
    objects = {f"b/out/{name}": (compiled / name).read_bytes() for name in names}
    with remote_doubles.s3(objects) as (url, _):
        keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "s", "AWS_ENDPOINT_URL": url}
        reports = [run(target, keys, "inf2.xlarge") for target in (compiled, "s3://b/out")]
    here, there = (
        {name: value for name, value, _ in report.resolved.explain() if "model_" not in name}
        for report in reports
    )
    assert here == there
    assert (there["n_positions"], there["max_rolling_batch_size"]) == (128, 2)
    for report in reports:
        assert report.findings.messages("error") == ()
        assert "compiles  nothing" in printed(report)
        assert not any("compil" in text for text in report.findings.messages("warning"))


def test_an_output_that_was_changed_is_an_error(tmp_path, at_hand):
    at_hand(LAPTOP)
    path = output(tmp_path / "output", "cpu", {})
    assert run(path).ok
    content = bytearray((path / "tokenizer_config.json").read_bytes())
    content[-2] ^= 1
    (path / "tokenizer_config.json").write_bytes(content)
    (error,) = run(path).findings.messages("error")
    assert "changed tokenizer_config.json" in error


@pytest.mark.parametrize("name", ["optimum_tnx", "presharded", "nxdi"])
@pytest.mark.parametrize("machine", ["inf2.48xlarge", None], ids=["instance", "no-device"])
def test_what_nobody_sets_is_what_the_folder_was_compiled_for(tmp_path, at_hand, name, machine):
    at_hand(LAPTOP)
    path = getattr(folders, name)(tmp_path)
    (path / "tokenizer.json").touch()
    report = run(path, machine=machine)
    assert report.findings.messages("error") == ()
    assert report.resolved.options.tensor_parallel_degree == 2
    assert report.prepared.case.device.instance_type == "inf2.48xlarge"
    other = run(path, machine=machine, tensor_parallel_degree="8")
    assert "tensor_parallel_degree: compiled 2, wanted 8" in other.findings.messages("error")[0]
    assert mismatches(other) == {"tensor_parallel_degree"}
    settings = {"tensor_parallel_degree": "8", "on_mismatch": "recompile"}
    again = run(path, machine=machine, **settings)
    # As a start would: what is cut for 2 cores is not for 8, and whole or split weights are.
    cut = [] if name == "optimum_tnx" else ["has cut; expected whole safetensors"]
    assert [
        told in error for told, error in zip(cut, again.findings.messages("error"), strict=True)
    ] == [True] * len(cut)
    assert any(
        "is not used: it differs in tensor_parallel_degree" in w
        for w in again.findings.messages("warning")
    )


INSTANCE = "inf2.48xlarge"


@pytest.mark.parametrize(
    ("written", "settings", "lengths"),
    [
        ("n_positions=2048", {}, ((2048,), (128, 1024, 2048))),
        ("dtype=bf16", {"n_positions": "2048"}, ((2048,), (128, 1024, 2048))),
        ("context_length_estimate=64,2048", {}, ((2048,), (64, 2048))),
        ("cache_layout=BSH", {}, ((2048,), (2048,))),
        ("rolling_batch_strategy=naive_rolling_batch", {}, (2048, (128, 256, 512, 1024, 2048))),
        ("rolling_batch=disable", {}, (2048, (128, 256, 512, 1024, 2048))),
        ("dtype=bf16", {"n_positions": "1024"}, "compiled (2048,), wanted (128, 256, 512, 1024)"),
        ("dtype=bf16", {"n_positions": "1024,2048"}, "compiled (2048,), wanted (1024, 2048)"),
    ],
)
def test_lengths_that_the_old_container_does_not_record_follow_from_its_file(
    tmp_path, at_hand, written, settings, lengths
):
    """Oracle: the container's own calls, LMI 0.29, neuron_utils/model_loader.py and utils.py."""
    at_hand(LAPTOP)
    path = folders.lmi_aot(tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["neuron"]["sequence_length"] = config["max_position_embeddings"] = 2048
    (path / "config.json").write_text(json.dumps(config))
    with (path / "serving.properties").open("a") as file:
        file.write(f"option.{written}\n")
    (path / "tokenizer.json").touch()
    report = run(path, machine=INSTANCE, **settings)
    errors = report.findings.messages("error")
    if isinstance(lengths, str):
        assert lengths in "".join(errors)
        return
    assert errors == ()
    assert report.prepared.own_graphs
    options = report.prepared.options
    assert (options.n_positions, options.context_length_estimate) == lengths


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"attention_layout": "HSB"}, "attention_layout: compiled 'BSH', wanted 'HSB'"),
        ({"fuse_qkv": "false"}, "fuse_qkv: compiled True, wanted False"),
        ({"n_positions": "32,64"}, "n_positions: compiled (64,), wanted (32, 64)"),
        ({"context_length_estimate": "32"}, "compiled (64,), wanted (32,)"),
        ({"rolling_batch_strategy": "naive_rolling_batch"}, "rolling_batch_strategy: compiled"),
        ({"cache_layout": "BSH"}, "cache_layout: compiled None, wanted 'BSH'"),
        ({"quantize": "static_int8"}, "quantize: compiled None, wanted 'static_int8'"),
    ],
)
def test_each_option_that_optimum_compiled_otherwise_is_named(tmp_path, at_hand, settings, told):
    at_hand(LAPTOP)
    path = folders.optimum_tnx(tmp_path)
    (path / "tokenizer.json").touch()
    same = {"fuse_qkv": "true", "attention_layout": "BSH", "n_positions": "64"}
    report = run(path, machine=INSTANCE, **same)
    assert report.findings.messages("error") == ()
    assert report.prepared.own_graphs
    assert report.prepared.planned.arguments.constructor["n_positions"] == [64]
    (error,) = run(path, machine=INSTANCE, **settings).findings.messages("error")
    assert told in error


def nxdi_model(path, **keywords):
    """A checkpoint that vllm-neuron has served, and its graphs."""
    folders.vllm(path, "0" * 32, **keywords)
    (path / "tokenizer.json").touch()
    return path, path / "neuron-compiled-artifacts" / ("0" * 32)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_rolling_batch_size": "8"}, "max_rolling_batch_size: compiled 4, wanted 8"),
        ({"n_positions": "32,64"}, "n_positions: compiled [64], wanted [32, 64]"),
        ({"context_length_estimate": "64"}, "compiled [32, 64], wanted [64]"),
        ({"dtype": "fp32"}, "dtype: compiled 'bfloat16', wanted 'float32'"),
        (
            {"output_logits": "true", "on_device_generation": "true"},
            "output_logits: compiled False",
        ),
        ({"fuse_qkv": "true"}, "fuse_qkv: compiled None, wanted True"),
        ({"rolling_batch_strategy": "naive_rolling_batch"}, "rolling_batch_strategy: compiled"),
        ({"override_neuron_config": '{"attn_cls": "X"}'}, "attn_cls: compiled"),
    ],
)
def test_each_option_that_nxdis_record_contradicts_is_named(tmp_path, at_hand, settings, told):
    """The library would load the graphs and fail at the first call, or never."""
    at_hand(LAPTOP)
    path, graphs = nxdi_model(tmp_path)
    assert run(path, machine=INSTANCE).findings.messages("error") == ()
    (error,) = run(path, machine=INSTANCE, **settings).findings.messages("error")
    assert f"the artifact at {graphs} was compiled for other settings" in error
    assert told in error
    again = run(path, machine=INSTANCE, on_mismatch="recompile", **settings)
    assert again.findings.messages("error") == ()
    assert not again.prepared.own_graphs
    assert f"what is compiled in {graphs} is not used" in "".join(
        again.findings.messages("warning")
    )


def test_nxdis_record_is_served_as_it_was_compiled(tmp_path, at_hand):
    at_hand(LAPTOP)
    sampled = {"dynamic": True, "do_sample": True, "global_topk": 8, "top_k_kernel_enabled": True}
    path, graphs = nxdi_model(
        tmp_path, on_device_sampling_config=sampled, fused_qkv=True, a_later_flag=True
    )
    report = run(path, machine=INSTANCE)
    assert report.findings.messages("error") == ()
    assert report.prepared.own_graphs
    assert report.prepared.backend == "nxdi"
    config = report.prepared.planned.arguments.neuron_config
    assert (config["fused_qkv"], config["a_later_flag"]) == (True, True)
    assert config["on_device_sampling_config"]["global_topk"] == 8
    assert report.resolved.origins["fuse_qkv"] == f"what {graphs} was compiled for"


@pytest.mark.parametrize("way", ["option", "variable"])
def test_nxdis_graphs_are_named_apart_from_the_checkpoint(tmp_path, at_hand, way):
    at_hand(LAPTOP)
    model = folders.huggingface(tmp_path / "model")
    (model / "tokenizer.json").touch()
    graphs = folders.nxdi(tmp_path / "graphs")
    named = {"compiled_graph_path": str(graphs)}
    environ = {"NEURON_COMPILED_ARTIFACTS": str(graphs)} if way == "variable" else {}
    settings = {} if way == "variable" else named
    report = run(model, environ, INSTANCE, **settings)
    assert report.findings.messages("error") == ()
    assert report.prepared.own_graphs
    assert report.prepared.artifact.compiled == graphs
    assert "compiled again" not in "".join(report.findings.messages("warning"))
    assert report.resolved.options.max_rolling_batch_size == 4
    assert report.prepared.weights.kind == "safetensors"
    (error,) = run(model, environ, INSTANCE, n_positions="32", **settings).findings.messages(
        "error"
    )
    assert "n_positions: compiled 64, wanted 32 (command line)" in error


@pytest.mark.parametrize("named", ["served", "served/neuron-compiled-artifacts"])
def test_graphs_of_vllm_are_found_in_the_folders_above_them(tmp_path, at_hand, named):
    at_hand(LAPTOP)
    model = folders.huggingface(tmp_path / "model")
    (model / "tokenizer.json").touch()
    served, graphs = nxdi_model(tmp_path / "served")
    report = run(model, machine=INSTANCE, compiled_graph_path=str(tmp_path / named))
    assert report.findings.messages("error") == ()
    assert report.prepared.own_graphs == graphs
    folders.vllm(served, "1" * 32)
    (error,) = run(
        model, machine=INSTANCE, compiled_graph_path=str(tmp_path / named)
    ).findings.messages("error")
    for digest in ("0" * 32, "1" * 32):
        assert digest in error
    assert "option.compiled_graph_path" in error


def test_a_length_alone_takes_the_compiled_lengths(tmp_path, at_hand):
    at_hand(LAPTOP)
    model = folders.huggingface(tmp_path / "model")
    (model / "tokenizer.json").touch()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    lengths = {"seq_len": 512, "max_length": 512, "max_context_length": 512}
    buckets = {"context_encoding_buckets": [512], "token_generation_buckets": [512]}
    graphs = folders.nxdi(tmp_path / "graphs", enable_bucketing=True, **lengths, **buckets)
    environ = {"NEURON_COMPILED_ARTIFACTS": str(graphs)}
    for facts in ({}, {"n_positions": "512"}, {"n_positions": "[512]"}):
        report = run(model, environ, INSTANCE, **facts)
        assert report.findings.messages("error") == ()
        assert report.prepared.own_graphs
        assert report.prepared.options.token_buckets == (512,)
    (error,) = run(model, environ, INSTANCE, n_positions="256,512").findings.messages("error")
    assert "n_positions: compiled" in error


def test_the_variable_of_vllms_graphs_is_nxd_inferences(tmp_path, at_hand):
    at_hand(LAPTOP)
    model = folders.huggingface(tmp_path / "model")
    (model / "tokenizer.json").touch()
    environ = {"NEURON_COMPILED_ARTIFACTS": str(tmp_path / "missing")}
    warnings = "".join(run(model, environ, INSTANCE).findings.messages("warning"))
    assert "there is no folder" in warnings
    assert "transformers-neuronx" not in warnings


def test_graphs_of_the_other_library_are_an_error(tmp_path, at_hand):
    at_hand(LAPTOP)
    model = folders.huggingface(tmp_path / "model")
    (model / "tokenizer.json").touch()
    graphs = {"compiled_graph_path": str(folders.nxdi(tmp_path / "graphs"))}
    at_hand(INF2, "0.13", "2.0")
    (error,) = run(model, model_loader="tnx", **graphs).findings.messages("error")
    assert "it holds graphs of the backend nxdi" in error


def test_a_compiled_folder_without_weights_names_the_fix(tmp_path, at_hand):
    at_hand(LAPTOP)
    path = folders.nxdi(tmp_path, save_sharded_checkpoint=False)
    shutil.rmtree(path / "weights")
    with pytest.raises(ArtifactNotFoundError, match="/models/original") as caught:
        detect(path).weights_for("nxdi", NEURON_BACKENDS["nxdi"].weights)
    assert f"option.compiled_graph_path to {path}" in str(caught.value)


@pytest.mark.parametrize(
    "build",
    [
        folders.optimum_nxd,
        folders.optimum_hlo,
        partial(folders.optimum_tnx, transformers_version="4.48.1"),
    ],
    ids=["nxd", "hlo", "tnx"],
)
def test_graphs_that_no_library_loads_are_warned_of(tmp_path, at_hand, build):
    at_hand(LAPTOP)
    path = build(tmp_path)
    (path / "tokenizer.json").touch()
    loader = "nxdi" if build is folders.optimum_nxd else "tnx"
    report = run(path, machine=INSTANCE, model_loader=loader)
    assert report.findings.messages("error") == ()
    assert report.prepared.artifact.compiled is None
    (warning,) = [m for m in report.findings.messages("warning") if "Optimum Neuron" in m]
    assert "is not used" in warning
    warnings = run(path, model_loader="cpu").findings.messages("warning")
    assert not any("Optimum Neuron" in warning for warning in warnings)


def test_a_compiled_folder_without_weights_is_refused_as_at_a_start(tmp_path, at_hand):
    at_hand(LAPTOP)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    folders.optimum_tnx(whole)
    folders.optimum_cut(cut)
    for path in (whole, cut):
        (path / "tokenizer.json").touch()
    assert run(whole, machine=INF2).loadable
    shutil.rmtree(whole / "checkpoint")
    for path in (whole, cut):
        for machine in (INF2, None):
            report = run(path, machine=machine)
            (error,) = report.findings.messages("error")
            assert "without weights" in error
            assert not report.loadable


def test_a_model_of_the_hub_needs_no_weights_here_for_graphs_that_name_others(
    tmp_path, at_hand, monkeypatch
):
    at_hand(LAPTOP)
    monkeypatch.setattr(fetch, "fetch_config", lambda *_, **__: folders.CONFIG)
    graphs = folders.nxdi(tmp_path, save_sharded_checkpoint=False)
    shutil.rmtree(graphs / "weights")
    report = run("owner/name", machine=INF2, compiled_graph_path=str(graphs))
    assert report.prepared.artifact.backend == "nxdi"
    assert not [m for m in report.findings.messages("error") if "without weights" in m]


def test_a_recorded_value_that_is_none_is_an_error(tmp_path, at_hand):
    at_hand(LAPTOP)
    path = output(tmp_path / "output", "cpu", {"n_positions": "many"})
    (error,) = run(path).findings.messages("error")
    assert "records for n_positions what it cannot be" in error
    keywords = {"tensor_replacement_config": {"ref_dir": "/etc", "neuron_dir": "/etc"}}
    path = output(tmp_path / "places", "cpu", {"override_neuron_config": keywords})
    (error,) = run(path).findings.messages("error")
    assert "records tensor_replacement_config in override_neuron_config" in error


def test_graphs_are_for_the_machine_that_is_named(compiled, at_hand):
    """On which nobody knows what is installed."""
    at_hand(LAPTOP, compiler="1.0")
    assert run(compiled, machine="inf2.xlarge").findings.messages("error") == ()
    assert mismatches(run(compiled, machine="trn1.2xlarge")) == {"target"}
    assert run(compiled).findings.messages("error") == ()


def test_graphs_are_for_the_versions_that_are_installed_at_hand(compiled, at_hand):
    for versions, differing in (
        (("0.13", "2.0"), set()),
        (("0.12", "2.0"), {"library_version"}),
        (("0.13", "2.1"), {"compiler_version"}),
        (("0.13", None), set()),
    ):
        at_hand(INF2, *versions)
        (compiled / "compiled").mkdir(exist_ok=True)
        assert mismatches(run(compiled)) == differing
        assert mismatches(run(compiled, machine="inf2.xlarge")) == set()


def test_graphs_are_for_the_flags_of_the_process_that_serves(compiled, at_hand):
    at_hand(INF2, "0.13", "2.0")
    (compiled / "compiled").mkdir()
    assert run(compiled).findings.messages("error") == ()
    assert mismatches(run(compiled, {"NEURON_CC_FLAGS": "-O1"})) == {"cc_flags"}


def test_a_draft_model_is_judged_by_what_it_was_compiled_for(compiled, tmp_path, at_hand):
    """Beside an output it is found by the output's own name for it, and its graphs are for its own options."""
    at_hand(INF2, "0.13", "2.0")
    shutil.copytree(compiled, compiled / "draft")
    path = compiled / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["effective_options"] |= {"speculative_draft_model": "draft", "speculative_length": 3}
    manifest["facts"]["graph_options"] |= {"speculative_length": 3}
    path.write_text(json.dumps(manifest))
    (tmp_path / "other").mkdir()
    # What the draft model was served with by itself is nothing to a draft model.
    path = compiled / "draft" / "manifest.json"
    manifest = json.loads(path.read_text())
    pins = {**manifest["effective_options"], "enable_chunked_prefill": True}
    folders.edit_json(path, effective_options=pins)
    report = run(tmp_path / "other", model_id=str(compiled))
    assert report.findings.messages("error") == ()
    assert report.prepared.draft is not None
    manifest["facts"]["graph_options"]["max_rolling_batch_size"] = 7
    folders.edit_json(path, facts=manifest["facts"])
    (error,) = run(tmp_path / "other", model_id=str(compiled)).findings.messages("error")
    assert error.startswith("the draft model: ")
    assert "max_rolling_batch_size: compiled 7, wanted 2" in error


@pytest.mark.parametrize("loader", ["tnx", "nxdi"])
def test_flags_that_no_shell_takes_are_an_error(tmp_path, loader):
    target = folder(tmp_path)
    wrong, settings = {"NEURON_CC_FLAGS": "'x"}, {"model_loader": loader}
    (error,) = run(target, wrong, "inf2.xlarge", **settings).findings.messages("error")
    assert "NEURON_CC_FLAGS" in error
    assert run(target, {"NEURON_CC_FLAGS": "-O1"}, "inf2.xlarge", **settings).ok
    folder(tmp_path, "option.env=NEURON_CC_FLAGS='x\n")
    assert run(target, machine="inf2.xlarge", **settings).findings.messages("error") == (error,)
    assert "NEURON_CC_FLAGS" in printed(run(target, machine="inf2.xlarge", **settings))


def test_option_env_gives_the_hub_s_variables(tmp_path, at_hand):
    """As DJL Serving gives them to the process that fetches the model; they are said to nobody."""
    at_hand(LAPTOP)
    gated, draft = "owner/gated", "owner/draft"
    config = (TINY / "config.json").read_bytes()
    models = {gated: config, draft: config}
    with remote_doubles.hub(models, gated=models, tokens=["s3cret"]) as (url, log):
        variables = f"HF_TOKEN=s3cret,HF_ENDPOINT={url},HF_HOME={tmp_path / 'hf'}"
        text = f"option.env={variables}\noption.model_id={gated}\n"
        (tmp_path / "serving.properties").write_text(text)
        trusted = {"DJL_NEURONX_TRUST_ENV": "HF_ENDPOINT,HF_HOME"}
        report = run(tmp_path, trusted, speculative_draft_model=draft)
    assert report.findings.messages("error") == ()
    assert report.prepared.draft is not None
    told = [{name.lower(): value for name, value in headers.items()} for _, _, headers in log]
    assert all(headers["authorization"] == "Bearer s3cret" for headers in told)
    assert "s3cret" not in repr(report) + json.dumps(as_json(report)) + printed(report)


def test_cut_weights_are_for_the_library_that_cut_them(tmp_path, at_hand):
    at_hand(LAPTOP)
    path = folders.presharded(tmp_path)
    (path / "tokenizer.json").touch()
    (error,) = run(path, model_loader="cpu").findings.messages("error")
    assert "the cpu backend cannot load the model" in error


def test_cut_weights_do_not_serve_a_cache_divided_by_tokens(tmp_path, at_hand):
    at_hand(LAPTOP)
    path = folders.presharded(tmp_path)
    (path / "tokenizer.json").touch()
    divided = {"shard_over_sequence": "true", "group_query_attention": "replicated-heads"}
    errors = run(path, machine="inf2.48xlarge", **divided).findings.messages("error")
    assert any("cannot load the weights that it has cut" in error for error in errors)


def test_weights_of_the_same_size_that_are_not_the_compiled_ones_are_an_error(compiled, at_hand):
    at_hand(INF2, "0.13", "2.0")
    assert run(compiled).ok
    weights = load_file(compiled / "model.safetensors")
    one, other = (f"model.layers.{n}.self_attn.o_proj.weight" for n in (1, 2))
    swapped = {**weights, one: weights[other], other: weights[one]}
    save_file(swapped, compiled / "model.safetensors", {"format": "pt"})
    (error,) = run(compiled).findings.messages("error")
    assert "changed model.safetensors" in error


def test_a_draft_models_graphs_are_made_again_for_other_flags(compiled, at_hand):
    """As at a start, where a draft is compiled again for other flags."""
    at_hand(INF2, "0.13", "2.0")
    (compiled / "compiled").mkdir()
    flags = {"NEURON_CC_FLAGS": "-O1"}
    assert mismatches(run(compiled, flags)) == {"cc_flags"}
    draft = {"speculative_draft_model": str(compiled), "speculative_length": "3"}
    assert run(TINY, **GRAPHS, **draft).findings.messages("warning") == ()
    report = run(TINY, flags, **GRAPHS, **draft)
    assert report.findings.messages("error") == ()
    assert report.prepared.draft is not None
    (warning,) = report.findings.messages("warning")
    assert warning.startswith("the draft model: what is compiled in ")
    assert "cc_flags" in warning


def test_check_says_whether_a_start_compiles(tmp_path, at_hand):
    """On the machine that serves. What the store has is written as a start writes it."""
    at_hand(INF2, "0.13", "2.0")
    (tmp_path / "cache").mkdir()
    place = {"compiled_graph_path": str(tmp_path / "cache")}

    def told(level, settings, **more):
        return [
            m
            for m in run(TINY, **settings, **place, **more).findings.messages(level)
            if "graphs" in m
        ]

    (note,) = told("note", GRAPHS)
    assert "has no graphs of this model. A start compiles, about 1 min" in note
    (error,) = told("error", GRAPHS, compilation="forbid")
    assert "has no graphs of this model" in error
    assert not list((tmp_path / "cache").iterdir())
    prepared = run(TINY, **GRAPHS, **place).prepared
    CompileStore(tmp_path / "cache" / "djl-neuronx").build(
        compile_facts(prepared, TINY),
        lambda folder: (folder / "prefill.neff").write_text("x"),
        on_miss=lambda miss: None,
        effective_options={},
        packages={},
    )
    for more in ({}, {"compilation": "forbid"}):
        (note,) = told("note", GRAPHS, **more)
        assert "has the graphs: a start compiles nothing" in note
    other = {**GRAPHS, "max_rolling_batch_size": "4"}
    (warning,) = told("warning", other)
    assert (
        "max_rolling_batch_size: compiled 2, wanted 4 (command line). To use these set" in warning
    )
    # Of graphs that are named it reads the sizes, however large they are.
    (stored,) = (path.parent for path in (tmp_path / "cache").rglob("prefill.neff"))
    (stored / "prefill.neff").write_text("y")
    assert run(TINY, **GRAPHS, compiled_graph_path=str(stored)).findings.messages("error") == ()
    (error,) = told("error", other, compilation="forbid")
    assert "max_rolling_batch_size: compiled 2, wanted 4" in error
    draft = {"speculative_draft_model": str(TINY), "draft_model_tp_size": "1"}
    (warning, of_draft) = told("error", {**GRAPHS, **draft}, compilation="forbid")
    assert of_draft.startswith("the draft model: compilation=forbid")
    assert "has no graphs as a draft model" in of_draft


def test_graphs_that_this_package_stored_for_another_model_are_refused(tmp_path, at_hand):
    """On the machine that serves, and for another one, whose versions are unknown."""
    at_hand(INF2, "0.13", "2.0")
    CompileStore(tmp_path / "store").build(
        compile_facts(run(TINY, **GRAPHS).prepared, TINY),
        lambda folder: (folder / "prefill.neff").write_text("x"),
        on_miss=lambda miss: None,
        effective_options={},
        packages={},
    )
    (stored,) = (path.parent for path in (tmp_path / "store").rglob("prefill.neff"))
    other, output = tmp_path / "other", tmp_path / "output"
    shutil.copytree(TINY, other)
    folders.edit_json(other / "config.json", rope_theta=305.0)
    shutil.copytree(stored, output / "compiled")
    shutil.copy(TINY / "config.json", output)
    for machine, serves in ((INF2, None), (LAPTOP, "inf2.xlarge")):
        at_hand(machine, *(("0.13", "2.0") if serves is None else ()))
        for named, words in (
            (stored, "its weights, or files beside them, differ"),
            (output / "compiled", f"{output / 'config.json'} has rope_theta 300.0 instead of 305"),
        ):
            place = {**GRAPHS, "compiled_graph_path": str(named)}
            assert run(TINY, machine=serves, **place).ok
            (error,) = run(other, machine=serves, **place).findings.messages("error")
            assert f"of another model than {other}: {words}" in error
            assert "sampled:" not in error
            (error,) = run(
                TINY, machine=serves, **{**place, "max_rolling_batch_size": "4"}
            ).findings.messages("error")
            assert "max_rolling_batch_size: compiled 2, wanted 4" in error
    place["tensor_parallel_degree"] = "2"
    (error,) = run(TINY, machine="trn1.2xlarge", **place).findings.messages("error")
    assert "target: compiled 'inf2', wanted 'trn1'" in error


def test_check_elsewhere_cannot_see_the_store(tmp_path, at_hand):
    at_hand(LAPTOP)
    missing = {"compiled_graph_path": str(tmp_path / "cache"), "compilation": "forbid"}
    report = run(TINY, machine="inf2.xlarge", **GRAPHS, **missing)
    (warning,) = report.findings.messages("warning")
    assert "there is no folder" in warning
    assert any("only the machine that serves shows" in m for m in report.findings.messages("note"))
    assert report.ok
    at_hand(INF2, "0.13", "2.0")
    (error,) = run(TINY, **GRAPHS, **missing).findings.messages("error")
    assert "there is no folder" in error

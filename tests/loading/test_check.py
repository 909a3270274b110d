"""`djl-neuronx check`: broken files that are not ready, folders that are, and what is printed of either."""

import dataclasses
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from djl_python_neuronx import cli
from djl_python_neuronx.artifacts import tokenizer
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.errors import ArtifactError, ArtifactNotFoundError, ConfigError
from djl_python_neuronx.loading import check as check_module
from djl_python_neuronx.loading import judge as judge_module
from djl_python_neuronx.loading import prepare as prepare_module
from djl_python_neuronx.loading import text_trial
from djl_python_neuronx.loading.check import Placement, check, check_all
from djl_python_neuronx.loading.report import (
    IN_ASCII,
    PARTS,
    all_as_json,
    as_json,
    as_property,
    bar,
    gib,
    render,
)
from djl_python_neuronx.loading.situation import Purpose
from djl_python_neuronx.planning import machines
from djl_python_neuronx.planning.backend_choice import Library
from djl_python_neuronx.planning.memory import CoreMemory
from tests.doubles import remote_doubles
from tests.effort import examples
from tests.loading.checking import INF2, LAPTOP, ROOT, TINY, folder, printed, run
from tools.recipes import CHECKPOINTS, configuration

MODELS = Path(__file__).parents[1] / "planning" / "models"
BROKEN = sorted((Path(__file__).parent / "broken").glob("*.properties"))
HEAVY = {"torch", "transformers", "safetensors", "tokenizers", "prometheus_client"}


@pytest.fixture(scope="module")
def environ(tmp_path_factory):
    """Variables of a machine that reaches the hub's double and nothing else."""
    with remote_doubles.hub({name: configuration(name) for name in CHECKPOINTS}) as (url, _):
        yield {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path_factory.mktemp("hf"))}


@pytest.fixture
def process(environ, monkeypatch):
    """The same in this process' environment, for the command line; other tests set cores there."""
    for name in [name for name in os.environ if name.startswith(("NEURON_", "OPTION_", "HF_"))]:
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def laptop(monkeypatch):
    """A machine without Neuron, whatever runs the tests."""
    monkeypatch.setattr(check_module.machines, "detect", lambda **kwargs: LAPTOP)


def test_there_are_twenty_broken_files():
    assert len(BROKEN) >= 20


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_a_broken_file_prints_all_its_errors_at_once(process, laptop, capsys, path):
    text = path.read_text(encoding="latin-1")
    expected = re.findall(r"^# error: (.*)$", text, re.MULTILINE)
    machine = re.findall(r"^# instance: (\S+)$", text, re.MULTILINE)
    arguments = ["check", str(path), *(part for name in machine for part in ("--instance", name))]
    assert expected
    assert cli.main([*arguments, "--json"]) == 1
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert len(errors) == len(expected), errors
    for words in expected:
        assert any(words in error for error in errors), (words, errors)
    assert cli.main(arguments) == 1
    out = capsys.readouterr().out
    for error in errors:
        assert error in out


def test_a_folder_without_weights_is_planned_with_a_warning(tmp_path, laptop):
    report = run(folder(tmp_path))
    assert report.ok
    assert report.prepared.backend == "cpu"
    (warning,) = report.findings.messages("warning")
    assert "no weights" in warning
    assert "Only the plan is checked" in warning
    assert not report.loadable
    assert "plan OK, but the weights were not downloaded or checked: 1 warning" in printed(report)


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path, laptop):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TINY / name, tmp_path)
    (error,) = run(tmp_path).findings.messages("error")
    assert "no tokenizer" in error
    # Code of the model's own may need none.
    assert run(tmp_path, trust_remote_code="true").ok
    for name in ("tokenizer.json", "spiece.model", "qwen.tiktoken"):
        (tmp_path / name).touch()
        assert run(tmp_path).ok
        (tmp_path / name).unlink()


def test_code_of_the_folder_is_reported_and_not_run(tmp_path, laptop):
    folder(tmp_path, "option.model_loader=cpu\n")
    code = "raise SystemExit  # from djl_python.output_formatter import output_formatter"
    (tmp_path / "model.py").write_text(code)
    (tmp_path / "requirements.txt").write_text("no-such-package")
    report = run(tmp_path, trust_remote_code="true")
    words = ("model.py has output_formatter", "installs requirements.txt")
    for word in words:
        assert any(word in problem for problem in report.findings.messages("warning"))
        assert word in printed(report)


def test_a_tokenizer_is_what_is_loaded_as_one():
    assert judge_module.has_vocabulary is tokenizer.has_vocabulary
    whole = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
    assert all(tokenizer.has_vocabulary([name]) for name in (*whole, "x.model", "x.tiktoken"))
    assert not tokenizer.has_vocabulary(["tokenizer_config.json", "config.json", "x.json"])


def test_a_model_that_nobody_knows_is_an_error_on_a_cpu(tmp_path, laptop):
    pytest.importorskip("transformers", reason="needs the `cpu` extra")
    config = json.loads((TINY / "config.json").read_text())
    for kind in ("t5", "lama", "unheard-of"):
        report = run(folder(tmp_path, config={**config, "model_type": kind}))
        (error,) = report.findings.messages("error")
        assert f"has no causal language model of model_type '{kind}'" in error


def test_a_model_of_unknown_size_is_a_doubt_on_a_cpu(tmp_path, laptop):
    config = json.loads((TINY / "config.json").read_text())
    known = run(folder(tmp_path, config=config))
    unknown = run(folder(tmp_path, config={**config, "model_type": "stablelm"}))
    (warning,) = set(unknown.findings.messages("warning")) - set(known.findings.messages("warning"))
    assert "of model_type stablelm, is not known here" in warning


def test_what_does_not_fit_is_not_ready(laptop, monkeypatch):
    small = dataclasses.replace(LAPTOP, memory_bytes=2**20)
    assert run(TINY).prepared.planned.memory.fits
    for machine in (small, dataclasses.replace(LAPTOP, memory_bytes=0)):
        monkeypatch.setattr(
            check_module.machines, "detect", lambda machine=machine, **kwargs: machine
        )
        report = run(TINY)
        assert report.ok == report.prepared.planned.memory.fits == (machine is not small)
        told = printed(report)
        assert ("does not fit" in told) == (machine is small)
        assert ("ready" in told) != (machine is small)


@pytest.mark.parametrize(("threads", "ok"), [("32", True), ("33", False), ("100000", False)])
def test_threads_have_a_limit(laptop, threads, ok):
    report = run(TINY, cpu_threads=threads)
    assert report.ok is ok
    assert all(
        "cpu_threads" in error and "8 CPUs" in error for error in report.findings.messages("error")
    )


@pytest.mark.parametrize("loader", ["auto", "cpu", "nxdi", "tnx"])
def test_a_plan_that_is_valid_can_be_loaded(laptop, loader):
    told = as_json(run(TINY, machine="inf2.xlarge", model_loader=loader))
    assert (told["ok"], told["loadable"]) == (True, True)
    assert told["plan"]["format"] == "huggingface"
    assert not as_json(run(TINY, n_positions="x"))["loadable"]


def test_variables_alone_name_a_model(environ, tmp_path, laptop, monkeypatch, capsys):
    monkeypatch.setattr(check_module.sources, "MODEL_DIR", tmp_path / "none")
    for variables in (
        {"HF_MODEL_ID": "facebook/opt-13b"},
        {"OPTION_MODEL_ID": "facebook/opt-13b", "OPTION_ROLLING_BATCH": "tnx"},
    ):
        report = check(None, environ={**environ, **variables}, overrides={})
        assert report.findings.messages("error") == ()
        assert report.prepared.case.model.model_type == "opt"
    report = check(None, environ={}, overrides={})
    assert str(tmp_path / "none") in report.findings.messages("error")[0]
    assert "OPTION_MODEL_ID" in report.findings.messages("error")[0]
    with pytest.raises(ArtifactNotFoundError) as start:  # of `serve`, whose default the folder is
        prepare_module.prepare_or_raise(None, tmp_path / "none", environ={})
    assert str(start.value) == report.findings.messages("error")[0]
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "config.json").write_bytes((MODELS / "gpt2.json").read_bytes())
    report = check(None, environ={**environ, "HF_MODEL_ID": "facebook/opt-13b"}, overrides={})
    assert report.prepared.case.model.model_type == "gpt2"


def test_findings_tell_their_options(laptop, tmp_path):
    text = "option.n_positions=many\noption.async_mode=true\noption.rolling_batch=tnx\n"
    target = folder(tmp_path, f"{text}option.nope=1\noption.max_model_len=x\nn_position=1\n")
    told = as_json(run(target, machine="inf2.xlarge", tensor_parallel_degree="3"))
    for level in ("error", "warning", "note"):
        messages = [entry["message"] for entry in told["findings"] if entry["level"] == level]
        assert messages == told[f"{level}s"]
    assert len(told["findings"]) == sum(
        len(told[f"{level}s"]) for level in ("error", "warning", "note")
    )
    errors = [entry["options"] for entry in told["findings"] if entry["level"] == "error"]
    for options in (["n_positions"], ["nope"], ["tensor_parallel_degree"]):
        assert options in errors
    assert any({"async_mode", "rolling_batch"} <= set(options) for options in errors)
    assert any(entry["options"] == ["n_position"] for entry in told["findings"])


def test_layers_that_the_library_cannot_divide(environ):
    for unroll, ok in (("5", False), ("64", False), ("4", True)):
        report = run(
            "meta-llama/Meta-Llama-3-8B", environ, "inf2.8xlarge", unroll=unroll, model_loader="tnx"
        )
        assert report.ok == ok
        assert all("32 layers" in error for error in report.findings.messages("error"))


@pytest.mark.parametrize("purpose", [Purpose.CHECK, Purpose.SERVE])
@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"is_encoder_decoder": True}, "it is an encoder-decoder"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "its linear_attention layers"),
    ],
)
def test_what_the_backend_rules_out_is_an_error_of_check_too(tmp_path, purpose, facts, words):
    model = shutil.copytree(TINY, tmp_path / "model")
    config = json.loads((TINY / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **facts}))
    (report,) = check_all(
        [str(model)], environ={}, overrides={"model_loader": "cpu"}, purpose=purpose
    ).reports
    (error,) = report.findings.messages("error")
    assert error.startswith(f"the cpu backend cannot serve the model in {model}: {words}")
    drafts = {"model_loader": "cpu", "speculative_draft_model": str(model)}
    (report,) = check_all([str(TINY)], environ={}, overrides=drafts, purpose=purpose).reports
    (error,) = report.findings.messages("error")
    assert error.startswith(f"the draft model: the cpu backend cannot serve the model in {model}")


def test_a_degree_that_is_refused_is_not_said_to_be_missing(tmp_path):
    for line, missing in (("option.tensor_parallel_degree=auto", False), ("", True)):
        text = f"option.rolling_batch=tnx\n{line}\n"
        report = run(folder(tmp_path, text), machine="inf2.xlarge")
        assert report.ok is missing
        warnings = "".join(report.findings.messages("warning"))
        assert ("tensor_parallel_degree is not set" in warnings) == missing


def test_a_value_that_is_refused_is_shown_where_its_default_stands(tmp_path, laptop):
    report = run(folder(tmp_path, "option.n_positions=many\n"))
    told = as_json(report)["options"]["n_positions"]
    assert isinstance(told["value"], int)
    assert "'many'" in told["origin"]
    (row,) = [line for line in printed(report).splitlines() if line.split()[:1] == ["n_positions"]]
    assert "'many'" in row


def test_one_graph_is_a_graph(environ):
    options = {"n_positions": "128", "context_length_estimate": "128", "model_loader": "tnx"}
    report = run("EleutherAI/gpt-j-6b", environ, "inf2.8xlarge", **options)
    out = printed(report)
    assert f"compiles  {len(report.prepared.planned.graphs)} graph" in out
    assert "1 graphs" not in out


@pytest.mark.parametrize("lost", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_size_that_config_json_lacks_is_an_error(tmp_path, lost):
    """Transformers would make a model of 7B of it."""
    config = json.loads((TINY / "config.json").read_text())
    del config[lost]
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    (error,) = run(folder(tmp_path, config=config)).findings.messages("error")
    assert error.startswith(f"config.json of {tmp_path} lacks {lost} (")
    with pytest.raises(ArtifactError, match=f"lacks {lost} "):
        prepare_module.prepare_or_raise(None, tmp_path, environ={})


def test_a_number_that_python_does_not_read(tmp_path, laptop):
    target = folder(tmp_path)
    (tmp_path / "config.json").write_text(f'{{"model_type": "llama", "hidden_size": {"9" * 5000}}}')
    report = run(target)
    assert "not valid JSON" in report.findings.messages("error")[0]
    assert "Errors" in printed(report)


@pytest.mark.parametrize("size", [10**300, 10**4000, 2**63, 2**63 - 1])
def test_numbers_beyond_all_models(tmp_path, laptop, size):
    config = json.loads((TINY / "config.json").read_text())
    for key in [key for key, value in config.items() if type(value) is int]:
        target = folder(tmp_path, config={**config, key: size})
        for machine in (None, "inf2.xlarge"):
            report = run(target, {}, machine)
            assert printed(report)
            json.dumps(as_json(report), allow_nan=False)


def test_weights_that_are_cut_off_are_an_error(tmp_path, laptop):
    target = folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 12)
    report = run(target)
    assert "model.safetensors" in report.findings.messages("error")[0]


def test_a_whole_folder_needs_no_warning(laptop):
    report = run(TINY)
    assert (report.findings.messages("error"), report.findings.messages("warning")) == ((), ())
    content = (TINY / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
    assert report.prepared.case.model.num_parameters == sum(map(math.prod, shapes))


def test_another_file_is_not_judged_as_its_folder(tmp_path):
    folder(tmp_path)
    (tmp_path / "model.py").touch()
    report = run(tmp_path / "model.py")
    assert "is not a .properties file" in report.findings.messages("error")[0]


@pytest.mark.parametrize(
    "target", ["/no/such/folder", "./nothing", "missing.properties", "a\0b", "~nobody/x/y"]
)
def test_a_target_that_is_nothing(target):
    report = run(target)
    assert not report.ok
    assert "expected a model folder" in report.findings.messages("error")[0]
    assert "Errors" in printed(report)
    assert as_json(report)["plan"] is None


def test_a_hub_id_is_a_target(environ, laptop):
    report = run("meta-llama/Meta-Llama-3-8B", environ, "inf2.xlarge", max_rolling_batch_size="4")
    assert report.findings.messages("error") == ()
    assert report.prepared.backend == "nxdi"
    assert report.prepared.case.model.num_parameters == 8_030_261_248


@pytest.mark.parametrize("backend", ["tnx", "nxdi"])
def test_the_rules_of_a_named_library_need_no_model(environ, laptop, backend):
    options = {
        "tnx": {"qkv_tiling": "true", "cache_layout": "BSH"},
        "nxdi": {"output_logits": "true", "token_generation_batches": "1"},
    }[backend]
    report = run("nobody/nothing", environ, model_loader=backend, **options)
    missing, refused = report.findings.messages("error")
    assert "nobody/nothing" in missing
    # cache_layout and token_generation_batches depend on values that are not filled in without a model.
    assert next(iter(options)) in refused
    unnamed = run("nobody/nothing", environ, **options)
    assert len(unnamed.findings.messages("error")) == 1


def test_a_draft_model_counts(environ):
    options = {
        "model_loader": "tnx",
        "n_positions": "2048",
        "max_rolling_batch_size": "1",
        "tensor_parallel_degree": "8",
    }
    alone = run("meta-llama/Meta-Llama-3-8B", environ, "inf2.48xlarge", **options)
    draft = {"speculative_draft_model": "TinyLlama/TinyLlama-1.1B-Chat-v1.0"}
    both = run("meta-llama/Meta-Llama-3-8B", environ, "inf2.48xlarge", **options, **draft)
    assert (
        both.prepared.planned.memory.weights
        > alone.prepared.planned.memory.weights + 1.0e9 * 2 // 8
    )
    assert len(both.prepared.planned.graphs) > len(alone.prepared.planned.graphs)


def test_a_draft_model_that_is_not_there_is_an_error(environ):
    report = run(TINY, environ, "inf2.xlarge", speculative_draft_model="nobody/nothing")
    assert any(
        "draft" in error and "nobody/nothing" in error
        for error in report.findings.messages("error")
    )


def test_a_draft_model_by_a_wrong_path_is_told_by_its_own_option(environ):
    for name in ("/no/such/folder", "ftp://nowhere/model", "nobody/nothing"):
        report = run(TINY, environ, "inf2.xlarge", speculative_draft_model=name)
        (error,) = (error for error in report.findings.messages("error") if name in error)
        assert "option.speculative_draft_model" in error
        assert "option.model_id" not in error


BOTH = {"nxdi": "installed", "tnx": "installed"}
LOADERS = [
    # options, the machine at hand, --instance, what is installed, model_type, loader
    ({}, LAPTOP, None, {}, "llama", "cpu"),
    ({"tensor_parallel_degree": "1"}, LAPTOP, None, {}, "llama", "cpu"),
    ({"tensor_parallel_degree": "2"}, LAPTOP, None, {}, "llama", "nxdi"),
    ({"tensor_parallel_degree": "max"}, LAPTOP, None, {}, "llama", "nxdi"),
    ({"model_loader": "tnx"}, LAPTOP, None, {}, "llama", "tnx"),
    ({}, LAPTOP, INF2, {}, "llama", "nxdi"),
    ({}, LAPTOP, INF2, {}, "gpt2", "tnx"),
    ({}, LAPTOP, INF2, {"tnx": "installed"}, "llama", "nxdi"),
    ({}, INF2, None, BOTH, "llama", "nxdi"),
    ({}, INF2, None, {"tnx": "installed"}, "llama", "tnx"),
    ({}, INF2, None, {"nxdi": "installed"}, "gpt2", "tnx"),
    ({}, INF2, None, {"nxdi": "placeholder"}, "llama", "nxdi"),
    ({"model_loader": "cpu"}, INF2, None, BOTH, "llama", "cpu"),
    # an option that only one library has, and that changes more than speed, tells which one a file was written for
    ({"load_split_model": "true"}, INF2, None, BOTH, "llama", "tnx"),
    ({"load_split_model": "true"}, LAPTOP, INF2, {}, "llama", "tnx"),
    ({"load_split_model": "true"}, INF2, None, {"nxdi": "installed"}, "llama", "nxdi"),
    ({"neuron_optimize_level": "3"}, INF2, None, BOTH, "llama", "nxdi"),
    ({}, INF2, None, BOTH, "unheard-of", "nxdi"),
]


@pytest.mark.parametrize(("options", "here", "machine", "installed", "model", "loader"), LOADERS)
def test_which_loader_is_planned_for(
    tmp_path, monkeypatch, options, here, machine, installed, model, loader
):
    names = {"nxdi": "neuronx-distributed-inference", "tnx": "transformers-neuronx"}
    states = {name: installed.get(key, "missing") for key, name in names.items()}
    states["neuronx-cc"] = "missing"
    found = {name: Library(name, None, state) for name, state in states.items()}
    for module in (check_module, judge_module, prepare_module):
        monkeypatch.setattr(module, "libraries", lambda: found)
    monkeypatch.setattr(check_module.machines, "detect", lambda **kwargs: here)
    config = json.loads((TINY / "config.json").read_text()) | {"model_type": model}
    report = run(folder(tmp_path, config=config), machine=machine, **options)
    assert report.prepared.backend == loader
    needed = names.get(loader)
    # On the machine that is to serve, a missing library is worth a warning; elsewhere it is a note.
    serves_here = here is INF2 and machine is None
    told = report.findings.messages("warning") if serves_here else report.findings.messages("note")
    missing = needed is not None and states[needed] != "installed"
    assert any(str(needed) in line for line in told) == missing


def test_what_one_library_knows_is_planned_for_it(tmp_path, laptop):
    config = json.loads((MODELS / "qwen2.5-32b.json").read_text())
    report = run(folder(tmp_path, config=config), machine="inf2.48xlarge")
    assert report.findings.messages("error") == ()
    assert report.prepared.backend == "nxdi"


@pytest.mark.parametrize(
    ("degree", "assumed"),
    [("2", "inf2.48xlarge"), ("24", "inf2.48xlarge"), ("32", "trn1.32xlarge"), ("64", "trn2")],
)
def test_the_machine_that_is_assumed_suits_the_degree(tmp_path, laptop, degree, assumed):
    report = run(folder(tmp_path), tensor_parallel_degree=degree)
    assert report.prepared.case.device.instance_type.startswith(assumed)
    assert any(
        "no Neuron device here" in note and assumed in note
        for note in report.findings.messages("note")
    )


def test_a_file_is_read_as_if_it_lay_beside_the_model(tmp_path, laptop):
    folder(tmp_path, "option.n_positions=64\n")
    other = tmp_path / "other.properties"
    other.write_text("option.max_rolling_batch_size=3\n")
    options = run(other).resolved.options
    assert options.max_rolling_batch_size == 3
    assert options.n_positions == 512  # the other file is not read
    assert run(tmp_path).resolved.options.n_positions == 64


def test_the_command_line_wins(tmp_path, laptop, capsys):
    target = folder(tmp_path, "option.n_positions=64\n")
    assert cli.main(["check", target, "-o", "option.n_positions=128", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["options"]["n_positions"]
    assert told == {"value": 128, "origin": "command line"}


def test_all_lists_every_option(laptop):
    report = run(TINY)
    names = re.findall(r"^\W*(\w+)", printed(report, everything=True), re.MULTILINE)
    assert set(ServingOptions.model_fields) <= set(names)
    few = re.findall(r"^\W*(\w+)", printed(report), re.MULTILINE)
    assert "cpu_threads" not in few
    assert "dtype" in few


def test_without_rich_the_same_is_said(environ, monkeypatch):
    path = ROOT / "configs" / "llama3-8b-inf2.properties"
    report = run(path, environ, "inf2.xlarge")
    words = set(printed(report).split())
    for module in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    plain = set(printed(report).split())
    assert {word for word in words if re.search(r"\w", word)} == {
        word for word in plain if re.search(r"\w", word)
    }


def test_a_stream_that_is_ascii_only(laptop):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="replace")
    report = run(TINY, max_rolling_batch_size="2")
    render(Placement((report,), report.findings, ()), stream)
    stream.flush()
    assert b"- headroom" in raw.getvalue()


def test_nothing_that_is_printed_steers_the_terminal(tmp_path, laptop):
    target = folder(tmp_path, config={"model_type": "\x1b[2Jllama\udc80\n"})
    out = printed(run(target))
    assert "\x1b" not in out
    assert "\\x1b[2Jllama" in out
    out.encode()


CONFIG_KEYS = [
    *("model_type", "architectures", "hidden_size", "num_attention_heads", "num_hidden_layers"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings", "torch_dtype", "head_dim"),
    *("intermediate_size", "text_config", "sliding_window", "num_local_experts", "rope_scaling"),
]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["llama", "gpt_neox", "mixtral", "float32", "LlamaForCausalLM"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
SETTINGS = {
    "model_loader": ["tnx", "nxdi", "cpu", "sim", "auto"],
    "n_positions": ["128", "64,512", "99999999", "0"],
    "max_rolling_batch_size": ["1", "7", "999"],
    "tensor_parallel_degree": ["max", "3", "24"],
    "quantize": ["static_int8", "static_fp8"],
    "override_neuron_config": ['{"a": NaN}', "{}"],
    "on_device_generation": ["true", '{"top_k": 5}'],
    "rolling_batch_strategy": ["continuous_batching", "naive_rolling_batch"],
}


@settings(max_examples=examples(120), deadline=None, derandomize=True)
@given(
    st.dictionaries(st.sampled_from(CONFIG_KEYS), JSON),
    st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in SETTINGS.items()}),
    st.sampled_from([None, "inf2.xlarge", "trn1.32xlarge"]),
)
def test_whatever_a_configuration_holds_there_is_a_report(config, options, machine):
    with tempfile.TemporaryDirectory() as path:
        target = folder(Path(path), config={"model_type": "llama", **config})
        report = run(target, {}, machine, **options)
        assert printed(report, everything=True)
        json.dumps(as_json(report), allow_nan=False)


def test_the_keys_of_the_json_are_those_of_the_page(environ):
    recipe = str(ROOT / "configs" / "llama3-8b-inf2.properties")
    machine = machines.named("inf2.48xlarge")
    told = all_as_json(check_all([recipe], environ=environ, overrides={}, machine=machine))
    json.dumps(told, allow_nan=False)
    page = (ROOT / "docs" / "check.md").read_text()
    rows = re.findall(r"^\| (`[^|]*) \|", page.partition("## JSON")[2], re.MULTILINE)
    listed = {key for row in rows for key in re.findall(r"`([\w.]+)`", row)}
    assert {key for key in listed if "." not in key} == told.keys()
    assert {key.partition(".")[2] for key in listed if "." in key} == told["plan"].keys()
    memory = told["plan"]["memory_per_core"]
    for key in [*memory, *told["plan"]["graphs"][0], *told["plan"]["arguments"], *told["model"]]:
        assert f"`{key}`" in page, key
    parts = [memory[f"{part}_bytes"] for part, *_ in PARTS]
    assert memory["needed_bytes"] == sum(parts)
    assert memory["capacity_bytes"] == 16 * 2**30


GIB = 2**30
BARS = [
    # weights, padding, cache, headroom, capacity in GiB; the line of 16 marks
    ((8, 0, 4, 1, 16), "[########====-...]"),
    ((8, 2, 4, 2, 16), "[########%%====--]"),
    ((20, 0, 10, 2, 16), "[########|==#=====-]"),
    ((4, 0, 0, 0, 0), "[################]"),
]


@pytest.mark.parametrize(("sizes", "line"), BARS)
def test_the_bar_is_to_scale(sizes, line):
    weights, padding, cache, headroom, capacity = (size * GIB for size in sizes)
    memory = CoreMemory(
        weights=weights, kv_cache=cache, padding=padding, headroom=headroom, capacity=capacity
    )
    drawn = bar(memory, 16).translate(IN_ASCII)
    total = max(memory.needed, capacity)
    marks = drawn.replace("|", "")
    assert len(marks) == 18
    for mark, size in (("#", weights), ("%", padding), ("=", cache), ("-", headroom)):
        assert abs(marks.count(mark) - 16 * size / total) <= 1
    assert ("|" in drawn) == (not memory.fits)
    if "|" in drawn:
        assert drawn.index("|") - 1 == round(16 * capacity / total)
    elif capacity:
        assert drawn == line


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (True, "true"),
        ((256, 512), "256,512"),
        (120.0, "120"),
        (0.5, "0.5"),
        (Path("a/b"), "a/b"),
        ({"a": None}, '{"a": null}'),
        ("bfloat16", "bfloat16"),
        (math.nan, "nan"),
        ({"a": math.inf}, '{"a": "inf"}'),
        ((0.5, "a"), '[0.5, "a"]'),
    ],
)
def test_values_are_shown_as_they_are_written(value, text):
    assert as_property(value) == text


def test_a_part_below_nothing_makes_no_endless_bar():
    memory = CoreMemory(weights=2**80, kv_cache=2**90, padding=-(2**90), headroom=1, capacity=GIB)
    assert len(bar(memory)) == 60 + len("[|]")


def test_sizes_are_in_gib():
    assert gib(int(1.5 * GIB)) == "1.50"


def test_a_check_imports_nothing_heavy(environ):
    program = (
        "import sys; from djl_python_neuronx import cli; status = cli.main(sys.argv[1:]); "
        "print(status, *sys.modules, file=sys.stderr)"
    )
    path = ROOT / "configs" / "llama3-8b-inf2.properties"
    ran = subprocess.run(
        [sys.executable, "-c", program, "check", str(path), "--instance", "inf2.xlarge"],
        env={**environ, "PATH": "/usr/bin:/bin"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    status, *modules = ran.stderr.split()
    assert status == "0"
    assert "plan OK" in ran.stdout
    assert not HEAVY & set(modules)


OLD_FILE = """\
engine=Python
option.entryPoint={entry_point}
option.model_id=meta-llama/Meta-Llama-3-8B
option.tensor_parallel_degree=8
option.n_positions=4096
option.rolling_batch={rolling_batch}
option.max_rolling_batch_size=8
option.dtype=fp16
option.model_loading_timeout=3600
option.context_length_estimate=[512, 1024, 2048, 4096]
option.neuron_optimize_level=2
option.fuse_qkv=True
option.attention_layout=BSH
option.load_in_8bit=false
option.trust_remote_code=false
option.enable_mixed_precision_accumulation=True
option.model_loader=tnx
option.waiting_steps=4
"""


def test_an_old_file_works_but_for_the_lines_that_have_to_change(environ, tmp_path):
    path = tmp_path / "serving.properties"
    path.write_text(
        OLD_FILE.format(entry_point="djl_python.transformers_neuronx", rolling_batch="auto")
    )
    old = run(tmp_path, environ, "inf2.48xlarge")
    assert old.findings.messages("error") == ()
    assert len(old.findings.messages("warning")) == 3
    told = " ".join(old.findings.messages("warning"))
    for fix in ("option.entryPoint=djl_python_neuronx.handler", "option.async_mode=true"):
        assert fix in told
    assert "option.rolling_batch=tnx" in told
    added = "retry_threshold=3\n"
    assert all(f"{line}" in told for line in added.split())
    path.write_text(
        added + OLD_FILE.format(entry_point="djl_python_neuronx.handler", rolling_batch="tnx")
    )
    new = run(tmp_path, environ, "inf2.48xlarge")
    assert (new.findings.messages("error"), new.findings.messages("warning")) == ((), ())
    assert new.prepared.planned.arguments == old.prepared.planned.arguments
    assert new.prepared.planned.arguments.constructor["context_length_estimate"] == [
        512,
        1024,
        2048,
        4096,
    ]
    assert new.prepared.planned.arguments.neuron_config["fuse_qkv"] is True
    assert "-O2" in " ".join(new.prepared.planned.arguments.compiler_flags)
    assert "quant" not in new.prepared.planned.arguments.neuron_config
    assert "waiting_steps" in new.resolved.ignored


DJL_FILE = "engine=Python\noption.entryPoint=djl_python_neuronx.handler\noption.async_mode=true\n"


@pytest.mark.parametrize(
    ("lines", "variables", "missing"),
    [
        ("", {}, ["retry_threshold", "minWorkers", "maxWorkers"]),
        ("minWorkers=1\nmaxWorkers=1\n", {}, ["retry_threshold"]),
        ("nc.minWorkers=1\ngpu.maxWorkers=2\nretry_threshold=0\n", {}, []),
        ("minWorkers=1\n", {"SERVING_RETRY_THRESHOLD": "9"}, ["maxWorkers"]),
    ],
)
def test_keys_that_djl_serving_needs(tmp_path, laptop, lines, variables, missing):
    warnings = run(folder(tmp_path, DJL_FILE + lines), variables).findings.messages("warning")
    found = [text for text in warnings if "without `option.`" in text]
    assert len(found) == (1 if missing else 0)
    named = re.findall(r"(\w+)=\d", "".join(found))
    assert named == missing
    assert run(tmp_path, variables).ok
    # A CPU gets a second worker under load; Neuron devices never do.
    planned = run(tmp_path, variables, "inf2.xlarge").findings.messages("warning")
    found = [text for text in planned if "without `option.`" in text]
    assert re.findall(r"(\w+)=\d", "".join(found)) == [n for n in missing if "Workers" not in n]
    assert not any("on a CPU" in text for text in planned)


def test_keys_of_djl_serving_do_not_matter_outside_it(tmp_path, laptop):
    report = run(folder(tmp_path, "option.n_positions=256\n"))
    assert not [text for text in report.findings.messages("warning") if "retry_threshold" in text]


RECIPE = ROOT / "configs" / "mistral-7b-inf2.properties"


def late_answers(environ, machine="inf2.xlarge", target=RECIPE, **options):
    notes = run(target, environ, machine, **options).findings.messages("note")
    return [text for text in notes if "chunked_read_timeout" in text]


def test_the_longest_answer_may_take_longer_than_djl_serving_waits(environ):
    # 7.24 billion parameters in bfloat16 on two cores with 410 GB/s each: 17 ms for the weights, and 5 for
    # the cache of four slots.
    (note,) = late_answers(environ)
    assert "n_positions=8192" in note
    assert 180 < int(re.search(r"at least (\d+) s", note)[1]) < 195
    assert "120 s" in note
    variable = re.search(r"SERVING_CHUNKED_READ_TIMEOUT to (\d+)", note)[1]
    assert late_answers({**environ, "SERVING_CHUNKED_READ_TIMEOUT": variable}) == []
    assert late_answers(environ, n_positions="4096", context_length_estimate="4096") == []
    assert late_answers(
        {**environ, "SERVING_CHUNKED_READ_TIMEOUT": "2"},
        n_positions="4096",
        context_length_estimate="4096",
    )


def test_the_longest_answer_takes_the_steps_that_are_printed(tmp_path):
    """Llama 3.1 70B with 8 slots of 8192 tokens: 21.7 ms a step, 178 s, and 280 s as AWS measured it."""
    config = json.loads((MODELS / "llama-3-70b.json").read_text())
    target = folder(tmp_path, config=config | {"max_position_embeddings": 131072})
    options = {"tensor_parallel_degree": "24", "n_positions": "8192", "async_mode": "true"}
    (note,) = late_answers({}, "inf2.48xlarge", target, **options, max_rolling_batch_size="8")
    seconds, step = re.search(r"at least (\d+) s, ([\d.]+) ms", note).groups()
    assert 170 < int(seconds) < 190
    notes = run(target, machine="inf2.48xlarge", **options, max_rolling_batch_size="8").findings
    assert any(f"in at least {step} ms" in text for text in notes.messages("note"))


@pytest.mark.parametrize(
    ("machine", "options"),
    [
        ("inf2.48xlarge", {"tensor_parallel_degree": "24"}),  # fewer bytes on each core
        ("inf2.xlarge", {"model_loader": "cpu"}),
        ("inf2.xlarge", {"async_mode": "false"}),
        ("inf2.xlarge", {"ngram_prompt_lookup_max": "3"}),
    ],
)
def test_the_time_of_the_longest_answer_is_short_or_unknown(environ, machine, options):
    assert late_answers(environ, machine, **options) == []


def test_variables_name_a_model_where_the_folder_holds_none(environ, tmp_path, laptop):
    report = run(tmp_path, {**environ, "HF_MODEL_ID": "facebook/opt-13b"})
    assert report.findings.messages("error") == ()
    assert report.prepared.case.model.model_type == "opt"
    assert report.resolved.origins["model_id"] == "environment HF_MODEL_ID"


def test_a_model_in_s3_is_a_target(laptop):
    pytest.importorskip("boto3", reason="needs the `s3` extra")
    content = (MODELS / "gpt2.json").read_bytes()
    with remote_doubles.s3({"bucket/gpt2/config.json": content}) as (url, log):
        keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "s", "AWS_ENDPOINT_URL": url}
        report = run("s3://bucket/gpt2", keys, "inf2.xlarge")
    assert report.findings.messages("error") == ()
    assert report.prepared.backend == "tnx"
    asked = ["serving.properties", "config.json", "manifest.json"]
    assert [path for _, path, _ in log] == [f"/bucket/gpt2/{name}" for name in asked]


PLACES = {"model_dir": None, "model_id": None}
OWN_FILES = [
    "option.n_positions=256\noption.max_rolling_batch_size=2\n",
    "option.bogus=1\n",
    "option.n_positions=many\n",
    "option.api_key_file=/etc/hosts\n",
    "option.env=HF_ENDPOINT=http://127.0.0.1:1,OMP_NUM_THREADS=2\n",
    "option.override_neuron_config=/etc/hosts\n",
    "option.trust_remote_code=true\n",
    "option.rolling_batch=tnx\nbatch_size=4\n",
    "broken=\\u12\n",
]


def test_the_file_of_a_folder_in_s3_is_read_as_on_disk(tmp_path, laptop):
    pytest.importorskip("boto3", reason="needs the `s3` extra")
    config = (TINY / "config.json").read_bytes()
    for text in OWN_FILES:
        target = folder(tmp_path, text)
        objects = {"b/m/config.json": config, "b/m/serving.properties": text.encode()}
        with remote_doubles.s3(objects) as (url, _):
            keys = {
                "AWS_ACCESS_KEY_ID": "id",
                "AWS_SECRET_ACCESS_KEY": "s",
                "AWS_ENDPOINT_URL": url,
            }
            here = run(target, keys, "inf2.xlarge")
            there = run("s3://b/m", keys, "inf2.xlarge")
        told = [
            {message.replace(place, "PLACE") for message in report.findings.messages(level)}
            for report, place in ((here, target), (there, "s3://b/m"))
            for level in ("error", "warning", "note")
        ]
        told[1] = {message for message in told[1] if "no weights in" not in message}
        assert told[:3] == told[3:], text
        if here.prepared is not None:
            same = [
                {name: value for name, value, _ in report.resolved.explain()} | PLACES
                for report in (here, there)
            ]
            assert same[0] == same[1]


def test_places_in_the_file_of_a_folder_in_s3_are_in_that_folder(tmp_path, laptop, monkeypatch):
    """Not in the working directory; and a model without a name is the folder's own."""
    pytest.importorskip("boto3", reason="needs the `s3` extra")
    monkeypatch.chdir(tmp_path)
    lines = b"option.model_id=\noption.compiled_graph_path=graphs\n"
    config = (TINY / "config.json").read_bytes()
    objects = {"b/m/config.json": config, "b/m/serving.properties": lines}
    with remote_doubles.s3(objects) as (url, _):
        keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "s", "AWS_ENDPOINT_URL": url}
        report = run("s3://b/m/", keys, "inf2.xlarge")
    options = report.resolved.options
    places = (options.model_id, options.place("compiled_graph_path"))
    assert places == ("s3://b/m", "s3://b/m/graphs")


def test_a_model_on_two_machines_is_planned_and_not_loadable(tmp_path, laptop):
    config = json.loads((MODELS / "llama-3-70b.json").read_text())
    target = folder(tmp_path, config=config)
    wanted = {"model_loader": "tnx", "tensor_parallel_degree": "64", "n_positions": "4096"}
    alone = run(target, machine="trn1.32xlarge", **wanted)
    assert any("64 NeuronCores are needed" in error for error in alone.findings.messages("error"))
    for machine in ("trn1.32xlarge", None):
        environ = {"NEURON_LOCAL_TP": "32", "NEURON_RANK_ID": "0"}
        report = run(target, environ, machine, **wanted)
        assert report.findings.messages("error") == ()
        assert report.prepared.planned.memory.fits
        assert not report.loadable
        told = printed(report)
        assert "2 x trn1.32xlarge: 64 of 64 NeuronCores" in told
        assert "several machines (NEURON_LOCAL_TP=32) is not served" in " ".join(told.split())


def test_several_machines_by_the_variables_of_option_env(tmp_path, laptop):
    target = folder(tmp_path, "option.env=NEURON_LOCAL_TP=4\n")
    wanted = {"model_loader": "tnx", "tensor_parallel_degree": "8"}
    report = run(target, machine="inf2.48xlarge", **wanted)
    assert any("several machines (NEURON_LOCAL_TP=4)" in reason for reason in report.lacking)


def test_a_draft_model_is_judged_as_it_would_be_loaded(environ, tmp_path):
    draft = tmp_path / "draft"
    draft.mkdir()
    config = json.loads((TINY / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    named = {"model_loader": "cpu", "speculative_draft_model": str(draft), "n_positions": "128"}
    errors = run(TINY, environ, **named).findings.messages("error")
    assert any("no weights" in error for error in errors)
    assert any("64 positions" in error and "draft" in error for error in errors)
    assert not any("command line" in error for error in errors if error.startswith("the draft"))


LLAMA = {"model_loader": "tnx", "n_positions": "2048", "max_rolling_batch_size": "2"}


@pytest.fixture
def both(tmp_path):
    """Llama 3 8B, and TinyLlama with its vocabulary as a draft model, without weights."""
    target, draft = tmp_path / "model", tmp_path / "draft"
    for path, name in ((target, "llama-3-8b"), (draft, "tinyllama-1.1b")):
        path.mkdir()
        config = json.loads((MODELS / f"{name}.json").read_text())
        folder(path, config={**config, "vocab_size": 128256})
    return str(target), {**LLAMA, "speculative_draft_model": str(draft)}


class TestDraftModel:
    def test_what_the_library_is_given_for_it(self, both):
        target, named = both
        degrees = {"tensor_parallel_degree": "8", "draft_model_tp_size": "2"}
        report = run(target, machine="inf2.48xlarge", **named, **degrees, speculative_length="4")
        assert report.findings.messages("error") == ()
        plan = as_json(report)["plan"]
        assert plan["arguments"]["constructor"]["tp_degree"] == 8
        assert plan["draft_arguments"]["constructor"]["tp_degree"] == 2
        assert plan["draft_arguments"]["constructor"]["n_positions"][-1] == 2048
        assert list(plan["arguments"]["calls"].items()) == [
            ("enable_speculative_decoder", {"speculation_length": 5, "batch_sizes": [2]}),
            ("to_neuron", {}),
        ]
        assert plan["draft_arguments"]["calls"] == {"to_neuron": {}}
        told = printed(report)
        assert "drafts    4 tokens at a time, from the draft model" in told
        model, draft = told.split("Handed to the tnx library")[1:]
        assert "enable_speculative_decoder()" in model
        assert ", for the draft model" in draft
        assert "tp_degree" in draft
        assert "enable_speculative_decoder" not in draft

    def test_one_that_a_load_refuses_has_no_plan(self, both):
        target, named = both
        path = Path(named["speculative_draft_model"])
        config = json.loads((path / "config.json").read_text())
        folder(path, config={**config, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
        report = run(target, machine="inf2.48xlarge", **named)
        (error,) = report.findings.messages("error")
        assert error.startswith("the draft model: ")
        assert "rope_scaling" in error
        assert report.prepared is not None
        assert report.prepared.draft is None

    def test_without_one_nothing_is_given_for_it(self, both):
        report = run(both[0], machine="inf2.48xlarge", **LLAMA)
        plan = as_json(report)["plan"]
        assert (plan["arguments"]["calls"], plan["draft_arguments"]) == ({"to_neuron": {}}, None)
        told = printed(report)
        assert "drafts  " not in told
        assert "draft model" not in told

    def test_the_last_cores_hold_it_alone(self, both):
        """Two cores hold both: a half of Llama 3 8B and an eighth of the draft model each.

        Of Llama, tnx leaves the embedding on the host: 8,030,261,248 - 128256 x 4096 numbers. The draft has 22 layers
        (2 x 2048 x 2048 for queries and output, 2 x 2048 x 256 for keys and values, 3 x 2048 x 5632, two norms), a
        norm, and a head of 128256 x 2048. Its 4 KV heads of 64 are copied to 8 cores: 4 heads of 2 x 2048 x 64 numbers
        in each layer, and the cache of as many.
        """
        target, named = both
        degrees = {"tensor_parallel_degree": "2", "draft_model_tp_size": "8"}
        report = run(target, machine="inf2.48xlarge", **named, **degrees)
        assert report.findings.messages("error") == ()
        memory = report.prepared.planned.memory
        layer = 2 * 2048 * 2048 + 2 * 2048 * 256 + 3 * 2048 * 5632 + 2 * 2048
        draft = 22 * layer + 2048 + 128256 * 2048
        assert memory.weights == (8_030_261_248 - 128256 * 4096) * 2 // 2 + draft * 2 // 8
        tokens = 2 * 2048
        draft_cache = 2 * 22 * 4 * 64 * tokens * 2
        assert memory.kv_cache == 2 * 32 * 8 * 128 * tokens * 2 // 2 + draft_cache // 8
        assert memory.padding == (22 * 4 * 2 * 2048 * 64 * 2 + draft_cache) // 8
        told = printed(report)
        assert "8 of 24 NeuronCores of 16.00 GiB; the model takes 2, the draft model 8" in told
        assert "on each of the 2 cores that hold both models" in told

    def test_one_core_that_holds_both_is_one(self, both):
        target, named = both
        degrees = {"tensor_parallel_degree": "8", "draft_model_tp_size": "1"}
        report = run(target, machine="inf2.48xlarge", **named, **degrees)
        assert report.findings.messages("error") == ()
        assert "on the core that holds both models: " in printed(report)

    def test_cores_that_are_not_there_are_not_called_memory(self, both):
        target, named = both
        degrees = {"tensor_parallel_degree": "2", "draft_model_tp_size": "8"}
        report = run(target, machine="inf2.xlarge", **named, **degrees)
        assert report.prepared.planned.memory.needed < report.prepared.planned.memory.capacity
        told = printed(report)
        assert "does not fit: there are fewer cores than it takes" in told
        assert "does not fit: needs" not in told

    def test_the_machine_that_is_assumed_has_the_cores_for_it(self, both, laptop):
        target, named = both
        degrees = {"tensor_parallel_degree": "8", "draft_model_tp_size": "32"}
        report = run(target, **named, **degrees)
        assert report.findings.messages("error") == ()
        assert report.prepared.case.device.instance_type == "trn1.32xlarge"


def test_drafts_that_are_looked_up_and_prompts_in_chunks(both):
    report = run(both[0], machine="inf2.48xlarge", **LLAMA, ngram_prompt_lookup_max="3")
    assert report.findings.messages("error") == ()
    told = printed(report)
    assert "drafts    5 tokens at a time, looked up in prompt and text by the newest 3" in told
    assert "enable_speculative_decoder()" in told
    report = run(both[0], machine="inf2.48xlarge", **LLAMA, enable_chunked_prefill="true")
    assert report.findings.messages("error") == ()
    # Two slots of 2048 tokens in blocks of 128, and the block for padding.
    expected = {"init_cache_engine": {"block_size": 128, "num_blocks": 33}, "to_neuron": {}}
    assert as_json(report)["plan"]["arguments"]["calls"] == expected
    assert "init_cache_engine()" in printed(report)


LISTED = {"NEURON_RT_VISIBLE_CORES": "8-15"}


class TestLimit:
    """Cores that variables leave to the process that is going to serve."""

    @pytest.mark.parametrize("machine", ["inf2.48xlarge", None], ids=["instance", "no-device"])
    def test_it_counts_for_every_machine(self, both, laptop, machine):
        report = run(both[0], LISTED, machine, **LLAMA, tensor_parallel_degree="max")
        assert report.findings.messages("error") == ()
        assert report.resolved.options.tensor_parallel_degree == 8
        device = as_json(report)["plan"]["device"]
        assert (device["neuron_cores"], device["visible_cores"]) == (24, 8)
        assert device["limited_by"] == "NEURON_RT_VISIBLE_CORES=8-15"
        (note,) = (note for note in report.findings.messages("note") if "NEURON_RT" in note)
        assert "NEURON_RT_VISIBLE_CORES=8-15 (environment) leaves 8 of the 24" in note
        assert "8 of 8 NeuronCores (NEURON_RT_VISIBLE_CORES=8-15)" in printed(report)

    def test_cores_that_there_are_not_stand_in_the_way(self, both):
        environ = {"NEURON_RT_VISIBLE_CORES": "30-31"}
        (error,) = run(both[0], environ, "inf2.48xlarge", **LLAMA).findings.messages("error")
        assert "inf2.48xlarge has no core 31; its cores are 0 to 23 (environment)" in error

    def test_more_cores_than_it_leaves_are_refused_by_its_name(self, both):
        report = run(both[0], LISTED, "inf2.48xlarge", **LLAMA, tensor_parallel_degree="24")
        (error,) = report.findings.messages("error")
        assert "24 NeuronCores are needed and 8 can be used" in error
        assert (
            "of 24: NEURON_RT_VISIBLE_CORES=8-15 limits this process; lower the degree, raise"
            in error
        )
        assert "inf2.48xlarge: 8 of the 24 required NeuronCores" in printed(report)

    def test_option_env_sets_it_and_is_named(self, both):
        target = both[0]
        text = "option.env=NEURON_RT_NUM_CORES=4,HF_TOKEN=secret\n"
        (Path(target) / "serving.properties").write_text(text)
        report = run(target, {"NEURON_RT_NUM_CORES": "8"}, "inf2.48xlarge", **LLAMA)
        assert report.prepared.case.device.visible_cores == 4
        (note,) = (note for note in report.findings.messages("note") if "NEURON_RT" in note)
        assert "NEURON_RT_NUM_CORES=4 (option.env, " in note
        assert "serving.properties line 1" in note
        assert "secret" not in repr(report) + json.dumps(as_json(report))

    @pytest.mark.parametrize("name", ["NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"])
    def test_an_odd_one_is_left_aside_with_a_warning(self, both, name):
        report = run(both[0], {name: "7-"}, "inf2.48xlarge", **LLAMA)
        assert report.prepared.case.device.visible_cores == 24
        assert any(
            f"{name}=7- is ignored" in warning for warning in report.findings.messages("warning")
        )

    def test_all_cores_are_no_limit(self, both):
        report = run(both[0], {"NEURON_RT_NUM_CORES": "0"}, "inf2.48xlarge", **LLAMA)
        assert report.prepared.case.device.visible_cores == 24
        assert not any("NEURON_RT" in told.message for told in report.findings)

    def test_a_cpu_has_none(self, laptop):
        report = run(TINY, LISTED, model_loader="cpu")
        assert not any("NEURON_RT" in told.message for told in report.findings)


def test_a_plan_that_there_is_not_refers_to_the_errors(tmp_path):
    (tmp_path / "config.json").write_text("{")
    text = printed(run(tmp_path))
    assert "none: see the errors below" in text
    assert "config.json is missing" not in text


def test_memory_of_a_device_is_not_memory_of_a_cpu():
    assert "GiB of memory" not in printed(run(TINY, machine="inf2.xlarge", model_loader="cpu"))


def test_one_timeout_is_judged_for_both_models(both):
    target, named = both
    (Path(target) / "serving.properties").write_text("option.model_loading_timeout=60")
    report = run(target, machine="inf2.48xlarge", **named)
    (warning,) = (w for w in report.findings.messages("warning") if "model_loading_timeout" in w)
    assert not warning.startswith("the draft model")


def test_only_what_is_for_djl_serving_is_warned_of_it(tmp_path, laptop, caplog):
    """A bare folder has no limit of a load, and a start of the embedded server none of Java's."""

    def about_djl(report):
        words = ("DJL", "retry_threshold")
        warnings = report.findings.messages("warning")
        return [text for text in warnings if any(word in text for word in words)]

    path = tmp_path / "model"
    shutil.copytree(TINY, path)
    file = path / "serving.properties"
    long = {"n_positions": "2048", "model_loading_timeout": "1", "model_loader": "tnx"}
    file.write_text("option.batch_size=2")
    for target in (TINY, path):
        assert about_djl(run(target, machine=INF2, **long)) == []
    file.write_text("engine=Python\noption.rolling_batch=auto")
    found = "".join(about_djl(run(path, machine=INF2, **long)))
    for words in ("entryPoint", "rolling_batch", "retry_threshold", "stops the load"):
        assert words in found
    overrides = {"model_loader": "cpu"}
    report = check(str(path), environ={}, overrides=overrides, purpose=Purpose.SERVE)
    assert report.findings.messages("error") == ()
    assert about_djl(report) == []
    caplog.clear()
    prepare_module.prepare_or_raise(None, path, environ={}, overrides=overrides)
    assert not [each for each in caplog.records if each.levelno > 20 and "DJL" in each.message]


def test_the_rules_of_a_named_library_hold_for_a_model_that_cannot_be_read(laptop):
    report = run(TINY, model_id="/nope/x", **LLAMA, qkv_tiling="true")
    errors = report.findings.messages("error")
    assert len(errors) == 2, errors
    assert any("only the fused projection can be tiled" in error for error in errors)


def models(tmp_path, *names):
    """Folders of published models, and one with a serving.properties for each pair of a name and its text."""
    folders = []
    for number, (name, text) in enumerate(names):
        path = tmp_path / f"{number}-{name}"
        path.mkdir()
        folder(path, text, json.loads((MODELS / f"{name}.json").read_text()))
        folders.append(str(path))
    return folders


def run_all(targets, machine="inf2.48xlarge", environ=None, **options):
    named = machine and machines.named(machine)
    return check_all(targets, environ=environ or {}, overrides=options, machine=named)


@pytest.mark.usefixtures("process")
class TestSeveral:
    def test_copies_of_8b_fill_a_machine(self, tmp_path):
        told = run_all(models(tmp_path, ("llama-3-8b", "")), replicas="max")
        assert told.ok
        assert told.placed == (tuple(f"{core}-{core + 1}" for core in range(0, 24, 2)),)
        (report,) = told.reports
        assert report.prepared.options.max_rolling_batch_size == 16
        assert "the most slots per core" in report.resolved.origins["tensor_parallel_degree"]

    def test_what_is_printed(self, tmp_path, capsys):
        targets = models(
            tmp_path,
            ("llama-3-8b", "option.tensor_parallel_degree=8\noption.replicas=2"),
            ("tinyllama-1.1b", "option.tensor_parallel_degree=2"),
        )
        assert cli.main(["check", *targets, "--instance", "inf2.48xlarge"]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        expected = [
            [targets[0], "0", "0-7", "0-3"],
            [targets[0], "1", "8-15", "4-7"],
            [targets[1], "0", "16-17", "8"],
        ]
        assert [
            words[:4] for words in lines if words[:1] in ([targets[0]], [targets[1]])
        ] == expected
        assert lines[lines.index(["Free", "cores"]) + 1] == ["18-23"]
        assert [words[:2] for words in lines].count(["plan", "OK,"]) == 2

    @pytest.mark.parametrize(
        ("loader", "column"), [("cpu", ["GiB"]), ("nxdi", ["GiB", "per", "core"])]
    )
    def test_the_memory_of_a_copy_on_a_cpu_is_not_that_of_a_core(
        self, tmp_path, capsys, loader, column
    ):
        (target,) = models(tmp_path, ("tinyllama-1.1b", "option.n_positions=64"))
        words = ["-o", "replicas=2", "-o", f"model_loader={loader}"]
        machine = [] if loader == "cpu" else ["--instance", "inf2.xlarge"]
        assert cli.main(["check", target, *words, *machine]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["model", "copy", "cores", "devices", *column] in lines

    def test_json(self, tmp_path, capsys):
        targets = models(tmp_path, ("llama-3-8b", ""), ("tinyllama-1.1b", ""))
        assert cli.main(["check", *targets, "--instance", "inf2.xlarge", "--json"]) == 1
        told = json.loads(capsys.readouterr().out)
        assert told["placement"] is None
        assert "need 3 NeuronCores, and inf2.xlarge gives 2" in told["errors"][0]
        assert [model["ok"] for model in told["models"]] == [True, True]
        assert cli.main(["check", *targets, "--instance", "inf2.24xlarge", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["placement"]["free"] == "3-11"
        memory = [model["plan"]["memory_per_core"]["needed_bytes"] for model in told["models"]]
        assert told["placement"]["copies"] == [
            {"model": targets[0], "copy": 0, "cores": "0-1", "devices": "0", "memory_per_core": memory[0]},
            {"model": targets[1], "copy": 0, "cores": "2", "devices": "1", "memory_per_core": memory[1]},
        ]  # fmt: skip

    def test_a_single_copy_is_not_placed(self, tmp_path):
        told = run_all(models(tmp_path, ("llama-3-8b", "")))
        assert told.placed == (("",),)
        assert all_as_json(told)["placement"] is None
        stream = io.StringIO()
        render(told, stream)
        assert "Placement" not in stream.getvalue()

    def test_too_many_copies_of_one_model(self, tmp_path):
        told = run_all(models(tmp_path, ("llama-3-8b", "")), replicas="13")
        assert not told.ok
        shown = all_as_json(told)
        assert (shown["ok"], shown["placement"]) == (False, None)
        assert "(13 with 2 each)" in shown["errors"][0]
        with pytest.raises(ConfigError, match=r"^copies of .* need 26 NeuronCores") as raised:
            told.raise_errors()
        assert str(raised.value).count("need 26") == 1

    def test_a_name_of_several_models_is_one_error(self, tmp_path):
        settings = ("llama-3-8b", "option.model_name=m")
        targets = models(tmp_path, *[settings] * 3)
        (error,) = run_all(targets).findings.messages("error")
        assert f"{targets[0]}, {targets[1]} and {targets[2]} are models named 'm'" in error
        assert "option.replicas for copies" in error

    def test_a_name_of_a_model_and_an_adapter_of_another_is_an_error(self, tmp_path):
        lora = "option.model_name=a\noption.enable_lora=true\noption.adapters=m=owner/name"
        targets = models(tmp_path, ("llama-3-8b", "option.model_name=m"), ("llama-3-8b", lora))
        (error,) = run_all(targets, model_loader="sim").findings.messages("error")
        assert (
            f"{targets[0]} and {targets[1]} are models named 'm', or have such an adapter" in error
        )

    def test_errors_of_several_models_name_them(self, tmp_path):
        targets = models(
            tmp_path, ("llama-3-8b", "option.dtype=int3"), ("tinyllama-1.1b", "option.rolling=x")
        )
        with pytest.raises(ConfigError) as raised:
            run_all(targets).raise_errors()
        assert f"{targets[0]}: " in str(raised.value)
        assert f"{targets[1]}: " in str(raised.value)

    def test_a_draft_model_lies_on_the_cores_of_its_model(self, tmp_path):
        (draft,) = models(tmp_path, ("tinyllama-1.1b", ""))
        (target,) = models(tmp_path, ("llama-2-7b", ""))
        told = run_all(
            [target],
            replicas="max",
            model_loader="tnx",
            tensor_parallel_degree="4",
            speculative_draft_model=draft,
            draft_model_tp_size="8",
        )
        assert told.findings.messages("error") == ()
        assert told.placed == (("0-7", "8-15", "16-23"),)

    def test_single_cores_of_trn2(self, tmp_path):
        options = {"tensor_parallel_degree": "64", "replicas": "max", "logical_nc_config": "1"}
        told = run_all(models(tmp_path, ("llama-3-70b", "")), "trn2.48xlarge", **options)
        assert told.placed == (("0-63", "64-127"),)

    def test_models_that_count_cores_differently(self, tmp_path):
        targets = models(
            tmp_path, ("llama-3-8b", "option.logical_nc_config=1"), ("tinyllama-1.1b", "")
        )
        (problem,) = run_all(targets, "trn2.48xlarge").findings.messages("error")
        expected = (
            "is planned for 64 cores (trn2.48xlarge), another model for 128 cores (trn2.48xlarge)"
        )
        assert f"{targets[1]} {expected}" in problem
        assert "logical_nc_config" in problem

    def test_models_with_other_cores_in_their_files(self, tmp_path):
        limits = ("NEURON_RT_VISIBLE_CORES=4-7", "NEURON_RT_VISIBLE_CORES=8-11")
        texts = [f"option.env={limit}" for limit in limits]
        targets = models(tmp_path, ("llama-3-8b", texts[0]), ("tinyllama-1.1b", texts[1]))
        (problem,) = run_all(targets).findings.messages("error")
        assert f"4 cores ({limits[1]}), another model for 4 cores ({limits[0]})" in problem

    @pytest.mark.parametrize(("cores", "divided"), [("64-71", "1"), ("127", "1"), ("60-63", "2")])
    def test_numbers_of_logical_cores_on_trn2(self, tmp_path, cores, divided):
        (target,) = models(tmp_path, ("tinyllama-1.1b", "option.replicas=max"))
        environ = {"NEURON_RT_VISIBLE_CORES": cores, "NEURON_LOGICAL_NC_CONFIG": divided}
        assert run_all([target], "trn2.48xlarge", environ).ok
        environ["NEURON_LOGICAL_NC_CONFIG"] = "2"
        told = run_all([target], "trn2.48xlarge", environ)
        (*problem,) = told.findings.messages("error")
        assert bool(problem) == (divided == "1")
        assert not problem or "its cores are 0 to 63 (environment)" in problem[0]

    def test_a_degree_that_a_rule_asks_for_leaves_cores_for_other_copies(self, tmp_path):
        """8 cores for 8 KV heads, not the largest multiple of 8."""
        options = {"model_loader": "nxdi", "flash_decoding_enabled": "true", "replicas": "max"}
        told = run_all(models(tmp_path, ("llama-3-8b", "")), **options)
        assert told.placed == (("0-7", "8-15", "16-23"),)
        (report,) = told.reports
        why = report.resolved.origins["tensor_parallel_degree"]
        assert why == "default: suits shard_over_sequence"

    def test_a_degree_that_suits_the_model_alone(self, tmp_path):
        """24 does not divide its vocabulary."""
        (report,) = run_all(models(tmp_path, ("tinyllama-1.1b", ""))).reports
        assert report.resolved.origins["tensor_parallel_degree"] == "default: suits the model"

    def test_copies_within_the_visible_cores(self, tmp_path):
        told = run_all(
            models(tmp_path, ("llama-3-8b", "")),
            environ={"NEURON_RT_VISIBLE_CORES": "4-7,10-11"},
            replicas="max",
        )
        assert told.placed == (("10-11", "4-5", "6-7"),)
        assert "Free cores\n  none" in printed_all(told)

    def test_on_a_cpu(self, laptop, tmp_path):
        other = shutil.copytree(TINY, tmp_path / "other")
        told = run_all([str(TINY), str(other)], None, model_loader="cpu", replicas="max")
        assert told.placed == (("",), ("",))
        for report in told.reports:
            (note,) = [one for one in report.findings.messages("note") if "replicas" in one]
            assert "1 on a CPU" in note
        assert [one["cores"] for one in all_as_json(told)["placement"]["copies"]] == ["", ""]

    @pytest.mark.parametrize(("copies", "fits"), [("4", True), ("5", False)])
    def test_copies_on_a_cpu_share_its_memory(self, laptop, tmp_path, copies, fits):
        """64 GiB, of which a copy takes 16."""
        options = {"model_loader": "cpu", "replicas": copies}
        told = run_all(models(tmp_path, ("llama-3-8b", "")), None, **options)
        assert told.ok == fits
        assert fits or "12.80 GiB for each copy" in told.findings.messages("error")[0]

    def test_what_a_library_does_not_serve_yet_is_one_error(self, tmp_path):
        (draft,) = models(tmp_path, ("tinyllama-1.1b", ""))
        (target,) = models(tmp_path, ("llama-2-7b", ""))
        refused = {"speculative_draft_model": draft, "token_generation_batches": "1"}
        told = run_all([target], model_loader="nxdi", **refused)
        (error,) = told.findings.messages("error")
        assert "verifies drafts of all slots together" in error

    def test_as_a_start_prepares_it(self, laptop, tmp_path):
        """No machine is assumed, and absent weights are an error."""
        settings = "option.tensor_parallel_degree=2\noption.replicas=2"
        targets = models(tmp_path, ("llama-3-8b", settings))
        told = check_all(targets, environ={}, overrides={}, purpose=Purpose.SERVE)
        assert [report.prepared for report in told.reports] == [None]
        assert "no weights" in told.findings.messages("error")[0]
        (tmp_path / "tiny").mkdir()
        shutil.copytree(TINY, tmp_path / "tiny", dirs_exist_ok=True)
        overrides = {"tensor_parallel_degree": "2", "replicas": "2", "model_loader": "auto"}
        told = check_all(
            [str(tmp_path / "tiny")], environ={}, overrides=overrides, purpose=Purpose.SERVE
        )
        assert told.findings.messages("error") == ()
        assert told.placed == (("", ""),), "the cpu backend, as a start without a Neuron device"


def printed_all(placement):
    stream = io.StringIO()
    render(placement, stream)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("machine", "loader", "small"),
    [
        ("inf2.xlarge", "nxdi", True),
        ("inf2.xlarge", "tnx", False),
        ("inf2.8xlarge", "nxdi", False),
        ("trn1.2xlarge", "nxdi", False),
    ],
)
def test_a_host_that_is_too_small_for_a_load(tmp_path, machine, loader, small):
    (target,) = models(tmp_path, ("llama-3.1-8b", ""))
    options = {"model_loader": loader, "max_rolling_batch_size": "1", "n_positions": "2048"}
    told = "GiB of the host's memory, and inf2.xlarge has 16"
    warnings = run(target, machine=machine, **options).findings.messages("warning")
    assert any(told in one for one in warnings) == small
    beside_an_error = run(target, machine=machine, **options, tensor_parallel_degree="64")
    assert not any(told in one for one in beside_an_error.findings.messages("warning"))


def test_host_memory_is_printed(tmp_path):
    (target,) = models(tmp_path, ("llama-3-8b", ""))
    report = run(target, machine="inf2.48xlarge", model_loader="nxdi")
    # 16.06 GB of weights twice, and half a GiB
    assert "a load takes up to 32.42 GiB of the host's memory" in printed(report)
    assert as_json(report)["plan"]["host_bytes"] == report.prepared.host_bytes


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"


@pytest.mark.parametrize(
    ("template", "tokenizer", "options", "level", "expected"),
    [
        ("{{ messages[0].content }}", None, (), None, ""),
        (
            ENDLESS,
            None,
            (),
            "warnings",
            "20 characters: the model's chat template takes more than 1 s",
        ),
        (
            ENDLESS,
            None,
            ("-o", "text_timeout=1000"),
            "warnings",
            "takes more than 2 s (of check)",
        ),
        ("{{ raise_exception('Never') }}", None, (), "warnings", "refuses these messages: Never"),
        (
            "{% for x in %}",
            None,
            (),
            "warnings",
            "Jinja, and every chat request fails: line 1: Exp",
        ),
        ("{{ 'a' * 10**7 }}", None, (), "warnings", "template has 10000000 characters, more than"),
        (
            "{{ messages | length }}",
            None,
            ("-o", 'chat_template_kwargs={"tools": []}'),
            "warnings",
            "chat_template_kwargs has 'tools', which the server sets itself",
        ),
        (None, "{", (), "errors", "cannot be loaded"),
        (ENDLESS, "{", ("-o", "trust_remote_code=true"), None, ""),
    ],
)
def test_tokenizer_and_template_are_tried(
    process, laptop, capsys, tmp_path, monkeypatch, template, tokenizer, options, level, expected
):
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setattr(text_trial, "TRY_TEXT_S", 2.0)
    shutil.copytree(TINY, tmp_path / "model")
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        (tmp_path / "model" / "tokenizer.json").write_text(tokenizer)
    arguments = ["check", str(tmp_path / "model"), "--json", "-o", "text_timeout=1", *options]
    status = cli.main(arguments)
    found = json.loads(capsys.readouterr().out)
    tried = {
        name: [one for one in found[name] if "tried with" in str(one) or "tokenizer" in str(one)]
        for name in ("errors", "warnings")
    }
    assert status == (1 if level == "errors" else 0)
    if level is None:
        assert tried == {"errors": [], "warnings": []}
    else:
        assert len(tried[level]) == 1, tried
        assert expected in str(tried[level][0])

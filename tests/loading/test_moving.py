"""Settings of other servers: files of the old container's CI on NxD Inference, tables of the docs on migration."""

import itertools
import json
import re
import shlex
from pathlib import Path

import pytest

from djl_python_neuronx import cli
from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.config.options import NAMES, ServingOptions
from djl_python_neuronx.loading.check import check
from djl_python_neuronx.planning import machines
from djl_python_neuronx.planning.plan import examine

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tests" / "planning" / "models"
NXDI, LMI, TGI, VLLM = (
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("nxdi", "migration", "migration-tgi", "migration-vllm")
)

SAMPLING = {"global_topk": 64, "dynamic": True, "deterministic": False}
SAMPLING_FILE = {"override_neuron_config": json.dumps({"on_device_sampling_config": SAMPLING})}
QUEUED = {"rolling_batch": "disable", "model_loading_timeout": 3600}
DRAFTED = {"speculative_draft_model": "draft", "max_rolling_batch_size": 1}
OLD_CI = {
    # Name there: model here, options there. Source: djl-serving 1132e3ab^, tests/integration/llm/prepare.py, every
    # entry for Neuron whose architecture both libraries have.
    "mixtral-8x7b": (
        "mixtral-8x7b",
        {"tensor_parallel_degree": 8, "n_positions": 1024, "batch_size": 4, **QUEUED},
    ),
    "llama-3-8b-rb-vllm": (
        "llama-3-8b",
        {"tensor_parallel_degree": 8, "n_positions": 1024, "max_rolling_batch_size": 4}
        | {"rolling_batch": "vllm", "model_loading_timeout": 2400},
    ),
    "tiny-llama-rb-vllm": (
        "tinyllama-1.1b",
        {"tensor_parallel_degree": 2, "n_positions": 1024, "max_rolling_batch_size": 4}
        | {"rolling_batch": "vllm", "model_loading_timeout": 1200},
    ),
    "mistral-7b-rb": (
        "mistral-7b-instruct-v0.2",
        {"tensor_parallel_degree": 4, "n_positions": 1024, "max_rolling_batch_size": 4}
        | {"model_loading_timeout": 2400},
    ),
    "tiny-llama-rb-lcnc": (
        "tinyllama-1.1b",
        {"rolling_batch": "auto", "tensor_parallel_degree": 2, "model_loading_timeout": 3600},
    ),
    "tiny-llama-rb-aot": (
        "tinyllama-1.1b",
        {"rolling_batch": "auto", "tensor_parallel_degree": 2, "n_positions": 1024}
        | {"max_rolling_batch_size": 4, "model_loading_timeout": 1200},
    ),
    "tiny-llama-rb-aot-quant": (
        "tinyllama-1.1b",
        {"quantize": "static_int8", "rolling_batch": "auto", "tensor_parallel_degree": 2}
        | {"n_positions": 1024, "max_rolling_batch_size": 4, "model_loading_timeout": 1200},
    ),
    "llama-3-1-8b-instruct-vllm-nxdi": (
        "llama-3.1-8b",
        {"tensor_parallel_degree": 8, "rolling_batch": "vllm", "max_rolling_batch_size": 1}
        | {"model_loading_timeout": 1200, **SAMPLING_FILE},
    ),
    "llama-3-2-1b-instruct-vllm-nxdi-aot": (
        "llama-3.1-8b",
        {"tensor_parallel_degree": 2, "rolling_batch": "vllm", "max_rolling_batch_size": 1}
        | {"n_positions": 128, "model_loading_timeout": 1200, **SAMPLING_FILE},
    ),
    "neuronx-codestral-22b": (
        "mistral-7b-instruct-v0.2",
        {"tensor_parallel_degree": 8, "block_size": 32, "n_positions": 1024}
        | {"rolling_batch": "auto", "max_rolling_batch_size": 41, "model_loading_timeout": 1800},
    ),
    "neuronx-llama3-2-1b": (
        "llama-3.1-8b",
        {"tensor_parallel_degree": 2, "block_size": 32, "n_positions": 1024}
        | {"rolling_batch": "vllm", "max_rolling_batch_size": 32, "model_loading_timeout": 2400},
    ),
    "llama-3.1-8b-rb": (
        "llama-3.1-8b",
        {"tensor_parallel_degree": 8, "n_positions": 1024, "rolling_batch": "auto"}
        | {"max_rolling_batch_size": 4, "dtype": "fp16", "model_loading_timeout": 3600},
    ),
    "mixtral-random-tiny": (
        "mixtral-8x7b",
        {"tensor_parallel_degree": 8, "n_positions": 512, "option.batch_size": 2, **QUEUED},
    ),
    "codellama-7b-instruct": (
        "llama-2-7b",
        {"tensor_parallel_degree": 8, "n_positions": 256, "option.batch_size": 4, **QUEUED},
    ),
    "mistral-7b": (
        "mistral-7b-v0.1",
        {"tensor_parallel_degree": 4, "n_positions": 512, "option.batch_size": 2}
        | {"dtype": "fp16", **QUEUED},
    ),
    "llama-3.1-8b": ("llama-3.1-8b", {"tensor_parallel_degree": 8}),
    "llama-speculative-rb": (
        "llama-2-13b",
        {"speculative_length": 7, "tensor_parallel_degree": 12, **DRAFTED}
        | {"model_loading_timeout": 3600},
    ),
    "llama-2-tiny-speculative": (
        "tinyllama-1.1b",
        {"tensor_parallel_degree": 2, **DRAFTED},
    ),
}
REFUSED_CI = {
    # ..., and the option that an error names
    "llama-7b-rb": (
        "llama-2-7b",
        {"tensor_parallel_degree": 4, "n_positions": 512, "max_rolling_batch_size": 4}
        | {"model_loading_timeout": 2400, "load_split_model": True},
        "load_split_model",
    ),
}


def write(path, lines, model=None):
    (path / "serving.properties").write_text("\n".join(lines))
    if model:
        (path / "config.json").write_bytes((MODELS / f"{model}.json").read_bytes())
    return path


def checked(path, model, given):
    """The report of a file of the old CI, with `model_loader=nxdi` added and nothing else changed."""
    names = {name: name if name == "batch_size" else f"option.{name}" for name in given}
    lines = [f"{names[name].replace('option.option', 'option')}={given[name]}" for name in given]
    if "speculative_draft_model" in given:
        (path / "draft").mkdir()
        write(path / "draft", [], "tinyllama-1.1b")
    write(path, ["engine=Python", "option.model_loader=nxdi", *lines], model)
    return check(str(path), environ={}, overrides={}, machine=machines.named("inf2.48xlarge"))


@pytest.mark.parametrize("name", OLD_CI)
def test_a_file_of_the_old_ci_is_accepted(tmp_path, name):
    model, given = OLD_CI[name]
    report = checked(tmp_path, model, given)
    assert report.findings.messages("error") == ()
    assert report.prepared.backend == "nxdi"


@pytest.mark.parametrize("name", REFUSED_CI)
def test_what_this_version_cannot_serve_of_the_old_ci_names_the_fix(tmp_path, name):
    model, given, option = REFUSED_CI[name]
    errors = checked(tmp_path, model, given).findings.messages("error")
    assert errors[0].startswith(option)
    assert "model_loader=tnx" in errors[0]


TUNED = {
    # what tunes transformers-neuronx alone, as its guides write it
    "neuron_optimize_level": 2,
    "cache_layout": "BSH",
    "attention_layout": "BSH",
    "collectives_layout": "BSH",
    "group_query_attention": "shard-over-heads",
    "qkv_tiling": True,
    "weight_tiling": True,
    "on_device_embedding": True,
    "low_cpu_mem_usage": True,
    "mlp_out_weight_transpose": True,
    "unroll": 1,
}


@pytest.mark.parametrize("name", TUNED)
def test_what_only_tunes_the_old_library_is_left_out_with_a_note(tmp_path, name):
    given = {"tensor_parallel_degree": 8, "n_positions": 1024, "max_rolling_batch_size": 4}
    report = checked(tmp_path, "llama-3-8b", {**given, name: TUNED[name]})
    assert report.findings.messages("error") == ()
    noted = [note for note in report.findings.messages("note") if note.startswith(name)]
    anyway = name in {"on_device_embedding", "low_cpu_mem_usage"}  # so it is with the library
    assert bool(noted) != anyway
    assert all("NxD Inference has no equivalent; left out" in note for note in noted)
    assert name not in json.dumps(report.prepared.planned.arguments.neuron_config)


def rows(page, first):
    """The rows of the page's table whose first column has this name."""
    lines = page.partition(f"\n| {first} |")[2].partition("\n\n")[0].splitlines()[2:]
    found = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    assert len(found) > 5
    return found


def blocks(page):
    """The commands and files of a page, in their order."""
    return re.findall(r"```(?:sh|properties)\n(.*?)```", page, re.DOTALL)


def code(cell):
    return re.findall(r"`([^`]+)`", cell)


def options(path, lines):
    """The options of a file with these lines; raises its errors."""
    problems = Problems()
    if not any(line.startswith("option.model_id=") for line in lines):
        lines = ["option.model_id=owner/name", *lines]
    found = examine(None, write(path, lines), {}, problems).options
    problems.raise_errors()
    return found


FLAGS = [row for row in rows(VLLM, "vLLM") if code(row[1])]


@pytest.mark.parametrize("row", FLAGS, ids=lambda row: row[0])
def test_each_flag_of_vllm_is_an_option_or_a_flag(tmp_path, row):
    flags = [word for word in code(row[0])[-1].split() if word.startswith("--")]
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    for setting in code(row[1]):
        if setting.startswith("djl-neuronx"):
            arguments = cli._parser().parse_args(shlex.split(setting)[1:])
            assert all(hasattr(arguments, flag[2:].replace("-", "_")) for flag in flags)
            continue
        name, _, value = setting.removeprefix("option.").partition("=")
        assert NAMES[name] == name
        operators = name == "cors_allow_origins"  # refused in a folder's own file
        found = options(tmp_path, [] if operators else [setting])
        assert (
            operators
            or getattr(found, name) != ServingOptions.model_fields[name].default
            or (value in {"none", "false"})
        )
        if (known := NAMES.get(flags[0].removeprefix("--").replace("-", "_"))) is not None:
            assert known == name


REFUSED_FLAGS = {"--allowed-origins"}
"""Flags that stand beside an option, but have another form."""
TAKEN = [
    *(row for row in FLAGS if code(row[1])[0].startswith("option.")),
    *(row for row in rows(TGI, "TGI, variable or flag") if code(row[1])),
]


@pytest.mark.parametrize("row", TAKEN, ids=lambda row: row[0])
def test_flags_and_variables_mean_the_option_beside_them(tmp_path, row):
    names, (setting,) = code(row[0]), code(row[1])
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    words = shlex.split(names[-1]) if names[-1].startswith("--") else []
    if words[:1] == ["vllm"] or {*words} & REFUSED_FLAGS:
        return
    serve = cli._parser().parse_args(["serve", "folder"])
    flags = cli._parser().parse_args(["serve", *words, "-o", "x=1", "folder"])
    assert flags.models == ["folder"]
    if setting.startswith("djl-neuronx"):
        same = cli._parser().parse_args([*shlex.split(setting)[1:], "folder"])
        assert (flags.host, flags.port, flags.drain) == (same.host, same.port, same.drain)
        assert (flags.host, flags.port, flags.drain) != (serve.host, serve.port, serve.drain)
        return
    expected = options(tmp_path, [setting])
    given = dict(flags.option[:-1])
    problems = Problems()
    found = examine(None, tmp_path, {}, problems, given).options if words else expected
    assert found == expected
    value = words[-1] if words else setting.partition("=")[2]
    write(tmp_path, [])
    for variable in (name for name in names if name.isupper()):
        environ = {"MODEL_ID": "owner/name", variable: value}
        assert examine(None, tmp_path, environ, problems).options == expected
    problems.raise_errors()


@pytest.mark.parametrize("row", rows(VLLM, "speculative"), ids=lambda row: row[0])
def test_each_key_of_a_speculative_config_is_its_option(tmp_path, row):
    (given,), settings = code(row[0]), [one for one in code(row[1]) if one.startswith("option.")]
    words = ["serve", "owner/name", "--speculative-config", given]
    pairs = dict(cli._parser().parse_args(words).option)
    problems = Problems()
    write(tmp_path, ["option.model_id=owner/name"])
    expected = options(tmp_path, settings)
    write(tmp_path, ["option.model_id=owner/name"])
    assert examine(None, tmp_path, {}, problems, pairs).options == expected
    environ = {"SM_VLLM_SPECULATIVE_CONFIG": given}
    assert examine(None, tmp_path, environ, problems).options == expected
    assert (expected == options(tmp_path, [])) == (not settings)
    problems.raise_errors()


@pytest.mark.parametrize("row", rows(VLLM, "keyword"), ids=lambda row: row[0])
def test_each_keyword_is_its_option(tmp_path, row):
    (keywords,) = code(row[0])
    override = options(tmp_path, [f"option.override_neuron_config={keywords}"])
    if named := [setting for setting in code(row[1]) if setting.startswith("option.")]:
        assert override == options(tmp_path, named)
        assert override != options(tmp_path, []) or named[0].endswith("=false")
    assert override.override_neuron_config is None


def test_the_command_line_is_the_file(tmp_path):
    command, file = blocks(VLLM)[:2]
    found = options(tmp_path, file.splitlines())
    words = shlex.split(command)
    flags = dict(itertools.pairwise(words))
    assert found.model_id == flags["serve"]
    assert found.tensor_parallel_degree == int(flags["--tensor-parallel-size"])
    assert found.max_rolling_batch_size == int(flags["--max-num-seqs"])
    assert found.max_model_len == int(flags["--max-model-len"])
    wanted = json.loads(flags["--additional-config"])["override_neuron_config"]
    same = [f"option.{name}={flags[flag]}" for name, flag in SAME.items()]
    assert "--no-enable-prefix-caching" in words
    same += ["option.model_loader=nxdi", "option.enable_prefix_caching=false"]
    assert found == options(
        tmp_path,
        [f"option.override_neuron_config={json.dumps(wanted)}", *same],
    )


def test_the_commands_are_taken_as_they_are(tmp_path):
    """Those of the pages, by `serve`: vLLM's with another name of the program, TGI's behind its image."""
    commands = (
        (VLLM, 2, "djl-neuronx"),
        (VLLM, 3, "vllm.entrypoints.openai.api_server"),
        (TGI, 0, "neuron"),
    )
    for page, place, program in commands:
        file = next(block for block in blocks(page) if block.startswith("option."))
        words = shlex.split(blocks(page)[place].replace("\\\n", ""))
        start = next(i for i, word in enumerate(words) if word.endswith(program))
        environ = dict(word.split("=") for word in words[:start] if "=" in word)
        environ = {name: value for name, value in environ.items() if name.startswith("HF_")}
        after = words[start + 1 :]
        arguments = cli._parser().parse_args(after if "serve" in after else ["serve", *after])
        given = dict(arguments.option)
        model = given.pop("model_id", arguments.models[0])
        (tmp_path / "serving.properties").unlink(missing_ok=True)
        problems = Problems()
        found = examine(None, tmp_path, environ, problems, {**given, "model_id": model}).options
        problems.raise_errors()
        expected = options(tmp_path, file.splitlines())
        assert found == expected.model_copy(update={"model_loader": "auto"})
        report = check(
            None,
            environ={},
            overrides={**plain(file), "model_id": str(write(tmp_path, [], "llama-3.1-8b"))},
            machine=machines.named("inf2.48xlarge"),
        )
        assert report.findings.messages("error") == ()


def test_lmis_file_becomes_one_without_a_warning(tmp_path):
    reports, warned = [], []
    for file in blocks(LMI)[-2:]:
        lines = file.replace("s3://models/llama-3-8b", str(tmp_path)).splitlines()
        write(tmp_path, lines, "llama-3-8b")
        machine = machines.named("inf2.8xlarge")
        reports.append(check(str(tmp_path), environ={}, overrides={}, machine=machine))
        assert reports[-1].findings.messages("error") == ()
        *warnings, weights = reports[-1].findings.messages("warning")
        assert weights.startswith("no weights")
        warned.append([re.split(r"[=: ]", text)[0] for text in warnings])
    assert warned == [["rolling_batch", "entryPoint", "retry_threshold"], []]
    old, new = (report.prepared.options for report in reports)
    changed = {"rolling_batch": "auto", "async_mode": False}
    assert new.model_copy(update=changed) == old.model_copy(update=changed)
    assert (new.max_rolling_batch_size, new.tensor_parallel_degree, new.dtype) == (8, 2, "float16")


SAME = {
    "model_id": "serve",
    "tensor_parallel_degree": "--tensor-parallel-size",
    "max_rolling_batch_size": "--max-num-seqs",
    "n_positions": "--max-model-len",
}


def plain(file):
    """The options of a properties file but the model."""
    lines = file.replace("\\\n", "").splitlines()
    pairs = [line.removeprefix("option.").split("=", 1) for line in lines]
    return {name: value for name, value in pairs if name != "model_id"}


BESIDE = {
    # words of the second column, or the first, to what a deployment with it has too
    "with the device's sampling": {"on_device_generation": "{}"},
    "with a draft": {"speculative_draft_model": "draft"},
    "data parallel attention": {"tensor_parallel_degree": 16},  # a core for each KV head
    "kernels": {"fuse_qkv": "true"},
}
PLACES = {
    "model_id": {},
    "compiled_graph_path": {"compiled_graph_path": "graphs"},
    "speculative_draft_model": {"speculative_draft_model": "draft"},
}
"""Options in the table whose values are places."""


@pytest.mark.parametrize("row", rows(NXDI, "feature"), ids=lambda row: row[0])
def test_each_feature_is_served_or_refused_as_the_guide_says(tmp_path, row):
    feature, example, status, run = row
    for name in code(run):
        assert (ROOT / "tests" / "backends" / f"test_nxdi_{name}.py").exists()
    given = {"model_loader": "nxdi", "max_rolling_batch_size": 8, "tensor_parallel_degree": 8}
    for words, more in BESIDE.items():
        given |= more if words in (feature, *row[1].partition("` ")[2:]) else {}
    for setting in code(example)[-1:] if status.startswith("refused") else code(example)[:1]:
        name, _, value = setting.partition("=")
        if name in NAMES:
            given |= PLACES.get(name, {name: value or "true"})
        else:
            given["override_neuron_config"] = json.dumps({name: True})
    model = "mixtral-8x7b" if "experts" in feature else "llama-3-8b"
    (tmp_path / "draft").mkdir()
    write(tmp_path / "draft", [], "llama-3-8b")
    write(tmp_path, [f"option.{name}={value}" for name, value in given.items()], model)
    report = check(str(tmp_path), environ={}, overrides={}, machine=machines.named("trn2.48xlarge"))
    errors = report.findings.messages("error")
    if status.startswith("served") or not code(example):
        assert errors == ()
    else:
        assert status.startswith("refused")
        assert errors, feature

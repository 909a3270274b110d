"""The command line itself: what is a wrong one, and what the process ends with."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

import djl_python_neuronx
from djl_python_neuronx import cli
from djl_python_neuronx.artifacts.manifest import package_version
from djl_python_neuronx.cli import main
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.errors import ConfigError
from tests.doubles import remote_doubles

TINY = str(Path(__file__).parent.parent / "examples" / "tiny-llama")

WRONG = [
    # arguments, words of the message
    ([], "required"),
    (["frobnicate"], "invalid choice"),
    (["check", TINY, "--instance", "inf9.xlarge"], "inf2.48xlarge"),
    (["check", TINY, "--log-level", "loud"], "invalid choice"),
    (["serve", TINY, "--port", "70000"], "1 to 65535"),
    (["serve", TINY, "--drain", "-1"], "0 or more"),
    (["compile", TINY], "--output"),
    (["compile", TINY, "--output", "x", "--weights", "some"], "invalid choice"),
    (["convert", TINY, "x", "--to", "gguf"], "invalid choice"),
    (["serve", "--trust-remote-code", "false", TINY], "--no-trust-remote-code"),
    (["check", "--trust-remote-code", "true"], "take no value"),
    (["compile", "--output", "x", "--trust-remote-code", "false"], "trust_remote_code=false"),
    (["bench", "--goodput", "tpot:5"], "ttft, itl, e2e"),
    (["bench", "--goodput", "ttft:no"], "above 0"),
    (["bench", "--rate", "0"], "above 0"),
    (["bench", "--concurrency", "1.5"], "whole number"),
    (["bench", "--concurrency", "1", "--rate", "1"], "not allowed with"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_a_wrong_command_line_is_status_2(capsys, arguments, words):
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "serve"])
@pytest.mark.parametrize("pair", ["n_positions", "=4", "", " =4"])
def test_an_option_without_name_or_value_is_told(monkeypatch, capsys, command, pair):
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # the command line comes before what it needs
    with pytest.raises(SystemExit) as left:
        cli.main([command, TINY, "-o", pair])
    assert left.value.code == 2
    assert "NAME=VALUE" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_status_1(capsys):
    assert cli.main(["check", "/no/such/folder"]) == 1
    assert "/no/such/folder" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], {}),
        (["a=1", "option.b=2"], {"a": "1", "b": "2"}),
        (["a=1", "a=2"], {"a": "2"}),
        (["a=b=c"], {"a": "b=c"}),
        (["a="], {"a": ""}),
    ],
)
def test_options_of_the_command_line(pairs, expected):
    arguments = [part for pair in pairs for part in ("-o", pair)]
    for command in ("serve", "check"):
        parsed = cli._parser().parse_args([command, TINY, *arguments])
        assert dict(parsed.option) == expected


@pytest.mark.parametrize(
    ("target", "folder", "model_id", "name"),
    [
        (TINY, Path(TINY), None, "tiny-llama"),
        ("/no/such/folder", Path("/no/such/folder"), None, "folder"),
        ("owner/name", None, "owner/name", "name"),
    ],
)
def test_what_serve_is_given(monkeypatch, target, folder, model_id, name):
    app = pytest.importorskip(
        "djl_python_neuronx.server.process", reason="needs the `server` extra"
    )
    from djl_python_neuronx.service import Service

    given = {}

    def load(
        properties, model_dir, *, overrides, prepared, placed, before, on_death, progress, **_
    ):
        given.update(model_dir=model_dir, overrides=overrides, how=(prepared, placed, before))

    def serve(loads, *, prepare, **_):
        ((model, load),) = loads.items()
        given.update(names=model.names)
        load(print, on_death=print, placed=prepare()[0], before=None)
        return 0

    monkeypatch.setattr(Service, "load", load)
    monkeypatch.setattr(app, "serve", serve)
    assert cli.main(["serve", target, "-o", "max_waiting=7"]) == 0
    named = {} if model_id is None else {"model_id": model_id}
    overrides = {**named, "max_waiting": "7"}
    assert given.pop("names")[0] == name
    assert given == {"model_dir": folder, "overrides": overrides, "how": (None, (), None)}


def test_a_properties_file_is_served_as_if_it_lay_beside_the_model(serve_several, tmp_path):
    one = folder_of(tmp_path / "one", "option.model_name=not-this")
    file = tmp_path / "one" / "small.properties"
    file.write_text("option.n_positions=64\noption.model_name=small")
    status, loaded = serve_several(str(file))
    ((names, folder, how),) = loaded
    assert (status, names, folder, how["file"]) == (0, ("small",), Path(one), str(file))


def test_the_file_of_a_folder_in_s3_is_served(serve_several, monkeypatch):
    """Its options are those of the server too, and `option.model_id` may be relative to the folder."""
    pytest.importorskip("boto3", reason="needs the `s3` extra")
    lines = b"option.model_name=small\noption.model_id=./sub\noption.n_positions=64\n"
    with remote_doubles.s3({"bucket/models/llama/serving.properties": lines}) as (url, _):
        keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "s", "AWS_ENDPOINT_URL": url}
        for name, value in keys.items():
            monkeypatch.setenv(name, value)
        status, loaded = serve_several("s3://bucket/models/llama/")
        ((names, folder, how),) = loaded
        assert (status, names, folder) == (0, ("small",), None)
        assert (how["file"], how["content"]) == (
            "s3://bucket/models/llama/serving.properties",
            lines,
        )
        assert how["overrides"]["model_id"] == "s3://bucket/models/llama/sub"
        status, loaded = serve_several("s3://bucket/models/other/")
        ((names, folder, how),) = loaded
        assert (status, names[0], how["content"]) == (0, "other", None)
        assert how["overrides"]["model_id"] == "s3://bucket/models/other/"


def folder_of(path, *lines):
    """A copy of the tiny model with these lines in its serving.properties."""
    shutil.copytree(TINY, path)
    (path / "serving.properties").write_text("\n".join(lines))
    return str(path)


@pytest.fixture
def serve_several(monkeypatch):
    """Run `serve` with folders; what it would load, and their placement or its error."""
    app = pytest.importorskip(
        "djl_python_neuronx.server.process", reason="needs the `server` extra"
    )
    pytest.importorskip("torch", reason="needs the `cpu` extra")
    from djl_python_neuronx.service import Service

    def run(*arguments):
        loaded = []
        monkeypatch.setattr(Service, "load", lambda _, folder, **how: loaded.append((folder, how)))

        def serve(loads, *, prepare, **_):
            for (model, load), cores in zip(loads.items(), prepare(), strict=True):
                load(print, on_death=print, placed=cores, before=None)
                loaded[-1] = (model.names, *loaded[-1])
            return 0

        monkeypatch.setattr(app, "serve", serve)
        return cli.main(["serve", *arguments, "-o", "model_loader=cpu"]), loaded

    return run


def test_several_folders_are_served_side_by_side(serve_several, tmp_path):
    one = folder_of(tmp_path / "one", "option.n_positions=64")
    two = folder_of(tmp_path / "two", "option.replicas=2", "option.model_name=second,2nd")
    status, loaded = serve_several(one, two, "-o", "max_waiting=7")
    assert status == 0
    assert [(names, folder) for names, folder, _ in loaded] == [
        (("one",), Path(one)),
        (("second", "2nd"), Path(two)),
    ]
    for (_, folder, how), placed in zip(loaded, (("",), ("", "")), strict=True):
        assert how["overrides"] == {"max_waiting": "7", "model_loader": "cpu"}
        assert (how["placed"], how["before"]) == (placed, None)
        assert how["prepared"].options.model_dir == folder  # what was placed is loaded


def test_the_name_of_a_model_from_a_uri_holds_no_credentials(monkeypatch):
    """`/ping` shows it while the model loads."""
    app = pytest.importorskip(
        "djl_python_neuronx.server.process", reason="needs the `server` extra"
    )
    names = []
    monkeypatch.setattr(app, "serve", lambda loads, **_: names.extend(m.names for m in loads) or 0)
    assert cli.main(["serve", "s3://AKIADUMMY:DUMMY@bucket"]) == 0
    assert names == [("bucket", "s3://bucket")]


def test_problems_of_several_folders_are_told_together(serve_several, tmp_path, capsys):
    one = folder_of(tmp_path / "one", "option.n_positions=many", "option.write_timeout=5")
    two = folder_of(tmp_path / "two", "option.nope=1", "option.write_timeout=6")
    three = folder_of(tmp_path / "three", "option.model_name=two", "option.engine_process=false")
    status, loaded = serve_several(one, two, three, str(tmp_path / "four"))
    assert (status, loaded) == (1, [])
    told = capsys.readouterr().err
    for words in (
        f"{one}: ",
        "'many'",
        f"{two}: unknown option 'nope'",
        f"{tmp_path / 'four'}: ",
        f"option.write_timeout holds for the whole server: it is 5 for {one} and 6 for {two}",
        f"{two} and {three} are models named 'two'",
        f"{three}: engine_process=false ({three}/serving.properties line",
    ):
        assert words in told


def test_the_models_without_problems_may_be_served(serve_several, tmp_path):
    from djl_python_neuronx.errors import ServingError

    one = folder_of(tmp_path / "one", "option.n_positions=many")
    two = folder_of(tmp_path / "two", "option.replicas=2")
    assert serve_several(one, str(tmp_path / "three"), "--exit-on-error=false")[0] == 1
    seen = []

    def see(loads, *, prepare, exit_on_error, **_):
        seen.extend([exit_on_error, *prepare()])
        return 0

    import djl_python_neuronx.server.process as process

    process.serve, before = see, process.serve
    try:
        arguments = ["serve", one, two, "--exit-on-error=false", "-o", "model_loader=cpu"]
        assert cli.main(arguments) == 0
    finally:
        process.serve = before
    exit_on_error, of_one, of_two = seen
    assert exit_on_error is False
    assert isinstance(of_one, ServingError)
    assert "'many'" in str(of_one)
    assert of_two == ("", "")


def test_keys_are_read_again_with_the_models(serve_several, tmp_path, monkeypatch):
    from djl_python_neuronx.server import process as app
    from djl_python_neuronx.server.keys import read_keys

    file = tmp_path / "keys"
    file.write_text("first")

    def serve(loads, *, prepare, api_keys, **_):
        assert api_keys == read_keys(str(file), None)
        file.write_text("second")
        prepare()
        assert api_keys == read_keys(str(file), None) != []
        kept = [*api_keys]
        file.write_text("")
        with pytest.raises(ConfigError, match="it has no API key"):
            prepare()
        assert api_keys == kept
        return 0

    monkeypatch.setattr(app, "serve", serve)
    assert cli.main(["serve", TINY, "-o", f"api_key_file={file}"]) == 0


def test_only_a_missing_library_is_told_as_one(monkeypatch):
    pytest.importorskip("djl_python_neuronx.server.process", reason="needs the `server` extra")
    monkeypatch.delitem(sys.modules, "djl_python_neuronx.server.process")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigError, match="needs uvicorn; install it"):
        cli._serve(argparse.Namespace())
    monkeypatch.setitem(sys.modules, "djl_python_neuronx.server.process", None)
    with pytest.raises(ImportError, match=r"djl_python_neuronx\.server\.process"):
        cli._serve(argparse.Namespace())


def test_a_port_of_sagemaker_is_checked(monkeypatch):
    monkeypatch.setenv("SAGEMAKER_BIND_TO_PORT", "http")
    with pytest.raises(ConfigError, match="SAGEMAKER_BIND_TO_PORT"):
        cli._port_from_environment()


@pytest.fixture
def log(caplog):
    """The log from INFO on."""
    with caplog.at_level("INFO", "djl_python_neuronx"):
        yield caplog


def test_a_start_that_fails_tells_all_that_is_wrong(tmp_path, log):
    pytest.importorskip("prometheus_client", reason="needs the `server` extra")
    from djl_python_neuronx.service import Service

    lines = "option.n_positions=many\noption.dtype=bf16\noption.model_id=gone\n"
    (tmp_path / "serving.properties").write_text(lines)
    with pytest.raises(ConfigError) as caught:
        Service.load(None, tmp_path, environ={})
    one, two = map(str, caught.value.problems)
    assert "many" in one
    assert "gone" in two
    # What it was started with is in the log all the same.
    assert re.search(r"option name=dtype value=bfloat16 origin=.*line 2", log.text)


def test_settings_and_what_does_not_suit_the_machine_are_told_together(log):
    pytest.importorskip("torch", reason="needs the `cpu` extra")
    from djl_python_neuronx.service import Service

    overrides = {"model_loader": "cpu", "dtype": "int3", "cpu_threads": "1000000", "nope": "1"}
    with pytest.raises(ConfigError) as caught:
        Service.load(None, Path(TINY), environ={}, overrides=overrides)
    told = "\n".join(map(str, caught.value.problems))
    for words in ("int3", "cpu_threads=1000000", "'nope'"):
        assert words in told
    assert len(caught.value.problems) == 3
    assert log.text.count("option name=cpu_threads ") == 1
    assert log.text.count("option name=n_positions ") == 1


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert "djl-neuronx" in capsys.readouterr().out


def test_an_interrupt_is_a_status_without_a_traceback(monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_check", interrupt)
    assert cli.main(["check", TINY]) == 130


def test_docs_of_an_option_are_printed_by_any_of_its_names(capsys):
    for name in ("tensor_parallel_degree", "option.tensor_parallel_size"):
        assert main(["options", name]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith("### tensor_parallel_degree\n")
        assert "- Default:" in shown
        assert shown.count("\n#") == 0
    assert main(["options"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ServingOptions.model_fields)
    for given, name in {
        "OPTION_DTYPE": "dtype",
        "HF_NUM_CORES": "tensor_parallel_degree",
        "NEURON_COMPILED_ARTIFACTS": "compiled_graph_path",
        "SM_VLLM_MAX_MODEL_LEN": "n_positions",
        "--max-num-seqs": "max_rolling_batch_size",
        "--num-shard": "tensor_parallel_degree",
        "block_size": "block_size\nIgnored options: for vLLM's own scheduler",
        "use_stable_diffusion": "use_stable_diffusion\nUnsupported options: false",
        "--load-format": "load_format\nA flag of vLLM without an option here; accepted: auto",
    }.items():
        assert main(["options", given]) == 0
        assert capsys.readouterr().out.startswith(f"### {name}")
    assert main(["options", "tensor_paralel_degree", "dtype"]) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("### dtype\n")
    assert "did you mean 'tensor_parallel_degree'" in shown.err


def test_a_shell_reads_its_completion_script(tmp_path):
    module = [sys.executable, "-m", "djl_python_neuronx"]
    made = subprocess.run([*module, "completion", "bash"], capture_output=True, check=True)
    asked = b"""
    COMP_WORDS=(djl-neuronx serve --dra) COMP_CWORD=2
    _shtab_djl_neuronx; echo "${COMPREPLY[@]}"
    """
    answered = subprocess.run(["bash"], input=made.stdout + asked, capture_output=True, check=True)
    assert answered.stdout.split() == [b"--drain"]


def test_the_package_has_a_version():
    assert djl_python_neuronx.__version__ == package_version()


def test_a_log_of_json_has_an_event_in_each_line(monkeypatch, tmp_path):
    """Those of other packages too, and the reason of an error."""
    (tmp_path / "serving.properties").write_text("option.n_positions=no\n")
    code = (
        "import logging, warnings, sys; from djl_python_neuronx import cli\n"
        "status = cli.main(sys.argv[1:])\n"
        "logging.getLogger('asyncio').error('of another\\npackage \\ud800')\n"
        "warnings.warn('a warning')\n"
        "sys.exit(status)"
    )
    command = [
        sys.executable,
        "-c",
        code,
        "compile",
        str(tmp_path),
        "--output",
        str(tmp_path / "o"),
    ]
    environ = {**os.environ, "DJL_NEURONX_LOG_FORMAT": "json", "TZ": "Asia/Tokyo"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert ran.returncode == 1
    events = [json.loads(line) for line in ran.stderr.splitlines()]
    failed, other, warned = events[-3:]
    assert failed["message"].startswith("command_failed command=compile\n")
    assert "n_positions" in failed["message"]
    assert (failed["level"], failed["logger"]) == ("ERROR", "djl_python_neuronx.cli")
    assert other["message"] == "of another\npackage \ud800"
    assert "a warning" in warned["message"]
    written = datetime.fromisoformat(failed["time"].replace("Z", "+00:00"))
    assert abs(datetime.now(timezone.utc) - written) < timedelta(hours=1)
    environ["DJL_NEURONX_LOG_FORMAT"] = "xml"
    ran = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert ran.returncode == 2
    assert "'xml' is not a format of the log" in ran.stderr

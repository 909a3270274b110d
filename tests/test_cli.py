"""The command line itself: what is a wrong one, and what the process ends with."""

import argparse
import re
import sys
from pathlib import Path

import pytest

from djl_python_neuronx import cli
from djl_python_neuronx.errors import ConfigError

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
        ("s3://bucket/models/llama/", None, "s3://bucket/models/llama/", "llama"),
        ("owner/name", None, "owner/name", "name"),
    ],
)
def test_what_serve_is_given(monkeypatch, target, folder, model_id, name):
    app = pytest.importorskip("djl_python_neuronx.server.app", reason="needs the `server` extra")
    from djl_python_neuronx.service import Service

    given = {}

    def load(properties, model_dir, *, overrides, on_death, progress):
        given.update(model_dir=model_dir, overrides=overrides)

    def serve(load, *, folder_name, **_):
        given.update(name=folder_name)
        load(print, print)
        return 0

    monkeypatch.setattr(Service, "load", load)
    monkeypatch.setattr(app, "serve", serve)
    assert cli.main(["serve", target, "-o", "max_waiting=7"]) == 0
    named = {} if model_id is None else {"model_id": model_id}
    overrides = {**named, "max_waiting": "7"}
    assert given == {"model_dir": folder, "overrides": overrides, "name": name}


def test_only_a_missing_library_is_told_as_one(monkeypatch):
    pytest.importorskip("djl_python_neuronx.server.app", reason="needs the `server` extra")
    monkeypatch.delitem(sys.modules, "djl_python_neuronx.server.app")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigError, match="needs uvicorn; install it"):
        cli._serve(argparse.Namespace())
    monkeypatch.setitem(sys.modules, "djl_python_neuronx.server.app", None)
    with pytest.raises(ImportError, match=r"djl_python_neuronx\.server\.app"):
        cli._serve(argparse.Namespace())


def test_a_port_of_sagemaker_is_checked(monkeypatch):
    monkeypatch.setenv("SAGEMAKER_BIND_TO_PORT", "http")
    with pytest.raises(ConfigError, match="SAGEMAKER_BIND_TO_PORT"):
        cli._port_from_environment()


@pytest.fixture
def log(caplog):
    """What is logged from INFO on."""
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

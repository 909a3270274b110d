"""The command line itself: what is a wrong one, and what the process ends with."""

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
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_a_wrong_command_line_is_status_2(capsys, arguments, words):
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "serve"])
@pytest.mark.parametrize("pair", ["n_positions", "=4", ""])
def test_an_option_without_name_or_value_is_told(capsys, command, pair):
    assert cli.main([command, TINY, "-o", pair]) == 1
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
    assert cli._overrides(pairs) == expected


def test_a_port_of_sagemaker_is_checked(monkeypatch):
    monkeypatch.setenv("SAGEMAKER_BIND_TO_PORT", "http")
    with pytest.raises(ConfigError, match="SAGEMAKER_BIND_TO_PORT"):
        cli._port_from_environment()


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert "djl-neuronx" in capsys.readouterr().out

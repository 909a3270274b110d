"""Documents: short lines, working links, existing commands and files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from djl_python_neuronx import cli
from djl_python_neuronx.protocol.neutral import NEUTRAL, WITHOUT_EFFECT
from djl_python_neuronx.protocol.openai_chat import ChatParameters
from djl_python_neuronx.protocol.openai_completions import CompletionParameters
from djl_python_neuronx.protocol.text_generation import Parameters
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.types import FinishReason

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in (".", "docs", "docker", "benchmarks", "examples/*", "deploy/*")
    for path in ROOT.glob(f"{folder}/*.md")
)
MAX_LINE = 120


@pytest.mark.parametrize("document", DOCUMENTS)
def test_lines_are_short(document: str) -> None:
    lines = (ROOT / document).read_text(encoding="utf-8").splitlines()
    long = [f"{document}:{i}" for i, line in enumerate(lines, 1) if len(line) > MAX_LINE]
    assert not long


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for command in set(re.findall(r"djl-neuronx (\w+)", text)):
        with pytest.raises(SystemExit) as left:
            cli.main([command, "--help"])
        assert left.value.code == 0, command


@pytest.mark.parametrize("name", SamplingParams.WIRE_NAMES)
def test_each_sampling_parameter_is_documented(name: str) -> None:
    assert f"\n| `{name}` | " in (ROOT / "docs/protocols.md").read_text(encoding="utf-8")
    features = (ROOT / "README.md").read_text(encoding="utf-8")
    assert name in features.partition("\n| Sampling | ")[2].partition("\n| Protocols | ")[0]


@pytest.mark.parametrize("name", sorted(Parameters.model_fields))
def test_each_parameter_that_is_accepted_is_documented(name: str) -> None:
    text = (ROOT / "docs/protocols.md").read_text(encoding="utf-8")
    described = text.split("**Unsupported parameters**")[0]
    assert any(f"`{name}`" in line.split("|")[1] for line in described.splitlines() if "|" in line)


def test_fields_of_other_servers_are_documented_with_their_values() -> None:
    text = (ROOT / "docs/protocols.md").read_text(encoding="utf-8")
    section = text.partition("\n## Fields of other servers\n")[2].partition("\n## ")[0]
    listed: dict[str, str] = {}
    for line in " ".join(section.split()).split(" - ")[1:]:
        values, _, names = line.partition(": `")
        listed |= dict.fromkeys(re.findall(r"\w+", names), values)
    shown = {
        name: " or ".join(f"`{json.dumps(value)}`" for value in values) or "null alone"
        for name, values in NEUTRAL.items()
    }
    shown |= dict.fromkeys(WITHOUT_EFFECT, "any value, because none has an effect")
    assert listed == shown


@pytest.mark.parametrize(
    "name", sorted({*ChatParameters.model_fields, *CompletionParameters.model_fields})
)
def test_each_parameter_of_openai_is_documented(name: str) -> None:
    text = (ROOT / "docs/protocols.md").read_text(encoding="utf-8")
    assert f"`{name}`" in text.partition("\n## OpenAI\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("reason", FinishReason)
def test_each_finish_reason_is_documented(reason: FinishReason) -> None:
    (line,) = (
        line
        for line in (ROOT / "docs/protocols.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("- **`finish_reason`** is ")
    )
    assert f"`{reason.value}`" in line


NAMED = r"`((?:djl_python_neuronx|tests|tools|docs|benchmarks|configs|constraints|\.ci)/[\w./-]*)"
SHORT = r"`((?:config|planning|loading|artifacts|engine|backends|protocol|server)/[\w./-]*)"


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_files_that_guides_name_exist(document: str) -> None:
    """A path is relative to the repository, or to the package if it starts with one of its folders."""
    text = (ROOT / document).read_text(encoding="utf-8")
    named = [ROOT / name for name in re.findall(NAMED, text)]
    named += [ROOT / "djl_python_neuronx" / name for name in re.findall(SHORT, text)]
    assert named
    assert [str(path) for path in named if not path.exists()] == []


def test_code_in_guides_calls_what_the_files_of_its_step_define() -> None:
    """A call in a Python block is of a function, class or method of a file that the same step names."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    checked = set()
    for step in re.split(r"^(?:\d+\. |## )", text, flags=re.MULTILINE):
        paths = [ROOT / name for name in re.findall(NAMED, step)]
        source = "\n".join(path.read_text(encoding="utf-8") for path in paths if path.is_file())
        for block in re.findall(r"```python\n(.*?)```", step, re.DOTALL):
            called = set(re.findall(r"(\w+)\(", block))
            defined = set(re.findall(r"^ *(?:def|class) (\w+)", source, re.MULTILINE))
            assert called <= defined, f"{sorted(called - defined)} of the step: {step[:60]}"
            checked |= called
    assert {"when", "refuse", "_rule", "_both", "optional_flag"} <= checked


def test_the_life_of_an_option_has_at_most_12_files() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    life = text.partition("## Life of an option\n")[2].partition("\n## ")[0]
    steps = re.findall(r"^\d+\. `([\w/]+\.py)`", life, re.MULTILINE)
    assert 8 <= len(steps) <= 12

"""Documents: short lines, existing commands and files. `make site` checks their links."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from djl_python_neuronx import cli
from djl_python_neuronx.config.keywords import OPTIONS, RESERVED
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.protocol.neutral import NEUTRAL, OF_MESSAGES, OF_RESPONSES, WITHOUT_EFFECT
from djl_python_neuronx.protocol.openai_chat import ChatParameters
from djl_python_neuronx.protocol.openai_completions import CompletionParameters
from djl_python_neuronx.protocol.text_generation import Parameters
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.telemetry import METRICS
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
    for heading, names in (("Anthropic", OF_MESSAGES), ("OpenAI's responses", OF_RESPONSES)):
        section = text.partition(f"\n## {heading}")[2].partition("\n## ")[0]
        assert {*re.findall(r"`(\w+)`", section)} >= names - WITHOUT_EFFECT


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


WORDS = {"", "yes", "no", "planned"}
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


def test_the_support_matrix_has_what_was_run() -> None:
    """Results of the tests of each version of NxD Inference, and the SDKs as AWS's notes name them."""
    lines = (ROOT / "docs/support.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    cells = {row[0]: row[1:] for row in rows}
    assert cells["model_type"][1:] == ["0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "0.10"]
    for model, runs, tnx in (
        ("llama", 6, "equal"),
        ("mixtral", 6, "equal"),
        ("qwen2", 6, "–"),
        ("dbrx", 6, "–"),
        ("qwen3", 5, "–"),
        ("qwen3_moe", 4, "–"),
    ):
        assert cells[model] == [tnx, *["–"] * (6 - runs), *["equal"] * runs, "served"], model
    assert cells["mistral"] == ["equal", *["–"] * 5, "equal ¹", "served"]
    assert cells["gpt2"] == ["equal", *["–"] * 7]
    assert cells["2.28.1"] == ["3.10, 3.11, 3.12", "2.26", "2.23", "2.9", "0.8", "–", "4.57", "yes"]
    assert cells["2.25.0"] == ["3.10, 3.11", "2.23", "2.20", "2.7", "0.5", "0.13", "4.51", "yes"]
    assert cells["2.23.0"][4] == "0.3, not served"


def test_features_of_nxd_inference_name_options_and_tests() -> None:
    """Served ones were run in a test, or not for a reason; pairs of features are judged."""
    text = (ROOT / "docs/nxdi.md").read_text(encoding="utf-8")
    section = text.partition("\n## Features of the library\n")[2]
    features, pairs = section.partition("\n## Combinations\n")[::2]
    rows = [line.strip("| ").split(" | ") for line in features.splitlines() if line[:2] == "| "]
    known = {*ServingOptions.model_fields, *OPTIONS, *RESERVED, "NEURON_RANK_ID"}
    wrong = []
    for name, option, state, *test in [row for row in rows if len(row) > 2][2:]:
        tests = re.findall(r"`(\w+)`", "".join(test))
        missing = [
            one for one in tests if not (ROOT / f"tests/backends/test_nxdi_{one}.py").exists()
        ]
        named = {*re.findall(r"`(\w+)", option)} <= known
        if missing or not named or (state.startswith("served") and not "".join(test).strip("| ")):
            wrong.append(name)
    assert len(rows) > 35
    assert wrong == []
    table = [line for line in pairs.partition("\n## ")[0].splitlines() if line[:2] == "| "]
    cells = {cell.split(":")[0].strip() for row in table[2:] for cell in row.split("|")[2:]}
    assert cells <= WORDS


def test_the_life_of_an_option_has_at_most_12_files() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    life = text.partition("## Life of an option\n")[2].partition("\n## ")[0]
    steps = re.findall(r"^\d+\. `([\w/]+\.py)`", life, re.MULTILINE)
    assert 8 <= len(steps) <= 12


def test_the_page_on_performance_names_metrics_and_options() -> None:
    text = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    rows = text.partition("\n| you see |")[2].partition("\n\n")[0]
    named = {*re.findall(r"`([a-z_]+)`", rows), *re.findall(r"options\.md#(\w+)", text)}
    assert len(named) > 20
    others = {"tnx", "sampling_with_numpy"}  # a backend, an event of the log
    assert named - others <= {*METRICS, *ServingOptions.model_fields}


TGI_METRICS = """
    batch_current_max_tokens batch_current_size batch_decode_duration batch_filter_duration batch_forward_duration
    batch_inference_count batch_inference_duration batch_inference_success batch_next_size queue_size request_count
    request_duration request_failure request_generated_tokens request_inference_duration request_input_length
    request_max_new_tokens request_mean_time_per_token_duration request_queue_duration request_skipped_tokens
    request_success request_validation_duration
"""
"""Without the prefix `tgi_`. Source: text-generation-inference db931fc, docs/source/reference/metrics.md, and
backends/v3/src/backend.rs."""
VLLM_METRICS = """
    cache_config_info e2e_request_latency_seconds generation_tokens gpu_cache_usage_perc inter_token_latency_seconds
    iteration_tokens_total kv_cache_usage_perc lora_requests_info num_preemptions num_requests_running
    num_requests_waiting prefix_cache_hits prefix_cache_queries prompt_tokens request_decode_time_seconds
    request_generation_tokens request_inference_time_seconds request_max_num_generation_tokens
    request_params_max_tokens request_params_n request_prefill_time_seconds request_prompt_tokens
    request_queue_time_seconds request_success request_time_per_output_token_seconds
    spec_decode_num_accepted_tokens spec_decode_num_draft_tokens spec_decode_num_drafts time_per_output_token_seconds
    time_to_first_token_seconds
"""
"""Without the prefix `vllm:`. Source: vLLM 005a810b, v1/metrics/loggers.py and v1/spec_decode/metrics.py."""


def test_each_metric_of_vllm_and_tgi_has_a_row_that_names_metrics_of_ours() -> None:
    page = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
    chapter = page.split("## Metrics of vLLM and TGI")[1]
    rows = [line.strip()[1:-1].split("|") for line in chapter.splitlines() if line[:1] == "|"]
    theirs = {name for row in rows for cell in row[:2] for name in re.findall(r"`([^`]+)`", cell)}
    assert {f"tgi_{name}" for name in TGI_METRICS.split()} <= theirs
    assert {f"vllm:{name}" for name in VLLM_METRICS.split()} <= theirs
    ours = {name for row in rows for name in re.findall(r"`([^`]+)`", row[2])}
    labels = {label for metric in METRICS.values() for label in metric.labels}
    assert ours <= METRICS.keys() | labels | {"_count", "queue"}

"""`djl-neuronx plan`: what it claims holds in other simulations, for `check`, and by arithmetic."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from djl_python_neuronx import cli
from djl_python_neuronx.capacity import Choice, Load, cheapest, list_choices
from djl_python_neuronx.loading.check import check_all
from djl_python_neuronx.planning.machines import INSTANCES, named
from djl_python_neuronx.simulation import summarise

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "tests" / "planning" / "models"
LOAD = Load(2.0, (512, 512), (8, 16), 2.0, math.inf)
LLAMA = "llama-3.1-8b"
TWO = {"tensor_parallel_degree": "2"}


@pytest.fixture(autouse=True)
def _all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rig that is imported into this process sets what a start reads."""
    for name in ("NEURON_RT_NUM_CORES", "NEURON_RT_VISIBLE_CORES"):
        monkeypatch.delenv(name, raising=False)


def folder_of(name: str, parent: Path) -> Path:
    folder = parent / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text((MODELS / f"{name}.json").read_text())
    return folder


def choices_of(folder: Path, load: Load, *instances: str, **options: str) -> list[Choice]:
    prices = {name: float(INSTANCES[name].devices) for name in instances}
    return [*list_choices(str(folder), load, prices, options)]


def plan_of(folder: Path, load: Load, *instances: str, **options: str) -> Choice:
    found = cheapest(choices_of(folder, load, *instances, **options))
    assert found is not None
    return found


def test_of_equal_costs_the_shortest_answers_win(tmp_path: Path) -> None:
    # Hardly any load, so answers are alone: the more cores and the fewer rows, the shorter.
    plan = plan_of(folder_of(LLAMA, tmp_path), LOAD._replace(rate=0.01), "inf2.48xlarge")
    assert (plan.instances, plan.degree, plan.slots) == (1, 24, 1)
    # Copies with one slot would be busy most of the time.
    load = LOAD._replace(rate=8.0, answers=(128, 128), ttft_s=math.inf)
    plan = plan_of(folder_of(LLAMA, tmp_path), load, "inf2.48xlarge")
    others = choices_of(folder_of(LLAMA, tmp_path), load, "inf2.48xlarge")
    assert plan.slots > 1
    assert plan.answer_s == min(one.answer_s for one in others if one.instances == plan.instances)


LOADS = {
    "time to first token": LOAD._replace(rate=3.0, ttft_s=0.6),
    "between tokens": LOAD._replace(rate=1.0, gap_s=0.05),
    "utilisation": LOAD._replace(rate=12.0, ttft_s=math.inf),
    "prompts of many lengths": LOAD._replace(rate=0.1, prompts=(16, 2048), ttft_s=1.5),
}


@pytest.mark.parametrize("name", LOADS)
def test_the_limits_hold_in_other_simulations_and_not_with_an_instance_less(
    name: str, tmp_path: Path
) -> None:
    load, fixed = LOADS[name], {**TWO, "max_rolling_batch_size": "8"}
    plan = plan_of(folder_of(LLAMA, tmp_path), load, "inf2.8xlarge", **fixed)
    assert plan.instances > 1
    assert plan.used <= 0.8 * plan.copies * plan.instances
    rate = 1.1 * load.rate / (plan.copies * plan.instances)
    served = [plan.serve(load.arrivals(rate, seed)) for seed in range(100, 105)]
    summary = summarise(chain(*served))
    assert summary.ttft_p99_s <= load.ttft_s
    assert summary.gap_p99_s <= load.gap_s
    plan.instances -= 1
    assert plan.used > 0.8 * plan.copies * plan.instances or not plan.serves()


def test_more_requests_and_tighter_limits_never_take_less(tmp_path: Path) -> None:
    folder, costs, slots = folder_of(LLAMA, tmp_path), [], []
    for rate in (0.5, 4.0):
        load = LOAD._replace(rate=rate, ttft_s=1.0)
        costs.append(plan_of(folder, load, "inf2.24xlarge", "trn1.2xlarge", **TWO).cost)
    assert costs == sorted(costs)
    assert len({*costs}) > 1
    for gap_s in (1.0, 0.05):
        load = LOAD._replace(rate=8.0, gap_s=gap_s)
        slots.append(plan_of(folder, load, "inf2.24xlarge", **TWO).slots)
    assert slots[0] > slots[1]


@pytest.mark.parametrize(
    ("model", "instance", "options"),
    [
        (LLAMA, "inf2.8xlarge", {}),
        (LLAMA, "trn2.3xlarge", {"dtype": "bf16", "tensor_parallel_degree": "4"}),
        ("llama-3-70b", "inf2.48xlarge", {}),
        ("llama-3-70b", "trn1.32xlarge", {"tensor_parallel_degree": "32"}),
        ("llama-2-13b", "inf2.24xlarge", {"quantize": "static_int8", "model_loader": "tnx"}),
        ("mistral-7b-instruct-v0.2", "inf2.48xlarge", {"max_rolling_batch_size": "8"}),
        ("opt-13b", "inf2.24xlarge", {}),
        ("mixtral-8x7b", "inf2.48xlarge", {}),
        ("qwen2.5-32b", "trn2.48xlarge", {}),
        ("llama-3-8b", "trn1.32xlarge", {"enable_chunked_prefill": "true", "model_loader": "tnx"}),
    ],
)
def test_check_accepts_the_options(
    model: str,
    instance: str,
    options: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = folder_of(model, tmp_path)
    given = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    load = ["--rate", "0.1", "--prompt-tokens", "512-1000", "--output-tokens", "8"]
    assert cli.main(["plan", str(folder), *load, "--instance", instance, "--json", *given]) == 0
    shown = json.loads(capsys.readouterr().out)
    plan = shown["plan"]
    assert plan["instance"] == instance
    (folder / "serving.properties").write_text("\n".join(shown["options"]))
    placement = check_all([str(folder)], environ={}, overrides={}, machine=named(instance))
    assert placement.ok, placement.findings.messages("error")
    case = placement.models[0].case
    assert (case.degree, case.slots) == (plan["degree"], plan["slots"])
    assert len(placement.placed[0]) == plan["copies"]
    assert case.options.max_model_len >= 1000 + 8
    for name, value in options.items():
        assert f"option.{name}={'bfloat16' if value == 'bf16' else value}" in shown["options"]


class TestMoney:
    """Prices of an hour, and of a million tokens of answers."""

    COMMAND = ("--rate", "0.2", "--prompt-tokens", "512", "--output-tokens", "10")

    def shown(self, folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict:
        assert cli.main(["plan", str(folder), *self.COMMAND, *flags, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    def test_only_types_with_a_price_are_tried_and_the_cheapest_wins(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder, found = folder_of(LLAMA, tmp_path), {}
        for inf2, trn1 in ((0.5, 100.0), (100.0, 0.5)):
            prices = [f"inf2.8xlarge={inf2}", f"ml.trn1.2xlarge={trn1}"]
            shown = self.shown(folder, capsys, "--price-per-hour", *prices)
            assert {row["instance"] for row in shown["choices"]} == {"inf2.8xlarge", "trn1.2xlarge"}
            plan = found[inf2] = shown["plan"]
            assert plan["cost"] == plan["instances"] * 0.5
            # 0.2 requests a second with 10 tokens each.
            tokens = 0.2 * 10 * 3600
            assert plan["cost_per_million"] == pytest.approx(1e6 * plan["cost"] / tokens, abs=1e-3)
            hours = 1e6 * plan["instances"] / tokens
            assert plan["instance_hours_per_million"] == pytest.approx(hours, abs=1e-3)
        assert found[0.5]["instance"] == "inf2.8xlarge"
        assert found[100.0]["instance"] == "trn1.2xlarge"

    def test_trainium2_is_tried_by_name_or_price(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = folder_of(LLAMA, tmp_path)
        shown = self.shown(folder, capsys)
        assert {row["instance"][:4] for row in shown["choices"]} == {"inf2", "trn1"}
        shown = self.shown(folder, capsys, "--instance", "trn2.3xlarge")
        assert {row["instance"] for row in shown["choices"]} == {"trn2.3xlarge"}

    def test_without_prices_chips_decide(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = folder_of(LLAMA, tmp_path)
        shown = self.shown(folder, capsys, "--instance", "inf2.48xlarge", "inf2.8xlarge")
        chips = {
            row["instance"]: row["cost"] / row["instances"]
            for row in shown["choices"]
            if row["instances"]
        }
        assert chips == {"inf2.48xlarge": 12, "inf2.8xlarge": 1}
        assert shown["plan"]["instance"] == "inf2.8xlarge"


def test_a_host_that_cannot_hold_a_load_is_refused(tmp_path: Path) -> None:
    """NxD Inference holds the whole checkpoint and its cut copy, 15 GiB each; transformers-neuronx single layers."""
    folder = folder_of(LLAMA, tmp_path)
    for loader, fits in (("nxdi", False), ("tnx", True)):
        (one,) = choices_of(
            folder, LOAD, "inf2.xlarge", model_loader=loader, max_rolling_batch_size="8", **TWO
        )
        assert bool(one.instances) is fits
        if not fits:
            needed, has = map(float, re.findall(r"[\d.]+", one.result))
            assert needed > 30 > has == 16
            assert "of the host's memory" in one.result
            assert one.missed == pytest.approx(needed / has, abs=0.01)


@pytest.mark.parametrize("positions", ["513", "1024"])
def test_answers_of_one_token_have_no_gaps(
    positions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(LLAMA, tmp_path)
    load = ["--rate", "1", "--prompt-tokens", "512", "--output-tokens", "1", "--itl-ms", "1"]
    given = ["--instance", "inf2.8xlarge", "-o", f"n_positions={positions}", "--json"]
    assert cli.main(["plan", str(folder), *load, *given]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["longest_stall_s"] == plan["gap_p99_s"] == 0


BIG = ("--instance", "inf2.48xlarge")


def test_each_choice_has_its_reason(tmp_path: Path) -> None:
    """Memory, the library, and limits that no number of instances keeps, by how much."""
    folder = folder_of("llama-3-70b", tmp_path)
    load = LOAD._replace(ttft_s=0.5, gap_s=0.035)
    choices = choices_of(folder, load, "inf2.xlarge", "trn1.32xlarge", model_loader="tnx")
    by_kind = {"needs": 0, "alone": 0}
    for one in choices:
        kind = one.result.partition(" ")[0].rstrip(":")
        by_kind[kind] += 1
        if kind == "needs":
            needed, has = map(float, re.findall(r"[\d.]+", one.result))
            assert needed > has == 16.0
            assert one.missed == pytest.approx(needed / has, abs=0.01)
        elif not one.instances:
            ttft, gap, missed = map(float, re.findall(r"[\d.]+", one.result))
            assert missed == pytest.approx(max(ttft / 500, gap / 35), abs=0.01)
    assert all(by_kind.values())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--ttft-ms", "5", *BIG],
            "the nearest is inf2.48xlarge .*ms to the first token.*times a limit",
        ),
        (["--itl-ms", "1", *BIG], "between tokens.*times a limit"),
        (
            ["--instance", "inf2.xlarge"],
            r"the nearest is inf2.xlarge .*: needs [\d.]+ GiB a core, has 16.00",
        ),
        (
            ["--price-per-hour", "inf2.xlarge=1", "--instance", "inf2.48xlarge"],
            "no price of inf2.48xlarge",
        ),
        (["-o", "n_positions=512", *BIG], "n_positions=512 is too short"),
        (["-o", "model_loader=cpu", *BIG], "CPUs"),
        (["-o", "dtype=int3"], "^djl-neuronx: .*dtype.*int3"),
    ],
)
def test_an_impossible_load_names_what_is_nearest(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of("llama-3-70b", tmp_path)
    load = ["--rate", "1", "--prompt-tokens", "512", "--output-tokens", "64"]
    assert cli.main(["plan", str(folder), *load, *flags]) == 1
    error = capsys.readouterr().err
    assert error.startswith("djl-neuronx: ")
    assert re.search(words, error), error


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rate", "0"], "argument --rate: '0' is not a number above 0"),
        (["--rate", "nan"], "argument --rate"),
        (
            ["--prompt-tokens", "1.5"],
            "argument --prompt-tokens: '1.5' is not a whole number above 0",
        ),
        (["--output-tokens", "10-"], "argument --output-tokens: '' is not"),
        (["--output-tokens", "-10"], "argument --output-tokens"),
        (["--ttft-ms", "-1"], "argument --ttft-ms"),
        (["--price-per-hour", "inf2.large=1"], "'inf2.large' is not a Neuron instance type"),
        (["--price-per-hour", "inf2.xlarge"], "argument --price-per-hour"),
        (["--instance", "p5.48xlarge"], "'p5.48xlarge' is not a Neuron instance type"),
        (["--quantise", "int8"], "unrecognized arguments: --quantise"),
        ([], "the following arguments are required: --rate, --prompt-tokens, --output-tokens"),
    ],
)
def test_a_wrong_command_line(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    full = ["--rate", "1", "--prompt-tokens", "512", "--output-tokens", "64"] if flags else []
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "model", *full, *flags])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_the_same_command_gives_the_same_plan_without_torch(tmp_path: Path) -> None:
    folder = folder_of(LLAMA, tmp_path)
    code = (
        "import sys; from djl_python_neuronx.cli import main; status = main(sys.argv[1:]); "
        "print(*{'torch', 'transformers'} & {*sys.modules}, file=sys.stderr); sys.exit(status)"
    )
    load = ["--rate", "0.3", "--prompt-tokens", "100-700", "--output-tokens", "5-15"]
    command = [
        sys.executable,
        "-c",
        code,
        "plan",
        str(folder),
        *load,
        "--instance",
        "inf2.24xlarge",
    ]
    runs = [
        subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        for _ in range(2)
    ]
    assert runs[0].stderr == "\n"
    assert runs[0].stdout == runs[1].stdout != ""

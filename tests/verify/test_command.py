"""`djl-neuronx verify` from its command line to its report, on the cpu backend."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the reference needs torch")
pytest.importorskip("transformers", "4.57", reason="the cpu backend needs transformers 4.57")

from safetensors.torch import load_file, save_file

from djl_python_neuronx import cli
from djl_python_neuronx.loading.check import check_all
from djl_python_neuronx.planning.machines import named
from djl_python_neuronx.planning.nxdi.contrib import Code
from djl_python_neuronx.verify import judge, start
from djl_python_neuronx.verify.process import verify_job
from djl_python_neuronx.verify.report import make_report
from tests.doubles.tiny_models import save_tiny_model
from tests.verify.planted import ignore_top_p

ROOT = Path(__file__).parents[2]
OPTIONS = (
    "model_loader=cpu",
    "n_positions=24,48",
    "context_length_estimate=8,20",
    "max_rolling_batch_size=3",
)
FLAGS = [word for option in OPTIONS for word in ("-o", option)]


@pytest.fixture(autouse=True)
def _downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DJL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Without a tokenizer."""
    return save_tiny_model("llama", tmp_path / "secret-model", num_hidden_layers=3)


def test_a_layer_limited_report_in_a_process_of_its_own(
    model: Path, tmp_path: Path, capsys: Any
) -> None:
    """It is the example of docs/verify.md, in everything but its numbers."""
    output = tmp_path / "reports" / "mine"
    assert cli.main(["verify", str(model), *FLAGS, "--layers", "2", "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    assert re.match(
        r"right: \d+ outputs of \d+ graphs and 4 distributions .* the first 2 of 3 layers alone, "
        r"by cpu on the CPU, no chip\n",
        shown,
    )
    report, page = (
        json.loads((output / "report.json").read_text()),
        (output / "report.md").read_text(),
    )
    for text in (shown, page, json.dumps(report)):
        assert str(tmp_path) not in text
        assert "secret" not in text.replace("has no secrets", "")
        assert "Please send this report" in text
    assert report["verdict"] == "right"
    assert report["findings"] == []
    assert (report["model"]["model_type"], report["model"]["num_layers"]) == ("llama", 2)
    assert report["options"] == {
        "dtype": "float32",
        "n_positions": [24, 48],
        "context_length_estimate": [8, 20],
        "max_rolling_batch_size": 3,
    }
    assert {"torch", "transformers", "python"} <= report["versions"].keys()
    assert all(one["median_ms"] > 0 for one in report["graphs"] if one["calls"])
    documented = (ROOT / "docs" / "verify.md").read_text()
    keys = re.findall(r"^\| `(\w+)` \|", documented.partition("## JSON")[2], re.MULTILINE)
    assert {*keys} == {*report, "least_decode_ms"}
    example = documented.rpartition("```markdown\n")[2]
    heads = re.compile(r"^(?:## .*|\| (?:graph|settings|name|what) \|.*)$", re.MULTILINE)
    assert heads.findall(page) == heads.findall(example)
    assert not [*(tmp_path / "cache").rglob("verify-*")]


def test_a_wrong_model_has_exit_status_1(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(start, "verify_guarded", lambda job, _environ: verify_job(job))
    ignore_top_p(monkeypatch)
    assert cli.main(["verify", str(model), *FLAGS, "--quick", "--output", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("wrong: ")
    assert re.search(r"^- sampling on the host: 100 draws with .*'top_p': 0.6", shown, re.MULTILINE)
    assert "| sampling on the host |" in (tmp_path / "report.md").read_text()


def test_a_failed_comparison_loses_no_report(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fail(*_: Any) -> None:
        message = "/home/me/secret"
        raise RuntimeError(message)

    monkeypatch.setattr(start, "verify_guarded", lambda job, _environ: verify_job(job))
    monkeypatch.setattr(judge, "Reference", fail)
    assert cli.main(["verify", str(model), *FLAGS, "--quick", "--output", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("unknown: 0 outputs")
    assert "not compared: all outputs: the comparison failed (RuntimeError)" in shown
    assert "secret" not in shown.replace("has no secrets", "")
    report = json.loads((tmp_path / "report.json").read_text())
    assert all(one["median_ms"] > 0 for one in report["graphs"] if one["calls"])


def test_outputs_that_do_not_fit_on_the_disk_are_an_error_before_all(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    assert cli.main(["verify", str(model), *FLAGS]) == 1
    assert "TMPDIR" in capsys.readouterr().err


REFUSED = {
    "sim": (["-o", "model_loader=sim"], 1, "nothing to compare"),
    "layers": (["--layers", "4"], 1, "--layers is 4, and the model has 3"),
    "no layers": (["--layers", "0"], 1, "--layers is 0, and the model has 3; expected 1 to"),
    "no device": (["-o", "model_loader=auto"], 1, "no chip would be verified: model_loader=auto"),
    "both": (["--layers", "2", "--checkpoint", "."], 1, "leave out --layers"),
    "missing": (["--output", "/dev/null/x"], 1, "/dev/null"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_verified_is_an_error(name: str, model: Path, capsys: Any) -> None:
    arguments, status, words = REFUSED[name]
    try:
        found = cli.main(["verify", str(model), *FLAGS, *arguments])
    except SystemExit as end:
        found = end.code
    assert found == status
    assert words in capsys.readouterr().err


def test_a_quantised_checkpoint_is_refused(model: Path, tmp_path: Path, capsys: Any) -> None:
    copy = shutil.copytree(model, tmp_path / "awq")
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (copy / "config.json").write_text(json.dumps(config))
    assert cli.main(["verify", str(copy), *FLAGS]) == 1
    assert "verify the original checkpoint" in capsys.readouterr().err


def test_an_output_with_cut_weights_needs_its_checkpoint(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Its folder is that of the backend alone: the reference reads the checkpoint, whose field differs in `other`."""
    monkeypatch.setattr(start, "verify_guarded", lambda job, _environ: verify_job(job))
    changed, other = tmp_path / "changed", save_tiny_model("llama", tmp_path / "other")
    shutil.copytree(model, changed)
    weights = load_file(changed / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    save_file({**weights, name: weights[name].flip(0)}, changed / "model.safetensors")
    for reference, status, words in (
        (model, 0, "right: "),
        (changed, 1, "wrong: "),
        (other, 1, "num_hidden_layers 3 instead of"),
        (tmp_path / "none", 1, "--checkpoint"),
    ):
        arguments = ["verify", str(model), *FLAGS, "--quick", "--checkpoint", str(reference)]
        assert cli.main(arguments) == status
        shown = capsys.readouterr()
        assert words in shown.out + shown.err
    # An option puts other weights in the place of the output's.
    assert cli.main(["verify", str(model), *FLAGS, "--quick", "-o", f"model_id={changed}"]) == 0
    shown = capsys.readouterr()
    assert "all layers, whole weights, by cpu" in shown.out
    assert "not compared: any weights in the folder itself" in shown.out
    (prepared,) = check_all(
        [str(model)], environ={}, overrides={}, machine=named("inf2.8xlarge")
    ).models
    cut = replace(prepared, weights=replace(prepared.weights, kind="ranks"))
    (obstacle,) = start._obstacles(cut, None, None)
    assert "name the model that was compiled in --checkpoint" in obstacle
    assert not [*start._obstacles(cut, None, str(model))]


def test_a_reference_that_does_not_fit_names_the_layers_that_do(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A layer has 7,744 parameters, and 6,240 lie around them: with two 86,912 bytes, with all three 117,888."""
    monkeypatch.setattr(start, "available_memory", lambda: 100_000)
    assert cli.main(["verify", str(model), *FLAGS]) == 1
    assert "give --layers 2" in capsys.readouterr().err
    monkeypatch.setattr(start, "available_memory", lambda: 1)
    assert cli.main(["verify", str(model), *FLAGS]) == 1
    assert "take a machine with more memory" in capsys.readouterr().err


def test_a_report_estimates_decode_steps_and_leaves_out_what_may_be_a_path(model: Path) -> None:
    options = {
        "model_loader": "nxdi",
        "n_positions": "64",
        "dtype": "fp32",
        "tensor_parallel_degree": "1",
        "max_rolling_batch_size": "2",
        "override_neuron_config": '{"some_folder": "/home/me"}',
    }
    machine = named("inf2.8xlarge")
    placed = check_all([str(model)], environ={}, overrides=options, machine=machine)
    (prepared,) = placed.models
    code = Code(Path("/home/me/code"), "abc123")
    prepared = replace(prepared, case=replace(prepared.case, code=code))
    outcome = {"findings": [{"place": "slot 1", "problem": "?"}], "graphs": [], "draws": []}
    report = make_report(prepared, outcome, 3, 3)
    assert report["verdict"] == "wrong"
    assert report["machine"]["instance_type"] == "inf2.8xlarge"
    compared = "the first 3 of 3 layers alone, by nxdi on 1 NeuronCore of inf2.8xlarge"
    assert report["compared"] == compared
    assert report["options"]["max_rolling_batch_size"] == 2
    assert report["options"]["nxdi_code_sha256"] == "abc123"
    assert "/home/me" not in json.dumps(report)
    # 29,472 parameters and 2 x 64 tokens of 3 layers with keys and values of 2 heads of 8, at 4 bytes; a chip of two
    # cores reads 820 GB/s.
    assert report["least_decode_ms"] == pytest.approx(
        1000 * 4 * (29_472 + 2 * 64 * 3 * 32) / 410e9, rel=0.02
    )

"""A quantised checkpoint is dequantised once, whole or not at all, and served as transformers computes its weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", "4.57", reason="the cpu backend needs transformers 4.57")

from safetensors.torch import load_file, save_file  # noqa: E402

from djl_python_neuronx import backends  # noqa: E402
from djl_python_neuronx.artifacts.convert import convert  # noqa: E402
from djl_python_neuronx.artifacts.formats import detect  # noqa: E402
from djl_python_neuronx.errors import ArtifactError  # noqa: E402
from djl_python_neuronx.loading import dequantised  # noqa: E402
from djl_python_neuronx.loading.check import check  # noqa: E402
from djl_python_neuronx.loading.dequantised import dequantise  # noqa: E402
from djl_python_neuronx.loading.load_plan import load_plan  # noqa: E402
from djl_python_neuronx.loading.prepare import prepare_or_raise  # noqa: E402
from djl_python_neuronx.planning import machines  # noqa: E402
from tests.backends.tnx_engine import assert_like_alone  # noqa: E402
from tests.doubles.quantised_checkpoints import edit_config, edit_tensors, save_quantised  # noqa: E402
from tests.doubles.tiny_models import load_reference  # noqa: E402

OPTIONS = {"model_loader": "cpu", "dequantize": "true", "n_positions": "64", "dtype": "fp32"}


@pytest.fixture
def model(tmp_path):
    """A model in GPTQ, and its tensors as they are dequantised."""
    folder = tmp_path / "model"
    expected = save_quantised("gptq 4", folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder, expected


@pytest.fixture
def environ(tmp_path):
    return {**os.environ, "SERVING_DOWNLOAD_DIR": str(tmp_path / "downloads")}


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def place_of(folder, environ):
    return dequantised.place_of(detect(folder, origin="the test"), environ)


def prepare(folder, environ):
    return prepare_or_raise(None, folder, environ=environ, overrides=OPTIONS)


def test_two_starts_make_it_once_and_serve_what_transformers_computes(
    model, environ, tmp_path, caplog
):
    folder, expected = model
    before, place, found = content(folder), place_of(folder, environ), []
    with caplog.at_level("INFO", "djl_python_neuronx.loading.dequantised"):
        starts = [
            threading.Thread(target=lambda: found.append(prepare(folder, environ)))
            for _ in range(2)
        ]
        for start in starts:
            start.start()
        for start in starts:
            start.join()
        found.append(prepare(folder, environ))
    assert [one.artifact.path for one in found] == [place] * 3
    assert [one.message.split()[0] for one in caplog.records if "dequant" in one.name] == [
        "dequantising"
    ]
    assert {path.name for path in place.parent.iterdir()} == {place.name, ".locks"}
    assert content(folder) == before
    assert (place / "tokenizer.json").is_file()
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(expected, plain / "model.safetensors", {"format": "pt"})
    (plain / "config.json").write_bytes(before["config.json"])
    edit_config(plain, quantization_config=None, dtype="float32")
    backend = backends.get("cpu").load(load_plan(found[0], lambda: None))
    assert assert_like_alone(backend, load_reference(plain), 5, num_requests=8) > 100


def test_its_place_depends_on_what_it_is_made_of(model, environ):
    folder, _ = model
    places = [place_of(folder, environ)]
    (folder / "serving.properties").write_text("option.max_rolling_batch_size=2\n")
    assert place_of(folder, environ) == places[0]
    (folder / "tokenizer.json").write_text("[]")
    places.append(place_of(folder, environ))
    edit_tensors(folder, lambda tensors: tensors["model.norm.weight"].add_(1))
    places.append(place_of(folder, environ))
    edit_tensors(folder, lambda tensors: tensors["model.embed_tokens.weight"][-1, -1].add_(1))
    places.append(place_of(folder, environ))
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit_config(folder, quantization_config={**config, "checkpoint_format": "gptq_v2"})
    places.append(place_of(folder, environ))
    assert len({*places}) == 5


KILLED = """
import os, signal, sys
from pathlib import Path
from djl_python_neuronx.artifacts import convert
sync = convert.sync_tree
def die(folder):
    sync(folder)
    os.kill(os.getpid(), signal.SIGKILL)
convert.sync_tree = die
convert.convert(Path(sys.argv[1]), Path(sys.argv[2]), "safetensors", dequantize=True)
"""


def test_what_a_killed_process_leaves_is_never_used(model, environ):
    folder, expected = model
    place = place_of(folder, environ)
    command = [sys.executable, "-c", KILLED, str(folder), str(place)]
    place.parent.mkdir(parents=True)
    root = Path(__file__).parents[2]
    path = {**environ, "PYTHONPATH": str(root)}
    run = subprocess.run(command, cwd=root, env=path, check=False)
    assert run.returncode == -signal.SIGKILL
    assert not place.exists()
    assert list(place.parent.iterdir())  # its unfinished folder
    convert(folder, place, "safetensors", dequantize=True)
    found = load_file(place / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert {path.name for path in place.parent.iterdir()} == {place.name}


def test_the_error_of_a_wrong_checkpoint_names_the_tensor_and_leaves_nothing(model, environ):
    folder, _ = model
    place = place_of(folder, environ)
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.scales"))
    with pytest.raises(ArtifactError, match=r"model\.layers\.0\.mlp\.up_proj\.scales"):
        dequantise(folder, place, environ)
    assert not place.exists()


def test_check_names_the_option_and_foresees_the_dequantised_model(model, environ):
    folder, _ = model
    inf2 = machines.named("inf2.xlarge")
    for loader in ("nxdi", "tnx"):
        options = {"model_loader": loader}
        report = check(str(folder), environ=environ, machine=inf2, overrides=options)
        (error,) = [one for one in report.findings.messages("error") if "quantization" in one]
        assert "set dequantize=true" in error
        more = {**options, "dequantize": "true"}
        report = check(str(folder), environ=environ, machine=inf2, overrides=more)
        assert report.ok, report.findings.messages("error")
        assert report.prepared.options.dtype == "bfloat16"
        (note,) = [one for one in report.findings.messages("note") if "in bfloat16 to" in one]
        assert str(place_of(folder, environ)) in note
    assert not place_of(folder, environ).exists()
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.scales"))
    report = check(str(folder), environ=environ, machine=inf2, overrides={"dequantize": "true"})
    (error,) = report.findings.messages("error")
    assert "without model.layers.1.mlp.up_proj.scales" in error
    edit_config(folder, quantization_config={"quant_method": "bitsandbytes"})
    report = check(str(folder), environ=environ, machine=inf2, overrides={"dequantize": "true"})
    assert any("bitsandbytes" in one for one in report.findings.messages("error"))

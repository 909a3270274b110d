"""Outputs of a compile, written from the example model."""

import json
from pathlib import Path

from djl_python_neuronx.artifacts import manifest as manifests
from djl_python_neuronx.artifacts.manifest import is_unfinished
from djl_python_neuronx.artifacts.output import write_output
from tests.artifacts.store_worker import make_facts

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny-llama"


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


OPTIONS = {
    "model_loader": "cpu",
    "n_positions": 128,
    "context_length_estimate": (64, 128),
    "max_rolling_batch_size": 4,
    "trust_remote_code": False,
    "async_mode": True,
    "predict_timeout": 33.5,
    "model_name": ("ein Löwe = 1 \\ \u4e2d", "zwei"),
    "cpu_threads": None,
    "model_id": "/where/it/was",
}


def write(model, destination, **more):
    return write_output(
        model,
        destination,
        **{
            "facts": make_facts(),
            "options": OPTIONS,
            "packages": {},
            "layout": "huggingface",
            **more,
        },
    )


def check_files_are_there_or_it_says_unfinished(destination):
    if is_unfinished(json.loads((destination / "manifest.json").read_text())):
        return
    missing = [
        name for name in manifests.read(destination).files if not (destination / name).exists()
    ]
    assert not missing


def check_whole(destination):
    manifests.verify(destination, manifests.read(destination))

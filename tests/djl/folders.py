"""Model folders for DJL."""

from __future__ import annotations

from tests.djl.java import ROOT

MODEL = ROOT / "examples" / "tiny-llama"
MODES = {
    "rolling": {"rolling_batch": "tnx"},
    "async": {"async_mode": "true", "rolling_batch": "disable"},
    "plain": {"rolling_batch": "disable"},
}
MAX_RUNNING, MAX_WAITING = 8, 16
SIMULATED = {"model_loader": "sim", "sim_step_ms": 5}
"""Options of a device that is simulated: its engine process starts in a second, without torch."""


def write_model(folder, mode, *, workers=1, **options):
    """A model folder for DJL: the example model on the cpu backend. `workers`: number of Python processes."""
    options = {
        "entryPoint": "djl_python_neuronx.handler",
        "model_id": MODEL,
        "model_loader": "cpu",
        **MODES[mode],
        **options,
    }
    lines = ["engine=Python", "retry_threshold=10"]
    lines += [f"minWorkers={workers}", f"maxWorkers={workers}"]
    lines += [f"option.{name}={value}" for name, value in options.items()]
    (folder / "serving.properties").write_text("\n".join(lines) + "\n")
    return folder


def write_toy(folder, mode, **options):
    """A model folder for DJL with the toy backend of `tests.doubles.djl_entry`."""
    lines = ["engine=Python", "option.entryPoint=tests.doubles.djl_entry"]
    lines += [f"option.{name}={value}" for name, value in {**MODES[mode], **options}.items()]
    (folder / "serving.properties").write_text("\n".join(lines) + "\n")
    return folder

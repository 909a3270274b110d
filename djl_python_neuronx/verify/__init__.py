"""`djl-neuronx verify`: compare a model on its device with transformers on the CPU, by token ids and logits."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from djl_python_neuronx.config.sources import MODEL_DIR, environment
from djl_python_neuronx.progress import progress_bars


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    command.add_argument(
        "model",
        nargs="?",
        default=str(MODEL_DIR),
        help="model folder, .properties file, Hugging Face id or s3:// URI (default %(default)s)",
    )
    command.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="verify the first N layers alone, for a model whose float32 weights do not fit into the host's memory",
    )
    command.add_argument(
        "--checkpoint",
        metavar="MODEL",
        help="compare with these weights: the model that an output was compiled from, whose own weights are cut",
    )
    command.add_argument(
        "--quick",
        action="store_true",
        help="leave out ends of long decode graphs, draw fewer tokens",
    )
    command.add_argument(
        "--output", type=Path, metavar="DIR", help="write report.md and report.json to this folder"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status of the process: 0 for right, 1 for wrong.

    Raises:
        ServingError: see `verify_model`.
    """
    from djl_python_neuronx.artifacts.atomic import storing
    from djl_python_neuronx.verify.report import markdown, summary
    from djl_python_neuronx.verify.start import verify_model

    folder = arguments.output
    if folder is not None:  # before hours of compiling
        with storing(f"the report {folder}", folder.parent):
            folder.mkdir(parents=True, exist_ok=True)
    with progress_bars(sys.stderr) as progress:
        report = verify_model(
            arguments.model,
            environ=environment(),
            overrides=dict(arguments.option),
            layers=arguments.layers,
            checkpoint=arguments.checkpoint,
            quick=arguments.quick,
            progress=progress,
        )
    if folder is not None:
        with storing(f"the report {folder}", folder):
            (folder / "report.json").write_text(
                json.dumps(report, indent=2) + "\n", encoding="utf-8"
            )
            (folder / "report.md").write_text(markdown(report), encoding="utf-8")
    sys.stdout.write(summary(report))
    return 0 if report["verdict"] == "right" else 1

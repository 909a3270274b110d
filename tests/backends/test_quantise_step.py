"""The step that writes weights in 8 bits beside the graphs: whole or not at all, and once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from djl_python_neuronx.backends import LoadPlan, nxdi
from djl_python_neuronx.backends.nxdi.model import QUANTISED

PLAN = LoadPlan(Path("model"), 1, 8, (8,))


class Library:
    """The library's application: writes two files, and may die between them."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(neuron_config=SimpleNamespace(quantized_checkpoints_path="x"))
        self.runs = 0
        self.dies = False

    def save_quantized_state_dict(self, model: str, config: Any) -> None:
        self.runs += 1
        folder = Path(config.neuron_config.quantized_checkpoints_path)
        (folder / f"first-{self.runs}").write_text(model)
        if self.dies:
            raise KeyboardInterrupt
        (folder / f"second-{self.runs}").write_text(model)


def test_a_half_written_folder_is_never_used(tmp_path: Path) -> None:
    library, folder = Library(), tmp_path / QUANTISED
    library.dies = True
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            nxdi._quantise(library, PLAN, folder)
        assert not folder.exists()
    library.dies = False
    for _ in range(2):
        nxdi._quantise(library, PLAN, folder)
        assert {path.name for path in folder.iterdir()} == {"first-3", "second-3"}
    assert library.runs == 3
    assert [path.name for path in tmp_path.iterdir()] == [QUANTISED]
    # The place is that of the step alone: the application loads from the folder of its graphs.
    assert library.config.neuron_config.quantized_checkpoints_path == "x"

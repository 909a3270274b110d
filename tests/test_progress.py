"""Progress on a terminal, and none anywhere else."""

from __future__ import annotations

import io
import logging

import pytest

from djl_python_neuronx.loading.compile_process import CompileProgress
from djl_python_neuronx.loading.situation import SILENT
from djl_python_neuronx.progress import progress_bars

pytest.importorskip("rich", reason="needs the `check` extra")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def test_a_file_gets_none():
    with progress_bars(io.StringIO()) as progress:
        assert progress is SILENT


def test_bars_and_the_log_above_them(terminal):
    handler = logging.StreamHandler(terminal)
    package = logging.getLogger("djl_python_neuronx")
    package.addHandler(handler)
    try:
        with progress_bars(terminal) as progress:
            progress.transfer(2**20, 4 * 2**20)
            progress.compile(CompileProgress(3, 11, 120.0, 320.0))
            logging.getLogger("djl_python_neuronx.loading.prepare").warning("a line [of] the log")
    finally:
        package.removeHandler(handler)
    shown = terminal.getvalue()
    assert "1 of 4 MiB" in shown
    assert "graph 3/11, 2 min, about 5 min left" in shown
    assert "a line [of] the log\n" in shown
    assert handler.stream is terminal

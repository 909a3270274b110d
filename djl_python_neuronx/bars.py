"""How far a load has come, as bars on a terminal; elsewhere, and without rich, the log has it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from djl_python_neuronx.loading.prepare import SILENT, LoadProgress

if TYPE_CHECKING:
    from rich.console import Console

    from djl_python_neuronx.loading.compile_process import CompileProgress


@contextmanager
def bars(stream: TextIO) -> Iterator[LoadProgress]:
    """Bars below the log for as long as something is transferred or compiled."""
    try:
        from rich.console import Console
    except ImportError:
        yield SILENT
        return
    console = Console(file=stream)
    if not console.is_terminal:
        yield SILENT
        return
    with _log_above(console), _Bars(console) as shown:
        yield LoadProgress(shown.transfer, shown.compile)


class _Bars:
    """Two bars that come with their first number."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._rich = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._transfer = self._rich.add_task("transfer", total=None, visible=False, told="")
        self._compile = self._rich.add_task("compile", total=None, visible=False, told="")

    def __enter__(self) -> _Bars:
        self._rich.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._rich.stop()

    def transfer(self, done: int, total: int) -> None:
        """See `Progress`."""
        told = f"{done / 2**20:.0f} of {total / 2**20:.0f} MiB"
        self._rich.update(
            self._transfer, completed=done, total=total, visible=done < total, told=told
        )

    def compile(self, progress: CompileProgress) -> None:
        """See `LoadProgress`."""
        told = (
            f"graph {progress.num_done}/{progress.num_graphs}, {progress.elapsed_s / 60:.0f} min, "
            f"some {progress.remaining_s / 60:.0f} min left"
        )
        self._rich.update(
            self._compile,
            completed=progress.num_done,
            total=progress.num_graphs,
            visible=progress.num_done < progress.num_graphs,
            told=told,
        )


@contextmanager
def _log_above(console: Console) -> Iterator[None]:
    """The log's lines go through the console, which keeps them above the bars."""
    handlers = [
        handler
        for handler in logging.getLogger("djl_python_neuronx").handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is console.file
    ]
    lines = _Lines(console)
    for handler in handlers:
        handler.setStream(lines)
    try:
        yield
    finally:
        for handler in handlers:
            handler.setStream(console.file)


class _Lines:
    """The part of a stream that a log handler needs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> None:
        self._console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    def flush(self) -> None:
        """Every write is one already."""

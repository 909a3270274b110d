"""Progress bars on a terminal, for transfers and compilation."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

    from djl_python_neuronx.loading.compile_process import CompileProgress
    from djl_python_neuronx.loading.situation import LoadProgress


@contextmanager
def progress_bars(stream: TextIO) -> Iterator[LoadProgress]:
    """Progress bars for transfers and compilation, below the log. None if `stream` is no terminal, or without rich."""
    from djl_python_neuronx.loading.situation import SILENT, LoadProgress

    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield SILENT
        return
    console = Console(file=stream)
    if not console.is_terminal:
        yield SILENT
        return
    columns = (
        "{task.description}",
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
    )
    bars = Progress(
        *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
    )
    transfers = bars.add_task("transfer", total=None, visible=False, state="")
    graphs = bars.add_task("compile", total=None, visible=False, state="")

    def transfer(done: int, total: int) -> None:
        state = f"{done / 2**20:.0f} of {total / 2**20:.0f} MiB"
        bars.update(transfers, completed=done, total=total, visible=done < total, state=state)

    def compiled(progress: CompileProgress) -> None:
        done, total = progress.num_done, progress.num_graphs
        bars.update(graphs, completed=done, total=total, visible=done < total, state=str(progress))

    with _log_above(console), bars:
        yield LoadProgress(transfer, compiled)


@contextmanager
def _log_above(console: Console) -> Iterator[None]:
    """Write log lines through the console, which keeps them above the bars."""
    from rich.file_proxy import FileProxy

    handlers = [
        handler
        for handler in logging.getLogger("djl_python_neuronx").handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is console.file
    ]
    for handler in handlers:
        handler.setStream(FileProxy(console, console.file))
    try:
        yield
    finally:
        for handler in handlers:
            handler.setStream(console.file)

"""A `check.Report` on a terminal or in a file: with rich where it is installed, as plain text where it is not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TextIO

from djl_python_neuronx.loading.report import PARTS, Block, Lines, blocks

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from djl_python_neuronx.loading.check import Report

_COLOURS = {mark: colour for _, _, mark, _, colour in PARTS}
_FILE_WIDTH = 160
"""Columns of a table in a file or a pipe, which have no width of their own."""


def render(report: Report, stream: TextIO, *, everything: bool = False) -> None:
    """Write the report to `stream`; `everything`: options at their default too."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    ascii_only = not _takes(encoding, "".join(_COLOURS))
    found = [
        _printable(block, encoding)
        for block in blocks(report, everything=everything, ascii_only=ascii_only)
    ]
    try:
        from rich.console import Console
    except ImportError:
        _render_plain(found, stream)
        return
    console = Console(file=stream, highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    _render_rich(found, console)


def _takes(encoding: str, text: str) -> bool:
    try:
        text.encode(encoding)
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def _printable(block: Block, encoding: str) -> Block:
    """The block without what the stream cannot encode and without what would steer the terminal."""
    if isinstance(block, Lines):
        return replace(block, lines=tuple(_escaped(line, encoding) for line in block.lines))
    rows = (tuple(_escaped(cell, encoding) for cell in row) for row in block.rows)
    return replace(block, rows=tuple(rows))


def _escaped(text: str, encoding: str) -> str:
    shown = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def _render_plain(found: Iterable[Block], stream: TextIO) -> None:
    for block in found:
        stream.write(f"{block.title}\n")
        if isinstance(block, Lines):
            lines: Iterable[str] = block.lines
        else:
            rows = [block.columns, *block.rows]
            # The last column is left ragged: it holds the long texts.
            widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
            lines = ("  ".join(_padded(row, widths)).rstrip() for row in rows)
        stream.writelines(f"  {line}\n" for line in lines)
        stream.write("\n")


def _padded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]


def _render_rich(found: Iterable[Block], console: Console) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    for block in found:
        console.print(Text(block.title, style="bold"))
        if isinstance(block, Lines):
            for line in block.lines:
                text = Text(f"  {line}", style=block.style)
                _colour(text)
                console.print(text, soft_wrap=True)
        else:
            table = Table(box=box.SIMPLE_HEAD)
            for column in block.columns:
                table.add_column(column, overflow="fold")
            for row in block.rows:
                table.add_row(*map(Text, row))
            console.print(table)
        console.print()


def _colour(text: Text) -> None:
    """Give the bar's marks their colours."""
    for index, character in enumerate(text.plain):
        if colour := _COLOURS.get(character):
            text.stylize(colour, index, index + 1)

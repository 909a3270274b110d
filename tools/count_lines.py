"""Code lines and modules of the package, folder by folder.

A code line holds at least one token that is neither a comment, a docstring nor part of an import statement. Blank
lines count nowhere. `python tools/count_lines.py [FOLDER]`; FOLDER is the package unless given.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "djl_python_neuronx"
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


def code_lines(source: str) -> int:
    """Number of code lines of one module."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and _is_no_code(node):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _is_no_code(node: ast.stmt) -> bool:
    """Return whether a statement is an import or a docstring, including those of fields."""
    return isinstance(node, (ast.Import, ast.ImportFrom)) or (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def main() -> None:
    """Print a row per folder and the total."""
    parser = argparse.ArgumentParser(description="Code lines and modules, folder by folder.")
    parser.add_argument("folder", nargs="?", type=Path, default=PACKAGE)
    folder = parser.parse_args().folder
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for path in sorted(folder.rglob("*.py")):
        row = totals[path.relative_to(folder).parent.as_posix()]
        row[0] += code_lines(path.read_text(encoding="utf-8"))
        row[1] += 1
    for name, (lines, modules) in sorted(totals.items()):
        print(f"{lines:7,} code lines  {modules:4} modules  {name}")
    lines, modules = (sum(column) for column in zip(*totals.values(), strict=True))
    print(f"{lines:7,} code lines  {modules:4} modules  in all")


if __name__ == "__main__":
    main()

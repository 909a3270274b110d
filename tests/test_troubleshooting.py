"""docs/troubleshooting.md: an entry for each error and each warning of the package, and for nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import djl_python_neuronx
from djl_python_neuronx.config.options import NAMES
from djl_python_neuronx.errors import HttpError, ServingError, kinds
from djl_python_neuronx.telemetry import METRICS, NAMESPACE

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
LEVELS = {"warning", "error", "exception", "critical"}
LOGS_FOR_OTHERS = {"log_load_failure": "load_failed"}
"""Functions that log their argument `event`, with its default."""


def entries(chapter: str) -> dict[str, str]:
    """The items of a chapter: each bold name to its whole text."""
    text = PAGE.partition(f"\n## {chapter}\n")[2].partition("\n## ")[0]
    found = {}
    for item in re.findall(r"^- (\*\*`.*(?:\n  .*)*)", text, re.MULTILINE):
        head = re.match(r"(?:\*\*`\w+`\*\*(?:, )?)+", item)
        for name in re.findall(r"\w+", head[0]):
            assert name not in found, name
            found[name] = item
    return found


def literal(node: ast.expr) -> str:
    """The text with which a string begins."""
    if isinstance(node, ast.JoinedStr):
        node = node.values[0]
    assert isinstance(node, ast.Constant), ast.unparse(node)
    return str(node.value)


def logged(tree: ast.Module) -> Iterator[str]:
    """Events at the level of a warning or above."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for call in ast.walk(function):
            match call:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="logger"), attr=level), args=[first, *more]
                ):
                    if level == "log" and "logging.WARNING" in ast.unparse(function):
                        yield literal(more[0])
                    elif level in LEVELS and function.name not in LOGS_FOR_OTHERS:
                        yield literal(first)
                case ast.Call(func=ast.Name(id=name), args=[_, *given]) if name in LOGS_FOR_OTHERS:
                    yield literal(given[0]) if given else LOGS_FOR_OTHERS[name]


def events() -> set[str]:
    """The first words of all lines that the package logs as warnings or errors."""
    package = Path(djl_python_neuronx.__file__).parent
    found = [
        line
        for path in package.rglob("*.py")
        for line in logged(ast.parse(path.read_text(encoding="utf-8")))
    ]
    words = {line: re.match(r"[a-z]+(?:_[a-z]+)*(?=[ :]|$)", line) for line in found}
    assert None not in words.values(), "a line without an event: " + str(words)
    return {word[0] for word in words.values()}


def test_each_error_code_has_its_entry_with_its_status():
    found, errors = entries("By error code"), kinds(ServingError)
    assert found.keys() == {error.code for error in errors}
    for error in errors:
        status = re.match(r"\*\*`\w+`\*\* \((\d+)(, and other [^)]*)?\): ", found[error.code])
        assert status, found[error.code]
        assert int(status[1]) == error.status, error
        assert (status[2] is not None) == (error is HttpError)


def test_each_warning_of_the_log_has_its_entry():
    found = events()
    assert len(found) > 60
    assert entries("By log event").keys() == found


def test_entries_are_short():
    for chapter in ("By error code", "By log event"):
        for name, text in entries(chapter).items():
            assert text.count("\n") < 3, name
            assert len(text) > 60, name


def test_options_and_metrics_that_the_page_names_exist():
    assert set(re.findall(r"`option\.(\w+)", PAGE)) <= set(NAMES)
    metrics = set(re.findall(rf"`{NAMESPACE}_(\w+)", PAGE))
    known = {metric.removeprefix(f"{NAMESPACE}_") for metric in METRICS}
    assert metrics
    assert metrics <= known


def test_the_code_of_a_log_line_is_found():
    tree = ast.parse(
        "def f(level):\n"
        "    logger.warning('a_b x=%d', 1)\n"
        "    logger.info('c')\n"
        "    logger.log(logging.WARNING if level else logging.INFO, 'd')\n"
        "    log_load_failure(error, f'e model={level}')\n"
        "    log_load_failure(error)\n"
    )
    assert [*logged(tree)] == ["a_b x=%d", "d", "e model=", "load_failed"]

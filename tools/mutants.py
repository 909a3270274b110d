"""One-line mutants of the package, and which of them the tests notice.

`python -m tools.mutants map MAP [PYTEST ARGUMENT…]` runs tests and writes which lines each of them runs and how long it
takes; further calls with the same MAP add to it. `python -m tools.mutants draw MAP --seed N` then draws mutants, runs
the tests of each one's line in a copy of the checkout, and prints what survived and a table. Needs `coverage`.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

_T = TypeVar("_T")
ROOT = Path(__file__).parents[1]
PACKAGE = "djl_python_neuronx"
PLACES = ("engine", "artifacts", "links.py", "config/trust.py", "server", "backends/nxdi")
HEAVY = (
    *(
        "boto3",
        "httpx",
        "hypothesis",
        "huggingface_hub",
        "moto.server",
        "openai",
        "orjson",
        "prometheus_client",
    ),
    *(
        "pydantic",
        "pytest",
        "safetensors.numpy",
        "schemathesis",
        "starlette.applications",
        "torch",
        "transformers",
    ),
    "uvicorn",
)
"""Imported once, by the parent of all runs."""

# The map: which tests run which line


@dataclass
class Map:
    """The time of each test, and the lines that it runs."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Of the tests that passed."""
    tests: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """File -> line, named as by `line_names` -> tests."""


def line_names(source: str) -> list[str]:
    """A name for each line that changes elsewhere in the file leave as it is."""
    seen: Counter[str] = Counter()
    names = []
    for line in source.splitlines():
        seen[line] += 1
        names.append(f"{line.strip()} #{seen[line]}")
    return names


class Recorder:
    """A pytest plugin: a context of coverage for each test, its duration, and whether it passed."""

    def __init__(self, cover: Any) -> None:  # noqa: ANN401  (coverage is not installed for mypy)
        self.cover = cover
        self.seconds: dict[str, float] = defaultdict(float)
        self.not_passed: set[str] = set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Count what runs from now on as this test's."""
        self.cover.switch_context(nodeid)

    def pytest_runtest_logfinish(self) -> None:
        """Count what runs from now on as no test's."""
        self.cover.switch_context("")

    def pytest_runtest_logreport(self, report: Any) -> None:  # noqa: ANN401  (pytest's)
        """Note a phase of a test; that has the seconds and failures of its subtests."""
        if _is_of_subtest(report):
            return
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.not_passed.add(report.nodeid)


def write_map(path: Path, arguments: Sequence[str]) -> None:
    """Run pytest with these arguments and add what it shows to the map."""
    import coverage
    import pytest

    cover = coverage.Coverage(data_file=None, source=[str(ROOT / PACKAGE)], config_file=False)
    recorder = Recorder(cover)
    cover.start()
    pytest.main(["-q", "-p", "no:cacheprovider", *arguments], plugins=[recorder])
    cover.stop()
    known = Map(**json.loads(path.read_text("utf-8"))) if path.exists() else Map()
    passed = recorder.seconds.keys() - recorder.not_passed
    known.seconds.update({test: round(recorder.seconds[test], 3) for test in passed})
    data = cover.get_data()
    for file in map(Path, data.measured_files()):
        lines = known.tests.setdefault(file.relative_to(ROOT).as_posix(), {})
        names = line_names(file.read_text("utf-8"))
        for number, tests in data.contexts_by_lineno(str(file)).items():
            name = names[number - 1]
            lines[name] = sorted({*lines.get(name, []), *passed.intersection(tests)})
    path.write_text(json.dumps({"seconds": known.seconds, "tests": known.tests}), "utf-8")


# The mutants

SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_PAIRS = "min max|any all|startswith endswith|append appendleft|popleft pop|partition rpartition|lstrip rstrip"
NAMES = {
    name: new for pair in _PAIRS.split("|") for name, new in (pair.split(), pair.split()[::-1])
}
_NO_BEHAVIOUR = {"annotation", "returns", "decorator_list", "bases"}
_SAFETY = {"strict", "encoding", "daemon"}
"""Keywords that matter only to wrong code, on other machines, or at exit."""


@dataclass(frozen=True)
class Mutant:
    """A file with the bytes from `start` to before `end` replaced."""

    file: str
    line: int
    start: int
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        """The mutated file."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def describe(self, source: bytes) -> str:
        """The change, on one line."""
        before = " ".join(source[self.start : self.end].decode().split())
        return f"{self.file}:{self.line}: {before} -> {self.text}"


def mutants(file: str, source: bytes) -> Iterator[Mutant]:
    """Every mutant of a file."""
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    for node in _nodes(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        for text in _replacements(node):
            bare = isinstance(node, ast.stmt) or text.isidentifier()
            yield Mutant(file, node.lineno, start, end, text if bare else f"({text})")


def _nodes(node: ast.AST) -> Iterator[Any]:
    """The statements and expressions below that do something."""
    if _is_text(node):
        return
    if isinstance(node, (ast.stmt, ast.expr)):
        yield node
    for name, value in ast.iter_fields(node):
        if name not in _NO_BEHAVIOUR and not isinstance(node, ast.Raise):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _nodes(child)


def _is_text(node: ast.AST) -> bool:
    """Return whether a node is for readers and type checkers, or a chosen number, which a test could only repeat."""
    match node:
        case ast.Import() | ast.ImportFrom() | ast.JoinedStr() | ast.arg():
            return True
        case ast.keyword(arg=name) if name in _SAFETY:
            return True
        case ast.Expr(
            value=ast.Constant() | ast.Call(func=ast.Attribute(value=ast.Name(id="logger")))
        ):
            return True
        case ast.Subscript(value=ast.Name(id="Literal")):
            return True
        case (
            ast.Call(func=ast.Name(id="cast" | "TypeVar"))
            | ast.If(test=ast.Name(id="TYPE_CHECKING"))
        ):
            return True
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return name in ("__all__", "logger") or (
                name.isupper() and isinstance(value, ast.Constant)
            )
    return False


def _replacements(node: ast.AST) -> Iterator[str]:
    """Source texts for this node's place."""
    match node:
        case ast.Compare() | ast.BoolOp() | ast.BinOp() | ast.UnaryOp() | ast.IfExp():
            yield from _other_operators(node)
        case ast.Constant(value=value):
            yield from _other_values(value)
        case ast.Name(id=name) if name in NAMES:
            yield NAMES[name]
        case ast.Call():
            yield from _other_calls(node)
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "return None"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"
        case (
            ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Delete() | ast.Break() | ast.Continue()
        ):
            yield "pass"


def _other_calls(call: ast.Call) -> Iterator[str]:
    func, args, words = call.func, call.args, call.keywords
    if isinstance(func, ast.Attribute) and func.attr in NAMES:
        yield ast.unparse(ast.Call(ast.Attribute(func.value, NAMES[func.attr]), args, words))
    for place, word in enumerate(words):
        if word.arg not in _SAFETY:
            yield ast.unparse(ast.Call(func, args, _less(words, place)))


def _other_operators(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Compare(left=left, ops=ops, comparators=others):
            for place, op in enumerate(ops):
                swapped = [*ops[:place], SWAPS[type(op)](), *ops[place + 1 :]]
                yield ast.unparse(ast.Compare(left, swapped, others))
        case ast.BoolOp(op=op, values=values):
            yield ast.unparse(ast.BoolOp(SWAPS[type(op)](), values))
            for place in range(len(values)):
                yield ast.unparse(ast.BoolOp(op, _less(values, place)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SWAPS:
            yield ast.unparse(ast.BinOp(left, SWAPS[type(op)](), right))
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield ast.unparse(operand)
        case ast.IfExp(body=body, orelse=orelse):
            yield from map(ast.unparse, (body, orelse))


def _other_values(value: object) -> Iterator[str]:
    if isinstance(value, bool):
        yield repr(not value)
    elif isinstance(value, (int, float)):
        yield repr(value + 1)
    elif isinstance(value, str) and value and not re.search(r"\s", value):
        yield repr(value + "x")


def _less(items: list[_T], place: int) -> list[_T]:
    return [*items[:place], *items[place + 1 :]]


def draw(options: argparse.Namespace) -> list[tuple[str, Mutant]]:
    """Mutants with their places: one of a line, lines drawn by each place's number of them; all of a line by itself."""
    drawn: list[tuple[str, Mutant]] = []
    lines: dict[str, dict[tuple[str, int], list[Mutant]]] = {}
    for place in options.places:
        name, _, line = place.partition(":")
        path = ROOT / PACKAGE / name
        found: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
        for module in [path] if path.suffix else sorted(path.rglob("*.py")):
            file = module.relative_to(ROOT).as_posix()
            if not file.startswith(tuple(f"{PACKAGE}/{other}" for other in options.without)):
                for mutant in mutants(file, module.read_bytes()):
                    found[file, mutant.line].append(mutant)
        if line:
            drawn += [(place, mutant) for mutant in found[file, int(line)]]
        else:
            lines[place] = found
    rng = random.Random(options.seed)  # noqa: S311  (no secret)
    total = sum(map(len, lines.values()))
    for place, found in lines.items():
        share = max(round(options.count * len(found) / total), options.count // 20)
        some = rng.sample(sorted(found), min(len(found), share))
        drawn += [(place, rng.choice(found[line])) for line in some]
    return drawn


# The runs


@dataclass
class Bench:
    """A copy of the checkout, and processes forked from this one that run tests in it."""

    tree: Path
    known: Map
    bound_s: float
    good: dict[str, bool] = field(default_factory=dict)
    """Test -> whether it passes in the copy as it is."""

    def judge(self, mutant: Mutant) -> str:
        """Return the first sign of the mutant: a test, "hangs" or "import"; "" if it survived."""
        path = self.tree / mutant.file
        original, time_s = path.read_bytes(), int(path.stat().st_mtime)
        tests = self.choose(mutant, original.decode())
        while tests:
            # Python takes what it compiled for current if the source's size and second are the same.
            _write(path, mutant.apply(original), time_s + random.randrange(1, 10**8))  # noqa: S311
            noticed = self.run(tests)
            _write(path, original, time_s)
            if "::" not in noticed:
                return noticed if noticed and self.run(tests) != noticed else ""
            if self.good.setdefault(noticed, not self.run([noticed])):
                return noticed
            tests.remove(noticed)
        return ""

    def choose(self, mutant: Mutant, source: str) -> list[str]:
        """The tests to run, file by file: the nearest and fastest that take no longer than the bound.

        After those that run the line come the others of their files: what a fixture of a module runs counts as its
        first test's.
        """
        stem = Path(mutant.file).stem
        direct = {*self._candidates(mutant, source)}
        files = {file_of(test) for test in direct}
        tests = [test for test in self.known.seconds if file_of(test) in files]
        tests = [test for test in tests if self.good.get(test, True)]
        seconds = self.known.seconds
        tests.sort(key=lambda test: (test not in direct, stem not in file_of(test), seconds[test]))
        spent = accumulate(seconds[test] + 0.01 for test in tests)
        chosen = [test for test, until in zip(tests, spent, strict=True) if until < self.bound_s]
        chosen = chosen or tests[:1]
        order = list(dict.fromkeys(map(file_of, chosen)))
        return sorted(chosen, key=lambda test: order.index(file_of(test)))

    def _candidates(self, mutant: Mutant, source: str) -> list[str]:
        lines = self.known.tests.get(mutant.file, {})
        starts = [
            node.lineno
            for node in ast.walk(ast.parse(source))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and node.lineno < mutant.line <= (node.end_lineno or 0)
        ]
        if not starts and any(lines.values()):  # it runs when the module is imported
            return list({test for tests in lines.values() for test in tests})
        names = line_names(source)
        # Coverage knows only the first lines of a statement.
        for number in range(mutant.line, max(starts, default=mutant.line), -1):
            if tests := lines.get(names[number - 1]):
                return tests
        # Run by other processes, if at all: the tests whose files name the module.
        named = re.compile(rf"\b{Path(mutant.file).stem}\b")
        files = set(map(file_of, self.known.seconds))
        near = {file for file in files if named.search((self.tree / file).read_text("utf-8"))}
        return [test for test in self.known.seconds if file_of(test) in near]

    def run(self, tests: Sequence[str]) -> str:
        """The first test that fails; "hangs"; "import" if pytest came to none; "" if all pass."""
        with tempfile.TemporaryDirectory() as folder:
            child = os.fork()
            if not child:
                run_tests(tests, self.tree, Path(folder))
            deadline_s = time.monotonic() + 30 + 6 * sum(self.known.seconds[test] for test in tests)
            while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline_s:
                time.sleep(0.02)
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            if not ended[0]:
                os.waitpid(child, 0)
                return "hangs"
            outcomes = Path(folder, "outcomes").read_text("utf-8").splitlines()
        self.good.update({line[5:]: True for line in outcomes if line.startswith("good ")})
        failed = [line[5:] for line in outcomes if line.startswith("fail ")]
        return failed[0] if failed else "import" if ended[1] else ""


def _is_of_subtest(report: Any) -> bool:  # noqa: ANN401  (pytest's)
    return hasattr(report, "context")


def file_of(test: str) -> str:
    """The file of a test's id."""
    return test.partition("::")[0]


def _write(path: Path, content: bytes, time_s: int) -> None:
    path.write_bytes(content)
    os.utime(path, (time_s, time_s))


@dataclass
class Outcomes:
    """A pytest plugin that writes down which tests passed and failed."""

    file: IO[str]

    def pytest_runtest_logreport(self, report: Any) -> None:  # noqa: ANN401  (pytest's)
        """Note a phase of a test."""
        if report.failed or (report.when == "call" and not _is_of_subtest(report)):
            print("fail" if report.failed else "good", report.nodeid, file=self.file, flush=True)


def run_tests(tests: Sequence[str], tree: Path, folder: Path) -> NoReturn:
    """Run tests in `tree`, write their outcomes and output in `folder`, and end this process."""
    status = 70
    try:
        os.setsid()
        outcomes = (folder / "outcomes").open("w", encoding="utf-8")
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
        for stream, file in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
            os.dup2(file, stream)
        os.chdir(tree)
        os.environ.update(PYTHONPATH=str(tree), TMPDIR=str(folder))  # noqa: TID251  (of this process)
        tempfile.tempdir = None
        sys.path[:] = [str(tree), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
        for name in [
            name for name in sys.modules if name.partition(".")[0] in (PACKAGE, "tests", "tools")
        ]:
            del sys.modules[name]
        import pytest

        settings = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=repeatable"]
        status = pytest.main([*settings, *tests], plugins=[Outcomes(outcomes)])
    finally:
        os._exit(status)


def run_draw(options: argparse.Namespace) -> bool:
    """Run the drawn mutants; whether enough of them were killed."""
    started_s = time.monotonic()
    known = Map(**json.loads(options.map.read_text("utf-8")))
    for module in HEAVY:
        with suppress(ImportError):
            importlib.import_module(module)
    gc.freeze()  # pytest collects garbage several times in each run
    drawn: Counter[str] = Counter()
    killed: Counter[str] = Counter()
    survived = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        shutil.copytree(
            ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache")
        )
        bench = Bench(tree, known, options.bound)
        for place, mutant in draw(options):
            began_s = time.monotonic()
            source = (tree / mutant.file).read_bytes()
            change, tests = mutant.describe(source), bench.choose(mutant, source.decode())
            noticed = bench.judge(mutant)
            drawn[place] += 1
            killed[place] += bool(noticed)
            survived += [] if noticed else [change]
            outcome = noticed or ("SURVIVED" if tests else "NO TEST")
            print(f"{time.monotonic() - began_s:5.1f} s  {outcome}  {change}", flush=True)
    print("\nsurvived:", *survived, sep="\n  ")
    print(f"\n{'drawn':>6} {'killed':>6} {'share':>6}  place (seed {options.seed})")
    for place in drawn:
        print(f"{drawn[place]:6} {killed[place]:6} {killed[place] / drawn[place]:6.0%}  {place}")
    took_s = time.monotonic() - started_s
    print(
        f"{drawn.total()} mutants: {killed.total()} killed, {len(survived)} survived in {took_s:.0f} s"
    )
    return killed.total() >= drawn.total() * float(options.least)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutants", description=__doc__.partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "map", help="run tests and write which lines each of them runs"
    ).add_argument("map", type=Path)
    drawing = commands.add_parser("draw", help="draw mutants and run their tests")
    drawing.add_argument("map", type=Path)
    drawing.add_argument(
        "places",
        nargs="*",
        default=PLACES,
        help="of the package: folder, file.py, or file.py:LINE for all of a line",
    )
    drawing.add_argument("--without", nargs="*", default=[], metavar="PLACE")
    drawing.add_argument("--seed", type=int, default=0)
    drawing.add_argument("--count", type=int, default=60)
    drawing.add_argument("--bound", type=float, default=15, help="seconds of tests per mutant")
    drawing.add_argument(
        "--least", type=float, default=0.0, help="share to be killed, else the exit status is 1"
    )
    options, rest = parser.parse_known_args()
    if options.command == "map":
        write_map(options.map, rest)
    elif not run_draw(options):
        sys.exit(1)


if __name__ == "__main__":
    main()

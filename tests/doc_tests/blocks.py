"""Fenced blocks of the docs, their marks, and what can be checked of them without running anything."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.config.resolve import read_settings
from djl_python_neuronx.errors import ServingError

try:
    import tomllib
except ImportError:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".venv-tools" / "bin"
"""Programs of `make chart` and others, which come last on the path."""
SHELLS = ("sh", "bash", "shell", "console")
COMMANDS = (*SHELLS, "python")
CHECKED = (*COMMANDS, "json", "yaml", "toml", "properties")
"""Kinds of blocks that are counted; others, such as `text` and `mermaid`, show no input."""

NEEDS = {
    "device": "a Neuron device, its compiler or AWS's libraries",
    "docker": "Docker",
    "aws": "an AWS account",
    "cluster": "a Kubernetes cluster",
    "root": "rights over the machine, or another operating system",
    "internet": "a registry, a hub or another server of others",
    "time": "more minutes than CI has",
    "context": "the rest of a file, of which the block is a part",
}
"""Words of a mark → what this machine never has."""
PROGRAMS = {
    "device": ("djl-neuronx",),
    "docker": ("docker",),
    "aws": ("aws", "eksctl"),
    "cluster": ("kubectl", "helm"),
}
"""Words of a mark that replace only these programs in the block; other words leave out all of it."""
OPTIONAL = (
    "anthropic",
    "claude",
    "djl_python",
    "guidellm",
    "helm",
    "kubeconform",
    "mkdocs",
    "ray",
    "vllm",
)
"""Programs and packages that may be words of a mark: the block is run where one is installed."""
TRIVIAL = ("cd", "export", "echo", "set")
"""Commands that need no run where nothing else of a block runs."""

_FENCE = re.compile(r"( *)```(\w+)?.*")
_MARK = re.compile(r" *<!-- needs: ([\w ,.-]+?) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page and the words of its mark."""

    page: str
    line: int
    kind: str
    text: str
    needs: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def missing(self) -> tuple[str, ...]:
        """The words of the mark that this machine has not."""
        return tuple(word for word in self.needs if word in NEEDS or not _is_installed(word))

    @property
    def replaced(self) -> tuple[str, ...]:
        """Programs that a stand-in replaces."""
        return tuple(name for word in self.missing for name in PROGRAMS.get(word, ()))

    @property
    def runs(self) -> bool:
        """True unless the mark leaves all of it out."""
        if not {*self.missing} <= PROGRAMS.keys():
            return False
        replaced = {*self.replaced} - {*PROGRAMS["device"]}
        return not replaced or not {*commands(self.text)} <= {*replaced, *TRIVIAL}


def pages() -> list[str]:
    """The pages whose blocks are counted, relative to the repository."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for pattern in (
        "docs/*.md",
        "docker/*.md",
        "benchmarks/*.md",
        "configs/*.md",
        "deploy/**/*.md",
    ):
        found += sorted(ROOT.glob(pattern))
    return [path.relative_to(ROOT).as_posix() for path in found]


def blocks(page: str, text: str) -> Iterator[Block]:
    """The blocks of a page's text that are counted, in their order."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        fence = _FENCE.fullmatch(lines[number])
        number += 1
        if fence is None:
            continue
        mark, line, indent = _MARK.fullmatch(lines[number - 2]), number, len(fence[1])
        inside = []
        while number < len(lines) and lines[number].strip() != "```":
            inside.append(lines[number][indent:])
            number += 1
        number += 1
        if fence[2] in CHECKED:
            needs = tuple(word.strip() for word in mark[1].split(",")) if mark else ()
            yield Block(page, line, fence[2], "\n".join(inside) + "\n", needs)


def commands(text: str) -> Iterator[str]:
    """The first word of each command of a shell block; a part that is not read as words is one word."""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        try:
            words = shlex.split(line.removeprefix("$ "), comments=True)
        except ValueError:
            words = line.split()
        words = [word for word in words if not re.match(r"\w+=", word)]
        if words:
            yield words[0]


def problem(block: Block) -> str | None:
    """The fault of a block's mark, or of data that a parser or the reader of settings refuses; None without any."""
    unknown = [word for word in block.needs if word not in (*NEEDS, *OPTIONAL)]
    if unknown:
        return f"the mark needs {unknown[0]!r}: expected words of {[*NEEDS, *OPTIONAL]}"
    if not block.runs:
        return None
    try:
        match block.kind:
            case "json":
                _read_json(block.text)
            case "yaml":
                [*yaml.safe_load_all(block.text)]
            case "toml":
                tomllib.loads(block.text)
            case "properties":
                _read_properties(block.text)
    except (ValueError, yaml.YAMLError, ServingError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _read_json(text: str) -> None:
    """Read one or more documents behind each other."""
    left = text.strip()
    while left:
        _, end = json.JSONDecoder().raw_decode(left)
        left = left[end:].strip()


def _read_properties(text: str) -> None:
    problems = Problems()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "serving.properties").write_text(text, encoding="utf-8")
        read_settings(None, Path(folder), {}, problems, embedded=True)
    problems.raise_errors()


def _is_installed(name: str) -> bool:
    found = shutil.which(name) or shutil.which(name, path=TOOLS)
    return found is not None or importlib.util.find_spec(name) is not None

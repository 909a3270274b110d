"""The newest clients of others, unchanged, against `djl-neuronx serve` with the example model.

A script of this folder uses a library as its documentation does, or calls a command. It prints the texts that it got,
which must be those of transformers' greedy search.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the `server` extra")
pytest.importorskip("torch", reason="needs the `cpu` extra")

import transformers

from tests.clients.answers import MODEL, ROOT
from tests.clients.embedded import Embedded
from tests.clients.front import forward, front
from tests.doubles.chat_model import ChatTokenizer, ScriptedBackend
from tests.doubles.tiny_models import load_reference
from tests.server.running import serving

pytestmark = pytest.mark.nightly
HERE = Path(__file__).parent
ENVIRONMENTS = ROOT / ".venv-clients"
QUESTIONS = json.loads((HERE / "questions.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Program:
    """A script with the name of its environment, and packages."""

    script: str
    environment: str
    packages: tuple[str, ...]


PROGRAMS = tuple(
    Program(script, environment, tuple(packages.split()))
    for script, environment, packages in (
        ("openai_python.py", "openai", "openai"),
        ("anthropic_python.py", "openai", "anthropic"),
        ("litellm_python.py", "openai", "litellm"),
        ("langchain_openai_python.py", "openai", "langchain-openai"),
        ("pydantic_ai_python.py", "openai", "pydantic-ai-slim[openai]"),
        ("dspy_python.py", "openai", "dspy"),
        ("llm_command.py", "openai", "llm"),
        ("huggingface_hub_python.py", "openai", "huggingface_hub"),
        # The next two want an older huggingface_hub or openai, text-generation one of 0.x.
        ("langchain_huggingface_python.py", "older", "langchain-huggingface"),
        (
            "llama_index_python.py",
            "older",
            "llama-index-llms-openai-like llama-index-llms-huggingface-api",
        ),
        ("text_generation_python.py", "text-generation", "text-generation"),
        ("sagemaker_python.py", "sagemaker", "boto3 sagemaker-core"),
        ("aiperf_command.py", "benchmarks", "aiperf"),
        ("guidellm_command.py", "torch", "guidellm"),
        ("lm_eval_command.py", "torch", "lm-eval[api,hf]"),
        ("openai_node.mjs", "node", "openai"),
        ("anthropic_node.mjs", "node", "@anthropic-ai/sdk"),
        ("huggingface_node.mjs", "node", "@huggingface/inference"),
        ("ai_node.mjs", "node", "ai @ai-sdk/openai-compatible"),
    )
)


TOOL_PROGRAMS = tuple(
    Program(script, environment, tuple(packages.split()))
    for script, environment, packages in (
        ("anthropic_tools_python.py", "openai", "anthropic"),
        ("langchain_tools_python.py", "openai", "langchain-openai"),
        ("anthropic_tools_node.mjs", "node", "@anthropic-ai/sdk"),
        ("ai_tools_node.mjs", "node", "ai @ai-sdk/openai-compatible"),
    )
)
"""Scripts with a tool; a model that writes given texts answers them."""
TEXTS = {
    QUESTIONS["sum"]: ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'),
    "[tool]3": "It is 3.",
    QUESTIONS["fruit"]: '{"name": "kiwi"}',
}
"""Ends of conversations, and what the model writes then."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedded]:
    server = Embedded.start({}, tmp_path_factory.mktemp("server"), os.environ)
    yield server
    server.end()


@pytest.fixture(scope="module")
def right() -> dict[str, str]:
    """Question → the text of the greedy answer; `alone` is `first` without `system`.

    `dspy` and `ai` are `prompt` with what these two write around it.
    """
    model = load_reference(MODEL)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(MODEL)

    def answer(inputs: Any) -> str:
        ids = model.generate(**inputs, max_new_tokens=QUESTIONS["max_tokens"], do_sample=False)
        return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    def text(prompt: str) -> str:
        return answer(tokenizer(prompt, return_tensors="pt", return_token_type_ids=False))

    def chat(*contents: str, roles: tuple[str, ...]) -> str:
        messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
        return answer(
            tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        )

    system, first, second, prompt = (
        QUESTIONS[name] for name in ("system", "first", "second", "prompt")
    )
    roles = ("system", "user", "assistant", "user")
    found = {"first": chat(system, first, roles=roles[:2]), "alone": chat(first, roles=roles[1:2])}
    found["second"] = chat(system, first, found["first"], second, roles=roles)
    found["prompt"] = text(prompt)
    found["dspy"] = text(f"{prompt}\n\nBEGIN RESPONSE:")
    found["ai"] = text(f"user:\n{prompt}\n\nassistant:\n")
    return found


@cache
def environment(name: str) -> Path:
    """A new environment with the newest packages of its programs; returns the folder of its commands."""
    folder = ENVIRONMENTS / name
    shutil.rmtree(folder, ignore_errors=True)
    every = [one for one in (*PROGRAMS, *TOOL_PROGRAMS) if one.environment == name]
    packages = list(dict.fromkeys(each for one in every for each in one.packages))
    if name == "node":
        return _node(folder, packages)
    _run(sys.executable, "-m", "venv", "--upgrade-deps", folder)
    python = folder / "bin" / "python"
    if name == "torch":
        # They ask for torch, which is gigabytes: let them find the one of these tests.
        where = sysconfig.get_path("purelib", vars={"base": str(folder)})
        Path(where, "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    more = shlex.split(os.environ.get("PIP_ARGS", ""))
    _run(python, "-m", "pip", "install", "--quiet", *more, *packages)
    return python.parent


def _node(folder: Path, packages: list[str]) -> Path:
    """The same with a newest Node too; the scripts are beside the packages, where Node looks for these."""
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    folder.mkdir(parents=True)
    for path in (*HERE.glob("*.mjs"), HERE / "questions.json"):
        shutil.copy(path, folder)
    newest = [f"{name}@latest" for name in ("node", *packages)]
    _run("npm", "install", "--prefix", folder, "--no-audit", "--no-fund", *newest)
    return folder / "node_modules" / ".bin"


def _run(*command: object) -> None:
    done = subprocess.run(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]


def versions(program: Program, commands: Path) -> str:
    """Names and versions of its packages."""
    if program.environment == "node":
        folder = commands.parent
        files = [folder / name / "package.json" for name in program.packages]
        found = [json.loads(path.read_text())["version"] for path in files]
    else:
        names = [name.partition("[")[0] for name in program.packages]
        code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
        found = subprocess.check_output(
            [commands / "python", "-c", code, *names], text=True
        ).split()
    return ", ".join(map(" ".join, zip(program.packages, found, strict=True)))


def command_of(program: Program, commands: Path) -> list[Path]:
    if program.environment == "node":
        return [commands / "node", ENVIRONMENTS / "node" / program.script]
    return [commands / "python", HERE / program.script]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.script)
def test_a_client_gets_the_right_texts(
    server: Embedded,
    right: dict[str, str],
    program: Program,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with front(forward(server.port)) as sagemaker:
        url = f"http://127.0.0.1:{server.port}"
        arguments = [sagemaker if program.environment == "sagemaker" else url, MODEL.name, MODEL]
        texts, found = run(program, arguments, tmp_path)
    assert texts == {name: right[name.partition("_")[0]] for name in texts}
    with capsys.disabled():
        sys.stdout.write(f"\n{found}: {len(texts)} right texts\n")


@pytest.mark.parametrize("program", TOOL_PROGRAMS, ids=lambda program: program.script)
def test_a_client_calls_a_tool(
    program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = ChatTokenizer()
    with serving(ScriptedBackend(tokenizer, TEXTS), tokenizer=tokenizer) as running:
        texts, found = run(program, [running.url, "toy", MODEL], tmp_path)
    right = {"sum": "It is 3.", "fruit": "kiwi"}
    assert texts == {name: right[name.partition("_")[0]] for name in texts}
    with capsys.disabled():
        sys.stdout.write(f"\n{found}: {len(texts)} right texts\n")


def run(program: Program, arguments: list[Any], work: Path) -> tuple[dict[str, str], str]:
    """The texts that a script prints, and the versions of its packages."""
    commands = environment(program.environment)
    environ = {
        "HOME": str(work),
        "PATH": f"{commands}:{os.environ['PATH']}",
        "LANG": "C.UTF-8",
        # Not from the network, which it waits for.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    done = subprocess.run(
        [*command_of(program, commands), *arguments],
        env=environ,
        cwd=work,
        capture_output=True,
        encoding="utf-8",
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    texts = json.loads(done.stdout.splitlines()[-1])
    assert texts
    return texts, versions(program, commands)

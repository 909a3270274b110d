"""One page: its blocks run one after another on a machine of their own. `python -m tests.doc_tests.page PAGE FOLDER`.

Shell blocks of a page share folder and variables. The result is one line of JSON for each block.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.doc_tests import machine, stand_ins
from tests.doc_tests.blocks import ROOT, SHELLS, Block, blocks, problem
from tests.known_answers import rounded

BLOCK_S = 120.0
SHELL = """
set -eo pipefail
__before=$(compgen -v | sort)
__save() {
    local name
    for name in $(comm -13 <(echo "$__before") <(compgen -v | sort)); do
        case $name in __*|BASH_*|FUNCNAME|PIPESTATUS|name|_) ;; *) declare -p "$name" ;; esac
    done > /run/doc-variables
    pwd > /run/doc-folder
}
[ ! -f /run/doc-variables ] || . /run/doc-variables
[ ! -f /run/doc-folder ] || cd "$(cat /run/doc-folder)"
trap __save EXIT
. "$1"
for __job in $(jobs -p); do wait "$__job"; done
"""
"""Runs a block's file $1 with the variables and in the folder that the block before it left.

What it starts in the background is waited for: a server's command ends as soon as the server is ready.
"""


class BlockError(Exception):
    """A block that fails; the message has its output."""


def main(page: str, folder: str) -> None:
    text = Path(page).read_text(encoding="utf-8")
    machine.enter(Path(folder))
    environ = machine.furnish(text)
    for block in blocks(page, text):
        began = time.monotonic()
        verdict, why = "passed", problem(block)
        if why:
            verdict = "failed"
        elif not block.runs:
            verdict, why = "left out", ", ".join(block.missing)
        else:
            try:
                run(block, environ)
                if "device" in block.missing:
                    verdict, why = "planned", "device"
            except BlockError as failure:
                verdict, why = "failed", str(failure)
        line = {"place": block.place, "kind": block.kind, "verdict": verdict, "why": why}
        line["seconds"] = round(time.monotonic() - began, 1)
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def run(block: Block, environ: dict[str, str]) -> None:
    if "device" in block.missing:
        environ = {**environ, stand_ins.NO_DEVICE: "1"}
    machine.write_stand_ins(block.replaced)
    if block.kind in (*SHELLS, "python"):
        _serve_the_example(block.text, environ)
    if block.kind == "console":
        for command, wanted in sessions(block.text):
            compare(command, wanted, shell(command, environ))
    elif block.kind in SHELLS:
        shell(block.text, environ)
    elif block.kind == "python":
        execute([sys.executable, "-c", block.text], environ)


def _serve_the_example(text: str, environ: dict[str, str]) -> None:
    """Serve it, by the name that a request of the block has, unless a command of the page has started a server."""
    there = (stand_ins.SERVERS / "8080").exists() or re.search(r"\bserve\b", text)
    if re.search(r"(localhost|127\.0\.0\.1):8080", text) and not there:
        named = re.search(r"""model["']?[:=] ?["']([\w.-]+)["']""", text)
        folder = Path("/models", named[1] if named else machine.EXAMPLE.name)
        machine.write_model(folder)
        shell(f"djl-neuronx serve {folder}", environ)


def shell(text: str, environ: dict[str, str]) -> str:
    Path("/run/doc-block").write_text(text, encoding="utf-8")
    return execute(["bash", "-c", SHELL, "bash", "/run/doc-block"], environ)


def execute(command: list[str], environ: dict[str, str]) -> str:
    """The standard output; files, because a server that goes on would keep a pipe open."""
    with Path("/run/doc-out").open("w+b") as out, Path("/run/doc-err").open("w+b") as err:
        where = {
            "cwd": ROOT,
            "env": environ,
            "stdin": subprocess.DEVNULL,
            "stdout": out,
            "stderr": err,
        }
        try:
            status = subprocess.run(command, timeout=BLOCK_S, check=False, **where).returncode
        except subprocess.TimeoutExpired:
            status = f"none after {BLOCK_S:.0f} s"
    said = Path("/run/doc-out").read_text(encoding="utf-8", errors="replace")
    if status:
        errors = Path("/run/doc-err").read_text(encoding="utf-8", errors="replace")
        raise BlockError(f"exit status {status}\n{said[-3000:]}{errors[-3000:]}")
    return said


def sessions(text: str) -> list[tuple[str, str]]:
    """The commands of a console block and the output that it shows of each."""
    found: list[tuple[str, str]] = []
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        command = re.match(r"(?:.*\\\n)*.*\n", part)[0]
        found.append((command, part[len(command) :]))
    return found


def compare(command: str, wanted: str, found: str) -> None:
    """Compare an output with the one that is shown, in which `...` or `…` stands for any text, and all white space
    is equal.

    Lines of JSON, which the docs may wrap behind a blank, are compared as `rounded` leaves them.
    """
    if wanted.startswith("{"):
        lines = [rounded(json.loads(line)) for line in wanted.replace("\n ", "").splitlines()]
        same = lines == [rounded(json.loads(line)) for line in found.splitlines()]
    else:
        parts = [re.escape(part) for part in re.split(r"\.\.\.|…", " ".join(wanted.split()))]
        same = re.fullmatch(".*".join(parts), " ".join(found.split()))
    if wanted and not same:
        raise BlockError(f"{command}expected\n{wanted}found\n{found}")


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # servers of this process are threads

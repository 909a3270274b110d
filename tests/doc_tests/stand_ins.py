"""Programs of the docs that do not what they do elsewhere, or not at once: `python -m tests.doc_tests.stand_ins NAME ...`.

A server goes on in the background as soon as it is ready. pip and venv install nothing: pip looks whether the files
and the extras exist. make runs targets that install nothing, and of others prints the commands. curl fails if the
answer is an error. Any other name is a program that this machine lacks: it does nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from packaging.requirements import Requirement

from tests.doc_tests.blocks import ROOT, tomllib
from tests.doc_tests.machine import PROGRAMS
from tests.processes import alive, wait_gone

SERVERS = Path("/run/doc-servers")
READY_S = 60.0


def main(name: str, arguments: list[str]) -> int:
    match name:
        case "djl-neuronx":
            command = [sys.executable, "-m", "djl_python_neuronx", *arguments]
            if arguments[:1] == ["serve"] and "--help" not in arguments:
                return serve(port_of(arguments), command)
            os.execv(sys.executable, command)
        case "python" | "python3" | "python3.10":
            return python(arguments)
        case "pip":
            return pip(arguments)
        case "make":
            quiet = [] if {"serve", "help"} & {*arguments} else ["--dry-run"]
            return real("make", *quiet, *arguments)
        case "curl":
            return real("curl", "--fail-with-body", *arguments)
    sys.stderr.write(f"not run: {name} {' '.join(arguments)}\n")
    return 0


def real(name: str, *arguments: str) -> int:
    """Become the program of this name that comes next on the path."""
    path = os.pathsep.join(part for part in os.get_exec_path() if part != str(PROGRAMS))
    os.execv(shutil.which(name, path=path) or name, [name, *arguments])


def port_of(arguments: list[str]) -> int:
    found = re.search(r"(?:--port|-p)[ =](\d+)", " ".join(arguments))
    return int(found[1] if found else os.environ.get("SAGEMAKER_BIND_TO_PORT", "8080"))


def serve(port: int, command: list[str]) -> int:
    """Start a server and return when it is ready; an earlier one at its port ends."""
    SERVERS.mkdir(exist_ok=True)
    record = SERVERS / str(port)
    if record.exists():
        earlier = int(record.read_text())
        if alive(earlier):
            os.kill(earlier, signal.SIGTERM)
            wait_gone([earlier])
    log = SERVERS / f"{port}.log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, start_new_session=True, stdout=output, stderr=output)
    record.write_text(str(server.pid))
    deadline_s = time.monotonic() + READY_S
    while server.poll() is None and time.monotonic() < deadline_s:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=5).close()
        except OSError:
            time.sleep(0.1)
        else:
            return 0
    sys.stderr.write(f"{log.read_text()}not ready (exit status {server.poll()})\n")
    return 1


def python(arguments: list[str]) -> int:
    match arguments:
        case ["-m", "venv", *_, folder]:
            programs = Path(folder) / "bin"
            programs.mkdir(parents=True)
            (programs / "activate").touch()
            for program in PROGRAMS.iterdir():
                (programs / program.name).symlink_to(program)
            return 0
        case ["-m", "pip", *rest]:
            return pip(rest)
    os.execv(sys.executable, [sys.executable, *arguments])


def pip(arguments: list[str]) -> int:
    """Look at what an installation names: files, requirements, and the extras of this package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if arguments[:1] != ["install"]:
        sys.stderr.write(f"pip {' '.join(arguments)}: only `install` is known here\n")
        return 1
    left = iter(arguments[1:])
    for word in left:
        if word in ("-c", "-r"):
            Path(next(left)).read_bytes()
        elif word.startswith("-") and "=" not in word and word not in ("-e", "-U", "--upgrade", "-q", "--quiet"):
            next(left)
        elif not word.startswith("-"):
            path, bracket, extras = word.partition("[")
            if path == "." or path.endswith(".whl"):
                assert Path(path).exists(), path
                word = project["name"] + bracket + extras
            wanted = Requirement(word)
            unknown = wanted.extras - project["optional-dependencies"].keys()
            if wanted.name == project["name"] and unknown:
                sys.stderr.write(f"{word}: no extra {sorted(unknown)}\n")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

"""Programs of the docs that do not do here what they do elsewhere: `python -m tests.doc_tests.stand_ins NAME ...`.

A server, Ray's `serve` too, goes on in the background as soon as it is ready. A command that needs a device is `check`
with its settings, for a machine that has one. pip and venv install nothing: pip looks whether the files and the extras
exist. make runs targets that install nothing, and of others prints the commands. curl fails if the answer is an error.
Any other name is a program that this machine lacks: it does nothing.
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

from tests.processes import alive, wait_gone

ROOT = Path(__file__).parents[2]
PROGRAMS = Path("/usr/local/lib/doc-tests")
"""Programs that come first on the path."""
SERVERS = Path("/run/doc-servers")
"""The id of the process that serves at a port, and its log."""
READY_S = 60.0
NO_DEVICE = "DOC_TESTS_NO_DEVICE"
"""Set in blocks whose mark needs a device."""
DEVICE_COMMANDS = ("serve", "compile", "verify")
NOT_OF_CHECK = ("--output", "--weights", "--layers", "--checkpoint", "--overwrite", "--quick")
"""Flags that `check` has not; the first four take a value."""
INSTANCE = "inf2.48xlarge"


def main(name: str, arguments: list[str]) -> int:
    match name:
        case "djl-neuronx":
            command = [sys.executable, "-m", "djl_python_neuronx", *arguments]
            if NO_DEVICE in os.environ and arguments[:1] and arguments[0] in DEVICE_COMMANDS:
                command = [*command[:3], *planned(arguments)]
            elif arguments[:1] == ["serve"] and "--help" not in arguments:
                return serve(port_of(arguments), command)
            os.execv(sys.executable, command)
        case "serve":
            return serve(8000, [sys.executable, "-m", "ray.serve.scripts", *arguments])
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


def planned(arguments: list[str]) -> list[str]:
    """The arguments of `check` for those of a command that needs a device."""
    kept = ["check"]
    left = iter(arguments[1:])
    for word in left:
        name, is_joined, _ = word.partition("=")
        if name not in NOT_OF_CHECK:
            kept.append(word)
        elif name in NOT_OF_CHECK[:4] and not is_joined:
            next(left)
    return kept if "--instance" in kept else [*kept, "--instance", INSTANCE]


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
        if _answers(f"http://127.0.0.1:{port}/ping"):
            return 0
        time.sleep(0.1)
    sys.stderr.write(f"{log.read_text()}not ready (exit status {server.poll()})\n")
    return 1


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True


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
    return os.execv(sys.executable, [sys.executable, *arguments])


def pip(arguments: list[str]) -> int:
    """Look at what an installation names: files, requirements, and the extras of this package."""
    from packaging.requirements import Requirement

    try:
        import tomllib
    except ImportError:
        import tomli as tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if arguments[:1] != ["install"]:
        sys.stderr.write(f"pip {' '.join(arguments)}: only `install` is known here\n")
        return 1
    left = iter(arguments[1:])
    for word in left:
        if word in ("-c", "-r"):
            Path(next(left)).read_bytes()
        elif (
            word.startswith("-")
            and "=" not in word
            and word not in ("-e", "-U", "--upgrade", "-q", "--quiet")
        ):
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

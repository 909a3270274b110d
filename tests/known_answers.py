"""The README's requests and answers, for every way to a server of the example model.

`python tests/known_answers.py URL [COMMAND...]` sends them to a server, which the command starts; it needs nothing but
Python. It exits with 1 and prints what differs if an answer is another one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
READY_S = 180
README = (ROOT / "README.md").read_text(encoding="utf-8")


def shown() -> list[tuple[str, dict[str, str], dict[str, Any], list[Any]]]:
    """Each curl's path, header and body with the lines that the README shows; a long one goes on behind a blank."""
    (block,) = re.findall(r"```console\n(\$ curl .*?)```", README, re.DOTALL)
    found = []
    for part in block.split("$ curl ")[1:]:
        command, *lines = part.strip().replace("\n ", "").splitlines()
        request = re.search(r"localhost:8080(\S+) -H '(\S+): (\S+)' *\\?-d '(.*)'$", command)
        assert request is not None, command
        answers = [rounded(json.loads(line)) for line in lines]
        found.append((request[1], {request[2]: request[3]}, json.loads(request[4]), answers))
    assert found
    return found


def rounded(value: Any) -> Any:
    """The same without what differs between machines and answers: log-probabilities, times, ids and names of models."""
    if isinstance(value, dict):
        return {
            name: rounded(inner)
            for name, inner in value.items()
            if name not in ("log_prob", "created", "model", "system_fingerprint")
            and not str(inner).startswith("chatcmpl-")
        }
    return value


def differences(url: str) -> list[str]:
    """A server's answers that differ from the README; raises `OSError` for a server that does not answer."""
    different = []
    for path, headers, body, wanted in shown():
        request = urllib.request.Request(url.rstrip("/") + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            found = [rounded(json.loads(line)) for line in answer]
        if found != wanted:
            different.append(f"{path} {body}\n  expected {wanted}\n  found    {found}")
    return different


@contextmanager
def served(url: str, command: Sequence[str]) -> Iterator[None]:
    """Start a server, wait until it is ready, and end it and all of its session."""
    if _is_ready(url):
        sys.exit(f"another server answers at {url}: end it, or choose another port")
    server = subprocess.Popen(command, start_new_session=True)
    try:
        deadline = time.monotonic() + READY_S
        while not _is_ready(url):
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{' '.join(command)}: not ready at {url} (exit status {server.poll()})")
            time.sleep(0.2)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url.rstrip("/") + "/ping", timeout=10):
            return True
    except OSError:  # HTTPError too
        return False


def main(url: str, command: Sequence[str]) -> int:
    """Print what differs and return the exit status."""
    with served(url, command) if command else nullcontext():
        problems, total = differences(url), len(shown())
    lines = [*problems, f"{total - len(problems)} of {total} answers are the README's"]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

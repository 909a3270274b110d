"""Programs of the system whose answer is read: each with a limit of time, after which its whole group is ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Container

_TIMEOUT_S = 5.0
"""Seconds for an answer, during which a start that waits for cores notices no stop."""
_SHOWN, _READ = 200, 2**22


class UnreadError(Exception):
    """A program that gave no answer that can be read; its text is the reason."""


def output(command: list[str], statuses: Container[int] = (0,)) -> str:
    """Return what a program writes, the first 4 MiB.

    `statuses`: exit statuses with an answer.

    Raises:
        UnreadError: it does not run, takes more than 5 s, or ends with another status.
    """
    try:
        process = subprocess.Popen(  # noqa: S603 - fixed arguments, and no shell
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        msg = f"it does not run: {error}"
        raise UnreadError(msg) from None
    with process:
        try:
            answer, errors = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            msg = f"no answer within {_TIMEOUT_S:g} s"
            raise UnreadError(msg) from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode not in statuses:
        shown = " ".join(errors.decode(errors="replace").split())[:_SHOWN]
        msg = f"exit status {process.returncode}: {shown or 'no message'}"
        raise UnreadError(msg)
    return answer[:_READ].decode(errors="replace")

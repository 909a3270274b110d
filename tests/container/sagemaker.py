"""A double of SageMaker around a container: its files, variables, network, processes and signals.

Sources: SageMaker's developer guide, "Use Your Own Inference Code with Hosting Services" (command, files, signals,
probe) and "Troubleshoot multi-container endpoints" (port); botocore's models (6 MiB, 60 s, startup).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import threading
import time
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from tests.clients.sdks import MODEL
from tests.processes import children, tree, wait_until

PING_S = 2.0
"""Time that a container has to answer a probe."""
STARTUP_S = 60.0
"""Time that it has to answer one with 200: the shortest `ContainerStartupHealthCheckTimeoutInSeconds`."""
STOP_S = 30.0
"""Time from SIGTERM to SIGKILL."""
MAX_BODY_BYTES = 6 * 2**20
_BARE = f"sh {shlex.quote(str(Path(__file__).with_name('bare.sh')))}"
COMMAND = shlex.split(os.environ.get("CONTAINER_COMMAND", _BARE))
"""Runs an image with `$OPT_ML` as its /opt/ml, without starting a process in between; `docker/replay.sh` writes one."""
_BARE_ENVIRON = {"PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
VARIABLES = {
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/v2/credentials/dummy",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_REGION": "us-east-1",
    "SAGEMAKER_CONTAINER_LOG_LEVEL": "20",
    "SAGEMAKER_ENV": "1",
    "SAGEMAKER_MODEL_SERVER_WORKERS": "1",
    "SAGEMAKER_PROGRAM": "inference.py",
    "SAGEMAKER_REGION": "us-east-1",
    "SAGEMAKER_SUBMIT_DIRECTORY": "/opt/ml/model/code",
    "SM_MODEL_DIR": "/opt/ml/model",
    "TS_DEFAULT_WORKERS_PER_MODEL": "1",
}
"""Variables of SageMaker, its SDK and its older images, of which nothing follows here."""
_FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]
_MOUNTS = """
mount --bind "$OPT_ML" "$OPT_ML"
mount -o remount,bind,ro "$OPT_ML"
exec "$@"
"""
_NEWNET = 0x40000000  # linux/sched.h
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1  # linux/sockios.h, linux/if.h


def missing():
    """The reason that no container can run here; None if one can."""
    if os.geteuid() != 0:
        return "needs root, for namespaces and mounts"
    if lacking := [name for name in ("unshare", "setpriv") if shutil.which(name) is None]:
        return f"needs util-linux; not found: {', '.join(lacking)}"
    command = shlex.split("unshare --mount --net --pid --fork mount -t tmpfs tmpfs /mnt")
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"needs namespaces of its own: {ran.stderr.strip()}" if ran.returncode else None


@contextmanager
def no_network():
    """A network with nothing but loopback, for this thread and all threads and processes that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open("rb") as before:
        assert libc.unshare(_NEWNET) == 0, os.strerror(ctypes.get_errno())
        try:
            with socket.socket() as any_socket:
                request = struct.pack("16sh22x", b"lo", _IFF_UP)
                fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)
            yield
        finally:
            assert libc.setns(before.fileno(), _NEWNET) == 0, os.strerror(ctypes.get_errno())


def archive(path, *, top="", more=()):
    """A model.tar.gz of the example model. `top`: a folder around it; `more`: further files, name → content."""
    with tarfile.open(path, "w:gz") as tar:
        for name in _FILES:
            tar.add(MODEL / name, f"{top}{name}")
        for name, text in dict(more).items():
            source = path.parent / "more"
            source.write_text(text)
            tar.add(source, f"{top}{name}")
    return path


class Container:
    """A running container. `namespace`: whether it has process ids of its own, where the server has 1."""

    def __init__(self, work, model, environ=(), *, namespace=True):
        """Start it with a model.tar.gz; the caller closes it. `work`: an empty folder."""
        self.environ = {**VARIABLES, **dict(environ)}
        self.port = int(self.environ.get("SAGEMAKER_BIND_TO_PORT", 8080))
        self.log = work / "log"
        self.started_s = time.time()
        opt_ml = work / "ml"
        (opt_ml / "model").mkdir(parents=True)
        subprocess.run(["tar", "-xzf", model, "-C", opt_ml / "model"], check=True)
        processes = ["--pid", "--fork", "--kill-child", "--mount-proc"] if namespace else []
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                ["unshare", "--mount", *processes, "sh", "-ec", _MOUNTS, "sh", *COMMAND, "serve"],
                env={
                    "PATH": os.environ["PATH"],
                    "OPT_ML": str(opt_ml),
                    **({} if "CONTAINER_COMMAND" in os.environ else _BARE_ENVIRON),
                    **self.environ,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pings = []
        """Status of each probe since the port is open; a text for one that was not answered in time."""
        self._probes = True
        self._prober = threading.Thread(target=self._probe, daemon=True)
        self._prober.start()
        if not namespace:
            self.pid = self._process.pid
        else:
            (self.pid,) = wait_until(lambda: children(self._process.pid), self.tail)

    def connect(self, timeout_s=60.0):
        return HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def ping(self):
        """Status of a probe of its own connection, as SageMaker sends it."""
        connection = self.connect(PING_S)
        try:
            connection.request("GET", "/ping")
            return connection.getresponse().status
        finally:
            connection.close()

    def wait_ready(self):
        def is_ready():
            assert self.status() is None, self.tail()
            return 200 in self.pings

        wait_until(is_ready, self.tail, STARTUP_S)
        return self

    def status(self):
        """Exit status; None while it runs."""
        return self._process.poll()

    def processes(self):
        return tree(self.pid)

    def stop(self):
        """SIGTERM, as SageMaker sends it, to the server alone."""
        self._probes = False
        self._prober.join()
        os.kill(self.pid, signal.SIGTERM)
        self._killed_at_s = time.monotonic() + STOP_S

    def wait(self):
        """Wait for the end after `stop`, as long as SageMaker; returns the exit status."""
        try:
            return self._process.wait(max(0.0, self._killed_at_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it runs {STOP_S} s after SIGTERM\n{self.tail()}") from None

    def close(self):
        self._probes = False
        if self.status() is None:
            for pid in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def tail(self):
        return self.log.read_text(errors="replace")[-6000:]

    def _probe(self):
        while self._probes and self.status() is None:
            try:
                self.pings.append(self.ping())
            except (OSError, HTTPException) as error:
                if self.pings or not isinstance(error, ConnectionRefusedError):
                    self.pings.append(repr(error))
            time.sleep(0.1)

"""The machine on which the commands of one page run: Linux namespaces over a copy of this one that is thrown away.

What a command writes goes to memory and is gone with the page, ports are the page's alone, no other machine can be
reached, and what still runs at the end of the page ends. The models, the hub, S3 and programs of the docs are there as
the tables below name them. It needs `unshare` and root: in a user namespace, Linux refuses an overlay over a folder
below which something is mounted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.doc_tests.blocks import TOOLS
from tests.doc_tests.stand_ins import PROGRAMS, ROOT
from tests.doubles.hub import FILES as WEIGHTS
from tests.doubles.hub import Hub

EXAMPLE = ROOT / "examples" / "tiny-llama"
SHAPES = ROOT / "tests" / "planning" / "models"

FOLDERS = r"(?:/models|/path/to)/[\w.-]+(?:/[\w.-]+)*"
"""Folders that a page names: each is the example model, with its weights and more positions."""
NUM_POSITIONS = 4096
FILES = {
    "/opt/aws_neuronx_venv_pytorch_2_9_nxd_inference/bin/activate": "",
    "FOLDER/src/modeling.py": "",
}
"""Files that are there for every page, and their contents."""
HUB_MODELS = {
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama-3-8b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "meta-llama/Llama-3.1-8B": "llama-3.1-8b",
    "owner/name": None,
}
"""Models of the hub → a config.json of `tests/planning/models`; None: the example model."""
BUCKETS = r"s3://[\w.-]+/[\w./-]+"
"""URIs that a page names: each has the configuration of Llama 3 8B."""
WHEEL = "djl_python_neuronx-1.2.3-py3-none-any.whl"
"""The wheel in dist/: a name alone, because `pip` only looks at it. The version is the tag's in docs/releasing.md."""

ALWAYS = ("djl-neuronx", "make", "pip", "python", "python3", "python3.10", "curl", "serve")
"""Stand-ins that all blocks have."""
_NO_COPY = ("/proc", "/sys", "/dev")


def enter(base: Path) -> None:
    """Move this process onto the copy, which is mounted on a folder.

    It must be alone in new namespaces of mounts, network and processes.
    """
    points = _mount_points()
    _mount("-t", "tmpfs", "tmpfs", base)
    new = base / "root"
    for number, point in enumerate(points):
        place = new / point.relative_to("/")
        if point.is_dir() and not any(point.is_relative_to(one) for one in _NO_COPY):
            upper, work = base / f"upper{number}", base / f"work{number}"
            for folder in (upper, work, place):
                folder.mkdir(parents=True, exist_ok=True)
            layers = f"lowerdir={point},upperdir={upper},workdir={work}"
            _mount("-t", "overlay", "overlay", "-o", layers, place)
        elif str(point) in _NO_COPY or not point.is_dir():
            _mount("--rbind", point, place)
    os.chroot(new)
    os.chdir(ROOT)
    _start_loopback()


def _mount_points() -> list[Path]:
    """Mount points of this machine, outer ones first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    found = {Path(line.split()[4].encode().decode("unicode_escape")) for line in lines}
    return sorted(found, key=lambda point: len(point.parts))


def _mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


def _start_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh22x", b"lo", 1 | 64)  # IFF_UP, IFF_RUNNING
        fcntl.ioctl(any_socket, 0x8914, request)  # SIOCSIFFLAGS


def furnish(text: str) -> dict[str, str]:
    """Make what the text of a page names, and return the variables for its commands."""
    home = Path("/home/reader")
    home.mkdir(parents=True)
    environ = {
        "PATH": f"{PROGRAMS}:{Path(sys.executable).parent}:{os.environ['PATH']}:{TOOLS}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(home),
        "HF_ENDPOINT": _hub(),
        "HF_TOKEN": "hf_reader",
        "LANG": "C.UTF-8",
        "COLUMNS": "120",
        "OMP_NUM_THREADS": "1",
        "OPENAI_API_KEY": "none",
        "GIT_COMMITTER_NAME": "reader",
        "GIT_COMMITTER_EMAIL": "reader@example.org",
    }
    for folder in re.findall(FOLDERS, text):
        write_model(Path(folder.rstrip(".")))
    for name, content in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content)
    write_stand_ins(())
    _write_environment()
    if uris := re.findall(BUCKETS, text):
        environ |= _s3(uris)
    return environ


def write_model(folder: Path) -> None:
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = NUM_POSITIONS
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "steps.json").write_text('{"prefill": {"4096": 1}, "decode": {"4096": 1}}')


def _hub() -> str:
    hub = Hub()
    example = {path.name: path.read_bytes() for path in EXAMPLE.iterdir()}
    for name, shape in HUB_MODELS.items():
        config = shape and {**WEIGHTS, "config.json": _shape(shape)}
        hub.models[name] = config or example
    return hub.url


def _s3(uris: list[str]) -> dict[str, str]:
    """Start moto; variables that lead to it."""
    import boto3
    from moto.server import ThreadedMotoServer

    from tests.doubles import moto_sagemaker

    moto_sagemaker.complete()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    environ = {
        "AWS_ENDPOINT_URL": "http://{}:{}".format(*server.get_host_and_port()),
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
    }
    client = boto3.client(
        "s3",
        region_name="us-east-1",
        endpoint_url=environ["AWS_ENDPOINT_URL"],
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
    )
    for uri in uris:
        bucket, _, key = uri.removeprefix("s3://").rstrip(".").partition("/")
        client.create_bucket(Bucket=bucket)
        for name, content in {**WEIGHTS, "config.json": _shape("llama-3-8b")}.items():
            client.put_object(Bucket=bucket, Key=f"{key.strip('/')}/{name}", Body=content)
    return environ


def _shape(name: str) -> bytes:
    return (SHAPES / f"{name}.json").read_bytes()


def write_stand_ins(names: Iterable[str]) -> None:
    """Put programs on the path that call `stand_ins` with their name and arguments, beside those of every block."""
    shutil.rmtree(PROGRAMS, ignore_errors=True)
    PROGRAMS.mkdir(parents=True)
    for name in {*ALWAYS, *names}:
        _write_stand_in(name)


def _write_stand_in(name: str) -> None:
    path = PROGRAMS / name
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.doc_tests.stand_ins {name} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def _write_environment() -> None:
    """An environment as `make install` makes it, and a wheel in dist/."""
    for folder in (ROOT / ".venv" / "bin", ROOT / "dist"):
        folder.mkdir(parents=True, exist_ok=True)
    for path in (ROOT / "dist").iterdir():
        path.unlink()
    (ROOT / "dist" / WHEEL).touch()
    sums = f"{hashlib.sha256(b'').hexdigest()}  {WHEEL}\n"
    (ROOT / "dist" / "SHA256SUMS").write_text(sums)
    (ROOT / ".venv" / "bin" / "activate").write_text("")
    (ROOT / ".venv" / "bin" / "djl-neuronx").unlink(missing_ok=True)
    (ROOT / ".venv" / "bin" / "djl-neuronx").symlink_to(PROGRAMS / "djl-neuronx")
    variables = subprocess.run(["make", "-pn"], capture_output=True, text=True, check=False).stdout
    (stamp,) = re.findall(r"^INSTALLED := (.*)", variables, re.M)
    (ROOT / stamp).touch()

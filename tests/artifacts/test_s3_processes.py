"""Processes that are killed while they load, or that want the same at the same time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from tests.doubles.s3_proxy import Fault, wait_until
from tests.doubles.s3_rig import (
    LARGE,
    NAME,
    PIECE_BYTES,
    SMALL,
    URI,
    contents,
    fetch,
    published,
    put,
    settings,
    tensors,
)

pytest_plugins = ["tests.doubles.s3_fixtures"]

CHILD = """
import json, sys
from pathlib import Path
from djl_python_neuronx.artifacts import s3
from djl_python_neuronx.artifacts import cache
from djl_python_neuronx.artifacts.folder import EVERYTHING
uri, root, environ, cache.PIECE_BYTES = *sys.argv[1:4], int(sys.argv[4])
print(s3.fetch(uri, Path(root), json.loads(environ), selection=EVERYTHING))
"""


def start(proxy, root):
    environ = json.dumps(settings(proxy))
    command = [sys.executable, "-c", CHILD, URI, str(root), environ, str(PIECE_BYTES)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )


def test_a_killed_download_goes_on_where_it_was(proxy, bucket, tmp_path):
    put(bucket, {**SMALL, NAME: LARGE})

    def is_last_piece(request):
        return request.is_data and (request.range or "").startswith(f"bytes={2 * PIECE_BYTES}-")

    proxy.rules = [Fault("stall", when=is_last_piece, seconds=600)]
    child = start(proxy, tmp_path)
    # Every request was answered and its piece recorded, but for the one that stalls.
    journal = "*/partial/journal"
    total = len([content for content in SMALL.values() if content]) + 3
    wait_until(
        lambda: any(p.read_text().count("\n") == total for p in tmp_path.glob(journal)),
        "all pieces but one",
    )
    assert published(tmp_path) == []
    child.send_signal(signal.SIGKILL)
    child.communicate()
    proxy.rules = []
    proxy.seen.clear()
    assert contents(fetch(proxy, tmp_path)) == {**SMALL, NAME: LARGE}
    rest = f"bytes={2 * PIECE_BYTES}-{len(LARGE) - 1}"
    assert proxy.data_requests() == [(f"/models/llama/{NAME}", rest)]


def test_what_a_killed_download_left_of_another_version_is_not_used(proxy, bucket, tmp_path):
    put(bucket, {**SMALL, NAME: LARGE})
    proxy.rules = [
        Fault(
            "stall",
            when=lambda r: r.is_data and f"={2 * PIECE_BYTES}-" in (r.range or ""),
            seconds=600,
        )
    ]
    child = start(proxy, tmp_path)
    wait_until(
        lambda: any(
            "model.safetensors" in p.read_text() for p in tmp_path.glob("*/partial/journal")
        ),
        "a piece",
    )
    child.send_signal(signal.SIGKILL)
    child.communicate()
    proxy.rules = []
    new = tensors(2, len(LARGE))
    put(bucket, {NAME: new})
    assert contents(fetch(proxy, tmp_path)) == {**SMALL, NAME: new}


def test_processes_at_once_fetch_once(proxy, bucket, tmp_path):
    put(bucket, {**SMALL, NAME: LARGE})
    children = [start(proxy, tmp_path) for _ in range(4)]
    answers = {child.communicate()[0].strip() for child in children}
    assert [child.returncode for child in children] == [0] * 4
    assert len(answers) == 1
    assert contents(Path(answers.pop())) == {**SMALL, NAME: LARGE}
    asked = proxy.data_requests()
    assert len(asked) == len(set(asked)) == 3 + len([c for c in SMALL.values() if c])

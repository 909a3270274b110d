"""The compile store and the cache of downloads on disks that are full or read-only, mounted for one process alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def in_own_mounts(scenario, root):
    """The outcome of a scenario of the worker where it may mount disks."""
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    root.mkdir()
    try:
        allowed = subprocess.run(
            [*unshare, "mount", "-t", "tmpfs", "tmpfs", str(root)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("unshare (util-linux) is not installed")
    if allowed.returncode:
        pytest.skip(f"this user may not mount in a namespace of its own: {allowed.stderr.strip()}")
    ran = subprocess.run(
        [*unshare, sys.executable, "-m", "tests.artifacts.store_worker", scenario, str(root)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_a_full_disk_publishes_nothing_and_keeps_what_was_finished(tmp_path):
    outcome = in_own_mounts("small_disk", tmp_path / "disk")
    assert outcome["error"].startswith("ArtifactAccessError")
    assert "is full" in outcome["error"]
    assert outcome["published"] == []
    assert outcome["whole"]
    assert outcome["tried"] == [0, 1, 2]
    assert outcome["then"] == [2]


def test_a_download_that_a_full_disk_stops_goes_on_with_what_was_whole(tmp_path):
    outcome = in_own_mounts("fetch_into_small_disk", tmp_path / "disk")
    assert outcome["error"].startswith("ArtifactAccessError")
    assert "is full" in outcome["error"]
    assert outcome["whole"], "a piece of which the disk took a part was taken for whole"
    assert outcome["loaded"] == [0, 100_000, 200_000, 300_000, 400_000]


def test_a_read_only_store_is_used_in_place(tmp_path):
    outcome = in_own_mounts("read_only", tmp_path / "store")
    error = outcome.pop("error")
    assert outcome.pop("made") == [0, 1, 2] * 2
    assert outcome == dict.fromkeys(outcome, True)
    assert error.startswith("ArtifactAccessError")
    assert str(tmp_path / "store") in error

"""A process that compiles into a store: the double of the compiler writes one file per graph, and keeps a list.

Run as a program, it plays a scenario in a mount namespace of its own, where disks can be small or read-only.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from djl_python_neuronx.artifacts import cache
from djl_python_neuronx.artifacts.atomic import whole_file
from djl_python_neuronx.artifacts.manifest import CompileFacts, differences
from djl_python_neuronx.artifacts.store import CompileStore
from djl_python_neuronx.errors import ArtifactError

NUM_GRAPHS = 3
# What a library opens is no step of the store; and the first use of some modules opens files of theirs.
_STEPS = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree", "fcntl.flock")


def make_facts(role="model", **options):
    return CompileFacts(
        role=role,
        graph_options={"n_positions": 128, "buckets": [64, 128], **options},
        artifact_digest="sampled:aa",
        compiler="neuronx-cc",
        compiler_version="2.16.372.0",
        target="inf2",
    )


def content(index):
    return f"graph {index} ".encode() * 5000


def expected_files():
    return {f"graphs/{index}.neff": content(index) for index in range(NUM_GRAPHS)}


def files_of(folder):
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    return {
        name: path.read_bytes()
        for name, path in found.items()
        if path.is_file() and name != "manifest.json"
    }


class Compiler:
    """Graphs that are there are kept. Each one that is not is noted in `journal`, with the process."""

    def __init__(self, journal, pause_s=0.0):
        self.journal = journal
        self.pause_s = pause_s

    def __call__(self, folder):
        (folder / "graphs").mkdir(exist_ok=True)
        for index in range(NUM_GRAPHS):
            path = folder / "graphs" / f"{index}.neff"
            if path.exists():
                assert path.read_bytes() == content(index)
                continue
            with self.journal.open("a") as journal:
                journal.write(f"{index} {os.getpid()}\n")
            with whole_file(path) as temporary, temporary.open("wb") as file:
                for start in range(0, len(content(index)), 10_000):
                    file.write(content(index)[start : start + 10_000])
                    time.sleep(self.pause_s)


def graphs_made(journal):
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [int(line.split()[0]) for line in lines]


def build(root, journal, *, pause_s=0.0, options=None, role="model", **settings):
    return make(
        CompileStore(root, **settings),
        make_facts(role, **(options or {})),
        Compiler(journal, pause_s),
    )


def make(store, facts, compile_into, **settings):
    settings = {"on_miss": lambda miss: None, "effective_options": {}, "packages": {}, **settings}
    return store.build(facts, compile_into, **settings)


class MissedError(Exception):
    """The store has no compile; `miss` says why."""

    def __init__(self, miss):
        self.miss = miss
        super().__init__(str(miss.damage or miss.nearest))

    @property
    def differences(self):
        return differences(self.miss.wanted, self.miss.nearest[1])


def find_or_fail(store, facts):
    def fail(miss):
        raise MissedError(miss)

    return make(store, facts, None, on_miss=fail)


def finished(root):
    return [path for path in root.glob("[0-9a-f]*") if path.is_dir()]


def build_and_die(root, journal, last_step):
    """Kill this process at its `last_step`-th change of the disk, before it happens."""
    steps = 0

    def on_event(event, args):
        nonlocal steps
        opened_to_write = event == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT
        if (event in _STEPS or opened_to_write) and str(root) in str(args):
            steps += 1
            if steps == last_step:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(on_event)
    build(root, journal)


def build_and_tell(root, journal, told, pause_s):
    told.put(str(build(root, journal, pause_s=pause_s)))


def wait_with_lock(root, journal, ready):
    """Hold the key's lock until killed."""

    def compile_for_ever(folder):
        ready.set()
        time.sleep(600)

    make(CompileStore(root), make_facts(), compile_for_ever)


def small_disk(root):
    """Fill a disk that two graphs fit on, enlarge it, and go on."""
    mount("-t", "tmpfs", "-o", "size=100k", "tmpfs", str(root))
    journal = root.parent / "journal"
    error = None
    try:
        build(root / "store", journal)
    except ArtifactError as caught:
        error = f"{type(caught).__name__}: {caught}"
    published = [path.name for path in (root / "store").glob("[0-9a-f]*")]
    tried = graphs_made(journal)
    mount("-o", "remount,size=8m", str(root))
    folder = build(root / "store", journal)
    return {
        "error": error,
        "published": published,
        "tried": tried,
        "then": graphs_made(journal)[len(tried) :],
        "whole": files_of(folder) == expected_files(),
    }


def fetch_into_small_disk(root):
    """Another program fills the disk in the middle of a download, and makes room again."""
    from tests.artifacts.shelf import Shelf

    mount("-t", "tmpfs", "-o", "size=600k", "tmpfs", str(root))
    cache.PIECE_BYTES = 100_000
    shelf, filler = Shelf(weights=bytes(range(1, 251)) * 2000), root / "filler"

    def fill(piece):
        if piece.start == 200_000:
            with filler.open("wb", buffering=0) as file:
                # But for the last pages: half of the next piece fits.
                file.truncate(shutil.disk_usage(root).free - 50_000)
                os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)

    shelf.before, error = fill, None
    try:
        cache.fetch(shelf, root / "cache")
    except ArtifactError as caught:
        error = f"{type(caught).__name__}: {caught}"
    filler.unlink()
    shelf.before = lambda piece: None
    folder = cache.fetch(shelf, root / "cache")
    whole = (folder / "weights").read_bytes() == shelf.files["weights"]
    return {"error": error, "whole": whole, "loaded": [start for _, start in shelf.loaded]}


def read_only(root):
    """A store on a read-only disk: used in place, and what it lacks made elsewhere."""
    journal, fallback = root.parent / "journal", root.parent / "fallback"
    build(root, journal)
    mount("--bind", str(root), str(root))
    mount("-o", "remount,bind,ro", str(root))
    before = files_of(root)
    settings = {"fallback": fallback}
    found = build(root, journal, **settings)
    untouched_fallback = not fallback.exists() or not list(fallback.iterdir())
    other = build(root, journal, options={"n_positions": 256}, **settings)
    try:
        build(root, journal, options={"n_positions": 512})
        error = None
    except ArtifactError as caught:
        error = f"{type(caught).__name__}: {caught}"
    return {
        "in_place": found.parent == root,
        "untouched_fallback": untouched_fallback,
        "other_elsewhere": other.parent == fallback,
        "unchanged": files_of(root) == before,
        "made": graphs_made(journal),
        "error": error,
    }


def mount(*arguments):
    subprocess.run(["mount", *arguments], check=True)


if __name__ == "__main__":
    scenarios = (small_disk, fetch_into_small_disk, read_only)
    scenario = {one.__name__: one for one in scenarios}[sys.argv[1]]
    sys.stdout.write(json.dumps(scenario(Path(sys.argv[2]))))

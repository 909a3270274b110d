"""The compile store in one process: what is found, what is made, what is refused and why."""

import json
import os
import time

import pytest

from djl_python_neuronx.artifacts import manifest as manifests
from djl_python_neuronx.artifacts.atomic import hold_lock
from djl_python_neuronx.artifacts.store import CompileStore, remove_stale
from djl_python_neuronx.errors import ArtifactError, CompileError
from tests.artifacts.store_worker import (
    Compiler,
    MissedError,
    build,
    expected_files,
    files_of,
    find_or_fail,
    finished,
    graphs_made,
    make,
    make_facts,
)

GRAPH = "graphs/1.neff"


@pytest.fixture
def place(tmp_path):
    return tmp_path / "store", tmp_path / "journal"


def test_a_second_start_compiles_nothing(place):
    root, journal = place
    first = build(root, journal)
    assert files_of(first) == expected_files()
    second = CompileStore(root)
    assert find_or_fail(second, make_facts()) == first
    assert graphs_made(journal) == [0, 1, 2]
    assert not list((root / ".work").iterdir())


def test_the_manifest_says_what_it_was_made_from(place):
    root, journal = place
    folder = make(
        CompileStore(root),
        make_facts(),
        Compiler(journal),
        effective_options={"n_positions": 128, "max_waiting": 10, "buckets": (64, 128)},
        packages={"transformers-neuronx": "0.13.380"},
    )
    made = manifests.read(folder)
    assert made.facts == make_facts()
    assert made.effective_options == {"n_positions": 128, "max_waiting": 10, "buckets": [64, 128]}
    assert made.packages == {"transformers-neuronx": "0.13.380"}
    assert made.files.keys() == expected_files().keys()


def test_a_compile_that_fails_says_so_and_keeps_its_graphs(place):
    root, journal = place

    def fail_late(folder):
        Compiler(journal)(folder)
        (folder / "graphs" / "2.neff").unlink()
        msg = "graph 2: out of registers"
        raise CompileError(msg)

    with pytest.raises(CompileError, match="out of registers"):
        make(CompileStore(root), make_facts(), fail_late)
    assert not finished(root)
    build(root, journal)
    assert graphs_made(journal) == [0, 1, 2, 2]


def test_an_error_of_the_compile_itself_is_not_taken_for_the_store_s(place):
    def read_what_is_not_there(folder):
        (folder / "weights").read_bytes()

    with pytest.raises(FileNotFoundError, match="weights") as caught:
        make(CompileStore(place[0]), make_facts(), read_what_is_not_there)
    assert not isinstance(caught.value, ArtifactError)


def test_a_file_that_a_killed_helper_of_the_compile_left_is_not_published(place):
    root, journal = place

    def compile_with_leftover(folder):
        Compiler(journal)(folder)
        (folder / "graphs" / ".partial-9.neff-0").write_bytes(b"cut")

    store = CompileStore(root)
    made = make(store, make_facts(), compile_with_leftover)
    assert files_of(made) == expected_files()


def test_a_compile_must_not_write_the_store_s_own_file(place):
    def write_manifest(folder):
        (folder / "manifest.json").write_text("{}")

    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        make(CompileStore(place[0]), make_facts(), write_manifest)
    assert not finished(place[0])


def test_the_folder_of_an_earlier_try_comes_under_another_path(place):
    """So that a compiler which outlived its parent cannot write into it."""
    root, _ = place
    seen = []

    def give_up(folder):
        seen.append(folder)
        (folder / "x").write_bytes(b"x")
        msg = "no"
        raise CompileError(msg)

    for _ in range(2):
        with pytest.raises(CompileError):
            make(CompileStore(root), make_facts(), give_up)
    assert seen[0] != seen[1]
    assert not seen[0].exists()
    assert (seen[1] / "x").exists()


def test_one_changed_option_names_itself(place):
    root, journal = place
    build(root, journal)
    with pytest.raises(MissedError) as caught:
        find_or_fail(CompileStore(root), make_facts(n_positions=256))
    assert caught.value.differences == {"n_positions": (128, 256)}
    assert caught.value.miss.nearest[0] == str(root / make_facts().key)
    assert caught.value.miss == CompileStore(root).look(make_facts(n_positions=256))
    assert not finished(root / ".work"), "whoever forbids it leaves nothing"


def test_the_nearest_compile_explains(place):
    root, journal = place
    build(root, journal, options={"n_positions": 512, "tp_degree": 8})
    build(root, journal, options={"tp_degree": 2})
    where, facts = CompileStore(root).nearest(make_facts(tp_degree=4))
    assert facts == make_facts(tp_degree=2)
    assert where == str(root / facts.key)
    elsewhere = make_facts().model_copy(update={"artifact_digest": "sampled:other"})
    assert CompileStore(root).nearest(elsewhere) is None


def test_what_a_draft_model_was_compiled_for_is_nobody_else_s(place):
    root, journal = place
    draft = build(root, journal, options={"n_positions": 64}, role="draft")
    alone = make(CompileStore(root), make_facts(), Compiler(journal))
    assert set(finished(root)) == {draft, alone}
    # The other way round, and each is told of its like.
    for role, compiled in (("model", 128), ("draft", 64)):
        with pytest.raises(MissedError) as caught:
            find_or_fail(CompileStore(root), make_facts(role, n_positions=256))
        assert caught.value.differences == {"n_positions": (compiled, 256)}
    # What fits is used, whatever it was made as.
    found = find_or_fail(CompileStore(root), make_facts(n_positions=64))
    assert (found / GRAPH).samefile(draft / GRAPH)


@pytest.mark.parametrize(("first", "then"), [("draft", "model"), ("model", "draft")])
def test_a_compile_found_for_another_role_is_of_both(place, first, then):
    root, journal = place
    made = build(root, journal, role=first)
    assert CompileStore(root).look(make_facts(then)) is None
    assert finished(root) == [made]
    found = find_or_fail(CompileStore(root), make_facts(then))
    assert files_of(found) == expected_files()
    assert (found / GRAPH).samefile(made / GRAPH), "it takes no room"
    assert manifests.read(made).facts.role == first, "a finished compile is never changed"
    assert manifests.read(found).facts.role == then
    for role in (first, then):
        with pytest.raises(MissedError) as caught:
            find_or_fail(CompileStore(root), make_facts(role, n_positions=256))
        assert caught.value.differences == {"n_positions": (128, 256)}


def test_a_manifest_of_before_roles_is_a_model_s(place):
    root, journal = place
    path = build(root, journal) / "manifest.json"
    content = json.loads(path.read_text())
    assert content["facts"].pop("role") == "model"
    path.write_text(json.dumps(content))
    find_or_fail(CompileStore(root), make_facts())
    with pytest.raises(MissedError):
        find_or_fail(CompileStore(root), make_facts(n_positions=256))
    assert CompileStore(root).nearest(make_facts("draft", n_positions=256)) is None


def test_another_compile_lies_beside_it(place):
    root, journal = place
    both = {build(root, journal), build(root, journal, options={"n_positions": 256})}
    assert set(finished(root)) == both


@pytest.mark.parametrize("damage", ["missing", "changed", "longer", "extra", "link", "manifest"])
def test_a_damaged_compile_is_named_and_made_again(place, damage):
    root, journal = place
    folder = build(root, journal)
    graph = folder / "graphs" / "1.neff"
    match damage:
        case "missing":
            graph.unlink()
        case "changed":
            graph.write_bytes(content_with_one_bit_less(graph))
        case "longer":
            graph.write_bytes(graph.read_bytes() + b"\0")
        case "extra":
            graph.with_name("9.neff").write_bytes(b"stray")
        case "link":
            graph.rename(root / "away")
            graph.symlink_to(root / "away")
        case "manifest":
            (folder / "manifest.json").unlink()
    named = {"extra": "9.neff", "manifest": "manifest.json"}.get(damage, "1.neff")
    with pytest.raises(MissedError) as caught:
        find_or_fail(CompileStore(root), make_facts())
    assert named in str(caught.value.miss.damage)
    # Without reading the graphs a changed bit is not seen.
    seen = CompileStore(root).look(make_facts())
    assert (seen is None) == (damage == "changed")
    assert graphs_made(journal) == [0, 1, 2]
    assert files_of(build(root, journal)) == expected_files()
    assert graphs_made(journal) == [0, 1, 2] * 2


def test_a_damaged_compile_does_not_hide_a_whole_one(place, tmp_path):
    root, journal = place
    fallback = tmp_path / "own"
    damaged = build(root, journal) / "graphs" / "1.neff"
    whole = build(fallback, journal)
    damaged.unlink()
    store = CompileStore(root, fallback=fallback)
    assert find_or_fail(store, make_facts()) == whole
    # Of two damaged ones the first is named.
    (whole / "graphs" / "2.neff").unlink()
    with pytest.raises(MissedError, match=r"1\.neff"):
        find_or_fail(store, make_facts())


def test_only_the_damage_of_what_was_asked_for_is_its_own(place):
    root, journal = place
    (build(root, journal, role="model") / GRAPH).unlink()
    assert "missing" in str(CompileStore(root).look(make_facts("model")).damage)
    assert CompileStore(root).look(make_facts("draft")).damage is None


def content_with_one_bit_less(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    return content


def test_work_that_nobody_takes_up_is_removed_in_the_end(place):
    root, journal = place
    build(root, journal)
    for key in ("aa.1", "bb.1", "cc.1"):
        (root / ".work" / key).mkdir()
        (root / ".work" / key / "graph").write_bytes(b"x")
    long_ago = time.time() - 1000
    for path in [*(root / ".work").glob("aa.1/*"), *(root / ".work").glob("bb.1/*")]:
        os.utime(path, (long_ago, long_ago))
    for path in (root / ".work").glob("*"):
        os.utime(path, (long_ago, long_ago))
    with hold_lock(root / ".locks" / "bb", what="test"):
        remove_stale(root / ".work", root / ".locks", stale_s=500)
    assert sorted(path.name for path in (root / ".work").iterdir()) == ["bb.1", "cc.1"]

"""The variables of a load: what is set, what is left alone, and that they are gone afterwards."""

from __future__ import annotations

import os

import pytest

from djl_python_neuronx.backends import env
from djl_python_neuronx.errors import BackendUnavailableError, IncompatibleOptionsError
from djl_python_neuronx.planning.arguments import LibraryArguments

FLAGS = LibraryArguments(compiler_flags=("-O1", "--a=b c"))
CACHE = LibraryArguments(environment={"NEURON_COMPILE_CACHE_URL": "/cache"})
SAFE = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}
CORES = {"NEURON_RT_NUM_CORES": "2"}


@pytest.mark.parametrize(
    ("arguments", "current", "expected"),
    [
        (LibraryArguments(), {}, CORES),
        (LibraryArguments(), {"NEURON_RT_NUM_CORES": "8"}, {}),
        (LibraryArguments(), {"NEURON_RT_VISIBLE_CORES": "4-5"}, {}),
        (LibraryArguments(), {"NEURON_RT_VISIBLE_CORES": " "}, CORES),
        (FLAGS, {}, {"NEURON_CC_FLAGS": "-O1 '--a=b c'", **CORES}),
        (FLAGS, {"NEURON_CC_FLAGS": "--x -O1"}, {"NEURON_CC_FLAGS": "--x -O1 '--a=b c'", **CORES}),
        (FLAGS, {"NEURON_CC_FLAGS": "-O1 '--a=b c'", **CORES}, {}),
        (CACHE, CORES, {"NEURON_COMPILE_CACHE_URL": "/cache"}),
        (CACHE, {"NEURON_COMPILE_CACHE_URL": "/other", **CORES}, dict(CACHE.environment)),
    ],
)
def test_only_what_is_missing_is_set(
    arguments: LibraryArguments, current: dict[str, str], expected: dict[str, str]
) -> None:
    before = dict(current)
    assert env.variables(arguments, 2, current) == {**expected, **SAFE}
    assert env.variables(arguments, 2, {**current, **SAFE}) == expected
    assert current == before


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that has no runtime yet and that nobody gave cores."""
    for name in (
        *("NEURON_RT_NUM_CORES", "NEURON_RT_VISIBLE_CORES"),
        *("NEURON_LOCAL_TP", "NEURON_RANK_ID", "NEURON_PP_STAGES"),
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(env._Runtime, "limit", None)
    return monkeypatch


def test_what_was_set_is_put_back(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("NEURON_CC_FLAGS", "--mine")
    before = dict(os.environ)
    with env.applied(FLAGS, 4):
        assert os.environ["NEURON_CC_FLAGS"] == "--mine -O1 '--a=b c'"
        assert os.environ["NEURON_RT_NUM_CORES"] == "4"
    assert dict(os.environ) == before
    with pytest.raises(KeyError), env.applied(FLAGS, 4):
        raise KeyError
    assert dict(os.environ) == before


def test_what_the_library_sets_by_itself_is_put_back(fresh: pytest.MonkeyPatch) -> None:
    """Asynchronous execution of one model, the timeout of long contexts of another."""
    fresh.setenv("NEURON_RT_EXEC_TIMEOUT", "30")
    fresh.delenv("NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", raising=False)
    before = dict(os.environ)
    with env.applied(LibraryArguments(), 2):
        os.environ["NEURON_RT_EXEC_TIMEOUT"] = "600"
        os.environ["NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"] = "2"
    assert dict(os.environ) == before


def test_a_later_model_has_the_cores_of_the_first(fresh: pytest.MonkeyPatch) -> None:
    with env.applied(FLAGS, 4):
        pass
    with env.applied(FLAGS, 2), env.applied(FLAGS, 4):
        pass
    before = dict(os.environ)
    with (
        pytest.raises(BackendUnavailableError, match=r"8 .* started with NEURON_RT_NUM_CORES=4"),
        env.applied(FLAGS, 8),
    ):
        pytest.fail("loaded")
    assert dict(os.environ) == before
    fresh.setenv("NEURON_RT_VISIBLE_CORES", "0-7")
    with pytest.raises(BackendUnavailableError, match="which it keeps"), env.applied(FLAGS, 8):
        pytest.fail("loaded")


def test_models_that_are_loaded_together_share_the_cores_of_the_largest(
    fresh: pytest.MonkeyPatch,
) -> None:
    with env.applied(LibraryArguments(), 8):
        with env.applied(FLAGS, 2):
            assert os.environ["NEURON_RT_NUM_CORES"] == "8"
        with env.applied(FLAGS, 8):
            assert os.environ["NEURON_RT_NUM_CORES"] == "8"


def test_a_load_that_fails_leaves_the_cores_open(fresh: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError), env.applied(FLAGS, 2):
        raise KeyError
    with env.applied(FLAGS, 4):
        assert os.environ["NEURON_RT_NUM_CORES"] == "4"


@pytest.mark.parametrize(
    ("name", "value", "given"),
    [
        ("NEURON_RT_VISIBLE_CORES", "0-3,6", 5),
        ("NEURON_RT_VISIBLE_CORES", "7", 1),
        ("NEURON_RT_NUM_CORES", "4", 4),
    ],
)
def test_fewer_cores_than_the_model_needs_are_refused_with_both_numbers(
    fresh: pytest.MonkeyPatch, name: str, value: str, given: int
) -> None:
    fresh.setenv(name, value)
    with env.applied(FLAGS, given):
        pass
    fresh.setattr(env._Runtime, "limit", None)
    words = f"{given + 1} NeuronCores are needed, and {name}={value} gives this process {given}\\."
    with pytest.raises(BackendUnavailableError, match=words), env.applied(FLAGS, given + 1):
        pytest.fail("loaded")


@pytest.mark.parametrize("value", ["0", "all"])
def test_all_cores_are_no_limit(fresh: pytest.MonkeyPatch, value: str) -> None:
    fresh.setenv("NEURON_RT_NUM_CORES", value)
    with env.applied(FLAGS, 2):
        pass
    with env.applied(FLAGS, 64):
        assert os.environ["NEURON_RT_NUM_CORES"] == value


def test_a_part_of_a_model_on_several_machines_is_refused(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("NEURON_LOCAL_TP", "8")
    with env.applied(FLAGS, 8):
        pass
    fresh.setenv("NEURON_RANK_ID", "1")
    with (
        pytest.raises(
            IncompatibleOptionsError, match="NEURON_RANK_ID=1 with tensor_parallel_degree=8 "
        ),
        env.applied(FLAGS, 8),
    ):
        pytest.fail("loaded")

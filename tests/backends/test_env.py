"""The variables of a load: what is set, what is left alone, and that they are gone afterwards."""

from __future__ import annotations

import os

import pytest

from djl_python_neuronx.backends import env
from djl_python_neuronx.config.mapping import LibraryArguments

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
        (LibraryArguments(), {"NEURON_LOCAL_TP": "16"}, {"NEURON_RT_NUM_CORES": "16"}),
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


def test_what_was_set_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NEURON_RT_NUM_CORES", "NEURON_RT_VISIBLE_CORES", "NEURON_LOCAL_TP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NEURON_CC_FLAGS", "--mine")
    before = dict(os.environ)
    with env.applied(FLAGS, 4):
        assert os.environ["NEURON_CC_FLAGS"] == "--mine -O1 '--a=b c'"
        assert os.environ["NEURON_RT_NUM_CORES"] == "4"
    assert dict(os.environ) == before
    with pytest.raises(KeyError), env.applied(FLAGS, 4):
        raise KeyError
    assert dict(os.environ) == before

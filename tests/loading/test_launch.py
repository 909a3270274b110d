"""From a prepared model to jobs that any process can start, without a service."""

from __future__ import annotations

import gc
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.engine.native import LIBRARY, load
from djl_python_neuronx.errors import ConfigError
from djl_python_neuronx.loading import launch as launch_module
from djl_python_neuronx.loading.engine_process import EngineJob, ModelJob, load_engine
from djl_python_neuronx.loading.launch import make_launch
from djl_python_neuronx.loading.prepare import prepare_or_raise
from tests.doubles.neuron_machine import GRAPHS, TINY

pytest_plugins = ["tests.doubles.neuron_fixtures"]


def test_each_copy_has_its_cores_and_all_have_the_same_graphs(machine, options):
    environ = machine.environ
    overrides = {**options, "tensor_parallel_degree": "1", "replicas": "2"}
    prepared = prepare_or_raise(None, TINY, environ=environ, overrides=overrides)
    launch = make_launch(prepared)
    launch.tokenizer().close()
    assert list(launch.cores) == ["0", "1"]
    assert machine.compiled() == GRAPHS
    (model,) = launch.job.models
    assert {path.name for path in model.compiled.glob("*.neff")} == set(GRAPHS)
    for i, start in enumerate(launch.starts):
        assert isinstance(start, partial)
        job, variables = start.args
        assert (job.copy, variables["NEURON_RT_VISIBLE_CORES"]) == (i, launch.cores[i])
        crossing = TypeAdapter(EngineJob)
        assert crossing.validate_json(crossing.dump_json(job)) == job
    # Cores that another placement chose are taken as they are.
    launch = make_launch(prepared, ["1"])
    launch.tokenizer().close()
    assert [start.args[1]["NEURON_RT_VISIBLE_CORES"] for start in launch.starts] == ["1"]
    assert machine.compiled() == GRAPHS
    prepared = prepare_or_raise(
        None, TINY, environ=environ, overrides={**overrides, "replicas": "3"}
    )
    with pytest.raises(ConfigError):
        make_launch(prepared)


@pytest.mark.parametrize(
    ("copies", "own", "threads", "sampling"),
    [(1, None, None, 2), (2, None, 3, 1), (9, None, 1, 1), (2, 5, 5, 1)],
)
def test_copies_on_a_cpu_share_its_threads(copies, own, threads, sampling, monkeypatch):
    monkeypatch.setattr(launch_module, "count_cores", lambda: 8)
    options = {"model_loader": "cpu", "replicas": str(copies)}
    options |= {} if own is None else {"cpu_threads": str(own)}
    launch = make_launch(prepare_or_raise(None, TINY, environ={}, overrides=options))
    launch.tokenizer().close()
    assert len(launch.starts) == copies
    assert launch.job.models[0].plan.num_threads == threads
    assert launch.job.sampling_threads == sampling


def test_settings_of_the_sampler_reach_it() -> None:
    environ, options = {"DJL_NEURONX_NATIVE": "0"}, {"model_loader": "cpu", "sampling_threads": "3"}
    launch = make_launch(prepare_or_raise(None, TINY, environ=environ, overrides=options))
    launch.tokenizer().close()
    assert (launch.job.native_sampling, launch.job.sampling_threads) == (False, 3)
    plan = LoadPlan(Path(TINY), 4, 16, (8,), sim_step_ms=0.0)
    usual = EngineJob((ModelJob("sim", plan),))
    for job in (usual, replace(usual, native_sampling=False, sampling_threads=3)):
        with closing(job.load()) as engine:
            kernel = engine._sampler._kernel
            assert (kernel is None) == (not job.native_sampling or load(LIBRARY) is None)


def test_no_collection_visits_what_lives_when_an_engine_is_loaded() -> None:
    plan = LoadPlan(Path(TINY), 1, 16, (8,), sim_step_ms=0.0)
    gc.unfreeze()
    try:
        load_engine(EngineJob((ModelJob("sim", plan),))).close()
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()

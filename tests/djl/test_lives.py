"""Loads, unloads and deaths under DJL's released engine: what Java tells, and which processes are left."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from tests.djl.folders import MODEL, MODES, SIMULATED, write_model, write_toy
from tests.djl.java import LoadError
from tests.djl.questions import CHECKS, LONG, ask, body, toy_body
from tests.processes import PATIENCE_S, alive, engines, tree, wait_gone, wait_until

pytestmark = pytest.mark.djl


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_load_says_why_and_java_can_end(mode, start_java, tmp_path):
    folder = write_model(tmp_path, mode, dtyp="fp32")
    why = "unknown option 'dtyp'"
    with start_java() as java:
        if mode == "async":
            # Java 0.34.0 would hang if the load itself failed: requests get the reason until the process ends.
            java.load("tiny", folder)
            (answer,) = java.submit("tiny", body())
            assert answer.wait().status != 200
            assert answer.errors or json.loads(answer.content)["code"] >= 500
        else:
            with pytest.raises(LoadError, match=f"Failed to initialize model: {why}"):
                java.load("tiny", folder)
        java.wait_log(why)
        left = [each for pid in java.workers() for each in tree(pid)]
        assert java.end() == 0
        wait_gone(left)


@pytest.mark.parametrize("mode", ["rolling", "plain"])
def test_too_little_memory_is_javas_own_error(mode, start_java, tmp_path):
    folder = write_toy(tmp_path, mode, toy_load_error="DeviceMemoryError")
    with start_java() as java, pytest.raises(LoadError, match="OOM"):
        java.load("toy", folder)


def test_settings_may_all_come_from_the_environment(start_java, tmp_path, made_up):
    """A model that is unloaded leaves nothing then, and costs the others nothing.

    DJL Serving writes a file for HF_MODEL_ID, and passes `OPTION_*` to Java's engine, which decides the mode by them.
    """
    options = {
        "entryPoint": "djl_python_neuronx.handler",
        "model_loader": "sim",
        "max_rolling_batch_size": "4",
        "n_positions": "256",
    }
    environ = {f"OPTION_{name.upper()}": value for name, value in options.items()}
    with start_java({**environ, "HF_MODEL_ID": str(MODEL)}) as java:
        for mode in MODES:
            folder = tmp_path / mode
            folder.mkdir()
            (folder / "serving.properties").write_text(f"option.model_id={MODEL}\n")
            java.begin_load(mode, folder, {**options, **MODES[mode]})
        for mode in MODES:
            java.end_load(mode)
        too_long = "one two three " * 100
        for mode in MODES:
            ask(java, mode, made_up)
            (answer,) = java.submit(mode, body(too_long))
            assert answer.wait().status == 413, "OPTION_N_POSITIONS has no effect"
        # The asynchronous one last: Java takes its own stop for a death there, and starts the worker again.
        modes = ["rolling", "plain", "async"]
        while modes:
            mode = modes.pop(0)
            (pid,) = java.workers(tmp_path / mode)
            processes = tree(pid)
            java.unload(mode)
            wait_gone(processes)
            for other in modes:
                ask(java, other, made_up)
        assert java.end() == 0


def test_plain_models_are_loaded_unloaded_and_loaded_again(start_java, tmp_path, made_up):
    """As SageMaker's multi-model endpoints do. In the other modes Java keeps what it has unloaded, or loads no more."""
    folders = {}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        folders[name] = write_model(tmp_path / name, "plain", **SIMULATED)
    with start_java() as java:
        for name in ("a", "b", "a"):
            java.load(name, folders[name])
            ask(java, name, made_up)
            (pid,) = java.workers()
            processes = tree(pid)
            assert engines(pid)
            java.unload(name)
            wait_gone(processes)
            assert java.workers() == []
        assert java.end() == 0


def test_java_gets_the_metrics_and_the_level_of_each_line(start_java, tmp_path):
    folder = write_toy(tmp_path, "async", toy_metrics_s=0.5)
    with start_java() as java:
        java.load("toy", folder)
        (answer,) = java.submit("toy", toy_body())
        assert answer.wait().status == 200
        java.wait_log("model_metric - djl_neuronx_requests_total.Count:1.000000|#Model:")
        java.wait_log("model_metric - djl_neuronx_slots_in_use.Count:0.000000|#Model:")
        time.sleep(1)
        counted = [line for line in java.log if "djl_neuronx_requests_total" in line]
        assert len(counted) == 1  # Java adds the values up


@pytest.mark.parametrize("mode", MODES)
def test_java_warns_of_no_event_of_the_engine(mode, start_java, tmp_path, made_up):
    with start_java() as java:
        java.load("tiny", write_model(tmp_path, mode, **SIMULATED))
        ask(java, "tiny", made_up)
        java.wait_log("engine_process pid=")
        (line,) = [line for line in java.log if "engine_process pid=" in line]
        assert "-stdout: INFO::" in line


@pytest.fixture(scope="module")
def mortal(mode, start_java, tmp_path_factory):
    """A JVM with a model whose processes may be killed, and the model's folder."""
    folder = tmp_path_factory.mktemp("mortal")
    write_model(folder, mode, max_rolling_batch_size=8, **SIMULATED)
    with start_java() as java:
        java.load("tiny", folder)
        yield java, folder
        left = [each for pid in java.workers() for each in tree(pid)]
        assert java.end() == 0
        wait_gone(left)


VICTIMS = {"rolling": 4, "async": 4, "plain": 2}
"""Requests that run when a process is killed. Plain calls run one after the other, each for two seconds."""


def engine_of(worker):
    """The id of the engine process."""
    (engine,) = wait_until(lambda: engines(worker))
    return engine


def test_java_sees_nothing_of_an_engine_that_is_killed(mortal, mode, made_up):
    java, folder = mortal
    (worker,) = java.workers(folder)
    checks = CHECKS[:16]
    bodies = [
        body(check["prompt"], check["max_new_tokens"], stream=i % 2 == 0)
        for i, check in enumerate(checks)
    ]
    for _ in range(2):
        victims = java.submit("tiny", *[LONG] * VICTIMS[mode])
        answers = java.submit("tiny", *bodies)
        assert victims[0].started.wait(PATIENCE_S)
        engine = engine_of(worker)
        os.kill(engine, signal.SIGKILL)
        ends = [json.loads(v.wait().content.splitlines()[-1]) for v in [*victims, *answers]]
        texts = [end.get("generated_text", end) for end in ends]
        assert texts == [*[texts[0]] * len(victims), *made_up[: len(checks)]]
        assert len(texts[0]) > len(max(made_up, key=len))
        assert all(answer.errors == [] for answer in [*victims, *answers])
        ask(java, "tiny", made_up, len(checks))
        assert not alive(engine)
    assert java.workers(folder) == [worker]


def test_a_killed_worker_leaves_no_process_and_java_starts_another(mortal, mode, made_up):
    java, folder = mortal
    ask(java, "tiny", made_up)
    (pid,) = java.workers(folder)
    processes = tree(pid)
    victims = java.submit("tiny", *[LONG] * VICTIMS[mode])
    assert victims[0].started.wait(PATIENCE_S)
    os.kill(pid, signal.SIGKILL)
    wait_gone(processes)
    if mode == "async":
        statuses = [victim.wait().status for victim in victims]
        assert all("Inference Engine Failure" in str(v.content) for v in victims), statuses

    answers = []

    def answers_again():
        # Some are lost: with a worker's end Java forgets all rows of a rolling batch, and tells nobody.
        answers.extend(java.submit("tiny", body("3 + 4 =", 9)))
        time.sleep(0.2)
        return any(answer.status == 200 for answer in answers)

    wait_until(answers_again, java.tail)
    ask(java, "tiny", made_up)
    assert len(java.workers(folder)) == 1

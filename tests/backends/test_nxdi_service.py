"""From options to text: the model of the quick start on NxD Inference, over HTTP and through DJL's Java."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the nxdi backend needs torch")
pytest.importorskip("uvicorn", reason="needs the `server` extra")
httpx = pytest.importorskip("httpx", reason="needs httpx")
from transformers import AutoTokenizer  # noqa: E402

from djl_python_neuronx.loading import tokenizer_workers  # noqa: E402
from djl_python_neuronx.server.app import Application  # noqa: E402
from djl_python_neuronx.server.models import Model  # noqa: E402
from djl_python_neuronx.service import Service  # noqa: E402
from tests.backends.nxdi_plans import log_lines  # noqa: E402
from tests.backends.tnx_engine import reference  # noqa: E402
from tests.djl.folders import MODES, write_model  # noqa: E402
from tests.doubles import neuron_machine  # noqa: E402
from tests.doubles.lora_adapters import save_merged, write_adapter  # noqa: E402
from tests.doubles.tiny_models import load_reference  # noqa: E402
from tests.processes import wait_until  # noqa: E402
from tests.server.running import TINY_LLAMA, Running, checks  # noqa: E402

pytestmark = pytest.mark.nxdi

SETTINGS = {
    "model_loader": "nxdi",
    "tensor_parallel_degree": "2",
    "dtype": "fp32",
    "n_positions": "256",
    "context_length_estimate": "128",
    "max_rolling_batch_size": "4",
}


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """The variables of this module's starts: two cores, one compile store, one log of the rig."""
    work = tmp_path_factory.mktemp("nxdi")
    own = {
        "PATH": f"{neuron_machine.FOLDER / 'bin'}:{os.environ['PATH']}",
        "NEURON_RT_NUM_CORES": "2",
        "NEURON_COMPILE_CACHE_URL": str(work / "cache"),
        "NXDI_RIG_LOG": str(work / "rig.log"),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in own.items():
            patch.setenv(name, value)
        yield own
    wait_until(lambda: not workers(own))


def workers(variables: Mapping[str, str]) -> list[str]:
    """Command lines of the living processes that have these variables, which no other run has.

    Without the process that has imported the tokenizers' library, which this process keeps for its next load.
    """
    mark, found = f"NXDI_RIG_LOG={variables['NXDI_RIG_LOG']}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if process.name != str(os.getpid()) and mark in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
    return [line for line in found if line and tokenizer_workers.__name__ not in line]


def num_compiled(variables: Mapping[str, str]) -> int:
    return len(log_lines(Path(variables["NXDI_RIG_LOG"]), "compile"))


def test_adapters_come_and_go_while_it_serves_and_nothing_is_compiled(
    variables: Mapping[str, str], tmp_path: Path
) -> None:
    """A place that is taken again serves the next adapter. The oracle: transformers, with it in the weights."""
    names, prompt, num_tokens = ("", "one", "two", "three"), "15 20 25 30", 12
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY_LLAMA)
    folders = {name: write_adapter(tmp_path / name, seed=i) for i, name in enumerate(names) if name}
    texts = {}
    for name in names:
        merged = save_merged(TINY_LLAMA, folders[name], tmp_path / f"in-{name}") if name else None
        model = load_reference(merged or TINY_LLAMA)
        tokens = reference(model, tokenizer.encode(prompt), num_tokens).tokens
        texts[name] = tokenizer.decode(tokens)
    assert len({*texts.values()}) == 4
    lora = {"enable_lora": "true", "max_loras": "2", "lora_target_modules": "q_proj,v_proj"}
    sources = {"adapter_sources": str(tmp_path)}
    service = Service.load(None, TINY_LLAMA, overrides={**SETTINGS, **lora, **sources})
    application = Application(Model("tiny"))
    application.models[0].service = service
    running, compiled = Running(application), num_compiled(variables)

    def asked(name: str) -> str:
        parameters = {"max_new_tokens": num_tokens, "ignore_eos": True}
        body = {"inputs": prompt, "parameters": parameters, "adapters": name}
        answer = httpx.post(running.url + "/invocations", json=body, timeout=300)
        text: str = answer.json()["generated_text"]
        return text

    try:
        assert asked("") == texts[""]
        for name in ("one", "two"):
            service.adapters.register(name, str(folders[name]))
        with ThreadPoolExecutor(3) as pool:
            assert [*pool.map(asked, names[:3])] == [texts[name] for name in names[:3]]
        service.adapters.unregister("one")
        service.adapters.register("three", str(folders["three"]))
        assert service.loop.places == {"two": 2, "three": 1}
        with ThreadPoolExecutor(3) as pool:
            found = [*pool.map(asked, ("three", "two", ""))]
        assert found == [texts[name] for name in ("three", "two", "")]
        assert num_compiled(variables) == compiled > 0
    finally:
        running.close()
        service.close()


def test_known_answers_come_through_the_server_and_a_second_start_compiles_nothing(
    variables: Mapping[str, str],
) -> None:
    compiled = []
    for wanted in (asked(24), asked(4)):
        assert not workers(variables)
        service = Service.load(None, TINY_LLAMA, environ=dict(os.environ), overrides=SETTINGS)
        application = Application(Model("tiny-llama"))
        application.models[0].service = service
        server = Running(application)

        def answer(i: int, check: dict[str, Any], url: str = server.url) -> str:
            payload = {"inputs": check["prompt"], "parameters": check["parameters"]}
            body = {**payload, "stream": i % 2 == 0}
            response = httpx.post(url + "/invocations", json=body, timeout=120)
            assert response.status_code == 200, response.text
            text: str = json.loads(response.text.splitlines()[-1])["generated_text"]
            return text

        try:
            assert workers(variables)
            with ThreadPoolExecutor(8) as clients:
                found = list(clients.map(answer, range(len(wanted)), wanted))
            assert found == [check["completion"] for check in wanted]
        finally:
            server.close()
            service.close()
        wait_until(lambda: not workers(variables))
        compiled.append(num_compiled(variables))
    assert compiled[0] == compiled[1] > 0


def asked(count: int) -> list[dict[str, Any]]:
    """Known answers to short prompts, and the parameters to get them."""
    short = [check for check in checks() if len(check["prompt"].encode()) < 100]
    return [
        {**check, "parameters": {"max_new_tokens": check["max_new_tokens"], "do_sample": False}}
        for check in short[:count]
    ]


@pytest.mark.djl
@pytest.mark.parametrize("mode", ["rolling", pytest.param("async", marks=pytest.mark.nightly)])
def test_djl_s_released_engine_gets_the_same_answers(
    variables: Mapping[str, str],
    start_java: Any,
    tmp_path: Path,
    mode: str,
) -> None:
    wanted, compiled = asked(12), num_compiled(variables)
    folder = write_model(tmp_path, mode, **{**SETTINGS, **MODES[mode]})
    with start_java() as java:
        java.load("tiny", folder)
        before = java.workers()
        bodies = [
            {"inputs": check["prompt"], "parameters": check["parameters"], "stream": i % 2 == 0}
            for i, check in enumerate(wanted)
        ]
        answers = java.submit("tiny", *bodies)
        found = [json.loads(answer.wait().content.splitlines()[-1]) for answer in answers]
        assert [each["generated_text"] for each in found] == [
            check["completion"] for check in wanted
        ]
        assert java.workers() == before, java.tail()
    wait_until(lambda: not workers(variables))
    if compiled:  # by a test before this one
        assert num_compiled(variables) == compiled

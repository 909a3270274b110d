"""An engine step by step, without a loop."""

from __future__ import annotations

from collections import defaultdict

import orjson
import pytest

from djl_python_neuronx.engine.core import Engine, StepResult
from djl_python_neuronx.engine.link import EngineState, decode_step, encode_step
from djl_python_neuronx.types import GenerationRequest, TokenOutput
from tests.doubles.toy_backend import ToyBackend


def request(
    name: str, prompt: list[int], max_new_tokens: int | None = 5, **fields: object
) -> GenerationRequest:
    return GenerationRequest(name, prompt, max_new_tokens=max_new_tokens, **fields)  # type: ignore[arg-type]


def run(engine: Engine, outputs: list[TokenOutput] | None = None) -> dict[str, list[TokenOutput]]:
    """Step until nothing is left; the outputs by request."""
    found: dict[str, list[TokenOutput]] = defaultdict(list)
    for output in outputs or []:
        found[output.request_id].append(output)
    for _ in range(10_000):
        if not engine.has_work:
            return found
        for output in engine.step().outputs:
            found[output.request_id].append(output)
    pytest.fail("the engine does not come to an end")


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def across_the_border(output: TokenOutput) -> TokenOutput:
    """The output as the front gets it."""
    message = orjson.loads(orjson.dumps(encode_step(StepResult([output]), EngineState())))
    ((received,), _), _ = decode_step(*message)
    return received


def assert_clean(engine: Engine, backend: ToyBackend) -> None:
    assert backend.violations == []
    assert backend.acquired == frozenset()
    assert (engine.num_running, engine.num_waiting, engine.has_work) == (0, 0, False)

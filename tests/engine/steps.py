"""An engine step by step, without a loop."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import orjson
import pytest

from djl_python_neuronx.backends.base import Step, StepOutput
from djl_python_neuronx.engine.core import Call, Engine, StepResult
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


class LateResults:
    """Steps an engine as its worker does: the result of a call is made while the next one runs, or after it."""

    def __init__(self, engine: Engine, backend: ToyBackend, during: Callable[[], bool]) -> None:
        """`during()`: make the next result during a call."""
        self._engine, self._during, self._run = engine, during, backend.run
        self._call: Call | None = None
        backend.run = self._run_device  # type: ignore[method-assign]

    def step(self) -> StepResult:
        """Run the next batch. Returns the result of the one before."""
        last = self._call
        self._call = self._engine.run(self._engine.schedule())
        return StepResult([]) if last is None else self._engine.advance(last)

    def last_outputs(self) -> list[TokenOutput]:
        """Those of the last call."""
        return [] if self._call is None else self._engine.advance(self._call).outputs

    def _run_device(self, step: Step) -> StepOutput:
        if self._call is not None and self._during():
            thread = threading.Thread(target=self._engine.advance, args=(self._call,))
            thread.start()
            thread.join()
        return self._run(step)


def come_and_go(
    engine: Engine,
    turn: int,
    requests: Sequence[GenerationRequest],
    arrivals: Sequence[int],
    given_up: Mapping[int, int],
) -> None:
    """Add the requests that arrive at a turn, and abort those, by index, that are given up at it."""
    for one, arrival in zip(requests, arrivals, strict=True):
        if arrival == turn:
            engine.add(one)
    for i, when in given_up.items():
        if when == turn:
            engine.abort(requests[i].request_id)


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

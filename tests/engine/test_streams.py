"""Deltas on their way to an event loop: to a reader, or past it to its sink."""

from __future__ import annotations

import asyncio
import threading

import pytest

from djl_python_neuronx.engine.detokenizer import Delta
from djl_python_neuronx.engine.streams import (
    MAX_SUNK_DELTAS,
    AsyncQueue,
    Generation,
    Stream,
    StreamRegistry,
)
from djl_python_neuronx.errors import QueueFullError, StepError
from djl_python_neuronx.types import FinishReason, GenerationRequest
from tests.doubles.toy_tokenizer import TOKENIZER
from tests.processes import PATIENCE_S

LAST = FinishReason.LENGTH


def delta(name: str, text: str, reason: FinishReason | None = None) -> Delta:
    return Delta(name, text, (), reason)


class Reader:
    """Reads the generation of a request to its end, in a task, with a sink."""

    def __init__(self, name: str, queue: AsyncQueue) -> None:
        self.aborted: list[str] = []
        self.read: list[str] = []
        self.sunk: list[str] = []
        """The texts of each call of the sink."""
        self.takes = True
        self.generation = Generation([name], queue, self.aborted.append)
        self.generation.sink = self._sink
        self.task = asyncio.create_task(self._read())

    def _sink(self, deltas: list[Delta]) -> bool:
        if any(one.text == "wrong" for one in deltas):
            msg = "no"
            raise ValueError(msg)
        if self.takes:
            self.sunk.append(" ".join(one.text for one in deltas))
        return self.takes

    async def _read(self) -> None:
        try:
            async for one in self.generation:
                self.read.append(one.text)
                while one.text == "slow":
                    await asyncio.sleep(0)
                    if self.takes:
                        break
        finally:
            self.generation.close()


async def turns() -> None:
    """Let the event loop run all that is due."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_sink_takes_what_is_not_the_end_and_steps_join_while_the_loop_is_late() -> None:
    async def run() -> None:
        queue = AsyncQueue(asyncio.get_running_loop(), print)
        one, other = Reader("a", queue), Reader("b", queue)
        await turns()
        queue.deliver([delta("a", "1"), delta("b", "1")])
        queue.deliver([delta("a", "2"), delta("gone", "1")])
        await turns()
        assert (one.sunk, other.sunk) == (["1 2"], ["1"])
        one.takes = False
        queue.deliver([delta("a", "slow")])
        await turns()
        queue.deliver([delta("a", "3")])
        await turns()
        assert one.read == ["slow"]
        one.takes = True
        await turns()
        assert one.sunk == ["1 2", "3"]
        queue.deliver([delta("a", "4"), delta("a", "5", LAST)])
        queue.deliver([delta("b", "2", LAST)])
        await asyncio.wait_for(asyncio.gather(one.task, other.task), PATIENCE_S)
        assert (one.sunk, one.read) == (["1 2", "3", "4"], ["slow", "5"])
        assert (other.sunk, other.read) == (["1"], ["2"])
        assert (one.aborted, other.aborted, queue.generations) == ([], [], {})

    asyncio.run(run())


def test_a_sink_takes_so_many_deltas_before_its_client_must_have_read() -> None:
    async def run() -> None:
        queue = AsyncQueue(asyncio.get_running_loop(), print)
        one, most = Reader("a", queue), MAX_SUNK_DELTAS
        await turns()
        queue.deliver([delta("a", str(i)) for i in range(2 * most + 5)] + [delta("a", "end", LAST)])
        await asyncio.wait_for(one.task, PATIENCE_S)
        assert one.read == [str(most), str(2 * most + 1), "end"]
        parts = [range(most), range(most + 1, 2 * most + 1), range(2 * most + 2, 2 * most + 5)]
        assert one.sunk == [" ".join(map(str, part)) for part in parts]

    asyncio.run(run())


def test_after_an_error_of_one_request_its_sink_takes_nothing_of_the_others() -> None:
    async def run() -> None:
        aborted, sunk = list[str](), list[Delta]()
        queue = AsyncQueue(asyncio.get_running_loop(), print)
        generation = Generation("ab", queue, aborted.append)
        generation.sink = lambda deltas: not sunk.extend(deltas)
        error = Delta("a", "", (), FinishReason.ERROR, StepError("lost"))
        queue.deliver([error, delta("b", "1")])
        assert [one async for one in generation] == [error]
        assert (sunk, aborted, queue.generations) == ([], ["b"], {})

    asyncio.run(run())


def test_a_sink_that_fails_ends_its_reader_alone() -> None:
    async def run() -> None:
        queue = AsyncQueue(asyncio.get_running_loop(), print)
        one, other = Reader("a", queue), Reader("b", queue)
        await turns()
        queue.deliver([delta("a", "wrong"), delta("b", "1")])
        queue.deliver([delta("b", "2", LAST)])
        await asyncio.wait_for(other.task, PATIENCE_S)
        with pytest.raises(ValueError, match="no"):
            await asyncio.wait_for(one.task, PATIENCE_S)
        assert (one.aborted, other.aborted) == (["a"], [])
        assert (other.sunk, other.read) == (["1"], ["2"])

    asyncio.run(run())


def test_deltas_for_an_event_loop_that_is_closed_end_their_requests() -> None:
    """Also if it was closed before it could take those that had arrived."""
    event_loop, aborted = asyncio.new_event_loop(), list[str]()
    queue = AsyncQueue(event_loop, aborted.append)
    queue.deliver([delta("a", "1")])
    event_loop.close()
    for name in "bc":
        queue.deliver([delta(name, "1")])
    assert aborted == ["a", "b", "c"]


def test_the_fuller_the_queue_the_fewer_requests_one_client_may_have() -> None:
    """As many as there is room for beside them, or as there are slots."""
    streams = StreamRegistry(max_waiting=6, lock=threading.Condition())
    streams.num_slots = 2

    def open_one(name: str) -> None:
        streams.open([Stream(GenerationRequest(name, [5], client=name[0]), TOKENIZER)])

    for client, count in (("a", 4), ("b", 2), ("c", 2), ("d", 0)):
        for i in range(count):
            open_one(f"{client}{i}")
        with pytest.raises(QueueFullError, match=f" {count} of this client, of at most 8"):
            open_one(f"{client}9")
    streams.end("a0")
    open_one("d0")

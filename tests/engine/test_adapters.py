"""Adapters of a running engine: when they change, who gets which, and what a failure or a death leaves."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from djl_python_neuronx.engine.streams import BlockingQueue
from djl_python_neuronx.errors import (
    BackendError,
    BackendUnavailableError,
    RequestError,
    ServingError,
)
from djl_python_neuronx.types import FinishReason, TokenOutput
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend, expected
from tests.engine.loops import Parts, ThreadLoop, collect, request, rig, running, shown, text
from tests.processes import PATIENCE_S, wait_until

PLACES: dict[str, Any] = {"num_adapters": 2, "changes_adapters": True}
SPEC = replace(TOY_SPEC, **PLACES)
ONE, TWO, BAD = Path("/a/one"), Path("/a/two"), Path("/a/bad")


def answer(loop: ThreadLoop, name: str, adapter: int) -> str | ServingError | None:
    """The text of a short request, or its error."""
    inbox = BlockingQueue()
    loop.submit(request(name, [5, 6], adapter=adapter), inbox)
    last = collect(inbox, name)[name]
    return last[-1].error or text(last)


def tokens_with(folder: Path | None) -> str:
    """The text that a request of `answer` gets from an adapter, by the definition of the toy."""
    letters = [] if folder is None else [*folder.name.encode()]
    return shown(expected([*letters, 5, 6], 5))


def test_an_adapter_changes_while_others_run_and_never_under_a_request() -> None:
    backend = ToyBackend(SPEC, step_s=0.002)
    with running(backend) as loop:
        assert isinstance(answer(loop, "early", 1), BackendUnavailableError), "an empty place"
        loop.set_adapter(1, ONE)
        loop.set_adapter(2, TWO)
        assert [answer(loop, f"a{i}", i) for i in range(3)] == [*map(tokens_with, (None, ONE, TWO))]
        inbox = BlockingQueue()
        for one in [request("base", [5, 6], 60), request("two", [5, 6], 60, adapter=2)]:
            loop.submit(one, inbox)
        wait_until(lambda: loop.copies[0].loop.state.running == 2)
        with pytest.raises(BackendError, match="in use"):
            loop.set_adapter(2, ONE)
        assert loop.adapter(2) == TWO
        for folder in (TWO, ONE, TWO):
            loop.set_adapter(1, folder)
            assert answer(loop, "new", 1) == tokens_with(folder)
        last = collect(inbox, "base", "two")
        assert text(last["base"]) == shown(expected([5, 6], 60))
        assert text(last["two"]) == shown(expected([*TWO.name.encode(), 5, 6], 60))
        loop.set_adapter(1, None)
        assert isinstance(answer(loop, "late", 1), BackendUnavailableError)
    assert not backend.violations


def test_a_refused_adapter_is_an_error_and_the_one_before_stays() -> None:
    backend = ToyBackend(SPEC)
    with running(backend) as loop:
        loop.set_adapter(1, ONE)
        with pytest.raises(BackendError, match="/a/bad is no adapter"):
            loop.set_adapter(1, BAD)
        assert loop.adapter(1) == ONE
        assert answer(loop, "a", 1) == tokens_with(ONE)
        with pytest.raises(BackendError, match="no adapter"):
            loop.set_adapter(2, BAD)
        assert loop.adapter(2) is None
        assert isinstance(answer(loop, "b", 2), BackendUnavailableError)
        assert answer(loop, "c", 0) == tokens_with(None)


@pytest.fixture
def changing(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(Parts, "spec", replace(Parts.spec, **PLACES))
    with rig(2, restarts=5) as copies, ThreadPoolExecutor(1) as pool:
        yield copies, lambda *change: pool.submit(copies.loop.set_adapter, *change)


def answered(host: Parts, folder: Path | None, error: ServingError | None = None) -> None:
    """The engine gets a change of place 1 and answers it."""
    place, got = host.receive("adapter")
    assert (place, got) == (1, folder and str(folder))
    host.engine.send("adapter", error and (error.code, str(error)))


def failed(change: Future[None]) -> BaseException:
    error = change.exception(PATIENCE_S)
    assert error is not None
    return error


def test_all_copies_change_or_none(changing: Any) -> None:
    copies, change = changing
    (first,), (second,) = copies.hosts
    changed = change(1, ONE)
    answered(first, ONE)
    assert not changed.done(), "the second copy has not answered"
    answered(second, ONE)
    changed.result(PATIENCE_S)
    changed = change(1, TWO)
    answered(first, TWO)
    answered(second, TWO, BackendError("no"))
    for host in (first, second):
        answered(host, ONE)
    assert isinstance(failed(changed), BackendError)
    assert copies.loop.adapter(1) == ONE


def test_an_engine_that_is_started_again_gets_the_adapters_before_any_request(
    changing: Any,
) -> None:
    copies, change = changing
    (first,), (second,) = copies.hosts
    changed = change(1, ONE)
    for host in (first, second):
        answered(host, ONE)
    changed.result(PATIENCE_S)
    assert [copies.place(name, adapter=1) for name in "ab"] == [0, 1]
    copies.begin(0, "a")
    copies.begin(1, "b")
    copies.kill(0)
    assert second.receive("add")["adapter"] == 1
    wait_until(lambda: len(copies.hosts[0]) == 2)
    answered(copies.hosts[0][1], ONE)
    copies.kill(1)
    assert copies.hosts[0][1].receive("add")["adapter"] == 1
    wait_until(lambda: len(copies.hosts[1]) == 2)
    answered(copies.hosts[1][1], ONE)


def test_an_engine_that_dies_of_an_adapter_does_not_get_it_again(changing: Any) -> None:
    copies, change = changing
    (first,), (second,) = copies.hosts
    changed = change(1, ONE)
    answered(first, ONE)
    second.receive("adapter")
    copies.kill(1)
    answered(first, None)
    wait_until(lambda: len(copies.hosts[1]) == 2)
    answered(copies.hosts[1][1], None)
    assert "ended before it had loaded the adapter" in str(failed(changed))
    assert copies.loop.adapter(1) is None
    assert [copies.place(name) for name in "ab"] == [0, 1]


def test_a_copy_that_starts_during_a_change_gets_it(changing: Any) -> None:
    copies, change = changing
    (first,), _ = copies.hosts
    copies.kill(1)
    wait_until(lambda: copies.loop.copies[1].loop.streams.link is None or len(copies.hosts[1]) == 2)
    changed = change(1, ONE)
    first.receive("adapter")
    wait_until(lambda: len(copies.hosts[1]) == 2 and copies.loop.copies[1].alive)
    first.engine.send("adapter", None)
    answered(copies.hosts[1][1], ONE)
    changed.result(PATIENCE_S)


def test_a_backend_that_changes_none_keeps_those_that_it_has() -> None:
    backend = ToyBackend(replace(SPEC, changes_adapters=False))
    with running(backend) as loop, pytest.raises(RequestError, match="cannot change"):
        loop.set_adapter(1, ONE)
    assert not backend.violations


def test_a_close_ends_a_change(changing: Any) -> None:
    copies, change = changing
    changed = change(1, ONE)
    for (host,) in copies.hosts:
        host.receive("adapter")
        host.ended.set()
    copies.loop.close()
    assert isinstance(failed(changed), BackendUnavailableError)


def test_a_model_that_replaces_another_goes_on_with_requests_of_the_same_adapter_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Parts, "spec", replace(Parts.spec, **PLACES))
    with rig(1) as old, rig(1) as new, ThreadPoolExecutor(1) as pool:
        for copies, folder in ((old, TWO), (new, TWO)):
            changed = pool.submit(copies.loop.set_adapter, 2, folder)
            copies.hosts[0][0].receive("adapter")
            copies.hosts[0][0].engine.send("adapter", None)
            changed.result(PATIENCE_S)
        changed = pool.submit(old.loop.set_adapter, 1, ONE)
        answered(old.hosts[0][0], ONE)
        changed.result(PATIENCE_S)
        for name, place in (("alone", 1), ("both", 2), ("base", 0)):
            assert old.place(name, adapter=place) == 0
        retired = pool.submit(old.loop.retire, 0, new.loop)
        assert [new.hosts[0][0].receive("add")["request_id"] for _ in range(2)] == ["both", "base"]
        assert old.owners("alone") == [0]
        old.hosts[0][0].step(TokenOutput("alone", (8,), FinishReason.LENGTH), running=0)
        old.hosts[0][0].ended.set()
        retired.result(PATIENCE_S)

"""Delivery: text of an engine's tokens, to the readers of its requests, and the ends of requests for other reasons."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec

from djl_python_neuronx.backends.base import ModelSpec
from djl_python_neuronx.engine.detokenizer import Delta
from djl_python_neuronx.engine.streams import Observer, OutputQueue, Stream, StreamRegistry
from djl_python_neuronx.errors import BackendUnavailableError, RequestTimeoutError, ServingError
from djl_python_neuronx.types import FinishReason, TokenOutput

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_LEAST_PART = 0.75
"""Of its time, what a request needs to begin at all."""


def notify(event: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> None:
    """Call a method of the observer: a failure of metrics or logs must never cost a request."""
    try:
        event(*args, **kwargs)
    except Exception:
        logger.exception("observer_failed")


class Delivery:
    """Delivers to the readers of one copy's open requests. Output thread and watchdog thread.

    There are two locks, and only this class takes both: first `_making`, held while text is made and while requests
    leave for another copy, then `StreamRegistry.lock`, which says where a request is. So a reader may abort while it
    gets deltas. A request that leaves for an heir takes its lock too; only the thread of a reload does that, or that of
    a copy which is replaced.
    """

    def __init__(
        self,
        streams: StreamRegistry,
        observer: Observer,
        *,
        max_request_s: float,
        restart_timeout_s: float,
        resumes: bool,
        on_orphans: Callable[[ServingError | None], None],
    ) -> None:
        """`max_request_s`, `restart_timeout_s`, `resumes`: see `LoopSettings`.

        `on_orphans(error)`: this copy has no engine; hand its requests to other copies. `error`: set if none will come.
        """
        self._streams = streams
        self._observer = observer
        self._max_request_s = max_request_s
        self._restart_timeout_s = restart_timeout_s
        self._resumes = resumes
        self._on_orphans = on_orphans
        self._making = threading.Lock()

    def deliver(self, outputs: Iterable[TokenOutput]) -> None:
        """Hand the text of a step's tokens to the readers, in one message to each queue."""
        with self._making:
            by_queue: dict[OutputQueue, list[Delta]] = defaultdict(list)
            for output in outputs:
                stream = self._streams.get(output.request_id)
                delta = None if stream is None else self._next_delta(stream, output)
                if stream is not None and delta is not None:
                    by_queue[stream.queue].append(delta)
            for output_queue, deltas in by_queue.items():
                _hand_over(output_queue, deltas)

    def fail(self, streams: Sequence[Stream], error: ServingError) -> None:
        """End those of these requests that are still open with an error."""
        for stream in streams:
            if self._streams.end(stream.request.request_id) is not None:
                stream.last_token_s = time.monotonic()
                delta = stream.failed(error)
                notify(self._observer.ended, stream, delta)
                _hand_over(stream.queue, [delta])

    def settle(self, error: ServingError) -> None:
        """Prepare the requests for the engine after the one whose end is `error`; end those that it may not run."""
        sent, twice = [], []
        for stream in self._streams.open_streams():
            stream.deaths += stream.running
            if stream.output_ids and not self._resumes:
                sent.append(stream)
            elif stream.deaths > 1:
                twice.append(stream)
            else:
                stream.resume()
                if not stream.output_ids:
                    stream.begun.discard(stream.request.request_id)
        self.fail(sent, BackendUnavailableError(f"{error}. Send the request again"))
        message = f"the engine crashed twice while running this request; not retried: {error}"
        self.fail(twice, ServingError(message))

    def check(self, spec: ModelSpec) -> None:
        """End the requests that came before the engine and that its model cannot go on with."""
        for stream in self._streams.open_streams():
            if (error := stream.refusal(spec)) is not None:
                self.fail([stream], error)

    def leave(self, given_up: ServingError | None, *, retired: bool = False) -> None:
        """Let other copies have what waits here for an engine; `given_up`: why there will be none.

        `retired`: also what an engine runs.
        """
        with self._making, self._streams.lock:
            if self._streams.link is None or given_up is not None or retired:
                self._on_orphans(given_up)

    def end_late(self) -> None:
        """End the requests whose time is over: with what there is, or with an error if they never had a slot.

        One without a slot ends as soon as the rest of its time is too short: work on answers that come too late would
        make others late. If its whole time is too short, it gets what there is in three quarters of it.
        """
        now_s = time.monotonic()
        for stream in self._streams.open_streams():
            request = stream.request
            limit_s = min(request.max_seconds, self._max_request_s)
            needed_s = 0.0
            if not stream.begun:
                needed_s = self._streams.pace.needed_s(request.max_new_tokens)
                needed_s = min(needed_s, _LEAST_PART * limit_s)
            if now_s - request.arrived_s < limit_s - needed_s:
                continue
            if stream.begun and not stream.text.lacks_scores:
                self.deliver([TokenOutput(stream.request.request_id, (), FinishReason.TIME)])
                continue
            what = "no slot" if now_s - request.arrived_s >= limit_s else "no slot early enough"
            if stream.begun:
                what = "not all scores of its prompt"
            message = (
                f"the request got {what} within its {limit_s:g} s (max_time or option.max_request_seconds); retry "
                "later, or raise them"
            )
            self.fail([stream], RequestTimeoutError(message))

    def expire(self, died_s: float) -> None:
        """End the requests that have waited too long for an engine, the last of which ended at `died_s`."""
        limit_s = self._restart_timeout_s
        now_s = time.monotonic()
        late = [
            stream
            for stream in self._streams.open_streams()
            if now_s - max(stream.submitted_s, died_s) > limit_s
        ]
        message = (
            f"the engine is being started again and was not ready within {limit_s:g} s (option.restart_timeout; "
            "default: option.predict_timeout)"
        )
        self.fail(late, BackendUnavailableError(message))

    def _next_delta(self, stream: Stream, output: TokenOutput) -> Delta | None:
        """Feed a stream; a failure of its text is an error of this request only."""
        stream.output_ids += output.token_ids
        try:
            delta = stream.text.feed(output)
        except ServingError as error:
            logger.warning("text_failed request_id=%s: %s", stream.request.label, error)
            delta = stream.failed(error)
        except Exception as error:
            logger.exception("text_failed request_id=%s", stream.request.label)
            delta = stream.failed(
                ServingError(f"the text of this request cannot be made ({type(error).__name__})")
            )
        if delta is None:
            return None
        stream.last_token_s = time.monotonic()
        if stream.first_token_s is None and delta.tokens:
            stream.first_token_s = stream.last_token_s
        if delta.finish_reason is None:
            return delta
        # A stop string or a deadline: the token that was decoded meanwhile never reaches the text.
        unknown = output.finish_reason in {None, FinishReason.TIME}
        if self._streams.end(output.request_id, abort=unknown) is None:
            return None
        if delta.error is None and stream.running and len(stream.slots_s) == 1:
            self._note_pace(stream, delta.num_generated_tokens)
        notify(self._observer.ended, stream, delta)
        return delta

    def _note_pace(self, stream: Stream, num_tokens: int) -> None:
        slot_s, first_s = stream.slots_s[0], None
        if stream.first_token_s is not None and stream.request.scores_prompt is None:
            first_s = stream.first_token_s - slot_s
        self._streams.pace.note(stream.last_token_s - slot_s, first_s, num_tokens)


def _hand_over(output_queue: OutputQueue, deltas: list[Delta]) -> None:
    try:
        output_queue.deliver(deltas)
    except Exception:
        logger.exception("delivery_failed requests=%d", len(deltas))

"""The heart: requests in, one device call per step, tokens out."""

from __future__ import annotations

import logging
import secrets
import time
from typing import NamedTuple

from djl_python_neuronx.backends.base import (
    Backend,
    Decode,
    HostLogits,
    Int32Array,
    Prefill,
    Rows,
    StepOutput,
)
from djl_python_neuronx.backends.shapes import choose_bucket
from djl_python_neuronx.engine.batching import Batcher
from djl_python_neuronx.engine.faults import require_shape, translate
from djl_python_neuronx.engine.limits import check
from djl_python_neuronx.engine.scheduler import Scheduled, ScheduledPrefill, Scheduler
from djl_python_neuronx.engine.sequence import Sequence
from djl_python_neuronx.errors import (
    BackendError,
    RequestError,
    RequestTimeoutError,
    ServingError,
    StepError,
)
from djl_python_neuronx.sampling import Sampler
from djl_python_neuronx.types import FinishReason, GenerationRequest, TokenOutput

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Device calls that may fail one after another before the engine gives itself up: a device that is gone
fails every call, and every request sent to it would be lost one by one."""


class DeviceCall(NamedTuple):
    """A call that the device is busy with; read by the watchdog."""

    started_s: float
    first: bool
    """The first call of this graph: a runtime may load or even compile it now."""


class StepInfo(NamedTuple):
    """What the last step was, for metrics."""

    prefill: bool
    bucket: int
    """Compiled length that ran: prompt columns of a prefill, cache columns of a decode."""
    rows: int
    tokens: int
    """Valid tokens fed; a prefill's padding is rows * bucket - tokens."""
    device_s: float


class Engine:
    """Continuous batching over one backend. Synchronous, single-threaded, token ids only.

    All methods but `check` belong to one thread.
    """

    def __init__(self, backend: Backend, *, decode_interleave: int = 1) -> None:
        self.spec = backend.spec
        self.dead: BackendError | None = None
        """Why the engine has given up; every later step does nothing."""
        self.device_call: DeviceCall | None = None
        self.last_step: StepInfo | None = None
        """What the last `step` ran; None if it ran nothing or failed."""
        self._backend = backend
        self._scheduler = Scheduler(self.spec, decode_interleave=decode_interleave)
        self._sampler = Sampler(self.spec.num_slots, self.spec.vocab_size)
        self._batcher = Batcher(self.spec, self._sampler)
        self._live: dict[str, Sequence] = {}
        self._graphs_run: set[tuple[bool, int]] = set()
        self._failed_steps = 0

    @property
    def has_work(self) -> bool:
        """True while a step would do something."""
        return bool(self._live) and self.dead is None

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return self._scheduler.slots.num_taken

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""
        return len(self._scheduler.waiting)

    def check(self, request: GenerationRequest) -> None:
        """See `limits.check`: compares a request with the loaded model. Pure; any thread."""
        check(request, self.spec)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request that `check` has passed; its id must not be in use."""
        seed = request.sampling.seed
        sequence = Sequence(
            request,
            max_model_len=self.spec.max_model_len - self.spec.lookahead,
            eos_ids=self.spec.eos_ids,
            seed=secrets.randbits(63) if seed is None else seed,
        )
        if request.request_id in self._live:
            msg = f"request id {request.request_id!r} is already in use"
            raise RequestError(msg)
        self._live[request.request_id] = sequence
        self._scheduler.add(sequence)

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a sequence whose text side saw a stop string; idempotent, no output follows.

        The token that was decoded meanwhile is dropped: the text side shows none of it.
        """
        sequence = self._live.get(request_id)
        if sequence is not None:
            sequence.finish_reason = reason
            self._end(sequence)

    def abort(self, request_id: str) -> None:
        """Forget a sequence and free its slot; idempotent, no output follows."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._end(sequence)

    @property
    def graphs_run(self) -> frozenset[tuple[bool, int]]:
        """(is a prefill, bucket) of every graph that has run."""
        return frozenset(self._graphs_run)

    def abort_all(self) -> None:
        """Forget every sequence."""
        for request_id in list(self._live):
            self.abort(request_id)

    def expire(self, waited_s: float) -> list[TokenOutput]:
        """End the sequences that have waited longer than `waited_s` for a slot, each with its error."""
        limit = time.monotonic() - waited_s
        late = [sequence for sequence in self._scheduler.waiting if sequence.arrived_s < limit]
        return [
            self._fail(
                sequence,
                RequestTimeoutError(
                    f"no slot became free within {waited_s:g} s (option.predict_timeout); retry later, "
                    "or raise option.max_rolling_batch_size"
                ),
            )
            for sequence in late
        ]

    def step(self) -> list[TokenOutput]:
        """One device call for whoever is next. Never raises: what failed is an output that carries its error."""
        outputs: list[TokenOutput] = []
        self.last_step = None
        scheduled = None if self.dead is not None else self._scheduler.schedule()
        if isinstance(scheduled, ScheduledPrefill):
            outputs = self._enter(scheduled)
        if self.dead is not None:
            return outputs + [
                self._fail(sequence, self.dead) for sequence in [*self._live.values()]
            ]
        if scheduled is None or not scheduled.sequences:
            return outputs
        try:
            step = self._batcher.fill(scheduled)
            output = self._run(step)
            token_ids = self._choose(step.rows, output)
        except Exception as error:  # noqa: BLE001  (one of the four borders where foreign errors are translated)
            return outputs + self._fail_step(scheduled, error)
        self._failed_steps = 0
        return outputs + self._advance(scheduled, token_ids, output)

    def _enter(self, scheduled: ScheduledPrefill) -> list[TokenOutput]:
        """Tell backend and sampler about the new slots; a sequence that the backend refuses leaves alone."""
        outputs: list[TokenOutput] = []
        for sequence in list(scheduled.sequences):
            request, slot = sequence.request, sequence.slot
            assert slot is not None  # noqa: S101  (narrowing for mypy: the scheduler has just set it)
            try:
                sequence.num_cached = self._backend.acquire(
                    slot, request.prompt_ids, request.adapter
                )
            except Exception as error:  # noqa: BLE001  (a border: see step)
                scheduled.sequences.remove(sequence)
                translated = translate(error)
                outputs.append(self._fail(sequence, translated, acquired=False))
                self.dead = self.dead or (translated if translated.fatal else None)
                continue
            self._sampler.assign(slot, request.sampling, request.prompt_ids, sequence.seed)
        return outputs

    def _run(self, step: Prefill | Decode) -> StepOutput:
        prefill = isinstance(step, Prefill)
        bucket = self._bucket(prefill=prefill)
        graph = (prefill, bucket)
        started_s = time.monotonic()
        self.device_call = DeviceCall(started_s, graph not in self._graphs_run)
        try:
            output = self._backend.run(step)
        finally:
            self.device_call = None
        self._graphs_run.add(graph)
        rows = len(step.rows.slots)
        tokens = int(step.rows.lens.sum()) if prefill else rows
        self.last_step = StepInfo(prefill, bucket, rows, tokens, time.monotonic() - started_s)
        return output

    def _bucket(self, *, prefill: bool) -> int:
        """The compiled length that the step needs."""
        buckets = self.spec.prefill_buckets if prefill else self.spec.token_buckets
        return choose_bucket(self._batcher.reach, buckets or (self.spec.max_model_len,))

    def _choose(self, rows: Rows, output: StepOutput) -> Int32Array:
        """int32[B, K]; -1: none."""
        if isinstance(output, HostLogits):
            require_shape(output.values.shape, (len(rows.slots), 1, self.spec.vocab_size))
            logits = output.values[:, 0]
            return self._sampler.sample(logits, rows.slots, rows.starts + rows.lens)[:, None]
        require_shape(output.ids.shape, (len(rows.slots), *output.ids.shape[1:2]))
        return output.ids

    def _advance(
        self, scheduled: Scheduled, token_ids: Int32Array, output: StepOutput
    ) -> list[TokenOutput]:
        """Hand each sequence its tokens and end those whose ids say so."""
        if isinstance(scheduled, ScheduledPrefill) or token_ids.shape[1] != 1:
            self._batcher.forget()
        else:
            self._batcher.advance(token_ids[:, 0])
        outputs = []
        ended: list[Sequence] = []
        values = output.values if isinstance(output, HostLogits) else None
        for row, (sequence, ids) in enumerate(
            zip(scheduled.sequences, token_ids.tolist(), strict=True)
        ):
            request = sequence.request
            taken: tuple[int, ...] = ()
            for token_id in ids:
                if token_id < 0:
                    break
                taken += (token_id,)
                if sequence.append(token_id) is not None:
                    ended.append(sequence)
                    break
            if not taken:
                error = StepError(
                    "the model gave no finite logit for this sequence; its output is lost, retry it"
                )
                outputs.append(self._fail(sequence, error))
                continue
            logits = values[row] if request.logprobs and values is not None else None
            outputs.append(TokenOutput(request, taken, sequence.finish_reason, None, logits))
        for sequence in ended:
            self._end(sequence)
        return outputs

    def _end(self, sequence: Sequence, *, acquired: bool = True) -> None:
        slot = sequence.slot
        self._live.pop(sequence.request_id, None)
        self._scheduler.remove(sequence)
        if slot is None or not acquired:
            return
        self._sampler.release(slot)
        try:
            self._backend.release([slot])
        except Exception:
            logger.exception("release_failed slot=%d request_id=%s", slot, sequence.request.label)

    def _fail(
        self, sequence: Sequence, error: ServingError, *, acquired: bool = True
    ) -> TokenOutput:
        sequence.finish_reason = FinishReason.ERROR
        self._end(sequence, acquired=acquired)
        return TokenOutput(sequence.request, (), FinishReason.ERROR, error)

    def _fail_step(self, scheduled: Scheduled, error: Exception) -> list[TokenOutput]:
        """Fail the sequences of a step, and everyone when the device is lost."""
        self._batcher.forget()
        self._failed_steps += 1
        self.last_step = None
        translated = translate(error)
        logger.error(
            "step_failed rows=%d failures_in_a_row=%d",
            len(scheduled.sequences),
            self._failed_steps,
            exc_info=error,
        )
        failed = list(scheduled.sequences)
        if translated.fatal or self._failed_steps >= MAX_FAILED_STEPS:
            self.dead = translated
            failed = list(self._live.values())
        return [self._fail(sequence, translate(error)) for sequence in failed]

"""The engine: requests in, one device call per step, tokens out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from djl_python_neuronx.backends.base import (
    Backend,
    Float32Array,
    Int32Array,
    Step,
    StepOutput,
    Want,
)
from djl_python_neuronx.engine.batching import Batcher
from djl_python_neuronx.engine.runner import (
    MAX_FAILED_STEPS,
    Runner,
    SamplingPlace,
    StepInfo,
    require_shape,
    translate,
)
from djl_python_neuronx.engine.sampler import Sampler
from djl_python_neuronx.engine.scheduler import Batch, ChunkScheduler, Scheduler
from djl_python_neuronx.engine.sequence import Sequence
from djl_python_neuronx.engine.speculation import Proposer, Speculator, verify
from djl_python_neuronx.errors import (
    BackendError,
    DeviceMemoryError,
    RequestTimeoutError,
    ServingError,
    StepError,
)
from djl_python_neuronx.types import EngineRequest, FinishReason, TokenOutput

logger = logging.getLogger(__name__)

_DEVICE_FAULTS = (StepError, DeviceMemoryError)
_NO_LOGITS: Float32Array = np.empty(0, np.float32)


class StepResult(NamedTuple):
    """The result of one step: one message, whatever the batch."""

    outputs: list[TokenOutput]
    info: StepInfo | None = None
    """The graph that ran and its tokens; None if nothing ran, or it failed."""


class _Output(NamedTuple):
    """The output of a batch."""

    sampled: list[tuple[int, Sequence]]
    """See `Batch.sampled`."""
    token_ids: Int32Array
    """int32[B, K]: the tokens of each row; -1: none."""
    logits: Float32Array | None
    """float32[B, K, V], where the backend gives them."""
    info: StepInfo


class Engine:
    """Continuous batching over one backend. Synchronous, token ids only; all methods belong to one thread."""

    def __init__(
        self,
        backend: Backend,
        *,
        decode_interleave: int = 1,
        max_join_wait_s: float = 0.0,
        proposer: Proposer | None = None,
    ) -> None:
        """`proposer` drafts tokens for the backend to verify; not used where `spec.num_speculative_tokens` is 0."""
        self.spec = backend.spec
        self.runner = Runner(backend)
        self.dead: BackendError | None = None
        """The error for which the device was given up; every later step does nothing."""
        self._backend = backend
        scheduling = ChunkScheduler if self.spec.mixed_steps else Scheduler
        self._scheduler = scheduling(
            self.spec,
            decode_interleave=decode_interleave,
            max_join_wait_s=max_join_wait_s,
            cached=lambda waiting: backend.cached(
                waiting.request.prompt_ids, waiting.request.adapter
            ),
        )
        self._sampler = Sampler(self.spec.num_slots, self.spec.vocab_size)
        self._batcher = Batcher(self.spec, self._sampler)
        self.proposer = proposer
        self._speculator = Speculator(proposer, self.spec.num_speculative_tokens)
        self._live: dict[str, Sequence] = {}
        self._failed_steps = 0
        self._entering: Callable[[list[str]], None] | None = None

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

    @property
    def speculates(self) -> bool:
        """False without a proposer, or once it is disabled after its failures."""
        return self._speculator.proposer is not None

    def watch(
        self, before_call: Callable[[bool], None], entering: Callable[[list[str]], None]
    ) -> None:
        """Call `before_call` before each device call, the draft model's included; True: its graph has not run yet.

        `entering` is called with the ids of the requests that get a slot, before the device has anything of them.
        """
        self._entering = entering
        self.runner.before_call = before_call
        if self.proposer is not None and self.proposer.runner is not None:
            self.proposer.runner.before_call = before_call

    def close(self) -> None:
        """Free the device, the draft model's included; idempotent."""
        self._backend.close()
        if self.proposer is not None:
            self.proposer.close()

    def add(self, request: EngineRequest) -> None:
        """Queue a request that `limits.check` has passed, with an id that no other one has."""
        sequence = Sequence(request, self.spec)
        self._live[request.request_id] = sequence
        self._scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Drop a sequence that its client has left or a stop string has ended; idempotent, no output follows."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._end(sequence)

    def abort_all(self) -> None:
        """Drop every sequence."""
        for sequence in list(self._live.values()):
            self._end(sequence)

    def expire(self, waited_s: float) -> list[TokenOutput]:
        """End the sequences that have waited longer than `waited_s` for a slot, each with its error."""
        limit = time.monotonic() - waited_s
        late = [sequence for sequence in self._scheduler.waiting if sequence.arrived_s < limit]
        what, fix = "no slot became free", "raise option.max_rolling_batch_size"
        if self._scheduler.slots.num_free:
            what = "earlier prompts and running streams took every step"
            fix = "lower option.decode_interleave or raise option.queue_timeout"
            if self.spec.mixed_steps:
                what = "earlier prompts filled every step"
                fix = "raise option.context_length_estimate"
        message = (
            f"{what} in the last {waited_s:g} s (option.queue_timeout; default: option.predict_timeout); retry later, "
            f"or {fix}"
        )
        return [self._fail(sequence, RequestTimeoutError(message)) for sequence in late]

    def step(self, *, min_drafts: int = 0) -> StepResult:
        """Run one device call for the next batch, and calls of a draft model before it.

        Never raises: each failed sequence gets an output with its error. `min_drafts`: see `Speculator.propose`.
        """
        if self.dead is not None:
            return StepResult([])
        batch = self._scheduler.schedule()
        refused = self._admit(batch) if batch.entering else []
        if self.dead is not None or not batch:
            return StepResult(refused)
        try:
            output = self._run(batch, min_drafts)
        except Exception as error:  # noqa: BLE001  (a border: foreign errors become outputs)
            failures = [(sequence, translate(error)) for sequence in batch.sequences]
            return StepResult(refused + self._fail_all(failures))
        outputs, info = self._advance(batch, output)
        return StepResult(refused + outputs, info)

    def _admit(self, batch: Batch) -> list[TokenOutput]:
        """Acquire the slots of new sequences; one that the backend refuses leaves alone."""
        if self._entering is not None:
            self._entering([sequence.request_id for sequence in batch.entering])
        failures: list[tuple[Sequence, BackendError]] = []
        for sequence in batch.entering:
            request, slot = sequence.request, sequence.held_slot
            try:
                sequence.num_cached = self._backend.acquire(
                    slot, request.prompt_ids, request.adapter
                )
            except Exception as error:  # noqa: BLE001  (a border, see step)
                batch.drop(sequence)
                failures.append((sequence, translate(error)))
            else:
                self._sampler.assign(slot, sequence.sampling, request.prompt_ids, sequence.seed)
        return self._fail_all(failures, acquired=False) if failures else []

    def _run(self, batch: Batch, min_drafts: int) -> _Output:
        """Propose drafts, run the batch on the device, and sample its tokens.

        Raises:
            Exception: any error of the backend.
            StepError: the output has another shape than the step wanted.
        """
        decoding = [] if batch.chunks else batch.decoding
        proposal = self._speculator.propose(decoding, self._sampler, min_drafts)
        step = self._batcher.fill(batch, proposal.drafts)
        output, info = self.runner.run(step)
        sampled = batch.sampled
        token_ids, place = self._sample(step, output, info.rows, sampled)
        info = info._replace(
            place=place if sampled else None, draft_s=proposal.seconds, draft_error=proposal.error
        )
        return _Output(sampled, token_ids, output.logits, info)

    def _sample(
        self, step: Step, output: StepOutput, count: int, sampled: list[tuple[int, Sequence]]
    ) -> tuple[Int32Array, SamplingPlace]:
        """int32[B, K]: the tokens of the step's `count` rows; -1: none. And where they were sampled.

        Raises:
            StepError: the output has another shape than the step wanted.
        """
        parts = [rows for rows in (step.prefill, step.decode) if rows is not None]
        logits = _NO_LOGITS if output.logits is None else output.logits
        if output.ids is not None:
            require_shape(output.ids.shape, (count, *output.ids.shape[1:2]))
            if not any(Want.LOGITS in part.wants for part in parts):
                return output.ids, "device"
            rows = [row for row, sequence in sampled if sequence.on_host]
            tokens = output.ids.copy()
        elif parts[0].wants == Want.LOGITS and len(sampled) == count == len(parts[0].slots):
            # Of a steady decode nothing is copied.
            slots, positions = parts[0].slots, parts[0].starts + parts[0].lens
            require_shape(logits.shape, (count, 1, self.spec.vocab_size))
            return self._sampler.sample(logits[:, 0], slots, positions)[:, None], "host"
        else:
            rows = [row for row, _ in sampled]
            tokens = np.full((count, 1), -1, np.int32)
        if parts[-1].wants == Want.ALL_LOGITS:
            # Columns beyond the longest row are padding and may be left out.
            columns = max(logits.shape[1], int(parts[-1].lens.max()))
            require_shape(logits.shape, (count, columns, self.spec.vocab_size))
            return verify(self._sampler, logits, parts[-1]), "host"
        if rows:
            require_shape(logits.shape, (count, 1, self.spec.vocab_size))
            slots = np.concatenate([part.slots for part in parts])
            positions = np.concatenate([part.starts + part.lens for part in parts])
            # All rows are sampled from a view of their logits.
            chosen = slice(None) if len(rows) == count else rows
            drawn = self._sampler.sample(logits[chosen, 0], slots[chosen], positions[chosen])
            tokens[chosen, 0] = drawn
        return tokens, "host" if len(rows) == len(sampled) else "mixed"

    def _advance(self, batch: Batch, output: _Output) -> StepResult:
        """Give each sequence its tokens, and end those that are complete."""
        sampled, token_ids, values, info = output
        self._failed_steps = 0
        self._batcher.advance(batch, token_ids)
        self._scheduler.advance(batch)
        rows = token_ids.tolist()
        outputs: list[TokenOutput] = []
        for row, sequence in sampled:
            taken = sequence.take(rows[row])
            if not taken:
                message = (
                    "the model gave no finite logit for this sequence; its output is lost, retry it"
                )
                outputs.append(self._fail(sequence, StepError(message)))
                continue
            request, reason = sequence.request, sequence.finish_reason
            logits, top = None, request.top_logprobs
            if (request.logprobs or top) and values is not None:
                logits = values[row, : len(taken)]
            outputs.append(TokenOutput(request.request_id, taken, reason, None, logits, top))
            if reason is not None:
                self._end(sequence)
        if info.kind == "verification":
            # Each output has one token that needs no draft.
            accepted = sum(len(output.token_ids) - 1 for output in outputs if output.token_ids)
            info = info._replace(drafted=info.tokens - info.rows, accepted=accepted)
        return StepResult(outputs, info)

    def _end(self, sequence: Sequence, *, acquired: bool = True) -> None:
        slot = sequence.slot
        self._live.pop(sequence.request_id, None)
        self._scheduler.remove(sequence)
        if slot is None or not acquired:
            return
        self._sampler.release(slot)
        self._speculator.release(slot)
        try:
            self._backend.release([slot])
        except Exception:
            logger.exception("release_failed slot=%d request_id=%s", slot, sequence.request.label)

    def _fail(
        self, sequence: Sequence, error: ServingError, *, acquired: bool = True
    ) -> TokenOutput:
        self._end(sequence, acquired=acquired)
        return TokenOutput(sequence.request_id, (), FinishReason.ERROR, error)

    def _fail_all(
        self, failures: list[tuple[Sequence, BackendError]], *, acquired: bool = True
    ) -> list[TokenOutput]:
        """Fail the sequences of a failed device call or, unless `acquired`, those that got no slot.

        These count as a failed step while no other sequence runs and if the device failed; a refused prompt, which is
        another kind of error, never does. After a fatal error, or `MAX_FAILED_STEPS` in a row, the engine is dead, and
        no sequence gets an output: another engine may run it.
        """
        worst = max(
            (error for _, error in failures),
            key=lambda one: (one.fatal, isinstance(one, _DEVICE_FAULTS)),
        )
        alone = self.num_running == len(failures)
        if acquired or (alone and isinstance(worst, _DEVICE_FAULTS)):
            self._failed_steps += 1
            logger.error(
                "step_failed rows=%d failures_in_a_row=%d",
                len(failures),
                self._failed_steps,
                exc_info=worst,
            )
        self._batcher.forget()
        if worst.fatal or self._failed_steps >= MAX_FAILED_STEPS:
            self.dead = worst
            return []
        return [self._fail(sequence, error, acquired=acquired) for sequence, error in failures]

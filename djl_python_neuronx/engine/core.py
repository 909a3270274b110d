"""The engine: requests in, one device call per step, tokens out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Union

import numpy as np

from djl_python_neuronx.backends.base import (
    Backend,
    Float32Array,
    Int32Array,
    Rows,
    Step,
    StepOutput,
    Want,
)
from djl_python_neuronx.engine.batching import Batcher
from djl_python_neuronx.engine.grammars import Grammar, Grammars
from djl_python_neuronx.engine.masks import constraints_of
from djl_python_neuronx.engine.runner import (
    MAX_FAILED_STEPS,
    Ran,
    Runner,
    SamplingPlace,
    StepInfo,
    require_shape,
    translate,
)
from djl_python_neuronx.engine.sampler import NO_TOKEN, NONE_ALLOWED, Sampler
from djl_python_neuronx.engine.scheduler import Batch, ChunkScheduler, Scheduler
from djl_python_neuronx.engine.sequence import Sequence
from djl_python_neuronx.engine.speculation import (
    NO_PROPOSAL,
    Proposal,
    Proposer,
    Speculator,
    verify,
)
from djl_python_neuronx.errors import (
    BackendError,
    DeviceMemoryError,
    RequestError,
    RequestTimeoutError,
    ServingError,
    StepError,
)
from djl_python_neuronx.types import EngineRequest, FinishReason, Scored, TokenOutput

logger = logging.getLogger(__name__)

_IN_ONE_PLACE = (Want.TOKENS, Want.LOGITS)
_DEVICE_FAULTS = (StepError, DeviceMemoryError)
_NO_LOGITS: Float32Array = np.empty(0, np.float32)
_NO_TOKENS: Int32Array = np.empty(0, np.int32)


Sampled = tuple[Int32Array, Union[SamplingPlace, None]]
"""int32[B, K]: the tokens of each row, below 0: none. And where they were sampled, None if there are none."""


class StepResult(NamedTuple):
    """The result of one step: one message, whatever the batch."""

    outputs: list[TokenOutput]
    info: StepInfo | None = None
    """The graph that ran and its tokens; None if nothing ran, or it failed."""


def _missing(token_id: int, sequence: Sequence, error: BaseException | None) -> ServingError:
    """The error of a sequence that got `NONE_ALLOWED`, or `NO_TOKEN`, in place of a token. `error`: see `Masks`."""
    if token_id == NONE_ALLOWED and error is not None:
        return _failed_rules(error)
    if token_id == NONE_ALLOWED:
        rules = sequence.request.sent_names(sequence.sampling.excluding())
        names = " and ".join([*rules, *["the grammar"] * (sequence.request.grammar is not None)])
        message = (
            f"no token may follow, the request's rules exclude each one ({names}); loosen them"
        )
        return RequestError(message, next(iter(rules), None))
    message = "the model gave no finite logit for this sequence; its output is lost, retry it"
    return StepError(message)


def _failed_rules(error: BaseException) -> ServingError:
    """The error of a sequence whose sampling rules raised one."""
    if isinstance(error, ServingError):
        return error
    logger.error("rules_failed", exc_info=error)
    message = f"the request's rules failed ({type(error).__name__}: {error}); leave them out"
    return BackendError(message)


@dataclass
class Call:
    """A batch in a device call, and what came of it."""

    batch: Batch
    refused: list[TokenOutput]
    """The errors of its sequences that the backend refused."""
    step: Step | None = None
    proposal: Proposal = NO_PROPOSAL
    ran: Ran | None = None
    tokens: Int32Array | None = None
    """int32[B, K]: the tokens of each row; below 0: none."""
    place: SamplingPlace | None = None
    error: Exception | None = None
    """Any error of the backend; no sequence got a token."""
    goes_on: bool = False
    """No sequence has ended, as far as its tokens show: the next decode may have the same rows."""
    cached: dict[str, int] = field(default_factory=dict)
    """See `StepInfo.cached`."""
    result: StepResult | None = None
    """Set by `Engine.advance`."""

    def logits(self, row: int, count: int) -> Float32Array | None:
        """float32[count, V]: those that the tokens of a row were drawn from, if the host has them."""
        values = None if self.ran is None else self.ran.output.logits
        if values is None or self.step is None:
            return None
        prefill, first = self.step.prefill, 0
        if prefill is not None and prefill.wants is Want.ALL_LOGITS:
            first = int(prefill.lens[row]) - 1
        return values[row, first : first + count]


class Engine:
    """Continuous batching over one backend. Synchronous, token ids only; one thread, except for `advance`."""

    def __init__(
        self,
        backend: Backend,
        *,
        decode_interleave: int = 1,
        max_join_wait_s: float = 0.0,
        proposer: Proposer | None = None,
        make_sampler: Callable[[int, int], Sampler] = Sampler,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`proposer` drafts tokens for the backend to verify; not used where `spec.num_speculative_tokens` is 0.

        `make_sampler` gets the numbers of slots and of tokens. `clock`: seconds.
        """
        self.spec = backend.spec
        self.runner = Runner(backend, clock)
        self.dead: BackendError | None = None
        """The error for which the device was given up; every later step does nothing."""
        self._backend = backend
        scheduling = ChunkScheduler if self.spec.mixed_steps else Scheduler
        self._scheduler = scheduling(
            self.spec,
            decode_interleave=decode_interleave,
            max_join_wait_s=max_join_wait_s,
            cached=lambda waiting: backend.cached(*waiting.prefix_key),
            place=lambda free, waiting: backend.place(free, *waiting.prefix_key),
            clock=clock,
        )
        self._sampler = make_sampler(self.spec.num_slots, self.spec.vocab_size)
        self._batcher = Batcher(self.spec, self._sampler)
        self.grammars: Grammars
        """Set with the vocabulary, before the first request that has one."""
        self.proposer = proposer
        self._speculator = Speculator(proposer, self.spec.num_speculative_tokens, clock)
        self._clock = clock
        self._live: dict[str, Sequence] = {}
        self._failed_steps = 0
        self._last: Call | None = None
        """The last call, if the same rows go on: its sequences may not have their tokens yet, and none has left."""
        self._advancing = threading.Lock()

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
        """False without a proposer, once it is disabled after its failures, and while its drafts do not pay."""
        return self._speculator.is_on

    @property
    def runners(self) -> list[Runner]:
        """The runners of device calls: the engine's, then the draft model's."""
        drafting = None if self.proposer is None else self.proposer.runner
        return [self.runner] if drafting is None else [self.runner, drafting]

    def close(self) -> None:
        """Free the device, the draft model's included; idempotent."""
        self._backend.close()
        if self.proposer is not None:
            self.proposer.close()

    def add(self, request: EngineRequest, grammar: Grammar | None = None) -> None:
        """Queue a request that `limits.check` has passed, with an id that no other one has, and its grammar."""
        sequence = Sequence(request, self.spec, grammar, arrived_s=self._clock())
        if not self._live:
            self._speculator.rest()
        self._live[request.request_id] = sequence
        self._scheduler.add(sequence)

    def set_adapter(self, place: int, folder: Path | None) -> None:
        """Load an adapter into a place, or empty it: see `Backend`.

        Raises:
            BackendError: a sequence has the place, and nothing is changed.
        """
        self._finish_last()
        if place in {sequence.request.adapter for sequence in self._live.values()}:
            msg = f"the place {place} of an adapter is in use; retry when its requests have ended"
            raise BackendError(msg)
        self._backend.set_adapter(place, folder)

    def abort(self, request_id: str) -> None:
        """Drop a sequence that its client has left or a stop string has ended; idempotent, no output follows."""
        self._finish_last()
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._end(sequence)

    def abort_all(self) -> None:
        """Drop every sequence."""
        self._finish_last()
        for sequence in list(self._live.values()):
            self._end(sequence)

    def expire(self, waited_s: float) -> list[TokenOutput]:
        """End the sequences that have waited longer than `waited_s` for a slot, each with its error."""
        limit = self._clock() - waited_s
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
        """Run the next batch. Never raises: each failed sequence gets an output with its error.

        `min_drafts`: see `Speculator.propose`.
        """
        batch = self.schedule()
        call = self.run(batch, min_drafts)
        return self.advance(call)

    def schedule(self) -> Batch:
        """The batch of the next call, empty if there is nothing to do; the last one again if nothing has changed."""
        if self.dead is not None:
            return Batch([], [], [])
        if self._last is not None and self._scheduler.repeat():
            return self._last.batch
        self._finish_last()
        return self._scheduler.schedule()

    def run(self, batch: Batch, min_drafts: int = 0) -> Call:
        """Run a batch on the device, and sample its tokens. Never raises: see `Call.error`.

        Where the next call may have the same rows nothing else delays it: `advance` can follow while it runs.
        """
        last = self._last
        if batch:
            self._speculator.begin()
        if last is not None and last.batch is batch:
            call = Call(batch, [], last.step)
        else:
            call = Call(batch, [])
            if batch.entering:
                self._admit(call)
        if batch and self.dead is None:
            try:
                self._run(call, min_drafts)
            except Exception as error:  # noqa: BLE001  (a border: foreign errors become outputs)
                call.error = error
        if last is not None and last.result is None:
            self.advance(last)
        self._last = call
        if not call.goes_on:
            self._finish_last()
        return call

    def advance(self, call: Call) -> StepResult:
        """Give the sequences of a call their tokens, and end those that are complete. Idempotent.

        A call after which the same rows go on may be advanced by another thread, while the next one runs.
        """
        with self._advancing:
            if call.result is None:
                call.result = self._advance(call)
            return call.result

    def _finish_last(self) -> None:
        if self._last is not None:
            self.advance(self._last)
            self._last = None

    def _admit(self, call: Call) -> None:
        """Acquire the slots of new sequences; one that the backend refuses leaves alone."""
        failures: list[tuple[Sequence, BackendError]] = []
        for sequence in call.batch.entering:
            slot = sequence.held_slot
            try:
                self._assign(sequence)
            except Exception as error:  # noqa: BLE001  (a border, see step)
                call.batch.drop(sequence)
                call.refused.append(self._fail(sequence, _failed_rules(error), acquired=False))
                continue
            try:
                sequence.num_cached = self._backend.acquire(slot, *sequence.prefix_key)
            except Exception as error:  # noqa: BLE001  (a border, see step)
                call.batch.drop(sequence)
                failures.append((sequence, translate(error)))
            else:
                call.cached[sequence.request_id] = sequence.num_cached
        if failures:
            call.refused += self._fail_all(failures, acquired=False)

    def _assign(self, sequence: Sequence) -> None:
        """Give the sampler the rules of a sequence for its slot."""
        request, sampling = sequence.request, sequence.sampling
        grammar = [] if sequence.grammar is None else [sequence.grammar]
        rules = constraints_of(sampling, request.prompt_ids, sequence.end_ids, self.spec.vocab_size)
        self._sampler.assign(
            *(sequence.held_slot, sampling, request.prompt_ids, sequence.seed, request.given_ids),
            [*grammar, *rules],
        )

    def _run(self, call: Call, min_drafts: int) -> None:
        """Propose drafts, run the batch on the device, and sample its tokens.

        Raises:
            Exception: any error of the backend.
            StepError: the output has another shape than the step wanted.
        """
        batch, step = call.batch, call.step
        if step is None:
            if not batch.chunks:
                call.proposal = self._speculator.propose(batch.decoding, self._sampler, min_drafts)
            step = call.step = self._batcher.fill(batch, call.proposal.drafts)
        call.ran = self.runner.run(step)
        call.tokens, call.place = self._sample(batch, step, call.ran.output)
        if not (batch.chunks or min_drafts):
            self._speculator.note(call.tokens, len(batch.sampled))
        self._failed_steps = 0
        goes_on = self._batcher.advance(batch, call.tokens)
        # Drafts follow from the newest tokens.
        call.goes_on = goes_on and not self._speculator.drafts(batch.decoding)

    def _sample(self, batch: Batch, step: Step, output: StepOutput) -> Sampled:
        """Sample the tokens of a step.

        Raises:
            StepError: the output has another shape than the step wanted.
        """
        rows = step.decode
        alone = step.prefill is None and not self._batcher.feeds
        if alone and rows is not None and rows.wants in _IN_ONE_PLACE:
            return self._sample_decode(rows, output)
        parts = [rows for _, rows in step.parts]
        logits = _NO_LOGITS if output.logits is None else output.logits
        sampled, count = batch.sampled, sum([len(part.slots) for part in parts])
        if output.ids is not None:
            require_shape(output.ids.shape, (count, *output.ids.shape[1:2]))
            on_host = [row for row, sequence in sampled if sequence.on_host]
            tokens = output.ids.copy()
        else:
            on_host = [row for row, _ in sampled]
            tokens = np.full((count, 1), NO_TOKEN, np.int32)
        if parts[-1].wants is Want.ALL_LOGITS:
            # Columns beyond the longest row are padding and may be left out.
            columns = max(logits.shape[1], int(parts[-1].lens.max()))
            require_shape(logits.shape, (count, columns, self.spec.vocab_size))
            if not batch.chunks:
                return verify(self._sampler, logits, parts[-1], [row for row, _ in sampled]), "host"
            # A prompt that is scored.
            logits = logits[np.arange(count), parts[-1].lens - 1][:, None]
        if on_host:
            require_shape(logits.shape, (count, 1, self.spec.vocab_size))
            slots = np.concatenate([part.slots for part in parts])
            positions = np.concatenate([part.starts + part.lens for part in parts])
            # All rows are sampled from a view of their logits.
            chosen = slice(None) if len(on_host) == count else on_host
            drawn = self._sampler.sample(logits[chosen, 0], slots[chosen], positions[chosen])
            tokens[chosen, 0] = drawn
        if len(on_host) == len(sampled):
            return tokens, "host" if sampled else None
        return tokens, "mixed" if on_host else "device"

    def _sample_decode(self, rows: Rows, output: StepOutput) -> Sampled:
        """Sample the tokens of a decode whose rows are all sampled in one place: of those nothing is copied."""
        count = len(rows.slots)
        if rows.wants is Want.TOKENS:
            tokens = _NO_TOKENS if output.ids is None else output.ids
            require_shape(tokens.shape, (count, *tokens.shape[1:2]))
            return tokens, "device"
        logits = _NO_LOGITS if output.logits is None else output.logits
        require_shape(logits.shape, (count, 1, self.spec.vocab_size))
        drawn = self._sampler.sample(logits[:, 0], rows.slots, rows.starts + rows.lens)
        return drawn[:, None], "host"

    def _advance(self, call: Call) -> StepResult:
        if call.error is not None:
            failures = [(sequence, translate(call.error)) for sequence in call.batch.sequences]
            return StepResult(call.refused + self._fail_all(failures))
        if call.tokens is None or call.ran is None or call.step is None:
            return StepResult(call.refused)
        sampled, values = call.batch.sampled, call.ran.output.logits
        self._scheduler.advance(call.batch)
        rows = call.tokens.tolist()
        outputs = call.refused
        if values is not None and (call.batch.chunks or len(sampled) < len(call.batch.decoding)):
            outputs += self._score(call.batch, call.step, values)
        for row, sequence in sampled:
            if sequence.slot is not None:  # else its scores have failed
                outputs.append(self._give(call, row, sequence, rows[row]))
        _, seconds, error = call.proposal
        info = self.runner.describe(call.step, call.ran)
        info = info._replace(
            place=call.place, draft_s=seconds, draft_error=error, cached=call.cached
        )
        if (width := call.tokens.shape[1]) > 1 and (decode := call.step.decode) is not None:
            # A device that drafts fills all columns. Each output has one token that needs no draft.
            drafted = (decode.lens if info.kind == "verification" else decode.lens * width) - 1
            accepted = sum(len(output.token_ids) - 1 for output in outputs if output.token_ids)
            info = info._replace(
                drafts=int((drafted > 0).sum()), drafted=int(drafted.sum()), accepted=accepted
            )
        return StepResult(outputs, info)

    def _give(self, call: Call, row: int, sequence: Sequence, token_ids: list[int]) -> TokenOutput:
        """Give a sequence the tokens of its row in a call, and end it if it is complete."""
        taken = sequence.take(token_ids)
        request, reason = sequence.request, sequence.finish_reason
        if not taken and reason is None:
            error = self._sampler.mask_error(sequence.held_slot)
            return self._fail(sequence, _missing(token_ids[0], sequence, error))
        if reason is not None:
            self._end(sequence)
        top = request.top_logprobs
        logits = call.logits(row, len(taken)) if request.logprobs or top else None
        return TokenOutput(request.request_id, taken, reason, None, logits, top)

    def _score(self, batch: Batch, step: Step, logits: Float32Array) -> list[TokenOutput]:
        """The outputs that score prompts: a column's logits are those of the token behind it."""
        outputs = []
        starts, lens = (
            np.concatenate([getattr(rows, name) for _, rows in step.parts]).tolist()
            for name in ("starts", "lens")
        )
        for row, sequence in enumerate(batch.sequences):
            start, top = starts[row] + 1, sequence.scores_prompt
            ids = sequence.request.prompt_ids[start : start + lens[row]]
            if top is None or not len(ids):
                continue
            values = logits[row, : len(ids)]
            if np.isfinite(values.max(axis=1)).all():
                scored = Scored(start, ids)
                outputs.append(
                    TokenOutput(sequence.request_id, (), None, None, values, top, scored=scored)
                )
            else:
                outputs.append(self._fail(sequence, _missing(NO_TOKEN, sequence, None)))
        return outputs

    def _end(self, sequence: Sequence, *, acquired: bool = True) -> None:
        slot = sequence.slot
        self._live.pop(sequence.request_id, None)
        self._scheduler.remove(sequence)
        if slot is None:
            return
        self._sampler.release(slot)
        if not acquired:
            return
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

"""The heart: requests in, one device call per step, tokens out."""

from __future__ import annotations

import logging
import secrets
import time

from djl_python_neuronx.backends.base import (
    Backend,
    HostLogits,
    Int32Array,
    Step,
    StepOutput,
)
from djl_python_neuronx.engine.batching import Batcher
from djl_python_neuronx.engine.choice import choose
from djl_python_neuronx.engine.chunking import ChunkScheduler
from djl_python_neuronx.engine.drafting import Drafting
from djl_python_neuronx.engine.drafts import Proposer
from djl_python_neuronx.engine.faults import MAX_FAILED_STEPS, translate
from djl_python_neuronx.engine.limits import check
from djl_python_neuronx.engine.runner import DeviceCall, Graph, Runner, StepInfo
from djl_python_neuronx.engine.sampler import Sampler
from djl_python_neuronx.engine.scheduler import (
    Scheduled,
    ScheduledChunks,
    ScheduledDecode,
    ScheduledPrefill,
    Scheduler,
)
from djl_python_neuronx.engine.sequence import Sequence
from djl_python_neuronx.errors import (
    BackendError,
    DeviceMemoryError,
    RequestError,
    RequestTimeoutError,
    ServingError,
    StepError,
)
from djl_python_neuronx.types import FinishReason, GenerationRequest, TokenOutput

logger = logging.getLogger(__name__)


class Engine:
    """Continuous batching over one backend. Synchronous, single-threaded, token ids only.

    All methods but `check` belong to one thread.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        decode_interleave: int = 1,
        max_join_wait_s: float = 0.0,
        proposer: Proposer | None = None,
    ) -> None:
        """`proposer` drafts what the backend verifies; it is used where `spec.max_drafts` is not 0."""
        self.spec = backend.spec
        self.dead: BackendError | None = None
        """Why the engine has given up; every later step does nothing."""
        self.last_step: StepInfo | None = None
        """What the last `step` ran; None if it ran nothing or failed."""
        self.drafting = Drafting(proposer, self.spec.max_drafts)
        """Who drafts, and how that went for the last step."""
        self._backend = backend
        self._scheduler = (
            ChunkScheduler(self.spec)
            if self.spec.mixed_steps
            else Scheduler(
                self.spec, decode_interleave=decode_interleave, max_join_wait_s=max_join_wait_s
            )
        )
        self._sampler = Sampler(self.spec.num_slots, self.spec.vocab_size)
        self._batcher = Batcher(self.spec, self._sampler)
        self.runner = Runner(backend)
        """Who calls the device."""
        self._live: dict[str, Sequence] = {}
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

    @property
    def device_call(self) -> DeviceCall | None:
        """The call that the device is busy with, the model's own or the draft model's."""
        return self.runner.device_call or self.drafting.device_call

    @property
    def proposer(self) -> Proposer | None:
        """Who drafts; None: nobody, or one that was given up after its failures."""
        return self.drafting.proposer

    @property
    def graphs_run(self) -> frozenset[Graph]:
        """Every graph that has run."""
        return frozenset(self.runner.graphs_run)

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

    def abort_all(self) -> None:
        """Forget every sequence."""
        for request_id in list(self._live):
            self.abort(request_id)

    def expire(self, waited_s: float) -> list[TokenOutput]:
        """End the sequences that have waited longer than `waited_s` for a slot, each with its error."""
        limit = time.monotonic() - waited_s
        late = [sequence for sequence in self._scheduler.waiting if sequence.arrived_s < limit]
        what, fix = "no slot became free", "raise option.max_rolling_batch_size"
        if self._scheduler.slots.num_free:
            what = "prompts that came before filled every step"
            fix = "raise option.context_length_estimate"
        message = f"{what} within {waited_s:g} s (option.predict_timeout); retry later, or {fix}"
        return [self._fail(sequence, RequestTimeoutError(message)) for sequence in late]

    def step(self) -> list[TokenOutput]:
        """One device call for whoever is next. Never raises: what failed is an output that carries its error.

        Drafts for a decode are further calls, of the draft model.
        """
        outputs: list[TokenOutput] = []
        self.last_step = None
        scheduled = None if self.dead is not None else self._scheduler.schedule()
        if isinstance(scheduled, (ScheduledPrefill, ScheduledChunks)):
            outputs = self._enter(scheduled)
        if self.dead is not None:
            return outputs + [
                self._fail(sequence, self.dead) for sequence in [*self._live.values()]
            ]
        if scheduled is None or not scheduled.sequences:
            return outputs
        try:
            step = self._fill(scheduled)
            output, info = self.runner.run(step, self._batcher.reach)
            token_ids = choose(self._sampler, step, output, scheduled, self.spec.vocab_size)
        except Exception as error:  # noqa: BLE001  (one of the four borders where foreign errors are translated)
            return outputs + self._fail_step(scheduled, error)
        self._failed_steps = 0
        advanced = self._advance(scheduled, token_ids, output)
        drafting = self.drafting
        info = info._replace(drafts_s=drafting.seconds, draft_failed=drafting.error is not None)
        if info.kind == "verification":
            # Each output has one token that needs no draft.
            accepted = sum(len(output.token_ids) - 1 for output in advanced if output.token_ids)
            info = info._replace(drafted=info.tokens - info.rows, accepted=accepted)
        self.last_step = info
        return outputs + advanced

    def _enter(self, scheduled: ScheduledPrefill | ScheduledChunks) -> list[TokenOutput]:
        """Tell backend and sampler about the new slots; a sequence that the backend refuses leaves alone.

        A device that fails again and again whoever comes, with nobody else on it, is given up as in a step. A backend
        that only refuses a prompt says so with another error, and is not.
        """
        outputs: list[TokenOutput] = []
        failure: BackendError | None = None
        for sequence in list(scheduled.entering):
            request, slot = sequence.request, sequence.slot
            assert slot is not None  # noqa: S101  (narrowing for mypy: the scheduler has just set it)
            try:
                sequence.num_cached = self._backend.acquire(
                    slot, request.prompt_ids, request.adapter
                )
            except Exception as error:  # noqa: BLE001  (a border: see step)
                scheduled.drop(sequence)
                translated = translate(error)
                outputs.append(self._fail(sequence, translated, acquired=False))
                self.dead = self.dead or (translated if translated.fatal else None)
                if isinstance(translated, (StepError, DeviceMemoryError)):
                    failure = translated
                continue
            self._sampler.assign(slot, request.sampling, request.prompt_ids, sequence.seed)
        if failure is not None and not self.num_running:
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS:
                self.dead = self.dead or failure
        return outputs

    def _fill(self, scheduled: Scheduled) -> Step:
        if not isinstance(scheduled, ScheduledDecode):
            self.drafting.skip()
        elif any(drafts := self.drafting.propose(scheduled.sequences, self._sampler)):
            return self._batcher.verification(scheduled.sequences, drafts)
        return self._batcher.fill(scheduled)

    def _advance(
        self, scheduled: Scheduled, token_ids: Int32Array, output: StepOutput
    ) -> list[TokenOutput]:
        """Hand each sequence its tokens and end those whose ids say so."""
        self._batcher.advance(scheduled, token_ids)
        unfinished = scheduled.unfinished
        self._scheduler.advance(scheduled)
        values = output.values if isinstance(output, HostLogits) else None
        outputs: list[TokenOutput] = []
        ended: list[Sequence] = []
        for row, (sequence, ids) in enumerate(
            zip(scheduled.sequences, token_ids.tolist(), strict=True)
        ):
            if row in unfinished:
                continue
            taken = sequence.take(ids)
            if not taken:
                error = StepError(
                    "the model gave no finite logit for this sequence; its output is lost, retry it"
                )
                outputs.append(self._fail(sequence, error))
                continue
            request, reason = sequence.request, sequence.finish_reason
            logits = None
            if request.logprobs and values is not None:
                logits = values[row, : len(taken)]
            outputs.append(TokenOutput(request, taken, reason, None, logits))
            if reason is not None:
                ended.append(sequence)
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
        self.drafting.release(slot)
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

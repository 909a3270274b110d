"""A device in numpy that tells at once when it is driven wrongly.

The next token is a function of every token in the slot's cache row and of its place, so a mixed-up
slot, position or history changes the tokens. `expected` gives what a prompt must produce alone. The
rules of the strictest device are enforced: each breach is noted in `violations` and raises
`StepError`, but for a live slot that a decode leaves out: that one is silently corrupted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from djl_python_neuronx.backends.base import (
    Float32Array,
    ModelSpec,
    PartKind,
    Rows,
    Step,
    StepOutput,
    Want,
)
from djl_python_neuronx.backends.shapes import choose_bucket
from djl_python_neuronx.errors import BackendError, StepError

TOY_SPEC = ModelSpec(
    num_slots=4,
    max_model_len=128,
    prefill_buckets=(8, 16, 32, 64),
    token_buckets=(32, 64, 128),
    vocab_size=300,
    eos_ids=frozenset({2}),
)
"""Change it with `dataclasses.replace`."""

HANG_LIMIT_S = 300.0
"""A forgotten `resume` ends a test instead of blocking it for ever."""

UInt64Array = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class StepRecord:
    """The request of one `run`."""

    kind: PartKind
    slots: tuple[int, ...]
    starts: tuple[int, ...]
    lens: tuple[int, ...]
    bucket: int
    wants: Want
    sampling: tuple[tuple[float, ...], ...]
    """top_k, top_p and temperature of each row."""


class ToyBackend:
    """A `Backend` of `spec`; knobs may be turned at any time, from any thread.

    `step_s` and `prefill_s` are the seconds of a decode and of a prefill (slept: the GIL is free
    meanwhile). Steps are numbered from 0; `num_steps` is the number of the next one, so
    `fail_at[backend.num_steps] = error` breaks it.
    """

    def __init__(
        self,
        spec: ModelSpec = TOY_SPEC,
        *,
        step_s: float = 0.0,
        prefill_s: float = 0.0,
        rewinds: bool = False,
        device_adds: int = 0,
    ) -> None:
        self.spec = spec
        self.rewinds = (
            rewinds
            or spec.num_speculative_tokens > 0
            or bool(spec.cache_buckets or spec.decode_slots)
        )
        """A step may write again what is cached behind its start, as drafts and a warm-up of full caches need it."""
        self.device_adds = device_adds
        """Added to the most likely token by a device that samples, which tells its tokens from the host's."""
        self.step_s = step_s
        self.prefill_s = prefill_s
        self.fail_at: dict[int, Exception] = {}
        """Step number → what it raises. With a true `fatal`, every later step fails too."""
        self.hang_at: set[int] = set()
        """Step numbers that wait for `resume`."""
        self.hanging = threading.Event()
        """Set while a step hangs."""
        self.resume = threading.Event()
        self.steps: list[StepRecord] = []
        """Every step that was accepted, failed ones included."""
        self.violations: list[str] = []
        """Device rules broken so far: assert that it is empty."""
        self.num_steps = 0
        self.closed = False
        self.adapters: dict[int, Path] = {}
        """The adapter in each place; a row that has one begins with the letters of its folder's name."""
        self._dead: Exception | None = None
        self._running = threading.Lock()
        self._cache = np.zeros((spec.num_slots, spec.max_model_len), np.int64)
        self._filled = [0] * spec.num_slots
        self._acquired: set[int] = set()
        self._users: dict[int, int] = {}
        self._live: set[int] = set()

    @property
    def acquired(self) -> frozenset[int]:
        """Slots that were acquired and not released."""
        return frozenset(self._acquired)

    def cached(self, prompt_ids: Sequence[int], adapter: int, salt: str = "") -> int:
        """0: nothing is ever in the cache already."""
        return 0

    def place(
        self, free: Sequence[int], prompt_ids: Sequence[int], adapter: int, salt: str = ""
    ) -> int:
        """The lowest slot."""
        return free[0]

    def acquire(self, slot: int, prompt_ids: Sequence[int], adapter: int, salt: str = "") -> int:
        """Reserve a free slot."""
        self._require(
            0 <= slot < self.spec.num_slots, f"slot {slot} of {self.spec.num_slots} was acquired"
        )
        self._require(slot not in self._acquired, f"slot {slot} was acquired twice")
        self._require(len(prompt_ids) > 0, f"slot {slot} was acquired for an empty prompt")
        self._require(0 <= adapter <= self.spec.num_adapters, f"adapter {adapter} does not exist")
        self._acquired.add(slot)
        self._users[slot] = adapter
        return self.cached(prompt_ids, adapter)

    def release(self, slots: Sequence[int]) -> None:
        """Forget these slots; their rows become garbage."""
        self._require(
            not self._running.locked(), f"slots {list(slots)} were released during a step"
        )
        for slot in slots:
            self._require(slot in self._acquired, f"slot {slot} was released but not acquired")
            self._acquired.discard(slot)
            self._live.discard(slot)
            self._spoil(slot)

    def set_adapter(self, place: int, folder: Path | None) -> None:
        """Load an adapter; one whose name begins with "bad" fails."""
        self._require(not self._running.locked(), f"adapter {place} was set during a step")
        self._require(1 <= place <= self.spec.num_adapters, f"place {place} does not exist")
        users = [slot for slot in self._acquired if self._users.get(slot) == place]
        self._require(not users, f"adapter {place} was set while slots {users} use it")
        self.adapters.pop(place, None)
        if folder is not None and folder.name.startswith("bad"):
            message = f"{folder} is no adapter"
            raise BackendError(message)
        if folder is not None:
            self.adapters[place] = folder

    def close(self) -> None:
        """End it; a hanging step is let go."""
        self.closed = True
        self.resume.set()

    def run(self, step: Step) -> StepOutput:
        """Run a step, or fail or hang as told."""
        if not self._running.acquire(blocking=False):
            self._break("run was called while another thread is in it")
        try:
            return self._run(step)
        finally:
            self._running.release()

    def _run(self, step: Step) -> StepOutput:
        number, self.num_steps = self.num_steps, self.num_steps + 1
        self._check_alive()
        self._require(
            self.spec.mixed_steps or step.kind != "mixed",
            "a mixed step was given to a model without them",
        )
        self._require(len(step.parts) > 0, "a step has neither a prefill nor a decode")
        records = [self._check(kind, rows) for kind, rows in step.parts]
        if self.spec.mixed_steps:
            self._check_budget(records)
        self.steps += records
        prefill = any(record.kind == "prefill" for record in records)
        self._wait(number, self.prefill_s if prefill else self.step_s)
        error = self.fail_at.get(number)
        if error is not None:
            self._fail(error, [slot for record in records for slot in record.slots])
        if step.kind == "decode" and not self.spec.mixed_steps and not self.spec.score_columns:
            self._spoil_left_out(records[0].slots)
        wants = Want.NOTHING
        for record in records:
            wants |= record.wants
        logits = np.concatenate([self._compute(rows) for _, rows in step.parts])
        output = self._answer(logits, wants)
        if self.spec.joins == "reprefill" and step.kind == "prefill":
            idle = self._live.difference(records[0].slots)
            output.num_reprefilled = sum(self._filled[slot] for slot in idle)
        return output

    def _check(self, kind: PartKind, rows: Rows) -> StepRecord:
        self._check_rows(rows)
        bucket = self._check_prefill(rows) if kind == "prefill" else self._check_decode(rows)
        slots, starts, lens = (
            tuple(array.tolist()) for array in (rows.slots, rows.starts, rows.lens)
        )
        sampling = tuple(map(tuple, rows.sampling.tolist()))
        return StepRecord(kind, slots, starts, lens, bucket, rows.wants, sampling)

    def _check_budget(self, records: list[StepRecord]) -> None:
        tokens = sum(sum(record.lens) for record in records)
        most = self.spec.prefill_buckets[-1]
        self._require(tokens <= most, f"a step of {tokens} tokens; expected at most {most}")
        slots = [slot for record in records for slot in record.slots]
        self._require(len(set(slots)) == len(slots), f"slots {slots} are in a step twice")

    def _answer(self, logits: Float32Array, wants: Want) -> StepOutput:
        if not wants:
            return StepOutput(logits[:, :0])
        if Want.TOKENS not in wants:
            return StepOutput(logits)
        ids = (logits.argmax(axis=2).astype(np.int32) + self.device_adds) % self.spec.vocab_size
        return StepOutput(logits if Want.LOGITS in wants else None, ids)

    def _wait(self, number: int, seconds: float) -> None:
        if seconds:
            time.sleep(seconds)
        if number in self.hang_at:
            self.hanging.set()
            self.resume.wait(HANG_LIMIT_S)
            self.hanging.clear()

    def _fail(self, error: Exception, slots: Sequence[int]) -> None:
        if getattr(error, "fatal", False):
            self._dead = error
        for slot in slots:
            self._spoil(slot)
            self._live.discard(slot)
        raise error

    def _compute(self, rows: Rows) -> Float32Array:
        """float32[B, K, V]; not numbers for rows that want nothing."""
        count, width = rows.input_ids.shape
        every = Want.ALL_LOGITS in rows.wants
        logits = np.full((count, width if every else 1, self.spec.vocab_size), np.nan, np.float32)
        for i, slot in enumerate(rows.slots.tolist()):
            start, length = int(rows.starts[i]), int(rows.lens[i])
            self._cache[slot, start : start + length] = rows.input_ids[i, :length]
            self._filled[slot] = start + length
            if rows.wants or self.rewinds:
                self._live.add(slot)
            if not rows.wants:
                continue
            for column in range(length) if every else [length - 1]:
                seen = self._cache[slot, : start + column + 1]
                if place := int(rows.adapters[i]):
                    seen = np.append([*self.adapters[place].name.encode()], seen)
                logits[i, column if every else 0] = toy_logits(seen, self.spec.vocab_size)
        return logits

    def _check_alive(self) -> None:
        if self.closed or self._dead is not None:
            error = StepError(
                "the toy device is closed or dead; expected no more steps; load it again"
            )
            error.fatal = True
            raise error

    def _check_rows(self, rows: Rows) -> None:
        count = rows.input_ids.shape[0]
        slots = rows.slots.tolist()
        for name in ("input_ids", "lens", "starts", "slots", "adapters"):
            array = getattr(rows, name)
            self._require(array.dtype == np.int32, f"{name} is {array.dtype}; expected int32")
            shape = (count, rows.input_ids.shape[1]) if name == "input_ids" else (count,)
            self._require(array.shape == shape, f"{name} has shape {array.shape}; expected {shape}")
        self._require(
            rows.sampling.shape == (count, 3), f"sampling has shape {rows.sampling.shape}"
        )
        self._require(
            0 < count <= self.spec.num_slots, f"{count} rows; expected 1 to {self.spec.num_slots}"
        )
        self._require(sorted(set(slots)) == slots, f"slots {slots} do not ascend strictly")
        self._require(
            rows.wants in self.spec.outputs | Want.NOTHING,
            f"{rows.wants} is not in {self.spec.outputs}",
        )
        if Want.TOKENS in self.spec.outputs:
            self._require(rows.wants != Want.LOGITS, "logits are wanted without tokens")
            self._check_sampling(rows)
        adapters = rows.adapters.tolist()
        self._require(
            all(0 <= a <= self.spec.num_adapters for a in adapters),
            f"adapters {adapters} do not exist",
        )
        for i, slot in enumerate(slots):
            self._check_row(rows, i, slot)

    def _check_sampling(self, rows: Rows) -> None:
        top_ks, top_ps, temperatures = rows.sampling.T
        most = self.spec.largest_top_k
        allowed = most is None or bool((top_ks >= 1).all() and (top_ks <= most).all())
        self._require(allowed, f"top_k {top_ks.tolist()}; expected 1 to {most}")
        self._require(bool(((top_ps > 0) & (top_ps <= 1)).all()), f"top_p {top_ps.tolist()}")
        self._require(bool((temperatures > 0).all()), f"temperature {temperatures.tolist()}")

    def _check_row(self, rows: Rows, i: int, slot: int) -> None:
        start, length = int(rows.starts[i]), int(rows.lens[i])
        ids = rows.input_ids[i]
        self._require(slot in self._acquired, f"slot {slot} was not acquired")
        self._require(
            1 <= length <= ids.size, f"slot {slot} has {length} valid columns of {ids.size}"
        )
        self._require(
            not ids[length:].any(), f"slot {slot} is not padded with 0 from column {length}"
        )
        self._require(
            bool(((ids >= 0) & (ids < self.spec.vocab_size)).all()),
            f"slot {slot} has ids outside the vocab",
        )
        end = start + length
        self._require(end <= self.spec.max_model_len, f"slot {slot} writes position {end - 1}")

    def _check_prefill(self, rows: Rows) -> int:
        count, longest = len(rows.slots), int(rows.lens.max())
        self._require(
            self.spec.mixed_steps or count <= self.spec.max_prefill_batch,
            f"{count} prompts in a prefill",
        )
        self._require(
            longest <= self.spec.prefill_buckets[-1],
            f"a prompt of {longest} exceeds the largest bucket",
        )
        for slot, start in zip(rows.slots.tolist(), rows.starts.tolist(), strict=True):
            fresh = start == 0 and (slot not in self._live or self.spec.joins == "reprefill")
            chunk = 0 < start == self._filled[slot]
            again = self.rewinds and self.spec.mixed_steps and start < self._filled[slot]
            self._require(
                fresh or chunk or again,
                f"slot {slot} is prefilled from {start} with {self._filled[slot]} in the cache",
            )
        return choose_bucket(longest, self.spec.prefill_buckets)

    def _check_decode(self, rows: Rows) -> int:
        width, drafts = rows.input_ids.shape[1], self.spec.num_speculative_tokens
        verifies = drafts and width == drafts + 1 and rows.wants == Want.ALL_LOGITS
        self._require(width == 1 or bool(verifies), f"a decode of {width} columns; expected 1")
        for slot, start in zip(rows.slots.tolist(), rows.starts.tolist(), strict=True):
            self._require(slot in self._live, f"slot {slot} decodes but holds no prompt")
            filled = self._filled[slot]
            self._require(
                start == filled or (self.rewinds and 0 < start < filled),
                f"slot {slot} decodes at {start}, not at {filled}",
            )
        limit = self.spec.max_model_len
        return choose_bucket(
            min(int(rows.starts.max()) + width, limit), self.spec.token_buckets or (limit,)
        )

    def _spoil_left_out(self, slots: Sequence[int]) -> None:
        for slot in self._live.difference(slots):
            self.violations.append(f"live slot {slot} was left out of decode {self.num_steps - 1}")
            self._cache[slot, 0] += 1

    def _spoil(self, slot: int) -> None:
        self._cache[slot] = self.spec.vocab_size + slot
        self._filled[slot] = 0

    def _require(self, true: bool, breach: str) -> None:
        if not true:
            self._break(breach)

    def _break(self, breach: str) -> NoReturn:
        self.violations.append(breach)
        message = f"device rule broken: {breach}"
        raise StepError(message)


def expected(
    prompt_ids: Sequence[int],
    num_tokens: int,
    stop_ids: Collection[int] = (),
    vocab_size: int = TOY_SPEC.vocab_size,
    window: int = 0,
) -> list[int]:
    """The greedy tokens of a prompt alone: `num_tokens`, or up to and with one of `stop_ids`.

    `window`: the tokens that each follows from; 0: all.
    """
    seen = list(prompt_ids)
    while len(seen) < len(prompt_ids) + num_tokens:
        seen.append(int(toy_logits(np.asarray(seen[-window:], np.int64), vocab_size).argmax()))
        if seen[-1] in stop_ids:
            break
    return seen[len(prompt_ids) :]


def toy_logits(seen: npt.NDArray[np.int64], vocab_size: int) -> Float32Array:
    """float32[V] after `seen`: the winner is 6, a tenth of the mass; the others lie in [0, 4)."""
    places = _mix(np.arange(1, seen.size + 1, dtype=np.uint64))
    numbered: UInt64Array = places * (seen.astype(np.uint64) + np.uint64(1))
    history = _mix(numbered.sum(keepdims=True))
    ids: UInt64Array = np.arange(1, vocab_size + 1, dtype=np.uint64)
    noise = _mix(history + ids)
    logits: Float32Array = (noise >> np.uint64(40)).astype(np.float32) * np.float32(2**-22)
    logits[int(history[0] % np.uint64(vocab_size))] = 6.0
    return logits


def _mix(values: UInt64Array) -> UInt64Array:
    """Scatter 64-bit integers: multiply by the golden ratio, fold the high half down; twice."""
    for _ in range(2):
        values = values * np.uint64(0x9E3779B97F4A7C15)
        values = values ^ (values >> np.uint64(32))
    return values

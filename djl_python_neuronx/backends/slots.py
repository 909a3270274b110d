"""Base classes of the backends: the state of slots, and checks of the steps. Numpy only."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from djl_python_neuronx.backends.base import (
    Int32Array,
    ModelSpec,
    PartKind,
    Rows,
    Step,
    StepOutput,
    Want,
)
from djl_python_neuronx.backends.faults import of_step
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.backends.prefixes import Prefixes
from djl_python_neuronx.backends.shapes import check_budget, check_rows, refuse
from djl_python_neuronx.errors import BackendError, StepError


def make_spec(
    plan: LoadPlan,
    vocab_size: int,
    lengths: Iterable[int],
    *,
    largest_top_k: int | None = None,
    **facts: Any,  # noqa: ANN401
) -> ModelSpec:
    """Return the spec of a plan's model. `lengths`: those that decode graphs exist for; `facts`: its other fields."""
    limit = plan.max_model_len
    return ModelSpec(
        num_slots=plan.num_slots,
        max_model_len=limit,
        prefill_buckets=plan.prefill_buckets,
        token_buckets=(*sorted(length for length in lengths if length < limit), limit),
        vocab_size=vocab_size,
        eos_ids=plan.eos_ids,
        largest_top_k=largest_top_k,
        default_top_k=largest_top_k if plan.default_top_k else None,
        **facts,
    )


class SlotBackend(ABC):
    """The part of a `Backend` that all share: checks of the steps, and the number of tokens in each slot."""

    name: ClassVar[str]
    """The backend's name in messages."""

    def __init__(self, spec: ModelSpec, model: Any) -> None:  # noqa: ANN401
        """Every slot is empty. `model`: runs the steps; `close` drops it."""
        self.spec = spec
        self._model = model
        self._prefixes: Prefixes | None = None
        if spec.prefix_block:
            self._prefixes = Prefixes(spec.num_slots, spec.max_model_len)
        self._filled = np.zeros(spec.num_slots, np.int64)
        self._num_reprefilled = 0
        """Tokens that the present step has prefilled again."""
        self._ran: Step | None = None
        """The step that ran last, if no slot has changed hands since."""

    @abstractmethod
    def _run(self, step: Step) -> StepOutput:
        """Run a step that has been checked."""

    def _reuse(self, source: int, slot: int, count: int) -> int:  # noqa: ARG002
        """Give `slot` the first `count` tokens in the cache of `source`, which may be the slot itself.

        Returns how many of them it has then. Also called for 0 of them.
        """
        return 0

    def _spoilt(self, slots: Int32Array, output: StepOutput) -> npt.NDArray[np.bool_]:  # noqa: ARG002
        """Return bool[B]: rows of a step whose cache may hold NaN, which no other sequence must get."""
        assert output.logits is not None  # noqa: S101  (a device that samples has its own evidence)
        # One logit of each column shows it: the output layer spreads NaN.
        return np.asarray(~np.isfinite(output.logits[:, :, 0]).all(axis=1))

    def cached(self, prompt_ids: Sequence[int], adapter: int, salt: str = "") -> int:
        """Return how many tokens of a prompt are in the cache, in whole blocks of `ModelSpec.prefix_block`."""
        if self._prefixes is None:
            return 0
        longest = int(self._prefixes.find(prompt_ids, (adapter, salt)).max())
        return longest - longest % self.spec.prefix_block

    def place(
        self, free: Sequence[int], prompt_ids: Sequence[int], adapter: int, salt: str = ""
    ) -> int:
        """Return the lowest slot, so that small batches stay dense, or the one that `Prefixes` chooses."""
        if self._prefixes is None:
            return free[0]
        return self._prefixes.choose(free, prompt_ids, (adapter, salt))

    def acquire(self, slot: int, prompt_ids: Sequence[int], adapter: int, salt: str = "") -> int:
        """Empty a slot for a prompt, but for a prefix that is in the cache."""
        self._filled[slot], self._ran = 0, None
        if self._prefixes is not None:
            source, count = self._prefixes.take(slot, prompt_ids, (adapter, salt))
            count = self._reuse(source, slot, count)
            self._prefixes.keep(slot, prompt_ids, count)
            self._filled[slot] = count
        return int(self._filled[slot])

    def release(self, slots: Sequence[int]) -> None:
        """Empty these slots; a decode of an empty slot is refused."""
        self._filled[list(slots)], self._ran = 0, None
        if self._prefixes is not None:
            self._prefixes.touch(slots)

    def set_adapter(self, place: int, folder: Path | None) -> None:
        """See `Backend`. What is cached is forgotten first, whatever becomes of the adapter."""
        if not 1 <= place <= self.spec.num_adapters:
            message = f"adapter place {place} does not exist; expected 1 to {self.spec.num_adapters} (max_loras)"
            raise BackendError(message)
        self._forget(place)
        self._set_adapter(place, folder)

    def _forget(self, place: int) -> None:
        """Forget what is cached for an adapter's place."""
        if self._prefixes is not None:
            self._prefixes.forget(place)

    def _set_adapter(self, place: int, folder: Path | None) -> None:
        """Load an adapter into a place, or empty it; see `Backend.set_adapter`.

        Raises:
            BackendError: always, unless `ModelSpec.changes_adapters`.
        """
        message = f"the {self.name} backend cannot load {folder} into place {place} while it runs"
        raise BackendError(message)

    def run(self, step: Step) -> StepOutput:
        """Run a step.

        Raises:
            StepError: it breaks a limit of the spec, or the device failed; `fatal` if the device is lost.
            DeviceMemoryError: the device is out of memory.
        """
        if self._model is None:
            message = (
                f"the {self.name} backend is closed; expected no more steps. Load the model again"
            )
            error = StepError(message)
            error.fatal = True
            raise error
        parts = step.parts
        if not self._repeats(step):
            self._check_step(step)
        self._num_reprefilled, self._ran = 0, None
        try:
            output = self._run(step)
        except Exception as error:
            # The cache of these rows is undefined from their starts on.
            for _, rows in parts:
                self._filled[rows.slots] = rows.starts
                if self._prefixes is not None:
                    self._prefixes.cut(rows.slots, rows.starts)
            count = sum(len(rows.slots) for _, rows in parts)
            raise of_step(error, f"a {step.kind} step of {count} rows") from error
        self._note(parts, output)
        self._ran = step
        output.num_reprefilled = self._num_reprefilled
        return output

    def _note(self, parts: Sequence[tuple[PartKind, Rows]], output: StepOutput) -> None:
        """Record what the slots hold after a step; for prefixes, nothing of one that may hold NaN."""
        for _, rows in parts:
            self._filled[rows.slots] = rows.starts + rows.lens
        if self._prefixes is None and not self.spec.num_fused_drafts:
            return
        slots = np.concatenate([rows.slots for _, rows in parts])
        if self.spec.num_fused_drafts and output.ids is not None:
            self._filled[slots] += np.count_nonzero(output.ids[:, 1:] >= 0, axis=1)
        if self._prefixes is None:
            return
        for _, rows in parts:
            self._prefixes.note(rows)
        spoilt = self._spoilt(slots, output)
        if spoilt.any():
            self._prefixes.cut(slots[spoilt], 0)

    def _check_step(self, step: Step) -> None:
        parts = step.parts
        if self.spec.mixed_steps:
            check_budget([rows for _, rows in parts], self.spec)
        elif len(parts) > 1:
            refuse("a mixed step", "a prefill or a decode")
        for kind, rows in parts:
            self._check(kind, rows)

    def _repeats(self, step: Step) -> bool:
        """Return True for the decode that ran last, each row one position further: all else has been checked."""
        rows = step.decode
        if step is not self._ran or rows is None or step.prefill is not None:
            return False
        filled = self._filled[rows.slots]
        return bool((rows.starts == filled).all() and filled.max() < self.spec.max_model_len)

    def close(self) -> None:
        """Drop the model: the device's memory is free with the last reference."""
        self._model = None
        gc.collect()  # the model's parts refer to one another

    def _check(self, kind: PartKind, rows: Rows) -> None:
        """Refuse a part of a step that breaks a limit of the spec or does not fit the tokens in its slots.

        Raises:
            StepError: the first limit that is broken, with the value.
        """
        check_rows(rows, self.spec)
        cached, longest = self._filled[rows.slots], self.spec.prefill_buckets[-1]
        if (rows.starts > cached).any():
            refuse(f"starts {rows.starts.tolist()}", f"at most the cached {cached.tolist()}")
        if kind == "decode":
            if not rows.starts.all():
                refuse(f"a decode of slots {rows.slots.tolist()}", "slots that hold a prompt")
            width, columns = rows.input_ids.shape[1], 1
            if rows.wants == Want.ALL_LOGITS:
                columns += self.spec.num_speculative_tokens
            if width != columns:
                refuse(f"a decode of {width} columns", f"{columns} for each row")
        elif rows.lens.max() > longest:
            refuse(f"a prompt of {rows.lens.max()} tokens", f"at most {longest}")
        elif len(rows.slots) > self.spec.max_prefill_batch:
            refuse(f"{len(rows.slots)} prompts", f"at most {self.spec.max_prefill_batch}")


def record(history: Int32Array, filled: npt.NDArray[np.int64], rows: Rows) -> Int32Array:
    """Write the tokens of `rows` into `history`, int32[slots, positions], of a static batch.

    `filled`: the number of tokens that each slot had. Returns int32[slots]: the same with those of `rows`.
    """
    lens = filled.astype(np.int32)
    lens[rows.slots] = rows.starts + rows.lens
    for slot, start, count, new in zip(
        rows.slots, rows.starts, rows.lens, rows.input_ids, strict=True
    ):
        history[slot, start : lens[slot]] = new[:count]
    return lens

"""The steps of NxD Inference: continuous batching, and static batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from djl_python_neuronx.backends.adapters import read_matrices
from djl_python_neuronx.backends.base import Int32Array, PartKind, Rows, Step, StepOutput, Want
from djl_python_neuronx.backends.faults import of_step
from djl_python_neuronx.backends.nxdi.adapters import Places
from djl_python_neuronx.backends.nxdi.calls import Calls
from djl_python_neuronx.backends.nxdi.model import rolls
from djl_python_neuronx.backends.nxdi.nan import Doubts, Mender
from djl_python_neuronx.backends.nxdi.outputs import answer
from djl_python_neuronx.backends.nxdi.rows import SlotRows
from djl_python_neuronx.backends.nxdi.spec import read_spec
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.backends.shapes import check_top_k, refuse
from djl_python_neuronx.backends.slots import SlotBackend, record


class ContinuousBackend(SlotBackend):
    """Each slot has its own position; prompts run one at a time.

    A decode names every slot up to the highest live one, in order. A row that the library adds itself would write the
    first row's keys and values, and with fewer rows than compiled for it takes row i for slot i. So the arrays hold
    each slot's last token and position, which are written again unchanged; a free slot's go to a position that its next
    sequence overwrites.

    In a cache that is a ring (`model.rolls`) no live position is written twice: it lies over the oldest key that its
    own step reads, so the step again would miss that key and read itself. What is written there:
    - by a prompt the whole ring of its slot, padding included, and nothing else. So no doubt is left to a later
      sequence, and `acquire` writes nothing. NaN in gpt_oss's layers without a ring stays, beyond the next prompt;
    - by a decode the next position of every live slot (`_check`), and one of each free slot;
    - by a step ahead, which the library itself may drop, nothing: planning leaves `async_mode` out.
    """

    name = "nxdi"

    _model: Calls

    def __init__(self, application: Any, plan: LoadPlan, **of_mode: Any) -> None:  # noqa: ANN401
        """Every slot is empty. `application`: loaded; `of_mode`: see `read_spec`."""
        spec = read_spec(application, plan, **of_mode)
        super().__init__(spec, Calls(application, spec))
        self._newest = SlotRows(spec)
        self._doubts = Doubts(spec.num_slots)
        self._rolls = plan.code is None and rolls(application.config)
        self._places = Places(application) if spec.num_adapters else None

    def _run(self, step: Step) -> StepOutput:
        [(kind, rows)] = step.parts
        with torch.inference_mode():
            return (self._decode if kind == "decode" else self._prefill)(rows)

    def acquire(self, slot: int, prompt_ids: Sequence[int], adapter: int, salt: str = "") -> int:
        """Empty a slot for a prompt, without NaN beyond what the prompt overwrites."""
        length = min(len(prompt_ids), self._model.prompt_buckets[-1])
        doubtful = self._doubts.of(slot, self._model.prompt_bucket(length))
        if doubtful and not self._rolls:
            try:
                with torch.inference_mode():
                    self._mender(slot).mend(doubtful, self._blank)
            except Exception as error:
                raise of_step(error, f"clearing slot {slot}") from error
        self._doubts.forget(slot)
        return super().acquire(slot, prompt_ids, adapter, salt)

    def release(self, slots: Sequence[int]) -> None:
        """Empty these slots."""
        super().release(slots)
        self._newest.forget(slots)

    def _set_adapter(self, place: int, folder: Path | None) -> None:
        assert self._places is not None  # noqa: S101  (there are places)
        self._places.write(place, {} if folder is None else read_matrices(folder))

    def _check(self, kind: PartKind, rows: Rows) -> None:
        """Refuse what `SlotBackend._check` refuses, and shapes that the library has no graphs for."""
        super()._check(kind, rows)
        if self._rolls and rows.starts.any() and np.count_nonzero(self._filled) > len(rows.slots):
            refuse(f"a decode of slots {rows.slots.tolist()}", "all that hold tokens, in a ring")
        if self.spec.largest_top_k is not None:
            check_top_k(rows, self.spec.largest_top_k)
            if (rows.sampling[:, 1] < 1).any():
                refuse(f"top_p {rows.sampling[:, 1].tolist()}", "1 on the device")

    def _prefill(self, rows: Rows) -> StepOutput:
        if rows.starts.any():
            return self._continue(rows)
        slots, ids, lens = rows.slots, rows.input_ids, rows.lens
        self._newest.keep(slots, ids[:, lens[0] - 1], lens - 1, rows.sampling)
        output = self._model.prefill(
            slots, ids, lens, self._newest.sampling[slots], rows.adapters.copy()
        )
        return self._answer(output, rows, self._model.prompt_bucket(int(lens[0])))

    def _continue(self, rows: Rows) -> StepOutput:
        """Run a row's tokens behind those in the cache, one decode each: no graph reads a prompt from there on."""
        one = replace(rows, lens=np.ones_like(rows.lens))
        for column in range(int(rows.lens[0])):
            ids = rows.input_ids[:, column : column + 1]
            output = self._decode(replace(one, input_ids=ids, starts=rows.starts + column))
        return output

    def _decode(self, rows: Rows) -> StepOutput:
        slots, spoilt = rows.slots, self._spoilt_rows(rows)
        self._newest.keep(slots, rows.input_ids[:, 0], rows.starts, rows.sampling)
        ids, positions, sampling = self._newest.first(self._model.num_rows(int(slots[-1])))
        if (width := rows.input_ids.shape[1]) > 1:
            ids = np.pad(ids, ((0, 0), (0, width - 1)))
            ids[slots] = rows.input_ids
            output = self._model.verify(ids, positions, sampling)
            return self._answer(output, rows, rows.starts + width)
        placed = self._placed(positions, rows)
        output = self._model.decode(ids, positions, sampling, rows, **placed)
        found = self._answer(output, rows, rows.starts + self._model.num_written)
        if found.ids is not None:
            found.ids[spoilt] = -1
        return found

    def _spoilt_rows(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return bool[B]: rows whose device samples from NaN, which no logits show. Not in a ring: trying writes."""
        tried = rows.wants == self.spec.outputs == Want.TOKENS and not self._rolls
        slots = self._doubts.repeating(rows.slots) if tried else []
        spoilt = [slot for slot in slots if self._mender(slot).is_row_spoiled()]
        return np.isin(rows.slots, spoilt)

    def _mender(self, slot: int) -> Mender:
        return Mender(self._model, slot, self._filled, self._placed)

    def _placed(
        self,
        positions: Int32Array,  # noqa: ARG002
        rows: Rows | None = None,  # noqa: ARG002
    ) -> dict[str, torch.Tensor]:
        """Return the inputs of a cache in blocks for a decode at `positions`, which writes `rows`, or nothing."""
        return {}

    def _answer(self, output: Any, rows: Rows, ends: Int32Array | int) -> StepOutput:  # noqa: ANN401
        """Return the output of `rows`; `ends`: see `Doubts.note`."""
        found = answer(output, rows, self.spec)
        self._doubts.note(rows, ends, found)
        return found

    def _blank(self, slot: int, length: int) -> None:
        """Write the first columns of a free slot."""
        self._model.blank(np.array([slot], np.int32), length)


class StaticBackend(ContinuousBackend):
    """Static batches that sequences can join and leave: prompts run together, in one call for all slots.

    The call rewrites every slot, so each slot's tokens are kept, and when a sequence joins all of them prefill
    again. A sequence that leaves costs nothing. Free slots are rows of one token.
    """

    def __init__(self, application: Any, plan: LoadPlan) -> None:  # noqa: ANN401
        """Every slot is empty. `application`: loaded."""
        super().__init__(application, plan, max_prefill_batch=plan.num_slots, joins="reprefill")
        self._slots = np.arange(plan.num_slots, dtype=np.int32)
        self._history = np.zeros((plan.num_slots, plan.max_model_len), np.int32)
        self._adapters = np.zeros(plan.num_slots, np.int32)
        self._stale = False
        """A prefill has failed: the cache of every slot is undefined."""

    def _prefill(self, rows: Rows) -> StepOutput:
        """Prefill all sequences from their first tokens on."""
        slots, lens = rows.slots, record(self._history, self._filled, rows)
        newest = lens[slots] - 1
        self._newest.keep(slots, self._history[slots, newest], newest, rows.sampling)
        self._adapters[slots] = rows.adapters
        self._stale = True  # until the call has succeeded
        output = self._model.prefill(
            self._slots, self._history, lens, self._newest.sampling.copy(), self._adapters.copy()
        )
        self._stale = False
        self._num_reprefilled = int(lens.sum() - rows.lens.sum())
        bucket = self._model.prompt_bucket(int(lens.max()))
        self._doubts.spread(np.flatnonzero(lens), bucket)
        return self._answer(output, rows, bucket)

    def _blank(self, slot: int, length: int) -> None:  # noqa: ARG002  (all at once)
        """Write the first columns of every slot: the next step prefills all sequences again."""
        self._stale = True
        self._model.blank(self._slots, length)

    def _decode(self, rows: Rows) -> StepOutput:
        self._history[rows.slots, rows.starts] = rows.input_ids[:, 0]
        return self._prefill(rows) if self._stale else super()._decode(rows)

"""The steps of NxD Inference: continuous batching, and static batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from djl_python_neuronx.backends.base import (
    DeviceTokens,
    Float32Array,
    HostLogits,
    Int32Array,
    ModelSpec,
    PartKind,
    Rows,
    StepKind,
    StepOutput,
    Want,
)
from djl_python_neuronx.backends.faults import of_step
from djl_python_neuronx.backends.nxdi.ahead import StepAhead
from djl_python_neuronx.backends.nxdi.model import rolls
from djl_python_neuronx.backends.nxdi.nan import Doubts
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.backends.shapes import check_top_k, choose_bucket, refuse
from djl_python_neuronx.backends.slots import DeviceBackend, record

_GREEDY = (1.0, 1.0, 1.0)
TEMPERATURES = 0.0, 100.0
"""The library drops tokens by a logit of -3000, which it then divides by the temperature: from about 150 on they are
drawn (modules/generation/sampling.py, 0.9)."""
_NO_TOP_P = 2.0
"""A top_p with which the device keeps every token. The library leaves out each with which the sum of probabilities is
above top_p (modules/generation/sampling.py, 0.9), and a rounded sum may be above 1: with top_k 2, of one row in 50, so
that its second token is never drawn."""
_FREE = 1
"""Position of a free slot in a decode: position 0 would make a prefill of the call."""
_PROBES = 4
"""Tokens to try before one that follows all of them is taken for the one that NaN yields: clearing a slot takes a call
for each layer, or many."""


class ContinuousBackend(DeviceBackend):
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

    The library takes the smallest bucket that is longer than the attention mask. The masks here are one column shorter
    than the bucket that is meant: a prompt's is not read if it is padded on the right, and the token of a decode is not
    in it.
    """

    name = "nxdi"

    def __init__(self, application: Any, plan: LoadPlan) -> None:  # noqa: ANN401
        """Every slot is empty. `application`: loaded."""
        super().__init__(_make_spec(application, plan), application)
        self._prompt_buckets = _lengths(application.context_encoding_model)
        self._batches = self.spec.decode_slots or (plan.num_slots,)
        self._ids = np.zeros((plan.num_slots, 1), np.int32)
        self._positions = np.full((plan.num_slots, 1), _FREE, np.int32)
        self._default = self.spec.fixed_sampling or _GREEDY
        self._sampling = np.tile(np.array(self._default, np.float32), (plan.num_slots, 1))
        self._slots = torch.arange(plan.num_slots, dtype=torch.int32)
        self._columns = np.arange(plan.max_model_len, dtype=np.int32)
        self._ahead = StepAhead(application) if application.neuron_config.async_mode else None
        self._rolls = rolls(application.config)
        self._doubts = Doubts(plan.num_slots)
        # It refuses `_NO_TOP_P`; `_check` has looked at the rows.
        application.validate_sampling_params = lambda _: None
        self._bucket = 0
        """Columns that the last prefill has written."""

    def _run(self, kind: StepKind, rows: Rows) -> StepOutput:
        with torch.inference_mode():
            output = (self._decode if kind == "decode" else self._prefill)(rows)
        written = 1 if self._ahead is None else 2
        self._doubts.note(rows, rows.starts + written if kind == "decode" else self._bucket, output)
        return output

    def acquire(self, slot: int, prompt_ids: Sequence[int], adapter: int) -> int:
        """Return 0: no prefix is ever reused."""
        length = min(len(prompt_ids), self._prompt_buckets[-1])
        bucket = choose_bucket(length, self._prompt_buckets)
        if (doubtful := self._doubts.of(slot, bucket)) and not self._rolls:
            try:
                with torch.inference_mode():
                    self._mend(slot, doubtful)
            except Exception as error:
                raise of_step(error, f"clearing slot {slot}") from error
        self._doubts.forget(slot)
        return super().acquire(slot, prompt_ids, adapter)

    def release(self, slots: Sequence[int]) -> None:
        """Empty these slots."""
        super().release(slots)
        self._forget(slots)

    def close(self) -> None:
        """Drop the application: the runtime frees the device's memory with the last reference."""
        self._ahead = None
        super().close()

    def _check(self, kind: PartKind, rows: Rows) -> None:
        """Refuse what `SlotBackend._check` refuses, and shapes that the library has no graphs for."""
        super()._check(kind, rows)
        if kind == "decode" and rows.input_ids.shape[1] != 1:
            refuse(f"a decode of {rows.input_ids.shape[1]} columns", "one for each row")
        if self._rolls and rows.starts.any() and np.count_nonzero(self._filled) > len(rows.slots):
            refuse(f"a decode of slots {rows.slots.tolist()}", "all that hold tokens, in a ring")
        if self.spec.largest_top_k is not None:
            check_top_k(rows, self.spec.largest_top_k)
            if (rows.sampling[:, 1] < 1).any():
                refuse(f"top_p {rows.sampling[:, 1].tolist()}", "1 on the device")

    def _forget(self, slots: Sequence[int]) -> None:
        chosen = list(slots)
        self._ids[chosen], self._positions[chosen], self._sampling[chosen] = 0, _FREE, self._default

    def _mend(self, slot: int, doubtful: range) -> None:
        """Overwrite the doubtful positions of a free slot if one of them is NaN.

        No call clears a slot, and a prefill does not read the old values. Each decode that reads and rewrites the
        position cleans one more layer, so this repeats once per layer.
        """
        longest = self._prompt_buckets[-1]
        for turn in range(int(self._model.config.num_hidden_layers) + 1):
            if not self._is_spoiled(slot, doubtful.stop):
                return
            if turn == 0:
                self._blank(slot, longest)
            for position in range(max(doubtful.start, longest), doubtful.stop):
                self._decode_in(slot, 0, position, 1)

    def _is_spoiled(self, slot: int, end: int) -> bool:
        """Return whether a free slot's cache holds NaN before `end`, or may do so.

        Without logits: whether tokens from all over the vocabulary are followed by one and the same.
        """
        vocab_size, found = self.spec.vocab_size, set()
        for token_id in range(0, vocab_size, -(-vocab_size // _PROBES)):
            output = self._decode_in(slot, token_id, _FREE, end)
            if output.logits is not None:
                return not bool(output.logits[slot, 0, 0].isfinite())
            found.add(int(output.tokens[slot]))
            if len(found) > 1:
                return False
        return True

    def _blank(self, slot: int, length: int) -> None:
        """Write the first columns of a free slot."""
        self._encode([slot], np.zeros((1, length), np.int32), np.array([length], np.int32))

    def _decode_in(self, slot: int, token_id: int, position: int, length: int) -> Any:  # noqa: ANN401
        """Return the output where a token of a free slot attends to position 0, with a graph for `length` columns.

        All other rows write where their next token does.
        """
        num_rows, most = choose_bucket(slot + 1, self._batches), self.spec.max_model_len - 1
        ids, positions = self._ids[:num_rows].copy(), np.clip(self._filled[:num_rows], _FREE, most)
        ids[slot], positions[slot] = token_id, position
        mask = np.zeros((num_rows, choose_bucket(length, self.spec.token_buckets) - 1), np.int32)
        mask[:, 0] = 1
        if self._ahead is not None:
            self._ahead.drop(alone=True)
        return self._model(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(mask),
            position_ids=torch.from_numpy(positions[:, None].astype(np.int32)),
            seq_ids=self._slots[:num_rows],
            sampling_params=torch.ones(num_rows, 3),
        )

    def _remember(
        self, slots: Int32Array, ids: Int32Array, positions: Int32Array, rows: Rows
    ) -> None:
        """Keep the newest token of these slots, its position, and the parameters of their rows."""
        self._ids[slots, 0] = ids
        # Position 0 is no decode's: the first one will write position 1.
        self._positions[slots, 0] = np.maximum(positions, _FREE)
        if self.spec.largest_top_k is not None:
            self._sampling[slots] = rows.sampling
            self._sampling[slots, 1] = _NO_TOP_P

    def _prefill(self, rows: Rows) -> StepOutput:
        """Run each row alone, as the graphs of continuous batching take it."""
        if rows.starts.any():
            if len(rows.slots) > 1:
                refuse(f"prompts from {rows.starts.tolist()} on", "one at a time")
            return self._continue(rows)
        slots, ids, lens = rows.slots, rows.input_ids, rows.lens
        self._remember(slots, ids[np.arange(len(lens)), lens - 1], lens - 1, rows)
        answers = [
            self._encode([slot], ids[row : row + 1], lens[row : row + 1])
            for row, slot in enumerate(slots.tolist())
        ]
        return self._answer(answers, rows)

    def _continue(self, rows: Rows) -> StepOutput:
        """Run a row's tokens behind those in the cache, one decode each: no graph reads a prompt from there on."""
        self._bucket = int(rows.starts[0] + rows.lens[0])
        for column in range(int(rows.lens[0])):
            ids = rows.input_ids[:, column : column + 1]
            output = self._decode(replace(rows, input_ids=ids, starts=rows.starts + column))
        return output

    def _encode(self, slots: Sequence[int], ids: Int32Array, lens: Int32Array) -> Any:  # noqa: ANN401
        """Return the library's output for prompts of `lens` tokens, one row per slot; `ids`: int32[B, >= lens]."""
        self._bucket = bucket = choose_bucket(int(lens.max()), self._prompt_buckets)
        columns, ends = np.arange(bucket, dtype=np.int32), lens[:, None]
        # As the library pads, which finds a prompt's end by its largest position.
        inside = columns < ends
        positions = np.where(inside, columns, 1)
        tokens = np.zeros((len(lens), bucket), np.int32)
        width = min(bucket, ids.shape[1])
        tokens[:, :width] = np.where(inside[:, :width], ids[:, :width], 0)
        # One token would have two largest positions. The same one everywhere at position 0 gives the same output in
        # every column; the next tokens overwrite the others.
        alone = lens <= 1
        tokens[alone], positions[alone] = tokens[alone, :1], 0
        return self._model(
            input_ids=torch.from_numpy(tokens),
            attention_mask=torch.from_numpy(inside[:, : bucket - 1].astype(np.int32)),
            position_ids=torch.from_numpy(positions),
            seq_ids=torch.tensor(slots, dtype=torch.int32),
            sampling_params=torch.from_numpy(self._sampling[list(slots)]),
        )

    def _decode(self, rows: Rows) -> StepOutput:
        slots = rows.slots
        self._remember(slots, rows.input_ids[:, 0], rows.starts, rows)
        num_rows = choose_bucket(int(slots[-1]) + 1, self._batches)
        # Copies: the library changes parameters in place, and reads arrays after it has returned.
        ids, positions, sampling = (
            array[:num_rows].copy() for array in (self._ids, self._positions, self._sampling)
        )
        width = choose_bucket(int(positions.max()) + 1, self.spec.token_buckets) - 1
        if self._ahead is not None:
            # One column less than a bucket would keep every step synchronous.
            width = int(positions.max())
            if rows.wants == Want.TOKENS:
                self._ahead.settle(slots, ids, positions, sampling)
            else:
                self._ahead.drop(alone=True)
        mask = (self._columns[:width] < positions).astype(np.int32)
        output = self._model(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(mask),
            position_ids=torch.from_numpy(positions),
            seq_ids=self._slots[:num_rows],
            sampling_params=torch.from_numpy(sampling.copy()),
        )
        if self._ahead is not None:
            self._ahead.note(output.tokens.reshape(-1, 1).numpy(), positions, sampling)
        return self._answer([output], rows, None if len(slots) == num_rows else slots)

    def _answer(
        self, outputs: Sequence[Any], rows: Rows, chosen: Int32Array | None = None
    ) -> StepOutput:
        """Return arrays that the caller owns, of the rows `chosen` or of all."""
        columns, vocab_size = int(rows.wants != Want.NOTHING), self.spec.vocab_size
        logits: Float32Array | None = None
        on_host = self.spec.outputs == Want.LOGITS
        if on_host or Want.LOGITS in rows.wants:
            found = _joined([output.logits for output in outputs], chosen)
            logits = np.ascontiguousarray(found[:, :columns, :vocab_size], np.float32)
            if on_host:
                return HostLogits(logits)
        ids = _joined([output.tokens for output in outputs], chosen)
        ids = ids.reshape(len(rows.slots), -1)[:, :columns]
        if Want.LOGITS in self.spec.outputs:
            # One column is enough: the output layer spreads NaN over the whole vocabulary.
            shown = _joined([output.logits[:, 0, :1] for output in outputs], chosen)
            ids = np.where(np.isfinite(shown), ids, -1)
        # The vocabulary is padded to a multiple of the cores; only NaN yields a token of the padding.
        return DeviceTokens(np.where(ids < vocab_size, ids, -1).astype(np.int32), logits=logits)


class StaticBackend(ContinuousBackend):
    """Static batches that sequences can join and leave: prompts run together, in one call for all slots.

    The call rewrites every slot, so each slot's tokens are kept, and when a sequence joins all of them prefill
    again. A sequence that leaves costs nothing. Free slots are rows of one token.
    """

    def __init__(self, application: Any, plan: LoadPlan) -> None:  # noqa: ANN401
        """Every slot is empty. `application`: loaded."""
        super().__init__(application, plan)
        self._spec = replace(self._spec, max_prefill_batch=plan.num_slots, joins="reprefill")
        self._history = np.zeros((plan.num_slots, plan.max_model_len), np.int32)
        self._stale = False
        """A prefill has failed: the cache of every slot is undefined."""

    def _prefill(self, rows: Rows) -> StepOutput:
        """Prefill all sequences from their first tokens on."""
        slots, lens = rows.slots, record(self._history, self._filled, rows)
        self._remember(slots, self._history[slots, lens[slots] - 1], lens[slots] - 1, rows)
        self._stale = True  # until the call has succeeded
        output = self._encode(range(len(lens)), self._history, lens)
        self._stale = False
        self._num_reprefilled = int(lens.sum() - rows.lens.sum())
        return self._answer([output], rows, slots)

    def _blank(self, slot: int, length: int) -> None:  # noqa: ARG002  (all at once)
        """Write the first columns of every slot: the next step prefills all sequences again."""
        shape = (self.spec.num_slots, length)
        self._stale = True
        self._encode(
            range(shape[0]), np.zeros(shape, np.int32), np.full(shape[0], length, np.int32)
        )

    def _decode(self, rows: Rows) -> StepOutput:
        self._history[rows.slots, rows.starts] = rows.input_ids[:, 0]
        return self._prefill(rows) if self._stale else super()._decode(rows)


def _joined(parts: Sequence[torch.Tensor], chosen: Int32Array | None) -> Any:  # noqa: ANN401
    arrays = [part.numpy() for part in parts]
    whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    return whole if chosen is None else whole[chosen]


def _lengths(wrapper: Any) -> tuple[int, ...]:  # noqa: ANN401
    """Return the lengths that graphs of a submodel exist for, ascending."""
    buckets = wrapper.neuron_config.buckets
    return tuple(sorted({b[1] if isinstance(b, list) else b for b in buckets}))


def _batches(wrapper: Any, num_slots: int) -> tuple[int, ...]:  # noqa: ANN401
    """Return the numbers of rows that decode graphs exist for, ascending."""
    buckets = wrapper.neuron_config.buckets
    return tuple(sorted({num_slots, *(b[0] for b in buckets if isinstance(b, list))}))


def _make_spec(application: Any, plan: LoadPlan) -> ModelSpec:  # noqa: ANN401
    config, limit = application.neuron_config, plan.max_model_len
    sampling = config.on_device_sampling_config
    dynamic = sampling is not None and sampling.dynamic
    vocab_size = int(application.config.vocab_size)
    largest = min(int(sampling.global_topk), vocab_size) if dynamic else None
    lengths = _lengths(application.token_generation_model)
    batches = _batches(application.token_generation_model, plan.num_slots)
    outputs = Want.LOGITS if sampling is None else Want.TOKENS
    if config.output_logits:
        outputs |= Want.LOGITS
    return ModelSpec(
        num_slots=plan.num_slots,
        max_model_len=limit,
        prefill_buckets=plan.prefill_buckets,
        token_buckets=(*(length for length in lengths if length < limit), limit),
        vocab_size=vocab_size,
        eos_ids=plan.eos_ids,
        decode_slots=batches if len(batches) > 1 else (),
        outputs=outputs,
        largest_top_k=largest,
        temperatures=TEMPERATURES,
        applies_top_p=False,
        default_top_k=largest if plan.default_top_k else None,
        fixed_sampling=None if sampling is None or dynamic else _fixed(sampling),
    )


def _fixed(sampling: Any) -> tuple[float, float, float]:  # noqa: ANN401
    """Return the top_k, top_p and temperature that every row is sampled with."""
    if not sampling.do_sample:
        return _GREEDY
    return float(sampling.top_k), float(sampling.top_p), float(sampling.temperature)

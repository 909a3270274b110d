"""Faults to plant: in the checkpoint that a model is made of, in what runs its steps, and in the sampler."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from djl_python_neuronx.backends import LoadPlan
from djl_python_neuronx.backends.base import Backend, Rows, Step, StepOutput, Want
from djl_python_neuronx.engine.sampler import Sampler
from djl_python_neuronx.errors import StepError
from djl_python_neuronx.verify.judge import judge
from djl_python_neuronx.verify.scenarios import run_scenarios


class Wrapped:
    """A backend with a fault; `spec` and whatever it does not do itself are those of the sound one."""

    def __init__(self, backend: Backend) -> None:
        self._sound = backend
        self.spec = backend.spec
        self.prompts: dict[int, list[int]] = {}
        """Slot to the newest prompt."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sound, name)

    def acquire(self, slot: int, prompt_ids: Any, adapter: int, salt: str = "") -> int:
        self.before = self.prompts.get(slot, [])
        self.prompts[slot] = [*prompt_ids]
        return self._sound.acquire(slot, prompt_ids, adapter, salt)

    def run(self, step: Step) -> StepOutput:
        return self._sound.run(step)

    def again(self, rows: Rows, ids: np.ndarray) -> StepOutput:
        """Prefill slots with other tokens in place of their own."""
        self._sound.release(rows.slots.tolist())
        for slot, row, length in zip(rows.slots.tolist(), ids, rows.lens, strict=True):
            self._sound.acquire(slot, row[:length].tolist(), 0, f"planted {row}")
        return self._sound.run(Step(prefill=replace(rows, input_ids=ids)))


class StaleLine(Wrapped):
    """Slot 2 keeps what a line of its cache had of the prompt before."""

    def run(self, step: Step) -> StepOutput:
        output, rows = self._sound.run(step), step.prefill
        if rows is not None and rows.slots.tolist() == [2] and rows.lens[0] > 1 < len(self.before):
            ids = rows.input_ids.copy()
            ids[0, 1] = self.before[1]
            self.again(rows, ids)
        return output


class LastToken(Wrapped):
    """Prompts that fill one of the buckets give the output of the token before the last."""

    bucket = 8

    def run(self, step: Step) -> StepOutput:
        rows = step.prefill
        if rows is None or len(rows.slots) > 1 or rows.lens[0] != self.bucket or rows.starts[0]:
            return self._sound.run(step)
        shorter = replace(rows, lens=rows.lens - 1)
        wrong = self.again(shorter, rows.input_ids)
        self.again(rows, rows.input_ids)
        return wrong


class OthersCache(Wrapped):
    """With three rows, slot 1 reads the cache of slot 0."""

    def run(self, step: Step) -> StepOutput:
        rows = step.decode
        if rows is None or rows.slots.tolist() != [0, 1, 2]:
            return self._sound.run(step)
        output = self._sound.run(step)
        for values in (output.logits, output.ids):
            if values is not None:
                values[1] = values[0]
        return output


class NotANumber(Wrapped):
    """The last row of four is not a number."""

    def run(self, step: Step) -> StepOutput:
        output = self._sound.run(step)
        if step.decode is not None and len(step.decode.slots) == 4 and output.logits is not None:
            output.logits[3] = np.nan
        return output


class FailedGraph(Wrapped):
    """The largest decode graph does not run."""

    def run(self, step: Step) -> StepOutput:
        if step.decode is not None and step.decode.starts.max() >= self.spec.token_buckets[-2]:
            message = "/home/me/secret"
            raise StepError(message)
        return self._sound.run(step)


class LostDevice(FailedGraph):
    """The largest decode graph ends the device."""

    def run(self, step: Step) -> StepOutput:
        try:
            return super().run(step)
        except StepError as error:
            error.fatal = True
            raise


class ThirdBest(Wrapped):
    """A device that returns tokens alone, and never the best one."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.spec = replace(
            backend.spec, outputs=Want.TOKENS, score_columns=0, fixed_sampling=(1.0, 1.0, 1.0)
        )

    def run(self, step: Step) -> StepOutput:
        known, logits = self.spec.vocab_size - 1, Want.LOGITS
        parts = {
            name: replace(
                rows,
                input_ids=rows.input_ids.clip(0, known),
                wants=logits if rows.wants else rows.wants,
            )
            for name, rows in step.parts
        }
        output = self._sound.run(Step(**parts))
        ids = None if output.logits is None else self.chosen(output.logits)
        return replace(output, ids=ids, logits=None)

    def chosen(self, logits: np.ndarray) -> np.ndarray:
        return np.argsort(logits, -1)[..., -3]


class Padding(ThirdBest):
    """The first row gets an id of the padded vocabulary."""

    def chosen(self, logits: np.ndarray) -> np.ndarray:
        ids = logits.argmax(-1)
        ids[0] = self.spec.vocab_size
        return ids


class OtherEnd(Wrapped):
    """Texts end with another token."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.spec = replace(backend.spec, eos_ids=frozenset({7}))


def rope_base(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["rope_theta"] = 500.0
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}


def swapped_head(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    """Two heads of queries, of different groups, in the last layer."""
    name = "model.layers.1.self_attn.q_proj.weight"
    heads = tensors[name].reshape(4, 8, -1).clone()
    heads[[1, 2]] = heads[[2, 1]]
    tensors[name] = heads.reshape(tensors[name].shape)


def attention_scale(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    for name in tensors:
        if name.endswith("q_proj.weight"):
            tensors[name] = tensors[name] * 0.8


def altered(folder: Path, into: Path, change: Callable[[Any, Any], None]) -> Path:
    """A checkpoint with a change."""
    shutil.copytree(folder, into)
    tensors = load_file(into / "model.safetensors")
    config = json.loads((into / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    (into / "config.json").write_text(json.dumps(config))
    return into


def ignore_top_p(patch: pytest.MonkeyPatch) -> None:
    assign = Sampler.assign

    def without(self: Sampler, slot: int, params: Any, *rest: Any) -> None:
        assign(self, slot, replace(params, top_p=1.0), *rest)

    patch.setattr(Sampler, "assign", without)


@dataclass(frozen=True)
class Fault:
    """A fault, and its place as findings have to name it: patterns of one finding's place and problem."""

    place: str
    problem: str
    checkpoint: Callable[[Any, Any], None] | None = None
    wrapper: type[Wrapped] | None = None
    patch: Callable[[pytest.MonkeyPatch], None] | None = None
    only: str = ".*"
    """All findings are of places that match."""


FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        "a wrong rope base": Fault(
            "all graphs", r"positions [1-9][^;]* 47 of 0 to 47", checkpoint=rope_base
        ),
        "a swapped head": Fault("all graphs", r"slots 0 to 3 of 0 to 3", checkpoint=swapped_head),
        "another scale of attention": Fault("all graphs|decode graph", "", attention_scale),
        "a stale line of the cache": Fault(
            "decode graph",
            r"slots 2 of 0 to 3; rows .*; positions .*; scenarios (prompts, )?slots",
            wrapper=StaleLine,
            only="decode|all graphs|slot 2|greedy requests",
        ),
        "a bucket off by one": Fault(
            "prefill graph of 8 tokens",
            r"positions 7 of 0 to 7; scenarios [\w, ]*prompts",
            wrapper=LastToken,
            only="prefill graph of 8 tokens|all graphs|greedy requests",
        ),
        "the cache of another slot": Fault(
            "decode graph", r"slots 1 of 0 to 3; rows 3 of", wrapper=OthersCache
        ),
        "not a number": Fault(
            "decode graph", r"slots 3 of 0 to 3; rows 4 of .*off by inf", wrapper=NotANumber
        ),
        "a graph that fails": Fault(
            "scenario lengths", r"StepError; .*\[3\], \[24\], \[1\]", wrapper=FailedGraph
        ),
        "a lost device": Fault(
            "scenario lengths", "StepError", wrapper=LostDevice, only="scenario lengths"
        ),
        "never the best token": Fault("all graphs", "", wrapper=ThirdBest),
        "an id outside the vocabulary": Fault(
            "greedy requests|all graphs", "token 97 is inf behind", wrapper=Padding
        ),
        "another end of text": Fault(
            "end of text", r"\[7\], in transformers with \[1\]", wrapper=OtherEnd
        ),
        "a sampler that ignores top_p": Fault(
            "sampling on the host", "top_p", patch=ignore_top_p, only="sampling on the host"
        ),
    }
)


def planted_in(
    plan: LoadPlan,
    fault: Fault,
    folder: Path,
    patch: pytest.MonkeyPatch,
    running: Callable[[LoadPlan], AbstractContextManager[Backend]],
) -> dict[str, Any]:
    """The outcome for a model with a fault; the plan names the sound one."""
    made = plan
    if fault.checkpoint is not None:
        made = replace(
            plan, model_dir=altered(plan.model_dir, folder / "altered", fault.checkpoint)
        )
    if fault.patch is not None:
        fault.patch(patch)
    with running(made) as backend:
        record = run_scenarios(fault.wrapper(backend) if fault.wrapper else backend, quick=True)
    return judge(record, plan)


def assert_named(found: dict[str, Any], fault: Fault) -> None:
    """A finding names the place of the fault, and none another one."""
    findings = found["findings"]
    assert any(
        re.match(fault.place, one["place"]) and re.search(fault.problem, one["problem"])
        for one in findings
    ), findings
    assert all(re.match(fault.only, one["place"]) for one in findings), findings
    assert "secret" not in str(found)

"""The connection between front and engine: each field of each message arrives with its value."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from djl_python_neuronx.backends.base import ModelSpec, Want
from djl_python_neuronx.backends.plan import LoadPlan, LoraPlan
from djl_python_neuronx.engine.core import StepResult
from djl_python_neuronx.engine.link import (
    REQUEST,
    SPEC,
    EngineState,
    Link,
    decode_step,
    encode_request,
)
from djl_python_neuronx.engine.runner import StepInfo
from djl_python_neuronx.engine.worker import WorkerSettings
from djl_python_neuronx.errors import BackendError, StepError
from djl_python_neuronx.loading.engine_process import _JOB, EngineJob, ModelJob
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.types import (
    EngineRequest,
    FinishReason,
    GenerationRequest,
    Scored,
    TokenOutput,
)


def all_set(value: Any, *usual: Any) -> Any:
    """A dataclass or named tuple none of whose fields has its default, or its value in `usual`."""
    if is_dataclass(value):
        names = [one.name for one in fields(value)]
    else:
        names = list(value._fields)
        usual += (type("Defaults", (), value._field_defaults),)
    absent = object()
    same = [
        name
        for name in names
        for other in usual
        if getattr(value, name) == getattr(other, name, absent)
    ]
    assert not same, f"give {same} of {type(value).__name__} another value than the default"
    return value


def crossed(send: Callable[[Link], None]) -> Any:
    """The message that the other side gets."""
    front, end = socket.socketpair()
    sender, receiver = Link(front), Link(end)
    send(sender)
    sender.close()
    message = receiver.receive()
    receiver.close()
    return message


SAMPLING = SamplingParams(
    temperature=0.5, top_k=4, top_p=0.75, min_p=0.125, repetition_penalty=1.5, seed=2**64 - 1,
    typical_p=0.25, presence_penalty=0.5, frequency_penalty=-2, logit_bias=((5, 1.5), (6, -100)),
    allowed_token_ids=(5, 6), bad_words=((5,), (6, 7)), bad_words_ids=((8,),), suppress_tokens=(9,),
    begin_suppress_tokens=(10, 11), no_repeat_ngram_size=3, min_new_tokens=4, min_length=12,
)  # fmt: skip
REQUESTED = EngineRequest(
    "a", [5, 6], SAMPLING, 9, frozenset({3, 4}), ignore_eos=True, logprobs=True, top_logprobs=2,
    scores_prompt=3, adapter=1, seed=3, given_ids=[7, 8], priority=-3, client="c", cache_salt="b",
    grammar="start: /a/", client_id="theirs", least_name="min_tokens",
)  # fmt: skip


def test_every_field_of_a_request_reaches_the_engine() -> None:
    all_set(REQUESTED, EngineRequest("", []))
    all_set(SAMPLING, SamplingParams())
    own = {**vars(REQUESTED), "stop_token_ids": frozenset({3})}
    message = encode_request(GenerationRequest(**own, stop_strings=("end",)), [4])
    kind, content = crossed(lambda link: link.send_encoded(message))
    assert (kind, REQUEST.validate_python(content)) == ("add", REQUESTED)


def test_a_request_for_more_than_a_device_can_count_reaches_the_engine() -> None:
    asked = EngineRequest("a", [5], SamplingParams(top_k=10**30), 10**30)
    got = REQUEST.validate_python(orjson.loads(encode_request(asked))[1])
    assert (got.sampling.top_k, got.max_new_tokens) == (2**31 - 1, 2**31 - 1)


def test_every_field_of_a_step_reaches_the_front() -> None:
    logits = np.array([[0, 3, 1, 2], [2, 0, 0, 4]], np.float32)
    sent = [
        TokenOutput("a", (1, 0), FinishReason.EOS, StepError("lost"), logits, 2),
        TokenOutput("b", (7,)),
        TokenOutput("c", (), logits=logits, scored=Scored(4, [0, 3])),
    ]
    info = all_set(
        StepInfo(
            "mixed", 64, 3, 40, 0.5, cache=128, slots=4, num_reprefilled=7, draft_s=0.25,
            draft_error=BackendError("no"), drafts=2, drafted=6, accepted=5, place="device",
            cached={"a": 4},
        )
    )  # fmt: skip
    state = all_set(EngineState(3, 2, speculates=False))
    kind, *content = crossed(lambda link: link.send_step(lambda: (StepResult(sent, info), state)))
    assert kind == "step"
    (outputs, got_info), got_state = decode_step(*content)
    assert got_state == state
    assert got_info is not None
    assert (type(got_info.draft_error), str(got_info.draft_error)) == (BackendError, "no")
    assert got_info._replace(draft_error=info.draft_error) == info

    first, plain, scored = outputs
    assert (type(first.error), str(first.error)) == (StepError, "lost")
    scores = np.log(np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True))
    assert first.logprobs == pytest.approx([scores[0, 1], scores[1, 0]], rel=1e-5)
    likeliest = [[token for token, _ in row] for row in first.top or ()]
    assert likeliest == [[1, 3], [3, 0]]
    values = [score for row in first.top or () for _, score in row]
    assert values == pytest.approx([scores[0, 1], scores[0, 3], *scores[1, [3, 0]]], rel=1e-5)
    assert (first.request_id, first.token_ids, first.finish_reason) == ("a", [1, 0], "eos_token")
    # Two fields stay in the engine, where log-probabilities are made of them.
    assert (first.logits, first.top_logprobs, first.scored) == (None, 0, None)
    assert plain == TokenOutput("b", [7])
    assert scored.scored == Scored(4, [0, 3], [4, 1])
    assert scored.logprobs == pytest.approx([scores[0, 0], scores[1, 3]], rel=1e-5)
    all_set(first._replace(logits=logits.tolist(), top_logprobs=2, scored=scored.scored))


SPECIFIED = ModelSpec(
    num_slots=3, max_model_len=64, prefill_buckets=(8, 16), vocab_size=300, eos_ids=frozenset({2, 4}),
    max_prefill_batch=2, token_buckets=(32, 64), decode_slots=(1, 3), outputs=Want.TOKENS | Want.LOGITS,
    largest_top_k=50, default_top_k=40, temperatures=(0.01, 2.0), applies_top_p=False,
    fixed_sampling=(1.0, 0.5, 0.25), mixed_steps=True, joins="reprefill", cache_buckets=(32, 96), cache_block=16,
    score_columns=6, num_speculative_tokens=4, num_fused_drafts=5, prefix_block=8, prefix_buckets=(16,), num_adapters=2,
    changes_adapters=True, simulated=True,
)  # fmt: skip


@pytest.mark.parametrize(
    "spec",
    [
        all_set(SPECIFIED, ModelSpec(0, 0, (), 0)),
        ModelSpec(4, 128, (8,), 300),
        replace(SPECIFIED, temperatures=(0.01, None)),
    ],
    ids=["all", "defaults", "no highest temperature"],
)
def test_the_front_gets_the_facts_of_the_model(spec: ModelSpec) -> None:
    facts = SPEC.dump_python(spec, mode="json")
    drafts = {"drafts": 4, "from": "prompt lookup"}
    kind, got, speculation = crossed(lambda link: link.send("ready", facts, drafts))
    assert (kind, SPEC.validate_python(got), speculation) == ("ready", spec, drafts)


def test_every_field_of_a_job_reaches_the_engine() -> None:
    lora = LoraPlan(4, 16, ("q_proj",), shard_linear=True, adapters=(Path("/adapters/a"),))
    all_set(lora, LoraPlan(0, 0, ()))
    plan = LoadPlan(Path("/models/a"), 4, 128, (64, 128), lora=lora)
    job = EngineJob(
        (ModelJob("tnx", plan, Path("/graphs")), ModelJob("cpu", plan)), ngram_prompt_lookup_max=3,
        decode_interleave=2, max_join_wait_s=0.5, worker=WorkerSettings(7.5, warm_up=True, num_adapters=1),
        logging=("DEBUG", "json"), copy=5, native_sampling=False, sampling_threads=4,
    )  # fmt: skip
    all_set(job, EngineJob(()))
    all_set(job.worker, WorkerSettings())
    all_set(job.models[0], ModelJob("", replace(plan, num_slots=1)))
    (content,) = crossed(lambda link: link.send(_JOB.dump_json(job).decode()))
    assert _JOB.validate_json(content) == job

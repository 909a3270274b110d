"""Features under traffic: questions that come at random, clients that leave, and an engine that is killed.

The right texts are those of transformers, of peft for an adapter, of greedy answers without a tie.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.clients.answers import MODEL

TIE = 0.02
"""Logits that are nearer to each other may come in another order in another sum."""
SHARED = (
    "one two three four five six seven eight nine ten one two three four five six seven eight nine"
)
"""Begins half of the prompts: a prefix to be read once."""
NUM_QUESTIONS, LONGEST = 12, 100
"""Questions to each model, and most tokens of their prompts."""


@dataclass(frozen=True)
class Feature:
    """Options, and the metrics that show them at work."""

    options: Mapping[str, str]
    metrics: tuple[str, ...] = ()
    adapters: Mapping[str, int] = field(default_factory=dict)
    """Name → seed of its weights."""
    changes: Callable[[Any], Any] = lambda model: model
    """Changes the weights of transformers' model to those that the feature computes with."""

    @property
    def names(self) -> tuple[str | None, ...]:
        """The base model, and the adapters."""
        return (None, *self.adapters)


@dataclass(frozen=True)
class Asked:
    """A request and its right text."""

    adapter: str | None
    prompt: str
    max_new_tokens: int
    text: str

    def body(self, *, stream: bool) -> dict[str, Any]:
        """The request, as LMI has it."""
        parameters = {"max_new_tokens": self.max_new_tokens, "do_sample": False}
        named = {} if self.adapter is None else {"adapters": self.adapter}
        return {"inputs": self.prompt, "parameters": parameters, "stream": stream, **named}


@cache
def prompts() -> tuple[str, ...]:
    """Prompts of the example model's own answers, every other one with a shared beginning."""
    lines = (MODEL / "checks.jsonl").read_text(encoding="utf-8").splitlines()
    known = [json.loads(line)["prompt"] for line in lines]
    short = [text for text in known if 8 < len(text) < 60]
    chosen = random.Random(6).sample(short, 3 * NUM_QUESTIONS)
    return tuple(f"{SHARED} {text}" if i % 2 else text for i, text in enumerate(chosen))


def questions(
    model: Any,
    adapter: str | None,
    seed: int,
) -> list[Asked]:
    """Questions with the texts that a model gives, none of which has a tie."""
    tokenizer, draw, found = (
        transformers.AutoTokenizer.from_pretrained(MODEL),
        random.Random(seed),
        [],
    )
    for prompt in draw.sample(prompts(), len(prompts())):
        count = draw.randint(4, 40)
        ids = tokenizer(prompt).input_ids
        if len(ids) > LONGEST:
            continue
        with torch.no_grad():
            made = model.generate(
                torch.tensor([ids]),
                max_new_tokens=count,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = torch.stack(made.logits)[:, 0].topk(2, dim=1).values
        if (best[:, 0] - best[:, 1]).min() > TIE:
            tokens = made.sequences[0].tolist()
            before = tokenizer.decode(ids, skip_special_tokens=True)
            text = tokenizer.decode(tokens, skip_special_tokens=True).removeprefix(before)
            found.append(Asked(adapter, prompt, count, text))
        if len(found) == NUM_QUESTIONS:
            return found
    message = f"only {len(found)} texts without a tie"
    raise AssertionError(message)


def save_adapter(folder: Path, seed: int) -> Any:
    """Write an adapter of random weights; returns peft's model with it."""
    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(MODEL)
    config = peft.LoraConfig(
        r=4 * seed, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(base, config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.copy_(torch.randn(value.shape, generator=generator) * 0.08)
    model.save_pretrained(folder)
    return model


def base_model() -> Any:
    """The example model of transformers."""
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL).eval()


def in_int8(model: Any) -> Any:
    """Round the layers' weights to int8, symmetric, with a scale for each output: the largest one is 127."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                scale = module.weight.abs().amax(dim=1, keepdim=True) / 127
                module.weight.copy_((module.weight / scale).round() * scale)
    return model


def prepared(feature: Feature, work: Path) -> tuple[dict[str, str], list[Asked]]:
    """The options of a feature, whose adapters are written, and all its questions."""
    options = dict(feature.options)
    asked = questions(feature.changes(base_model()), None, 1)
    places = []
    for name, seed in feature.adapters.items():
        asked += questions(save_adapter(work / name, seed), name, seed + 1)
        places.append(f"{name}={work / name}")
    if places:
        texts: Sequence[set[str]] = [
            {one.text for one in asked if one.adapter == name} for name in feature.names
        ]
        assert not set.intersection(*texts)
        options["adapters"] = ",".join(places)
    return options, asked

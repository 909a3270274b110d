"""Conversations of several users over one prefix: prompt tokens that are run, and the time to each turn's first token.

    .venv/bin/python benchmarks/conversation.py MODEL -o model_loader=cpu
    .venv/bin/python benchmarks/conversation.py MODEL -o model_loader=nxdi -o enable_prefix_caching=true --json
    .venv/bin/python benchmarks/conversation.py --save MODEL       # a small random llama, if there is none

Every user's prompt begins with the same `--prefix` tokens; a turn adds `--new` tokens and gets `--answer` tokens, and
the next one begins when it ends, without a pause. A user comes when the one before has its first token. The engine
runs in this process; nothing is encoded or sent.

`new`: prompt tokens that no turn before had in its prompt or answer. `run`: those that were not in the cache. `ratio`:
run over new. `first_ms`: the median time to the first token of the first turns of users, `later_ms`: of their later
turns; both with the waiting for a slot and for the prompts of others.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from djl_python_neuronx import backends
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.warmup import warm_up
from djl_python_neuronx.loading.compiled import obtain
from djl_python_neuronx.loading.prepare import prepare_or_raise
from djl_python_neuronx.planning.machines import named
from djl_python_neuronx.types import GenerationRequest


@dataclass
class User:
    """A conversation: its tokens, and the times of its turns."""

    history: list[int]
    begun_s: float = 0.0
    first_tokens_s: list[float] = field(default_factory=list)
    answered: int = 0


def save_model(folder: Path) -> None:
    """Write a small llama with random weights and room for 4,096 tokens."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


class Run:
    """The conversations of one run on an engine."""

    def __init__(self, engine: Engine, options: argparse.Namespace) -> None:
        """None has begun."""
        self._engine, self._options, self._draw = engine, options, random.Random(1)
        shared = self._tokens(options.prefix)
        self.users = [User([*shared]) for _ in range(options.users)]
        self.num_run = 0

    def _tokens(self, count: int) -> list[int]:
        return self._draw.choices(range(2, self._engine.spec.vocab_size), k=count)

    def begin(self, index: int) -> None:
        """Begin the next turn of a user, if there is one."""
        if index >= len(self.users) or len(self.users[index].first_tokens_s) >= self._options.turns:
            return
        user = self.users[index]
        user.history += self._tokens(self._options.new)
        user.begun_s, user.answered = time.monotonic(), 0
        self._engine.add(
            GenerationRequest(
                f"{index}-{len(user.first_tokens_s)}",
                [*user.history],
                max_new_tokens=self._options.answer,
                ignore_eos=True,
            )
        )

    def step(self) -> None:
        """Run a step, and begin the turns that may begin after it."""
        outputs, info = self._engine.step()
        for name, count in ({} if info is None else info.cached).items():
            self.num_run += len(self.users[int(name.partition("-")[0])].history) - count
        for output in outputs:
            if output.error is not None:
                raise output.error
            index = int(output.request_id.partition("-")[0])
            user = self.users[index]
            if not user.answered:
                user.first_tokens_s.append(time.monotonic() - user.begun_s)
                if len(user.first_tokens_s) == 1:
                    self.begin(index + 1)
            user.answered += len(output.token_ids)
            user.history += output.token_ids
            if output.finish_reason is not None:
                self.begin(index)


def measure(backend: Any, options: argparse.Namespace) -> dict[str, float]:  # noqa: ANN401
    """Return the numbers of one run, see above."""
    engine = Engine(backend)
    warm_up(engine)
    run = Run(engine, options)
    run.begin(0)
    while engine.has_work:
        run.step()
    new = options.prefix + options.new * options.users * options.turns
    first = [user.first_tokens_s[0] for user in run.users]
    later = [one for user in run.users for one in user.first_tokens_s[1:]]
    return {
        "new": new,
        "run": run.num_run,
        "ratio": round(run.num_run / new, 3),
        "first_ms": round(1000 * statistics.median(first), 1),
        "later_ms": round(1000 * statistics.median(later), 1),
    }


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="folder of a model")
    parser.add_argument("-o", dest="options", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--instance", help="the machine to plan for (default: this one)")
    for name, default in (
        ("prefix", 2048),
        ("users", 8),
        ("turns", 8),
        ("new", 128),
        ("answer", 16),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--save", action="store_true", help="write a small model there, and end")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.save:
        save_model(given.model)
        return 0
    settings = dict(one.split("=", 1) for one in given.options)
    machine = named(given.instance) if given.instance else None
    prepared = prepare_or_raise(
        None, given.model, environ=os.environ, overrides=settings, machine=machine
    )
    made = obtain(prepared, lambda: None)  # type: ignore[arg-type, return-value]
    backend = backends.get(prepared.backend).load(made.plan, made.folder)
    try:
        found = measure(backend, given)
    finally:
        backend.close()
    print(json.dumps(found) if given.json else "  ".join(f"{k} {v}" for k, v in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

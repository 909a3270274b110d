"""`djl-neuronx plan`: the cheapest instances, degree, slots and copies that serve a load within limits of time.

Each instance type, degree and number of slots that `check` accepts is a choice. Its instances are the fewest that
serve `MARGIN` times the load within the limits, in a simulation. docs/plan.md explains all.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any, Final, NamedTuple

import numpy as np

from djl_python_neuronx.backends.shapes import choose_bucket
from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.config.flags import above_zero
from djl_python_neuronx.config.sources import environment
from djl_python_neuronx.config.values import (
    SMALLEST_BUCKET,
    as_property,
    join_words,
    make_buckets,
    shortened,
)
from djl_python_neuronx.errors import ConfigError
from djl_python_neuronx.loading.check import Placement, check_all
from djl_python_neuronx.loading.report import Block, gib, write_blocks
from djl_python_neuronx.loading.targets import read_target
from djl_python_neuronx.planning.capabilities import round_up
from djl_python_neuronx.planning.machines import GIB, INSTANCES, DeviceInfo, legal_degrees, named
from djl_python_neuronx.planning.step_times import step_times
from djl_python_neuronx.simulation import Arrival, Record, host_s, simulate, spec_of, summarise

MARGIN: Final = 1.25
"""A plan serves so many times the load: copies are used 80 % at most, and the limits hold with a quarter more requests.

At 99 % a burst, or a time that was estimated too short, makes a queue.
"""
SLOTS: Final = (32, 16, 8, 4, 2, 1)
"""Numbers of slots that are tried. DJL Serving sends at most the first."""
SIMULATIONS: Final = 8
"""The limits hold in each. Together 1,600 requests or more: of a few hundred 1 % is by chance more or less."""
_TOKENS: Final = 60_000
"""Of a simulation, of 200 to 500 requests: a second."""
_RARE: Final = 0.01
"""Share that a 99th percentile leaves out."""


class Load(NamedTuple):
    """Requests, and the limits of their times."""

    rate: float
    """Requests a second."""
    prompts: tuple[int, int]
    """Tokens, from and to."""
    answers: tuple[int, int]
    ttft_s: float
    """Limit of the 99th percentile of times to the first token."""
    gap_s: float
    """The same between tokens."""

    def arrivals(self, rate: float, seed: int = 0) -> Iterator[Arrival]:
        """Yield arrivals of a Poisson process; all lengths are as frequent."""
        draw, time_s = np.random.default_rng(seed), 0.0
        for _ in range(max(200, min(500, _TOKENS // self.answers[1]))):
            time_s += draw.exponential(1 / rate)
            yield Arrival(time_s, *(int(draw.integers(*ends, endpoint=True)) for ends in self[1:3]))


class Choice:
    """An instance type, a degree and a number of slots, as `check` has judged them."""

    COLUMNS = ("instance", "degree", "slots", "copies", "instances", "cost", "result")

    def __init__(self, load: Load, hourly: float, placement: Placement) -> None:
        """Judge the choice. `hourly`: the price of an instance; without prices its chips."""
        self.load, self.hourly, self.placement = load, hourly, placement
        model, errors = placement.models[0], placement.findings.messages("error")
        self.case, self.settings, memory = model.case, model.resolved, model.planned.memory
        self.instance, self.degree = self.case.device.instance_type, self.case.degree
        self.slots, self.copies, self.instances, self.missed = self.case.slots, 0, 0, math.inf
        length, longest = self.case.options.max_model_len or 0, load.prompts[1] + load.answers[1]
        taken, host = model.host_bytes or 0, GIB * INSTANCES[str(self.instance)].host_memory_gib
        unknown = self.case.on_cpu or self.case.options.speculating or self.case.worlds > 1
        if 0 < length < longest:
            self.result = f"n_positions={length} is too short"
        elif memory is not None and not memory.fits:
            self.missed = memory.needed / memory.capacity
            self.result = f"needs {gib(memory.needed)} GiB a core, has {gib(memory.capacity)}"
        elif taken > host:
            self.missed = taken / host
            self.result = f"a load takes {gib(taken)} GiB of the host's memory, has {gib(host)}"
        elif errors:
            self.result = str(shortened(errors[0]))
        elif unknown or (spec := spec_of(self.case)).joins == "reprefill":
            self.result = "the times of CPUs, drafts, pipelines and static batches are not known"
        else:
            self.copies = len(placement.placed[0])
            self.spec, self.times = spec, step_times(self.case)
            self.positions = choose_bucket(longest, self.spec.token_buckets or (length,))
            self.start()

    def start(self) -> None:
        """Set the fewest instances that may do; with fewer, copies are used too much or prefills meet too often.

        The share of requests that come while a prefill has so long to go that they miss the limit, and of gaps that a
        prefill prolongs beyond it, is the rate of a copy times those seconds of a prefill, and those of a decode.
        """
        load = self.load
        lengths = enumerate({*np.linspace(*load.prompts, 32, dtype=int).tolist()})
        answer = min(2, load.answers[1])
        alone = self.serve(Arrival(1e6 * number, prompt, answer) for number, prompt in lengths)
        prefills_s = np.array([record.ttft_s for record in alone])
        decode_s = self.times.decode_s(self.slots, self.positions) + host_s(self.slots)
        decodes_s = (np.mean(load.answers) - 1) * decode_s
        self.alone_s = float(prefills_s.mean() + decodes_s)
        self.used = float(load.rate * (prefills_s.mean() + decodes_s / self.slots))
        if self.holds("alone", prefills_s.max(), decode_s if answer > 1 else 0.0):
            missing_s = np.maximum(prefills_s[:, None] + prefills_s - load.ttft_s, 0).mean()
            prolonged = np.mean(prefills_s + decode_s > load.gap_s) if self.slots > 1 else 0
            met_s = 0.0 if self.spec.mixed_steps else max(missing_s, decode_s * prolonged)
            copies = MARGIN * max(self.used, load.rate * met_s / _RARE)
            self.instances = math.ceil(copies / self.copies)

    @property
    def cost(self) -> float:
        """The price of all instances and an hour; without prices their chips."""
        return round(self.instances * self.hourly, 6)

    @property
    def utilisation(self) -> float:
        """The share of the throughput with full slots that the load takes."""
        return self.used / (self.copies * self.instances)

    @property
    def answer_s(self) -> float:
        """The time of an answer, which waits the longer the less a copy is idle."""
        return self.alone_s / (1 - self.utilisation)

    def serve(self, arrivals: Iterable[Arrival]) -> list[Record]:
        """Simulate one copy."""
        interleave, host = self.case.options.decode_interleave, host_s(self.slots)
        return simulate(self.spec, self.times, arrivals, host_s=host, decode_interleave=interleave)

    def serves(self) -> bool:
        """Simulate one copy with its share of `MARGIN` times the load, and return whether the limits hold each time.

        The last simulation remains.
        """
        rate = MARGIN * self.load.rate / (self.copies * self.instances)
        for seed in range(SIMULATIONS):
            self.found = summarise(self.serve(self.load.arrivals(rate, seed)))
            if not self.holds(f"{self.instances}", self.found.ttft_p99_s, self.found.gap_p99_s):
                return False
        return True

    def holds(self, when: str, ttft_s: float, gap_s: float) -> bool:
        """Return whether times are within the limits; the result has them."""
        self.missed = max(ttft_s / self.load.ttft_s, gap_s / self.load.gap_s)
        excess = f", {self.missed:.2f} times a limit" if self.missed > 1 else ""
        times = f"{1e3 * ttft_s:.0f} ms to the first token, {1e3 * gap_s:.1f} between tokens"
        self.result = f"{when}: {times}{excess}"
        return not excess


def cheapest(choices: Iterable[Choice]) -> Choice | None:
    """Return the cheapest choice, with as many instances as the limits take; None if there is none.

    Of several that cost the same, the one with the shortest answers is tried first.
    """
    possible = [one for one in choices if one.instances]
    while possible:
        one = min(possible, key=lambda one: (one.cost, one.answer_s))
        if one.serves():
            return one
        one.instances += max(1, one.instances // 16)
    return None


def list_choices(
    target: str, load: Load, prices: Mapping[str, float], overrides: Mapping[str, str]
) -> Iterator[Choice]:
    """Yield what `check` makes of each instance type in `prices`, degree and number of slots; what is set stays.

    Raises:
        ServingError: the model or its options cannot be read.
    """
    environ, tried, problems = environment(), [], Problems()
    settings, _ = read_target(target, environ, overrides, problems)
    problems.raise_errors()
    kept = {*settings.origins}
    if settings.options.enable_chunked_prefill:
        kept.add("context_length_estimate")  # there the tokens of a step
    longest = round_up(load.prompts[1], SMALLEST_BUCKET)
    positions = round_up(load.prompts[1] + load.answers[1], SMALLEST_BUCKET)
    for name, price in prices.items():
        machine = named(name)
        degrees = legal_degrees(machine.family, machine.neuron_cores)
        for degree, slots in product(degrees, SLOTS):
            offered = {
                "tensor_parallel_degree": degree,
                "max_rolling_batch_size": slots,
                "n_positions": positions,
                "context_length_estimate": make_buckets(longest),
                "replicas": "max",
            }
            given = {key: as_property(value) for key, value in offered.items() if key not in kept}
            if (name, given) not in tried:
                tried.append((name, given))
                given = {**overrides, **given}
                placement = check_all([target], environ=environ, overrides=given, machine=machine)
                if not placement.models:
                    placement.raise_errors()
                environ = {**environ, "HF_HUB_OFFLINE": "1"}  # it has been fetched
                yield Choice(load, price, placement)


def explain(plan: Choice, choices: Iterable[Choice]) -> dict[str, Any]:
    """Return the plan and the best slots of each instance type and degree, under the keys of docs/plan.md."""
    load, times, slots = plan.load, plan.times, plan.slots
    hours = 1e6 / (3600 * load.rate * np.mean(load.answers))
    longest = round_up(load.prompts[1], SMALLEST_BUCKET)
    best: dict[object, Choice] = {}
    for one in sorted(choices, key=lambda one: (one is not plan, not one.instances, one.cost)):
        best.setdefault((one.instance, one.degree), one)
    rows = [{name: getattr(one, name) for name in Choice.COLUMNS} for one in best.values()]
    return {
        "choices": rows,
        "plan": {
            **rows[0],
            "utilisation": round(plan.utilisation, 3),
            "instance_hours_per_million": round(plan.instances * hours, 3),
            "cost_per_million": round(plan.cost * hours, 3),
            "decode": times.decode.explained(1, 1, slots * plan.positions, slots),
            "prefill": times.prefill.explained(1, longest, longest**2),
            **{name: round(value, 4) for name, value in plan.found._asdict().items()},
        },
        "options": [
            f"option.{name}={as_property(value)}"
            for name, value, origin in plan.settings.explain()
            if not origin.startswith("default") and name != "model_dir"
        ],
        "warnings": plan.placement.findings.messages("warning"),
    }


def add_arguments(command: argparse.ArgumentParser, machine: Callable[[str], DeviceInfo]) -> None:
    """Add the flags of the command. `machine`: of an instance type."""

    def priced(text: str) -> tuple[str | None, float]:
        name, _, price = text.partition("=")
        return machine(name).instance_type, above_zero(float)(price)

    def lengths(text: str) -> tuple[float, ...]:
        ends = text.split("-", 1)
        return tuple(sorted(above_zero(int)(end) for end in (ends[0], ends[-1])))

    number, limit = above_zero(float), "limit of the 99th percentile of times"
    command.add_argument("model", help="model folder, .properties file, hub id or s3:// URI")
    for flag, kind, metavar, text, default in (
        ("rate", number, "R", "requests a second, a Poisson process", None),
        ("prompt-tokens", lengths, "N", "length of prompts, or a range as 512-2048", None),
        ("output-tokens", lengths, "N", "length of answers, or a range", None),
        ("ttft-ms", number, "MS", f"{limit} to the first token", math.inf),
        ("itl-ms", number, "MS", f"{limit} between tokens", math.inf),
        ("price-per-hour", priced, "TYPE=PRICE", "prices; no other type is tried", ()),
        ("instance", machine, "TYPE", "no other type is tried", ()),
    ):
        how: dict[str, Any] = {"metavar": metavar, "help": text, "default": default}
        how |= {"nargs": "+"} if default == () else {"required": default is None}
        command.add_argument(f"--{flag}", type=kind, **how)
    command.add_argument("--json", action="store_true", help="print JSON (keys: docs/plan.md)")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status of the process.

    Raises:
        ServingError: the model cannot be read, or no instance type serves the load.
    """
    limits = arguments.ttft_ms / 1e3, arguments.itl_ms / 1e3
    load = Load(arguments.rate, arguments.prompt_tokens, arguments.output_tokens, *limits)
    asked = [one.instance_type for one in arguments.instance]
    prices = dict(arguments.price_per_hour) or {
        one.name: one.devices for one in INSTANCES.values() if asked or one.family != "trn2"
    }
    asked = asked or [*prices]
    prices = {name: price for name, price in prices.items() if name in asked}
    if not prices:
        msg = f"--price-per-hour has no price of {join_words(asked)} (--instance); add it"
        raise ConfigError(msg)
    choices = [*list_choices(arguments.model, load, prices, dict(arguments.option))]
    plan = cheapest(choices)
    if plan is None:
        near = min(choices, key=lambda one: (not one.copies, one.missed))
        msg = (
            f"no instance type that was tried ({join_words(prices)}) serves this load within its limits; the nearest "
            f"is {near.instance} with tensor_parallel_degree={near.degree} and max_rolling_batch_size={near.slots}: "
            f"{near.result}. Raise the limit, shorten prompts or answers, or set quantize"
        )
        raise ConfigError(msg)
    shown = explain(plan, choices)
    if arguments.json:
        sys.stdout.write(json.dumps(shown, indent=2) + "\n")
        return 0
    rows = tuple(tuple(map(str, one.values())) for one in shown.pop("choices"))
    shown["plan"] = [f"{name}: {value}" for name, value in shown["plan"].items()]
    lists = [Block.of_lines(title.capitalize(), lines) for title, lines in shown.items()]
    write_blocks([Block("Choices", rows, Choice.COLUMNS), *lists], sys.stdout)
    return 0

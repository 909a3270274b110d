"""Does the device set the speed? Streams over HTTP, next to a loop that only calls the device.

    python benchmarks/device_bound.py --device sleep --json                    # the whole table, 10 minutes
    python benchmarks/device_bound.py --device sleep --rows 8 --vocab 32000 --step-ms 10.45 --engine-process both
    export TNX_SRC=<a checkout of transformers-neuronx> PYTHONPATH=<its CPU rig>:$TNX_SRC/src
    python benchmarks/device_bound.py                                        # the whole table, 15 minutes
    python benchmarks/device_bound.py --seconds 5 --runs 3 --settings greedy # a minute
    export NXDI_SRC=<a checkout of NxD Inference> NXD_SRC=<of neuronx-distributed> HF_HUB_OFFLINE=1
    export PYTHONPATH=<their CPU rig>:$NXDI_SRC/src:$NXD_SRC/src
    python benchmarks/device_bound.py --backend nxdi --step-ms 30              # the whole table, 13 minutes

`--device sleep`: the sim backend (`sleep_device.py`), which only waits, and costs the host nothing. One row for each
shape, setting and door, medians of `--runs` runs, the servers and the bare loop in turn:

* `door`: what the streams are read from. `embedded`: `djl-neuronx serve`. `djl_async`, `djl_rolling`: DJL's released
  Java engine in that mode, run by `tests/djl` (Java 17, Maven).
* `engine_process`: the option's value; `default`: it was not set.
* `format`: lmi: lines of JSON; chat: OpenAI's server-sent events of a chat, with the same prompt.
* `setting`: greedy; topk_topp: top_k 50 and top_p 0.9; topk_topp_rep: a repetition penalty of 1.1 too; topp: top_p 0.9
  alone; all but greedy at temperature 0.8. With `--device-samples` the device takes the likeliest token itself.
* `rows`, `vocab`: streams at once, and logits of each in a step.
* `device_us`: a step of the bare loop, a process that calls the device and nothing else.
* `step_us`: a step of the server while all streams run, by the times at which the device returned.
* `loss_us`: `step_us` less `device_us`: what the host adds to each step.
* `read_us`: one numpy maximum over a step's logits, after a sleep of a step: the least that sampling them costs.
* `clients_us`: CPU time per step of the clients, one process that reads all sockets every 50 ms, on the same cores;
  with DJL, of Java too.
* `arrived`: share of the tokens of a run that the clients read within it. Below 1 the text lags behind the device.

`--device rig` (the default): transformers-neuronx itself on one llama of random weights. XLA's CPU computes in place of
the device, and a program takes at least `--step-ms`: by default the published decode step of Llama-3-8B, whose
vocabulary it has, on an inf2.48xlarge with a batch of 8. The rig's sleep overshoots, so only ratios count.

* `ours`: `djl-neuronx serve` in a separate process, read over eight sockets by this one. The clock starts when all
  eight stream, and none of them ends within it.
* `bare`: another process, which calls the model with eight rows and takes the argmax. The two take turns.
* `ratio`: of the medians. `of_device`: the bare loop's share of what eight rows per `--step-ms` would be. Below 0.9
  the machine is busy or too slow to stand in for the device: `met` is then unknown (None).
* `host_us`: the critical path that `host_cost.py` finds for the setting, on flat logits as these are.
* `bound`: what `ratio` should reach: 0.98 for greedy; else a loss of `host_us` per step of the bare loop and 1 %.

`--backend nxdi`: the same with NxD Inference. `NXDI_RIG_EXEC_MS` is the least time of a decode step; the bare loop and
the server of a row have the same graphs. `host_us` is given where the host samples.

* `greedy`: the host samples. `device`: the device does. `bound` of both is 0.985.
* `async`: the device samples and runs one step ahead (`async_execution`); so does the bare loop. `bound` is 0.99.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import sleep_device
from host_cost import PROMPT_LEN, Case, measure
from sleep_device import endless, num_tokens, open_streams, process, save_tokenizer

from djl_python_neuronx.sampling import SamplingParams

VOCAB = 128_256
ROWS = 8
HIDDEN = 64
EXEC_MS = 10.45
"""Median time per output token: Llama-3-8B, int8, 8192 positions, tp 24, batch 8 (AWS Neuron SDK 2.18, benchmarks)."""
WARM_STEPS = 100
FIRST_LENGTH = 128
"""The shorter of two decode programs; it is left behind before the clock starts."""
POLL_S = 0.05
"""Clients that woke up for every token would take the server's cores; the sockets hold what comes meanwhile."""
QUIET_S = 1.0
SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "greedy": {},
        "topk_topp": {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
        "topp": {"temperature": 0.8, "top_p": 0.95},
    }
)
_SAMPLED = {"temperature": 0.8, "top_p": 0.9}
SLEEP_SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "greedy": {},
        "topk_topp": {**_SAMPLED, "top_k": 50},
        "topk_topp_rep": {**_SAMPLED, "top_k": 50, "repetition_penalty": 1.1},
        "topp": _SAMPLED,
    }
)
SHAPES = ((8, 32_000, 10.45), (8, 128_256, 10.45), (32, 32_000, 15.0), (128, 32_000, 25.0))
"""Rows, vocabulary and step in ms."""
DJL_MODES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "async": {"async_mode": "true", "rolling_batch": "disable"},
        "rolling": {"rolling_batch": "tnx"},
    }
)
PIPE_BYTES = 2**20
DOORS = ("embedded", "djl_async", "djl_rolling")
SLEEP_WARM_STEPS = 20
SLEEP_SPARE_S = 5.0
SLEEP_PROMPT_LEN = 16
TRUSTED = 0.9
ALLOWANCE = 0.01
NEURON_LS = """#!/bin/sh
echo '[{"neuron_device": 0, "nc_count": 2, "memory_size": 34359738368, "neuron_processes": []}]'
"""
"""The device that the server looks for before it loads a library."""
RUN = """
for line in sys.stdin:
    print(run(float(line)), flush=True)
"""
BARE_TNX = """
import sys, time, torch
from transformers_neuronx import ContinuousBatchingConfig, LlamaForSampling, NeuronConfig
folder, _, rows, prompt_len, warm_steps, *lengths = *sys.argv[1:3], *map(int, sys.argv[3:])
model = LlamaForSampling.from_pretrained(
    folder, batch_size=rows, tp_degree=1, n_positions=lengths, context_length_estimate=[prompt_len],
    neuron_config=NeuronConfig(continuous_batching=ContinuousBatchingConfig(batch_size_for_shared_caches=rows)))
model.to_neuron()
slots, prompts = torch.arange(rows), torch.arange(prompt_len).repeat(rows, 1)
print("ready", flush=True)

@torch.inference_mode()
def run(seconds):
    ids, position = model(prompts, prompts, slots).argmax(dim=1, keepdim=True), prompt_len
    end = None
    while end is None or time.perf_counter() < end:
        if position == prompt_len + warm_steps:
            began = time.perf_counter()
            end = began + seconds
        ids = model(ids, torch.full((rows, 1), position), slots).argmax(dim=1, keepdim=True)
        position += 1
    return rows * (position - prompt_len - warm_steps) / (time.perf_counter() - began)
"""
BARE_NXDI = """
import sys, time, torch
from neuronx_distributed_inference.models.llama.modeling_llama import NeuronLlamaForCausalLM as Llama
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config
folder, setting, rows, prompt_len, warm_steps, *lengths = *sys.argv[1:3], *map(int, sys.argv[3:])
on_device = setting != "greedy"
config = Llama.get_neuron_config_cls()(
    tp_degree=1, batch_size=rows, ctx_batch_size=1, tkg_batch_size=rows, is_continuous_batching=True,
    seq_len=lengths[-1], max_context_length=prompt_len, torch_dtype="float32", enable_bucketing=True,
    context_encoding_buckets=[prompt_len], token_generation_buckets=lengths, async_mode=setting == "async",
    on_device_sampling_config={"do_sample": False} if on_device else None)
model = Llama(folder, Llama.get_config_cls()(config, load_config=load_pretrained_config(folder)))
model.compile(folder + "/compiled-" + setting)
model.load(folder + "/compiled-" + setting)
slots, prompts = torch.arange(rows), torch.arange(prompt_len).repeat(rows, 1)
sampling = torch.ones(rows, 3)
print("ready", flush=True)

def call(ids, positions):
    output = model(input_ids=ids, position_ids=positions, seq_ids=slots, sampling_params=sampling.clone())
    tokens = output.tokens if on_device else output.logits[:, -1].argmax(dim=1)
    return tokens.reshape(rows, 1)

@torch.inference_mode()
def run(seconds):
    ids, position = call(prompts, torch.arange(prompt_len).repeat(rows, 1)), prompt_len
    end = None
    while end is None or time.perf_counter() < end:
        if position == prompt_len + warm_steps:
            began = time.perf_counter()
            end = began + seconds
        ids = call(ids, torch.full((rows, 1), position))
        position += 1
    return rows * (position - prompt_len - warm_steps) / (time.perf_counter() - began)
"""


@dataclass(frozen=True)
class Rig:
    """A library on its CPU rig."""

    library: str
    modules: tuple[str, ...]
    """Modules that must come from the rig's path."""
    path: str
    """The rest of the path."""
    bare: str
    """The loop that only calls the model. Arguments: folder, setting, rows, lengths."""
    exec_variable: str
    """Variable with the time of a step in ms."""
    settings: Mapping[str, Mapping[str, object]]
    """Row to the options that it needs of the server."""
    bounds: Mapping[str, float]
    """Row to what `ratio` should reach, where that does not follow from `host_us`."""


_DEVICE = {"on_device_generation": '{"do_sample": false, "dynamic": false}'}
RIGS: Mapping[str, Rig] = MappingProxyType(
    {
        "tnx": Rig(
            "transformers-neuronx",
            ("transformers_neuronx", "neuron_emulator"),
            "$TNX_SRC/src, where TNX_SRC is a checkout of transformers-neuronx",
            BARE_TNX + RUN,
            "NEURON_EMU_EXEC_MS",
            {name: {} for name in SETTINGS},
            {"greedy": 0.98},
        ),
        "nxdi": Rig(
            "NxD Inference",
            ("neuronx_distributed_inference", "neuronx_distributed", "_nxdi_rig"),
            "$NXDI_SRC/src:$NXD_SRC/src, checkouts of NxD Inference and of neuronx-distributed",
            BARE_NXDI + RUN,
            "NXDI_RIG_EXEC_MS",
            {"greedy": {}, "device": _DEVICE, "async": {**_DEVICE, "async_execution": "true"}},
            {"greedy": 0.985, "device": 0.985, "async": 0.99},
        ),
    }
)


def save_model(folder: Path, length: int) -> None:
    """Write a llama of one layer, whose logits vary by about 1, with a byte-level tokenizer of its whole vocabulary."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=length,
        initializer_range=HIDDEN**-0.5,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder, VOCAB)


def bare_times(bare: subprocess.Popen[str], seconds: float) -> list[float]:
    """Return what a bare loop measures: on the rig its tokens/s, on the sleeping device see `bare_loop`."""
    assert bare.stdin is not None
    assert bare.stdout is not None
    bare.stdin.write(f"{seconds}\n")
    bare.stdin.flush()
    return [float(word) for word in bare.stdout.readline().split()]


def served_rate(port: int, parameters: Mapping[str, Any], length: int, seconds: float) -> float:
    """Tokens/s of eight streams together."""
    with open_streams(port, ROWS, endless(PROMPT_LEN, length, parameters)) as streams:
        received = [num_tokens(stream.recv(2**16), b"HTTP/1.1 200") for stream in streams]

        def poll() -> tuple[int, float]:
            time.sleep(POLL_S)
            for i, stream in enumerate(streams):
                received[i] += num_tokens(stream.recv(2**20))
            return sum(received), time.perf_counter()

        while min(received) < WARM_STEPS:
            first, began = poll()
        last, now = first, began
        while now < began + seconds:
            last, now = poll()
    time.sleep(QUIET_S)  # the server ends what nobody reads any more
    return (last - first) / (now - began)


def compare(
    setting: str,
    bare: subprocess.Popen[str],
    port: int,
    length: int,
    step_ms: float,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """A row: the two in turns."""
    parameters = SETTINGS.get(setting, {})
    pairs = []
    for _ in range(options.runs):
        [bare_s] = bare_times(bare, options.seconds)
        ours_s = served_rate(port, parameters, length, options.seconds)
        print(f"{setting}: bare {bare_s:.1f}, ours {ours_s:.1f} tokens/s", file=sys.stderr)
        pairs.append((bare_s, ours_s))
    bare_s, ours_s = map(statistics.median, zip(*pairs, strict=True))
    host_us = None
    if setting in SETTINGS:  # the host samples
        case = Case(VOCAB, ROWS, setting, "flat", "json")
        sampling = SamplingParams(**parameters)
        host_us = measure(case, num_tokens=200, device_s=0.0, sampling=sampling)["critical_us"]
    bound = RIGS[options.backend].bounds.get(setting)
    if bound is None:
        bound = 1 - host_us / 1e6 * bare_s / ROWS - ALLOWANCE
    of_device = bare_s / ROWS * step_ms / 1e3
    return {
        "setting": setting,
        "bare": round(bare_s, 1),
        "ours": round(ours_s, 1),
        "ratio": round(ours_s / bare_s, 4),
        "of_device": round(of_device, 4),
        "host_us": host_us,
        "bound": round(bound, 4),
        "met": ours_s / bare_s >= bound if of_device >= TRUSTED else None,
    }


def rig_environ(rig: Rig, work: Path, step_ms: float) -> dict[str, str]:
    """Return the variables of processes on a rig, whose programs take at least `step_ms`; they share `work`."""
    seen = work / "bin" / "neuron-ls"
    seen.parent.mkdir()
    seen.write_text(NEURON_LS)
    seen.chmod(0o755)
    return {
        "PATH": f"{seen.parent}:{os.environ['PATH']}",
        rig.exec_variable: str(step_ms),
        "NEURON_RT_NUM_CORES": "1",
        "NEURON_COMPILE_CACHE_URL": str(work / "programs"),
        "DJL_CACHE_DIR": str(work / "cache"),
        # The rig copies with torch, whose threads spin while they wait: a device takes no such time from the host.
        "OMP_NUM_THREADS": "1",
        "NEURON_EMU_LOG_LEVEL": "WARNING",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def rig_options(backend: str, lengths: Sequence[str]) -> dict[str, object]:
    """Return the options that serve the model of `save_model` on a rig."""
    return {
        "model_loader": backend,
        "tensor_parallel_degree": 1,
        "dtype": "fp32",
        "n_positions": ",".join(lengths),
        "context_length_estimate": PROMPT_LEN,
        "max_rolling_batch_size": ROWS,
    }


def wait_bare(bare: subprocess.Popen[str]) -> None:
    """Return when a bare loop has its model."""
    assert bare.stdout is not None
    while (line := bare.stdout.readline()) != "ready\n":
        if not line:
            sys.exit("the bare loop could not load the model; its messages are above")


def require(rig: Rig) -> None:
    """End this process unless a rig can be imported."""
    missing = [name for name in rig.modules if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"{' and '.join(missing)} cannot be imported; expected {rig.library} and its CPU rig on PYTHONPATH. "
            f"Set PYTHONPATH=<rig>:{rig.path}"
        )


def rig_rows(options: argparse.Namespace, work: Path) -> Iterator[dict[str, Any]]:
    """A row for each setting, on the rig."""
    rig = RIGS[options.backend]
    step_ms = options.step_ms or EXEC_MS
    most_steps = options.seconds / step_ms * 1e3
    length = FIRST_LENGTH * (2 + int((PROMPT_LEN + WARM_STEPS + most_steps) / FIRST_LENGTH))
    save_model(work / "model", length)
    environ = rig_environ(rig, work, step_ms)
    lengths = [str(FIRST_LENGTH), str(length)]
    common = rig_options(options.backend, lengths)
    shapes = [str(number) for number in (ROWS, PROMPT_LEN, WARM_STEPS)]
    # Rows whose servers have the same options share them, and the bare loop.
    for _, group in itertools.groupby(options.settings, lambda name: rig.settings[name]):
        names = list(group)
        port = sleep_device.free_port()
        command = sleep_device.serve_command(
            work / "model", port, {**common, **rig.settings[names[0]]}
        )
        serve = ["-m", "djl_python_neuronx.cli", *command]
        bare_loop = ["-c", rig.bare, str(work / "model"), names[0], *shapes, *lengths]
        apart = {"BASE_COMPILE_WORK_DIR": f"{work / 'bare'}/"}
        with process(bare_loop, environ | apart) as bare, process(serve, environ) as server:
            sleep_device.wait_ready(server, port)
            wait_bare(bare)
            for name in names:
                yield compare(name, bare, port, length, step_ms, options)


class Embedded:
    """`djl-neuronx serve`, read over sockets."""

    name = "embedded"

    def __init__(self, port: int) -> None:
        self._port = port

    @contextlib.contextmanager
    def open(self, rows: int, payload: Mapping[str, Any]) -> Iterator[Callable[[], list[int]]]:
        """Streams of a payload, and a function that waits and returns how many tokens of each have arrived."""
        with open_streams(self._port, rows, payload) as streams:
            received = [num_tokens(stream.recv(2**16), b"HTTP/1.1 200") for stream in streams]

            def poll() -> list[int]:
                time.sleep(POLL_S)
                for i, stream in enumerate(streams):
                    received[i] += num_tokens(stream.recv(2**20))
                return list(received)

            yield poll
        time.sleep(QUIET_S)  # the server ends what nobody reads any more

    def reader_s(self) -> float:
        """CPU time of the clients so far."""
        return time.process_time()


class Released:
    """DJL's released Java engine, with a model in one of its modes; its driver writes what arrives to a pipe."""

    def __init__(self, mode: str, java: Any) -> None:  # noqa: ANN401
        self.name = f"djl_{mode}"
        self._java = java

    @contextlib.contextmanager
    def open(self, rows: int, payload: Mapping[str, Any]) -> Iterator[Callable[[], list[int]]]:
        """See `Embedded.open`."""
        answers = self._java.submit("sleep", *[payload] * rows)

        def poll() -> list[int]:
            time.sleep(POLL_S)
            if failed := [
                answer for answer in answers if answer.errors or answer.status not in {None, 200}
            ]:
                sys.exit(f"a stream has failed: {failed[0].errors} {failed[0].content[:500]!r}")
            return [sum(chunk.count(b"\n") for chunk in [*answer.chunks]) for answer in answers]

        yield poll
        for answer in answers:  # Java reports no client that leaves
            answer.wait()

    def reader_s(self) -> float:
        """CPU time of Java and of this process so far."""
        return time.process_time() + self._java.cpu_s()


Door = Embedded | Released


@contextlib.contextmanager
def open_door(name: str, folder: Path, engine_process: str, **shape: float) -> Iterator[Door]:
    """A server of a model folder; `shape`: see `sleep_device.options`."""
    model_options = sleep_device.options(engine_process, **shape)
    if name == "embedded":
        with sleep_device.sleep_server(folder, model_options) as port:
            yield Embedded(port)
        return
    mode = name.removeprefix("djl_")
    lines = ["engine=Python", "minWorkers=1", "maxWorkers=1", "option.entryPoint=sleep_device"]
    lines += [f"option.{key}={value}" for key, value in (model_options | DJL_MODES[mode]).items()]
    (folder / "serving.properties").write_text("\n".join(lines))
    with released_java(folder) as java:
        java.load("sleep", folder)
        yield Released(mode, java)


def released_java(work: Path) -> Any:  # noqa: ANN401
    """A JVM with the driver of `tests/djl`, whose output is read every `POLL_S`."""
    here = Path(__file__).parent
    sys.path.append(str(here.parent))
    from tests.djl.java import Java, compile_driver

    class Polled(Java):  # type: ignore[misc]
        def _lines(self) -> Iterator[bytes]:
            pipe = self._process.stdout.fileno()
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            rest = b""
            while data := os.read(pipe, PIPE_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                yield from lines
                time.sleep(POLL_S)

        def cpu_s(self) -> float:
            """CPU time of the JVM so far."""
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    (work / "driver").mkdir()
    search_path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    return Polled(compile_driver(work / "driver"), work, {"PYTHONPATH": search_path})


def sleep_rows(options: argparse.Namespace, work: Path) -> Iterator[dict[str, Any]]:
    """A row for each shape, setting and door, on the device that only waits."""
    given = (options.rows, options.vocab, options.step_ms)
    shapes = (
        SHAPES
        if given == (None, None, None)
        else [
            tuple(
                own if own is not None else default
                for own, default in zip(given, SHAPES[0], strict=True)
            )
        ]
    )
    for i, shape in enumerate(shapes):
        yield from measure_shape(*shape, options, work / str(i))


def measure_shape(
    rows: int, vocab: int, step_ms: float, options: argparse.Namespace, work: Path
) -> Iterator[dict[str, Any]]:
    """The rows of one shape: `--runs` rounds of the bare loop and every door and setting."""
    # Real steps are longer than `step_ms`, so no stream ends within a run's clock, nor while a busy machine stops it.
    num_tokens = 2 * SLEEP_WARM_STEPS + int((options.seconds + SLEEP_SPARE_S) / step_ms * 1e3)
    length = SLEEP_PROMPT_LEN + num_tokens
    shape = {
        "rows": rows,
        "length": length,
        "longest_prompt": SLEEP_PROMPT_LEN,
        "step_ms": step_ms,
    }
    sleep_device.save_model(
        work / "bare", vocab=vocab, length=length, device_samples=options.device_samples
    )
    modes = ["true", "false"] if options.engine_process == "both" else [options.engine_process]
    doors: dict[tuple[str, str], tuple[Door, sleep_device.Stamps]] = {}
    with contextlib.ExitStack() as stack:
        for door, mode in itertools.product(options.doors, modes):
            folder = shutil.copytree(work / "bare", work / f"{door}-{mode}")
            stamps = sleep_device.Stamps(folder)
            doors[door, mode] = stack.enter_context(open_door(door, folder, mode, **shape)), stamps
        script = str(Path(sleep_device.__file__))
        bare = stack.enter_context(
            process([script, "bare", str(work / "bare"), str(rows), str(step_ms)])
        )
        wait_bare(bare)
        bare_us: list[list[float]] = []
        cases = list(itertools.product(options.settings, doors, options.formats))
        runs: dict[Any, list[tuple[float, float, float]]] = {case: [] for case in cases}
        for _ in range(options.runs):
            bare_us.append([1e6 * one for one in bare_times(bare, options.seconds)])
            for setting, door, form in cases:
                payload = endless(SLEEP_PROMPT_LEN, length, SLEEP_SETTINGS[setting], form)
                found = run_streams(*doors[door], rows, payload, options.seconds)
                runs[setting, door, form].append(found)
    device_us, read_us = map(statistics.median, zip(*bare_us, strict=True))
    for setting, (door, mode), form in cases:
        medians = map(statistics.median, zip(*runs[setting, (door, mode), form], strict=True))
        step_us, clients_us, arrived = medians
        yield {
            "door": door,
            "engine_process": mode,
            "format": form,
            "setting": setting,
            "rows": rows,
            "vocab": vocab,
            "device_us": round(device_us),
            "step_us": round(step_us),
            "loss_us": round(step_us - device_us),
            "read_us": round(read_us),
            "clients_us": round(clients_us),
            "arrived": round(arrived, 2),
        }


def run_streams(
    door: Door, stamps: sleep_device.Stamps, rows: int, payload: Mapping[str, Any], seconds: float
) -> tuple[float, float, float]:
    """Stream `rows` requests for some seconds. Returns `step_us`, `clients_us` and `arrived`."""
    with door.open(rows, payload) as poll:
        while min(received := poll()) < SLEEP_WARM_STEPS:
            pass
        (first, began_s), cpu_s, before = stamps.last(), door.reader_s(), sum(received)
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            received = poll()
        (last, ended_s), cpu_s = stamps.last(), door.reader_s() - cpu_s
        num_steps = last - first
    arrived = (sum(received) - before) / num_steps / rows
    return (ended_s - began_s) / num_steps * 1e6, cpu_s / num_steps * 1e6, arrived


def main() -> int:
    """Print the table, or one JSON object per line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one object per line")
    parser.add_argument("--device", choices=["rig", "sleep"], default="rig")
    parser.add_argument("--seconds", type=float, help="of each run's clock (default 20; sleep: 2)")
    parser.add_argument("--runs", type=int, help="default 5; sleep: 7")
    parser.add_argument("--backend", choices=list(RIGS), default="tnx", help="with --device rig")
    parser.add_argument(
        "--settings",
        nargs="*",
        choices=[
            *{**SLEEP_SETTINGS, **{name: 0 for rig in RIGS.values() for name in rig.settings}}
        ],
        help="default: all of the device",
    )
    parser.add_argument(
        "--step-ms", type=float, help=f"the device's time per step (default {EXEC_MS})"
    )
    sleep = parser.add_argument_group("with --device sleep, by default four shapes")
    sleep.add_argument("--rows", type=int, help="streams")
    sleep.add_argument("--vocab", type=int)
    sleep.add_argument("--device-samples", action="store_true", help="greedily; with greedy alone")
    sleep.add_argument(
        "--engine-process",
        choices=sleep_device.ENGINE_PROCESS,
        default="default",
        help="option.engine_process of the servers; default: not set",
    )
    sleep.add_argument("--doors", nargs="*", choices=DOORS, default=DOORS[:1])
    formats = sleep_device.FORMATS
    sleep.add_argument("--formats", nargs="*", choices=formats, default=formats[:1])
    options = parser.parse_args()
    on_sleep = options.device == "sleep"
    options.seconds = options.seconds or (2.0 if on_sleep else 20.0)
    options.runs = options.runs or (7 if on_sleep else 5)
    rig = RIGS["tnx" if on_sleep else options.backend]
    known = SLEEP_SETTINGS if on_sleep else rig.settings
    options.settings = options.settings or [*known]
    if unknown := set(options.settings) - known.keys():
        parser.error(f"--settings {' '.join(unknown)}: expected {', '.join(known)}")
    if not on_sleep:
        require(rig)
    with tempfile.TemporaryDirectory() as work:
        rows = (sleep_rows if on_sleep else rig_rows)(options, Path(work))
        sleep_device.print_rows(rows, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The command line of djl_python_neuronx with a sim backend that writes down when its steps end.

    python benchmarks/sleep_device.py serve MODEL ...       # MODEL: a folder that `save_model` has written
    python benchmarks/sleep_device.py bare MODEL ROWS MS    # the bare loop: reads seconds, prints `bare_loop`'s times

As `option.entryPoint` it is the handler for DJL Serving, on the same device.

`device_bound.py --device sleep`, `isolation.py` and `several_models.py` import the rest: model folder, processes,
streams. Nothing here needs torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from djl_python_neuronx import backends, cli, handler
from djl_python_neuronx.backends.base import Int32Array, Rows, Step, Want
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.backends.sim.backend import SimBackend

SLEEP_BACKENDS = str(Path(__file__).parent / "sleep_backends")
NUM_STAMPS = 2**14
NUM_READS = 40
FIRST_WORD = 256
"""Ids from here on are words in the tokenizer of `save_tokenizer`; those below are single bytes."""
START_S = 300.0
ENGINE_PROCESS = ("true", "false", "both", "default")
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


def replace_backend() -> None:
    """Serve with the sim backend of `sleep_backends` from now on, in this process and in those of its engines."""
    if SLEEP_BACKENDS not in backends.__path__:
        backends.__path__.insert(0, SLEEP_BACKENDS)


def handle(inputs: Any) -> Any:  # noqa: ANN401
    """Handle a request of DJL Serving."""
    replace_backend()
    return handler.handle(inputs)


def save_tokenizer(folder: Path, vocab: int) -> None:
    """Write a byte-level tokenizer whose whole vocabulary is used: a character is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(f"Ġ{i}" for i in range(vocab - len(alphabet)))]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))


def save_model(
    folder: Path, *, vocab: int, length: int, number: int = 0, device_samples: bool = False
) -> None:
    """Write a model folder without weights. `number`: models of other numbers give other answers.

    Bytes are eos, which the sim backend never gives: each token of an answer is a word.
    """
    folder.mkdir(parents=True)
    config = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": length,
        "eos_token_id": [*range(FIRST_WORD)],
        "number": number,
        "device_samples": device_samples,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder, vocab)


def right_answers(folder: Path, prompts: Sequence[str], num_tokens: int) -> list[str]:
    """Return the texts that a model makes of prompts of the same length."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = np.array([tokenizer.encode(prompt).ids for prompt in prompts], np.int32)
    count, width = ids.shape
    plan = LoadPlan(
        folder, count, width + num_tokens, (width,), eos_ids=frozenset(range(FIRST_WORD))
    )
    backend = SimBackend.of(plan)
    made = [prefill(backend, ids)]
    for start in range(width, width + num_tokens - 1):
        made.append(best(backend, Step(decode=make_rows(made[-1], start))))
    return tokenizer.decode_batch(np.concatenate(made, axis=1).tolist())


def make_rows(ids: Int32Array, start: int, first: int = 0) -> Rows:
    """Return rows of int32[B, S], all of them valid, for the slots from `first` on."""
    count, width = ids.shape
    lens, starts, adapters = (np.full(count, value, np.int32) for value in (width, start, 0))
    slots = np.arange(first, first + count, dtype=np.int32)
    return Rows(ids, lens, starts, slots, adapters, Want.LOGITS, np.ones((count, 3), np.float32))


def prefill(backend: SimBackend, ids: Int32Array) -> Int32Array:
    """Fill as many slots with int32[B, S]. Returns int32[B, 1]: the best next tokens."""
    steps = [Step(prefill=make_rows(row[None], 0, slot)) for slot, row in enumerate(ids)]
    return np.concatenate([best(backend, step) for step in steps])


def best(backend: SimBackend, step: Step) -> Int32Array:
    """Run a step. Returns int32[B, 1]: the best next tokens."""
    output = backend.run(step)
    assert output.logits is not None
    return output.logits.argmax(axis=2).astype(np.int32)


@contextlib.contextmanager
def process(
    command: Sequence[str], environ: Mapping[str, str] = NO_VARIABLES
) -> Iterator[subprocess.Popen[str]]:
    """A process of this interpreter that gets SIGTERM at the end."""
    with subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            yield running
        finally:
            running.terminate()


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def serve_command(model: Path, port: int, model_options: Mapping[str, object]) -> list[str]:
    """Return the arguments that serve a model with these options."""
    words = ["serve", str(model), "--host", "127.0.0.1", "--port", str(port), "--log-level"]
    return [
        *words,
        "warning",
        *(w for name, v in model_options.items() for w in ("-o", f"{name}={v}")),
    ]


def wait_ready(server: subprocess.Popen[str], port: int) -> None:
    """Return when the server answers."""
    deadline_s = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(OSError):  # refused, or 503 while it loads
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=5).close()
            return
        time.sleep(0.2)
    sys.exit(f"the server is not ready after {START_S:g} s, or has ended; its messages are above")


def options(
    engine_process: str, *, rows: int, length: int, longest_prompt: int, step_ms: float
) -> dict[str, object]:
    """Return the options that serve a model folder. `engine_process`: true, false or default, which leaves it out.

    A prefill takes no time: no run is measured before all its rows decode.
    """
    times = {"prefill": {longest_prompt: 0}, "decode": {length: step_ms}}
    found: dict[str, object] = {
        "model_loader": "sim",
        "sim_step_ms": json.dumps(times),
        "n_positions": length,
        "context_length_estimate": longest_prompt,
        "max_rolling_batch_size": rows,
    }
    return found if engine_process == "default" else {**found, "engine_process": engine_process}


@contextlib.contextmanager
def sleep_server(model: Path, model_options: Mapping[str, object]) -> Iterator[int]:
    """A server of a model folder; its port."""
    port = free_port()
    with process([__file__, *serve_command(model, port, model_options)]) as server:
        wait_ready(server, port)
        yield port


@contextlib.contextmanager
def open_streams(port: int, rows: int, payload: Mapping[str, Any]) -> Iterator[list[socket.socket]]:
    """Sockets that a POST of `payload` was written to."""
    body = orjson.dumps(payload)
    head = f"POST /invocations HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", port)
        streams = [
            stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(rows)
        ]
        for stream in streams:
            stream.sendall(head.encode() + body)
        yield streams


FORMATS = ["lmi", "chat"]


def endless(
    prompt_len: int, length: int, parameters: Mapping[str, Any], form: str = "lmi"
) -> dict[str, Any]:
    """Return a payload whose stream lasts until the slot is full: lines of JSON, or OpenAI's events of a chat."""
    text, most = "x" * prompt_len, length - prompt_len
    if form == "chat":
        messages = [{"role": "user", "content": text}]
        sampling = parameters or {"temperature": 0}
        lasting = {"max_tokens": most, "ignore_eos": True}
        return {"messages": messages, "stream": True, **lasting, **sampling}
    lasting = {"max_new_tokens": most, "ignore_eos": True}
    sampling = {"do_sample": bool(parameters), **parameters}
    return {"inputs": text, "parameters": {**lasting, **sampling}, "stream": True}


def num_tokens(data: bytes, start: bytes = b"") -> int:
    """Return the tokens in a part of a stream: lines and events end in a bare line feed, HTTP's own in two characters.

    An event ends in two.
    """
    if not data or not data.startswith(start):
        sys.exit(f"a stream has ended; expected tokens, found {data[:500].decode()!r}")
    return data.count(b"\n") - data.count(b"\r") - data.count(b"\n\n")


class Stamps:
    """The ends of a device's steps, as its process writes them."""

    def __init__(self, folder: Path) -> None:
        """Empty the file in the folder of a model that no process has loaded."""
        self._ends = np.memmap(folder / "stamps", np.int64, "w+", shape=(1 + NUM_STAMPS,))

    def last(self) -> tuple[int, float]:
        """Return the number of steps so far, and the end of the last one in s."""
        done = int(self._ends[0])
        return done, int(self._ends[1 + (done - 1) % NUM_STAMPS]) / 1e9


def print_rows(rows: Iterable[Mapping[str, Any]], *, as_json: bool) -> None:
    """Print each row as it comes: a JSON object per line, or name=value."""
    for row in rows:
        if as_json:
            print(orjson.dumps(row).decode(), flush=True)
        else:
            print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)


def bare_loop(folder: Path, rows: int, step_ms: float) -> None:
    """Call the device and nothing else, for each line of seconds on stdin.

    Prints the time of a step, and that of one numpy maximum over its logits after a sleep of a step, both in s.
    """
    backend = SimBackend.of(LoadPlan(folder, rows, 2, (1,), sim_step_ms=step_ms))
    ids = np.ones((rows, 1), np.int32)
    prefill(backend, ids)
    step = Step(decode=make_rows(ids, 1))
    print("ready", flush=True)
    for line in sys.stdin:
        num_steps, began_s = 0, time.monotonic()
        end_s = began_s + float(line)
        while (now_s := time.monotonic()) < end_s:
            backend.run(step)
            num_steps += 1
        step_s, ring, reads = (now_s - began_s) / num_steps, backend._model.ring, []
        for turn in range(NUM_READS):
            time.sleep(step_s)
            began_s = time.perf_counter()
            ring[turn % len(ring)].max()
            reads.append(time.perf_counter() - began_s)
        print(step_s, statistics.median(reads), flush=True)


def main() -> int:
    """Run the bare loop, or a command of djl-neuronx."""
    if sys.argv[1:2] == ["bare"]:
        bare_loop(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
        return 0
    replace_backend()
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())

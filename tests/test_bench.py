"""`djl-neuronx bench` up to the load itself, which tests/real_clients/test_bench.py sends."""

from __future__ import annotations

import json
import logging
import math
import socket
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

pytest.importorskip("uvicorn", reason="needs the `server` extra")
pytest.importorskip("httpx", reason="needs httpx")

import httpx
import transformers
from sleep_device import save_tokenizer

from djl_python_neuronx import bench, cli, telemetry
from djl_python_neuronx.artifacts.tokenizer import load_tokenizer
from djl_python_neuronx.bench import BenchedServer, Planned
from djl_python_neuronx.errors import ConfigError
from djl_python_neuronx.server.keys import read_keys
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend
from tests.server.running import Running, http, serving

TINY = Path(__file__).parent.parent / "examples" / "tiny-llama"
CONFIG = {"model_type": "llama", "vocab_size": 300}


def save_letters(folder: Path) -> None:
    """A token for each character, and no special ones."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_tokenizer(folder, TOY_SPEC.vocab_size)


def save_sentencepiece(folder: Path) -> None:
    """Words with a mark in front, as Llama 2 has them; a part of the words is in two tokens, and <s> comes first."""
    folder.mkdir()
    pieces = ["<unk>", "<s>", "▁", *"abcdefghijklmnopqrstuvwxyz"]
    merges: list[tuple[str, str]] = []
    for word in bench.WORDS[::2]:
        made = "▁"
        for letter in word:
            merges.append((made, letter))
            made += letter
    pieces += [first + second for first, second in merges]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    library = Tokenizer(models.BPE(vocabulary, [*dict.fromkeys(merges)], unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.add_special_tokens(["<s>"])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    library.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    save_letters(tmp_path / "letters")
    with serving(ToyBackend(TOY_SPEC), tokenizer=load_tokenizer(tmp_path / "letters")) as running:
        yield running


def test_a_prompt_has_exactly_the_tokens(tmp_path: Path) -> None:
    """By transformers' count. No two prompts begin alike, so that none is found in a cache."""
    save_letters(tmp_path / "letters")
    save_sentencepiece(tmp_path / "words")
    for folder in (tmp_path / "letters", tmp_path / "words", TINY):
        library = transformers.AutoTokenizer.from_pretrained(folder)
        with serving(ToyBackend(TOY_SPEC), tokenizer=load_tokenizer(folder)) as running:
            client = BenchedServer(running.url + "/v1/", http)
            for length in (2, 3, 17, 100):
                prompts = [client.prompt("toy", length, seed) for seed in range(8)]
                counts = [len(library(prompt).input_ids) for prompt in prompts]
                assert counts == [length] * 8, folder
            assert len(set(prompts)) == 8
            if library.bos_token_id is not None and len(library("").input_ids) == 1:
                with pytest.raises(ConfigError, match="no text of 1 tokens"):
                    client.prompt("toy", 1, 0)


def test_what_does_not_suit_is_status_1(
    server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """The message has the value, and what to do."""
    monkeypatch.setitem(sys.modules, "guidellm", None)
    monkeypatch.setattr(cli, "setup_logging", lambda *_: None)
    empty = tmp_path / "empty.log"
    empty.write_text("INFO nothing\n")
    long = tmp_path / "long.jsonl"
    long.write_text('{"output_length": 3, "input_length": 65, "timestamp": 0}')
    given = ["--prompt-tokens", "8", "--output-tokens", "4"]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with serving(ToyBackend(TOY_SPEC), api_keys=read_keys(None, "right")) as locked:
            for arguments, *words in (
                ([nobody], nobody, "Connection refused", "djl-neuronx serve"),
                (["127.0.0.1:80"], "127.0.0.1:80/info", "http://"),
                ([locked.url], "401", "--api-key", "DJL_NEURONX_API_KEY"),
                ([locked.url, "--api-key", "wrong"], "401", "--api-key"),
                ([server.url + "/nowhere"], "/nowhere/info", "404", "option.admin_port"),
                ([server.url.replace("//", "//me:right@") + "/nowhere"], "/nowhere/info", "404"),
                ([server.url, "--model", "other"], "'other'", "'toy'"),
                ([server.url, "--prompt-tokens", "65"], "65", "64", "--prompt-tokens"),
                ([server.url, *given[:2], "--output-tokens", "121"], "121", "128", "lower"),
                ([server.url, *given, "--replay", str(empty)], str(empty), "input_length"),
                ([server.url, *given, "--replay", str(long)], "65", "64", "--replay"),
                ([server.url, *given, "--replay", "/no/file"], "/no/file"),
                ([server.url, *given, "--json", "/no/folder/x"], "/no/folder/x"),
                ([server.url, *given], "needs guidellm", "'djl-python-neuronx[bench]'"),
            ):
                status = cli.main(["bench", *arguments])
                told = capsys.readouterr().err
                assert (status, told.startswith("djl-neuronx: ")) == (1, True), told
                assert [word for word in words if word not in told] == [], told
                assert "right" not in told


def test_one_of_several_models_has_to_be_named() -> None:
    models = [{"model": name} for name in ("a", "b")]
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=models))
    with httpx.Client(transport=transport) as client:
        server = BenchedServer("http://server", client)
        assert server.facts("b") == models[1]
        for name, word in (("", "it has to name one of several models"), ("c", "no such model")):
            with pytest.raises(ConfigError, match=f"--model is '{name}': .*{word}.*'a', 'b'"):
                server.facts(name)


def planned(server: Running, *arguments: str) -> dict[str, Any]:
    """The scenario that guidellm would run."""
    parser = ArgumentParser()
    bench.add_arguments(parser)
    given: Namespace = parser.parse_args([server.url, *arguments])
    return bench.plan(given, BenchedServer(given.url, http))


def test_the_load_that_is_planned(server: Running) -> None:
    default = planned(server)
    (data,) = (one["data"] for one in default["data"])
    assert default["profile"] == {"kind": "concurrent", "streams": TOY_SPEC.num_slots}
    assert (set(data["prompt_tokens_count"]), set(data["output_tokens_count"])) == ({64}, {64})
    assert len(set(data["prompt"])) == bench.NUM_REQUESTS
    assert default["constraints"] == []
    lengths = ["--prompt-tokens", "5", "--output-tokens", "3"]
    timed = planned(server, *lengths, "--duration", "2", "--concurrency", "3")
    assert timed["constraints"] == [{"kind": "max_duration", "seconds": 2.0}]
    assert timed["profile"]["streams"] == 3
    short = planned(server, *lengths, "--duration", "2", "--requests", "7")
    assert len(short["data"][0]["data"]["prompt"]) == 7
    open_loop = planned(server, *lengths, "--rate", "20", "--duration", "2", "--goodput", "itl:50")
    times = open_loop["data"][0]["data"]["relative_timestamp"]
    assert times == sorted(times)
    assert times[0] == 0
    assert times[-1] <= 2 < times[-1] + 1
    assert open_loop["profile"] == {"kind": "replay", "schedule_turn": "timestamp"}
    assert open_loop["metrics"]["slo"] == {"tpot_ms": 50}
    assert len(planned(server, *lengths, "--rate", "5")["data"][0]["data"]["prompt"]) == 100


def test_arrivals_are_a_poisson_process() -> None:
    """Gaps are exponential: within the bound of Kolmogorov and Smirnov at 0.1 %, and independent of each other."""
    rate, count = 4.0, 20_000
    drawn = bench.poisson(rate, Planned(0.0, 1, 1))
    times = [next(drawn).time_s for _ in range(count + 1)]
    gaps = [after - before for before, after in pairwise(times)]
    furthest = max(abs(1 - math.exp(-rate * gap) - i / count) for i, gap in enumerate(sorted(gaps)))
    assert furthest < 1.95 / math.sqrt(count)
    both = sum(a > 1 / rate and b > 1 / rate for a, b in pairwise(gaps)) / count
    assert both == pytest.approx(math.exp(-2), abs=0.01)


def test_a_log_of_the_server_is_read_in_both_forms(server: Running, tmp_path: Path) -> None:
    """Requests in the order of their arrival, though the first one ends last."""
    package, forms = logging.getLogger("djl_python_neuronx"), ("text", "json")
    before = package.level, [*package.handlers], package.propagate, logging.getLogger().handlers
    for form in forms:
        path = tmp_path / form
        with path.open("w") as stream, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            telemetry.setup_logging("INFO", form)
            try:
                for prompt, most in (("abcd", 3), ("ab", 5)):
                    sent = {"prompt": prompt, "max_tokens": most, "ignore_eos": True}
                    assert http.post(server.url + "/v1/completions", json=sent).status_code == 200
            finally:
                package.level, package.handlers, package.propagate = before[:3]
                logging.getLogger().handlers = before[3]
                logging.captureWarnings(False)
        first, second = bench.read_trace(path)
        assert (first.time_s, first[1:], second[1:]) == (0, (4, 3), (2, 5)), path.read_text()
        assert 0 < second.time_s < 60
    line = "2026-11-27 {},000 INFO x request_finished request_id=r protocol=p reason=length " + (
        "prompt_tokens={} generated_tokens={} first_token_s=0.1 total_s={}\n"
    )
    path.write_text(
        line.format("10:00:09", 7, 2, "8.500")
        + line.format("10:00:05", 8, 0, "1.0")
        + "10:00:06 another line\n"
        + line.format("10:00:04", 9, 1, "0.25")
    )
    assert bench.read_trace(path) == [Planned(0, 7, 2), Planned(3.25, 9, 1)]


def test_a_trace_in_mooncakes_form(tmp_path: Path) -> None:
    """Its published lines have hash_ids too; times are in ms."""
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]},
        {"timestamp": 27000.5, "input_length": 5, "output_length": 6},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert bench.read_trace(path) == [Planned(0, 5, 6), Planned(pytest.approx(0.4815), 6955, 52)]

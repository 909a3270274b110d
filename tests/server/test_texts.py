"""Templates and tokenizers of any quality behind the embedded server: probes and streams notice none of them."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the `server` extra")
pytest.importorskip("httpx", reason="needs httpx")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("tokenizers", reason="tokenizers is not installed")

import httpx
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from djl_python_neuronx.errors import ArtifactError, TextLimitError
from djl_python_neuronx.loading.tokenizer_process import MOST_SLOW, TokenizerProcess
from djl_python_neuronx.server.app import Application
from djl_python_neuronx.server.models import Model
from tests.artifacts import tokenizer_folders as folders
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend
from tests.doubles.toy_service import toy_service
from tests.doubles.toy_tokenizer import ToyTokenizer
from tests.processes import PATIENCE_S
from tests.server.running import CROSSING_S, Running, answer

LIMIT_S = 1.0
"""For what goes too far; whatever ends by itself has all the time of a test."""
MESSAGES = [
    {"content": "  Be brief. ", "role": "system"},
    {"content": "naïve <fox> 你好 😀?", "role": "user"},
    {"content": "Yes.", "role": "assistant"},
    {"content": "Why?", "role": "user"},
]
TEXT = "The quick brown fox, doesn't it? naïve 你好 aaaaaa"

GOOD = {
    "chatml": "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama 2": "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% endif %}"
    "{% for m in loop_messages %}{% if loop.index0 == 0 and system is defined %}"
    "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m['content'] %}{% else %}"
    "{% set content = m['content'] %}{% endif %}{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% else %}{{ ' ' + content + ' ' + eos_token }}"
    "{% endif %}{% endfor %}",
    "gemma": "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}{% set role = 'model' %}"
    "{% else %}{% set role = m['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + m['content'] | trim }}"
    "{% endfor %}",
    "zephyr": "{% for m in messages %}\n{% if m['role'] == 'user' %}\n{{ '<|user|>\n' + m['content'] + eos_token }}\n"
    "{% endif %}\n{% endfor %}",
    "of the tests": folders.CHAT_TEMPLATE.replace("'system'", "'judge'"),
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "macro": "{% macro say(m) %}"
    "[{{ m.role }}]{{ m.content }}{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
    "recursive loop": "{% for x in [[1, [2]], [3]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}"
    "{% endif %}{% endfor %}",
    "whitespace control": "{%- for m in messages -%}\n  {{- m.content -}}\n{%- endfor -%}",
    "tojson": "{{ messages | tojson(indent=2) }}",
    "map and join": "{{ messages | map(attribute='role') | join(', ') }}",
    "select": "{{ (messages | selectattr('role', 'equalto', 'user') | list)[-1].content }}",
    "break": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "items": "{% for key, value in messages[0].items() %}{{ key }}={{ value }};{% endfor %}",
    "format": "{{ '%s-%05d' | format(messages[0].role, 42) }}{{ '{}:{:>5}'.format('a', 1) }}",
    "default": "{{ tools | default('none') }}{{ messages[0].name | default('nobody') }}",
    "set block": "{% set text %}{{ messages[1].content }}!{% endset %}{{ text * 3 }}",
    "filters": "{{ messages[0].content | upper | replace('BE', 'Be') | trim | length }}{{ 'abc' | reverse }}",
    "comment and raw": "{# nothing #}{% raw %}{{ raw }}{% endraw %}",
    "splits": "{{ messages[1].content.split(' ')[0].lstrip('n') }}{{ messages[3].content.startswith('W') }}",
    "long": "{{ 'The fox. ' * 100 }}{{ messages[-1].content }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
}
OVER = (400, r"chat template takes more than (1 s \(option.text_timeout\)|1 GiB of memory)")
LONG = (400, r"chat template has \d+ characters, more than any prompt that fits")
FAILS = (
    400,
    r"chat template fails on these messages \(\w+\)\. Correct it in chat_template\.jinja or tok",
)
ANY = (400, f"{OVER[1]}|tokenizer takes more than 1 s|{LONG[1]}|{FAILS[1]}")
"""Errors that may end it, depending on the machine."""
BAD = {
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x": OVER,
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'a' * 9999 }}{% endfor %}{% endfor %}": OVER,
    "{{ 9**(9**(9**9)) }}": OVER,
    "{{ lipsum(n=10**9) }}": OVER,
    "{{ 'a' | center(10**9) }}": ANY,
    "{{ '%0999999999d' % 1 }}": ANY,
    "{{ '{:999999999}'.format(1) }}": ANY,
    "{{ '{:999999999}'.format(messages[0].content) }}": ANY,
    "{{ messages | tojson(indent=99999999) }}": ANY,
    "{{ 'a' | indent(10**10, first=true) }}": OVER,
    "{{ 'a' * 10**11 }}": OVER,
    "{{ [0] * 10**11 }}": OVER,
    "{% set a = 'a' * 10**5 %}{{ a | replace('a', a) }}": OVER,
    "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}": OVER,
    "{{ 'fox ' * 10**6 }}": LONG,
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}": FAILS,
    "{{ range(10**9) | list }}": FAILS,
    "{{ raise_exception('never!') }}": (400, "refuses these messages: never. Correct"),
    "{% for %}": (
        400,
        "not valid Jinja, and every chat request fails: line 1: Expected an expression, got",
    ),
    "\n{{ 1 | nothing }}": (400, "not valid Jinja, .*: line 2: No filter named 'nothing'"),
    "{{ 1 / 0 }}": FAILS,
    "{{ messages.nothing.at_all }}": FAILS,
    "{{ messages[99].content.x }}": FAILS,
    "{% include 'config.json' %}": FAILS,
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": FAILS,
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}": FAILS,
    "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}": FAILS,
    "{{ messages.append(1) }}": FAILS,
}


class Server:
    """A server whose tokenizer changes, with a thread of probes and one of streams."""

    def __init__(self) -> None:
        backend = ToyBackend(replace(TOY_SPEC, num_slots=2), step_s=CROSSING_S)
        self.service = toy_service(backend, text_timeout=LIMIT_S)
        application = Application(Model("toy"))
        application.models[0].service = self.service
        self._running = Running(application)
        self.url = self._running.url
        self.num_probes = 0
        self._ends = threading.Event()
        self._pool = ThreadPoolExecutor(2)
        self._others = [self._pool.submit(one) for one in (self._probe, self._stream)]

    def _probe(self) -> None:
        with httpx.Client(timeout=PATIENCE_S) as client:
            while not self._ends.wait(0.01):
                assert client.get(f"{self.url}/ping").status_code == 200
                self.num_probes += 1

    def _stream(self) -> None:
        with httpx.Client(timeout=PATIENCE_S) as client:
            while not self._ends.is_set():
                # As ids: the tokenizer is another one each time.
                wanted = {"prompt": [1, 5], "max_tokens": 40, "temperature": 0}
                wanted |= {"ignore_eos": True, "stream": True}
                streamed = client.post(f"{self.url}/v1/completions", json=wanted)
                events = [line[6:] for line in streamed.text.splitlines() if line]
                assert events.pop() == "[DONE]"
                parts = [json.loads(one)["choices"][0]["text"] for one in events]
                assert "".join(parts) == answer([5], 40)

    def tokenize(self, tokenizer: TokenizerProcess, **payload: Any) -> httpx.Response:
        """The answer of `/tokenize` with this tokenizer. Probes are answered while a long call runs."""
        self.service.tokenizer = tokenizer
        before = self.num_probes
        found = httpx.post(f"{self.url}/tokenize", json=payload, timeout=PATIENCE_S)
        assert not any(one.done() for one in self._others)
        if found.elapsed.total_seconds() > LIMIT_S:
            assert self.num_probes > before + 1
        return found

    def close(self) -> None:
        self._ends.set()
        self._pool.shutdown()
        self._running.close()
        self.service.close()
        for one in self._others:
            one.result()


@pytest.fixture(scope="module")
def server():
    running = Server()
    yield running
    running.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = folders.byte_level()
    return folders.write(tmp_path_factory.mktemp("texts"), made, **folders.special_tokens(made))


def start(folder, template=None, timeout_s=PATIENCE_S):
    how = {"trust_remote_code": False, "revision": None, "chat_template": template}
    return TokenizerProcess(folder, timeout_s=timeout_s, **how)


@pytest.mark.parametrize("name", GOOD)
def test_a_template_is_rendered_as_hugging_face_renders_it(server, folder, name):
    library = PreTrainedTokenizerFast.from_pretrained(folder)
    text = library.apply_chat_template(
        MESSAGES, chat_template=GOOD[name], tokenize=False, add_generation_prompt=True
    )
    tokenizer = start(folder, GOOD[name])
    found = server.tokenize(tokenizer, messages=MESSAGES)
    assert found.status_code == 200, found.text
    assert found.json()["tokens"] == library.encode(text, add_special_tokens=False)
    tokenizer.close()


@pytest.mark.parametrize("template", BAD)
def test_a_template_that_goes_too_far_costs_its_request(server, folder, template):
    status, message = BAD[template]
    limit_s = LIMIT_S if BAD[template] in (OVER, ANY) else PATIENCE_S
    tokenizer = start(folder, template, limit_s)
    found = server.tokenize(tokenizer, messages=MESSAGES)
    assert found.status_code == status, found.text
    error = found.json()["error"]["message"]
    assert re.search(message, error)
    assert len(error) < 400
    assert server.tokenize(tokenizer, prompt=TEXT).status_code == 200
    tokenizer.close()


def changed(**parts: Any) -> Tokenizer:
    """A byte-level tokenizer with other parts."""
    made = folders.byte_level()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


BACKTRACKS = Regex("(a+)+$")
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)


def split(pattern: Any) -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), BYTES])


def with_tokens(*tokens: AddedToken) -> Tokenizer:
    made = folders.byte_level()
    made.add_tokens(list(tokens))
    return made


TOKENIZERS = {
    "byte level": folders.byte_level,
    "llama": folders.sentencepiece,
    "metaspace": lambda: folders.sentencepiece(metaspace=True),
    "wordpiece": folders.wordpiece,
    "nfkc": lambda: changed(normalizer=normalizers.NFKC()),
    "lowercase": lambda: changed(normalizer=normalizers.Lowercase()),
    "digits": lambda: changed(
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Digits(True), BYTES])
    ),
    "a pattern": lambda: changed(pre_tokenizer=split(Regex(r"\p{L}+|\p{N}{1,3}|\s+"))),
    "long token": lambda: with_tokens(AddedToken("x" * 2_000, normalized=False)),
    "no post-processor": lambda: changed(
        post_processor=processors.TemplateProcessing(single="$A", special_tokens=[])
    ),
}
TOO_FAR = (
    r"the model's tokenizer (takes more than (1 s|1 GiB)|failed on this text|makes \d+ tokens)"
)
BAD_TOKENIZERS = {
    "a replacement that grows": lambda: changed(normalizer=normalizers.Replace("a", "a" * 100_000)),
    "replacements that double": lambda: changed(
        normalizer=normalizers.Sequence([normalizers.Replace("a", "aa")] * 40)
    ),
    "prepended": lambda: changed(
        normalizer=normalizers.Sequence([normalizers.Prepend("x" * 10**5)] * 200)
    ),
    "a pattern that backtracks": lambda: changed(pre_tokenizer=split(BACKTRACKS)),
    "a normaliser that backtracks": lambda: changed(normalizer=normalizers.Replace(BACKTRACKS, "")),
    "nested quantifiers": lambda: changed(
        pre_tokenizer=split(Regex("^(([a-z])+.)+[A-Z]([a-z])+$"))
    ),
}
BAD_TEXT = "a" * 900 + "b"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_gives_the_librarys_ids(server, tmp_path, name):
    made = TOKENIZERS[name]()
    tokenizer = start(folders.write(tmp_path, made, **folders.special_tokens(made)))
    for text in (TEXT, BAD_TEXT):
        found = server.tokenize(tokenizer, prompt=text)
        assert found.json()["tokens"] == made.encode(text).ids
    tokenizer.close()


@pytest.mark.parametrize("name", BAD_TOKENIZERS)
def test_a_tokenizer_that_goes_too_far_costs_its_request(server, tmp_path, name):
    tokenizer = start(folders.write(tmp_path, BAD_TOKENIZERS[name]()), timeout_s=LIMIT_S)
    found = server.tokenize(tokenizer, prompt=BAD_TEXT)
    assert found.status_code in {400, 500}, found.text
    assert re.search(TOO_FAR, found.json()["error"]["message"]), found.text
    tokenizer.close()


def test_a_decoder_that_backtracks_costs_its_request(server, tmp_path):
    made = changed(
        decoder=decoders.Sequence([decoders.ByteLevel(), decoders.Replace(BACKTRACKS, "")])
    )
    tokenizer = start(folders.write(tmp_path, made), timeout_s=LIMIT_S)
    server.service.tokenizer = tokenizer
    ids = made.encode(BAD_TEXT).ids
    found = httpx.post(f"{server.url}/detokenize", json={"tokens": ids}, timeout=PATIENCE_S)
    assert found.status_code in {400, 500}
    limit = r"the model's decoder takes more than 1\.\d+ s \(fixed\)"
    assert re.search(f"{limit}|{TOO_FAR}", found.json()["error"]["message"])
    tokenizer.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_decoder_that_goes_too_far_costs_its_stream(caplog, stream):
    class Decoder(ToyTokenizer):
        num_decoded = 0

        def decode(self, ids, **how):
            self.num_decoded += 1
            if self.num_decoded > 6:  # in the middle of a stream
                raise TextLimitError("the model's decoder takes more than 1.002 s (fixed)")
            return super().decode(ids, **how)

    tokenizer = Decoder()
    tokenizer.pieces = None
    application = Application(Model("toy"))
    application.models[0].service = service = toy_service(ToyBackend(), tokenizer=tokenizer)
    running = Running(application)
    wanted = {"prompt": [1, 5], "max_tokens": 40, "ignore_eos": True, "stream": stream}
    found = httpx.post(f"{running.url}/v1/completions", json=wanted, timeout=PATIENCE_S)
    running.close()
    service.close()
    assert found.status_code == (200 if stream else 400)
    assert "1.002 s (fixed)" in found.text
    assert '"text_limit"' in found.text
    assert "text_failed" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_plain_text_waits_for_no_slow_template(server, folder):
    tokenizer = start(folder, next(iter(BAD)), timeout_s=600.0)
    server.service.tokenizer = tokenizer
    with ThreadPoolExecutor(20) as pool:
        post = partial(httpx.post, f"{server.url}/tokenize", timeout=600)
        chats = [pool.submit(post, json={"messages": MESSAGES}) for _ in range(20)]
        refused = [one.result() for one in islice(as_completed(chats), 20 - MOST_SLOW)]
        assert (
            httpx.post(
                f"{server.url}/tokenize", json={"prompt": TEXT}, timeout=PATIENCE_S
            ).status_code
            == 200
        )
        assert sum(one.done() for one in chats) == len(refused)
        tokenizer.close()
    for one in refused:
        assert one.status_code == 503
        assert one.headers["retry-after"] == "1"
        assert "8 texts take the model's chat template or tokenizer longer than 0.1 s" in one.text


def edited(**parts: Any) -> str:
    return json.dumps({**json.loads(folders.byte_level().to_str()), **parts})


UNLOADABLE = {
    "empty": lambda: "",
    "cut": lambda: "{",
    "a list": lambda: "[]",
    "no model": lambda: edited(model={"type": "None"}),
    "merges of unknown tokens": lambda: edited(
        model={"type": "BPE", "vocab": {"a": 0}, "merges": ["x y"]}
    ),
    "a decoder that grows": lambda: edited(
        decoder={"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10**7}
    ),
}


@pytest.mark.parametrize("name", UNLOADABLE)
def test_a_tokenizer_that_cannot_be_loaded_is_an_error(tmp_path, name):
    folder = folders.write(tmp_path, folders.byte_level())
    (folder / "tokenizer.json").write_text(UNLOADABLE[name]())
    why = "tokenizer.json is not valid JSON" if name in {"empty", "cut"} else "cannot be loaded"
    with pytest.raises(ArtifactError, match=why):
        start(folder)


def test_the_tables_are_as_large_as_promised():
    assert len(GOOD) + len(BAD) >= 40
    assert len(TOKENIZERS) + len(BAD_TOKENIZERS) + len(UNLOADABLE) >= 20

"""The processes that run chat template and tokenizer: same results as in this one, and ended when they go too far."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("tokenizers", reason="tokenizers is not installed")

from djl_python_neuronx.artifacts.tokenizer import load_tokenizer
from djl_python_neuronx.errors import (
    ArtifactError,
    BackendUnavailableError,
    PromptTooLongError,
    ServingError,
    TextLimitError,
)
from djl_python_neuronx.loading import tokenizer_process
from djl_python_neuronx.loading.tokenizer_process import TokenizerProcess
from tests.artifacts import tokenizer_folders as folders

PATIENCE_S = 60.0
MADE = {
    "byte_level": folders.byte_level(),
    "llama": folders.sentencepiece(),
    "wordpiece": folders.wordpiece(),
}
MESSAGES = [{"role": "user", "content": "Hello"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"


def write(folder, made=MADE["byte_level"], template=folders.CHAT_TEMPLATE):
    return folders.write(folder, made, **folders.special_tokens(made), chat_template=template)


def start(folder, timeout_s=10.0, **more):
    how = {"trust_remote_code": False, "revision": None, "chat_template": None}
    return TokenizerProcess(folder, timeout_s=timeout_s, **{**how, **more})


@pytest.mark.parametrize("name", MADE)
def test_it_is_the_tokenizer_of_the_folder(tmp_path, name):
    """Against the library in this process; `test_tokenizer.py` compares that with Hugging Face's."""
    folder = write(tmp_path, MADE[name])
    expected, found = load_tokenizer(folder), start(folder)
    for text in ("", "The quick fox", *folders.CORPUS[:3], "\0\ud7ff" * 9000):
        ids = expected.encode(text)
        assert found.encode(text) == ids
        assert found.encode(text, special=False) == expected.encode(text, special=False)
        assert found.decode(ids) == expected.decode(ids)
    assert found.encode_chat(MESSAGES) == expected.encode_chat(MESSAGES)
    for fact in ("pieces", "special_ids", "eos_id"):
        assert getattr(found, fact) == getattr(expected, fact)
    for i in range(MADE[name].get_vocab_size() + 2):
        assert found.token_bytes(i) == expected.token_bytes(i)
    assert found.special_id("</s>") == expected.special_id("</s>")
    assert type(found.library) is type(expected.library)
    found.close()


def test_errors_arrive_as_they_are(tmp_path):
    folder = write(tmp_path)
    expected, found = load_tokenizer(folder), start(folder)
    calls = [
        lambda one: one.encode("\ud800"),
        lambda one: one.encode_chat([{"role": "system", "content": "a"}]),
        lambda one: one.encode_chat([{"role": "user", "content": None}]),
        lambda one: one.encode_chat(MESSAGES, max_chars=20),
    ]
    for call in calls:
        with pytest.raises(ServingError) as known:
            call(expected)
        with pytest.raises(type(known.value)) as caught:
            call(found)
        assert str(caught.value) == str(known.value)
        assert caught.value.param == known.value.param
    with pytest.raises(ServingError, match=r"tokenizer failed on this text \(OverflowError\)"):
        found.decode([-1])
    with pytest.raises(PromptTooLongError, match="in the model's chat template has"):
        found.encode_chat(MESSAGES, max_chars=20)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ArtifactError, match="cannot be loaded"):
        start(folder)
    found.close()


def test_a_template_without_end_costs_its_calls(tmp_path, caplog):
    tokenizer = start(write(tmp_path), timeout_s=2.0, chat_template=ENDLESS)
    ids = tokenizer.encode("The fox")
    with ThreadPoolExecutor(4) as pool:
        endless = [pool.submit(tokenizer.encode_chat, MESSAGES) for _ in range(3)]
        assert [tokenizer.encode("The fox") for _ in range(50)] == [ids] * 50
        assert not any(one.done() for one in endless)
        for one in endless:
            with pytest.raises(TextLimitError, match=r"chat template takes more than 2 s \(option"):
                one.result()
    assert tokenizer.encode("The fox") == ids
    assert "text_limit" in caplog.text
    tokenizer.close()


def test_a_call_that_takes_the_memory_costs_itself(tmp_path):
    big = "{{ '{:1999999999}'.format(messages[0].content) }}"
    tokenizer = start(write(tmp_path), timeout_s=PATIENCE_S, chat_template=big)
    with pytest.raises(TextLimitError, match="chat template takes more than 1 GiB of memory"):
        tokenizer.encode_chat(MESSAGES)
    assert tokenizer.decode(tokenizer.encode("The fox")) == "The fox"
    tokenizer.close()


def children(pid):
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(one) for one in found.stdout.split()]


def descendants(pid):
    return [one for child in children(pid) for one in (child, *descendants(child))]


def gone(pids):
    """True when they have ended, without a zombie left."""
    deadline_s = time.monotonic() + PATIENCE_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def test_processes_that_are_killed_are_replaced(tmp_path, caplog):
    tokenizer = start(write(tmp_path))
    ids = tokenizer.encode("The fox")
    library = tokenizer_process._library[0][0]
    for level in range(3):  # the worker, its loader, and the library process
        pid = library.pid
        for _ in range(2 - level):
            pid = children(pid)[-1]
        os.kill(pid, signal.SIGKILL)
        if level:
            assert gone([pid]) or level == 2
        assert tokenizer.encode("The fox") == ids
        library = tokenizer_process._library[0][0]
    assert caplog.text.count("tokenizer_lost") == 2
    tokenizer.close()


def test_close_leaves_no_process_and_no_descriptor(tmp_path):
    folder = write(tmp_path)
    start(folder).close()  # which starts the library process
    library = tokenizer_process._library[0][0].pid
    gc.collect()  # of tests that failed
    before, open_files = descendants(library), sum(1 for _ in Path("/proc/self/fd").iterdir())
    tokenizer = start(folder)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(tokenizer.encode, ["The fox"] * 60))
    mine = set(descendants(library)) - set(before)
    assert len(mine) >= 2
    tokenizer.close()
    tokenizer.close()
    assert gone(mine)
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) <= open_files


def test_close_ends_a_call_that_runs_with_advice_to_retry(tmp_path):
    tokenizer = start(write(tmp_path), timeout_s=600, chat_template=ENDLESS)
    library = tokenizer_process._library[0][0].pid
    before = len(descendants(library))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(tokenizer.encode_chat, [{"role": "user", "content": "a"}])
        deadline_s = time.monotonic() + 60
        while len(descendants(library)) == before and time.monotonic() < deadline_s:
            time.sleep(0.01)
        tokenizer.close()
        with pytest.raises(BackendUnavailableError, match="retry"):
            call.result(60)


FRONT = """
import sys, threading, time
from pathlib import Path
from djl_python_neuronx.loading.tokenizer_process import TokenizerProcess
how = {"trust_remote_code": False, "revision": None, "chat_template": sys.argv[2]}
tokenizer = TokenizerProcess(Path(sys.argv[1]), timeout_s=600, **how)
threading.Thread(target=tokenizer.encode_chat, args=([{"role": "user", "content": "a"}],)).start()
time.sleep(0.5)
print("rendering", flush=True)
time.sleep(600)
"""


def test_they_end_with_the_front(tmp_path):
    command = [sys.executable, "-c", FRONT, write(tmp_path), ENDLESS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout.readline() == "rendering\n"
        started = descendants(front.pid)
        assert len(started) == 3
        front.kill()
        assert gone(started)


def test_a_process_that_cannot_be_started_is_an_error(tmp_path, monkeypatch):
    tokenizer = start(write(tmp_path))

    def refuse(*_):
        raise OSError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patched:
        patched.setattr(tokenizer_process, "_fork", refuse)
        with pytest.raises(BackendUnavailableError, match="cannot be started"):
            tokenizer.encode("The fox")
        with pytest.raises(BackendUnavailableError, match="free memory or processes"):
            start(tmp_path)
    assert tokenizer.decode(tokenizer.encode("The fox")) == "The fox"
    tokenizer.close()
    with pytest.raises(BackendUnavailableError, match="is being replaced"):
        tokenizer.encode("The fox")

"""The processes that run chat template and tokenizer: same results as in this one, and ended when they go too far."""

from __future__ import annotations

import gc
import marshal
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing
from multiprocessing import Pipe
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("tokenizers", reason="tokenizers is not installed")

from djl_python_neuronx.artifacts.tokenizer import load_tokenizer
from djl_python_neuronx.errors import (
    ArtifactError,
    BackendUnavailableError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    ServingError,
    TextLimitError,
)
from djl_python_neuronx.loading import forked, tokenizer_process, tokenizer_workers
from djl_python_neuronx.loading.tokenizer_process import TokenizerProcess
from djl_python_neuronx.types import Rendering
from tests.artifacts import tokenizer_folders as folders
from tests.processes import descendants

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
    answer = [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "The end"}]}]
    for rendering in (Rendering({"a": {"b": [1, None]}}, False), Rendering({}, False, True)):
        ids = expected.encode_chat(answer, rendering=rendering)
        assert found.encode_chat(answer, rendering=rendering) == ids
    for fact in ("pieces", "special_ids", "eos_id"):
        assert getattr(found, fact) == getattr(expected, fact)
    for i in range(MADE[name].get_vocab_size() + 2):
        assert found.token_bytes(i) == expected.token_bytes(i)
    assert found.special_id("</s>") == expected.special_id("</s>")
    assert type(found.library) is type(expected.library)
    found.close()


def test_a_variable_may_be_nested_as_deep_as_json(tmp_path):
    """Some versions of the library fail on it: then that is the request's error in both."""
    deep: list[object] = []
    for _ in range(1000):
        deep = [deep]

    def outcome(tokenizer):
        try:
            return tokenizer.encode_chat(MESSAGES, rendering=Rendering({"a": deep}))
        except RequestError as error:
            return str(error)

    folder = write(tmp_path)
    with closing(start(folder)) as found:
        known = load_tokenizer(folder)
        assert outcome(found) == outcome(known)
        ids = [*known.encode("fox"), known.eos_id, *known.encode("fox")]
        for skip in (True, False):
            assert found.decode(ids, skip=skip) == known.decode(ids, skip=skip)
        assert known.decode(ids) != known.decode(ids, skip=False)


def test_errors_arrive_as_they_are(tmp_path):
    folder = write(tmp_path)
    expected, found = load_tokenizer(folder), start(folder)
    calls = [
        lambda one: one.encode("\ud800"),
        lambda one: one.encode_chat([{"role": "system", "content": "a"}]),
        lambda one: one.encode_chat([{"role": "user", "content": None}]),
        lambda one: one.encode_chat(MESSAGES, max_chars=20),
        lambda one: one.encode_chat(MESSAGES, rendering=Rendering({"tools": []})),
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


def test_a_limit_may_be_as_large_as_a_number_and_the_engine_goes_first(tmp_path):
    tokenizer = start(write(tmp_path), timeout_s=1e300)
    assert tokenizer.decode(tokenizer.encode("The fox")) == "The fox"
    mine, others = (os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, worker_of(tokenizer)))
    assert others == min(mine + 10, 19)
    tokenizer.close()


def test_a_call_that_is_interrupted_leaves_no_answer_for_the_next(tmp_path, monkeypatch):
    tokenizer = start(write(tmp_path))
    ids = tokenizer.encode("The fox")

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(forked.Process, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tokenizer.encode("Another text")
    assert tokenizer.encode("The fox") == ids
    tokenizer.close()


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


def test_slow_calls_have_places_and_give_them_back(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_process, "MOST_SLOW", 2)
    tokenizer = start(write(tmp_path), timeout_s=3.0, chat_template=ENDLESS)
    for _ in range(2):
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(tokenizer.encode_chat, MESSAGES) for _ in range(3)]
            ended = wait(calls, PATIENCE_S, FIRST_COMPLETED).done
            assert [type(one.exception()) for one in ended] == [QueueFullError]
            assert tokenizer.encode("The fox")
            assert sum(one.done() for one in calls) == 1
        ends = Counter(type(one.exception()) for one in calls)
        assert ends == {QueueFullError: 1, TextLimitError: 2}
    tokenizer.close()


def test_a_call_that_takes_the_memory_costs_itself(tmp_path):
    big = "{{ '{:1999999999}'.format(messages[0].content) }}"
    tokenizer = start(write(tmp_path), timeout_s=PATIENCE_S, chat_template=big)
    with pytest.raises(TextLimitError, match="chat template takes more than 1 GiB of memory"):
        tokenizer.encode_chat(MESSAGES)
    assert tokenizer.decode(tokenizer.encode("The fox")) == "The fox"
    tokenizer.close()


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
    for level in ("worker", "loader", "library"):
        processes = {
            "worker": worker_of(tokenizer),
            "loader": tokenizer._loader.pid,
            "library": forked._library[0][0].pid,
        }
        killed = processes[level]
        ended = descendants(killed)
        if level != "library":  # it is a child of this process, and stays a zombie
            ended.append(killed)
        os.kill(killed, signal.SIGKILL)
        assert gone(ended)
        assert tokenizer.encode("The fox") == ids
    assert caplog.text.count("tokenizer_lost") == 2
    tokenizer.close()


def test_close_leaves_no_process_and_no_descriptor(tmp_path):
    folder = write(tmp_path)
    start(folder).close()  # which starts the library process
    library = forked._library[0][0].pid
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
    del tokenizer
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) <= open_files


def test_close_ends_a_call_that_runs_with_advice_to_retry(tmp_path):
    tokenizer = start(write(tmp_path), timeout_s=600, chat_template=ENDLESS)
    library = forked._library[0][0].pid
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


ENDS = """
import os, signal, sys, time
from pathlib import Path
from djl_python_neuronx.loading.tokenizer_process import TokenizerProcess
from djl_python_neuronx.telemetry import setup_logging
setup_logging()
how = {"trust_remote_code": False, "revision": None, "chat_template": None}
tokenizer = TokenizerProcess(Path(sys.argv[1]), timeout_s=60, **how)
tokenizer.encode("The fox")
loader = tokenizer._loader.pid
tokenizer.close() if sys.argv[2] == "closed" else os.kill(loader, signal.SIGKILL)
while Path(f"/proc/{loader}").exists():
    time.sleep(0.01)
"""


@pytest.mark.parametrize(("end", "logged"), [("closed", 0), ("killed", 1)])
def test_the_log_names_the_end_of_a_process_that_is_not_closed(tmp_path, end, logged):
    """The log is read to its end: all processes have ended."""
    command = [sys.executable, "-c", ENDS, write(tmp_path), end]
    log = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr
    assert log.count("tokenizer_process_ended") == logged


def test_a_process_that_cannot_be_started_is_an_error(tmp_path, monkeypatch):
    tokenizer = start(write(tmp_path))

    def refuse(*_):
        raise OSError(24, "Too many open files")

    loader = tokenizer._loader
    with monkeypatch.context() as patched:
        patched.setattr(forked, "_pipe", refuse)
        with pytest.raises(BackendUnavailableError, match="cannot be started"):
            tokenizer.encode("The fox")
        with pytest.raises(
            BackendUnavailableError, match=r"Too many open files.*; free memory or processes"
        ):
            start(tmp_path)
    assert tokenizer.decode(tokenizer.encode("The fox")) == "The fox"
    assert tokenizer._loader is loader
    tokenizer.close()
    with pytest.raises(BackendUnavailableError, match="is replaced"):
        tokenizer.encode("The fox")


def worker_of(tokenizer):
    """The process id of its idle worker."""
    return tokenizer._idle[-1].pid


@pytest.mark.parametrize("text", ["The fox", "The fox " * 10**6])
def test_a_worker_that_is_stopped_is_ended(tmp_path, monkeypatch, text):
    """The kernel's limit does not end it: a stopped process takes no signal but SIGKILL, and reads nothing."""
    monkeypatch.setattr(forked, "FORK_S", 3)
    monkeypatch.setattr(
        tokenizer_process, "MOST_SLOW", 0
    )  # it has computed nothing: it is not slow
    tokenizer = start(write(tmp_path), timeout_s=1.0)
    ids = tokenizer.encode("The fox")
    stopped = worker_of(tokenizer)
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(BackendUnavailableError, match=rf"\(pid {stopped}\) was stopped or ended"):
        tokenizer.encode(text)
    assert gone([stopped])
    assert tokenizer.encode("The fox") == ids
    tokenizer.close()


def test_a_text_of_a_worker_that_gets_no_time_takes_too_long(tmp_path, monkeypatch):
    """The kernel's limit begins when the worker reads the text: here after the front's, as on a busy machine."""
    monkeypatch.setattr(forked, "GRACE_S", 0)
    tokenizer = start(write(tmp_path), timeout_s=2.0, chat_template=ENDLESS)
    ids = tokenizer.encode("The fox")
    late = worker_of(tokenizer)
    os.kill(late, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(tokenizer.encode_chat, MESSAGES)
        time.sleep(1.0)
        os.kill(late, signal.SIGCONT)
        with pytest.raises(TextLimitError, match=r"takes more than 2 s \(option\.text_timeout\)"):
            call.result(PATIENCE_S)
    assert gone([late])
    assert tokenizer.encode("The fox") == ids
    tokenizer.close()


@pytest.mark.parametrize("text", ["The fox", "The fox " * 10**6])
def test_a_worker_that_is_killed_before_it_reads_is_no_fault_of_the_text(tmp_path, text):
    tokenizer = start(write(tmp_path), timeout_s=PATIENCE_S)
    ids = tokenizer.encode("The fox")
    killed = worker_of(tokenizer)
    os.kill(killed, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(tokenizer.encode, text)
        time.sleep(0.5)  # it is sent, or a part of it
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(BackendUnavailableError, match=rf"\(pid {killed}\) was stopped or"):
            call.result(PATIENCE_S)
    assert tokenizer.encode("The fox") == ids
    tokenizer.close()


@pytest.mark.parametrize("level", ["loader", "library"])
def test_a_process_that_is_stopped_is_replaced(tmp_path, monkeypatch, caplog, level):
    monkeypatch.setattr(forked, "FORK_S", 3)
    folder = write(tmp_path)
    tokenizer = start(folder)
    ids = tokenizer.encode("The fox")
    library = forked._library[0][0]
    stopped = library.pid if level == "library" else tokenizer._loader.pid
    os.kill(stopped, signal.SIGSTOP)
    if level == "loader":
        tokenizer._idle.clear()
        assert tokenizer.encode("The fox") == ids
        assert "tokenizer_lost" in caplog.text
    else:
        other = start(folder)  # which ends the other loader, too
        assert other.encode("The fox") == ids
        other.close()
    assert gone([stopped])
    assert tokenizer.encode("The fox") == ids
    tokenizer.close()


def test_a_loader_that_is_stopped_during_its_load_is_ended(tmp_path, monkeypatch):
    folder = write(tmp_path)
    start(folder).close()  # which starts the library process
    forks, fork = [], forked.Process.fork

    def stopped(process):
        forks.append(fork(process))
        os.kill(forks[-1].pid, signal.SIGSTOP)
        return forks[-1]

    monkeypatch.setattr(forked.Process, "fork", stopped)
    with pytest.raises(ArtifactError, match=r"cannot be loaded: it takes more than 0\.1 s"):
        start(folder, load_s=0.1)
    assert gone([forks[0].pid])


def test_close_ends_a_loader_that_is_stopped(tmp_path):
    tokenizer = start(write(tmp_path))
    tokenizer.encode("The fox")
    processes = [tokenizer._loader.pid, worker_of(tokenizer)]
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    tokenizer.close()
    assert gone(processes)


SLOW = """
import sys, time
time.sleep({seconds})
sys.path.remove({folder!r})
del sys.modules["transformers"]
import transformers
"""


def slow_import(folder, monkeypatch, seconds):
    """Let the next library process take so long to import transformers."""
    folder.mkdir()
    (folder / "transformers.py").write_text(SLOW.format(folder=str(folder), seconds=seconds))
    monkeypatch.syspath_prepend(folder)
    for process, _ in forked._library:
        process.kill()
        process.wait()


def test_the_time_of_a_load_begins_when_the_library_is_imported(tmp_path, monkeypatch):
    """A disk that is slow says nothing about a tokenizer."""
    folder = write(tmp_path / "model")
    slow_import(tmp_path / "slow", monkeypatch, 6)
    tokenizer = start(folder, load_s=4.0)
    assert tokenizer.decode(tokenizer.encode("The fox")) == "The fox"
    tokenizer.close()


def test_close_waits_for_no_load_and_others_wait_as_long_as_for_a_text(tmp_path, monkeypatch):
    folder = write(tmp_path / "model")
    tokenizer = start(folder, timeout_s=0.5)
    slow_import(tmp_path / "slow", monkeypatch, 8)
    with ThreadPoolExecutor(2) as pool:
        loads = pool.submit(tokenizer.encode, "The fox")
        deadline_s = time.monotonic() + PATIENCE_S
        while not tokenizer._forking.locked() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        with pytest.raises(BackendUnavailableError, match="is loaded again; retry"):
            tokenizer.encode("The fox")
        assert not loads.done()
        tokenizer.close()
        assert not loads.done()
        with pytest.raises(BackendUnavailableError, match="cannot be started again"):
            loads.result(PATIENCE_S)
    assert gone([tokenizer._loader.pid])


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (KeyError("a"), "KeyError"),
    ],
)
def test_an_error_of_a_load_is_named(tmp_path, monkeypatch, error, name):
    def fail(*_):
        raise error

    monkeypatch.setattr(tokenizer_workers, "_limit_memory", fail)
    front, end = Pipe()
    front.send_bytes(marshal.dumps((str(tmp_path), {}, 60.0)))
    tokenizer_workers._load_and_fork(end)
    with pytest.raises(ServingError, match=f"{tmp_path.name} cannot be loaded .{name}"):
        forked.Process(front).receive(PATIENCE_S)

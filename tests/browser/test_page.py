"""The page at `/` in headless Chromium: a person's chat, stop, keyboard, looks, and what the page sees of the server.

Chromium is the system's, driven by playwright. Judges: the example model's known answers, and axe-core for
accessibility. Screenshots of each width and colour scheme are in the test's folder (`--basetemp`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the `server` extra")
pytest.importorskip("torch", reason="needs the `cpu` extra")
api = pytest.importorskip("playwright.sync_api", reason="needs the `browser` extra")
axe = pytest.importorskip("axe_playwright_python", reason="needs the `browser` extra")

from djl_python_neuronx.errors import StepError  # noqa: E402
from djl_python_neuronx.server.app import Application  # noqa: E402
from djl_python_neuronx.server.keys import read_keys  # noqa: E402
from djl_python_neuronx.server.models import Model  # noqa: E402
from tests.clients.answers import MODEL  # noqa: E402
from tests.clients.embedded import Embedded  # noqa: E402
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend, expected  # noqa: E402
from tests.doubles.toy_service import toy_service  # noqa: E402
from tests.doubles.toy_tokenizer import TOKENIZER  # noqa: E402
from tests.processes import PATIENCE_S, engines, wait_until  # noqa: E402
from tests.server.running import CROSSING_S, Running, body, http, serving  # noqa: E402

pytestmark = pytest.mark.nightly
ENDLESS = replace(TOY_SPEC, num_slots=2, eos_ids=frozenset())
NAMES = ("chromium", "chromium-browser", "google-chrome")
AXE = Path(axe.__file__).with_name("axe.min.js")
BOTH_READY = re.compile(r"Copy 0: .*; ready\s+Copy 1: .*; ready")
KEY = "sk-first-0123456789"
REFUSED = "Failed to load resource: the server responded with a status of"
"""Chromium's own line for an answer that is an error."""
CHECKS = [
    json.loads(line)
    for line in (MODEL / "chat_checks.jsonl").read_text(encoding="utf-8").splitlines()
]


def chromium() -> str:
    """The path of a Chromium, which is installed if Debian's apt can do so."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        for words in ("update", "install --yes --no-install-recommends chromium"):
            subprocess.run(["apt-get", "--quiet", *words.split()], check=True)
        found = shutil.which(NAMES[0])
    if found is None:
        pytest.skip("needs Chromium, as of `apt-get install chromium`")
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium())
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of `djl-neuronx serve` with the example model."""
    server = Embedded.start({}, tmp_path_factory.mktemp("server"), os.environ)
    yield f"http://127.0.0.1:{server.port}/"
    server.end()


@contextmanager
def several(*models: Model) -> Iterator[Running]:
    """A server of models, whose services come sooner or later."""
    running = Running(Application(*models))
    try:
        yield running
    finally:
        running.close()
        for model in models:
            if model.service is not None:
                model.service.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open the page of a URL. At the end: no error in its console, and no request to another origin."""
    contexts, faults = [], []

    def visit(
        url: str, *, allowed: str | tuple[str, ...] = (), before: Any = None, **looks: Any
    ) -> Any:
        """`allowed`: beginnings of lines of the console; `before`: called with the page before it loads."""
        context = browser.new_context(**looks)
        context.set_default_timeout(1000 * PATIENCE_S)
        contexts.append(context)
        page = context.new_page()

        def note(fault: str) -> None:
            if not fault.startswith(allowed):
                faults.append(fault)

        def note_request(sent: Any) -> None:
            if not sent.url.startswith((origin, "data:", "blob:")):
                note(sent.url)

        origin = "/".join([*url.split("/")[:3], ""])
        page.on("console", lambda line: note(line.text))
        page.on("pageerror", lambda error: note(str(error)))
        page.on("request", note_request)
        if before is not None:
            before(page)
        page.goto(url)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not faults


expect = api.expect
expect.set_options(timeout=1000 * PATIENCE_S)


def ask(page: Any, text: str) -> None:
    """Type a message and send it."""
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def last(page: Any) -> Any:
    return page.locator("#log article").last


def answered(page: Any) -> str:
    """The text of the last answer in the DOM, once it is whole."""
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(last(page).locator(".note")).to_contain_text("tokens")
    return str(last(page).locator(".answer").text_content())


def answer_chats(page: Any, stream: str) -> None:
    """Answer the page's chats in place of the server."""
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=stream, content_type="text/event-stream"),
    )


def turns_sent(request: Any) -> list[tuple[str, str]]:
    return [(one["role"], one["content"]) for one in json.loads(request.post_data)["messages"]]


def test_answers_in_the_dom_are_the_known_ones(tiny: str, visit: Callable[..., Any]) -> None:
    page = visit(tiny)
    page.get_by_text("Parameters").click()
    page.get_by_label("Temperature").fill("0")
    bodies: list[Any] = []
    page.on("request", lambda sent: bodies.append(sent) if sent.method == "POST" else None)
    whole = 0
    for check in CHECKS:
        messages = check["messages"]
        system = messages[0]["content"] if messages[0]["role"] == "system" else ""
        page.get_by_label("System prompt").fill(system)
        page.get_by_label("Max tokens").fill(str(check["max_new_tokens"]))
        page.get_by_role("button", name="New chat").click()
        turns = messages[1:] if system else messages
        sent = [("system", system)] if system else []
        for user, known in zip(
            turns[::2], [*turns[1::2], {"content": check["completion"]}], strict=True
        ):
            ask(page, user["content"])
            found = answered(page)
            assert turns_sent(bodies[-1]) == [*sent, ("user", user["content"])]
            sent = [*turns_sent(bodies[-1]), ("assistant", found)]
            if found.strip() != known["content"].strip():
                break  # the model's own words differ from those of the check: its last question has no known answer
        else:
            assert found == check["completion"]
            whole += 1
    assert whole > len(CHECKS) / 2


def test_stop_frees_the_slot_and_keeps_what_there_is(visit: Callable[..., Any]) -> None:
    backend = ToyBackend(replace(ENDLESS, max_model_len=100_000), step_s=0.01)
    with serving(backend) as server:
        page = visit(server.url)
        page.get_by_text("Parameters").click()
        page.get_by_label("Temperature").fill("0")
        bodies: list[Any] = []
        page.on("request", lambda sent: bodies.append(sent) if sent.method == "POST" else None)
        stops = (
            lambda: page.keyboard.press("Escape"),
            lambda: page.get_by_role("button", name="Stop").click(),
            lambda: page.get_by_role("button", name="Stop").press("Enter"),
        )
        start = TOKENIZER.decode(expected([1, 5, 6], 3))
        for i, stop in enumerate(stops):
            ask(page, "<5><6>")
            expect(last(page).locator(".answer")).to_contain_text("<" if i else start)
            wait_until(lambda: backend.acquired)
            stop()
            expect(last(page).locator(".note")).to_have_text("Stopped")
            wait_until(lambda: not backend.acquired)
            expect(page.get_by_role("button", name="Send")).to_be_visible()
        texts = page.locator("#log .answer").all_text_contents()
        roles = ("user", "assistant", "user", "assistant", "user")
        assert turns_sent(bodies[-1]) == [*zip(roles, texts[:-1], strict=True)]
        assert texts[1].startswith(start)


def test_it_needs_no_mouse(visit: Callable[..., Any]) -> None:
    models = [Model(name) for name in ("first", "second")]
    for model in models:
        model.service = toy_service(ToyBackend(ENDLESS), model_name=model.names[0])
    with several(*models) as server:
        page = visit(server.url)
        check_keyboard(page)


def check_keyboard(page: Any) -> None:
    keyboard = page.keyboard

    def focused() -> str:
        return str(
            page.evaluate("() => document.activeElement.id || document.activeElement.textContent")
        )

    expect(page.locator("#model option")).to_have_count(2)
    assert focused() == "prompt"
    links = page.locator("#links a").all_text_contents()
    assert len(links) > 1
    for name in ("send", "Parameters", *links):
        keyboard.press("Tab")
        assert focused() == name
    page.get_by_label("Model").focus()  # beyond the browser's own buttons
    keyboard.press("ArrowDown")
    for name in ("fresh", "log", "prompt"):
        keyboard.press("Tab")
        assert focused() == name
    keyboard.press("Tab")
    keyboard.press("Tab")
    keyboard.press("Space")  # on the summary of the parameters
    for name, typed in (("system", "<7>"), ("temperature", "0"), ("topP", ""), ("maxTokens", "4")):
        keyboard.press("Tab")
        assert focused() == name
        keyboard.type(typed)
    page.get_by_label("Message").focus()
    keyboard.type("<5>")
    keyboard.press("Shift+Enter")
    keyboard.type("<6>")
    with page.expect_request("**/v1/chat/completions") as sent:
        keyboard.press("Enter")
    assert json.loads(sent.value.post_data) == {
        "model": "second",
        "messages": [{"role": "system", "content": "<7>"}, {"role": "user", "content": "<5>\n<6>"}],
        "temperature": 0,
        "max_completion_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    newline = TOKENIZER.encode("\n", special=False)
    assert answered(page) == TOKENIZER.decode(expected([1, 7, 5, *newline, 6], 4))
    expect(last(page).locator(".note")).to_contain_text("4 tokens")


def test_texts_are_never_markup_and_reasoning_stands_apart(
    tiny: str, visit: Callable[..., Any]
) -> None:
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>&amp;"
    deltas = [
        {"reasoning_content": evil},
        {"reasoning_content": "!"},
        {"content": evil},
        {"content": "."},
    ]
    parts = [{"choices": [{"index": 0, "delta": one, "finish_reason": None}]} for one in deltas]
    parts += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}]
    parts += [{"choices": [], "usage": {"completion_tokens": 9}}]
    stream = "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n"
    page = visit(tiny)
    answer_chats(page, stream)
    ask(page, evil)
    assert answered(page) == evil + "."
    expect(last(page).locator(".note")).to_contain_text("9 tokens")
    expect(last(page).locator(".note")).to_contain_text("cut off")
    assert last(page).locator(".thought").text_content() == evil + "!"
    details = last(page).locator("details")
    expect(details).not_to_have_attribute("open", "")
    details.locator("summary").press("Enter")
    expect(details.locator(".thought")).to_be_visible()
    assert page.locator("#log .user .answer").text_content() == evil
    assert page.locator("#log").locator("img, script").count() == 0


def test_errors_are_shown_and_the_message_can_be_sent_again(visit: Callable[..., Any]) -> None:
    with serving() as server:
        page = visit(server.url, allowed=REFUSED)
        page.get_by_text("Parameters").click()
        page.get_by_label("Top p").fill("7")
        ask(page, "<5>")
        expect(last(page).locator(".note")).to_contain_text("top_p")
        expect(page.locator("#said")).to_contain_text("Error: ")
        expect(page.get_by_label("Message")).to_have_value("<5>")
        page.get_by_label("Top p").fill("")
        with page.expect_request("**/v1/chat/completions") as sent:
            page.get_by_label("Message").press("Enter")
        assert turns_sent(sent.value) == [("user", "<5>")]
        answered(page)
        page.get_by_label("Seed").fill("99999999999999999999")
        ask(page, "<6>")
        assert page.locator("#log article").count() == 4, (
            "a seed that JavaScript has no number for is not sent"
        )
        page.get_by_label("Seed").fill("9007199254740991")
        ask(page, "<6>")
        expect(page.locator("#log article")).to_have_count(6)
        answered(page)


def test_a_stream_that_breaks_off_is_an_error(tiny: str, visit: Callable[..., Any]) -> None:
    part = {"choices": [{"index": 0, "delta": {"content": "one"}, "finish_reason": None}]}
    error = {"error": {"message": "the step failed", "type": "server_error"}}
    page = visit(tiny)
    for more, note in (
        ("", "the answer broke off"),
        (f"data: {json.dumps(error)}\n\n", "the step failed"),
    ):
        answer_chats(page, f"data: {json.dumps(part)}\n\n{more}")
        ask(page, "two")
        expect(last(page).locator(".note")).to_have_text(f"Error: {note}")
        assert last(page).locator(".answer").text_content() == "one"


def test_a_key_is_asked_for_and_kept_in_the_tab(visit: Callable[..., Any]) -> None:
    with serving(api_keys=read_keys(None, KEY)) as server:
        page = visit(server.url, allowed=REFUSED)
        state, field = page.locator("#state"), page.get_by_label("API key")
        expect(state).to_have_text("This server needs an API key.")
        field.fill("wrong")
        field.press("Tab")
        expect(state).to_have_text("The server refuses this API key.")
        field.fill(KEY)
        field.press("Tab")
        expect(state).to_have_text("Ready")
        expect(page.locator("#model option")).to_have_text("toy")
        ask(page, "<5>")
        answered(page)
        with page.context.expect_page() as opened:
            page.get_by_role("link", name="Facts of the model").click()
        expect(opened.value.locator("body")).to_contain_text('"model":"toy"')
        opened.value.close()
        page.reload()
        expect(page.locator("#model option")).to_have_text("toy")
        assert page.evaluate("() => [Object.values(localStorage), document.cookie]") == [[], ""]
        assert KEY not in page.url
        other = visit(server.url, allowed=REFUSED)
        expect(other.locator("#state")).to_have_text("This server needs an API key.")


def test_the_first_message_may_come_before_the_names_of_models(visit: Callable[..., Any]) -> None:
    models = [Model(name) for name in ("a", "b")]
    for name, model in zip(("a", "b"), models, strict=True):
        model.service = toy_service(ToyBackend(TOY_SPEC), model_name=name)
    with several(*models) as server:

        def unseen(page: Any) -> None:  # the first look never ends
            page.route("**/ping", lambda _: None)

        page = visit(server.url, before=unseen)
        ask(page, "<5>")
        answered(page)
        expect(page.locator("#model option")).to_have_text(["a", "b"])


def test_without_metrics_on_this_port_it_still_chats(visit: Callable[..., Any]) -> None:
    with serving() as server:

        def gone(page: Any) -> None:  # as with `option.admin_port`
            for path in ("metrics", "info"):
                page.route(f"**/{path}", lambda route: route.fulfill(status=404, body="{}"))

        page = visit(server.url, allowed=REFUSED, before=gone)
        expect(page.locator("#liveNote")).to_have_text("The metrics are not on this port.")
        ask(page, "<5>")
        answered(page)


def test_it_follows_loads_a_lost_copy_and_an_absence(visit: Callable[..., Any]) -> None:
    lone, pair = Model("lone"), Model("pair")
    backends = [ToyBackend(ENDLESS) for _ in range(3)]
    with several(lone, pair) as server:
        page = visit(server.url, allowed=(REFUSED, "Failed to load resource: net::ERR_INTERNET"))
        state, cards = page.locator("#state"), page.locator("#models section")
        expect(state).to_contain_text("Not ready: lone: the model is still loading")
        page.get_by_text("Parameters").click()
        page.get_by_label("Max tokens").fill("3")
        ask(page, "<5>")
        expect(last(page).locator(".note")).to_contain_text("Error: ")
        lone.service = toy_service(backends[0], model_name="lone")
        expect(page.locator("#model option")).to_have_text(["lone"])
        expect(cards.nth(1).locator(".problem")).to_contain_text("the model is still loading")
        pair.service = toy_service(*backends[1:], model_name="pair")
        expect(state).to_have_text("Ready")
        expect(page.locator("#model option")).to_have_text(["lone", "pair"])
        copies = cards.nth(1).locator(".copies")
        expect(copies).to_have_text(BOTH_READY)
        expect(cards.nth(1).locator(".slots")).to_have_text("0 of 4")
        expect(cards.nth(1).locator(".problem")).to_have_text("")
        error = StepError("the device is gone")
        error.fatal = True
        backends[1].fail_at[backends[1].num_steps] = error
        page.get_by_label("Model").select_option("pair")
        ask(page, "<5>")
        answered(page)
        expect(copies).to_have_text(re.compile(r"Copy 0: .*; the engine has ended"))
        expect(copies).to_have_text(re.compile(r"Copy 1: 0 of 2 slots, 0 waiting; ready"))
        page.context.set_offline(True)
        expect(state).to_have_text("Not ready: the server cannot be reached")
        page.context.set_offline(False)
        expect(state).to_have_text("Ready")


def test_it_follows_a_restart(visit: Callable[..., Any], tmp_path: Path) -> None:
    server = Embedded.start({"replicas": 2}, tmp_path, os.environ)
    try:
        check_restarts(visit(f"http://127.0.0.1:{server.port}/", allowed=REFUSED), server.front)
    finally:
        server.end()


def check_restarts(page: Any, front: int) -> None:
    copies = page.locator(".copies")
    expect(copies).to_have_text(BOTH_READY)
    os.kill(engines(front)[0], signal.SIGKILL)
    expect(copies).not_to_have_text(BOTH_READY)
    expect(copies).to_have_text(BOTH_READY)
    for pid in engines(front):
        os.kill(pid, signal.SIGKILL)
    expect(page.locator("#state")).to_contain_text("Not ready: ")
    expect(page.locator("#state")).to_have_text("Ready")
    expect(copies).to_have_text(BOTH_READY)
    ask(page, "reverse: hut 0 nut ->")
    answered(page)


LOOKS = (
    {"generated_tokens_total": 100, "decode_seconds_sum": 5, "decode_seconds_count": 1000},
    {"generated_tokens_total": 350, "decode_seconds_sum": 5.5, "decode_seconds_count": 1040},
    {"generated_tokens_total": 350, "decode_seconds_sum": 5.5, "decode_seconds_count": 1040},
    {"generated_tokens_total": 7, "decode_seconds_sum": 0.1, "decode_seconds_count": 1},
)
SHOWN = (("–", "–"), ("125.0 /s", "12.5 ms"), ("0.0 /s", "–"), ("–", "–"))
"""Tokens and decode step at each look, 2 s after the one before; the last one is of a server that began again."""
SHARES = {
    "kv_cache_used_tokens": 32,
    "kv_cache_tokens": 256,
    "cached_prompt_tokens_total": 30,
    "prompt_tokens_total": 40,
}


def test_rates_are_differences_between_two_looks(visit: Callable[..., Any]) -> None:
    """The browser's clock is held."""
    left = iter(LOOKS)

    def exposition() -> str:
        values = {**next(left), **SHARES}
        return "".join(f'djl_neuronx_{n}{{model="toy"}} {value}\n' for n, value in values.items())

    with serving() as server:

        def hold(page: Any) -> None:
            page.clock.install()
            page.clock.pause_at(page.evaluate("() => Date.now() + 1000"))
            page.route("**/metrics", lambda route: route.fulfill(body=exposition()))

        page = visit(server.url, before=hold)
        for i, (speed, decode) in enumerate(SHOWN):
            if i:
                page.clock.run_for(2000)
            expect(page.locator(".decode")).to_have_text(decode)
            expect(page.locator(".speed")).to_have_text(speed)
            expect(page.locator(".used")).to_have_text("12.5 %")
            expect(page.locator(".cached")).to_have_text("75.0 %")


def test_gauges_are_those_of_now(visit: Callable[..., Any]) -> None:
    backend = ToyBackend(replace(ENDLESS, num_slots=1), step_s=CROSSING_S)
    with serving(backend) as server:
        page = visit(server.url)
        expect(page.locator(".slots")).to_have_text("0 of 1")
        sent = {"json": body([5], 120)}
        senders = [
            threading.Thread(target=http.post, args=(f"{server.url}/invocations",), kwargs=sent)
            for _ in range(3)
        ]
        for sender in senders:
            sender.start()
        waiting = 'djl_neuronx_waiting_requests{copy="0",model="toy"} 2.0'
        wait_until(lambda: waiting in http.get(f"{server.url}/metrics").text)
        backend.hang_at.update(range(backend.num_steps, backend.num_steps + 10))
        expect(page.locator(".slots")).to_have_text("1 of 1")
        expect(page.locator(".waiting")).to_have_text("2")
        backend.resume.set()
        for sender in senders:
            sender.join()
        expect(page.locator(".slots")).to_have_text("0 of 1")
        expect(page.locator(".waiting")).to_have_text("0")


def test_it_works_behind_a_prefix(tiny: str, visit: Callable[..., Any]) -> None:
    prefix = f"{tiny}tools/chat"

    def proxy(page: Any) -> None:
        page.route(
            f"{prefix}**",
            lambda route: route.continue_(url=route.request.url.replace("tools/chat", "", 1)),
        )
        page.route(
            f"{prefix}/**",
            lambda route: route.continue_(url=route.request.url.replace("tools/chat/", "", 1)),
        )

    for url in (prefix, f"{prefix}/"):
        page = visit(url, before=proxy)
        ask(page, "reverse: hut 0 nut ->")
        answered(page)
        link = page.get_by_role("link", name="Metrics")
        assert link.evaluate("link => link.href") == f"{prefix}/metrics"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 800), (375, 700)])
def test_it_is_accessible_and_fits(
    tiny: str, visit: Callable[..., Any], scheme: str, size: tuple[int, int], tmp_path: Path
) -> None:
    width, height = size
    looks = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
    page = visit(tiny, allowed=REFUSED, before=lambda page: page.add_init_script(path=AXE), **looks)
    page.get_by_text("Parameters").click()
    page.get_by_label("Temperature").fill("0")
    page.locator("#keyField").evaluate("field => (field.hidden = false)")
    ask(page, "copy: cat dog -> " + "long" * 60)
    answered(page)
    page.get_by_label("Top p").fill("7")
    ask(page, "1 2 3")
    expect(last(page).locator(".note")).to_contain_text("top_p")
    expect(last(page).locator(".note")).to_be_in_viewport()
    expect(page.locator(".slots")).to_contain_text(" of ")
    page.screenshot(path=tmp_path / f"{width}-{scheme}.png", full_page=True)
    found = page.evaluate("() => axe.run()")
    assert not [(one["id"], [node["html"] for node in one["nodes"]]) for one in found["violations"]]
    assert {"color-contrast", "label", "aria-allowed-role"} <= {
        one["id"] for one in found["passes"]
    }
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width

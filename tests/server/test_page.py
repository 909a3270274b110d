"""The page at `/`: who gets it, what its policy allows, and that its file asks for nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest

pytest.importorskip("uvicorn", reason="needs the `server` extra")

from djl_python_neuronx.server import page
from djl_python_neuronx.server.app import Application, create_app
from djl_python_neuronx.server.keys import read_keys
from djl_python_neuronx.server.models import Model
from djl_python_neuronx.telemetry import METRICS
from tests.server.running import Running, answer, body, http, serving

TEXT = page._FILE.read_text(encoding="utf-8")
BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"}
"""The header that Chromium sends for an address of its location bar."""
KEY = "sk-first-0123456789"


class Elements(HTMLParser):
    """The page's tags with their attributes, and the contents of its style and its script."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.contents: dict[str, str] = {}
        self.feed(TEXT)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if (tag := self.tags[-1][0] if self.tags else "") in {"style", "script"} and data.strip():
            self.contents.setdefault(tag, data)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


def test_a_browser_gets_it_and_all_others_what_they_got(server: Running) -> None:
    found = http.get(server.url, headers=BROWSER)
    assert (found.status_code, found.text) == (200, TEXT)
    assert found.headers["content-type"] == "text/html; charset=utf-8"
    assert found.headers["vary"] == "accept"
    assert http.get(server.url, headers={"accept": "TEXT/HTML"}).text == TEXT
    assert found.headers["x-content-type-options"] == "nosniff"
    assert found.headers["referrer-policy"] == "no-referrer"
    head = http.head(server.url, headers=BROWSER)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(TEXT.encode()))
    with serving(page=False) as without:
        for accept in ("*/*", "application/json"):
            ours, before = (
                http.get(one.url, headers={"accept": accept}) for one in (server, without)
            )
            assert (ours.status_code, ours.headers["allow"]) == (405, "POST")
            assert ours.content == before.content
        assert http.get(without.url, headers=BROWSER).status_code == 405
        for one in (server, without):
            sent = http.post(one.url, json=body([5, 6]), headers=BROWSER)
            assert sent.json()[0]["generated_text"] == answer([5, 6])
    assert http.get(server.url + "/nowhere", headers=BROWSER).status_code == 404


def test_it_needs_no_key_and_everything_else_does() -> None:
    with serving(api_keys=read_keys(None, KEY), cors_allow_origins="https://a.test") as server:
        found = http.get(server.url, headers={**BROWSER, "origin": "https://a.test"})
        assert (found.status_code, found.text) == (200, TEXT)
        assert not [name for name in found.headers if name.startswith("access-control")]
        others = ("/info", "/metrics", "/openapi.json", "/v1/models", "//", "/page.html")
        refused = [http.get(server.url + path, headers=BROWSER) for path in others]
        refused += [http.get(server.url), http.post(server.url, json=body([5]), headers=BROWSER)]
        assert {one.status_code for one in refused} == {401}


def test_its_policy_allows_its_own_style_and_script_and_its_server_alone(server: Running) -> None:
    policy = http.get(server.url, headers=BROWSER).headers["content-security-policy"]
    found = dict(rule.split(" ", 1) for rule in policy.split("; "))
    hashes = {
        f"{tag}-src": "'sha256-"
        + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        + "'"
        for tag, content in Elements().contents.items()
    }
    assert hashes.keys() == {"style-src", "script-src"}
    nothing = ("default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types")
    assert found == {
        **hashes,
        **dict.fromkeys(nothing, "'none'"),
        "img-src": "data:",
        "connect-src": "'self'",
        "require-trusted-types-for": "'script'",
    }


def test_its_file_names_no_other_place_and_makes_no_markup_of_texts() -> None:
    attributes = [
        (tag, name, value) for tag, given in Elements().tags for name, value in given.items()
    ]
    assert not [one for one in attributes if one[1].startswith("on") or one[1] in {"src", "style"}]
    paths = {route.path for route in create_app(Application(Model("toy"))).routes}  # type: ignore[attr-defined]
    linked = {value for tag, name, value in attributes if name == "href" and tag == "a"}
    asked = set(re.findall(r'\brequest\("([^"]+)"', TEXT))
    assert asked == {"ping", "metrics", "info", "v1/models", "v1/chat/completions"}
    assert {f"/{path}" for path in asked | linked} <= paths
    code = re.sub(r"(^|\s)// .*", "", TEXT, flags=re.MULTILINE)
    for word in ("//", "HTML", "document.write", "eval(", "Function(", "localStorage", "cookie"):
        assert word not in code, word


def test_its_metrics_exist() -> None:
    read = re.findall(r'\b(?:now|gained|mean|total)\((?:samples, )?"(\w+)"', TEXT)
    assert {"slots_in_use", "decode_seconds", "generated_tokens_total"} <= set(read) <= set(METRICS)

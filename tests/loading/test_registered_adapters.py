"""Adapters that are registered while the example model serves: where they may come from, and whose text is whose.

The texts are transformers' own, of the model with an adapter's product added to its weights: LoRA's definition.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the `cpu` extra")

from transformers import AutoTokenizer

from djl_python_neuronx.errors import ArtifactAccessError, ArtifactError, RequestError
from djl_python_neuronx.loading.adapters import is_below
from djl_python_neuronx.service import Service
from tests.backends.tnx_engine import reference
from tests.doubles.lora_adapters import save_merged, write_adapter
from tests.doubles.tiny_models import load_reference
from tests.processes import engines, wait_until

MODEL = Path(__file__).parents[2] / "examples" / "tiny-llama"
PROMPT = "15 20 25 30"
NUM_TOKENS = 12
NAMES = ("one", "two", "three")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of three adapters."""
    place = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(place / name, seed=i) for i, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def texts(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The greedy text of each adapter, and of the model itself ("")."""
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    models = {"": MODEL}
    for name, folder in folders.items():
        models[name] = save_merged(MODEL, folder, tmp_path_factory.mktemp("merged") / name)
    ids = tokenizer.encode(PROMPT)
    found = {
        name: tokenizer.decode(reference(load_reference(model), ids, NUM_TOKENS).tokens)
        for name, model in models.items()
    }
    assert len({*found.values()}) == len(found), found
    return found


def load(**overrides: str) -> Service:
    settings = {"model_loader": "cpu", "dtype": "fp32", "enable_lora": "true", "max_loras": "2"}
    return Service.load(None, MODEL, overrides={**settings, **overrides})


def asked(service: Service, adapter: str = "") -> str:
    """The text of a greedy request."""
    parameters = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    body = {"inputs": PROMPT, "parameters": parameters, "adapters": adapter}

    async def content() -> bytes:
        parsed = service.parse(json.dumps(body).encode())
        deltas = service.loop.generate(service.loop.prepare(*parsed.requests))
        return b"".join([parsed.formatter.feed(delta) async for delta in deltas])

    text: str = json.loads(asyncio.run(content()))["generated_text"]
    return text


@pytest.fixture
def service(folders: dict[str, Path]) -> Iterator[Service]:
    made = load(
        engine_process="false",
        enable_prefix_caching="true",
        adapters=f"one={folders['one']}",
        adapter_sources=f"{folders['one'].parent},neighbour",
    )
    yield made
    made.close()


def test_a_place_that_is_taken_again_reads_no_keys_of_the_adapter_before(
    service: Service, folders: dict[str, Path], texts: dict[str, str]
) -> None:
    for name in ("", "one", "one", ""):
        assert asked(service, name) == texts[name]
    service.adapters.register("two", str(folders["two"]))
    assert [asked(service, name) for name in ("two", "one")] == [texts["two"], texts["one"]]
    service.adapters.unregister("one")
    service.adapters.register("three", str(folders["three"]))
    assert service.loop.places == {"two": 2, "three": 1}
    assert [asked(service, name) for name in ("three", "two", "")] == [
        texts[name] for name in ("three", "two", "")
    ]
    service.adapters.unregister("two")
    service.adapters.register("three", str(folders["one"]), replaces=True)
    assert service.loop.places == {"three": 2}
    assert asked(service, "three") == texts["one"]


def test_only_allowed_places_give_adapters(
    service: Service, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Whatever it is that lies elsewhere, nothing of it is read."""
    outside = write_adapter(tmp_path / "outside", seed=9)
    allowed = folders["one"].parent
    link = allowed / "link"
    link.symlink_to(outside)
    inside = tmp_path / "inside"
    inside.symlink_to(folders["two"])
    refused = [
        str(outside),
        f"{allowed}/../outside",
        str(link),
        f"{allowed}-2",
        "",
        "/",
        "one",
        "owner/two",
    ]
    refused += [
        "s3://bucket/one",
        f"file://{folders['two']}",
        "\0",
        f"{folders['two']}\0",
        "two\n",
        "x" * 9999,
    ]
    for source in refused:
        with pytest.raises(RequestError, match=r"may not come from .*option\.adapter_sources"):
            service.adapters.register("x", source)
    link.unlink()
    dora = write_adapter(allowed / "dora", use_dora=True)
    cut = write_adapter(allowed / "cut")
    (cut / "adapter_model.safetensors").write_bytes(b"cut")
    for name, source in (
        ("x", dora),
        ("x", cut),
        ("x", write_adapter(allowed / "large", rank=17)),
        ("tiny-llama", folders["two"]),
        ("a/b", folders["two"]),
        ("", folders["two"]),
        ("x", allowed),
        ("x", allowed / "none"),
        ("one", folders["two"]),
    ):
        with pytest.raises(RequestError):
            service.adapters.register(name, str(source))
    service.adapters.register("x", str(inside))


def test_a_failure_of_the_hub_is_no_mistake_of_a_request(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Path:
        message = "the hub is down"
        raise ArtifactAccessError(message)

    monkeypatch.setattr("djl_python_neuronx.artifacts.fetch.fetch", fail)
    with pytest.raises(ArtifactAccessError, match="is down"):
        service.adapters.register("x", "neighbour/x")
    assert ArtifactAccessError.status == 500


def test_values_that_are_not_finite_are_refused(
    service: Service, folders: dict[str, Path], texts: dict[str, str]
) -> None:
    spoilt = folders["one"].parent / "spoilt"
    problem = rf"{spoilt}.*layers\.0\.self_attn\.q_proj\.lora_[AB].* not finite"
    cases: list[dict[str, Any]] = [
        {"size": float("nan")},
        {"size": float("inf")},
        {"size": 1e30, "lora_alpha": 1e18},
    ]
    for fields in cases:
        write_adapter(spoilt, **fields)
        for name, replaces in (("spoilt", False), ("one", True)):
            with pytest.raises(RequestError, match=problem):
                service.adapters.register(name, str(spoilt), replaces=replaces)
    assert service.loop.places == {"one": 1}
    assert [asked(service, name) for name in ("one", "")] == [texts["one"], texts[""]]
    with pytest.raises(ArtifactError, match=problem):
        load(engine_process="false", adapters=f"spoilt={spoilt}")


SOURCES = [
    ("s3://b/a/x", "s3://b/a", True),
    ("s3://b/a", "s3://b/a/", True),
    ("s3://b/ax", "s3://b/a", False),
    ("s3://b/a/../c", "s3://b/a", False),
    ("s3://b/a@v", "s3://b/a", False),
    ("s3://bb/a", "s3://b", False),
    ("owner/x", "owner", True),
    ("owner/x@main", "owner/x", True),
    ("owner/x@main", "owner", True),
    ("owners/x", "owner", False),
    ("owner/../x", "owner", False),
    ("/a/b", "/a", True),
    ("/a/b/../../c", "/a", False),
    ("a/b", "/a", False),
]


@pytest.mark.parametrize(("source", "place", "is_allowed"), SOURCES)
def test_places_of_sources(source: str, place: str, is_allowed: bool) -> None:
    assert is_below(source, place) is is_allowed


def test_without_the_option_nothing_changes(
    folders: dict[str, Path], texts: dict[str, str]
) -> None:
    """But what is there may be registered again, as DJL Serving does at its start."""
    service = load(engine_process="false", adapters=f"one={folders['one']}")
    try:
        service.adapters.register("one", str(folders["one"]))
        changes: list[Callable[[], None]] = [
            lambda: service.adapters.register("two", str(folders["two"])),
            lambda: service.adapters.register("one", str(folders["two"])),
            lambda: service.adapters.register("one", str(folders["two"]), replaces=True),
            lambda: service.adapters.register("one", str(folders["one"]), replaces=True),
            lambda: service.adapters.unregister("one"),
        ]
        for change in changes:
            with pytest.raises(RequestError, match=r"option\.adapter_sources"):
                change()
        assert service.loop.places == {"one": 1}
        assert asked(service, "one") == texts["one"]
    finally:
        service.close()


def test_an_engine_that_is_killed_comes_back_with_the_adapters_of_now(
    folders: dict[str, Path], texts: dict[str, str]
) -> None:
    service = load(adapters=f"one={folders['one']}", adapter_sources=str(folders["one"].parent))
    try:
        service.adapters.register("two", str(folders["two"]))
        service.adapters.unregister("one")
        service.adapters.register("one", str(folders["three"]))
        (engine,) = engines(os.getpid())
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: not service.loop.alive)
        assert [asked(service, name) for name in ("one", "two", "")] == [
            texts[name] for name in ("three", "two", "")
        ]
    finally:
        service.close()


def test_adapters_beside_the_model_are_there(
    folders: dict[str, Path], texts: dict[str, str], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    shutil.copytree(folders["two"], model / "adapters" / "law")
    service = Service.load(
        None,
        model,
        overrides={
            "model_loader": "cpu",
            "dtype": "fp32",
            "enable_lora": "true",
            "engine_process": "false",
        },
    )
    try:
        assert service.loop.places == {"law": 1}
        assert asked(service, "law") == texts["two"]
    finally:
        service.close()

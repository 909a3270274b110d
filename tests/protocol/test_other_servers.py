"""Fields that other servers have and this one has not."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import chain, product
from typing import Any, get_args

import pytest

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.errors import RequestError, UnsupportedParameterError
from djl_python_neuronx.protocol import PROTOCOLS
from djl_python_neuronx.protocol.anthropic import MessagesParameters
from djl_python_neuronx.protocol.neutral import NEUTRAL, OF_MESSAGES, OF_RESPONSES
from djl_python_neuronx.protocol.openai_chat import ChatParameters
from djl_python_neuronx.protocol.openai_completions import CompletionParameters
from djl_python_neuronx.protocol.openai_responses import ResponsesParameters
from djl_python_neuronx.protocol.parameters import validated
from djl_python_neuronx.protocol.text_generation import Parameters
from djl_python_neuronx.protocol.tokenize import TokenizeBody
from tests.protocol.other_servers import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, TOKENIZE
from tests.protocol.parsing import parse


def chat(fields: Mapping[str, Any]) -> None:
    parse({"messages": [{"role": "user", "content": "<5>"}], **fields}, path="/v1/chat/completions")


def message(fields: Mapping[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "<5>"}], "max_tokens": 9, **fields}
    parse(body, path="/v1/messages")


def tokenize(fields: Mapping[str, Any]) -> None:
    parse({"messages": [{"role": "user", "content": "<5>"}], **fields}, path="/tokenize")


def respond(fields: Mapping[str, Any]) -> None:
    parse({"input": "<5>", **fields}, path="/v1/responses")


def complete(fields: Mapping[str, Any]) -> None:
    parse({"prompt": "<5>", **fields}, path="/v1/completions")


def generate(fields: Mapping[str, Any]) -> None:
    for path in ("/generate", "/invocations"):
        parse({"inputs": "<5>", "parameters": fields}, path=path)


ROUTES = pytest.mark.parametrize(
    ("send", "servers", "model"),
    [
        (chat, CHAT, ChatParameters),
        (message, MESSAGES, MessagesParameters),
        (complete, COMPLETIONS, CompletionParameters),
        (generate, GENERATE, Parameters),
        (tokenize, TOKENIZE, TokenizeBody),
        (respond, RESPONSES, ResponsesParameters),
    ],
)
OTHERS = (None, False, True, -1, 0, 1, 0.5, "", "x", "none", [], ["x"], {}, {"type": "json_object"})


@ROUTES
def test_values_without_effect_are_accepted(send: Any, servers: Any, model: Any) -> None:
    failed = []
    for source, fields in servers.items():
        for one in (fields, *({name: value} for name, value in fields.items())):
            try:
                send(one)
            except Exception as error:  # noqa: BLE001, PERF203
                failed.append((source, str(error)))
    assert not failed


@ROUTES
def test_all_other_values_are_refused_by_name(send: Any, servers: Any, model: Any) -> None:
    def same(one: object, other: object) -> bool:
        return one == other and isinstance(one, bool) == isinstance(other, bool)

    neutral: dict[str, list[Any]] = {}
    for fields in servers.values():
        for name, value in fields.items():
            if name not in model.model_fields and name not in model.without_effect:
                neutral.setdefault(name, [None]).append(value)
    assert neutral
    passed = []
    for name, values in neutral.items():
        for other in OTHERS:
            if any(same(other, value) for value in (*values, *NEUTRAL[name])):
                continue
            with pytest.raises(
                UnsupportedParameterError, match=f"{name!r} is not supported"
            ) as caught:
                send({name: other})
            assert caught.value.param == name
            passed.append(name)
    assert set(passed) == set(neutral)


def test_the_table_has_no_field_that_no_server_has() -> None:
    every = (CHAT, MESSAGES, RESPONSES, COMPLETIONS, GENERATE)
    tables = [fields for servers in every for fields in servers.values()]
    known = {name for fields in tables for name in fields}
    assert {*NEUTRAL, *OF_MESSAGES, *OF_RESPONSES} <= known


@ROUTES
def test_a_protocols_own_fields_are_unknown_in_others(send: Any, servers: Any, model: Any) -> None:
    for name in (OF_MESSAGES | OF_RESPONSES) - model.without_effect:
        with pytest.raises(UnsupportedParameterError, match=f"unknown parameter {name!r}"):
            send({name: 1})


def test_errors_of_any_field_are_in_plain_words() -> None:
    """None is in pydantic's: "a valid dictionary", "instance of", "should have at least 1 item"."""
    values = (5, 1.5, "x", [], {}, [5], ["x"], [{}], [{"type": "function"}], {"type": "x"}, True)
    options, refused = ServingOptions(model_name="toy"), []
    for protocol in PROTOCOLS:
        whole = json.loads(protocol.outline.replace("{…}", "{}"))
        given = [[one, *get_args(one)] for one in protocol.requests.values()]
        models = [one for one in chain.from_iterable(given) if hasattr(one, "model_fields")]
        for model, value in product(models, values):
            for name in model.model_fields:
                try:
                    validated(model, {**whole, name: value}, options)
                except RequestError as error:  # noqa: PERF203
                    refused.append((model, value, str(error)))
    words = re.compile(r"\bvalid |instance of|should|\(\)|literal\[|constrained|function-")
    assert not [one for one in refused if words.search(one[-1])]
    assert len(refused) > 2000

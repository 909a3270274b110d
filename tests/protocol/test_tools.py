"""Formats of calls and reasoning by a model's chat template, and the models of `tools` and `tool_choice`."""

from __future__ import annotations

import pytest

from djl_python_neuronx.protocol.tools import REASONING_FORMATS, TOOL_FORMATS, found_format

TEMPLATES = {
    # As in Qwen 2.5 and 3: a text within quotes of Jinja.
    r'{{- "with its name, inside tags:\n<tool_call>\n{\"name\": <name>, \"arguments\": <json>}" }}': "hermes",
    """{{ "<tool_call>" + '{"arguments": ' + call.arguments + '}' }}""": "hermes",
    # As in Qwen 3 Coder and GLM 4.5, whose calls are no JSON.
    r"{{- '<tool_call>\n<function=' + call.name + '>\n' }}": None,
    r"{{- '<tool_call>' + call.name + '\n<arg_key>' }}": None,
    "{{ 'write <|tool_call|> and then a list' }}": "granite",
    "{{ 'write <tool_call>[' + calls + ']' }}": "granite",
    "{{ '[TOOL_CALLS] [' + calls + ']' }}": "mistral",
    "{{ '[TOOL_CALLS]' + call.name + '[ARGS]' + call.arguments }}": "mistral",
    'Write {"name": function name, "parameters": …}': "llama3_json",
    "{{ '<\uff5ctool\u2581call\u2581begin\uff5c>' + call.type }}\n```json\n": "deepseek_v3",
    "{{ '<\uff5ctool\u2581call\u2581begin\uff5c>' + call.name }}": "deepseek_v31",
    "{{ bos_token }}{{ message.content }}": None,
}
THINKING = {
    "{{ '<think>\n' }}": "deepseek_r1",
    "{{ content.split('</think>')[-1] }}": "deepseek_r1",
    "{{ 'put it between [THINK] and [/THINK]' }}": "mistral",
    "{{ \"Begin with 'Here is my thought process:'\" }}": "granite",
    "{{ content }}": None,
}


def test_a_format_is_found_by_the_template() -> None:
    for formats, table in ((TOOL_FORMATS, TEMPLATES), (REASONING_FORMATS, THINKING)):
        for template, name in table.items():
            found = found_format(formats, "auto", template)  # type: ignore[type-var]
            assert (found and found.name) == name, template


@pytest.mark.parametrize(("option", "args"), [("mistral", False), ("mistral", True)])
def test_of_formats_with_one_name_the_template_decides(option: str, args: bool) -> None:
    template = "[TOOL_CALLS] [ARGS]" if args else "[TOOL_CALLS]"
    found = found_format(TOOL_FORMATS, option, template)
    assert found is not None
    assert (found.between == "[ARGS]") is args


def test_an_option_wins_over_the_template() -> None:
    found = found_format(TOOL_FORMATS, "hermes", "[TOOL_CALLS]")
    assert found is not None
    assert found.name == "hermes"
    assert found_format(TOOL_FORMATS, "none", "[TOOL_CALLS]") is None

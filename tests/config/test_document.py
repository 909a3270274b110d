"""The generated pages promise only what is there, and all of it."""

import re

import javaproperties
from pydantic import ValidationError

from djl_python_neuronx.config.djl_serving import ARGUMENTS
from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.config.legacy import IGNORED, UNSUPPORTED
from djl_python_neuronx.config.options import (
    NAMES,
    SECTIONS,
    ServingOptions,
    allowed_values,
    names_where,
    option,
)
from djl_python_neuronx.config.resolve import read_settings
from djl_python_neuronx.config.sources import SAGEMAKER
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from tools import document

PAGE, EXAMPLE = document.options_page(), document.example_file()
SECTION = {
    block.partition("\n")[0]: block for block in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]
}
"""Option name to its part of the page."""


def test_the_pages_name_no_command_that_does_not_exist():
    for page in (PAGE, EXAMPLE):
        assert set(re.findall(r"djl-neuronx (\w+)", page)) <= {"serve", "check", "compile"}


def test_every_name_that_is_accepted_is_on_the_page():
    for name in (*IGNORED, *UNSUPPORTED):
        assert f"| `{name}` |" in PAGE


def test_every_option_is_on_the_page_once_in_the_order_of_the_sections():
    headings = re.findall(r"^(##|###) (\w.*)$", PAGE, re.MULTILINE)
    expected = []
    for title, names in SECTIONS.items():
        expected += [("##", title), *(("###", name) for name in names)]
    assert headings[: len(expected)] == expected
    assert not [title for level, title in headings[len(expected) :] if level == "###"]


def test_the_contents_lead_to_the_sections():
    for title, anchor in re.findall(r"^- \[(.*)\]\(#(.*)\)$", PAGE, re.MULTILINE):
        assert title in SECTIONS
        assert re.sub(r"\s", "-", title.lower()) == anchor
    assert PAGE.count("](#") == len(SECTIONS)


def test_an_option_tells_its_values_names_variables_and_equivalents(subtests):
    for name in ServingOptions.model_fields:
        with subtests.test(name):
            section, marker = SECTION[name].replace("\n  ", " "), option(name)
            assert f"- Values: {allowed_values(name)}" in section
            assert "\n- Default: " in section
            for word in (*marker.aliases, *marker.env, *marker.to.values()):
                assert f"`{word}`" in section
            for backend, facts in NEURON_BACKENDS.items():
                found = re.search(
                    rf"^- (?:.*; )?{facts.library}: (.*?)(?:;.*)?\.$", section, re.MULTILINE
                )
                assert (found is not None) == bool(marker.to)
                if backend in marker.to:
                    assert found[1] == f"`{marker.to[backend]}`"
                elif found:
                    assert found[1] == f"not supported ({'ignored' if marker.tunes else 'error'})"


def taken(name, value):
    try:
        ServingOptions.model_validate({name: value})
    except ValidationError:
        return False
    return True


def test_values_that_a_text_names_are_values(subtests):
    """``attention_layout=BSH`` in some option's text has to be an option and a value of it."""
    for name, text in document.descriptions().items():
        with subtests.test(name):
            for other, value in re.findall(r"`(\w+)=([^`]+)`", text):
                assert taken(NAMES[other], value), (name, other, value)
            for word in re.findall(r"`(\w+_\w+)`", text):
                known = word in NAMES or word.isupper() or word in allowed_values(name)
                assert known or word in {"block_size", "act_fn", "async_mode", *HYBRID}, (
                    name,
                    word,
                )


HYBRID = ("moe_cte_tp_degree", "moe_cte_ep_degree", "moe_tkg_tp_degree", "moe_tkg_ep_degree")
"""Keys of `hybrid_sharding_config`."""


def test_the_example_file_has_every_option_with_a_value_that_is_its_default():
    uncommented = re.sub(r"^#option\.", "option.", EXAMPLE, flags=re.MULTILINE)
    written = {
        key.removeprefix("option."): value
        for key, value in javaproperties.loads(uncommented).items()
        if key not in {"engine", "option.entryPoint", "option.async_mode", *ARGUMENTS}
    }
    operators = names_where(lambda marker: marker.operator)
    apart = {"model_dir", "async_mode", *operators}
    assert set(written) == set(ServingOptions.model_fields) - apart
    assert written.pop("tensor_parallel_degree") == "max"
    given = {name: value for name, value in written.items() if value}
    assert ServingOptions.model_validate(given) == ServingOptions()
    assert all(ServingOptions.model_fields[name].default is None for name in written.keys() - given)


def test_no_key_of_the_example_file_is_an_error_in_it(tmp_path):
    commented = re.findall(r"^#(option\..*)$", EXAMPLE, re.MULTILINE)
    assert len(commented) > 100
    for line in [*commented, ""]:
        text = EXAMPLE.replace(f"#{line}\n", f"{line}\n")
        assert text != EXAMPLE or not line
        (tmp_path / "serving.properties").write_text(text)
        problems = Problems()
        read_settings(None, tmp_path, {}, problems)
        assert problems.messages("error") == (), line


def test_the_example_file_has_the_keys_that_djl_serving_needs():
    assert javaproperties.loads(EXAMPLE).items() >= ARGUMENTS.items()


def test_lines_fit_a_screen():
    assert max(map(len, EXAMPLE.splitlines())) <= 120


def test_the_variables_that_overrule_the_file_are_named():
    variables = PAGE.partition("## Other variables")[2].partition("\n## ")[0]
    overruling = set(re.findall(r"`([A-Z]+)_\*` ones override", variables))
    listed = set(re.findall(r"^\| `(\w+)`", variables, re.MULTILINE))
    assert {name for name in listed if name.partition("_")[0] in overruling} == set(SAGEMAKER)

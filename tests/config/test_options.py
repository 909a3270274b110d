"""Every option: what it takes, what it refuses, its other names, its variables.

The rows are in option_table.py; what the libraries get of each option is held against them in test_mapping.py.
"""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from djl_python_neuronx.config import sources, values
from djl_python_neuronx.config.legacy import DJL_ARGUMENTS, IGNORED, UNSUPPORTED
from djl_python_neuronx.config.nxdi_options import NxdiOptions
from djl_python_neuronx.config.options import (
    NAMES,
    SECTIONS,
    ServingOptions,
    allowed_values,
    option,
)
from tests.config.option_table import TABLE


def read(name, text):
    return getattr(ServingOptions.model_validate({name: text}), name)


def test_the_table_has_every_option_and_no_other():
    assert set(TABLE) == set(ServingOptions.model_fields)
    assert all(row.good and row.bad for row in TABLE.values())


def test_good_values(subtests):
    for name in TABLE:
        with subtests.test(name):
            for text, value in TABLE[name].good:
                found = read(name, text)
                assert (found, type(found)) == (value, type(value)), text


def test_bad_values(subtests):
    for name in TABLE:
        with subtests.test(name):
            for text in TABLE[name].bad:
                with pytest.raises(ValidationError) as caught:
                    read(name, text)
                assert {error["loc"][0] for error in caught.value.errors(include_url=False)} == {
                    name
                }, text


def test_other_names_and_variables(subtests):
    for name in TABLE:
        with subtests.test(name):
            assert option(name).aliases == TABLE[name].also
            assert option(name).env == TABLE[name].env
            assert all(NAMES[other] == name for other in (name, *TABLE[name].also))


def test_a_variable_stands_in(subtests):
    variables = [(name, variable) for name in TABLE for variable in TABLE[name].env]
    for name, variable in variables:
        with subtests.test(variable):
            text, value = TABLE[name].good[0]
            environ = {variable: str(text), "HF_MODEL_ID": str(text)}
            settings = [
                *sources.from_fallbacks(sources.Inputs(environ), ()),
                *sources.from_hub(sources.Inputs(environ), ()),
            ]
            (setting,) = (entry for entry in settings if entry.origin == f"environment {variable}")
            assert setting.name == name
            assert read(name, setting.value) == value


def test_the_allowed_values_are_told_in_words(subtests):
    for name in TABLE:
        with subtests.test(name):
            words = allowed_values(name)
            assert words
            assert "None" not in words
            of_types = {
                entry.words
                for kind in vars(values).values()
                for entry in getattr(kind, "__metadata__", ())
                if isinstance(entry, values.Allowed)
            }
            if option(name).allowed == "" and words not in of_types:
                # The type tells them: each of them is taken, and each value is among them.
                listed = words.replace(" or ", ", ").split(", ")
                assert {read(name, word) for word in listed} == {
                    value for _, value in TABLE[name].good if value is not None
                }


def test_no_name_means_two_things():
    aliases = [alias for row in TABLE.values() for alias in row.also]
    everything = [*TABLE, *aliases, *IGNORED, *UNSUPPORTED]
    assert len(everything) == len(set(everything))
    # `engine` is written both ways.
    assert set(everything) & DJL_ARGUMENTS == {"engine"}


def test_no_variable_stands_for_two_options():
    variables = [variable for row in TABLE.values() for variable in row.env]
    assert len(variables) == len(set(variables))


def test_a_section_is_a_class():
    assert sorted(name for names in SECTIONS.values() for name in names) == sorted(TABLE)
    assert tuple(NxdiOptions.model_fields) == SECTIONS["NxD Inference only"]
    assert ServingOptions.__bases__[-1] is NxdiOptions
    assert not ServingOptions.__annotations__


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("on_device_generation", "generation.json"), ("override_neuron_config", "x.json")),
        *(("hybrid_sharding_config", "x.json"), ("blockwise_matmul_config", "x.json")),
        *(("router_config", "x.json"), ("dma_order_config", "x.json")),
        ("sim_step_ms", "x.json"),
        ("chat_template_kwargs", "x.json"),
    ],
)
def test_what_may_be_a_file_says_so_and_is_no_value_by_itself(name, text):
    assert option(name).file
    assert "file" in allowed_values(name)
    with pytest.raises(ValidationError):
        read(name, text)


def test_nothing_else_may_be_a_file():
    assert sum(option(name).file for name in TABLE) == 8


class TestDerived:
    @pytest.mark.parametrize(
        ("written", "limit", "buckets"),
        [
            (None, None, None),
            ("2048", 2048, None),
            ("[2048]", 2048, (2048,)),
            ("4096,512,1024", 4096, (512, 1024, 4096)),
        ],
    )
    def test_lengths(self, written, limit, buckets):
        options = ServingOptions(n_positions=written)
        assert (options.max_model_len, options.token_buckets) == (limit, buckets)

    @pytest.mark.parametrize(
        ("written", "bits"),
        [(None, None), ("true", "int8"), ("static_int8", "int8"), ("f8e4m3fn", "fp8")],
    )
    def test_weight_dtype(self, written, bits):
        assert ServingOptions(quantize=written).weight_dtype == bits


def test_a_word_for_nothing_is_the_default_where_nothing_is_the_default():
    for name, entry in ServingOptions.model_fields.items():
        for word in ("None", " none ", "null"):
            if entry.default is None:
                assert read(name, word) is None
            elif entry.annotation is bool:
                with pytest.raises(ValidationError):
                    read(name, word)


def test_options_are_frozen_and_closed():
    options = ServingOptions()
    with pytest.raises(ValidationError):
        options.batch_size = 2  # type: ignore[misc]
    with pytest.raises(ValidationError):
        ServingOptions.model_validate({"nothing": 1})
    with pytest.raises(ValidationError):
        ServingOptions.model_validate(["batch_size"])


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(-1e9, 1e9)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
ANYTHING = (
    PLAIN
    | st.text(max_size=40)
    | st.binary(max_size=8)
    | st.complex_numbers()
    | st.integers()
    | st.floats()
    | st.sampled_from([object(), print, {1}, frozenset(), 10**5000, {1: {2: 3}}, "9" * 100_000])
    | st.text("[](){}'\",:0123456789+-.eE_ TrueFalsNon", max_size=60)
)


class TestValues:
    @given(value=PLAIN)
    @settings(max_examples=150)
    def test_json_and_python_literals_are_read_alike(self, value):
        assert values.parse_object(json.dumps(value)) == value
        assert values.parse_object(repr(value)) == value

    @given(text=st.text("[](){}'\",:0123456789+-.eEjb_ TrueFalsNonlambd\n", max_size=200))
    @settings(max_examples=200)
    def test_any_text_is_a_value_or_a_value_error(self, text):
        with contextlib.suppress(ValueError):
            values.parse_object(text)

    @given(name=st.sampled_from(list(TABLE)), value=ANYTHING)
    @settings(max_examples=600, deadline=None)
    def test_any_value_is_taken_or_refused_as_invalid(self, name, value):
        try:
            options = ServingOptions.model_validate({name: value})
        except ValidationError:
            return
        # What was read reads as itself: origins and reports may hand it on.
        assert ServingOptions.model_validate({name: getattr(options, name)}) == options

    @given(name=st.sampled_from([name for name in TABLE if option(name).to]), value=ANYTHING)
    @settings(max_examples=200, deadline=None)
    def test_what_libraries_get_can_be_written_as_json(self, name, value):
        try:
            options = ServingOptions.model_validate({name: value})
        except ValidationError:
            return
        json.dumps(options.model_dump(mode="json"), allow_nan=False)

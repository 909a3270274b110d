"""`Problems`: errors, warnings and notes, collected once each and raised together."""

import pytest

from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.errors import (
    ArtifactNotFoundError,
    ConfigError,
    IncompatibleOptionsError,
    InvalidOptionError,
)


def test_each_problem_is_kept_once_in_the_order_of_discovery():
    problems = Problems()
    problems.add("note", "b", ("dtype",))
    problems.add("error", "a")
    problems.add("note", "b")
    problems.add_error(ArtifactNotFoundError("a"))
    assert [(one.level, one.message, one.options) for one in problems] == [
        ("note", "b", ("dtype",)),
        ("error", "a", ()),
    ]
    assert problems.messages("note") == ("b",)
    assert problems.messages("warning") == ()


def test_an_error_names_its_option_by_the_current_name():
    problems = Problems()
    problems.add_error(InvalidOptionError("max_model_len", "x", "the file", "a number"))
    (problem,) = problems
    assert problem.options == ("n_positions",)


def test_nothing_is_raised_without_errors():
    problems = Problems()
    problems.add("warning", "slow")
    problems.raise_errors()


def test_a_single_error_is_raised_as_it_is():
    problems = Problems()
    error = ArtifactNotFoundError("no weights")
    problems.add_error(error)
    with pytest.raises(ArtifactNotFoundError) as caught:
        problems.raise_errors()
    assert caught.value is error


def test_several_errors_are_raised_as_one_that_lists_them():
    problems = Problems()
    problems.add("error", "a=1: too low")
    several = [ConfigError("b"), IncompatibleOptionsError("c")]
    problems.add_error(ConfigError.collect(several))
    problems.add_error(ArtifactNotFoundError("no weights"))
    with pytest.raises(ConfigError) as caught:
        problems.raise_errors()
    assert [str(one) for one in caught.value.problems] == ["a=1: too low", "b", "c", "no weights"]

"""Findings about a folder's own code: read from its files, which are never run."""

from __future__ import annotations

import pytest

from djl_python_neuronx.config import own_code
from djl_python_neuronx.config.options import ServingOptions

RUNS = "raise SystemExit('model.py was run')\n"
BOTH = "from djl_python.input_parser import input_formatter\n@output_formatter\ndef f(x): ...\n"


def told(folder, **options):
    options = ServingOptions(model_dir=folder, **options)
    return [(finding.level, finding.problem) for finding in own_code.findings(options)]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (BOTH, "input_formatter and output_formatter"),
        ("def read(x): ...\nread.is_input_formatter = True", "input_formatter"),
        ("def handle(inputs): ...", None),
        ("", None),
    ],
)
def test_formatters_are_found_in_the_text(source, words, tmp_path):
    (tmp_path / "model.py").write_text(RUNS + source)
    found = told(tmp_path)
    assert [level for level, _ in found] == ["warning"] * (words is not None)
    assert all(f"model.py has {words}:" in problem for _, problem in found)


def test_a_format_that_is_set_counts(tmp_path):
    (tmp_path / "model.py").write_text(BOTH)
    *_, (level, problem) = told(tmp_path, output_formatter="sse")
    assert (level, len(told(tmp_path))) == ("note", 1)
    assert "the output_formatter of model.py, which is not called" in problem


def test_a_folder_without_code_is_not_mentioned(tmp_path):
    assert told(tmp_path) == told(None) == []


@pytest.mark.parametrize(("trust", "level"), [(False, "note"), (True, "warning")])
def test_requirements_are_mentioned_and_not_read(tmp_path, trust, level):
    (tmp_path / "requirements.txt").write_text("no-such-package")
    ((found, problem),) = told(tmp_path, trust_remote_code=trust)
    assert (found, "no-such-package" in problem) == (level, False)
    assert "DJL Serving installs requirements.txt" in problem


def test_a_link_out_of_the_folder_is_not_read(tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "model"
    outside.write_text(BOTH)
    folder.mkdir()
    (folder / "model.py").symlink_to(outside)
    ((level, problem),) = told(folder)
    assert level == "warning"
    assert "model.py is a link out of" in problem


def test_a_huge_file_is_judged_in_part(tmp_path):
    (tmp_path / "model.py").write_text("#" * own_code.MAX_FILE_BYTES + BOTH)
    assert told(tmp_path) == []

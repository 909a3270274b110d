"""What a folder's own code is found to be: read from its files, which are never run."""

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


REQUIREMENTS = """
# a comment
numpy
numpy>=9999  # the newest
no-such-package==1.0
other_missing @ https://user:secret@example.com/other.whl
absent; python_version < "3"
extra-only; extra == "x"
numpy>1; no such marker
-r more.txt
--hash=sha256:00
./local/package
"""


@pytest.mark.parametrize(("trust", "level"), [(False, "note"), (True, "warning")])
def test_what_requirements_lack_is_named(tmp_path, trust, level):
    (tmp_path / "requirements.txt").write_text(REQUIREMENTS)
    ((found, problem),) = told(tmp_path, trust_remote_code=trust)
    assert found == level
    assert "numpy>=9999 (here " in problem
    assert "no-such-package==1.0" in problem
    assert "other_missing" in problem
    assert not {"absent", "extra-only", "local", "secret"} & set(problem.replace(";", " ").split())
    assert "secret" not in problem
    assert f"pip install -r {tmp_path}" in problem


def test_met_requirements_are_not_mentioned(tmp_path):
    (tmp_path / "requirements.txt").write_text("numpy>=1\nNumPy\npydantic>=2,<3\n")
    assert told(tmp_path) == []


@pytest.mark.parametrize("name", ["model.py", "requirements.txt"])
def test_a_link_out_of_the_folder_is_not_read(tmp_path, name):
    outside, folder = tmp_path / "outside", tmp_path / "model"
    outside.write_text(BOTH)
    folder.mkdir()
    (folder / name).symlink_to(outside)
    ((level, problem),) = told(folder)
    assert level == "warning"
    assert f"{name} is a link out of" in problem


def test_a_huge_file_is_judged_in_part(tmp_path):
    (tmp_path / "model.py").write_text("#" * own_code.MAX_FILE_BYTES + BOTH)
    (tmp_path / "requirements.txt").write_text("\n" * own_code.MAX_LINES + "no-such-package")
    assert told(tmp_path) == []

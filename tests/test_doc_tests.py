"""The blocks of the docs that need no command, and the doc-test runner, which `make doctest` runs on all pages."""

from __future__ import annotations

import os
import tempfile

import pytest

from tests.doc_tests import __main__ as runner
from tests.doc_tests.__main__ import main, obstacle
from tests.doc_tests.blocks import ROOT, blocks, pages, problem


def test_marks_and_data_of_all_pages():
    faults, found = {}, 0
    for page in pages():
        for block in blocks(page, (ROOT / page).read_text(encoding="utf-8")):
            found += 1
            if fault := problem(block):
                faults[block.place] = fault
    assert found > 50
    assert not faults


RIGHT = [
    ("sh", "", "NAME='a b'\ncd tests"),
    ("sh", "", 'test "$NAME" = "a b" && test -f conftest.py && cd ..'),
    ("sh", "", "touch made-by-a-doc-test && test -f made-by-a-doc-test"),
    ("sh", "", "djl-neuronx check /models/llama   # a folder\ndjl-neuronx options n_positions"),
    ("sh", "device", "djl-neuronx compile owner/name --output /models/x --instance inf2.xlarge"),
    ("sh", "docker", "docker run image &&\n    djl-neuronx --version"),
    ("sh", "docker", "export A=1\ndocker run \\\n    image"),
    ("sh", "root", "false"),
    ("sh", "", "python3 -m venv ~/x && ~/x/bin/pip install -c constraints/cpu.txt '.[server]'"),
    ("sh", "", "make install && . .venv/bin/activate && make lint"),
    ("console", "", "$ echo one; echo two; echo three\none\n...\nthree\n$ true"),
    ("console", "", '$ echo \'{"a": 1, "created": 2}\'\n{"a": 1,\n "created": 3}'),
    ("python", "", "import djl_python_neuronx"),
    ("json", "", '{"a": "…"}\n{"b": 1}'),
    ("properties", "", "engine=Python\noption.n_positions=4096"),
    ("text", "", "no command"),
]
WRONG = [
    ("sh", "", "djl-neuronx check /models/llama --no-such-flag", "--no-such-flag"),
    ("sh", "", "false\ntrue", "exit status 1"),
    ("sh", "", "no-such-program | cat", "no-such-program: command not found"),
    ("sh", "device", "djl-neuronx serve owner/name -o n_positions=2 --no-such 3", "--no-such"),
    ("sh", "docker", "docker run image\ndjl-neuronx options no_such_option", "no_such_option"),
    ("sh", "", "docker run image", "exit status"),
    ("sh", "dokcer", "docker run image", "the mark needs 'dokcer'"),
    ("sh", "", "pip install 'djl-python-neuronx[no-such]'", "no extra ['no-such']"),
    ("sh", "", "pip install -c constraints/no-such.txt x", "no-such.txt"),
    ("sh", "", "make no-such-target", "no-such-target"),
    ("sh", "", "curl -s http://127.0.0.1:9/", "exit status 7"),
    ("console", "", "$ echo one\ntwo", "expected\ntwo"),
    ("console", "", '$ echo \'{"a": 1}\'\n{"a": 2}', '{"a": 1}'),
    ("python", "", "import no_such_module", "No module named 'no_such_module'"),
    ("json", "", '{"a": 1,}', "JSONDecodeError"),
    ("yaml", "", "a: [", "ParserError"),
    ("toml", "", "a =", "TOMLDecodeError"),
    ("properties", "", "option.n_position=4096", "n_position"),
]


def _page(rows) -> str:
    marks = [f"<!-- needs: {needs} -->\n" if needs else "" for _, needs, *_ in rows]
    parts = [f"{mark}```{row[0]}\n{row[2]}\n```\n" for mark, row in zip(marks, rows, strict=True)]
    return "\n".join(parts)


def test_a_machine_that_cannot_run_pages_is_one_error(monkeypatch, capsys):
    for command, reason in (
        (["no-such-unshare"], "no-such-unshare"),
        (["sh", "-c", "echo no >&2; exit 1"], ": no"),
    ):
        monkeypatch.setattr(runner, "UNSHARE", command)
        assert main([], jobs=1) == 1
        said = capsys.readouterr()
        assert not said.out
        assert "needs Linux, and root with the right to mount" in said.err
        assert reason in said.err


def test_right_blocks_pass_and_each_wrong_one_fails_with_its_reason(tmp_path, capsys, monkeypatch):
    if (why := obstacle()) and os.environ.get("CI") != "true":
        pytest.skip(f"needs Linux, and root: {why}")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    for name, rows in (("right", RIGHT), ("wrong", WRONG)):
        (tmp_path / f"{name}.md").write_text(_page(rows), encoding="utf-8")
    assert main([str(tmp_path / "right.md")], jobs=1) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "10 of 13 blocks of commands were run (77%), 0 failed, 1 were checked" in said, said
    assert "2 were left out; 2 of 2 blocks of data are valid" in said
    assert not (ROOT / "made-by-a-doc-test").exists()
    assert not [*(tmp_path / "temporary").iterdir()]

    assert main([str(tmp_path / "wrong.md")], jobs=1) == 1
    verdicts = capsys.readouterr().out.split("\nfailed ")
    assert len(verdicts) == len(WRONG), verdicts
    missing = [row for row, text in zip(WRONG, verdicts, strict=True) if row[3] not in text]
    assert not missing, verdicts

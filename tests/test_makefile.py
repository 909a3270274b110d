"""Commands of `make`, .ci/run and .ci/nightly, with an interpreter that only records its arguments."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FAKE = """#!/bin/sh
echo "$0 $*" >> "$LOG"
for last; do :; done
case "$*" in
  "-c "*) exit "${SUITS:-0}" ;;
esac
case "$*" in *"-m venv"*) mkdir -p "$last/bin"; cp "$0" "$last/bin/python" ;; esac
"""

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")


@pytest.fixture
def program(tmp_path):
    """Put a stand-in into a folder that comes first on the path."""
    (tmp_path / "bin").mkdir()

    def write(name, text=FAKE):
        path = tmp_path / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    return write


@pytest.fixture
def run(tmp_path):
    """Run a command; its status and the lines that the stand-ins noted."""
    log = tmp_path / "log"

    def call(*command, **environ):
        log.write_text("")
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        own = {"PATH": path, "LOG": str(log), "HOME": str(tmp_path), **environ}
        ran = subprocess.run(
            command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=60, check=False
        )
        return ran, log.read_text().splitlines()

    return call


def test_an_environment_is_made_once_for_what_was_asked(run, program, tmp_path):
    venv, python, other = tmp_path / "venv", program("one"), program("two")

    def install(*settings):
        ran, lines = run("make", "install", f"VENV={venv}", f"PYTHON={python}", *settings)
        assert ran.returncode == 0, ran.stderr
        return "\n".join(lines)

    assert "-e .[cpu,server,dev,peft]" in install()
    assert install() == ""
    for change in (
        "EXTRAS=dev",
        "CONSTRAINTS=constraints/transformers-4.57.txt",
        f"PYTHON={other}",
    ):
        assert f"-m venv {venv}" in install(change)
        assert install(change) == ""
    assert "-m venv" in install()  # the first again: what is there is another
    upgraded = install("UPGRADE=1", "PIP_ARGS=--extra-index-url https://mirror")
    assert "--extra-index-url https://mirror --upgrade --upgrade-strategy eager -c" in upgraded
    assert install() == ""


MAKE = '#!/bin/sh\necho "make $* $PYTHON" >> "$LOG"\n'


REPEATABLE = "--hypothesis-profile=repeatable"


def test_ci_upgrades_and_takes_an_old_python_for_the_old_versions(run, program):
    program("make", MAKE)
    program("go")
    program("unshare")
    program("python-x")
    old = program("python3.10")
    ran, lines = run(str(ROOT / ".ci/run"), PYTHON="python-x")
    assert ran.returncode == 0, ran.stderr
    made = [line for line in lines if line.startswith("make ")]
    assert "UPGRADE=1" in made[0]
    first, second = (line for line in made if "EXTRAS=server,dev" in line)
    assert f"PYTHON={old.name} ARGS={REPEATABLE} -m 'not djl' --ignore" in first
    left_out = re.findall(r"--ignore(?:-glob)?='?([\w./*]+)", first)
    assert len(left_out) > 5
    assert all([*ROOT.glob(name)] for name in left_out)
    assert "CONSTRAINTS=constraints/sdk-2.31.txt" in second
    targets = " ".join(line.split()[1] for line in made)
    assert targets == "test lint test test site chart doctest ray dist test audit"
    assert made[-2].endswith("tests/container python-x")
    (replayed,) = [line.split()[-1] for line in lines if "replay.py build cpu" in line]
    (answers,) = [line for line in lines if "known_answers.py http://127.0.0.1:18081" in line]
    assert answers.endswith(f" {replayed}/run")
    assert not Path(replayed).exists()
    assert any(
        "known_answers.py http://127.0.0.1:18080 make serve PORT=18080" in line for line in lines
    )


def test_ci_says_when_no_python_is_old_enough(run, program):
    program("make", MAKE)
    for name in ("python3.10", "python-x"):
        program(name)
    ran, lines = run(str(ROOT / ".ci/run"), PYTHON="python-x", SUITS="1")
    assert ran.returncode == 1
    assert "PYTHON_SDK=" in ran.stderr
    assert not [line for line in lines if line.startswith("make ")]


@pytest.mark.parametrize("missing", ["go", "unshare"])
def test_ci_looks_first_for_what_its_last_legs_need(missing, run, program):
    for name in ("make", "go", "unshare", "python-x"):
        program(name, "#!/bin/sh\nexit 1\n" if name == missing else FAKE)
    ran, lines = run(str(ROOT / ".ci/run"), PYTHON="python-x")
    assert ran.returncode == 1
    assert f"`{missing} " in ran.stderr
    assert not [line for line in lines if "/make" in line]


NIGHTLY = MAKE + 'echo "3 passed, 1 skipped in 0.5s"\n'


def summary_of(ran):
    """Verdict by leg."""
    lines = ran.stdout.partition("== summary\n")[2].splitlines()
    return {line.split()[1].rstrip(":"): line.split()[0] for line in lines}


RIGS = {"TNX_SRC": "/tnx", "TNX_RIG": "/rig", "NXDI_RIG": "/other"}
SOURCES = {
    "NXDI_SRC": "/nxdi",
    "NXD_SRC": "/nxd",
    "NXDI_VERSIONS": "/versions",
    "NXDI_CONTRIB": "/nxdi/contrib/models",
    "DJL_SRC": "/djl",
}


def test_a_nightly_run_lists_what_it_skipped(run, program):
    program("make", NIGHTLY)
    ran, lines = run(str(ROOT / ".ci/nightly"))
    assert ran.returncode == 0, ran.stderr
    assert sum(line.startswith("make test") for line in lines) == 5
    verdicts = summary_of(ran)
    assert [*verdicts.values()] == ["passed"] * 7 + ["skipped"] * 13
    assert "passed  newest: 3 passed, 1 skipped in 0.5s" in ran.stdout
    for leg, variable in (
        ("tnx-steps", "TNX_SRC"),
        ("nxdi-steps", "NXDI_SRC"),
        ("nxdi-0.8", "NXDI_VERSIONS"),
        ("djl-src", "DJL_SRC"),
    ):
        assert f"skipped {leg}: {variable} is not set" in ran.stdout


def test_a_nightly_run_tests_the_checkouts_it_is_given(run, program):
    program("make", '#!/bin/sh\necho "make $* $PYTHONPATH" >> "$LOG"\necho "3 passed in 0.5s"\n')
    ran, lines = run(str(ROOT / ".ci/nightly"), **RIGS, **SOURCES)
    assert ran.returncode == 0, ran.stderr
    assert set(summary_of(ran).values()) == {"passed"}
    assert all("JOBS=0" in line for line in lines if "-m tnx" in line or "-m nxdi" in line)
    assert any("-m tnx" in line and line.endswith(" /rig:/tnx/src") for line in lines)
    rig = f" {ROOT}/tests/rig_fixes:/other"
    assert any("-m nxdi" in line and line.endswith(f"{rig}:/nxdi/src:/nxd/src") for line in lines)
    for version, transformers in (("0.6", "transformers-4.51"), ("0.7", "transformers-4.57")):
        place = f"/versions/{version}"
        (own,) = (
            line for line in lines if line.endswith(f"{rig}:{place}/nxdi/src:{place}/nxd/src")
        )
        # Of two values of a variable make takes the last.
        assert re.findall(r"CONSTRAINTS=constraints/(\S+)\.txt", own)[-1] == transformers
    assert any("-m djl_src" in line for line in lines)


@pytest.mark.parametrize(("rig", "others"), [("tnx", []), ("nxdi", ["contrib"])])
def test_the_parts_of_a_rigs_tests_are_all_of_them(run, program, rig, others):
    program("make", '#!/bin/sh\necho "make $*" >> "$LOG"\necho "3 passed in 0.5s"\n')
    legs = (f"{rig}-service", f"{rig}-steps", *others)
    _, lines = run(str(ROOT / ".ci/nightly"), *legs, **RIGS, **SOURCES)
    first, rest, *more = (line.partition("--nightly ")[2].split() for line in lines)
    named = [name for part in (first, *more) for name in part]
    assert [f"--ignore={name}" for name in named] == rest
    assert len(first) > 2
    assert all((ROOT / name).exists() for name in named)


def test_nightly_legs_run_alone(run, program):
    program("make", NIGHTLY)
    nightly = str(ROOT / ".ci/nightly")
    listed, _ = run(nightly, "--list")
    names = listed.stdout.splitlines()
    everything, _ = run(nightly, **RIGS, **SOURCES)
    assert [*summary_of(everything)] == names
    for name in names:
        alone, lines = run(nightly, name, **RIGS, **SOURCES)
        assert summary_of(alone) == {name: "passed"}
        assert len(lines) == 1
    several, _ = run(nightly, "tnx", **RIGS, **SOURCES)
    assert [*summary_of(several)] == [name for name in names if name.startswith("tnx-")]
    wrong, lines = run(nightly, "tnxx")
    assert (wrong.returncode, lines) == (2, [])
    assert "no leg 'tnxx'" in wrong.stderr


@pytest.mark.parametrize(
    "outcome", ['echo "2 skipped in 0.5s"\n', 'echo "1 failed, 2 passed in 1s"; exit 2\n']
)
def test_a_nightly_leg_without_a_passed_test_or_with_a_failed_one_fails(run, program, outcome):
    program("make", "#!/bin/sh\n" + outcome)
    ran, _ = run(str(ROOT / ".ci/nightly"))
    assert ran.returncode == 1
    assert summary_of(ran)["tf457"] == "failed"

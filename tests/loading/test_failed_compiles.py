"""Compiles that fail: what is remembered of them, what is not, and what killed them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from io import StringIO
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from djl_python_neuronx import cli
from djl_python_neuronx.errors import BackendError, CompileError
from djl_python_neuronx.loading.check import check
from djl_python_neuronx.loading.compile_risks import compile_risks
from djl_python_neuronx.loading.compiled import obtain
from djl_python_neuronx.loading.prepare import prepare_or_raise
from djl_python_neuronx.loading.report import finding_blocks, write_blocks
from djl_python_neuronx.planning import defects, machines
from djl_python_neuronx.planning.plan import graph_options
from tests.doubles.neuron_machine import GRAPHS, TINY
from tests.loading.checking import folder

pytest_plugins = ["tests.doubles.neuron_fixtures"]

SAYS = "import sys; print('ERROR {}', file=sys.stderr); sys.exit({})"
REFUSED = SAYS.format("[NCC_EVRF007] no tiling", 70)
FULL = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (2**28, 2**28))
bytearray(2**29)
"""
EATS = """
hog = bytearray(2**28)
for page in range(0, len(hog), 4096):
    hog[page] = 1
"""


def fails(machine, options, program="", **more):
    """The error of a start whose compiler runs `program`."""
    machine.set(TOYC_RUN=program)
    prepared = prepare_or_raise(None, TINY, environ=machine.environ, overrides=options, **more)
    with pytest.raises(BackendError) as caught:
        obtain(prepared, prepared.load_tokenizer)
    return caught.value


def compiles(machine, options):
    """True if a start has to compile, and then does."""
    prepared = prepare_or_raise(None, TINY, environ=machine.environ, overrides=options)
    return not obtain(prepared, prepared.load_tokenizer).cache_hit


def test_what_the_compiler_refuses_is_not_compiled_again(machine, options, capsys, tmp_path):
    first = fails(machine, options, REFUSED)
    assert first.lasting
    assert machine.compiled() == GRAPHS[:1]
    again = fails(machine, options)
    assert type(again) is CompileError
    assert re.search(
        r"failed before .* --retry .*\d{4}-\d\d-\d\d \d\d:\d\d\+00:00, neuronx-cc 1\.0: ",
        str(again),
    )
    assert "no tiling" in str(again)
    assert machine.compiled() == GRAPHS[:1]
    # `check` says so, as the error of a start that it is.
    told = check(str(TINY), environ=machine.environ, overrides=options)
    assert [type(error) for error in told.findings.errors] == [CompileError]
    assert "failed before" in str(told.findings.errors[0])
    shown = StringIO()
    write_blocks(finding_blocks(told.findings), shown)
    assert "\n    Failed compilation with" in shown.getvalue()
    # So does `compile`, which prints it.
    given = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    command = ["compile", str(TINY), "--output", str(tmp_path / "out"), *given]
    assert cli.main(command) == 1
    assert "failed before" in capsys.readouterr().err
    # Other settings and other versions are other compiles.
    assert compiles(machine, {**options, "max_rolling_batch_size": "4"})
    machine.set(TOYC_VERSION="1.1")
    assert compiles(machine, options)
    machine.set(TOYC_VERSION="1.0")
    # Tried again and failed again it stays; after a success it is forgotten.
    assert fails(machine, {**options, "retry": "true"}, REFUSED).lasting
    assert "failed before" in str(fails(machine, options))
    assert cli.main([*command, "--retry"]) == 0
    assert "retry_compile" not in (tmp_path / "out" / "serving.properties").read_text()
    assert not compiles(machine, options)
    assert not list(tmp_path.rglob(".failed/*"))


def test_each_start_that_compiles_warns_and_no_other(machine, options, monkeypatch, caplog):
    reported = defects.CompilerDefect(
        compiler=">=1.0,<2",
        backend="tnx",
        families=("inf2", "trn1"),
        symptom="it crashes",
        cure="use another",
        sources=("https://example.com/1",),
    )
    monkeypatch.setattr(defects, "_table", lambda: {"one": reported})
    warned = []
    for version in ("1.0", "1.0", "2.0"):
        machine.set(TOYC_VERSION=version)
        caplog.clear()
        compiled = compiles(machine, options)
        texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        warned.append((compiled, any(reported.report in text for text in texts)))
    assert warned == [(True, True), (False, False), (True, False)]
    told = check(str(TINY), environ=machine.environ, overrides=options).findings
    assert not any("it crashes" in text for text in told.messages("warning"))
    changed = {**options, "max_rolling_batch_size": "4"}
    machine.set(TOYC_VERSION="1.0")
    told = check(str(TINY), environ=machine.environ, overrides=changed).findings
    assert reported.report in told.messages("warning")


PASSING = {
    "disk": SAYS.format("[NCC_X001] No space left on device", 70),
    "image": SAYS.format("libxml2.so.2: cannot open shared object file", 127),
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "stopped": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "memory": FULL,
    "unclear": SAYS.format("", 1),
}


def test_what_the_machine_lacks_is_not_remembered(machine, options):
    """Each start compiles again."""
    ended = [fails(machine, options, program) for program in PASSING.values()]
    assert not [error for error in ended if error.lasting or "failed before" in str(error)]
    named = [" MiB free" in str(error) and "TMPDIR" in str(error) for error in ended]
    assert dict(zip(PASSING, named, strict=True)) == {name: name == "disk" for name in PASSING}
    assert machine.compiled() == len(PASSING) * GRAPHS[:1]


def test_what_is_remembered_may_be_damaged_or_not_ours(machine, options, tmp_path):
    fails(machine, options, REFUSED)
    (kept,) = tmp_path.rglob(".failed/*")
    kept.write_bytes(b"\xff\xfe")
    assert "failed before" in str(fails(machine, options))
    kept.unlink()
    kept.mkdir()
    machine.set(TOYC_RUN="")
    assert compiles(machine, options)  # what cannot be removed costs nothing


def test_another_version_of_this_package_compiles_again(machine, options, monkeypatch):
    fails(machine, options, REFUSED)
    monkeypatch.setattr("djl_python_neuronx.artifacts.manifest.package_version", lambda: "99")
    machine.set(TOYC_RUN="")
    assert compiles(machine, options)


def test_kills_by_the_kernel_are_no_refusal(machine, options, monkeypatch):
    """Whatever the compiler makes of them."""
    monkeypatch.setattr(
        "djl_python_neuronx.loading.compile_process.oom_kills", iter([3, 4]).__next__
    )
    error = fails(machine, options, SAYS.format("[NCC_EOOM001] peak HBM usage", 70))
    assert error.host_full
    assert not error.lasting


@pytest.mark.parametrize(
    ("kills", "said"),
    [
        ([3, 4], "the kernel killed it because the memory"),
        ([3, 3], "killed no process here for memory"),
        ([None, None], "most likely the kernel killed it"),
    ],
)
@pytest.mark.parametrize("whole", [False, True], ids=["compiler", "process"])
def test_a_killed_compile_says_so_and_why(machine, options, monkeypatch, kills, said, whole):
    counts = iter(kills)
    monkeypatch.setattr(
        "djl_python_neuronx.loading.compile_process.oom_kills", lambda: next(counts)
    )
    victim = "os.getppid()" if whole else "os.getpid()"
    error = str(fails(machine, options, f"import os, signal; os.kill({victim}, signal.SIGKILL)"))
    assert "SIGKILL" in error
    assert said in error
    assert re.search(r"GiB of the host's memory by an estimate: run `djl-neuronx compile ", error)


def test_a_compile_beyond_a_limit_of_memory_says_so(machine, options):
    """By RLIMIT_AS, below which Python raises MemoryError."""
    error = fails(machine, options, FULL)
    assert error.host_full
    assert "run `djl-neuronx compile " in str(error)


@pytest.fixture
def cgroup():
    """A control group with 400 MB of memory; root can make one where the controllers are writable."""
    for parent, limit, value in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "400000000"),
        (Path("/sys/fs/cgroup"), "memory.max", "400000000"),
    ):
        group = parent / f"djl-neuronx-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            (group / limit).write_text(value)
            with suppress(OSError):
                (group / "memory.swap.max").write_text("0")
            yield group
            group.rmdir()
            return
        with suppress(OSError):
            group.rmdir()
    pytest.skip("no control group of memory can be made here")


def test_a_compile_that_its_control_group_kills_says_so(machine, options, cgroup, tmp_path):
    program = f"""
import os, sys
open({str(cgroup / "cgroup.procs")!r}, "w").write(str(os.getpid()))
from tests.doubles.neuron_machine import TINY, place_backend
place_backend()
from djl_python_neuronx.loading.compile_process import Forecast, compile_guarded
from djl_python_neuronx.backends.plan import LoadPlan
from pathlib import Path
plan = LoadPlan(TINY, 1, 64, (64,))
try:
    compile_guarded("tnx", plan, Path({str(tmp_path)!r}), environ=os.environ, neff_cache=None, forecast=Forecast(1, 1))
except Exception as error:
    print(error)
"""
    machine.set(TOYC_RUN=EATS.replace("2**28", "2**30"))
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=machine.environ,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert "SIGKILL" in ran.stdout, ran.stdout + ran.stderr
    assert "the kernel killed it because the memory of the host or of this container" in ran.stdout


def test_compilers_are_as_many_as_the_host_holds(machine, options, monkeypatch):
    """And the command for another machine has what the command line sets."""
    prepared = prepare_or_raise(
        None,
        TINY,
        environ=machine.environ,
        overrides=options,
        machine=machines.named("inf2.xlarge"),
    )
    seen = []
    for gib in (64, 3, 2, 0.5):
        monkeypatch.setattr(machines, "available_memory", lambda gib=gib: int(gib * 2**30))
        seen.append(
            (prepared.compile_memory.workers, [one.level for one in compile_risks(prepared)])
        )
    assert seen == [(3, []), (2, ["note"]), (1, ["note"]), (1, ["warning"])]
    (risk,) = compile_risks(prepared)
    command = re.search(r"`(djl-neuronx compile .*)`", risk.problem)[1]
    assert command.startswith(f"djl-neuronx compile {TINY} --output DIR --instance inf2.xlarge")
    assert "-o n_positions=128" in command


@pytest.mark.parametrize("place", ["file", "folder", "beside", "variables", "command line"])
def test_the_command_for_another_machine_compiles_the_same_plan(tmp_path, place):
    """Wherever the options are set."""
    (tmp_path / "model").mkdir()
    config = json.loads((TINY / "config.json").read_text())
    config |= {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128}
    config |= {"max_position_embeddings": 4096}
    model = folder(tmp_path / "model", config=config)
    options = {
        "n_positions": "1024",
        "tensor_parallel_degree": "2",
        "max_rolling_batch_size": "2",
        "override_neuron_config": '{"seq_len_threshold_for_cc_tiling": 8192}',
    }
    given, target, environ = {"model_loader": "nxdi"}, str(model), {}
    if place == "command line":
        given |= options
    elif place == "variables":
        environ = {f"OPTION_{name.upper()}": value for name, value in options.items()}
    else:
        name = "other.properties" if place == "file" else "serving.properties"
        lines = [f"option.{name}={value}" for name, value in options.items()]
        file = tmp_path / name
        if place == "beside":
            environ = {"HF_MODEL_ID": model}
        else:
            lines.append("option.model_id=model")
        file.write_text("\n".join(lines))
        target = str(file if place == "file" else tmp_path)
    machine = machines.named("inf2.xlarge")
    told = check(target, environ=environ, overrides=given, machine=machine)
    texts = [one.message for one in told.findings if " --output DIR " in one.message]
    words = shlex.split(re.search(r"`(djl-neuronx compile .*?)`", *texts)[1])
    given = dict(words[i + 1].split("=", 1) for i, word in enumerate(words) if word == "-o")
    again = check(words[2], environ={}, overrides=given, machine=machine)
    assert again.ok
    facts = [graph_options(one.prepared.options, "nxdi") for one in (told, again)]
    assert facts[0]["seq_len_threshold_for_cc_tiling"] == 8192
    assert facts[0] == facts[1]
    assert given.keys() - told.prepared.resolved.origins.keys() <= {"model_loader"}

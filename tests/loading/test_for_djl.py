"""An output is the same deployment elsewhere: its `serving.properties` says all that counted for the compile."""

import shutil
from types import SimpleNamespace

import pytest

from djl_python_neuronx.artifacts.output import properties_file
from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.config.options import names_where, option
from djl_python_neuronx.config.resolve import read_settings
from djl_python_neuronx.config.sources import HUB, from_file, with_worker_variables
from djl_python_neuronx.errors import ArtifactMismatchError
from djl_python_neuronx.loading.partition import compile_model
from djl_python_neuronx.loading.pinned import for_djl, pinned
from djl_python_neuronx.loading.prepare import prepare_or_raise
from tests.config.option_table import TABLE
from tests.doubles.neuron_machine import TINY

pytest_plugins = ["tests.doubles.neuron_fixtures"]

LOCAL = names_where(lambda marker: marker.output == "local")


def read(folder, environ=(), **overrides):
    problems = Problems()
    settings = read_settings(None, folder, dict(environ), problems, overrides)
    assert not problems.errors, list(problems)
    return settings


def served_elsewhere(settings, folder):
    """The settings of an output with these settings, on a machine without any of their own."""
    environ = with_worker_variables({}, settings.worker_variables)
    prepared = SimpleNamespace(
        resolved=settings, options=settings.options, backend="tnx", environ=environ
    )
    options = {**pinned(prepared), "model_loader": settings.options.model_loader}
    folder.mkdir()
    written = properties_file(options, for_djl(prepared))
    (folder / "serving.properties").write_bytes(written)
    return read(folder)


def test_every_option_reads_back_with_its_value(tmp_path, subtests):
    written = [(name, text) for name in TABLE if name not in LOCAL for text, _ in TABLE[name].good]
    for i, (name, text) in enumerate(written):
        if not isinstance(text, str):
            continue
        with subtests.test(f"{name}={text}"):
            source = tmp_path / f"source-{i}"
            source.mkdir()
            if option(name).djl.reads:  # Java does not read every spelling
                settings = read(source, **{name: text})
            else:
                (source / "serving.properties").write_bytes(properties_file({name: text}))
                settings = read(source)
            found = served_elsewhere(settings, tmp_path / f"out-{i}")
            expected = settings.options.model_dump(exclude={"model_dir"})
            if name not in {"rolling_batch", "async_mode", "batch_size"}:
                expected["async_mode"] = True  # which recent versions of DJL Serving need
            assert found.options.model_dump(exclude={"model_dir"}) == expected


@pytest.mark.parametrize(
    "name", [name for name in TABLE if {*option(name).env} - {*HUB} and name not in LOCAL]
)
def test_an_option_of_option_env_reads_back_too(tmp_path, name):
    text = next(text for text, _ in TABLE[name].good if isinstance(text, str) and "," not in text)
    settings = read(tmp_path, env=f"{option(name).env[0]}={text}")
    found = served_elsewhere(settings, tmp_path / "out")
    assert getattr(found.options, name) == getattr(settings.options, name)


KEPT = "NEURON_CC_FLAGS=-O1 --lnc=1,NEURON_RT_NUM_CORES=2,TOKENIZERS_PARALLELISM=true,OMP_EMPTY="
LEFT_OUT = (
    *("HF_TOKEN=a", "AWS_SECRET_ACCESS_KEY=b", "AWS_ACCESS_KEY_ID=c", "AWS_SESSION_TOKEN=d"),
    *("MY_PASSWORD=e", "my_secret_name=f", "PROXY_AUTH=g", "GOOGLE_CREDENTIALS=h"),
    *("HF_HOME=/data", "TMPDIR=~/tmp", "HTTPS_PROXY=http://me:pw@proxy", "HF_ENDPOINT=https://x"),
    *(
        "NEURON_COMPILE_CACHE_URL=s3://bucket/cache",
        "NEURON_RT_VISIBLE_CORES=0-3",
        "GIT_DIR=a/b",
    ),
    *("NEURON_RT_ROOT_COMM_ID=10.0.0.1:63423", "https_proxy=user:secret@proxy:3128"),
    *("DB_PASS=hunter2", "LD_PRELOAD=mine.so", "NEURON_RT_LIBS=lib:/usr/x", "MINE=1"),
    *("XLA_FLAGS=--a=1 --workdir=/home/me", "NEURON_A=-f ~/x", "OMP_B=x:/usr", "HF_HUB_C=a s3://b"),
)


@pytest.mark.parametrize("where", ["option.env", "OPTION_ENV", "-o env"])
def test_variables_are_kept_but_secrets_and_places(tmp_path, caplog, where):
    line = f" {KEPT},{','.join(LEFT_OUT)}".replace("-O1", "-O1 --cache_dir=/a")
    if where == "option.env":
        (tmp_path / "serving.properties").write_bytes(properties_file({"env": line}))
    settings = read(
        tmp_path,
        {"OPTION_ENV": line} if where == "OPTION_ENV" else {},
        **({"env": line} if where == "-o env" else {}),
    )
    found = served_elsewhere(settings, tmp_path / "out")
    (kept,) = (one.value for one in from_file(tmp_path / "out") if one.name == "env")
    assert kept == KEPT.replace("-O1 ", "-O1  ")
    assert set(found.worker_variables) == {pair.partition("=")[0] for pair in KEPT.split(",")}
    (warning,) = (one.getMessage() for one in caplog.records if one.levelname == "WARNING")
    assert warning.startswith(
        f"option_env_left_out names={','.join(pair.partition('=')[0] for pair in LEFT_OUT)} reason"
    )
    assert "me:pw" not in warning
    written = (tmp_path / "out" / "serving.properties").read_text()
    assert not [secret for secret in ("secret", "hunter2", "/home/me") if secret in written]


def test_nothing_of_nothing(tmp_path, caplog):
    for i, line in enumerate(("", "HF_TOKEN=a", "nonsense")):
        found = served_elsewhere(read(tmp_path, env=line), tmp_path / f"out-{i}")
        assert not found.worker_variables
    assert len(caplog.records) == 1


def test_djls_own_keys_are_kept_but_those_of_this_machine(tmp_path):
    (tmp_path / "serving.properties").write_text(
        "engine=Anything\njob_queue_size=7\nbatch_size=4\noption.enable_venv=true\noption.parallel_loading=true\n"
        "option.entryPoint=mine.py\noption.pythonExecutable=/usr/bin/python3.9\noption.mpi_mode=yes\n"
    )
    environ = {"ARGS_MAX_IDLE_TIME": "9", "ARGS_JOB_QUEUE_SIZE": "8"}
    settings = read(tmp_path, environ)
    found = served_elsewhere(settings, tmp_path / "out")
    lines = {(one.name, one.value, one.by_user) for one in from_file(tmp_path / "out")}
    assert lines >= {
        ("engine", "Python", False),
        ("job_queue_size", "7", False),
        ("max_idle_time", "9", False),
        ("batch_size", "4", False),
        ("enable_venv", "true", True),
        ("parallel_loading", "true", True),
        ("entryPoint", "djl_python_neuronx.handler", True),
    }
    assert not {"pythonExecutable", "mpi_mode"} & {name for name, _, _ in lines}
    assert found.for_djl["job_queue_size"] == "7"


def test_an_output_has_the_variables_that_it_was_compiled_with(machine, options, tmp_path, caplog):
    """And the file that counts is the one of the folder that was named, not of the model that it names."""
    model, named = tmp_path / "model", tmp_path / "named"
    shutil.copytree(TINY, model)
    (model / "serving.properties").write_text("job_queue_size=1\noption.env=NEURON_CC_FLAGS=-O3\n")
    named.mkdir()
    (named / "serving.properties").write_text(
        f"job_queue_size=7\noption.env=NEURON_CC_FLAGS=-O1,HF_TOKEN=hf_mine,PYTHONSTARTUP=x\noption.model_id={model}\n"
    )
    for folder in (model, named):
        (folder / "model.py").write_text("from djl_python.input_parser import input_formatter")
    out = tmp_path / "out"
    made = compile_model(str(named), str(out), environ=machine.environ, overrides=options)
    assert made.facts.graph_options["cc_flags"] == ["-O1"]
    found = {one.name: one.value for one in from_file(out)}
    assert (found["env"], found["job_queue_size"]) == ("NEURON_CC_FLAGS=-O1", "7")
    assert "hf_mine" not in (out / "serving.properties").read_text()
    assert "HF_TOKEN,PYTHONSTARTUP" in caplog.text
    assert f"formatters_left_out file={named / 'model.py'}" in caplog.text
    caplog.clear()
    compile_model(str(model), str(tmp_path / "out-2"), environ=machine.environ, overrides=options)
    assert (tmp_path / "out-2" / "model.py").exists()
    assert "formatters_left_out" not in caplog.text
    # Served as it is, it finds its graphs: the same flags count.
    assert prepare_or_raise(None, out, environ=machine.environ).own_graphs
    machine.set(NEURON_CC_FLAGS="-O2")
    assert prepare_or_raise(None, out, environ=machine.environ).own_graphs
    others = {"env": "NEURON_CC_FLAGS=-O2"}
    with pytest.raises(ArtifactMismatchError, match="cc_flags"):
        prepare_or_raise(None, out, environ=machine.environ, overrides=others)

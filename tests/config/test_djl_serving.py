"""The same result inside DJL and on the command line, whatever is written where: judged by Java's own rules."""

import itertools
import json
import random
from types import SimpleNamespace

import pytest

from djl_python_neuronx.artifacts.output import properties_file
from djl_python_neuronx.loading import check, pinned
from djl_python_neuronx.planning import machines
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.defaults import fill
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.model import ModelFacts
from tests.config import java
from tests.planning.settings import TINY, examine

CONFIG = {**TINY, "max_position_embeddings": 256}
FACTS = ModelFacts.from_config(CONFIG)
FOR_DJL = ("engine=Python", "option.entryPoint=djl_python_neuronx.handler")
INF2 = machines.named("inf2.xlarge")


def spelled(name, *values):
    """Every value in every place: key of the file or variable, and its value."""
    places = (f"option.{name}", name, f"OPTION_{name.upper()}", f"ARGS_{name.upper()}")
    return [((place, value),) for place in places for value in values]


OVERRIDE = ("option.override_neuron_config", '{"batch_size": 8}')
DIMENSIONS = {
    "mode": spelled("rolling_batch", "auto", "disable", "tnx", "vllm", "lmi-dist"),
    "async": spelled("async_mode", "true", "false"),
    "batch": [
        *spelled("batch_size", "4"),
        (("max_dynamic_batch_size", "4"),),
        (("SERVING_BATCH_SIZE", "4"),),
        (("batch_size", "2"), ("option.batch_size", "3")),
        (("max_dynamic_batch_size", "4"), ("option.batch_size", "1")),
    ],
    "rows": [
        *spelled("max_rolling_batch_size", "8"),
        (("option.max_num_seqs", "8"),),
        (OVERRIDE,),
        (OVERRIDE, ("option.max_rolling_batch_size", "4")),
    ],
    "features": [(("SERVING_FEATURES", "vllm"),)],
}


def write(folder, settings):
    """Write a model folder with these keys. Returns the variables."""
    folder.mkdir(parents=True, exist_ok=True)
    environ = {key: value for key, value in settings if key.partition("_")[0].isupper()}
    lines = [f"{key}={value}" for key, value in settings if key not in environ]
    (folder / "serving.properties").write_text("\n".join((*FOR_DJL, *lines)) + "\n")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return environ


def outcome(resolved):
    """How requests come, and the slots that are planned for."""
    options = resolved.options
    filled = fill(Case(options, FACTS, INF2, NEURON_BACKENDS["tnx"]))
    slots = filled.get("max_rolling_batch_size", (options.max_rolling_batch_size,))[0]
    return options.async_mode, options.rolling_batch in {"tnx", "vllm"}, slots


def in_java(started, settings):
    """The same in DJL: the handler has the slots that the user wrote, under whatever name, or one for each row."""
    batch = int(started.properties.get("batch_size", started.collected))
    plain = not (started.asynchronous or started.rolling)
    named = any(
        "max_rolling" in key.lower() or "seqs" in key or key == OVERRIDE[0] for key, _ in settings
    )
    slots = 8 if named else batch if plain and batch > 1 else 32
    return started.asynchronous, started.rolling, slots


def ignored(settings, started, slots):
    """Options about which a user must be warned, because Java reads them elsewhere or gets another number."""
    keys = [key for key, _ in settings]
    for name in ("rolling_batch", "async_mode"):
        if name in keys or f"ARGS_{name.upper()}" in keys:
            yield name
    if int(started.properties.get("batch_size", started.collected)) != started.collected:
        yield "batch_size"
    if started.rolling and started.rows != slots:
        yield "rolling_batch" if slots == 32 else "max_rolling_batch_size"


def compiled(resolved, folder):
    """Write a folder as `compile` does."""
    prepared = SimpleNamespace(resolved=resolved, options=resolved.options, backend="tnx")
    slots = {"max_rolling_batch_size": outcome(resolved)[2]}  # a fact of the graphs
    write(folder, ())
    content = properties_file({**pinned.pinned(prepared), **slots}, pinned.for_djl(prepared))
    (folder / "serving.properties").write_bytes(content)


def judge(folder, settings):
    """Compare what check, serve, compile and the handler make of it with what Java starts."""
    environ = write(folder, settings)
    started = java.start(folder, environ)
    outside, errors = examine(None, folder, environ)
    inside, errors_inside = examine(java.as_djl_passes(folder, environ), folder, environ)
    batch = int(started.properties.get("batch_size", started.collected))
    # A rolling batch beside a batch_size that Java ignores was refused by the old engine too.
    refused = started.broken or (started.rolling and batch > 1)
    assert (bool(errors), bool(errors_inside)) == (refused, refused), errors or errors_inside
    if refused:
        return
    expected = in_java(started, settings)
    assert outcome(outside) == expected
    assert outcome(inside) == expected
    for resolved in (outside, inside):
        about = {
            name for one in resolved.problems if one.level == "warning" for name in one.options
        }
        assert about >= set(ignored(settings, started, expected[2])), about
    output = folder / "output"
    compiled(outside, output)
    again = java.start(output)
    assert not again.broken
    if started.asynchronous or started.rolling:
        assert (again.asynchronous, again.rolling) == expected[:2]
    else:
        assert again.asynchronous or again.collected == batch
    assert not (again.asynchronous and "batch_size" in again.properties)
    served, errors = examine(java.as_djl_passes(output), output, {})
    assert errors == []
    assert outcome(served) == (again.asynchronous, again.rolling, expected[2])
    assert not {"batch_size", "max_rolling_batch_size"} & set(
        itertools.chain(*(one.options for one in served.problems if one.level == "warning"))
    )


@pytest.mark.parametrize("pair", [*itertools.combinations(DIMENSIONS, 2)], ids="-".join)
def test_every_pair_of_settings_means_what_java_makes_of_it(tmp_path, pair):
    first, second = (DIMENSIONS[name] for name in pair)
    for i, (one, other) in enumerate(itertools.product(first, second)):
        judge(tmp_path / str(i), (*one, *other))


def test_every_setting_alone_and_none_mean_what_java_makes_of_them(tmp_path):
    for i, settings in enumerate(((), *itertools.chain(*DIMENSIONS.values()))):
        judge(tmp_path / str(i), settings)


def test_any_settings_together_mean_what_java_makes_of_them(tmp_path):
    rng = random.Random(13)
    for i in range(150):
        settings = itertools.chain(*(rng.choice(((), *entries)) for entries in DIMENSIONS.values()))
        judge(tmp_path / str(i), tuple(settings))


def test_a_degree_that_is_not_the_one_that_java_reads_is_warned_of(tmp_path):
    keywords = ("option.override_neuron_config", '{"tp_degree": 2}')
    for i, (degree, warned) in enumerate((("1", True), ("2", False), ("02", False))):
        settings = (keywords, ("option.tensor_parallel_degree", degree))
        _, outside, errors = read_both(tmp_path / str(i), settings)
        found = [one for one in outside.problems.messages("warning") if "does not read" in one]
        assert errors == []
        assert len(found) == warned, found
        assert all(
            "reads '1'" in one and "tensor_parallel_degree=2 instead" in one for one in found
        )


def test_of_a_mode_that_is_refused_no_default_is_told(tmp_path):
    _, outside, errors = read_both(tmp_path, (("option.rolling_batch", "trtllm"),))
    assert "write tnx" in str(errors[0])
    assert "rolling_batch=auto" not in "".join(outside.problems.messages("warning"))


def test_djls_partition_script_plans_the_same(tmp_path):
    """It passes the file without Java's recommendations."""
    for i, batch in enumerate(("batch_size", "max_dynamic_batch_size", "option.batch_size")):
        folder = tmp_path / str(i)
        write(folder, ((batch, "4"),))
        name = batch.removeprefix("option.").replace("max_dynamic_", "")
        inside, errors = examine({"model_dir": str(folder), name: "4"}, folder, {})
        outside, _ = examine(None, folder, {})
        assert errors == []
        assert outcome(inside) == outcome(outside) == (False, False, 4)


def read_both(folder, settings):
    """The start by Java, or None if it fails, and the settings outside with their errors."""
    environ = write(folder, settings)
    try:
        started = java.start(folder, environ, cores=2)
    except java.JavaError:
        started = None
    return started, *examine(None, folder, environ)


NUMBERS = ("4", "+4", "04", "4.0", "1_0", "4 ", "MAX", "max", "max ", "0x4", "1e1", "", "9" * 10)
WHOLE = (
    *("option.tensor_parallel_degree", "OPTION_TENSOR_PARALLEL_DEGREE", "TENSOR_PARALLEL_DEGREE"),
    *("option.pipeline_parallel_degree", "PIPELINE_PARALLEL_DEGREE", "SM_NUM_GPUS"),
    *("option.max_rolling_batch_size", "OPTION_MAX_ROLLING_BATCH_SIZE", "MAX_BATCH_SIZE"),
    *("batch_size", "max_dynamic_batch_size", "SERVING_BATCH_SIZE", "max_batch_delay"),
    *("job_queue_size", "max_idle_time", "minWorkers", "maxWorkers", "nc.maxWorkers"),
    *("retry_threshold", "required_memory_mb", "SAGEMAKER_NUM_MODEL_WORKERS"),
)
VALUE_OF = {
    "tensor_parallel_degree": lambda started: started.degree,
    "max_rolling_batch_size": lambda started: started.rows,
    "batch_size": lambda started: started.collected,
}


@pytest.mark.parametrize("key", WHOLE)
def test_a_number_is_refused_where_java_fails_and_else_the_same(tmp_path, key):
    name = key.removeprefix("option.").removeprefix("OPTION_").lower()
    name = {"sm_num_gpus": "tensor_parallel_degree"}.get(name, name)
    name = {"max_batch_size": "max_rolling_batch_size"}.get(name, name)
    rolls = "rolling" in name or "batch" not in name  # Java reads the rows in a rolling batch only
    mode = (("option.rolling_batch", "tnx"),) if rolls else ()
    for i, text in enumerate(NUMBERS):
        started, outside, errors = read_both(tmp_path / str(i), (*mode, (key, text)))
        if started is None:
            assert errors, text
            assert any("write" in str(one) or "expected" in str(one) for one in errors)
        elif text == "max" and "degree" in name:
            assert outside.options.tensor_parallel_degree == "max"
        elif not errors and text and name in VALUE_OF:
            assert getattr(outside.options, name) == VALUE_OF[name](started), text


@pytest.mark.parametrize("key", ["batch_size", "option.tensor_parallel_degree", "minWorkers"])
def test_an_empty_number_is_an_error_in_a_file_for_djl_alone(tmp_path, key):
    """Here it is none at all."""
    write(tmp_path, ((key, ""),))
    outside, (error,) = examine(None, tmp_path, {})
    name = key.removeprefix("option.")
    line = f"({tmp_path}/serving.properties line 3): DJL Serving does not read '' as a number"
    assert name in str(error)
    assert f"'' {line}" in str(error)
    assert "default" not in str(error)
    (tmp_path / "serving.properties").write_text(f"{key}=\n")
    outside, errors = examine(None, tmp_path, {})
    assert errors == []
    assert outside.problems.messages("warning") == ()


def test_the_processes_of_sagemaker_override_the_files(tmp_path):
    """A model for DJL Serving has as many processes; one for the embedded server as many copies."""
    environ = {"SAGEMAKER_NUM_MODEL_WORKERS": "2"}
    write(tmp_path, (("minWorkers", "1"), ("maxWorkers", "1"), ("option.async_mode", "true")))
    for properties in (None, java.as_djl_passes(tmp_path, environ)):
        resolved, errors = examine(properties, tmp_path, environ)
        assert errors == []
        assert resolved.options.replicas == 1
        warned = [text for text in resolved.problems.messages("warning") if "Workers" in text]
        assert len(warned) == 2 * (properties is None)
        assert all("set SAGEMAKER_NUM_MODEL_WORKERS=1" in text for text in warned)
    (tmp_path / "serving.properties").unlink()
    resolved, errors = examine(None, tmp_path, environ)
    assert resolved.options.replicas == 2
    assert resolved.origins["replicas"] == "environment SAGEMAKER_NUM_MODEL_WORKERS"


TRUTHS = ("true", "TRUE", "True", "true ", "1", "yes", "on", "false", "False", "0", "no", "off", "")


@pytest.mark.parametrize("key", ["option.async_mode", "OPTION_ASYNC_MODE"])
def test_a_truth_is_refused_where_java_reads_another(tmp_path, key):
    for i, text in enumerate(TRUTHS):
        started, outside, errors = read_both(tmp_path / str(i), ((key, text),))
        if not errors:
            assert outside.options.async_mode == started.asynchronous, text
        misread = text.strip().lower() in {"true", "1", "yes", "on"} and not started.asynchronous
        assert bool(errors) == misread, text
        assert all("as false; write true" in str(error) for error in errors)


@pytest.mark.parametrize("name", ["option.parallel_loading", "option.enable_venv"])
def test_one_that_java_alone_reads_is_warned_of(tmp_path, name):
    mode = ("option.async_mode", "true")
    for i, text in enumerate(TRUTHS):
        started, outside, errors = read_both(tmp_path / str(i), ((name, text), mode))
        assert errors == []
        meant = text.strip().lower() in {"true", "1", "yes", "on"}
        read = java.parse_boolean(started.properties[name.removeprefix("option.")])
        assert len(outside.problems.messages("warning")) == (meant != read), text


def test_a_start_by_mpi_is_refused_as_java_refuses_it(tmp_path):
    """Every word but true is what it should be."""
    for i, text in enumerate(TRUTHS):
        settings = (("option.mpi_mode", text), ("option.async_mode", "true"))
        started, outside, errors = read_both(tmp_path / str(i), settings)
        assert bool(errors) == (started is None) == (text.lower() == "true"), text
        assert outside.problems.messages("warning") == ()
        assert all("set mpi_mode=false" in str(error) for error in errors)


def test_a_mode_is_refused_where_java_reads_another(tmp_path):
    words = (
        "auto",
        "AUTO",
        "Auto ",
        "disable",
        "Disable",
        "disable ",
        "tnx",
        "TNX",
        "tnx ",
        "vllm",
    )
    for i, text in enumerate((*words, "")):
        started, outside, errors = read_both(tmp_path / str(i), (("option.rolling_batch", text),))
        if not errors:
            assert (outside.options.rolling_batch in {"tnx", "vllm"}) == started.rolling, text
        assert bool(errors) == (text not in {"auto", "disable", "tnx", "TNX", "vllm"}), text


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("option.entryPoint", "djl_python_neuronx.handler "),
        ("option.handler", "handle "),
        ("option.pythonExecutable", "python3 "),
        ("option.model_id", "org/model "),
        ("engine", "Python "),
    ],
)
def test_java_reads_blanks(tmp_path, key, text):
    for value, refused in ((text, True), (text.strip(), False)):
        _, _, errors = read_both(tmp_path / str(refused), ((key, value),))
        assert bool(errors) == refused, value
        assert all("blanks" in str(error) for error in errors)


@pytest.mark.parametrize("name", ["predict_timeout", "model_loading_timeout"])
@pytest.mark.parametrize("text", ["90", "+90", "90 ", "90.0", "1_0", "9e1"])
def test_seconds_that_java_cannot_read_are_warned_of(tmp_path, name, text):
    for key in (f"option.{name}", name.upper(), f"SAGEMAKER_{SAGEMAKERS[name]}"):
        started, outside, errors = read_both(tmp_path / key, ((key, text),))
        seconds = {
            "predict_timeout": started.predict_timeout_s,
            "model_loading_timeout": started.loading_timeout_s,
        }[name]
        warned = [text for text in outside.problems.messages("warning") if "whole number" in text]
        assert errors == []
        assert len(warned) == (seconds != getattr(outside.options, name))


SAGEMAKERS = {
    "predict_timeout": "MODEL_SERVER_TIMEOUT_SECONDS",
    "model_loading_timeout": "STARTUP_TIMEOUT",
}


DEGREES = (
    *(("option.tensor_parallel_degree", text) for text in ("2", "max")),
    *(("OPTION_TENSOR_PARALLEL_DEGREE", text) for text in ("2", "max")),
    *(("TENSOR_PARALLEL_DEGREE", text) for text in ("2", "max")),
    ("SM_NUM_GPUS", "2"),
    ("tensor_parallel_degree", "2"),
    ("ARGS_TENSOR_PARALLEL_DEGREE", "2"),
    ("option.tp_degree", "2"),
    ("OPTION_TENSOR_PARALLEL_SIZE", "2"),
    ("option.env", "TENSOR_PARALLEL_DEGREE=2"),
    ("option.override_neuron_config", '{"tp_degree": 2}'),
    ("option.n_positions", "128"),
)


@pytest.mark.parametrize(
    ("settings", "served"),
    [
        ((("option.batch_size", "4"), ("option.rolling_batch", "auto")), "one sequence"),
        ((("option.batch_size", "4"),), "one sequence"),
        ((("batch_size", "4"), ("option.rolling_batch", "auto")), "the 4 requests"),
        ((("batch_size", "4"),), ""),  # the file of one who wants such batches
        ((("batch_size", "4"), ("option.rolling_batch", "disable")), ""),
        ((("option.batch_size", "4"), ("option.async_mode", "true")), ""),
    ],
)
def test_a_batch_beside_rolling_batch_auto_is_warned_of(tmp_path, settings, served):
    environ = write(tmp_path, settings)
    for properties in (None, java.as_djl_passes(tmp_path, environ)):
        resolved, errors = examine(properties, tmp_path, environ)
        assert errors == []
        warnings = resolved.problems.messages("warning")
        found = [text for text in warnings if "while all others wait" in text]
        assert len(found) == bool(served), warnings
        assert all(served in text and "option.async_mode=true" in text for text in found)
        if ("option.rolling_batch", "auto") in settings and properties is None:
            assert "line 4" in resolved.origins["rolling_batch"]
        # No advice leads away from what serves sequences together.
        fixes = [text for text in warnings if "no effect on DJL Serving" in text and served]
        assert all("write option.max_rolling_batch_size=4" in text for text in fixes)


def test_slots_without_the_prefix_are_warned_of_in_every_mode(tmp_path):
    for i, mode in enumerate(("option.async_mode=true", "option.rolling_batch=tnx", "a=b")):
        for j, (rows, warned) in enumerate((("8", True), ("32", False))):
            folder = tmp_path / f"{i}-{j}"
            settings = (("max_rolling_batch_size", rows), tuple(mode.split("=")))
            _, outside, errors = read_both(folder, settings)
            fix = f"write option.max_rolling_batch_size={rows}"
            found = [text for text in outside.problems.messages("warning") if fix in text]
            assert (errors, len(found)) == ([], warned)


@pytest.mark.parametrize(("key", "text"), DEGREES)
def test_a_degree_that_java_does_not_read_is_warned_of(tmp_path, key, text):
    environ = write(tmp_path, ((key, text), ("option.async_mode", "true")))
    started = java.start(tmp_path, environ, cores=2)
    report = check.check(str(tmp_path), environ=environ, overrides={}, machine=INF2)
    assert report.prepared.case.degree == 2
    warned = [
        one for one in report.findings.messages("warning") if "process for each NeuronCore" in one
    ]
    assert len(warned) == (started.degree == 0), warned
    assert all("TENSOR_PARALLEL_DEGREE=2" in text.upper() for text in warned)


BARE = ("model_id=org/x", "env=A=1", "predict_timeout=9", "pipeline_parallel_degree=2", "handler=x")


@pytest.mark.parametrize("line", [*BARE, "option.s3url=s3://bucket/x", "entryPoint=model.py"])
def test_a_key_that_java_reads_elsewhere_is_warned_of(tmp_path, line):
    key, _, value = line.partition("=")
    write(tmp_path, ((key, value), ("option.async_mode", "true")))
    lines = (tmp_path / "serving.properties").read_text()
    if key == "entryPoint":
        (tmp_path / "serving.properties").write_text(lines.replace(f"{FOR_DJL[1]}\n", ""))
    outside, _ = examine(None, tmp_path, {})
    name = {"option.s3url": "model_id"}.get(key, key)
    (warning,) = [
        text
        for text in outside.problems.messages("warning")
        if "DJL Serving" in text and f"option.{name}" in text
    ]
    assert f"option.{name}=" in warning


@pytest.mark.parametrize("name", ["n_positions", "predict_timeout", "rolling_batch", "entryPoint"])
def test_a_key_with_and_without_its_prefix_is_warned_of(tmp_path, name):
    values = {"rolling_batch": ("disable", "tnx"), "entryPoint": ("a.py", FOR_DJL[1].split("=")[1])}
    bare, prefixed = values.get(name, ("64", "128"))
    for i, (first, second, warned) in enumerate(
        ((bare, prefixed, True), (prefixed, prefixed, False))
    ):
        for key in (f"option.{name}", f"OPTION_{name.upper()}"):
            folder = tmp_path / f"{i}-{key}"
            environ = write(folder, ((name, first), (key, second)))
            if name == "entryPoint" and environ:
                continue  # the file has it already
            for properties in (None, java.as_djl_passes(folder, environ)):
                resolved, _ = examine(properties, folder, environ)
                found = [one for one in resolved.problems.messages("warning") if "keep one" in one]
                assert len(found) == warned, found
                if name in type(resolved.options).model_fields:
                    assert str(getattr(resolved.options, name)).startswith(second)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("option.mpi_mode=false", ""),
        ("option.handler=infer", "set handler=handle"),
        ("option.handler=handle", ""),
        ("maxWorkers=2", "set maxWorkers=1"),
        ("minWorkers=3", "set minWorkers=1"),
        ("maxWorkers=-1", ""),
        ("option.replicas=2", "the cores of one copy"),
        ("option.replicas=max", "the cores of one copy"),
        ("option.replicas=1", ""),
        ("gpu.maxWorkers=2", ""),
        ("log_model_metric=true", "nor a key of DJL Serving"),
        ("job_que_size=5", "'job_queue_size'"),
        ("log_request_metric=true", ""),
        ("metrics_aggregation=10", ""),
    ],
)
def test_what_java_would_do_with_its_own_keys(tmp_path, line, words):
    write(tmp_path, (line.split("="), ("option.async_mode", "true")))
    outside, errors = examine(None, tmp_path, {})
    assert errors == []
    warnings = outside.problems.messages("warning")
    assert len(warnings) == bool(words), warnings
    assert words in "".join(warnings)


def test_a_batch_that_java_would_collect_beside_async_mode(tmp_path):
    """One error that names both, however it comes; the option alone has no effect."""
    for i, key in enumerate(("batch_size", "max_dynamic_batch_size", "SERVING_BATCH_SIZE")):
        settings = ((key, "4"), ("option.async_mode", "true"))
        _, _, (error,) = read_both(tmp_path / str(i), settings)
        assert "hand them over as one" in str(error)
        assert "remove batch_size or async_mode" in str(error)
    settings = (("option.batch_size", "4"), ("option.async_mode", "true"))
    _, outside, errors = read_both(tmp_path / "option", settings)
    assert errors == []
    assert "no effect on DJL Serving" in "".join(outside.problems.messages("warning"))

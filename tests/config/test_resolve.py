"""Values, their precedence, their origins, and what is refused: the same through every door."""

import json
import re
from typing import ClassVar

import javaproperties
import pytest
from pydantic import ValidationError

from djl_python_neuronx.config.legacy import DJL_ARGUMENTS, IGNORED, UNSUPPORTED
from djl_python_neuronx.config.options import (
    NAMES,
    OnDeviceGeneration,
    ServingOptions,
    allowed_values,
    names_where,
    option,
)
from djl_python_neuronx.config.sources import API_KEYS
from djl_python_neuronx.config.values import MAX_DEPTH, parse_object, plain
from djl_python_neuronx.errors import (
    ConfigError,
    IncompatibleOptionsError,
    InvalidOptionError,
    UnknownOptionError,
)
from djl_python_neuronx.loading import check
from djl_python_neuronx.planning import machines
from tests.config.java import as_djl_passes, as_the_container_sets
from tests.config.option_table import TABLE
from tests.planning.settings import TINY, assess, complete, examine, resolve

INF2 = "inf2.48xlarge"


@pytest.fixture
def folder(tmp_path):
    """A model folder; call it with the lines of its serving.properties."""

    def write(*lines, encoding="iso-8859-1", config=None):
        (tmp_path / "serving.properties").write_bytes("\n".join(lines).encode(encoding))
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


def problems_of(*arguments, **named):
    with pytest.raises(ConfigError) as caught:
        resolve(*arguments, **named)
    return caught.value.problems


def told(resolved, level):
    return list(resolved.problems.messages(level))


def assert_misplaced(problems, variable, name):
    (problem,) = problems
    assert f"sets {variable}: only the server's environment" in str(problem)
    assert f"option.{name}=…" in str(problem)
    assert "secret" not in str(problem)


def suspicious(resolved):
    """Key of the file that is no option to its warning."""
    return {
        problem.options[0]: problem.message
        for problem in resolved.problems
        if problem.level == "warning" and not set(problem.options) & {*NAMES, "entryPoint"}
    }


class TestDoors:
    """DJL Serving, the embedded server and `check` come to the same options from the same file and environment."""

    SCENARIOS: ClassVar = {
        "nothing": ((), {}, {}),
        "the file": (
            ("option.n_positions=64", "option.dtype = bf16 ", "batch_size=4"),
            {},
            {"n_positions": 64, "dtype": "bfloat16", "batch_size": 4},
        ),
        "file before environment": (
            ("option.n_positions=64",),
            {"OPTION_N_POSITIONS": "128", "OPTION_DTYPE": "fp32"},
            {"n_positions": 64, "dtype": "float32"},
        ),
        "prefixed variable before a bare key": (
            ("dtype=bf16",),
            {"OPTION_DTYPE": "fp32", "ARGS_DTYPE": "fp16"},
            {"dtype": "float32"},
        ),
        "bare key before an argument of the environment": (
            ("dtype=bf16",),
            {"ARGS_DTYPE": "fp16", "ARGS_MAX_WAITING": "7"},
            {"dtype": "bfloat16", "max_waiting": 7},
        ),
        "an alias in the file": (
            ("option.max_model_len=64",),
            {"OPTION_N_POSITIONS": "128"},
            {"n_positions": 64},
        ),
        "a stand-in": (
            (),
            {"TENSOR_PARALLEL_DEGREE": "8", "SM_NUM_GPUS": "4", "NEURON_QUANT": "true"},
            {"tensor_parallel_degree": 8, "quantize": "static_int8"},
        ),
        "all cores": (
            ("option.tensor_parallel_degree=max",),
            {},
            {"tensor_parallel_degree": "max"},
        ),
        "all cores by variable": (
            (),
            {"TENSOR_PARALLEL_DEGREE": "max"},
            {"tensor_parallel_degree": "max"},
        ),
        "SageMaker before the file": (
            ("option.predict_timeout=30", "option.model_loading_timeout=60"),
            {
                "SAGEMAKER_STARTUP_TIMEOUT": "1800",
                "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "90",
                "SAGEMAKER_NUM_MODEL_WORKERS": "2",
                "PREDICT_TIMEOUT": "240",
            },
            {"predict_timeout": 90.0, "model_loading_timeout": 1800.0},
        ),
        "the old engine's names": (
            ("option.load_in_8bit=true", "option.neuron_optimize_level=2"),
            {},
            {"quantize": "static_int8", "neuron_optimize_level": 2},
        ),
        "DJL's other name for a batch": (("max_dynamic_batch_size=4",), {}, {"batch_size": 4}),
        "rows of vLLM's default": (("option.rolling_batch=vllm",), {}, {"rolling_batch": "vllm"}),
        "an empty value": (
            ("option.n_positions=", "option.dtype= "),
            {"OPTION_N_POSITIONS": "64", "OPTION_DTYPE": ""},
            {"n_positions": 64, "dtype": "auto"},
        ),
    }

    @pytest.mark.parametrize("name", SCENARIOS)
    def test_they_agree_on_values_and_origins(self, folder, name):
        lines, environ, expected = self.SCENARIOS[name]
        model_dir = folder(*lines, config=TINY)
        properties = as_djl_passes(model_dir, environ, cores=24)
        in_djl = resolve(properties, model_dir, environ)
        embedded = resolve(None, model_dir, environ)
        for option_name, value in expected.items():
            assert getattr(embedded.options, option_name) == value
        # How DJL calls the handler is a fact there, and only foreseen elsewhere.
        assert self.seen(in_djl) == self.seen(embedded)
        report = check.check(str(model_dir), environ=environ, overrides={})
        assert report.resolved is not None
        settled = {
            option_name: (embedded.options.tensor_parallel_degree, origin.partition(": ")[0])
            if option_name == "tensor_parallel_degree"
            else (value, origin)
            for option_name, (value, origin) in self.seen(report.resolved).items()
            if "default" not in origin
        }
        assert settled.items() <= self.seen(embedded).items()

    def test_tgis_variables(self, folder):
        environ = {
            "HF_MODEL_QUANTIZE": "static_int8",
            "HF_MODEL_TRUST_REMOTE_CODE": "true",
            "SM_NUM_GPUS": "2",
            "MAX_BATCH_SIZE": "8",
            "MAX_CONCURRENT_REQUESTS": "50",
            "MAX_BATCH_PREFILL_TOKENS": "4096",
        }
        model_dir = folder(config=TINY)
        exported = as_the_container_sets(environ)
        doors = (
            resolve(as_djl_passes(model_dir, environ), model_dir, exported),
            # An image whose entry point is not DJL's: nobody exports, the file of variables is the same.
            resolve(as_djl_passes(model_dir), model_dir, environ),
            resolve(None, model_dir, environ),
            check.check(str(model_dir), environ=environ, overrides={}).resolved,
        )
        for resolved in doors:
            options = resolved.options
            assert (options.quantize, options.trust_remote_code) == ("static_int8", True)
            assert (options.max_rolling_batch_size, options.max_waiting) == (8, 50)
            assert "max_rolling_batch_prefill_tokens" in resolved.ignored
        assert {resolved.options.tensor_parallel_degree for resolved in doors[:3]} == {2}
        assert doors[2].origins["quantize"] == "environment HF_MODEL_QUANTIZE"

    @pytest.mark.parametrize("revision", [None, "v1"])
    def test_a_model_of_the_hub(self, tmp_path, revision):
        environ = {
            "HF_MODEL_ID": "org/model",
            "OPTION_MODEL_ID": "org/other",
            "OPTION_REVISION": "v0",
            "HF_HUB_OFFLINE": "1",
        }
        if revision:
            environ["HF_REVISION"] = revision
        made, empty = tmp_path / "made", tmp_path / "empty"
        made.mkdir()
        empty.mkdir()
        content = {"option.model_id": "org/model", "option.revision": revision}
        (made / "serving.properties").write_text(
            javaproperties.dumps({key: value for key, value in content.items() if value})
        )
        in_djl = resolve(as_djl_passes(made, environ), made, environ)
        embedded = resolve(None, empty, environ)
        report = check.check(str(empty), environ=environ, overrides={})
        doors = [(door, door.problems) for door in (in_djl, embedded)]
        for resolved, problems in (*doors, (report.resolved, report.findings)):
            assert resolved.options.model_id == "org/model"
            assert resolved.origins["model_id"] == "environment HF_MODEL_ID"
            assert resolved.options.revision == (revision or "v0")
            (note,) = [problem for problem in problems if "org/other" in problem.message]
            assert note.level == "note"
            assert "environment OPTION_MODEL_ID" in note.message
            assert not resolved.ignored.keys() & set(environ)

    @staticmethod
    def seen(resolved):
        return {
            name: (value, origin)
            for name, value, origin in resolved.explain()
            if (name, value) not in {("rolling_batch", "auto"), ("rolling_batch", "disable")}
        }


class TestPrecedence:
    ORDER = ("command line", "file", "environment", "fallback")

    @pytest.mark.parametrize("given", range(len(ORDER)))
    def test_the_first_source_that_speaks_wins(self, folder, given):
        value = [str(8 - index) for index in range(4)]
        overrides = {"tensor_parallel_degree": value[0]} if given <= 0 else {}
        lines = [f"option.tensor_parallel_degree={value[1]}"] if given <= 1 else []
        environ = {"OPTION_TENSOR_PARALLEL_DEGREE": value[2]} if given <= 2 else {}
        environ["TENSOR_PARALLEL_DEGREE"] = value[3]
        resolved = resolve(None, folder(*lines), environ, overrides)
        assert resolved.options.tensor_parallel_degree == int(value[given])

    def test_the_default_is_last(self, folder):
        resolved = resolve(None, folder(), {})
        assert resolved.options.batch_size == 1
        assert ("batch_size", 1, "default") in resolved.explain()

    def test_an_empty_value_is_none_at_all(self, folder):
        model_dir = folder("option.n_positions=  ", "option.dtype=")
        resolved = resolve(
            {"revision": ""}, model_dir, {"OPTION_N_POSITIONS": "64", "OPTION_X": ""}
        )
        assert resolved.options.n_positions == 64
        assert resolved.options.revision is None

    def test_a_prefixed_key_beats_djls_argument_of_the_same_name(self, folder):
        for lines in (
            ("batch_size=2", "option.batch_size=3"),
            ("option.batch_size=3", "batch_size=2"),
        ):
            assert resolve(None, folder(*lines), {}).options.batch_size == 3

    def test_hf_model_id_does_not_replace_the_model_of_a_folder(self, folder):
        model_dir = folder()
        (model_dir / "config.json").touch()
        environ = {"HF_MODEL_ID": "org/model", "HF_REVISION": "main"}
        resolved = resolve(None, model_dir, environ)
        assert (resolved.options.model_id, resolved.options.revision) == (None, None)
        assert set(resolved.ignored) == set(environ)

    def test_hf_model_id_stands_in_outside_djl_only(self, folder):
        model_dir = folder("engine=Python")
        environ = {"HF_MODEL_ID": "org/model"}
        assert resolve(None, model_dir, environ).options.model_id == "org/model"
        # DJL makes a model of its own from the variable; this folder is another one.
        assert resolve(as_djl_passes(model_dir), None, environ).options.model_id is None

    @pytest.mark.parametrize("first", ["max_model_len", "n_positions"])
    def test_of_two_names_the_users_first_place_wins_in_any_order_of_djls_map(self, folder, first):
        model_dir = folder("option.max_model_len=64")
        values = {"max_model_len": "64", "n_positions": "128"}
        ordered = {first: values[first], **values}
        for environ in ({"OPTION_N_POSITIONS": "128"}, {}):  # the user's second place; DJL's own
            resolved = resolve({"model_dir": str(model_dir), **ordered}, None, environ)
            assert resolved.options.n_positions == 64


class TestOrigins:
    def test_each_value_names_its_place(self, folder):
        model_dir = folder("# a comment", "option.dtype = \\", "   bf16", "", "batch_size=2")
        environ = {"OPTION_N_POSITIONS": "64", "TENSOR_PARALLEL_DEGREE": "max"}
        resolved = resolve(None, model_dir, environ, {"max_waiting": "5"})
        assert resolved.origins == {
            "model_dir": "the model folder",
            "dtype": f"{model_dir}/serving.properties line 2",
            "batch_size": f"{model_dir}/serving.properties line 5",
            "rolling_batch": "DJL",
            "n_positions": "environment OPTION_N_POSITIONS",
            "tensor_parallel_degree": "environment TENSOR_PARALLEL_DEGREE",
            "max_waiting": "command line",
        }

    def test_inside_djl_a_value_keeps_the_place_where_the_user_wrote_it(self, folder):
        model_dir = folder("option.dtype=bf16", "option.rolling_batch=auto")
        properties = as_djl_passes(model_dir, rolling_batch="disable", n_positions="64")
        resolved = resolve(properties, None, {"OPTION_N_POSITIONS": "64"})
        assert resolved.origins["dtype"].endswith("line 1")
        assert resolved.origins["n_positions"] == "environment OPTION_N_POSITIONS"
        assert (resolved.options.rolling_batch, resolved.origins["rolling_batch"]) == (
            "disable",
            "DJL",
        )

    def test_explain_has_every_option_once(self, folder):
        names = [name for name, _, _ in resolve(None, folder(), {}).explain()]
        assert sorted(names) == sorted(ServingOptions.model_fields)
        # As docs/options.md has them: what every deployment sets comes first.
        assert names.index("model_id") < names.index("n_positions") < names.index("fuse_qkv")


class TestStrictness:
    def test_what_the_user_wrote_is_refused_with_a_hint(self, folder):
        model_dir = folder("option.n_position=64")
        for properties in (None, as_djl_passes(model_dir)):
            (problem,) = problems_of(properties, model_dir, {})
            assert isinstance(problem, UnknownOptionError)
            assert "line 1" in str(problem)
            assert "n_positions" in str(problem)

    def test_a_keyword_that_the_server_keeps_to_itself_is_refused_with_the_reason(self, folder):
        (problem,) = problems_of(None, folder(), {}, {"start_rank_id": "32"})
        assert isinstance(problem, UnknownOptionError)
        assert "only models on one machine are served" in str(problem)

    def test_so_is_an_unknown_variable_and_a_word_of_the_command_line(self, folder):
        problems = problems_of(None, folder(), {"OPTION_DTIPE": "x"}, {"modell_id": "y"})
        assert {(problem.name, problem.origin) for problem in problems} == {
            ("dtipe", "environment OPTION_DTIPE"),
            ("modell_id", "command line"),
        }

    def test_a_model_folder_does_not_decide_who_uses_the_server(self, folder):
        values = {name: TABLE[name].good[0] for name in names_where(lambda marker: marker.operator)}
        assert values.keys() == {
            *(
                "api_key_file",
                "cors_allow_origins",
                "admin_port",
                "admin_host",
                "cloudwatch_namespace",
                "otlp_traces_endpoint",
                "adapter_sources",
            ),
        }
        for name, (text, value) in values.items():
            model_dir = folder(f"option.{name}={text}")
            for properties in (None, as_djl_passes(model_dir)):
                (problem,) = problems_of(properties, model_dir, {})
                assert isinstance(problem, InvalidOptionError)
                assert "serving.properties line 1" in str(problem)
                assert f"-o {name}=… or OPTION_{name.upper()} only" in str(problem)
            model_dir = folder(f"option.env=OPTION_{name.upper()}={text}")
            assert_misplaced(problems_of(None, model_dir, {}), f"OPTION_{name.upper()}", name)
            for given in (({f"OPTION_{name.upper()}": text},), ({}, {name: text})):
                resolved = resolve(None, folder(), *given)
                assert getattr(resolved.options, name) == value

    @pytest.mark.parametrize(
        ("variable", "name"),
        [
            ("OPTION_N_POSITIONS", "n_positions"),
            ("OPTION_chat_template", "chat_template"),
            ("ARGS_N_POSITIONS", "n_positions"),
            ("HF_MODEL_ID", "model_id"),
            ("HF_REVISION", "revision"),
            ("SAGEMAKER_STARTUP_TIMEOUT", "model_loading_timeout"),
        ],
    )
    def test_the_option_env_sets_no_variable_of_the_operators_settings(
        self, folder, variable, name
    ):
        env = f"OMP_NUM_THREADS=1,{variable}=secret"
        for lines, environ, given in (
            ([f"option.env={env}"], {}, {}),
            ([], {"OPTION_ENV": env}, {}),
            ([], {}, {"env": env}),
        ):
            model_dir = folder(*lines)
            settings, problems = examine(None, model_dir, environ, given)
            assert_misplaced(problems, variable, name)
            assert set(settings.worker_variables) == {"OMP_NUM_THREADS"}  # no second finding
            if not given:  # DJL Serving's process has the variable.
                properties = as_djl_passes(model_dir, environ)
                problems = problems_of(properties, model_dir, {**environ, variable: "secret"})
                assert_misplaced(problems, variable, name)

    def test_a_file_outside_named_through_the_option_env_is_not_read(self, folder):
        """DJL Serving has set the variable of the folder's own file for its process, as an operator would."""
        for name in ("ARGS_CHAT_TEMPLATE", "OPTION_CHAT_TEMPLATE"):
            model_dir = folder(f"option.env={name}=/etc/hostname")
            properties, variables = as_djl_passes(model_dir), {name: "/etc/hostname"}
            settings, problems = examine(properties, model_dir, variables)
            assert settings.options.chat_template is None
            assert_misplaced(problems, name, "chat_template")
        assert resolve(None, folder(), {name: "/etc/hostname"}).options.chat_template is not None

    @pytest.mark.parametrize("given", [{"OPTION_API_KEY_FILE": "/keys"}, {API_KEYS: "secret"}])
    def test_keys_that_djl_serving_does_not_check_are_an_error(self, folder, given):
        model_dir = folder("engine=Python", "option.async_mode=true")
        resolve(None, model_dir, given)
        properties = as_djl_passes(model_dir, given)
        (problem,) = problems_of(properties, model_dir, given)
        assert "checks no API keys" in str(problem)
        assert "secret" not in str(problem)

    def test_what_djl_adds_is_kept_quietly(self, folder):
        model_dir = folder("job_queue_size=10", "load_on_devices=*")
        resolved = resolve(as_djl_passes(model_dir, cluster_size="1"), None, {})
        assert set(resolved.ignored) == {
            *(
                "job_queue_size",
                "load_on_devices",
                "device_id",
                "handler",
                "minWorkers",
                "cluster_size",
                "max_rolling_batch_size",
                "pipeline_parallel_degree",
            )
        }

    def test_declared_options_of_the_old_engine_are_listed_with_the_reason(self, folder):
        model_dir = folder("option.mpi_mode=false", "option.entryPoint=djl_python_neuronx.handler")
        resolved = resolve(None, model_dir, {"OPTION_ENGINE": "Python", "OPTION_HEIGHT": "512"})
        assert resolved.ignored == {
            name: IGNORED[name] for name in ("mpi_mode", "entryPoint", "engine", "height")
        }

    @pytest.mark.parametrize("name", sorted({*IGNORED, *UNSUPPORTED}))
    def test_an_old_option_that_asks_for_nothing_is_listed(self, folder, name):
        words = UNSUPPORTED[name].neutral if name in UNSUPPORTED else ("False",)
        for word in words:
            model_dir = folder(f"option.{name}={word.title()}")
            for properties in (None, as_djl_passes(model_dir)):
                assert resolve(properties, model_dir, {}).ignored[name]

    @pytest.mark.parametrize("name", sorted(UNSUPPORTED))
    def test_one_that_asks_for_what_there_is_not_is_refused_without_a_guess(self, folder, name):
        model_dir = folder(f"option.{name}=true")
        for properties in (None, as_djl_passes(model_dir)):
            (problem,) = problems_of(properties, model_dir, {})
            assert isinstance(problem, InvalidOptionError)
            assert "not supported in this version; remove it" in str(problem)
            assert "did you mean" not in str(problem)
        # A bare key addresses DJL Serving, and may be meant for it.
        assert name in suspicious(resolve(None, folder(f"{name}=true"), {}))

    def test_what_djl_cannot_have_from_the_user_is_kept_quietly(self, folder):
        model_dir = folder("option.tensor_parallel_degree=max")
        own = {"rolling_batch": "trtllm", "tensor_parallel_degree": "-1", "height": "1"}
        resolved = resolve(as_djl_passes(model_dir, **own), None, {})
        assert set(own) <= set(resolved.ignored)
        assert resolved.options.rolling_batch == "auto"
        assert resolved.options.tensor_parallel_degree == "max"
        (problem,) = problems_of(None, folder("option.rolling_batch=trtllm"), {})
        assert isinstance(problem, InvalidOptionError)

    @pytest.mark.parametrize("key", ["opton.n_positions", "Option.n_positions", "opt.n_positions"])
    def test_a_misspelt_prefix_is_refused(self, folder, key):
        model_dir = folder(f"{key}=64")
        for properties in (None, as_djl_passes(model_dir)):
            (problem,) = problems_of(properties, model_dir, {})
            assert isinstance(problem, UnknownOptionError)
            assert "option.n_positions" in str(problem)

    def test_a_key_that_nobody_reads_is_suspicious(self, folder):
        model_dir = folder("n_position=3", "minWorkers=1", "batch_size=2", "gpu.maxWorkers=1")
        for properties in (None, as_djl_passes(model_dir)):
            resolved = resolve(properties, model_dir, {})
            assert set(suspicious(resolved)) == {"n_position"}
            assert "'n_positions'" in suspicious(resolved)["n_position"]
            assert "n_position" not in resolved.ignored

    def test_djls_arguments_take_no_prefix(self, folder):
        (problem,) = problems_of(None, folder("option.job_queue_size=100"), {})
        assert "job_queue_size without 'option.'" in str(problem)

    def test_the_model_folder_is_not_the_users_to_write(self, folder):
        (problem,) = problems_of(None, folder("option.model_dir=/other"), {})
        assert "option.model_id" in str(problem)

    def test_an_option_is_not_listed_as_doing_nothing(self, folder):
        resolved = resolve(None, folder("option.model_loading_timeout=3600"), {})
        assert "model_loading_timeout" not in resolved.ignored
        # What is warned of does not do nothing either.
        resolved = resolve(None, folder("option.entryPoint=djl_python.huggingface"), {})
        assert "entryPoint" not in resolved.ignored

    def test_long_names_are_cut_in_messages(self, folder):
        model_dir = folder(f"option.{'x' * 9000}=1", f"{'y' * 9000}=1")
        resolved, (problem,) = examine(None, model_dir, {})
        assert len(str(problem)) < 1000
        ((name, doubt),) = suspicious(resolved).items()
        assert max(len(name), len(doubt)) < 1000

    def test_a_long_list_is_refused_without_looking_at_its_parts(self, folder):
        for name in (
            "n_positions",
            "context_length_estimate",
            "weights_to_skip_layout_optimization",
        ):
            with pytest.raises(ValidationError) as caught:
                ServingOptions.model_validate({name: "x," * 500_000})
            assert caught.value.error_count() < 5
        (problem,) = problems_of(None, folder(), {}, {"n_positions": "1," * 500_000})
        assert len(str(problem)) < 1000

    def test_functions_of_a_model_py_are_no_settings(self, folder):
        model_dir = folder("option.output_formatter=sse")
        properties = as_djl_passes(model_dir, output_formatter=print, input_formatter=print)
        resolved = resolve(properties, None, {})
        assert resolved.options.output_formatter == "sse"
        assert not {"output_formatter", "input_formatter"} & set(resolved.ignored)

    def test_all_problems_are_in_one_error(self, folder):
        model_dir = folder(
            "option.n_positions=many",
            "option.nope=1",
            "option.batch_size=2",
            "option.rolling_batch=tnx",
        )
        with pytest.raises(ConfigError) as caught:
            resolve(None, model_dir, {"OPTION_DTYPE": "int3"})
        kinds = sorted(type(problem).__name__ for problem in caught.value.problems)
        assert kinds == [
            "IncompatibleOptionsError",
            "InvalidOptionError",
            "InvalidOptionError",
            "UnknownOptionError",
        ]
        for word in ("many", "nope", "batch_size", "int3", "environment OPTION_DTYPE", "line 1"):
            assert word in str(caught.value)


class TestValues:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("256,512", (256, 512)),
            ("[512, 256]", (256, 512)),
            ("64", (64,)),
            (" 8 , 8,16 ", (8, 16)),
            ("128, 256,", (128, 256)),
            ("[128,256, ]", (128, 256)),
        ],
    )
    def test_buckets(self, folder, text, value):
        resolved = resolve(None, folder(f"option.context_length_estimate={text}"), {})
        assert resolved.options.context_length_estimate == value

    @pytest.mark.parametrize(
        "text", ["", "[]", ",", "256,,512", "256,,", "0", "-1,2", "a", "[[1]]", "1.5", "9" * 5000]
    )
    def test_no_buckets(self, text):
        try:
            options = ServingOptions.model_validate({"context_length_estimate": text})
        except ValueError:
            return
        raise AssertionError(options.context_length_estimate)

    @pytest.mark.parametrize(
        ("text", "value"),
        [("fp32", "float32"), ("BF16", "bfloat16"), ("float16", "float16"), ("auto", "auto")],
    )
    def test_dtype_has_one_spelling(self, folder, text, value):
        assert resolve(None, folder(f"option.dtype={text}"), {}).options.dtype == value

    @pytest.mark.parametrize(
        ("name", "text", "value"),
        [
            ("rolling_batch", "TNX", "tnx"),
            ("model_loader", "Auto", "auto"),
            ("output_formatter", "JSON", "json"),
        ],
    )
    def test_words_have_no_case(self, folder, name, text, value):
        assert getattr(resolve(None, folder(f"option.{name}={text}"), {}).options, name) == value

    @pytest.mark.parametrize(
        ("text", "value"),
        [("false", False), ("False", False), ("true", True), ("TRUE ", True), ("0", False)],
    )
    def test_the_word_false_is_false(self, folder, text, value):
        resolved = resolve({"trust_remote_code": text}, folder(), {})
        assert resolved.options.trust_remote_code is value

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("tensor_parallel_degree", "0"),
            ("tensor_parallel_degree", "most"),
            ("n_positions", "1.5"),
            ("n_positions", "1"),
            ("n_positions", str(2**31)),
            ("predict_timeout", "0"),
            ("predict_timeout", "nan"),
            ("predict_timeout", "inf"),
            ("async_mode", "perhaps"),
            ("rolling_batch", "trtllm"),
            ("model_loader", "trtllm"),
            ("output_formatter", "xml"),
            ("decode_interleave", "0"),
            ("cpu_threads", "-1"),
            ("max_waiting", "x"),
        ],
    )
    def test_what_is_not_allowed_is_refused_by_name_value_origin_and_rule(self, folder, name, text):
        (problem,) = problems_of(None, folder(f"option.{name}={text}"), {})
        assert isinstance(problem, InvalidOptionError)
        assert (problem.name, problem.value) == (name, text)
        assert problem.origin.endswith("line 1")
        assert problem.allowed.startswith(allowed_values(name))

    @pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
    def test_json_has_no_such_numbers(self, word):
        with pytest.raises(ValueError, match="malformed"):
            parse_object(f'{{"a": {word}}}')

    @pytest.mark.parametrize("brackets", ["[]", "()"])
    def test_nesting_has_a_limit(self, brackets):
        left, right = brackets
        comma = "," if brackets == "()" else ""

        def nested(depth):
            return left * depth + "1" + f"{comma}{right}" * depth

        value = parse_object(nested(MAX_DEPTH))
        assert plain(value)
        with pytest.raises(ValueError, match="nested brackets"):
            parse_object(nested(MAX_DEPTH + 1))
        with pytest.raises(ValueError, match="as in JSON"):
            plain([value])

    def test_an_alias_is_the_option(self, folder):
        resolved = resolve(None, folder("option.max_model_len=64"), {})
        assert resolved.options.n_positions == 64

    def test_two_names_for_one_option_must_agree(self, folder):
        lines = ("option.max_model_len=64", "option.n_positions={}")
        assert resolve(None, folder(lines[0], lines[1].format(64)), {}).options.n_positions == 64
        model_dir = folder(lines[0], lines[1].format(65))
        for properties in (None, as_djl_passes(model_dir)):
            (problem,) = problems_of(properties, model_dir, {})
            assert isinstance(problem, IncompatibleOptionsError)

    def test_options_are_frozen(self, folder):
        options = resolve(None, folder(), {}).options
        with pytest.raises(ValueError, match="frozen"):
            options.batch_size = 2

    def test_every_option_can_say_what_it_allows(self):
        for name in ServingOptions.model_fields:
            assert len(allowed_values(name)) > 3
        assert allowed_values("on_mismatch") == "error or recompile"
        assert allowed_values("async_mode") == "true or false"

    def test_no_name_means_two_things(self):
        names = [
            known for name in ServingOptions.model_fields for known in (name, *option(name).aliases)
        ]
        assert len(names) == len(set(names)) == len(NAMES)
        tables = [set(names), set(IGNORED), set(UNSUPPORTED)]
        assert len(set().union(*tables)) == sum(map(len, tables))
        assert not DJL_ARGUMENTS & (set(names) | set(UNSUPPORTED))


class TestRules:
    @pytest.mark.parametrize(
        "lines",
        [
            ("option.batch_size=2", "option.rolling_batch=tnx"),
            ("option.async_mode=true", "option.rolling_batch=vllm"),
            ("option.n_positions=256", "option.context_length_estimate=128,512"),
            ("option.rolling_batch=tnx", "option.max_rolling_batch_size=1000"),
        ],
    )
    def test_what_does_not_go_together_is_refused_with_both_places(self, folder, lines):
        (problem,) = problems_of(None, folder(*lines), {})
        assert isinstance(problem, IncompatibleOptionsError)
        assert "line 1" in str(problem)
        assert "line 2" in str(problem)

    @pytest.mark.parametrize(
        "lines",
        [
            ("option.batch_size=2", "option.rolling_batch=disable"),
            ("option.batch_size=2",),
            ("option.async_mode=true", "option.rolling_batch=disable"),
            ("option.async_mode=false", "option.rolling_batch=tnx"),
            ("option.n_positions=512", "option.context_length_estimate=128,512"),
        ],
    )
    def test_what_does_is_not(self, folder, lines):
        assert resolve(None, folder(*lines), {}).options.model_dir is not None

    def test_there_must_be_a_model(self):
        (problem,) = problems_of(None, None, {})
        assert "option.model_id" in str(problem)
        assert resolve(None, None, {}, {"model_id": "org/model"}).options.model_id == "org/model"


class TestTranslations:
    @pytest.mark.parametrize("name", ["load_in_8bit", "neuron_quant"])
    @pytest.mark.parametrize(
        ("word", "value"), [("true", "static_int8"), ("True", "static_int8"), ("false", None)]
    )
    def test_another_name_means_a_value_of_the_option(self, folder, name, word, value):
        model_dir = folder(f"option.{name}={word}")
        for properties in (None, as_djl_passes(model_dir)):
            resolved = resolve(properties, model_dir, {})
            assert resolved.options.quantize == value
            place = f"{model_dir}/serving.properties line 1"
            assert resolved.origins["quantize"] == place

    def test_what_it_cannot_mean_is_refused_as_it_was_written(self, folder):
        model_dir = folder("option.load_in_8bit=perhaps")
        for properties in (None, as_djl_passes(model_dir)):
            (problem,) = problems_of(properties, model_dir, {})
            assert isinstance(problem, InvalidOptionError)
            assert (problem.name, problem.value) == ("load_in_8bit", "perhaps")
            assert "true" in problem.allowed

    @pytest.mark.parametrize(
        ("quantize", "agrees"),
        [("static_int8", True), ("INT8", True), ("s8", True), ("static_fp8", False)],
    )
    def test_names_for_one_option_must_agree_in_what_they_mean(self, folder, quantize, agrees):
        model_dir = folder("option.load_in_8bit=true", f"option.quantize={quantize}")
        if agrees:
            assert resolve(None, model_dir, {}).options.quantize == "static_int8"
            return
        (problem,) = problems_of(None, model_dir, {})
        assert isinstance(problem, IncompatibleOptionsError)
        for words in ("load_in_8bit='true'", "quantize='static_fp8'", "line 1", "line 2"):
            assert words in str(problem)

    @pytest.mark.parametrize("name", ["load_in_8bit", "neuron_quant"])
    @pytest.mark.parametrize(
        ("lines", "environ"),
        [
            (["load_in_8bit=true"], {}),
            (["neuron_quant=true"], {}),
            ([], {"OPTION_LOAD_IN_8BIT": "1"}),
            ([], {"NEURON_QUANT": "true"}),
        ],
    )
    def test_an_old_false_overrules_what_is_weaker(self, folder, name, lines, environ):
        model_dir = folder(*(f"option.{line}" for line in lines))
        resolved = resolve(None, model_dir, environ, {name: "false"})
        assert resolved.options.quantize is None
        assert resolved.origins["quantize"] == "command line"

    def test_an_old_false_overrules_nothing_that_is_stronger(self, folder):
        model_dir = folder("option.load_in_8bit=false")
        for overrides, expected in (
            ({"neuron_quant": "true"}, "static_int8"),
            ({"quantize": "static_fp8"}, "static_fp8"),
        ):
            assert resolve(None, model_dir, {}, overrides).options.quantize == expected
        environ = {"OPTION_LOAD_IN_8BIT": "true"}
        for properties in (None, as_djl_passes(model_dir, environ)):
            assert resolve(properties, model_dir, environ).options.quantize is None

    def test_an_old_false_overrules_the_option_in_a_weaker_place(self, folder):
        model_dir = folder("option.load_in_8bit=false")
        environ = {"OPTION_QUANTIZE": "static_int8"}
        for properties in (None, as_djl_passes(model_dir, environ)):
            resolved = resolve(properties, model_dir, environ)
            assert resolved.options.quantize is None
            (note,) = told(resolved, "note")
            assert "OPTION_QUANTIZE" in note

    @pytest.mark.parametrize(
        "lines",
        [
            ("load_in_8bit=false", "quantize=static_int8"),
            ("quantize=static_fp8", "load_in_8bit=0"),
            ("neuron_quant=false", "load_in_8bit=true"),
        ],
    )
    def test_an_old_false_beside_another_value_is_a_contradiction(self, folder, lines):
        model_dir = folder(*(f"option.{line}" for line in lines))
        for properties in (None, as_djl_passes(model_dir)):
            (problem,) = problems_of(properties, model_dir, {})
            assert isinstance(problem, IncompatibleOptionsError)
            assert all(line.partition("=")[0] in str(problem) for line in lines)

    def test_an_old_false_agrees_with_none(self, folder):
        model_dir = folder("option.load_in_8bit=false", "option.quantize=none")
        assert resolve(None, model_dir, {}).options.quantize is None

    def test_places_overrule_each_other_as_for_any_option(self, folder):
        model_dir = folder("option.load_in_8bit=true")
        resolved = resolve(None, model_dir, {"OPTION_QUANTIZE": "static_fp8"})
        assert resolved.options.quantize == "static_int8"
        (note,) = told(resolved, "note")
        assert "OPTION_QUANTIZE" in note


class TestFiles:
    NAMES: ClassVar = [name for name in ServingOptions.model_fields if option(name).file]

    def test_an_option_may_name_a_file_of_the_model_folder(self, folder):
        model_dir = folder("option.override_neuron_config=mine.json")
        (model_dir / "mine.json").write_text('{"fuse_mlp": true, "qk_layernorm": true}')
        for properties in (None, as_djl_passes(model_dir)):
            resolved = resolve(properties, model_dir, {})
            assert resolved.options.override_neuron_config == {"qk_layernorm": True}
            assert resolved.origins["override_neuron_config"].endswith("line 1")
            assert resolved.options.fuse_mlp is True
            assert resolved.origins["fuse_mlp"].endswith("line 1: fuse_mlp")

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            ('{"max_length": 512}', "max_length: a request sets max_new_tokens"),
            ('{"eos_token_id": 2}', "eos_token_id: the model's own ends a text"),
            ('{"top_kk": 5}', "'top_kk' is wrong; did you mean 'top_k'?"),
            ('{"top_k": 0}', "top_k: expected a whole number of at least 1"),
            ('{"global_topk": "x"}', "global_topk: expected a whole number of at least 1"),
            ('{"topk": 5}', "'topk' is wrong; did you mean 'top_k'?"),
            ('{"top_p": 2}', "top_p: expected a number above 0, at most 1"),
            ('{"do_sample": "perhaps"}', "do_sample: expected true or false"),
        ],
    )
    def test_what_is_wrong_within_an_object_is_said_in_our_words(self, folder, value, words):
        (problem,) = problems_of(None, folder(f"option.on_device_generation={value}"), {})
        assert words in problem.allowed

    def test_what_a_library_sets_to_nothing_is_not_set(self, folder):
        text = '{"max_length": null, "eos_token_id": null}'
        resolved = resolve(None, folder(f"option.on_device_generation={text}"), {})
        assert resolved.options.on_device_generation == OnDeviceGeneration()

    def test_a_template_that_is_missing_gets_no_word_for_its_name(self, folder):
        model_dir = folder("option.chat_template=my.jinja")
        (problem,) = problems_of(None, model_dir, {})
        assert f"there is no file {str(model_dir / 'my.jinja')!r}" in str(problem)
        assert "did you mean" not in str(problem)

    def test_where_a_template_is_wrong_is_said(self, folder):
        model_dir = folder("option.chat_template=my.jinja")
        (model_dir / "my.jinja").write_text("{{ messages }}\n{% endfor %}")
        (problem,) = problems_of(None, model_dir, {})
        assert re.search(r"my\.jinja.*; line 2: .*'endfor'", str(problem))

    @pytest.mark.parametrize("name", NAMES)
    def test_what_is_wrong_with_the_file_is_said_with_its_name(self, folder, name):
        model_dir = folder(f"option.{name}=mine.json")
        for content in (None, "{", "[" * 10_000):
            if content is not None:
                (model_dir / "mine.json").write_text(content)
            (problem,) = problems_of(None, model_dir, {})
            assert isinstance(problem, InvalidOptionError)
            assert (problem.name, problem.value) == (name, "mine.json")
            assert f"{model_dir}/mine.json" in str(problem)

    def test_the_name_within_an_object_is_told(self, folder):
        model_dir = folder('option.on_device_generation={"top_kk": 5}')
        (problem,) = problems_of(None, model_dir, {})
        assert "top_kk" in problem.allowed

    def test_a_properties_file_takes_the_place_of_the_folders(self, folder, tmp_path):
        model_dir = folder("option.n_positions=64")
        other = tmp_path / "other"
        other.mkdir()
        path = other / "llama.properties"
        path.write_text("option.dtype=bf16\noption.override_neuron_config=mine.json")
        (other / "mine.json").write_text("{}")
        (model_dir / "mine.json").write_text('{"a": 1}')
        resolved = resolve(None, model_dir, {}, file=str(path))
        assert (resolved.options.n_positions, resolved.options.dtype) == (None, "bfloat16")
        assert resolved.origins["dtype"] == f"{path} line 1"
        assert resolved.options.override_neuron_config == {"a": 1}
        resolved, _ = examine(None, None, {}, file=str(path))
        assert resolved.options.override_neuron_config == {}
        (problem,) = problems_of(None, model_dir, {}, file=other / "gone.properties")
        assert "gone.properties" in str(problem)


def batching_warnings(resolved):
    texts = told(resolved, "warning")
    for text in texts:
        if text.startswith("rolling_batch"):
            assert "option.async_mode=true" in text
            assert "option.rolling_batch=tnx" in text
    return [text.partition(" ")[0] for text in texts]


class TestWhatDjlDoes:
    @pytest.mark.parametrize(
        ("lines", "environ", "warned"),
        [
            ((), {}, True),
            (("option.rolling_batch=auto",), {}, True),
            (("option.rolling_batch=disable",), {}, False),
            ((), {"OPTION_ROLLING_BATCH": "disable"}, False),
            (("option.rolling_batch=tnx",), {}, False),
            (("option.async_mode=true",), {}, False),
            (("batch_size=4",), {}, False),
        ],
    )
    def test_one_request_at_a_time_is_warned_of_unless_asked_for(
        self, folder, lines, environ, warned
    ):
        engine = ("engine=Python", "option.entryPoint=djl_python_neuronx.handler")
        model_dir = folder(*engine, *lines)
        expected = ["rolling_batch=disable"] * warned
        in_djl = resolve(as_djl_passes(model_dir, environ), model_dir, environ)
        assert batching_warnings(in_djl) == expected
        foreseen = resolve(None, model_dir, environ)
        assert batching_warnings(foreseen) == ["rolling_batch=auto"] * warned
        assert all("under DJL Serving" in text for text in told(foreseen, "warning"))

    def test_auto_that_djl_leaves_alone_is_not(self, folder):
        model_dir = folder("option.rolling_batch=auto")
        properties = {**as_djl_passes(model_dir), "rolling_batch": "auto"}
        assert told(resolve(properties, model_dir, {}), "warning") == []

    def test_a_mode_that_djl_replaces_is_told(self, folder):
        model_dir = folder("option.rolling_batch=tnx", "batch_size=4")
        resolved, problems = examine(as_djl_passes(model_dir), model_dir, {})
        assert problems == []
        assert resolved.options.rolling_batch == "disable"
        (warning,) = told(resolved, "warning")
        assert "'disable' in place of 'tnx'" in warning
        assert "line 1" in warning

    @pytest.mark.parametrize(
        ("lines", "environ", "words"),
        [
            (("engine=Python",), {}, ["entryPoint", "not set"]),
            (
                ("option.entryPoint=djl_python.transformers_neuronx",),
                {},
                ["entryPoint", "djl_python.transformers_neuronx", "line 1"],
            ),
            (("option.entryPoint=djl_python_neuronx",), {}, ["entryPoint"]),
            (
                ("engine=Python",),
                {"OPTION_ENTRYPOINT": "djl_python.huggingface"},
                ["entryPoint", "OPTION_ENTRYPOINT"],
            ),
            (("option.entryPoint=djl_python_neuronx.handler",), {}, []),
            (("engine=Python",), {"DJL_ENTRY_POINT": "djl_python_neuronx.handler"}, []),
            (("engine=Python",), {"DJL_ENTRY_POINT": "djl_python.x"}, ["DJL_ENTRY_POINT"]),
            (
                ("option.entryPoint=model.py",),
                {},
                ["option.entryPoint=model.py", "may run its author"],
            ),
            (("option.pythonExecutable=x",), {}, ["option.pythonExecutable=x", "line 1"]),
            (
                ("option.trust_remote_code=true",),
                {},
                ["trust_remote_code=", "line 1): a start may"],
            ),
            (("option.trust_remote_code=no",), {}, []),
            ((), {"HF_MODEL_TRUST_REMOTE_CODE": "true"}, []),
            (
                ("engine=PyTorch", "option.entryPoint=djl_python_neuronx.handler"),
                {},
                ["engine", "PyTorch", "set engine=Python"],
            ),
            (("option.dtype=bf16",), {}, []),
            ((), {}, []),
        ],
    )
    def test_what_an_old_file_must_change(self, folder, lines, environ, words):
        model_dir = folder("", *lines, "option.async_mode=true")
        warnings = told(resolve(None, model_dir, environ), "warning")
        assert len(warnings) == bool(words)
        assert all(word in warnings[0].replace("line 2", "line 1") for word in words)
        if "entryPoint" in words:
            name = "OPTION_ENTRYPOINT" if "OPTION_ENTRYPOINT" in environ else "option.entryPoint"
            assert f"set {name}=djl_python_neuronx.handler" in warnings[0]
        # Inside DJL this handler has been called: nothing is to be said of it.
        assert told(resolve(as_djl_passes(model_dir, environ), model_dir, environ), "warning") == []

    @pytest.mark.parametrize(
        ("value", "warned"),
        [("A=1, B=2,", False), ("garbage;x", True), ('{"HF_HOME": "x"}', True), ("A=1,b", True)],
    )
    def test_variables_without_a_value(self, folder, value, warned):
        warnings = told(resolve(None, folder(f"option.env={value}"), {}), "warning")
        assert ["A=1,B=2" in text and "line 1" in text for text in warnings] == [True] * warned

    @pytest.mark.parametrize(("value", "warned"), [("90", False), ("90.5", True), ("9e1", True)])
    @pytest.mark.parametrize("name", ["predict_timeout", "model_loading_timeout"])
    def test_seconds_that_java_cannot_read(self, folder, name, value, warned):
        entry_point = "option.entryPoint=djl_python_neuronx.handler"
        model_dir = folder(entry_point, "option.async_mode=true", f"option.{name}={value}")
        for properties in (None, as_djl_passes(model_dir)):
            warnings = told(resolve(properties, model_dir, {}), "warning")
            assert [text.partition("=")[0] for text in warnings] == [name] * warned

    def test_a_model_py_is_an_entry_point(self, folder):
        model_dir = folder("engine=Python", "option.async_mode=true")
        (model_dir / "model.py").touch()
        assert told(resolve(None, model_dir, {}), "warning") == []

    @pytest.mark.parametrize(
        ("lines", "name", "value"),
        [
            ((), "max_rolling_batch_size", "32"),
            (("option.rolling_batch=vllm",), "max_rolling_batch_size", "256"),
            (("option.tensor_parallel_degree=max",), "tensor_parallel_degree", "12"),
            ((), "pipeline_parallel_degree", "1"),
        ],
    )
    def test_its_own_sizes_give_way_to_those_of_the_model(self, folder, lines, name, value):
        properties = {**as_djl_passes(folder(*lines)), name: value}
        resolved = resolve(properties, None, {})
        assert resolved.origins.get(name) != "DJL"
        assert value in resolved.ignored[name]
        assert f"{name}=" not in "".join(told(resolved, "note"))

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("max_rolling_batch_size", "4"),
            ("n_positions", "512"),
            ("tensor_parallel_degree", "8"),
            ("pipeline_parallel_degree", "2"),
        ],
    )
    def test_what_it_cannot_have_recommended_was_asked_for(self, folder, name, value):
        # A workflow, or the management API that registers a model with options.
        properties = {**as_djl_passes(folder()), name: value}
        resolved = resolve(properties, None, {})
        assert getattr(resolved.options, name) == int(value)
        assert resolved.origins[name] == "DJL"

    def test_a_batch_of_its_own_turns_a_rolling_batch_off(self, folder):
        lines = ("option.entryPoint=djl_python_neuronx.handler", "option.rolling_batch=tnx")
        model_dir = folder(*lines, "batch_size=4")
        for properties in (None, as_djl_passes(model_dir)):
            resolved = resolve(properties, model_dir, {})
            assert (resolved.options.rolling_batch, resolved.options.batch_size) == ("disable", 4)
            place = ", in place of rolling_batch=tnx (" if properties is None else ""
            assert resolved.origins["rolling_batch"].startswith(f"DJL{place}")
            (warning,) = told(resolved, "warning")
            assert "'disable' in place of 'tnx'" in warning
        # Under these names DJL Serving does not see it in time, and the rolling batch stays.
        for batch in ("option.batch_size=4", "max_dynamic_batch_size=4"):
            model_dir = folder(*lines, batch)
            for properties in (None, as_djl_passes(model_dir)):
                (problem,) = problems_of(properties, model_dir, {})
                assert isinstance(problem, IncompatibleOptionsError)

    @pytest.mark.parametrize(
        ("line", "mode", "rows"),
        [
            ("max_num_seqs=8", "tnx", 32),
            ("max_num_seqs=64", "vllm", 256),
            ("max_num_seqs=32", "tnx", None),
            ("max_rolling_batch_size=8", "tnx", None),
            ("max_num_seqs=8", "disable", None),
        ],
    )
    def test_a_name_for_the_slots_that_djl_does_not_know(self, folder, line, mode, rows):
        entry_point = "option.entryPoint=djl_python_neuronx.handler"
        model_dir = folder(entry_point, f"option.rolling_batch={mode}", f"option.{line}")
        for properties in (None, as_djl_passes(model_dir)):
            warnings = told(resolve(properties, model_dir, {}), "warning")
            assert len(warnings) == (rows is not None)
            if rows:
                assert f"up to {rows} rows" in warnings[0]
                assert (
                    f"write option.max_rolling_batch_size={line.partition('=')[2]}" in warnings[0]
                )

    @pytest.mark.parametrize(
        ("lines", "environ", "words"),
        [
            (("option.rolling_batch=auto",), {}, ("option.entryPoint=", "option.async_mode=true")),
            (("option.model_loading_timeout=900",), {}, ("option.entryPoint=", "option.rolling")),
            ((), {"OPTION_ENGINE": "Python"}, ("OPTION_ENTRYPOINT=", "OPTION_ASYNC_MODE=true")),
            (
                (),
                {"OPTION_ROLLING_BATCH": "auto"},
                ("OPTION_ENTRYPOINT", "OPTION_ROLLING_BATCH=tnx"),
            ),
            (("option.max_rolling_batch_size=1",), {}, ("option.entryPoint=",)),
        ],
    )
    def test_a_setting_for_djl_is_enough_for_its_warnings(self, folder, lines, environ, words):
        resolved = resolve(None, folder(*lines), environ)
        warnings = told(resolved, "warning")
        assert len(warnings) == len(words) if len(words) == 1 else 2
        assert all(word in " ".join(warnings) for word in words)
        assert ("together" in " ".join(warnings)) == (len(words) > 1)

    @pytest.mark.parametrize(
        "name", ["N_POSITIONS", "MAX_ROLLING_BATCH_SIZE", "MODEL_LOADING_TIMEOUT"]
    )
    def test_variables_of_the_embedded_server_bring_no_warnings_about_djl(self, folder, name):
        assert told(resolve(None, folder(), {f"OPTION_{name}": "64"}), "warning") == []

    @pytest.mark.parametrize(
        "overrides", [{"max_rolling_batch_size": "2"}, {"rolling_batch": "auto"}]
    )
    def test_the_command_line_is_not_djls(self, folder, overrides):
        assert told(resolve(None, folder(), {}, overrides), "warning") == []

    def test_a_model_that_it_downloaded_has_the_place_where_it_was_named(self, folder):
        model_dir = folder("option.model_id=s3://bucket/model")
        properties = as_djl_passes(model_dir, model_id="/tmp/download/a1")
        resolved = resolve(properties, model_dir, {})
        assert resolved.options.model_id == "/tmp/download/a1"
        assert "line 1, downloaded by DJL" in resolved.origins["model_id"]


class TestOverruled:
    @pytest.mark.parametrize(
        ("environ", "overrides", "expected"),
        [
            ({"OPTION_N_POSITIONS": "128"}, {}, ["n_positions=128 (environment"]),
            ({"OPTION_MAX_MODEL_LEN": "128"}, {}, ["max_model_len=128 (environment"]),
            ({"OPTION_N_POSITIONS": "064"}, {}, []),
            ({}, {"n_positions": "128"}, []),
            (
                {"TENSOR_PARALLEL_DEGREE": "4"},
                {},
                ["tensor_parallel_degree=4 (environment TENSOR_PARALLEL_DEGREE)"],
            ),
            ({"TENSOR_PARALLEL_DEGREE": "2"}, {}, []),
        ],
    )
    def test_what_does_not_count_is_noted_unless_it_was_meant_so(
        self, folder, environ, overrides, expected
    ):
        model_dir = folder("option.n_positions=64", "option.tensor_parallel_degree=2")
        doors = [resolve(None, model_dir, environ, overrides)]
        if not overrides:
            doors.append(resolve(as_djl_passes(model_dir, environ), model_dir, environ))
        for resolved in doors:
            notes = told(resolved, "note")
            assert len(notes) == len(expected)
            assert all(words in note for words, note in zip(expected, notes, strict=True))
            assert all(
                note.startswith(("n_positions=64 (", "tensor_parallel_degree=2 ("))
                for note in notes
            )


class TestOddities:
    """Odd spellings are reported with their place."""

    def test_a_key_that_is_there_twice(self, folder):
        resolved = resolve(None, folder("option.n_positions=64", "option.n_positions=128"), {})
        assert resolved.options.n_positions == 128
        (note,) = told(resolved, "note")
        assert "also set in" in note
        assert "line 1, which line 2 overrides" in note

    def test_a_key_that_is_there_twice_and_overridden(self, folder):
        model_dir = folder("option.n_positions=64", "option.n_positions=128")
        notes = told(resolve(None, model_dir, {}, {"n_positions": "512"}), "note")
        assert any("line 1, which line 2 overrides" in note for note in notes)
        assert all("last line counts" not in note for note in notes)

    def test_a_variable_in_two_spellings(self, tmp_path):
        environ = {"OPTION_N_POSITIONS": "64", "OPTION_n_positions": "128", "OPTION_DTYPE": "bf16"}
        resolved = resolve(None, tmp_path, environ)
        assert resolved.options.n_positions == 64
        (note,) = told(resolved, "note")
        assert "environment OPTION_n_positions" in note
        assert told(resolve(None, tmp_path, {**environ, "OPTION_n_positions": "64 "}), "note") == []

    def test_the_mark_of_windows_editors_hides_a_key_from_djl(self, tmp_path):
        for start, warned in (("", True), ("#\n", False), ("\n", False)):
            content = f"{start}option.n_positions=64\noption.dtype=bf16".encode()
            (tmp_path / "serving.properties").write_bytes(b"\xef\xbb\xbf" + content)
            warnings = told(resolve(None, tmp_path, {}), "warning")
            assert [text.startswith("n_positions=64") for text in warnings] == [True] * warned
            assert all("line 1" in text for text in warnings)

    def test_what_nothing_reads_yet(self, folder):
        resolved = resolve(None, folder("option.save_mp_checkpoint_path=/out"), {})
        (note,) = told(resolved, "note")
        assert note.startswith("save_mp_checkpoint_path=/out")
        assert "serving ignores it" in note


class TestEnvOption:
    LINE = "option.env= NEURON_QUANT=true,HF_TOKEN=hf_5ecret=x,PREDICT_TIMEOUT = 30 ,nonsense"

    def test_it_stands_in_outside_djl_as_it_does_inside(self, folder):
        model_dir = folder(self.LINE)
        environ = {"PREDICT_TIMEOUT": "60"}
        outside = resolve(None, model_dir, environ)
        # Inside, the process has the variables already.
        has = {"NEURON_QUANT": "true", "HF_TOKEN": "hf_5ecret=x", "PREDICT_TIMEOUT": "30"}
        inside = resolve(as_djl_passes(model_dir, environ), model_dir, has)
        for resolved in (outside, inside):
            assert resolved.options.quantize == "static_int8"
            assert resolved.options.predict_timeout == 30.0
            assert "5ecret" not in f"{resolved.origins}{resolved.ignored}{list(resolved.problems)}"
            origin = resolved.origins["quantize"]
            assert origin == f"{model_dir / 'serving.properties'} line 1, NEURON_QUANT"

    def test_what_a_file_sets_by_a_variable_is_the_files(self, folder):
        """Not the operator's, who alone may name files elsewhere; and `check` says that code may run."""
        other = folder().parent / "elsewhere.json"
        other.write_text(json.dumps({"do_sample": True}))
        model_dir = folder(
            f"option.env=NEURON_ON_DEV_GENERATION={other},HF_MODEL_TRUST_REMOTE_CODE=true,"
            "NEURON_COMPILED_ARTIFACTS=s3://theirs"
        )
        resolved, problems = examine(None, model_dir, {})
        assert resolved.options.on_device_generation is None
        (error,) = problems
        assert "is outside the model's folder" in str(error)
        said = {level: resolved.problems.messages(level) for level in ("warning", "note")}
        assert any("may run its author's code" in text for text in said["warning"])
        assert any("read and written there" in text for text in said["note"])
        environ = {"NEURON_ON_DEV_GENERATION": str(other)}
        assert resolve(None, folder(), environ).options.on_device_generation.do_sample

    def test_the_file_comes_before_it(self, folder):
        model_dir = folder(self.LINE, "option.predict_timeout=90")
        assert resolve(None, model_dir, {}).options.predict_timeout == 90.0


class TestExamine:
    BROKEN = ("option.n_positions=many", "option.nope=1", "option.max_waiting=7")

    def test_problems_do_not_stop_the_rest(self, folder):
        resolved, problems = examine(None, folder(*self.BROKEN), {})
        assert {type(problem) for problem in problems} == {InvalidOptionError, UnknownOptionError}
        assert (resolved.options.n_positions, resolved.options.max_waiting) == (None, 7)
        with pytest.raises(ConfigError) as caught:
            resolve(None, folder(*self.BROKEN), {})
        assert list(map(str, caught.value.problems)) == list(map(str, problems))

    def test_what_is_refused_is_told_beside_the_value_that_stands(self, folder):
        resolved, _ = examine(None, folder(*self.BROKEN), {})
        told_of = {name: (value, origin) for name, value, origin in resolved.explain()}
        value, origin = told_of["n_positions"]
        assert value is None
        for words in ("default; 'many' (", "line 1) is not allowed"):
            assert words in origin
        done, _ = assess(resolved, TINY, machines.named(INF2), "tnx")
        (origin,) = [place for name, _, place in done.explain() if name == "n_positions"]
        assert "'many' (" in origin
        assert done.options.n_positions

    def test_findings_show_values_as_files_have_them(self, folder):
        _, (problem,) = examine(
            None, folder("option.async_mode=true", "option.rolling_batch=tnx"), {}
        )
        assert "async_mode=true (" in str(problem)

    def test_a_broken_file_is_one_problem_of_many(self, folder):
        model_dir = folder("option.model_id=\\u12")
        _, problems = examine(None, model_dir, {"OPTION_DTYPE": "int3"})
        assert len(problems) == 2

    def test_long_values_are_cut_in_messages(self, folder):
        model_dir = folder(f"option.n_positions={'9' * 100_000}")
        (problem,) = problems_of(None, model_dir, {})
        assert len(str(problem)) < 1000
        (problem,) = problems_of({"n_positions": 10**5000, "batch_size": 1}, model_dir, {})
        assert len(str(problem)) < 1000

    def test_a_finding_names_options_with_value_and_origin(self, folder):
        lines = ("option.batch_size=2", "option.rolling_batch=tnx")
        _, (problem,) = examine(None, folder(*lines), {})
        assert isinstance(problem, IncompatibleOptionsError)
        for words in ("batch_size=2 (", "line 1)", "rolling_batch=tnx (", "line 2)"):
            assert words in str(problem)


class TestAssess:
    def test_what_follows_is_filled_in_with_its_reason(self, folder):
        resolved = resolve(None, folder("option.n_positions=64"), {})
        machine = machines.named(INF2)
        done, problems = assess(resolved, TINY, machine, "tnx")
        assert problems == []
        assert (done.options.dtype, done.options.n_positions) == ("bfloat16", 64)
        assert done.origins["dtype"].startswith("default: ")
        assert done.origins["n_positions"].endswith("line 1")
        assert isinstance(done.options.tensor_parallel_degree, int)
        assert complete(resolved, TINY, machine, "tnx") == done

    def test_every_misfit_is_told_at_once(self, folder):
        lines = ("option.n_positions=8192", "option.tensor_parallel_degree=3")
        resolved = resolve(None, folder(*lines), {})
        done, problems = assess(resolved, TINY, machines.named(INF2), "tnx")
        said = "\n".join(map(str, problems))
        for words in ("n_positions=8192 (", "line 1)", "tensor_parallel_degree=3 (", "line 2)"):
            assert words in said
        assert all(isinstance(problem, IncompatibleOptionsError) for problem in problems)
        assert done.options.n_positions == 8192
        with pytest.raises(ConfigError) as caught:
            complete(resolved, TINY, machines.named(INF2), "tnx")
        assert list(map(str, caught.value.problems)) == list(map(str, problems))

    def test_findings_of_both_stages_are_kept(self, folder):
        model_dir = folder("engine=Python", "option.n_positions=64", "option.fuse_qkv=true")
        resolved = resolve(None, model_dir, {})
        done = complete(resolved, TINY, machines.named(INF2), "tnx")
        first = list(resolved.problems)
        assert list(done.problems)[: len(first)] == first
        assert all(problem.level in {"warning", "note"} for problem in done.problems)
        assert all(problem.message for problem in done.problems)

    def test_time_to_compile_is_held_against_the_limit(self, folder):
        config = {**TINY, "num_hidden_layers": 80, "hidden_size": 128}
        machine = machines.named(INF2)
        for limit, warned in (("60", True), ("100000", False)):
            model_dir = folder(f"option.model_loading_timeout={limit}", "option.n_positions=64")
            done = complete(resolve(None, model_dir, {}), config, machine, "tnx")
            assert any("model_loading_timeout" in text for text in told(done, "warning")) is warned

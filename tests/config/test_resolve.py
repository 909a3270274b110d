"""Values, their precedence, their origins, and what is refused."""

from pathlib import Path

import javaproperties
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from djl_python_neuronx.config import sources
from djl_python_neuronx.config.legacy import DJL_ARGUMENTS, IGNORED, UNSUPPORTED
from djl_python_neuronx.config.options import (
    NAMES,
    ServingOptions,
    allowed_values,
    option,
)
from djl_python_neuronx.config.resolve import resolve
from djl_python_neuronx.errors import (
    ConfigError,
    IncompatibleOptionsError,
    InvalidOptionError,
    UnknownOptionError,
)


@pytest.fixture
def folder(tmp_path):
    """A model folder; call it with the lines of its serving.properties."""

    def write(*lines, encoding="iso-8859-1"):
        (tmp_path / "serving.properties").write_bytes("\n".join(lines).encode(encoding))
        return tmp_path

    return write


def as_djl_passes(folder, **added):
    """What DJL Serving's Java side makes of a folder: prefixes gone, its own keys mixed in."""
    content = javaproperties.loads((folder / "serving.properties").read_text("iso-8859-1"))
    own = {"model_dir": str(folder), "device_id": "-1", "handler": "handle", "minWorkers": "1"}
    return {
        **{key.removeprefix("option."): value for key, value in content.items()},
        **own,
        **added,
    }


def problems_of(*arguments, **named):
    with pytest.raises(ConfigError) as caught:
        resolve(*arguments, **named)
    return caught.value.problems


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

    def test_the_last_of_equal_keys_counts_as_in_java(self, folder):
        resolved = resolve(None, folder("option.n_positions=1", "option.n_positions=2"), {})
        assert resolved.options.n_positions == 2
        assert resolved.origins["n_positions"].endswith("serving.properties line 2")

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
        assert names == list(ServingOptions.model_fields)


class TestStrictness:
    def test_what_the_user_wrote_is_refused_with_a_hint(self, folder):
        model_dir = folder("option.n_position=64")
        for properties in (None, as_djl_passes(model_dir)):
            (problem,) = problems_of(properties, model_dir, {})
            assert isinstance(problem, UnknownOptionError)
            assert "line 1" in str(problem)
            assert "n_positions" in str(problem)

    def test_so_is_an_unknown_variable_and_a_word_of_the_command_line(self, folder):
        problems = problems_of(None, folder(), {"OPTION_DTIPE": "x"}, {"modell_id": "y"})
        assert {(problem.name, problem.origin) for problem in problems} == {
            ("dtipe", "environment OPTION_DTIPE"),
            ("modell_id", "command line"),
        }

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
            )
        }

    def test_declared_options_of_the_old_engine_are_listed_with_the_reason(self, folder):
        model_dir = folder("option.mpi_mode=true", "option.entryPoint=djl_python_neuronx.handler")
        resolved = resolve(None, model_dir, {"OPTION_ENGINE": "Python", "OPTION_FUSE_QKV": "true"})
        assert resolved.ignored == {
            name: IGNORED[name].reason for name in ("mpi_mode", "entryPoint", "engine", "fuse_qkv")
        }

    @pytest.mark.parametrize(
        "line",
        [
            "enable_lora=False",
            "load_in_8bit=false",
            "tgi_compat=0",
            "pipeline_parallel_degree=1",
            "speculative_length=5",
            "spec_length=0",
            "task=text-generation",
            "override_neuron_config={}",
            "use_stable_diffusion=false",
            "enable_streaming=true",
            "waiting_steps=2",
            "cluster_size=1",
            "max_rolling_batch_prefill_tokens=4096",
        ],
    )
    def test_an_old_option_that_asks_for_nothing_is_listed(self, folder, line):
        name = line.partition("=")[0]
        assert resolve(None, folder(f"option.{line}"), {}).ignored[name]

    @pytest.mark.parametrize(
        "line",
        [
            "enable_lora=true",
            "quantize=static_int8",
            "load_in_8bit=true",
            "load_split_model=true",
            "compiled_graph_path=/x",
            "speculative_draft_model=org/x",
            "speculative_length=7",
            "draft_model_tp_size=2",
            "task=feature-extraction",
            "partition_schema=safetensors",
        ],
    )
    def test_one_that_asks_for_what_there_is_not_is_refused_without_a_guess(self, folder, line):
        model_dir = folder(f"option.{line}")
        for properties in (None, as_djl_passes(model_dir)):
            (problem,) = problems_of(properties, model_dir, {})
            assert isinstance(problem, InvalidOptionError)
            assert "not supported in this version; remove it" in str(problem)
            assert "did you mean" not in str(problem)

    def test_what_djl_cannot_have_from_the_user_is_kept_quietly(self, folder):
        model_dir = folder("option.tensor_parallel_degree=max")
        own = {"rolling_batch": "trtllm", "tensor_parallel_degree": "-1", "enable_lora": "true"}
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
            assert set(resolved.suspicious) == {"n_position"}
            assert "'n_positions'" in resolved.suspicious["n_position"]
            assert "n_position" not in resolved.ignored

    def test_djls_arguments_take_no_prefix(self, folder):
        (problem,) = problems_of(None, folder("option.job_queue_size=100"), {})
        assert "job_queue_size without 'option.'" in str(problem)

    def test_the_model_folder_is_not_the_users_to_write(self, folder):
        (problem,) = problems_of(None, folder("option.model_dir=/other"), {})
        assert "option.model_id" in str(problem)

    def test_what_djl_reads_for_itself_is_listed(self, folder):
        resolved = resolve(None, folder("option.model_loading_timeout=3600"), {})
        assert "DJL" in resolved.ignored["model_loading_timeout"]
        assert "model_loading_timeout" not in resolve(None, folder(), {}).ignored

    def test_functions_of_a_model_py_are_listed_and_the_file_speaks(self, folder):
        model_dir = folder("option.output_formatter=sse")
        properties = as_djl_passes(model_dir, output_formatter=print, input_formatter=print)
        resolved = resolve(properties, None, {})
        assert resolved.options.output_formatter == "sse"
        assert {"output_formatter", "input_formatter"} <= set(resolved.ignored)
        assert "model.py" in resolved.ignored["output_formatter"]

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
            ("tensor_parallel_degree", "MAX", "max"),
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
            ("rolling_batch", "lmi-dist"),
            ("model_loader", "optimum"),
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
        assert problem.allowed == allowed_values(name)

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
        assert allowed_values("model_loader") == "auto, cpu, tnx or nxdi"
        assert allowed_values("output_formatter") == "json, jsonlines or sse"
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


class TestProperties:
    def test_the_bytes_are_read_as_java_reads_them(self, folder):
        model_dir = folder("option.model_id = caf\\u00e9/\xe9", "! no", "option.revision:a\\=b")
        options = resolve(None, model_dir, {}).options
        assert options.model_id == "café/é"
        assert options.revision == "a=b"

    def test_the_mark_of_windows_editors_is_skipped(self, folder):
        model_dir = folder("\ufeffoption.n_positions=64", encoding="utf-8")
        assert resolve(None, model_dir, {}).options.n_positions == 64

    def test_environment_names_follow_djl(self):
        environ = {
            "OPTION_ENTRYPOINT": "a",
            "OPTION_ENGINE": "b",
            "OPTION_mpiMode": "c",
            "OPTION_N_2": "d",
            "XX": "e",
        }
        found = {setting.name: setting.value for setting in sources.from_environ(environ)}
        assert found == {"entryPoint": "a", "engine": "b", "mpiMode": "c", "n_2": "d"}

    def test_a_broken_escape_names_the_file(self, folder):
        (problem,) = problems_of(None, folder("option.model_id=\\u12"), {})
        assert "serving.properties" in str(problem)

    def test_an_unreadable_file_names_itself(self, tmp_path):
        (tmp_path / "serving.properties").mkdir()
        (problem,) = problems_of(None, tmp_path, {})
        assert "cannot be read" in str(problem)

    def test_a_folder_without_the_file_is_fine(self, tmp_path):
        assert resolve(None, tmp_path, {}).options.model_dir == tmp_path


NAMES_OR_TEXT = st.one_of(st.sampled_from([*NAMES, *IGNORED, *UNSUPPORTED]), st.text(max_size=12))
VALUES = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["true", "1", "-1", "max", "[1,2", "auto", "cpu", "tnx", "1e999", "9" * 400, "\ud800"]
    ),
)
LINES = st.lists(
    st.tuples(NAMES_OR_TEXT, VALUES).map(lambda pair: f"option.{pair[0]}={pair[1]}"), max_size=6
)


@settings(
    deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    content=st.one_of(
        st.binary(max_size=80),
        LINES.map(lambda lines: "\n".join(lines).encode("utf-8", "surrogatepass")),
    ),
    environ=st.dictionaries(
        NAMES_OR_TEXT.map(lambda name: f"OPTION_{name.upper()}"), VALUES, max_size=4
    ),
    fallbacks=st.dictionaries(
        st.sampled_from(
            [variable for name in ServingOptions.model_fields for variable in option(name).env]
        ),
        VALUES,
    ),
    properties=st.one_of(st.none(), st.dictionaries(NAMES_OR_TEXT, VALUES, max_size=4)),
    overrides=st.dictionaries(NAMES_OR_TEXT, VALUES, max_size=3),
)
def test_anything_gives_options_or_a_config_error(
    tmp_path: Path, content, environ, fallbacks, properties, overrides
):
    (tmp_path / "serving.properties").write_bytes(content)
    model_dir = None if properties and "model_dir" in properties else tmp_path
    try:
        resolved = resolve(properties, model_dir, {**environ, **fallbacks}, overrides)
    except ConfigError:
        return
    assert isinstance(resolved.options, ServingOptions)
    assert len(resolved.explain()) == len(ServingOptions.model_fields)

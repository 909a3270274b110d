"""Whatever stands in files and variables: options come of it, or a ConfigError, and nothing else."""

import contextlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from djl_python_neuronx.config import sources
from djl_python_neuronx.config.legacy import DJL_ARGUMENTS, IGNORED, UNSUPPORTED
from djl_python_neuronx.config.options import NAMES, ServingOptions, allowed_values, option
from djl_python_neuronx.errors import ArtifactError, ConfigError
from djl_python_neuronx.planning import machines
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.plan import make_plan
from tests.effort import examples, some
from tests.planning.settings import assess, examine, resolve

MODELS = [
    json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "models").glob("*"))
]
MACHINES = [
    machines.named("inf2.xlarge"),
    machines.named("trn1.32xlarge"),
    machines.named("trn2.48xlarge"),
    machines.DeviceInfo(None, 0, 0, 2**34, 8, "a CPU"),
    machines.DeviceInfo(None, 1, 0, 0, 1, "a device that nothing tells of"),
]
LOADERS = ["cpu", "tnx", "nxdi"]

KNOWN = st.sampled_from([*NAMES, *IGNORED, *UNSUPPORTED, *sorted(DJL_ARGUMENTS)])
NAME = st.one_of(KNOWN, KNOWN, st.text(max_size=12))
VARIABLES = [
    *(variable for name in ServingOptions.model_fields for variable in option(name).env),
    *(*sources.TGI, *sources.HUB, *sources.SAGEMAKER, "DJL_ENTRY_POINT"),
]

HOSTILE = [
    *("", " ", "\0", "\ud800", "\U0010ffff", "٣", "²", "１２", "%s%n", "{0}", "${x}", "$(x)"),
    *("true", "TRUE", "None", "null", "nan", "inf", "-inf", "1e999", "1e5", "-0", "0x10", "1_000"),
    *("-1", "0", "1", "2", str(2**31), str(2**63), str(-(2**64)), "9" * 400, "9" * 100_000),
    *("max", "auto", "cpu", "tnx", "nxdi", "disable", "static_int8", "BSH", "s3://", "s3://b/k"),
    *("/", "..", "~", "~x/y", "/dev/zero", "/proc/self/mem", "a" * 5000, "a/" * 3000),
    *("[", "[]", "[,]", "[1,2", "[[1]]", "1,2,3", "3,2,1", "1,,2", "(1,)", "[None]", "1," * 50_000),
    *("[" * 100_000, "[" * 50 + "]" * 50, "(" * 5000, "-" * 8000 + "1", "not " * 2000 + "1"),
    *(
        "{",
        "{}",
        "{'a': 1}",
        '{"a": NaN}',
        '{"a": 1, "a": 2}',
        "{1: 2}",
        "{'a': {}}" * 9,
        "{[]: 1}",
    ),
    *(
        '{"top_k": 1e400}',
        '{"top_k": ' + "9" * 5000 + "}",
        "{'a': 9" + "9" * 5000 + "}",
        "1j",
        "b''",
    ),
    *("lambda: 0", "__import__('os')", "f'{1}'", "'a' * 9", "...", "x.y", "'" * 999, '"', "\\u12"),
]
TEXT = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=20))

SELF: list[object] = []
SELF.append(SELF)
DEEP: list[object] = []
for _ in range(3000):
    DEEP = [DEEP]
OBJECTS = st.one_of(
    TEXT,
    st.sampled_from(
        [
            *(
                None,
                True,
                False,
                0,
                -1,
                10**5000,
                2.5,
                float("nan"),
                float("inf"),
                1j,
                b"x",
                object(),
            ),
            *([], (), {}, set(), [1, "2"], [[1]], {"a": 1}, {1: 2}, {"top_k": DEEP}, SELF, DEEP),
            *(
                print,
                str,
                Path("x"),
                range(3),
                iter([]),
                NotImplemented,
                ValueError("x"),
                memoryview,
            ),
        ]
    ),
)
TO_A_FILE = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


def tried(tmp_path, properties, environ, overrides):
    """Resolve and assess; what is raised is what is collected."""
    resolved, problems = examine(properties, tmp_path, environ, overrides)
    assert isinstance(resolved.options, ServingOptions)
    assert all(isinstance(problem, ConfigError) and str(problem) for problem in problems)
    if problems:
        with pytest.raises(ConfigError) as caught:
            resolve(properties, tmp_path, environ, overrides)
        assert len(caught.value.problems) == len(problems)
    judged(resolved, MODELS[0], MACHINES[0], "tnx")


def judged(resolved, config, machine, loader):
    done, problems = assess(resolved, config, machine, loader)
    assert all(isinstance(problem, ConfigError) and str(problem) for problem in problems)
    assert all(problem.message for problem in done.problems)
    for name, value, origin in done.explain():
        assert name in ServingOptions.model_fields
        assert origin
        with contextlib.suppress(ValueError):  # a number of thousands of digits has no text
            assert str(value) is not None
    return done


@settings(max_examples=examples(300), **TO_A_FILE)
@given(
    content=st.one_of(
        st.binary(max_size=200),
        st.lists(st.tuples(NAME, TEXT), max_size=6).map(
            lambda pairs: "\n".join(f"option.{name}={value}" for name, value in pairs).encode(
                "utf-8", "surrogatepass"
            )
        ),
        st.lists(st.tuples(NAME, st.text(max_size=9)), max_size=6).map(
            lambda pairs: "\r".join(f"{name}:{value}" for name, value in pairs).encode(
                "latin-1", "replace"
            )
        ),
    )
)
def test_any_bytes_as_a_file(tmp_path, content):
    (tmp_path / "serving.properties").write_bytes(content)
    tried(tmp_path, None, {}, {})


@settings(max_examples=examples(300), **TO_A_FILE)
@given(
    environ=st.dictionaries(
        st.one_of(
            NAME.map(lambda name: f"OPTION_{name.upper()}"),
            NAME.map(lambda name: f"OPTION_{name}"),
            NAME.map(lambda name: f"ARGS_{name.upper()}"),
            st.sampled_from(VARIABLES),
            st.text(max_size=9),
        ),
        TEXT,
        max_size=8,
    ),
    overrides=st.dictionaries(NAME, TEXT, max_size=3),
)
def test_any_environment_and_command_line(tmp_path, environ, overrides):
    tried(tmp_path, None, environ, overrides)


@settings(max_examples=examples(400), **TO_A_FILE)
@given(
    properties=st.dictionaries(NAME, OBJECTS, max_size=8),
    lines=st.lists(st.tuples(KNOWN, st.sampled_from(["1", "true", "auto", "x"])), max_size=3),
)
def test_any_dictionary_of_djls(tmp_path, properties, lines):
    text = "\n".join(f"option.{name}={value}" for name, value in lines)
    (tmp_path / "serving.properties").write_text(text)
    tried(tmp_path, properties, {}, {})


def test_no_option_takes_a_hostile_value_for_a_reason_to_crash(tmp_path, subtests):
    for turn, value in enumerate(HOSTILE):
        with subtests.test(value=ascii(value[:20])):
            for name in some([*NAMES], turn):
                examine(None, tmp_path, {}, {name: value})


SIZES = ["1", "2", "3", "12", "24", "64", "1024,4096", "100000", str(2**31 - 1)]
FLAGS = ["true", "{'top_k': 500}", "{}", "0.5", "org/draft"]


def plausible(name):
    """The words that the option's own description lists, and what many options take."""
    return st.sampled_from([*re.findall(r"[\w-]+", allowed_values(name)), *SIZES, *FLAGS])


OPTIONS = st.lists(st.sampled_from(list(ServingOptions.model_fields)), max_size=8).flatmap(
    lambda names: st.fixed_dictionaries({name: plausible(name) for name in names})
)


@settings(max_examples=examples(400), deadline=None)
@given(
    overrides=OPTIONS,
    config=st.sampled_from(MODELS),
    machine=st.sampled_from(MACHINES),
    loader=st.sampled_from(LOADERS),
)
def test_options_that_are_fine_alone_are_judged_for_any_model_and_machine(
    overrides, config, machine, loader
):
    resolved, _ = examine(None, Path("/opt/ml/model"), {}, overrides)
    done = judged(resolved, config, machine, loader)
    make_plan(
        Case(done.options, ModelFacts.from_config(config), machine, NEURON_BACKENDS.get(loader))
    )


def errors_of(overrides, config, machine, loader):
    """The errors, and the options that they name."""
    written = {"model_id": "org/m", **overrides}
    resolved, early = examine(None, None, {}, written)
    done, late = assess(resolved, config, machine, loader)
    named = {
        name
        for problem in (*resolved.problems, *done.problems)
        if problem.level == "error"
        for name in problem.options
    }
    return [*early, *late], named


DEFAULTS = {
    "tensor_parallel_degree": ["1", "2", "4", "8", "16", "24", "32", "64"],
    "max_rolling_batch_size": [*map(str, range(1, 70)), "128", "256"],
    "n_positions": [f"{left}{2**n}{right}" for n in range(1, 18) for left, right in ("  ", "[]")],
    "context_length_estimate": [
        str(n) for n in (16, 31, 33, 64, 128, 255, 500, 512, 1000, 1024, 2048, 4096)
    ],
    "speculative_length": ["1", "2", "3", "4"],
    "rolling_batch_strategy": ["continuous_batching", "naive_rolling_batch"],
    "cast_type": ["as-declared"],
    "max_join_wait_ms": ["0"],
    "predict_timeout": ["1000"],
}
"""Options that have a default of ours or of the model, and values that the user might set instead."""
LOOKUP = {"ngram_prompt_lookup_max": "3"}
CHUNKS = {"enable_chunked_prefill": "true"}
ALONE = [
    # loader, what the user writes: fine, whatever is left to the defaults
    ("cpu", {"predict_timeout": "0.05"}),
    ("cpu", {"max_join_wait_ms": "200000"}),
    ("tnx", {"on_device_generation": '{"dynamic": true, "global_top_k": 16}'}),
    ("tnx", {"cache_layout": "BSH", "context_length_estimate": "500"}),
    ("tnx", {"cache_layout": "BSH", "n_positions": "2048"}),
    ("tnx", {"padding_side": "left"}),
    ("tnx", {"padding_side": "right"}),
    ("tnx", {**CHUNKS, "context_length_estimate": "16"}),
    ("tnx", {**CHUNKS, "n_positions": "31"}),
    ("tnx", {**CHUNKS, "pa_block_size": "4096"}),
    ("tnx", {**LOOKUP, "speculative_length": "300"}),
    ("tnx", {**LOOKUP, "context_length_estimate": "3"}),
    ("tnx", {**LOOKUP, "n_positions": "4"}),
    ("tnx", {"fuse_mlp": "true", "mlp_out_weight_transpose": "true"}),
    ("tnx", {"qkv_tiling": "true", "fuse_qkv": "true"}),
    ("tnx", {"sequence_parallel": "true", "sequence_parallel_norm_threshold": "33"}),
    ("nxdi", {**LOOKUP, "speculative_length": "300"}),
    ("nxdi", {**LOOKUP, "n_positions": "8"}),
    ("nxdi", {"sequence_parallel": "true"}),
    ("nxdi", {"windowed_context_encoding_size": "96"}),
    ("nxdi", {"attention_dp_degree": "2"}),
    ("nxdi", {"cp_degree": "8"}),
    ("nxdi", {"token_generation_batches": "64,256"}),
    ("nxdi", {"ep_dispatch_cc_option": "RS_AG"}),
    ("nxdi", {"attention_dtype": "fp32"}),
]
LLAMA = json.loads((Path(__file__).parent / "models" / "llama-3-8b.json").read_text())


@pytest.mark.parametrize(("loader", "overrides"), ALONE)
@pytest.mark.parametrize("machine", ["inf2.48xlarge", "trn1.32xlarge", "trn2.48xlarge"])
def test_what_is_fine_with_some_values_of_the_others_is_fine_alone(loader, overrides, machine):
    errors, _ = errors_of(overrides, LLAMA, machines.named(machine), loader)
    assert errors == []


@settings(max_examples=examples(200), deadline=None)
@given(
    base=st.sampled_from([{}, {}, {"cache_layout": "BSH"}, *(values for _, values in ALONE)]),
    more=OPTIONS.filter(lambda values: len(values) < 3),
    config=st.sampled_from(MODELS),
    machine=st.sampled_from(MACHINES[:3]),
    loader=st.sampled_from(LOADERS),
)
def test_no_default_makes_what_the_user_wrote_an_error(base, more, config, machine, loader):
    """An error stays one whatever value the user gives to an option that it names and that was left out."""
    overrides = {**more, **base}
    errors, named = errors_of(overrides, config, machine, loader)
    if not errors or "model_loader" in named or any("not fit" in str(one) for one in errors):
        return
    assert named & overrides.keys()
    for name in named & DEFAULTS.keys() - overrides.keys():
        for value in DEFAULTS[name]:
            assert errors_of({**overrides, name: value}, config, machine, loader)[0]


JSON = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(
        [
            0,
            -1,
            1,
            2,
            3,
            7,
            4096,
            2**31,
            2**63 - 1,
            10**40,
            10**400,
            10**5000,
            0.5,
            float("nan"),
            "",
            "x",
            "llama",
        ]
    ),
    st.sampled_from([[], ["x"], [None], {}, {"hidden_size": "x"}, [[1]], {"factor": 2}]),
)
KEYS = sorted({key for config in MODELS for key in config} | {"text_config", "vision_config"})


@settings(max_examples=examples(400), deadline=None)
@given(
    base=st.sampled_from([{}, *MODELS]),
    changes=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=6),
    machine=st.sampled_from(MACHINES),
    loader=st.sampled_from(LOADERS),
)
def test_any_config_of_a_model(base, changes, machine, loader):
    resolved, _ = examine(None, Path("/opt/ml/model"), {})
    config = {**base, **changes}
    try:
        facts = ModelFacts.from_config(config)
    except ArtifactError:  # a size that is none
        return
    done = judged(resolved, config, machine, loader)
    make_plan(Case(done.options, facts, machine, NEURON_BACKENDS.get(loader)))

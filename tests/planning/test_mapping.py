"""The libraries' arguments: real names only, values in their spelling, nothing unrequested."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from djl_python_neuronx.config.device_sampling import OnDeviceGeneration
from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.config.keywords import OBJECTS, OPTIONS, RESERVED
from djl_python_neuronx.config.options import ServingOptions, option
from djl_python_neuronx.planning import machines
from djl_python_neuronx.planning.arguments import LibraryArguments
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.model_rules import overrides, unsupported_options
from djl_python_neuronx.planning.plan import assess, examine, make_plan
from tests.config import library_names as real
from tests.config.option_table import ANYWAY, BACKEND, BASE, LEFT_OUT, OURS, REFUSED, TABLE
from tests.planning.settings import library_arguments

LIBRARIES = ("tnx", "nxdi")
LLAMA = ModelFacts.from_config(
    json.loads((Path(__file__).parent / "models" / "llama-3-8b.json").read_text())
)
PARTS = ("constructor", "neuron_config", "compiler_flags", "environment")
KEYWORDS = {
    "tnx": real.TNX_CONSTRUCTOR | real.TNX_NEURON_CONFIG,
    "nxdi": real.NXDI_MOE_NEURON_CONFIG,
}
NEURON_CONFIG = {"tnx": real.TNX_NEURON_CONFIG, "nxdi": real.NXDI_MOE_NEURON_CONFIG}
NESTED = {"tnx": real.TNX_NESTED, "nxdi": real.NXDI_NESTED}
METHODS = {"tnx": real.TNX_METHODS, "nxdi": real.NXDI_METHODS}


def check_names(names, loader):
    """Fail with what to do if a library's `NeuronConfig` lacks one of the names."""
    unknown = sorted(set(names) - NEURON_CONFIG[loader])
    library = NEURON_BACKENDS[loader].library
    assert not unknown, (
        f"the source of {library} has no {', '.join(unknown)}; if it does, add it to "
        f"{loader.upper()}_NEURON_CONFIG in tests/config/library_names.py"
    )


LEFT_TO_OVERRIDES = {
    "decided by the model": "has_pre_attention_norm qk_layernorm pre_rope_rmsnorm glu_mlp glu_type hidden_act_bias "
    "hidden_act_scaling_factor gate_clamp_lower_limit gate_clamp_upper_limit up_clamp_lower_limit "
    "up_clamp_upper_limit padded_hidden_size padded_intermediate_size is_full_model_shuffled attn_cls",
    "vision only": "enable_ve_data_parallel",
    "deprecated by the library": "attn_block_cte_nki_kernel_enabled",
    "debugging only": "enable_output_completion_notifications",
    "part of a feature that has an option": "quant.dequant_dtype quant.quantize_method quant.quantize_attn "
    "quant.no_quantize_list kv_cache_quant.dequant_dtype kv_cache_quant.quantize_method "
    "kv_quant_config.direct_cast kv_quant_config.k_quant_method kv_quant_config.v_quant_method "
    "on_device_sampling_config.on_device_sampling_config on_device_sampling_config.top_k_kernel_enabled "
    "on_device_sampling_config.sampling_dp_degree",
    "an object in one library, a compiler flag in the other": "kv_cache_quant quant kv_quant_config "
    "continuous_batching chunked_prefill_config",
}
SAMPLES = {
    "quantized": True,
    **{
        f"{outer}.{inner}": 1
        for outer in ("on_device_generation", "on_device_sampling_config")
        for inner in ("do_sample", "dynamic", "per_batch_line", "deterministic", "top_p")
    },
}
"""Values that are neither refused nor the library's own, where "7" is one of these."""
COMPUTED = {
    *("multi_node", "draft_model_tp_size", "load_split_model", "speculative_draft_model"),
    *("override_neuron_config", "on_device_generation", "enable_lora"),
    "ngram_prompt_lookup_max",
}
"""Options that turn on what has an option of its own, have less in the library, or are the operator's alone."""
DRAFT = ("option.speculative_draft_model=org/draft",)


def given(**changes):
    """The base options with others, validated as a user's."""
    return ServingOptions.model_validate({**BASE.model_dump(exclude_unset=True), **changes})


def gained(options, loader):
    """The additions of the arguments to the base's, by part; a keyword that went away is None."""
    found = {}
    for part in PARTS:
        new = getattr(library_arguments(options, loader), part)
        old = getattr(library_arguments(BASE, loader), part)
        if isinstance(new, dict):
            changed = {key: value for key, value in new.items() if old.get(key, ...) != value}
            changed.update(dict.fromkeys(old.keys() - new.keys()))
        else:
            changed = tuple(flag for flag in new if flag not in old)
        if changed:
            found[part] = changed
    return found


def is_real(name, loader):
    """True if the library, the compiler or the runtime knows a name of `Option.to`."""
    keyword, _, inner = name.partition(".")
    if name.endswith("()"):
        return name.removesuffix("()") in METHODS[loader]
    if name.startswith("-"):
        return loader == "tnx" and name in real.TNX_FLAGS
    if name.isupper():
        return name in real.VARIABLES
    if inner:
        return inner in NESTED[loader].get(keyword, ()) or name in real.NXDI_OTHER
    return name in KEYWORDS[loader]


@pytest.mark.parametrize("loader", LIBRARIES)
def test_each_option_becomes_what_its_row_says(loader, subtests):
    for name in TABLE:
        with subtests.test(name):
            row, marker = TABLE[name], option(name)
            expected = getattr(row, loader)
            options = given(**{name: row.good[0][0]})
            extra = gained(options, loader)
            missing = name in unsupported_options(options, loader)
            if isinstance(expected, dict):
                assert extra == expected
                assert not missing
            else:
                assert extra == {}
                assert missing == (expected in {LEFT_OUT, REFUSED})
                assert marker.tunes == (expected == LEFT_OUT) or expected in {OURS, BACKEND, ANYWAY}
                assert (loader in marker.to) == (expected == BACKEND) or expected == REFUSED
                assert bool(marker.to) == (expected != OURS)


@pytest.mark.parametrize("loader", LIBRARIES)
def test_every_name_exists(loader):
    for name in TABLE:
        if loader in option(name).to:
            its = option(name).to[loader]
            if its.isidentifier() and not is_real(its, loader):
                check_names([its], loader)
            assert is_real(its, loader), name


@pytest.mark.parametrize("loader", LIBRARIES)
def test_everything_at_once_uses_real_names_and_plain_values(loader):
    # Optimised batching off the base; `override_neuron_config` may hold anything.
    written = {name: row.good[0][0] for name, row in TABLE.items()}
    arguments = library_arguments(
        ServingOptions.model_validate({**written, "override_neuron_config": None}), loader
    )
    assert set(arguments.constructor) <= real.TNX_CONSTRUCTOR
    check_names(arguments.neuron_config, loader)
    for keyword, names in NESTED[loader].items():
        inner = arguments.neuron_config.get(keyword, {})
        assert set(inner) <= names, keyword
    assert {re.match(r"-O|[\w-]+", flag)[0] for flag in arguments.compiler_flags} <= real.TNX_FLAGS
    assert set(arguments.environment) <= real.VARIABLES
    parts = {part: getattr(arguments, part) for part in PARTS}
    again = json.loads(json.dumps(parts, allow_nan=False))
    assert again == {**parts, "compiler_flags": list(arguments.compiler_flags)}


def with_override(keywords, written=(), **overrides):
    """Options, origins, errors and warnings of a file with these keywords; `written` are further lines of it."""
    problems = Problems()
    with TemporaryDirectory() as folder:
        lines = [f"option.override_neuron_config={json.dumps(keywords)}", "option.model_id=org/m"]
        (Path(folder) / "serving.properties").write_text("\n".join([*lines, *written]))
        resolved = examine(None, Path(folder), {}, problems, overrides)
    texts = {level: problems.messages(level) for level in ("error", "warning")}
    return resolved.options, resolved.origins, texts


def every_keyword():
    """Each keyword of the libraries' configuration classes; those of an object as ``keyword.inner``."""
    yield from real.TNX_CONSTRUCTOR - {"neuron_config", "context_unroll", "prefixed_length"}
    for loader in LIBRARIES:
        yield from NEURON_CONFIG[loader]
        for keyword, names in NESTED[loader].items():
            yield from (f"{keyword}.{inner}" for inner in names if keyword not in RESERVED)


SAMPLED = ("on_device_generation", "on_device_sampling_config")
"""Keywords whose whole object is one option."""


def outcome(keyword):
    """The fate of a keyword with a value that is not the library's: an option, refused or handed through."""
    _, _, inner = keyword.partition(".")
    if inner in OnDeviceGeneration.model_fields or inner == "global_topk":
        return "option"
    if keyword in RESERVED or inner in {"max_length", "eos_token_id"}:
        return "refused"
    return "option" if keyword in OPTIONS else "through"


def test_each_keyword_of_the_libraries_is_accounted_for(subtests):
    """An option, refused with a reason, or left to the library on purpose."""
    for keyword in sorted(set(every_keyword())):
        with subtests.test(keyword):
            outer, _, inner = keyword.partition(".")
            value = SAMPLES.get(keyword, "7")
            _, origins, texts = with_override({outer: {inner: value} if inner else value})
            mine = [name for name, origin in origins.items() if origin.endswith(f": {keyword}")]
            if inner and outer in SAMPLED:
                mine = [name for name, origin in origins.items() if origin.endswith(f": {outer}")]
            mine += [text for text in texts["error"] if f": {keyword})" in text]
            expected = outcome(keyword)
            assert bool(mine) == (
                expected == "option" or (inner != "" and expected == "through" and outer in SAMPLED)
            )
            refused = expected == "refused" or keyword in OBJECTS
            assert any(f"{inner or outer}: " in text for text in texts["error"]) == refused
            handed = {name for names in LEFT_TO_OVERRIDES.values() for name in names.split()}
            assert (keyword in handed) == (expected == "through")


def test_every_name_in_the_tables_is_a_keyword():
    nested = {keyword for keyword in OPTIONS if keyword.endswith(".")}
    inner = {"chunked_prefill_config.max_num_seqs", "fused_spec_config.draft_model_path"}
    inner.add("lora_config.dynamic_multi_lora")
    assert OPTIONS.keys() | RESERVED.keys() <= {*every_keyword(), *nested, *inner}


@pytest.mark.parametrize("loader", LIBRARIES)
def test_what_an_option_hands_to_a_library_is_that_option_as_an_override(loader, subtests):
    for name in TABLE:
        with subtests.test(name):
            written = given(**{name: TABLE[name].good[0][0]})
            config = gained(written, loader).get("neuron_config", {})
            keywords = {key: value for key, value in config.items() if value is not None}
            if not keywords or name in COMPUTED:
                continue
            options, origins, texts = with_override(keywords, DRAFT if "specul" in name else ())
            assert all("not served in this version" in text for text in texts["error"])
            assert getattr(options, name) == getattr(written, name)
            assert "override_neuron_config in" in origins[name]


@pytest.mark.parametrize(
    ("version", "config"),
    [
        ("0.7.14366", {"kv_cache_quant": True}),
        ("0.8.0", {"kv_cache_quant": True, "kv_quant_config": {"direct_cast": True}}),
        (None, {"kv_cache_quant": True, "kv_quant_config": {"direct_cast": True}}),
    ],
)
def test_a_cache_in_fp8_has_the_keywords_of_the_version(version, config):
    given = ServingOptions.model_validate({"kv_cache_quantize": "fp8"})
    found = library_arguments(given, "nxdi", library_version=version)
    assert found.neuron_config == config
    assert found.environment == {"XLA_HANDLE_SPECIAL_SCALAR": "1", "UNSAFE_FP8FNCAST": "1"}
    for keywords in ({"kv_cache_quant": True}, {"kv_quant_config": {"direct_cast": True}}, config):
        options, _, texts = with_override(keywords)
        assert (options.kv_cache_quantize, texts["error"]) == ("fp8", ())
    options, _, _ = with_override({"kv_cache_quant": False})
    assert options.kv_cache_quantize is None


def test_keywords_of_weights_in_8_bits_are_options():
    keywords = {"quantized": True, "quantization_dtype": "f8e4m3"}
    options, _, texts = with_override({**keywords, "modules_to_not_convert": ["lm_head", "mlp"]})
    assert options.quantize == "static_fp8"
    assert options.modules_to_not_convert == ("lm_head", "mlp")
    assert not texts["error"]
    _, _, texts = with_override({**keywords, "quantized_checkpoints_path": "/models/quantised"})
    assert any("beside the graphs" in text for text in texts["error"])
    config = library_arguments(options, "nxdi").neuron_config
    assert config["quantization_dtype"] == "f8e4m3"
    per_tensor = ServingOptions.model_validate(
        {"quantize": "static_int8", "quantization_type": "per_tensor_symmetric"}
    )
    assert "modules_to_not_convert" not in library_arguments(per_tensor, "nxdi").neuron_config


def test_nothing_set_gives_nothing():
    always = {"tnx": LibraryArguments(calls={"to_neuron": {}}), "nxdi": LibraryArguments()}
    for loader in LIBRARIES:
        assert library_arguments(ServingOptions(), loader) == always[loader]
        assert unsupported_options(ServingOptions(), loader) == ()


def test_the_cpu_loader_gets_nothing_of_a_library():
    everything = given(fuse_qkv=True, override_neuron_config={"a": 1}, neuron_optimize_level=1)
    assert library_arguments(everything, "cpu") == LibraryArguments()


def test_false_is_handed_on_and_is_no_wish():
    options = given(fuse_qkv="false", fuse_mlp="false", enable_saturate_infinity="false")
    assert gained(options, "tnx") == {"neuron_config": {"fuse_qkv": False, "fuse_mlp": False}}
    assert gained(options, "nxdi") == {"neuron_config": {"fused_qkv": False}}
    assert unsupported_options(options, "nxdi") == ()


class TestTnx:
    def test_the_base(self):
        arguments = library_arguments(BASE, "tnx")
        assert arguments.constructor == {
            "tp_degree": 2,
            "batch_size": 4,
            "amp": "bf16",
            "n_positions": [128, 256, 512, 1024, 2048],
            "context_length_estimate": [128, 2048],
        }
        assert arguments.calls == {"to_neuron": {}}
        assert arguments.neuron_config == {
            "continuous_batching": {"batch_size_for_shared_caches": 4}
        }

    @pytest.mark.parametrize(
        ("dtype", "amp"), [("fp32", "f32"), ("fp16", "f16"), ("bf16", "bf16"), ("auto", None)]
    )
    def test_amp(self, dtype, amp):
        arguments = library_arguments(given(dtype=dtype, quantize="s8"), "tnx")
        assert arguments.constructor.get("amp") == amp
        assert arguments.neuron_config["quant"].get("dequant_dtype") == amp

    def test_static_batches_have_prompt_graphs_up_to_the_longest_sequence(self):
        prompts = given(context_length_estimate=(64, 128))
        assert library_arguments(prompts, "tnx").constructor["context_length_estimate"] == [64, 128]
        static = library_arguments(prompts, "tnx", continuous=False).constructor
        assert static["context_length_estimate"] == [64, 128, 2048]

    def test_a_cache_divided_by_tokens_has_one_length_where_rows_have_positions_of_their_own(self):
        options = given(n_positions="512,1024,2048", shard_over_sequence=True)
        assert library_arguments(options, "tnx").constructor["n_positions"] == [2048]
        static = library_arguments(options, "tnx", continuous=False)
        assert static.constructor["n_positions"] == [512, 1024, 2048]

    def test_graphs_of_another_program_have_no_longer_prompt(self):
        def prompts(**more):
            arguments = library_arguments(given(context_length_estimate=(64, 128)), "tnx", **more)
            return arguments.constructor["context_length_estimate"]

        assert prompts(continuous=False) == [64, 128, 2048]
        assert prompts(continuous=False, foreign_graphs=True) == [64, 128]
        assert prompts(continuous=True, foreign_graphs=True) == [64, 128]

    def test_divided_weights_hold_no_embedding_for_the_host(self):
        config = library_arguments(given(on_device_embedding=False), "tnx", presharded=True)
        assert config.neuron_config["on_device_embedding"] is True

    def test_gpt2_takes_the_rows_of_a_prompt_too_and_one_length(self):
        found = library_arguments(given(), "tnx", model_type="gpt2").constructor
        assert (found["batch_size"], found["prompt_batch_size"], found["n_positions"]) == (
            4,
            4,
            2048,
        )
        assert "prompt_batch_size" not in library_arguments(given(), "tnx").constructor

    def test_where_requests_have_parameters_of_their_own_each_row_has(self):
        options = given(on_device_generation={"dynamic": True, "do_sample": True, "top_k": 9})
        found = library_arguments(options, "tnx").neuron_config["on_device_generation"]
        assert (found["per_batch_line"], found["top_k"]) == (True, [9] * 4)
        assert (found["top_p"], found["temperature"]) == ([1.0] * 4, [1.0] * 4)
        assert found["top_p_min_tokens"] == [1] * 4

    def test_speculation_is_enabled_before_the_model_goes_to_the_device(self):
        options = given(ngram_prompt_lookup_max=3, speculative_length=4)
        assert list(library_arguments(options, "tnx").calls.items()) == [
            ("enable_speculative_decoder", {"speculation_length": 5, "batch_sizes": [4]}),
            ("to_neuron", {}),
        ]

    def test_a_list_of_lengths_stays_one(self):
        arguments = library_arguments(given(n_positions="[2048]"), "tnx")
        assert arguments.constructor["n_positions"] == [2048]

    @pytest.mark.parametrize("option_name", ["quantize", "kv_cache_quantize"])
    def test_fp8_comes_with_the_compilers_flag(self, option_name):
        arguments = library_arguments(given(**{option_name: "fp8"}), "tnx")
        (quantised,) = (
            value for key, value in arguments.neuron_config.items() if key.endswith("quant")
        )
        assert quantised == {"quant_dtype": "f8e4m3fn", "dequant_dtype": "bf16"}
        (written,) = arguments.compiler_flags
        assert "fp8e4m3" in written
        assert library_arguments(given(**{option_name: "int8"}), "tnx").compiler_flags == ()

    def test_flags_survive_a_shell(self):
        options = given(neuron_optimize_level=1, neuron_cc_pipeline_factor=2)
        flags = library_arguments(options, "tnx").compiler_flags
        assert tuple(shlex.split(shlex.join(flags))) == flags

    @pytest.mark.parametrize(
        ("changes", "continuous", "expected"),
        [
            ({}, None, True),
            ({"max_rolling_batch_size": 1}, None, False),
            ({"rolling_batch_strategy": "naive_rolling_batch"}, None, False),
            (
                {"rolling_batch_strategy": "continuous_batching", "max_rolling_batch_size": 1},
                None,
                True,
            ),
            ({}, False, False),
            ({"rolling_batch_strategy": "naive_rolling_batch"}, True, True),
        ],
    )
    def test_who_decides_on_continuous_batching(self, changes, continuous, expected):
        options = given(**changes)
        tnx = library_arguments(options, "tnx", continuous=continuous).neuron_config
        nxdi = library_arguments(options, "nxdi", continuous=continuous).neuron_config
        assert ("continuous_batching" in tnx) == expected
        assert ("is_continuous_batching" in nxdi) == expected
        assert nxdi["ctx_batch_size"] == (1 if expected else options.max_rolling_batch_size)

    def test_what_is_compiled_in_is_one_number_each(self):
        options = given(on_device_generation={"do_sample": True, "top_k": 10})
        written = library_arguments(options, "tnx").neuron_config["on_device_generation"]
        assert (written["top_k"], written["temperature"]) == (10, 1.0)
        assert "global_top_k" not in written

    def test_the_users_word_wins_over_what_an_option_implies(self):
        options = given(
            load_split_model=True, on_device_embedding=False, multi_node=True, fuse_mlp=False
        )
        config = library_arguments(options, "tnx").neuron_config
        assert (config["on_device_embedding"], config["fuse_mlp"]) == (False, False)
        assert config["mlp_out_weight_transpose"] is True


class TestNxdi:
    def test_the_base(self):
        arguments = library_arguments(BASE, "nxdi")
        assert arguments.neuron_config == {
            "tp_degree": 2,
            "torch_dtype": "bfloat16",
            "batch_size": 4,
            "tkg_batch_size": 4,
            "max_batch_size": 4,
            "ctx_batch_size": 1,
            "is_continuous_batching": True,
            "seq_len": 2048,
            "max_length": 2048,
            "max_context_length": 2048,
            "enable_bucketing": True,
            "context_encoding_buckets": [128, 2048],
        }
        assert arguments == LibraryArguments(neuron_config=arguments.neuron_config)

    def test_a_list_of_lengths_is_the_decode_buckets(self):
        config = library_arguments(given(n_positions="512,2048"), "nxdi").neuron_config
        assert config["token_generation_buckets"] == [512, 2048]
        assert config["seq_len"] == config["max_length"] == 2048

    def test_what_the_library_does_anyway_is_no_wish(self):
        options = given(cast_logits_dtype="fp32", on_device_embedding="true")
        assert unsupported_options(options, "nxdi") == ()
        assert gained(options, "nxdi") == {}
        assert unsupported_options(given(cast_logits_dtype="bf16"), "nxdi") == (
            "cast_logits_dtype",
        )


class TestOverrides:
    def test_they_are_merged_last_and_only_there(self):
        options = given(fuse_qkv=True, override_neuron_config={"fused_qkv": False, "new": [1]})
        assert gained(options, "nxdi") == {"neuron_config": {"fused_qkv": False, "new": [1]}}

    def test_keywords_of_an_object_join_those_of_the_options(self):
        options = given(quantize="int8", override_neuron_config={"quant": {"quantize_attn": False}})
        assert gained(options, "tnx")["neuron_config"]["quant"] == {
            "quant_dtype": "s8",
            "dequant_dtype": "bf16",
            "quantize_attn": False,
        }

    def test_the_options_are_not_changed_by_it(self):
        options = given(override_neuron_config={"new": 1})
        library_arguments(options, "nxdi").neuron_config["new"] = 2
        assert library_arguments(options, "nxdi").neuron_config["new"] == 1

    def test_what_has_no_option_is_the_librarys_to_judge(self):
        note, other = overrides(given(override_neuron_config={"new": 1, "seq_lenn": 2}))
        assert (note.level, note.problem) == ("note", "new: checked when the model loads")
        assert "did you mean 'seq_len'" in other.problem

    @pytest.mark.parametrize("name", ["quant", "continuous_batching"])
    def test_what_the_library_has_is_no_misspelling(self, name):
        (note,) = overrides(given(override_neuron_config={name: {"new": 1}, "world_size": 7}))
        assert note.problem == f"{name}: checked when the model loads"

    @pytest.mark.parametrize("keyword", sorted(RESERVED))
    def test_what_nobody_may_set_says_why_but_the_librarys_own_value_is_nothing(self, keyword):
        harmless, reason = RESERVED[keyword]
        _, _, texts = with_override({keyword: "7"})
        assert any(reason in text and "override_neuron_config" in text for text in texts["error"])
        options, _, texts = with_override({keyword: harmless, "new": 1})
        assert (options.override_neuron_config, texts["error"]) == ({"new": 1}, ())

    @pytest.mark.parametrize("lines", [(), ("option.n_positions=128",)])
    def test_the_files_of_the_old_ci(self, lines):
        """Source: djl-serving 1132e3ab^, tests/integration/llm/prepare.py."""
        sampling = {"global_topk": 64, "dynamic": True, "deterministic": False}
        lines += ("option.rolling_batch=vllm", "option.max_rolling_batch_size=1")
        options, _, texts = with_override({"on_device_sampling_config": sampling}, lines)
        generation = options.on_device_generation
        assert (generation.dynamic, generation.global_top_k) == (True, 64)
        assert (options.override_neuron_config, texts["error"]) == (None, ())

    @pytest.mark.parametrize(
        ("keywords", "expected"),
        [
            ({"skip_sharding": True}, {"save_sharded_checkpoint": False}),
            ({"lhs_aligned": True}, {"padding_side": "right"}),
            ({"is_continuous_batching": False}, {"rolling_batch_strategy": "naive_rolling_batch"}),
            ({"quantized": True}, {"quantize": "static_int8"}),
            ({"quantized": False, "quantization_dtype": "int8"}, {"quantize": None}),
            ({"speculation_length": 7}, {"speculative_length": 6}),
            ({"async_mode": True}, {"async_execution": True, "async_mode": False}),
            ({"batch_size": 4}, {"max_rolling_batch_size": 4, "batch_size": 1}),
            ({"seq_len": 256, "token_generation_buckets": [128]}, {"n_positions": (128, 256)}),
            ({"max_context_length": 300}, {"context_length_estimate": (128, 256, 300)}),
            ({"max_context_length": "300"}, {"context_length_estimate": (128, 256, 300)}),
            (
                {"enable_bucketing": False, "seq_len": 512, "max_context_length": 300},
                {"n_positions": (512,), "context_length_estimate": (300,)},
            ),
            (
                {"continuous_batching": {"max_num_seqs": 3, "enable_chunked_prefill": True}},
                {"max_rolling_batch_size": 3, "enable_chunked_prefill": True},
            ),
            ({"chunked_prefill_config": {}}, {"enable_chunked_prefill": True}),
            ({"kv_quant_config": {"direct_cast": True}}, {"kv_cache_quantize": "fp8"}),
            ({"quant": None, "on_device_sampling_config": None}, {"quantize": None}),
            ({"attn_tkg_nki_kernel_enabled": False}, {"attn_block_tkg_nki_kernel_enabled": None}),
            (
                {"on_device_sampling_config": {"do_sample": True, "sampling_dp_degree": 2}},
                {
                    "override_neuron_config": {
                        "on_device_sampling_config": {"sampling_dp_degree": 2}
                    }
                },
            ),
        ],
    )
    def test_values_are_translated(self, keywords, expected):
        options, _, texts = with_override(keywords)
        assert {name: getattr(options, name) for name in expected} == expected
        assert not texts["error"]

    @pytest.mark.parametrize(
        "keywords",
        [
            {"seq_len": 512, "max_length": 1024},
            {"seq_len": 512, "n_positions": 1024, "token_generation_buckets": [512]},
            {"seq_len": 512, "token_generation_buckets": [1024]},
            {"max_context_length": 128, "context_encoding_buckets": [64, 256]},
            {"batch_size": 2, "tkg_batch_size": 4},
            {"skip_sharding": True, "save_sharded_checkpoint": True},
        ],
    )
    def test_names_of_one_thing_agree(self, keywords):
        _, _, texts = with_override(keywords)
        assert "are two values of one option; keep one" in "".join(texts["error"])

    def test_keywords_name_the_kind_of_a_draft_model(self):
        for keywords, kind in (
            ({"enable_eagle_speculation": True}, "eagle"),
            ({"is_eagle3": True}, "eagle3"),
            ({"enable_eagle_speculation": True, "is_eagle3": True}, "eagle3"),
            ({"enable_eagle_speculation": True, "is_eagle3": False}, "eagle"),
            ({"enable_eagle_speculation": False, "is_eagle3": False}, "draft_model"),
        ):
            options, _, texts = with_override({"enable_fused_speculation": True, **keywords})
            assert (options.draft_model_kind, texts["error"]) == (kind, ())
            assert options.enable_fused_speculation is True

    def test_they_override_options_of_the_file_with_a_warning_and_not_those_of_the_command_line(
        self,
    ):
        lines = ["option.n_positions=1024"]
        options, origins, texts = with_override({"seq_len": 512}, lines)
        assert options.n_positions == 512
        assert origins["n_positions"].endswith("line 1: seq_len")
        assert "overrides n_positions=1024" in "".join(texts["warning"])
        options, _, texts = with_override({"seq_len": 512}, lines, n_positions="2048")
        assert (options.n_positions, texts["error"]) == (2048, ())

    def test_buckets_have_the_length_that_stands_elsewhere(self):
        """As with vLLM, where the length is a flag and the buckets are keywords."""
        for buckets in ([256, 512, 1024], [256, 512]):
            given = {"token_generation_buckets": buckets}
            options, _, texts = with_override(given, ["option.n_positions=1024"])
            assert options.n_positions == (256, 512, 1024)
            assert "overrides" not in "".join(texts["warning"])
        options, _, texts = with_override(given, ["option.n_positions=384"])
        assert options.n_positions == (256, 512)
        assert "overrides n_positions=384" in "".join(texts["warning"])

    def test_a_value_that_the_option_does_not_allow_is_refused_where_it_stands(self):
        _, _, texts = with_override({"batch_size": "many"})
        assert "line 1: batch_size" in texts["error"][0]

    @pytest.mark.parametrize("keyword", ["seq_len", "max_context_length"])
    def test_it_overrides_nothing_and_no_other_keyword_is_blamed(self, keyword):
        name = OPTIONS[keyword]
        _, _, texts = with_override({keyword: 0}, [f"option.{name}=128"])
        (error,) = texts["error"]
        assert f"line 1: {keyword})" in error
        assert "overrides" not in "".join(texts["warning"])

    @pytest.mark.parametrize("keyword", sorted(OBJECTS))
    @pytest.mark.parametrize("value", [True, "s8"])
    def test_an_object_is_not_a_flag(self, keyword, value):
        _, _, texts = with_override({keyword: value})
        assert f"{keyword}: expected an object" in texts["error"][0]

    def test_lengths_that_hold_the_longest_are_not_said_to_be_sorted(self):
        problems = Problems()
        with TemporaryDirectory() as folder:
            keywords = '{"seq_len": 512, "token_generation_buckets": [256, 512]}'
            path = Path(folder) / "serving.properties"
            path.write_text(f"option.model_id=org/m\noption.override_neuron_config={keywords}")
            options = examine(None, Path(folder), {}, problems).options
        assert options.n_positions == (256, 512)
        assert problems.messages("note") == ()

    @pytest.mark.parametrize(
        ("keywords", "line"),
        [
            (
                {"group_query_attention": "shard-over-batch"},
                "group_query_attention=shard-over-batch",
            ),
            ({"seq_len": 512}, "n_positions=512"),
            ({"batch_size": 2}, "max_rolling_batch_size=2"),
            ({"context_encoding_buckets": [256]}, "context_length_estimate=256"),
            ({"torch_dtype": "float32"}, "dtype=float32"),
            ({"quantized": True}, "quantize=static_int8"),
            ({"tp_degree": 4}, "tensor_parallel_degree=4"),
        ],
    )
    def test_plan_memory_and_defects_are_those_of_the_option(self, keywords, line):
        """A known defect is refused, whichever way it is set; memory is counted all the same."""
        found = []
        for text in ("model_type", f"override_neuron_config={json.dumps(keywords)}", line):
            problems = Problems()
            with TemporaryDirectory() as folder:
                lines = f"option.model_id=org/m\noption.tensor_parallel_degree=8\noption.{text}\n"
                if "tensor_parallel_degree" in line:
                    lines = lines.replace("option.tensor_parallel_degree=8\n", "")
                (Path(folder) / "serving.properties").write_text(lines)
                resolved = examine(None, Path(folder), {}, Problems())
            case = Case(
                resolved.options, LLAMA, machines.named("inf2.48xlarge"), NEURON_BACKENDS["tnx"]
            )
            resolved, case = assess(resolved, case, problems)
            named = [problem.options for problem in problems if problem.level == "error"]
            found.append((make_plan(case), named))
        nothing, override, option = found
        assert override == option
        assert override != nothing
        assert bool(override[1]) == ("group_query_attention" in keywords)


@pytest.mark.parametrize(
    ("values", "blocks"),
    [({}, 4 * 16 + 1), ({"n_positions": 2000}, 4 * 16 + 1), ({"pa_num_blocks": 99}, 99)],
)
def test_a_cache_in_blocks_holds_all_slots_and_the_padding(values, blocks):
    options = given(enable_chunked_prefill=True, pa_block_size=128, **values)
    arguments = library_arguments(options, "tnx")
    assert arguments.calls["init_cache_engine"] == {"block_size": 128, "num_blocks": blocks}
    assert list(arguments.calls) == ["init_cache_engine", "to_neuron"]
    # A graph takes whole blocks, so lengths are whole blocks too.
    assert [length % 128 for length in arguments.constructor["n_positions"]] == [0] * 5


def test_even_one_slot_is_batched_continuously_where_its_prompt_comes_in_chunks():
    config = library_arguments(given(enable_chunked_prefill=True, max_rolling_batch_size=1), "tnx")
    assert config.neuron_config["continuous_batching"]["enable_chunked_prefill"]


EVERYTHING = {
    "fuse_mlp": True,
    "mlp_out_weight_transpose": True,
    "attn_output_transposed": True,
    "sequence_parallel": True,
    "shard_over_sequence": True,
    "weight_tiling": True,
    "multi_node": True,
    "unroll": 4,
    "n_positions": "[2048]",
}


class TestWhatAnArchitectureCannotUse:
    """It is not handed over: the library would fail while it builds its graphs."""

    def arguments(self, model_type):
        return library_arguments(given(**EVERYTHING), "tnx", model_type=model_type)

    def test_where_it_can_use_all_of_it(self):
        found = self.arguments("llama")
        assert found == library_arguments(given(**EVERYTHING), "tnx")
        assert found.constructor["n_positions"] == [2048]

    @pytest.mark.parametrize("model_type", sorted(NEURON_BACKENDS["tnx"].architectures))
    def test_nothing_that_is_unread_or_refused_is_left(self, model_type):
        able = NEURON_BACKENDS["tnx"].architectures[model_type]
        stopped = {*able.ignored_options, *able.unsupported_options} & EVERYTHING.keys()
        found = self.arguments(model_type)
        keywords = {option(name).to["tnx"] for name in stopped}
        assert not keywords & {*found.constructor, *found.neuron_config}

    def test_neither_are_the_defaults_that_another_option_implies(self):
        found = self.arguments("mistral").neuron_config
        assert found == {"weight_tiling": True, "continuous_batching": found["continuous_batching"]}

    @pytest.mark.parametrize("model_type", ["gpt_neox", "gptj"])
    def test_lengths_that_its_constructor_does_not_know(self, model_type):
        constructor = self.arguments(model_type).constructor
        assert constructor["n_positions"] == 2048
        assert "context_length_estimate" not in constructor

    def test_without_prompt_graphs_the_prompts_are_still_of_use_elsewhere(self):
        assert self.arguments("gpt2").constructor["context_length_estimate"] == [128, 2048]
        assert self.arguments("gpt2").constructor["n_positions"] == 2048

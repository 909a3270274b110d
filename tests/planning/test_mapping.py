"""What the libraries get: real names only, values in their spelling, nothing that nobody asked for."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from djl_python_neuronx.config.keywords import DERIVED, RESERVED
from djl_python_neuronx.config.options import ServingOptions, option
from djl_python_neuronx.planning.arguments import LibraryArguments
from djl_python_neuronx.planning.case import NEURON_BACKENDS
from djl_python_neuronx.planning.model_rules import overrides, unsupported_options
from tests.config import library_names as real
from tests.config.option_table import ANYWAY, BACKEND, BASE, LEFT_OUT, OURS, REFUSED, TABLE
from tests.planning.settings import library_arguments

LIBRARIES = ("tnx", "nxdi")
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
    "deprecated by the library": "attn_block_cte_nki_kernel_enabled attn_tkg_builtin_kernel_enabled "
    "attn_tkg_nki_kernel_enabled mlp_tkg_nki_kernel_enabled",
    "debugging only": "tensor_capture_config tensor_replacement_config enable_output_completion_notifications",
}


def given(**changes):
    """The base options with others, validated as a user's."""
    return ServingOptions.model_validate({**BASE.model_dump(exclude_unset=True), **changes})


def gained(options, loader):
    """What the arguments have beyond the base's, by part; a keyword that went away is None."""
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
@pytest.mark.parametrize("name", TABLE)
def test_each_option_becomes_what_its_row_says(name, loader):
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


def test_each_keyword_of_the_libraries_is_accounted_for():
    """An option, something that follows from one, refused with a reason, or left to overrides on purpose."""
    through_options = {name.partition(".")[0] for row in TABLE for name in option(row).to.values()}
    left = {name for names in LEFT_TO_OVERRIDES.values() for name in names.split()}
    known = through_options | set(DERIVED) | set(RESERVED) | left
    keywords = real.TNX_NEURON_CONFIG | real.NXDI_MOE_NEURON_CONFIG
    assert keywords - known == set()
    assert left <= keywords
    assert not left & (through_options | set(DERIVED) | set(RESERVED))


def test_what_follows_from_options_names_keywords_and_options_that_exist():
    keywords = real.TNX_CONSTRUCTOR | real.TNX_NEURON_CONFIG | real.NXDI_MOE_NEURON_CONFIG
    assert set(DERIVED) | set(RESERVED) <= keywords
    assert set(DERIVED.values()) <= set(TABLE)
    assert not set(DERIVED) & set(RESERVED)


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

    @pytest.mark.parametrize(
        "sharded",
        [{"shard_over_sequence": True}, {"override_neuron_config": {"shard_over_sequence": True}}],
    )
    def test_a_cache_divided_by_tokens_has_one_length_where_rows_have_positions_of_their_own(
        self, sharded
    ):
        options = given(n_positions="512,1024,2048", **sharded)
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

    def test_fp8(self):
        options = given(
            quantize="fp8", kv_cache_quantize="fp8", quantization_type="per_tensor_symmetric"
        )
        arguments = library_arguments(options, "nxdi")
        config = arguments.neuron_config
        assert config["quantization_dtype"] == "f8e4m3"
        assert config["quantization_type"] == "per_tensor_symmetric"
        assert config["kv_quant_config"] == {"direct_cast": True}
        assert arguments.environment == {
            "XLA_HANDLE_SPECIAL_SCALAR": "1",
            "UNSAFE_FP8FNCAST": "1",
        }
        assert unsupported_options(options, "nxdi") == ()

    @pytest.mark.parametrize(("length", "expected"), [("5", 6), ("1", 2), ("0", None)])
    def test_the_length_of_a_step_counts_the_models_own_token(self, length, expected):
        options = given(speculative_draft_model="org/draft", speculative_length=length)
        config = library_arguments(options, "nxdi").neuron_config
        assert config.get("speculation_length") == expected
        assert config.get("enable_fused_speculation", False) == (expected is not None)

    def test_what_the_library_does_anyway_is_no_wish(self):
        options = given(cast_logits_dtype="fp32", on_device_embedding="true")
        assert unsupported_options(options, "nxdi") == ()
        assert gained(options, "nxdi") == {}
        assert unsupported_options(given(cast_logits_dtype="bf16"), "nxdi") == (
            "cast_logits_dtype",
        )


class TestOverrides:
    def problems(self, **keywords):
        found = list(overrides(given(override_neuron_config=keywords)))
        assert {finding.names for finding in found} <= {("override_neuron_config",)}
        return [finding.problem for finding in found if finding.level == "error"]

    def test_they_are_merged_last_and_only_there(self):
        options = given(fuse_qkv=True, override_neuron_config={"fused_qkv": False, "new": [1]})
        assert gained(options, "nxdi") == {"neuron_config": {"fused_qkv": False, "new": [1]}}

    def test_the_options_are_not_changed_by_it(self):
        options = given(override_neuron_config={"new": 1})
        library_arguments(options, "nxdi").neuron_config["new"] = 2
        assert library_arguments(options, "nxdi").neuron_config["new"] == 1

    def test_other_names_are_the_librarys_to_judge(self):
        assert self.problems(qk_layernorm=True, something_new=1) == []
        note, _ = overrides(given(override_neuron_config={"new": 1, "tp_degree": 2}))
        assert (note.level, "new: checked when the model loads" in note.problem) == (
            "note",
            True,
        )
        assert self.problems() == []

    @pytest.mark.parametrize("name", sorted(DERIVED))
    def test_what_follows_from_an_option_names_it(self, name):
        (problem,) = self.problems(**{name: 1})
        assert problem.startswith(f"{name}: ")
        assert f"option.{DERIVED[name]}" in problem

    @pytest.mark.parametrize("name", sorted(RESERVED))
    def test_what_nobody_may_set_says_why(self, name):
        (problem,) = self.problems(**{name: 1})
        assert RESERVED[name] in problem

    def test_each_name_has_its_own_finding(self):
        assert len(self.problems(batch_size=1, sparse_attn=1, tp_degree=2)) == 3


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

"""Rules across options: for each, what breaks it and the nearest that does not."""

import pytest

from djl_python_neuronx.config.options import MAX_ROWS, ServingOptions, option
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.rules import RULES, broken_rules, conflicts

BACKEND_RULES = {name: neuron.rules for name, neuron in NEURON_BACKENDS.items()}

PER_ROW = {"do_sample": True, "dynamic": True, "per_batch_line": True}
DRAFT = {"speculative_draft_model": "draft"}
LOOKUP = {"ngram_prompt_lookup_max": 3}
KERNEL = {
    "attn_block_tkg_nki_kernel_enabled": True,
    "qkv_nki_kernel_enabled": True,
    "fuse_qkv": True,
}

# The first name of the finding, its level, what breaks the rule, what is changed to mend it.
GENERAL = [
    ("model_id", "error", {"model_id": None}, {"model_id": "m"}),
    ("batch_size", "error", {"batch_size": 2, "rolling_batch": "tnx"}, {"batch_size": 1}),
    ("batch_size", "error", {"batch_size": 2, "rolling_batch": "vllm"}, {"rolling_batch": "auto"}),
    ("async_mode", "error", {"async_mode": True, "rolling_batch": "tnx"}, {"async_mode": False}),
    (
        "async_mode",
        "error",
        {"async_mode": True, "rolling_batch": "vllm"},
        {"rolling_batch": "disable"},
    ),
    (
        "batch_size",
        "warning",
        {"batch_size": 4, "max_rolling_batch_size": 3},
        {"max_rolling_batch_size": 4},
    ),
    (
        "max_rolling_batch_size",
        "error",
        {"max_rolling_batch_size": MAX_ROWS + 1, "rolling_batch": "tnx"},
        {"max_rolling_batch_size": MAX_ROWS},
    ),
    (
        "context_length_estimate",
        "error",
        {"context_length_estimate": (128, 512), "n_positions": 511},
        {"n_positions": 512},
    ),
    (
        "context_length_estimate",
        "error",
        {"context_length_estimate": (512,), "n_positions": (128, 256)},
        {"n_positions": (128, 512)},
    ),
    (
        "max_join_wait_ms",
        "error",
        {"max_join_wait_ms": 2000, "predict_timeout": 2},
        {"max_join_wait_ms": 1999},
    ),
    (
        "max_join_wait_ms",
        "error",
        {"max_join_wait_ms": 2000, "predict_timeout": 1},
        {"queue_timeout": 3},
    ),
    (
        "max_join_wait_ms",
        "error",
        {"max_join_wait_ms": 2000, "queue_timeout": 1},
        {"max_join_wait_ms": 999},
    ),
    (
        "rolling_batch_strategy",
        "note",
        {"rolling_batch_strategy": "continuous_batching", "rolling_batch": "disable"},
        {"async_mode": True},
    ),
    ("model_loader", "note", {"model_loader": "optimum"}, {"model_loader": "auto"}),
    ("model_loader", "note", {"model_loader": "vllm"}, {"model_loader": "tnx"}),
    (
        "tensor_parallel_degree",
        "error",
        {"tensor_parallel_degree": "max", "replicas": 2},
        {"tensor_parallel_degree": 2},
    ),
    ("replicas", "error", {"engine_process": False, "replicas": "max"}, {"replicas": 1}),
    (
        "pipeline_parallel_degree",
        "warning",
        {"pipeline_parallel_degree": 2},
        {"pipeline_parallel_degree": 1},
    ),
    (
        "speculative_draft_model",
        "error",
        {**DRAFT, "speculative_length": 0},
        {"speculative_length": 1},
    ),
    ("speculative_length", "warning", {"speculative_length": 4}, DRAFT),
    ("speculative_length", "warning", {"speculative_length": 4}, LOOKUP),
    (
        "ngram_prompt_lookup_max",
        "error",
        {**LOOKUP, "speculative_length": 0},
        {"speculative_length": 1},
    ),
    ("ngram_prompt_lookup_max", "error", {**LOOKUP, **DRAFT}, {"speculative_draft_model": None}),
    (
        "ngram_prompt_lookup_max",
        "error",
        {**LOOKUP, "enable_chunked_prefill": True},
        {"enable_chunked_prefill": False},
    ),
    ("speculative_length", "warning", {"speculative_length": 6}, {"speculative_length": 5}),
    ("speculative_length", "warning", {"speculative_length": 1}, {"speculative_length": 0}),
    ("draft_model_tp_size", "warning", {"draft_model_tp_size": 1}, DRAFT),
    ("draft_model_compiled_path", "warning", {"draft_model_compiled_path": "p"}, DRAFT),
    (
        "speculative_draft_model",
        "error",
        {**DRAFT, "enable_chunked_prefill": True},
        {"enable_chunked_prefill": False},
    ),
    (
        "enable_chunked_prefill",
        "error",
        {"enable_chunked_prefill": True, "is_block_kv_layout": False},
        {"is_block_kv_layout": True},
    ),
    ("pa_block_size", "warning", {"pa_block_size": 32}, {"is_block_kv_layout": True}),
    ("pa_num_blocks", "warning", {"pa_num_blocks": 32}, {"enable_chunked_prefill": True}),
    *(
        (
            name,
            "error",
            {name: True, "rolling_batch_strategy": "naive_rolling_batch"},
            {"rolling_batch_strategy": "continuous_batching"},
        )
        for name in ("enable_chunked_prefill", "is_block_kv_layout")
    ),
    (
        "padding_side",
        "error",
        {"padding_side": "left", "rolling_batch_strategy": "continuous_batching"},
        {"padding_side": "right"},
    ),
    (
        "on_device_generation",
        "error",
        {"on_device_generation": {**PER_ROW, "top_k": 65, "global_top_k": 64}},
        {"on_device_generation": {**PER_ROW, "top_k": 64, "global_top_k": 64}},
    ),
    (
        "on_device_generation",
        "error",
        {"on_device_generation": {"do_sample": True, "per_batch_line": True}},
        {"on_device_generation": PER_ROW},
    ),
    (
        "on_device_default_top_k",
        "warning",
        {"on_device_default_top_k": "global_top_k"},
        {"on_device_generation": True},
    ),
    (
        "on_device_generation",
        "warning",
        {"on_device_generation": {"temperature": 0.5}},
        {"on_device_generation": {"temperature": 0.5, "do_sample": True}},
    ),
    (
        "on_device_generation",
        "warning",
        {"on_device_generation": {"top_p": 0.5}},
        {"on_device_generation": {"top_p": 0.5, "dynamic": True}},
    ),
    (
        "partition_schema",
        "error",
        {"partition_schema": "optimum", "save_mp_checkpoint_path": "p"},
        {"partition_schema": None},
    ),
    ("partition_schema", "warning", {"partition_schema": "optimum"}, {"partition_schema": None}),
    (
        "load_split_model",
        "error",
        {"load_split_model": True, "partition_schema": "safetensors"},
        {"load_split_model": False},
    ),
    (
        "load_split_model",
        "error",
        {"load_split_model": True, "save_mp_checkpoint_path": "p"},
        {"save_mp_checkpoint_path": None},
    ),
    (
        "quantize",
        "warning",
        {"quantize": "static_int8", "dtype": "float32"},
        {"dtype": "bfloat16"},
    ),
]
WHOLE_HEADS = {"attention_layout": "BSH", "group_query_attention": "replicated-heads"}
SKIP = {"fused_rmsnorm_skip_gamma": True, "fused_rmsnorm_qkv": True, "fuse_qkv": True}
NORM = {"fused_rmsnorm_qkv": True, "fuse_qkv": True, **WHOLE_HEADS}
ORDERS = ("mlp_in_weight_tiling_permute_order", "mlp_out_weight_tiling_permute_order")
BSH = {"cache_layout": "BSH", "n_positions": 512, "max_rolling_batch_size": 4}
CHUNKS = {"enable_chunked_prefill": True}
ONE_LENGTH = {**BSH, "context_length_estimate": (512,)}
TNX = [
    ("qkv_tiling", "error", {"qkv_tiling": True}, {"fuse_qkv": True}),
    ("fuse_mlp", "error", {"fuse_mlp": True}, {"mlp_out_weight_transpose": True}),
    ("fuse_mlp", "error", {"fuse_mlp": True}, {"multi_node": True}),
    (
        "fuse_mlp",
        "error",
        {"multi_node": True, "mlp_out_weight_transpose": False},
        {"mlp_out_weight_transpose": None},
    ),
    ("fused_rmsnorm_qkv", "warning", {**NORM, "fuse_qkv": None}, {"fuse_qkv": True}),
    (
        "fused_rmsnorm_qkv",
        "warning",
        {**NORM, "attention_layout": "HSB"},
        {"attention_layout": "BSH"},
    ),
    (
        "fused_rmsnorm_qkv",
        "warning",
        {**NORM, "group_query_attention": "shard-over-heads"},
        WHOLE_HEADS,
    ),
    (
        "fused_rmsnorm_qkv",
        "warning",
        {**NORM, "sequence_parallel": True},
        {"sequence_parallel": False},
    ),
    (
        "fused_rmsnorm_mlp",
        "warning",
        {"fused_rmsnorm_mlp": True, "attention_layout": "BSH"},
        WHOLE_HEADS,
    ),
    *(
        (name, "error", {name: order, "weight_tiling": True}, {name: (1, 2, 0, 3)})
        for name in ORDERS
        for order in ((3, 2, 1, 0), (1, 1, 2, 3))
    ),
    *((name, "warning", {name: (1, 2, 0, 3)}, {"weight_tiling": True}) for name in ORDERS),
    (
        "mlp_out_weight_transpose",
        "warning",
        {"mlp_out_weight_transpose": True, "weight_tiling": True},
        {"fuse_mlp": True},
    ),
    (
        "cache_layout",
        "error",
        {**ONE_LENGTH, "rolling_batch_strategy": "naive_rolling_batch"},
        {"rolling_batch_strategy": None},
    ),
    (
        "cache_layout",
        "error",
        {**ONE_LENGTH, "max_rolling_batch_size": 1},
        {"max_rolling_batch_size": 2},
    ),
    (
        "cache_layout",
        "error",
        {**BSH, "context_length_estimate": (128, 512)},
        {"context_length_estimate": (512,)},
    ),
    ("cache_layout", "error", {**BSH, "n_positions": (128, 512)}, {"n_positions": (512,)}),
    ("is_block_kv_layout", "error", {"is_block_kv_layout": True}, CHUNKS),
    ("enable_chunked_prefill", "error", {**CHUNKS, "cache_layout": "SBH"}, {"cache_layout": "BSH"}),
    ("pa_block_size", "error", {**CHUNKS, "pa_block_size": 48}, {"pa_block_size": 32}),
    (
        "pa_block_size",
        "error",
        {**CHUNKS, "pa_block_size": 64, "n_positions": 64},
        {"n_positions": 65},
    ),
    (
        "enable_chunked_prefill",
        "error",
        {**CHUNKS, "group_query_attention": "shard-over-batch"},
        {"group_query_attention": "replicated-heads"},
    ),
    (
        "kv_cache_quantize",
        "error",
        {**CHUNKS, "kv_cache_quantize": "fp8"},
        {"kv_cache_quantize": None},
    ),
    (
        "shard_over_sequence",
        "error",
        {**CHUNKS, "shard_over_sequence": True},
        {"shard_over_sequence": False},
    ),
    (
        "on_device_generation",
        "error",
        {**CHUNKS, "on_device_generation": True},
        {"on_device_generation": {"do_sample": False}},
    ),
    (
        "on_device_generation",
        "error",
        {**CHUNKS, "on_device_generation": {"do_sample": True, "top_k": 4}},
        {"on_device_generation": {"do_sample": False}},
    ),
    (
        "on_device_generation",
        "error",
        {**CHUNKS, "on_device_generation": {"do_sample": True}},
        {"enable_chunked_prefill": False},
    ),
    (
        "cache_layout",
        "error",
        {**ONE_LENGTH, "group_query_attention": "shard-over-batch"},
        {"group_query_attention": "replicated-heads"},
    ),
    (
        "shard_over_sequence",
        "error",
        {**ONE_LENGTH, "shard_over_sequence": True},
        {"cache_layout": "SBH"},
    ),
    (
        "duplicate_q_weight_sos",
        "warning",
        {"duplicate_q_weight_sos": True},
        {"shard_over_sequence": True},
    ),
    (
        "sequence_parallel_norm_threshold",
        "warning",
        {"sequence_parallel_norm_threshold": 512},
        {"sequence_parallel": True},
    ),
    (
        "speculative_length",
        "error",
        {**LOOKUP, "speculative_length": 128, "context_length_estimate": (64, 128)},
        {"speculative_length": 127},
    ),
    *(
        row
        for drafts in (DRAFT, LOOKUP)
        for row in (
            (
                "rolling_batch_strategy",
                "error",
                {**drafts, "rolling_batch_strategy": "naive_rolling_batch"},
                {"rolling_batch_strategy": "continuous_batching"},
            ),
            ("cache_layout", "error", {**drafts, **ONE_LENGTH}, {"cache_layout": "SBH"}),
            ("cache_layout", "error", {**drafts, **ONE_LENGTH}, {"speculative_length": 0}),
            (
                next(iter(drafts)),
                "error",
                {**drafts, "on_device_generation": True},
                {"on_device_generation": None},
            ),
            (
                next(iter(drafts)),
                "error",
                {**drafts, "shard_over_sequence": True},
                {"shard_over_sequence": None},
            ),
        )
    ),
    ("speculative_length", "error", {**LOOKUP, "n_positions": 6}, {"n_positions": 7}),
    ("speculative_length", "error", {**DRAFT, "n_positions": (6,)}, {"n_positions": (6, 7)}),
    ("speculative_length", "error", {**DRAFT, "n_positions": (5, 64)}, {"n_positions": (6, 64)}),
    (
        "speculative_length",
        "error",
        {**LOOKUP, "speculative_length": 128, "n_positions": 512},
        {"speculative_length": 127},
    ),
    (
        "speculative_length",
        "error",
        {**LOOKUP, "speculative_length": 128, "n_positions": 512},
        {"n_positions": (256, 512)},
    ),
    *(
        (
            "sequence_parallel",
            "error",
            {**LOOKUP, "sequence_parallel": True, **norm},
            change,
        )
        for norm, change in (
            ({"sequence_parallel_norm_threshold": 5}, {"sequence_parallel_norm_threshold": 6}),
            ({"sequence_parallel_norm_threshold": 5}, {"speculative_length": 4}),
            ({"speculative_length": 2048}, {"speculative_length": 2047}),
        )
    ),
    (
        "on_device_generation",
        "error",
        {"on_device_generation": {"do_sample": True, "global_top_k": 64}},
        {"on_device_generation": {"do_sample": True, "global_top_k": 64, "dynamic": True}},
    ),
]
CORES = {"tensor_parallel_degree": 8, "max_rolling_batch_size": 8}
LATER = {
    "quantize": "static_int8",
    "kv_cache_quantize": "int8",
    "speculative_draft_model": "draft",
    "is_block_kv_layout": True,
}
NXDI = [
    ("cp_degree", "error", {**CORES, "cp_degree": 3}, {"cp_degree": 4}),
    (
        "attention_dp_degree",
        "error",
        {"tensor_parallel_degree": 8, "max_rolling_batch_size": 12, "attention_dp_degree": 3},
        {"attention_dp_degree": 4},
    ),
    (
        "attention_dp_degree",
        "error",
        {**CORES, "max_rolling_batch_size": 6, "attention_dp_degree": 4},
        {"max_rolling_batch_size": 12},
    ),
    (
        "attention_dp_degree",
        "error",
        {**CORES, "attention_dp_degree": 2, "rolling_batch_strategy": "naive_rolling_batch"},
        {"rolling_batch_strategy": "continuous_batching"},
    ),
    (
        "cp_degree",
        "error",
        {**CORES, "cp_degree": 2, "attention_dp_degree": 4},
        {"cp_degree": 4},
    ),
    (
        "mlp_cp_degree",
        "error",
        {"mlp_cp_degree": 2, "cp_degree": 2},
        {"sequence_parallel": True},
    ),
    (
        "mlp_cp_degree",
        "error",
        {**CORES, "mlp_cp_degree": 2, "sequence_parallel": True},
        {"cp_degree": 2},
    ),
    *(
        (name, "error", {name: True}, {"fuse_qkv": True})
        for name in ("fused_rmsnorm_qkv", "qkv_nki_kernel_enabled")
    ),
    (
        "qkv_kernel_fuse_residual_add",
        "error",
        {"qkv_kernel_fuse_residual_add": True, "fuse_qkv": True},
        {"fused_rmsnorm_qkv": True},
    ),
    *(
        (
            f"{part}_kernel_fuse_residual_add",
            "error",
            {
                f"{part}_kernel_fuse_residual_add": True,
                f"fused_rmsnorm_{part}": True,
                "fuse_qkv": True,
                "sequence_parallel": True,
            },
            {"sequence_parallel": False},
        )
        for part in ("mlp", "qkv")
    ),
    *(
        ("fused_rmsnorm_skip_gamma", "error", {**SKIP, **more}, dict.fromkeys(more, False))
        for more in (
            {"fused_rmsnorm_mlp": True},
            {"sequence_parallel": True},
            {"attn_block_tkg_nki_kernel_enabled": True},
        )
    ),
    (
        "strided_context_parallel_kernel_enabled",
        "error",
        {**CORES, "strided_context_parallel_kernel_enabled": True, "cp_degree": 1},
        {"cp_degree": 2},
    ),
    (
        "ep_dispatch_cc_option",
        "error",
        {**CORES, "ep_dispatch_cc_option": "RS_AG", "max_rolling_batch_size": 7},
        {"max_rolling_batch_size": 8},
    ),
    (
        "attention_dp_degree",
        "error",
        {
            **CORES,
            **KERNEL,
            "attention_dp_degree": 2,
            "attn_block_tkg_nki_kernel_cache_update": True,
        },
        {"attn_block_tkg_nki_kernel_cascaded_attention": True},
    ),
    (
        "attention_dtype",
        "error",
        {"attention_dtype": "float32", "dtype": "bfloat16"},
        {"cast_type": "as-declared"},
    ),
    (
        "attention_dtype",
        "error",
        {"attention_dtype": "float32", "dtype": "float16"},
        {"dtype": "float32"},
    ),
    (
        "qkv_cte_nki_kernel_fuse_rope",
        "error",
        {
            "qkv_cte_nki_kernel_fuse_rope": True,
            "qkv_nki_kernel_enabled": True,
            "fuse_qkv": True,
        },
        {"fused_rmsnorm_qkv": True},
    ),
    (
        "attn_block_tkg_nki_kernel_enabled",
        "error",
        {"attn_block_tkg_nki_kernel_enabled": True, "fuse_qkv": True},
        {"qkv_nki_kernel_enabled": True},
    ),
    *(
        (name, "error", {name: True}, KERNEL)
        for name in (
            "attn_block_tkg_nki_kernel_cache_update",
            "attn_block_tkg_nki_kernel_cascaded_attention",
        )
    ),
    (
        "attn_block_tkg_nki_kernel_enabled",
        "error",
        {**KERNEL, "shard_over_sequence": True},
        {"shard_over_sequence": False},
    ),
    (
        "k_cache_transposed",
        "error",
        {"k_cache_transposed": True, "shard_over_sequence": True},
        {"k_cache_transposed": False},
    ),
    *(
        (name, "error", {**CORES, name: 2, "shard_over_sequence": True}, {name: 1})
        for name in ("cp_degree", "attention_dp_degree")
    ),
    (
        "attention_dp_degree",
        "error",
        {**CORES, "attention_dp_degree": 2, "token_generation_batches": (4,)},
        {"token_generation_batches": None},
    ),
    (
        "token_generation_batches",
        "error",
        {**CORES, "token_generation_batches": (4, 9)},
        {"token_generation_batches": (4, 8)},
    ),
    (
        "padding_side",
        "error",
        {"padding_side": "left", "rolling_batch_strategy": "naive_rolling_batch"},
        {"padding_side": "right"},
    ),
    (
        "output_logits",
        "error",
        {
            **CORES,
            "on_device_generation": True,
            "output_logits": True,
            "token_generation_batches": (1, 2),
            "rolling_batch_strategy": "naive_rolling_batch",
        },
        {"rolling_batch_strategy": "continuous_batching"},
    ),
    ("async_execution", "error", {"async_execution": True}, {"on_device_generation": True}),
    (
        "on_device_generation",
        "error",
        {"on_device_generation": {"do_sample": True, "top_p": 0.9}},
        {"on_device_generation": {"do_sample": True, "dynamic": True, "top_p": 0.9}},
    ),
    (
        "on_device_generation",
        "error",
        {
            "on_device_generation": {"do_sample": True, "dynamic": True},
            "override_neuron_config": {"on_device_sampling_config": {"sampling_dp_degree": 2}},
        },
        {"override_neuron_config": {"on_device_sampling_config": {"sampling_dp_degree": 1}}},
    ),
    *(
        (
            "on_device_generation",
            "error",
            {
                "on_device_generation": {
                    "do_sample": True,
                    "dynamic": dynamic,
                    "deterministic": True,
                }
            },
            {"on_device_generation": {"do_sample": True, "dynamic": dynamic}},
        )
        for dynamic in (False, True)
    ),
    ("output_logits", "error", {"output_logits": True}, {"on_device_generation": True}),
    (
        "async_execution",
        "error",
        {"async_execution": True, "on_device_generation": True, "token_generation_batches": (1,)},
        {"token_generation_batches": None},
    ),
    (
        "async_execution",
        "note",
        {"async_execution": True, "on_device_generation": True, "async_mode": True},
        {"async_execution": None},
    ),
]
LEFT_OUT = {name: ServingOptions.model_fields[name].default for name in LATER}
LISTED = [
    *(("", *row) for row in GENERAL),
    *(("tnx", *row) for row in TNX),
    *(("nxdi", *row) for row in NXDI),
]


def options(**values):
    return ServingOptions.model_validate({"model_id": "m", **values})


def told(loader, values):
    """First names and levels of everything that is said; without a loader what needs none."""
    if not loader:
        return [(found.names[0], found.level) for found in conflicts(options(**values))]
    chosen = options(**{"model_loader": loader, **values})
    found = [*conflicts(chosen), *broken_rules(BACKEND_RULES.get(loader, ()), chosen)]
    return [(entry.names[0], entry.level) for entry in found]


@pytest.mark.parametrize(("loader", "name", "level", "broken", "mended"), LISTED)
def test_a_rule_is_told_when_broken_and_not_when_mended(loader, name, level, broken, mended):
    before = told(loader, broken).count((name, level))
    assert before >= 1
    assert told(loader, {**broken, **mended}).count((name, level)) == before - 1


@pytest.mark.parametrize("name", LATER)
def test_what_a_later_version_serves_is_refused(name):
    chosen = options(**{name: LATER[name]})
    found = [
        entry.problem
        for entry in broken_rules(BACKEND_RULES["nxdi"], chosen)
        if entry.names == (name,)
    ]
    [problem] = [problem for problem in found if "later version" in problem]
    assert "model_loader=tnx" in problem
    assert "tnx" in option(name).to


EVERY_RULE = [
    *(("", rule) for rule in RULES),
    *((loader, rule) for loader, its in BACKEND_RULES.items() for rule in its),
]


def test_every_rule_is_in_the_table(subtests):
    for loader, rule in EVERY_RULE:
        with subtests.test("-".join((loader, rule.names[0]))):
            rows = [(broken, mended) for its, name, _, broken, mended in LISTED if its == loader]
            rows += [({name: value}, {name: LEFT_OUT[name]}) for name, value in LATER.items()]
            assert any(
                rule.holds(options(**broken)) and not rule.holds(options(**{**broken, **mended}))
                for broken, mended in rows
            )


def test_a_rule_names_options_and_the_way_out(subtests):
    for _, rule in EVERY_RULE:
        with subtests.test(rule.names[0]):
            assert set(rule.names) <= ServingOptions.model_fields.keys()
            assert len(set(rule.names)) == len(rule.names)
            ways = (
                "set ",
                "leave ",
                "lower ",
                "raise ",
                "give ",
                "expected ",
                "change ",
                "taken as",
                "has to",
            )
            assert any(way in rule.problem for way in ways), f"say what to do, with one of {ways}"
            assert not rule.problem.endswith("."), "part of a sentence: no full stop"


@pytest.mark.parametrize("loader", BACKEND_RULES)
def test_the_rules_of_a_library_are_about_what_it_knows(loader):
    for rule in BACKEND_RULES[loader]:
        mapped = [name for name in rule.names if option(name).to]
        assert any(loader in option(name).to for name in mapped)


def test_defaults_break_no_rule():
    chosen = options()
    assert [*conflicts(chosen)] == []
    for loader in BACKEND_RULES:
        assert [*broken_rules(BACKEND_RULES.get(loader, ()), chosen)] == []


def test_every_broken_rule_is_told_at_once():
    values = {"batch_size": 2, "rolling_batch": "tnx", "async_mode": True, "output_logits": True}
    assert [name for name, _ in told("nxdi", values)] == [
        *("batch_size", "async_mode", "output_logits")
    ]


def test_a_finding_about_drafts_names_where_they_come_from():
    for drafts in (DRAFT, LOOKUP):
        naive = {"model_loader": "tnx", "rolling_batch_strategy": "naive_rolling_batch"}
        (found,) = broken_rules(BACKEND_RULES["tnx"], options(**drafts, **naive))
        assert found.names == ("rolling_batch_strategy", *drafts)


def test_drafts_that_nobody_makes_can_come_from_either():
    (found,) = conflicts(options(speculative_length=4))
    for name in (*DRAFT, *LOOKUP):
        assert name in found.names
        assert name in found.problem


def test_a_cache_in_blocks_may_have_several_lengths():
    several = {**BSH, "context_length_estimate": (128, 512)}
    broken = ("cache_layout", "error")
    assert broken in told("tnx", several)
    assert broken not in told("tnx", {**several, "is_block_kv_layout": True})
    assert broken not in told("tnx", {**several, "enable_chunked_prefill": True})


class TestLibraries:
    """A rule of one library is judged once its backend is chosen, and for no other backend."""

    def test_an_option_of_one_library_waits_for_the_backend(self):
        odd = {"enable_chunked_prefill": True, "pa_block_size": 48}
        assert told("", odd) == []
        assert told("tnx", odd) == [("pa_block_size", "error")]
        assert told("", {"output_logits": True}) == []
        assert told("nxdi", {"output_logits": True}) == [("output_logits", "error")]

    def test_an_option_that_another_library_just_leaves_out_waits_for_the_loader(self):
        divided = {"shard_over_sequence": True, "cache_layout": "BSH"}
        assert told("", divided) == []
        chosen = options(**divided)
        assert [*broken_rules(BACKEND_RULES["nxdi"], chosen)] == []
        (found,) = broken_rules(BACKEND_RULES["tnx"], chosen)
        assert found.names == ("shard_over_sequence", "cache_layout")

    @pytest.mark.parametrize("other", ["nxdi", "cpu"])
    def test_a_loader_by_name_hears_of_no_other(self, other):
        assert told(other, {"qkv_tiling": True}) == []

    @pytest.mark.parametrize(
        ("loader", "expected"), [("tnx", 1), ("nxdi", 0), ("cpu", 0), (None, 0)]
    )
    def test_an_option_of_both_waits_for_the_loader(self, loader, expected):
        chosen = options(**DRAFT, rolling_batch_strategy="naive_rolling_batch")
        early = [*conflicts(chosen)]
        late = [] if loader is None else [*broken_rules(BACKEND_RULES.get(loader, ()), chosen)]
        assert early == []
        assert len([found for found in late if "rolling_batch_strategy" in found.names]) == expected

    @pytest.mark.parametrize("loader", BACKEND_RULES)
    @pytest.mark.parametrize("named", [True, False])
    def test_nothing_is_told_twice(self, loader, named):
        for its, _, _, broken, _ in LISTED:
            if its == loader:
                chosen = options(**{"model_loader": loader if named else "auto", **broken})
                found = [*conflicts(chosen), *broken_rules(BACKEND_RULES.get(loader, ()), chosen)]
                assert len(found) == len(set(found))
                assert found

    def test_values_that_are_filled_in_are_judged_then(self):
        chosen = options(model_loader="tnx", **DRAFT)
        assert [*broken_rules(BACKEND_RULES["tnx"], chosen)] == []
        filled = chosen.model_copy(update={"context_length_estimate": (5,)})
        (found,) = broken_rules(BACKEND_RULES["tnx"], filled)
        assert found.names == ("speculative_length", "context_length_estimate")

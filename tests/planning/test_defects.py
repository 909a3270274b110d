"""Compiler defects that users report: settings that are warned of, written from their threads, not from the rows."""

import json
from dataclasses import asdict

import pytest

from djl_python_neuronx import backends
from djl_python_neuronx.config.findings import SET, UNSET
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning import defects
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.machines import FAMILIES
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.nxdi.versions import releases
from tests.loading.checking import folder, run

# layers, width, inner width, heads, KV heads, vocabulary: from the models' config.json.
MODELS = {
    "Llama-2-7b": ("llama", 32, 4096, 11008, 32, 32, 32000),
    "Llama-2-13b": ("llama", 40, 5120, 13824, 40, 40, 32000),
    "Llama-2-70b": ("llama", 80, 8192, 28672, 64, 8, 32000),
    "Llama-3.3-70B": ("llama", 80, 8192, 28672, 64, 8, 128256),
    "Llama-3-8B": ("llama", 32, 4096, 14336, 32, 8, 128256),
    "Llama-3.2-1B": ("llama", 16, 2048, 8192, 32, 8, 128256),
    "TinyLlama": ("llama", 22, 2048, 5632, 32, 4, 32000),
    "zephyr-7b": ("mistral", 32, 4096, 14336, 32, 8, 32000),
    "Qwen2.5-1.5B": ("qwen2", 28, 1536, 8960, 12, 2, 151936),
    "Qwen2.5-7B": ("qwen2", 28, 3584, 18944, 28, 4, 152064),
    "Qwen2.5-14B": ("qwen2", 48, 5120, 13824, 40, 8, 152064),
    "Qwen2.5-32B": ("qwen2", 64, 5120, 27648, 40, 8, 152064),
    "Qwen3-0.6B": ("qwen3", 28, 1024, 3072, 16, 8, 151936),
    "Qwen3-8B": ("qwen3", 36, 4096, 12288, 32, 8, 151936),
    "GPT-NeoX-20B": ("gpt_neox", 44, 6144, 24576, 64, 64, 50432),
}
HELIX = "https://github.com/helixml/helix/pull/"
SDK = "https://github.com/aws-neuron/aws-neuron-sdk/issues/"
SERVING = "https://github.com/kubernetes-sigs/wg-serving/pull/"
DEVICE = {"on_device_generation": "true"}  # the default of vLLM's plugin
SHORT = {"n_positions": "2048", "max_rolling_batch_size": "1"}
LONG = {"n_positions": "16384", "max_rolling_batch_size": "4"}
CHUNKS = {
    "n_positions": "4096,16384",
    "context_length_estimate": "1024,4096",
    "max_rolling_batch_size": "4",
}
STATIC = {**CHUNKS, "rolling_batch_strategy": "naive_rolling_batch"}
PAIR = {**DEVICE, "max_rolling_batch_size": "4"}
FOUR, TWO = ({"n_positions": "2048", "max_rolling_batch_size": slots} for slots in "42")
KERNEL = {"qkv_nki_kernel_enabled": "true", "fuse_qkv": "true"}
OLD, LEVEL = "2.10.0.34", {"neuron_optimize_level": "1"}
SAMPLES = "https://github.com/aws-neuron/aws-neuron-samples/issues/"
TNX = "https://github.com/aws-neuron/transformers-neuronx/issues/"
OPTIMUM = "https://github.com/huggingface/optimum-neuron/pull/"
VLLM = "https://github.com/vllm-project/vllm/issues/"
PLUGIN = "https://github.com/vllm-project/vllm-neuron/issues/"
THREADS = [
    # thread, backend, model, machine, degree, neuronx-cc, options; the cure; what beside it is not warned of
    (HELIX + "2728", "nxdi", "zephyr-7b", "inf2.8xlarge", 2, "2.23.6484.0", {},
     "SDK 2.24", {"compiler": "2.19.8089.0"}),
    (HELIX + "2724", "nxdi", "Qwen2.5-1.5B", "inf2.xlarge", 2, "2.23.6484.0", {},
     "use another model", {"model": "TinyLlama"}),
    (HELIX + "2724", "nxdi", "Llama-3.2-1B", "inf2.xlarge", 2, "2.23.6484.0", {},
     "use another model", {"model": "TinyLlama"}),
    (HELIX + "2663", "nxdi", "Qwen2.5-1.5B", "inf2.xlarge", 2, "2.25.3371.0", {},
     "use another model", {"machine": "trn2.3xlarge"}),
    (SDK + "1303", "nxdi", "Qwen2.5-14B", "inf2.24xlarge", 8, "2.23.6484.0", DEVICE,
     "leave on_device_generation out", {"model": "Qwen2.5-7B"}),
    (SDK + "1303", "nxdi", "Qwen3-8B", "inf2.8xlarge", 2, "2.23.6484.0", DEVICE,
     "leave on_device_generation out", {"options": {}}),
    (SDK + "1303", "nxdi", "Qwen3-8B", "inf2.8xlarge", 2, "2.23.6484.0", DEVICE,
     "leave on_device_generation out", {"model": "Qwen3-0.6B"}),
    (SDK + "1365", "nxdi", "Qwen2.5-32B", "inf2.24xlarge", 8, "2.26.6360.0+6f180f47", LONG,
     "below 16384", {"options": SHORT}),
    (SDK + "1365", "nxdi", "Qwen2.5-32B", "inf2.24xlarge", 8, "2.26.6360.0+6f180f47", STATIC,
     "below 16384", {"options": CHUNKS}),
    (SDK + "1322", "nxdi", "Llama-3-8B", "trn1.32xlarge", 8, "2.24.5133.0", KERNEL,
     "SDK 2.28", {"options": {}}),
    (SERVING + "71", "nxdi", "Llama-3.2-1B", "inf2.8xlarge", 2, "2.23.6484.0", SHORT,
     "use another model", {"model": "Llama-3-8B"}),
    (SERVING + "70", "nxdi", "Llama-3.2-1B", "inf2.8xlarge", 2, "2.23.6484.0", SHORT,
     "use another model", {"model": "TinyLlama"}),
    (SDK + "749", "tnx", "Llama-2-13b", "inf2.48xlarge", 24, OLD, SHORT,
     "neuron_optimize_level=1", {"options": LEVEL}),
    (SAMPLES + "40", "tnx", "Llama-2-7b", "inf2.8xlarge", 2, OLD, SHORT,
     "neuron_optimize_level=1", {"compiler": "2.11.0.34"}),
    ("https://github.com/pytorch/serve/issues/2740", "tnx", "Llama-2-13b", "inf2.48xlarge", 24, OLD, SHORT,
     "neuron_optimize_level=1", {"compiler": None}),
    (SDK + "825", "tnx", "Llama-2-70b", "inf2.48xlarge", 24, "2.12.54.0+f631c2365", SHORT,
     "newer SDK", {"compiler": "2.13.66.0"}),
    (TNX + "10", "tnx", "GPT-NeoX-20B", "inf2.24xlarge", 4, "2.6.0.19", SHORT,
     "SDK 2.11", {"compiler": "2.7.0.40"}),
    (SDK + "1075", "nxdi", "Llama-3.3-70B", "trn1.32xlarge", 32, "2.16.345.0", FOUR,
     "max_rolling_batch_size=2", {"options": TWO}),
    (SDK + "1023", "tnx", "zephyr-7b", "inf2.8xlarge", 1, "2.15.128.0", SHORT,
     "SDK 2.21", {"compiler": "2.16.303.0"}),
    (PLUGIN + "16", "nxdi", "Llama-3.3-70B", "trn1.32xlarge", 32, "2.22.12471.0", FOUR,
     "another SDK", {"model": "Llama-2-70b"}),
    (OPTIMUM + "886", "nxdi", "Qwen2.5-7B", "inf2.8xlarge", 2, "2.17.194.0", PAIR,
     "sample on the host", {"options": {**PAIR, "max_rolling_batch_size": "1"}}),
    (VLLM + "11189", "tnx", "Llama-3.2-1B", "inf2.8xlarge", 2, "2.15.143.0", SHORT,
     "newer SDK", {"compiler": "2.16.345.0"}),
]  # fmt: skip


def checked(tmp_path, monkeypatch, loader, model, machine, degree, compiler, options):
    """The report of `check`."""
    monkeypatch.setattr(backends.get(loader), "compiler_version", lambda: compiler or "")
    kind, layers, width, inner, heads, kv_heads, vocab = MODELS[model]
    config = {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "max_position_embeddings": 32768, "torch_dtype": "bfloat16", "sliding_window": None, "head_dim": width // heads,
    }  # fmt: skip
    given = {"model_loader": loader, "tensor_parallel_degree": str(degree), **options}
    return run(folder(tmp_path, config=config), machine=machine, **given)


@pytest.mark.parametrize("machine", ["inf2.8xlarge", "trn1.32xlarge", "trn2.3xlarge"])
@pytest.mark.parametrize("compiler", [None, "2.19.8089.0", "2.23.6484.0", "2.24.5133.0"])
def test_a_plan_that_no_thread_saw_compile_is_refused_unless_it_is_accepted(
    tmp_path, monkeypatch, machine, compiler
):
    caching = {"enable_prefix_caching": "true", "n_positions": "1024"}
    given = "nxdi", "TinyLlama", machine, 2, compiler
    levels = {}
    for name, more in {"": {}, "accepted": {"allow_known_defects": "true"}}.items():
        place = tmp_path / f"model{name}"
        place.mkdir()
        report = checked(place, monkeypatch, *given, {**caching, **more})
        levels[name] = [one.level for one in report.findings if SDK + "1304" in one.message]
    hit = machine != "trn2.3xlarge" and compiler in {None, "2.23.6484.0"}
    unsure = ["note"] if compiler is None else ["warning"]
    refused = ["error"] if compiler else unsure
    assert levels == ({"": refused, "accepted": unsure} if hit else {"": [], "accepted": []})


def test_each_thread_names_its_defect_and_cure_and_nothing_beside_it(tmp_path, monkeypatch):
    wrong = []
    for number, (thread, *settings, cure, change) in enumerate(THREADS):
        names = ("loader", "model", "machine", "degree", "compiler", "options")
        given = dict(zip(names, settings, strict=True))
        for kind, wanted in (("thread", given), ("beside", {**given, **change})):
            place = tmp_path / f"{number}-{kind}"
            place.mkdir()
            found = checked(place, monkeypatch, **wanted).findings
            errors = found.messages("error")
            named = [text for text in found.messages("warning") if thread in text]
            right = len(named) == 1 and cure in named[0] if kind == "thread" else not named
            if not right or errors:
                wrong.append((thread, kind, wanted, named, errors))
    assert not wrong


WITHOUT_COMPILER = [
    # backend, model, machine, degree, options; the levels and versions that are named
    ("nxdi", "zephyr-7b", "inf2.8xlarge", 2, {}, {"warning": ">=2.23"}),
    ("nxdi", "Qwen2.5-32B", "inf2.24xlarge", 8, LONG, {"warning": ">=2.26,<2.27"}),  # of the last SDK with the library
    # SDK 2.21 has NxD Inference 0.1, which is not driven
    ("nxdi", "Llama-3.3-70B", "trn1.32xlarge", 32, FOUR, {"note": ">=2.22,<2.23", "others": "/1075"}),
    ("tnx", "Llama-2-13b", "inf2.48xlarge", 24, SHORT, {"others": "/749"}),
    ("tnx", "zephyr-7b", "inf2.8xlarge", 1, SHORT, {"others": "/1023"}),
    ("nxdi", "TinyLlama", "inf2.8xlarge", 2, {}, {}),
]  # fmt: skip


@pytest.mark.parametrize("compiler", [None, "built here"])
def test_without_a_version_those_of_sdks_with_a_driven_library_count(
    tmp_path, monkeypatch, compiler
):
    """A defect that the newest of them has is a warning, others are notes; one note has those of no such SDK."""
    wrong = []
    for number, (*settings, options, expected) in enumerate(WITHOUT_COMPILER):
        place = tmp_path / str(number)
        place.mkdir()
        report = checked(place, monkeypatch, *settings, compiler, options)
        found = {
            "others" if one.message.startswith("with compilers") else one.level: one.message
            for one in report.findings
            if "users of neuronx-cc" in one.message
        }
        right = all(
            part in found.get(kind, "")
            if kind == "others"
            else f"neuronx-cc {part} report" in found.get(kind, "")
            and found[kind].endswith("The compiler is not known here")
            for kind, part in expected.items()
        )
        if not right or found.keys() != expected.keys():
            wrong.append((settings, found))
    assert not wrong


def test_the_oldest_library_that_is_driven_is_that_of_the_table():
    assert NEURON_BACKENDS["nxdi"].driven == f">={releases()[0].version}"


def test_an_option_that_is_not_set_is_not_named(tmp_path, monkeypatch):
    report = checked(tmp_path, monkeypatch, "tnx", "Llama-2-7b", "inf2.8xlarge", 2, OLD, SHORT)
    (named,) = (one for one in report.findings if "Too many instructions" in one.message)
    assert named.options == ()
    assert "neuron_optimize_level= " not in named.message


def test_rows_name_what_exists():
    facts = ModelFacts.from_config({})
    for name, row in defects._table().items():
        assert set(row.families) <= FAMILIES.keys(), name
        assert all(hasattr(facts, field) for field in row.model), name
        for option, value in row.options.items():
            assert hasattr(ServingOptions(), option), (name, option)
            condition = defects._condition(value)
            assert condition in {SET, UNSET} or callable(condition) or condition, (name, option)
        assert row.sources, name
        assert all(source.startswith("https://github.com/") for source in row.sources), name
        assert not row.cure.endswith("."), name
    json.dumps([asdict(row) for row in defects._table().values()])


# Texts of failed compiles, from the threads.
TEXTS = {
    "match-replace-qwen2": "[INTERNAL_ERROR] [NCC_IXCG856] MATCH_REPLACE8 Instruction expects at least 8 elements",
    "paged-attention": "[NCC_ITEN404] Internal tensorizer error: SimplifyNeuronTensor:idx i0: <class 'AffineIV'>",
    "ccop-overlap": 'Assertion `false && "getLatency( const InstRangeSelect & ) not implemented"\' failed.',
    "null-flag": "[NCC_INLA001] Unhandled exception: [json.exception.type_error.302] type must be boolean, but is null",
    "too-many-instructions": "2023-09-25T10:07:13Z Too many instructions after unroll for function sg0000 !",
    "too-many-instructions-13b-70b": "[LUR015]  Compiler generated too many instructions (6888787). This maybe due to",
    "isa-check": "[XCG863] (uint32<1 x 8> $13494:13494)0: ISA check failed - Please open a support ticket",
    "libxml2": "walrus_driver: error while loading shared libraries: libxml2.so.2: cannot open shared object file",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_failed_compile_is_recognised_by_its_text(name):
    row = defects.recognised(f"before\n{TEXTS[name]}\nafter")
    assert row == defects._table()[name]


def test_each_text_has_its_example_and_other_failures_are_not_recognised():
    rows = defects._table()
    with_text = {row.text for row in rows.values() if row.text}
    assert with_text == {rows[name].text for name in TEXTS}
    for text in ("[F134] neuronx-cc terminated abnormally", "[XTP003] Number of instructions", ""):
        assert defects.recognised(text) is None

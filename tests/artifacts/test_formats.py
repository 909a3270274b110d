"""The findings of `detect` in good and foreign folders; the damaged ones are in test_damaged.py."""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path

import pytest

from djl_python_neuronx.artifacts import formats
from djl_python_neuronx.artifacts.compiled_formats import graphs_in, with_graphs
from djl_python_neuronx.artifacts.folder import SERVING, file_names
from djl_python_neuronx.artifacts.formats import detect
from djl_python_neuronx.artifacts.tensor_files import DTYPES, read_header, torch_name
from djl_python_neuronx.artifacts.weights import check_tensors, num_layers
from djl_python_neuronx.errors import (
    ArtifactAccessError,
    ArtifactError,
    ArtifactMismatchError,
    ArtifactNotFoundError,
    UnknownFormatError,
)
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.nxdi.fields import other_fields
from tests.artifacts import folders
from tests.artifacts.folders import BUILDERS, CONFIG, write_json

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-llama"
WHOLE = {"safetensors", "pickle"}
COMPILED_FOR = {
    "tensor_parallel_degree": 2,
    "max_rolling_batch_size": 4,
    "n_positions": 64,
    "dtype": "bfloat16",
    "compiler_version": folders.COMPILER,
}


@pytest.mark.parametrize(
    "layout", ["split", "tnx_presharded", "lmi_compile_only", "lmi_aot", "optimum_tnx"]
)
def test_the_backend_of_a_format_reads_its_weights(tmp_path, layout):
    artifact = detect(BUILDERS[layout](tmp_path / "model"))
    assert (
        artifact.weights_for("tnx", {*WHOLE, *NEURON_BACKENDS["tnx"].weights})
        == artifact.weights[0]
    )


@pytest.fixture
def folder(tmp_path):
    return folders.huggingface(tmp_path / "model")


@pytest.fixture
def sharded(tmp_path):
    return folders.sharded(tmp_path / "sharded")


def facts(artifact):
    """format, backend, kind, dtype, where the weights and the graphs are below the folder."""
    below = [
        None if path is None else path.relative_to(artifact.path).as_posix()
        for path in (artifact.weights[0].folder if artifact.weights else None, artifact.compiled)
    ]
    return artifact.format, artifact.backend, artifact.kind, artifact.dtype, *below


def without(*keys):
    return {key: value for key, value in COMPILED_FOR.items() if key not in keys}


FACTS = {
    "huggingface": ("huggingface", None, "safetensors", "bfloat16", ".", None),
    "split": ("split", "tnx", "split", "float16", ".", None),
    "tnx_presharded": ("tnx_presharded", "tnx", "presharded", "bfloat16", ".", "."),
    "lmi_compile_only": ("lmi_compile_only", "tnx", "presharded", "bfloat16", ".", "."),
    "lmi_aot": ("lmi_aot", "tnx", "presharded", "bfloat16", "compiled", "compiled"),
    "optimum_tnx": ("optimum_tnx", "tnx", "split", None, "checkpoint", "compiled"),
    "optimum_nxd": ("optimum_nxd", None, "safetensors", "bfloat16", "checkpoint", None),
    "nxdi": ("nxdi", "nxdi", "ranks", "bfloat16", "weights", "."),
    "nxdi_beside": (
        *("nxdi_beside", "nxdi", "safetensors", "bfloat16", "."),
        "neuron-compiled-artifacts/0cc175b9c0f1b6a831c399e269772661",
    ),
    "djl_neuronx": ("djl_neuronx", "tnx", "presharded", "bfloat16", "compiled", "compiled"),
}
OF_NXDI = {
    "tensor_parallel_degree": 2,
    "max_rolling_batch_size": 4,
    "rolling_batch_strategy": "continuous_batching",
    "n_positions": [64],
    "context_length_estimate": [32, 64],
    "dtype": "bfloat16",
    "async_execution": False,
    "output_logits": False,
    "logical_nc_config": 1,
}
RECORDED = {
    "huggingface": {},
    "split": {},
    "tnx_presharded": {"tensor_parallel_degree": 2},
    "lmi_compile_only": without("max_rolling_batch_size", "n_positions", "dtype"),
    "lmi_aot": {**COMPILED_FOR, "n_positions": (64,), "context_length_estimate": (64,)},
    "optimum_tnx": {
        **COMPILED_FOR,
        "dtype": "float16",
        "n_positions": (64,),
        "context_length_estimate": (64,),
        "rolling_batch_strategy": "continuous_batching",
        "attention_layout": "BSH",
        "fuse_qkv": True,
    },
    "optimum_nxd": {},
    "nxdi": OF_NXDI,
    "nxdi_beside": OF_NXDI,
    "djl_neuronx": {**COMPILED_FOR, "context_length_estimate": (32, 64)},
}


@pytest.mark.parametrize("name", BUILDERS)
def test_each_format_is_detected_without_flags(tmp_path, name):
    artifact = detect(BUILDERS[name](tmp_path))
    assert facts(artifact) == FACTS[name]
    assert dict(artifact.compiled_for) == RECORDED[name]
    assert artifact.model_type == "llama"
    assert artifact.weights_source is None


def test_every_format_is_built_here():
    assert {one.name for one in formats.FORMATS} == {*BUILDERS, "neff_cache"}


def test_a_name_that_a_format_covers_exists():
    names = {one.name for one in formats.FORMATS}
    assert all(one.over <= names - {one.name} for one in formats.FORMATS)


def test_shards(sharded):
    assert detect(sharded).dtype == "float32"


def test_the_committed_example_agrees_with_the_safetensors_library():
    safe_open = pytest.importorskip("safetensors").safe_open
    header = read_header(EXAMPLE / "model.safetensors")
    with safe_open(EXAMPLE / "model.safetensors", framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        theirs = {name: (one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
    assert {name: (one.dtype, one.shape) for name, one in header.items()} == theirs
    assert detect(EXAMPLE).dtype == torch_name(header["model.norm.weight"].dtype)


def test_types_of_the_safetensors_library_are_known():
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("safetensors.torch")
    names = getattr(library, "_TYPES", None)
    if names is None:
        pytest.skip("this safetensors keeps its table of types elsewhere")
    unknown = set(names) - DTYPES.keys()
    assert not unknown
    assert {torch.empty(0, dtype=names[name]).element_size() * 8 for name in ("BF16", "F64")} == {
        DTYPES["BF16"][0],
        DTYPES["F64"][0],
    }


# What comes first where a folder has several kinds of weights.


def test_safetensors_are_preferred_to_pickle_and_pickle_is_accepted(folder):
    folders.pickled(folder / "pytorch_model.bin")
    assert detect(folder).kind == "safetensors"
    (folder / "model.safetensors").unlink()
    folders.edit_json(folder / "config.json", torch_dtype="float16")
    artifact = detect(folder)
    assert artifact.kind == "pickle"
    assert artifact.dtype == "float16", "a pickle is not opened: config.json tells"


def test_the_type_of_no_weights_is_that_of_the_configuration(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    write_json(folder / "config.json", {"model_type": "own", "torch_dtype": "float16"})
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    assert detect(folder).dtype == "float16"


def test_a_file_of_torch_itself_is_accepted_in_either_layout(folder):
    torch = pytest.importorskip("torch")
    (folder / "model.safetensors").unlink()
    value = {
        "a": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        "b": torch.ones(2, 3).t(),
        "c": torch.zeros(2, dtype=torch.int64),
    }
    for zipped in (True, False):
        torch.save(value, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        assert detect(folder).kind == "pickle"


def test_split_weights_come_before_a_pickle_index_and_after_safetensors(tmp_path):
    path = folders.split(tmp_path)
    write_json(path / "pytorch_model.bin.index.json", {"weight_map": {"x": "gone.bin"}})
    assert detect(path).kind == "split"
    folders.huggingface(path)
    assert facts(detect(path)) == FACTS["huggingface"], "the old container wrote split copies there"


@pytest.mark.parametrize(
    ("name", "cut"),
    [("nxdi", "ranks"), ("lmi_aot", "presharded"), ("tnx_presharded", "presharded")],
)
def test_a_compiled_folder_with_the_checkpoint_beside_has_both(tmp_path, name, cut):
    path = BUILDERS[name](tmp_path)
    shutil.copy(folders.huggingface(tmp_path.parent / "whole") / "model.safetensors", path)
    artifact = detect(path)
    assert [weights.kind for weights in artifact.weights] == [cut, "safetensors"]
    assert artifact.weights_for("cpu", WHOLE).folder == path
    assert artifact.weights_for(artifact.backend, {cut, *WHOLE}).kind == cut


@pytest.mark.parametrize("name", ["tnx_presharded", "lmi_aot", "nxdi"])
def test_cut_weights_alone_cannot_run_on_the_cpu(tmp_path, name):
    artifact = detect(BUILDERS[name](tmp_path))
    with pytest.raises(
        ArtifactError,
        match=rf"cpu backend cannot load .*{name}.*expected whole .*model_loader={artifact.backend}",
    ):
        artifact.weights_for("cpu", WHOLE)


def test_split_weights_can_be_converted_for_the_cpu(tmp_path):
    artifact = detect(folders.split(tmp_path))
    with pytest.raises(ArtifactError, match="Run `djl-neuronx convert`"):
        artifact.weights_for("cpu", WHOLE)


def test_lmi_output_with_split_weights(tmp_path):
    path = folders.lmi_aot(tmp_path)
    for file in (path / "compiled").glob("*.safetensors"):
        file.unlink()
    folders.split(path / "compiled")
    assert facts(detect(path)) == ("lmi_aot", "tnx", "split", None, "compiled", "compiled")


def test_lmi_output_whose_config_was_overwritten_still_tells_what_it_can(tmp_path):
    """As the partition without --skip-copy leaves it."""
    path = folders.lmi_aot(tmp_path)
    folders.edit_json(path / "config.json", neuron=None)
    artifact = detect(path)
    assert facts(artifact) == FACTS["lmi_aot"]
    assert artifact.compiled_for == RECORDED["lmi_compile_only"], "from VERSION and the weights"


def test_a_manifest_over_a_plain_model_adds_graphs_and_backend(folder):
    (folder / "compiled").mkdir()
    (folder / "compiled" / "0123456789abcdef0123.neff").write_bytes(folders.NEFF)
    files = {"config.json": folders.file_entry(folder / "config.json")}
    folders.write_manifest(folder, "huggingface", files, {"fuse_qkv": True})
    expected = ("safetensors", "bfloat16", ".", "compiled")
    assert facts(detect(folder)) == ("djl_neuronx", None, *expected)
    folders.edit_json(folder / "manifest.json", effective_options={"model_loader": "tnx"})
    assert facts(detect(folder)) == ("djl_neuronx", "tnx", *expected)
    with pytest.raises(ArtifactMismatchError, match="fuse_qkv: compiled True, wanted False"):
        detect(folder).check_fit({"fuse_qkv": False})


def test_a_neuron_section_with_whole_weights_and_nothing_compiled_is_a_plain_model(folder):
    folders.edit_json(folder / "config.json", neuron={"num_cores": 2})
    assert detect(folder).format == "huggingface"


@pytest.mark.parametrize("name", BUILDERS)
def test_a_download_has_every_file_of_a_format(tmp_path, name):
    BUILDERS[name](tmp_path)
    assert set(SERVING.choose(file_names(tmp_path))) == file_names(tmp_path)


# NxD Inference's, of every program that uses it.


def test_of_several_compiles_beside_a_model_none_is_chosen(tmp_path):
    artifact = detect(folders.vllm(tmp_path, "0" * 32, "1" * 32))
    assert facts(artifact) == ("nxdi_beside", None, "safetensors", "bfloat16", ".", None)
    assert f"neuron-compiled-artifacts/{'0' * 32}" in artifact.unused
    assert "option.compiled_graph_path" in artifact.unused


def test_what_a_killed_compile_leaves_is_not_counted(tmp_path):
    """vllm-neuron makes the folder first, and the library writes the configuration before the graphs."""
    path = folders.vllm(tmp_path, "0" * 32, "1" * 32)
    (path / "neuron-compiled-artifacts" / ("1" * 32) / "model.pt").unlink()
    assert detect(path).compiled == path / "neuron-compiled-artifacts" / ("0" * 32)
    (path / "neuron-compiled-artifacts" / ("0" * 32) / "model.pt").unlink()
    assert detect(path).format == "huggingface"


def test_the_old_lmi_container_named_no_digest(tmp_path):
    """NEURON_COMPILED_ARTIFACTS was a folder, the model's own or the one of its partition."""
    folders.huggingface(tmp_path)
    folders.nxdi(tmp_path / "neuron-compiled-artifacts")
    artifact = detect(tmp_path)
    assert artifact.compiled == tmp_path / "neuron-compiled-artifacts"
    assert [one.kind for one in artifact.weights] == ["ranks", "safetensors"]
    folders.nxdi(folders.huggingface(tmp_path / "partition"))
    assert detect(tmp_path / "partition").format == "nxdi"


def test_graphs_that_are_named_serve_the_models_own_weights(tmp_path):
    """Those beside the graphs may be of another training."""
    model = folders.huggingface(tmp_path / "model")
    graphs = folders.nxdi(tmp_path / "graphs")
    artifact = with_graphs(detect(model), graphs)
    assert [one.kind for one in artifact.weights] == ["safetensors", "ranks"]
    assert (artifact.path, artifact.compiled, artifact.backend) == (model, graphs, "nxdi")
    assert dict(artifact.compiled_for) == OF_NXDI


@pytest.mark.parametrize("named", [False, True])
def test_graphs_of_another_model_are_refused(tmp_path, named):
    path = folders.huggingface(tmp_path, num_hidden_layers=2, head_dim=None, rope_theta=10000)
    graphs = folders.nxdi(tmp_path / "neuron-compiled-artifacts")
    folders.edit_json(graphs / "neuron_config.json", head_dim=64, rope_theta=10000.0)
    assert detect(path).compiled == graphs
    folders.edit_json(graphs / "neuron_config.json", vocab_size=32000, tie_word_embeddings=True)
    words = (
        r"another model.*tie_word_embeddings True instead of False, vocab_size 32000 instead of 16"
    )
    with pytest.raises(ArtifactError, match=words):
        with_graphs(detect(folders.huggingface(tmp_path / "x")), graphs) if named else detect(path)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OTHERS = {
    "activation": ({"hidden_act": "silu"}, {"hidden_act": "gelu"}, "hidden_act 'gelu' instead of"),
    "biases": ({"attention_bias": False}, {"attention_bias": True}, "attention_bias"),
    "biases of the MLP": ({"mlp_bias": False}, {"mlp_bias": True}, "mlp_bias"),
    "tied": ({}, {"tie_word_embeddings": True}, "tie_word_embeddings"),
    "heads": ({"head_dim": 4}, {"head_dim": 8}, "head_dim"),
    "a head's size that follows": ({"head_dim": None}, {"head_dim": 4}, ""),
    "window": ({"sliding_window": None}, {"sliding_window": 4096}, "sliding_window"),
    "no window": ({"sliding_window": 4096}, {"sliding_window": None}, "sliding_window"),
    "a window that is off": (
        {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False},
        {"model_type": "qwen2", "sliding_window": None, "use_sliding_window": False},
        "",
    ),
    "scaled": ({"rope_scaling": None}, {"rope_scaling": LLAMA3}, "rope_scaling"),
    "not scaled": ({"rope_scaling": LLAMA3}, {"rope_scaling": None}, "rope_scaling"),
    "a factor": ({"rope_scaling": LLAMA3}, {"rope_scaling": {**LLAMA3, "factor": 4}}, "factor"),
    "an old name": (
        {"rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}},
        "",
    ),
    "names of transformers 5": (
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
        "",
    ),
    "what transformers 4 does not read": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 10000.0},
        "rope_theta 10000.0 instead of 500000.0",
    ),
    "experts": (
        {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1},
        "num_experts_per_tok 1 instead of 2, num_local_experts 4 instead of 8",
    ),
    # Qwen3MoeInferenceConfig records the experts' size, and a padded one.
    "sizes that a class rewrites": (
        {"model_type": "qwen3_moe", "intermediate_size": 16, "moe_intermediate_size": 6},
        {"model_type": "qwen3_moe", "intermediate_size": 6, "moe_intermediate_size": 8},
        "",
    ),
    # DeepseekV3InferenceConfig of contrib/models.
    "sizes that contributed code rewrites": (
        {"model_type": "deepseek_v3", "intermediate_size": 16, "head_dim": 4},
        {"model_type": "deepseek_v3", "intermediate_size": 6, "head_dim": 9},
        "",
    ),
}
"""Changes of config.json and of the record, and the words of the error; none for the same model."""


@pytest.mark.parametrize("name", OTHERS)
def test_every_field_that_changes_a_number_is_compared_with_the_record(name):
    config, recorded, words = OTHERS[name]
    found = ", ".join(other_fields({**folders.CONFIG, **recorded}, {**folders.CONFIG, **config}))
    assert words in found
    assert bool(words) == bool(found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": [64]}, r"cannot have written: seq_len is \[64\]"),
        ({"max_length": -1}, "max_length is -1, expected a number of at least 1"),
        ({"batch_size": "many"}, "batch_size is 'many'"),
        ({"context_encoding_buckets": [64, "32"]}, "cannot have written"),
    ],
)
def test_a_record_that_is_none_is_refused(tmp_path, changes, message):
    with pytest.raises(ArtifactError, match=message):
        detect(folders.nxdi(tmp_path, **changes))


def test_a_fused_draft_model_is_not_served(tmp_path):
    """The library would import the classes that the folder names."""
    path = folders.nxdi(tmp_path)
    hostile = {"worker_cls": {"__module__": "os", "__name__": "system"}}
    folders.edit_json(path / "neuron_config.json", fused_spec_config=hostile)
    with pytest.raises(ArtifactError, match="fused draft model"):
        detect(path)


@pytest.mark.parametrize("version", ["0.3.0", "0.4.0"])
def test_optimums_graphs_on_nxd_are_explained(tmp_path, version):
    artifact = detect(folders.optimum_nxd(tmp_path, version))
    assert facts(artifact) == FACTS["optimum_nxd"]
    assert f"what Optimum Neuron {version} compiled in {tmp_path} is not used" in artifact.unused


def test_optimums_cut_weights_are_refused(tmp_path):
    artifact = detect(folders.optimum_cut(tmp_path))
    assert "cut for it" in artifact.unused
    assert (artifact.weights, artifact.weights_source) == ((), "org/model@0a1b")
    with pytest.raises(ArtifactNotFoundError, match=r"without weights.*org/model@0a1b"):
        artifact.weights_for("nxdi", {*WHOLE, *NEURON_BACKENDS["nxdi"].weights})


def optimum_section(batch_size, sequence_length):
    """As `NeuronDecoderModel.get_export_config` of Optimum Neuron 0.0.17 to 0.0.28 writes it."""
    return {
        "task": "text-generation",
        "batch_size": batch_size,
        "num_cores": 2,
        "auto_cast_type": "fp16",
        "sequence_length": sequence_length,
        "compiler_type": "neuronx-cc",
        "compiler_version": folders.COMPILER,
        "checkpoint_id": "org/model",
        "checkpoint_revision": "0a1b",
    }


# Source: Optimum Neuron 0.0.23 to 0.0.28: setup.py (transformers), modeling_decoder.py, the exporters' model_configs.
OPTIMUM = {
    # transformers, model_type, slots, length -> layout, fuse_qkv, strategy, tokens, prompts
    ("4.41.1", "llama", 4, 512): ("BSH", False, "continuous", (512,), (512,)),
    ("4.41.1", "mistral", 4, 512): ("HSB", False, "continuous", (512,), (512,)),
    ("4.41.1", "opt", 4, 64): ("HSB", False, "naive", (64,), (32,)),
    ("4.43.2", "llama", 4, 512): ("BSH", True, "continuous", (512,), (512,)),
    ("4.43.2", "llama", 1, 512): ("BSH", True, "naive", (128, 256, 512), (64, 128, 256)),
    ("4.43.2", "mistral", 1, 200): ("HSB", True, "naive", (128, 200), (64, 100)),
    ("4.43.2", "mixtral", 4, 256): ("HSB", True, "naive", (128, 256), (64, 128)),
    ("4.48.3", "mistral", 2, 512): ("HSB", True, "continuous", (512,), (512,)),
    ("4.48.3", "bloom", 2, 128): ("HSB", True, "naive", (128,), (64,)),
}


@pytest.mark.parametrize(
    ("length", "prompts"), [(2, (2,)), (1, None), (True, None), ("512", None), (512.0, None)]
)
def test_a_length_that_optimum_cannot_have_written_implies_none(tmp_path, length, prompts):
    section = optimum_section(4, length)
    path = folders.optimum_tnx(tmp_path, transformers_version="4.43.2", neuron=section)
    shutil.rmtree(path / "checkpoint")
    assert detect(path).compiled_for.get("context_length_estimate") == prompts


@pytest.mark.parametrize("release", OPTIMUM, ids=lambda release: "-".join(map(str, release)))
def test_what_optimums_release_implies_is_known(tmp_path, release):
    version, kind, batch_size, length = release
    layout, fused, strategy, tokens, prompts = OPTIMUM[release]
    section = optimum_section(batch_size, length)
    path = folders.optimum_tnx(
        tmp_path, model_type=kind, transformers_version=version, neuron=section
    )
    shutil.rmtree(path / "checkpoint")  # as where the model is of the hub
    artifact = detect(path)
    assert (artifact.compiled, artifact.unused) == (path / "compiled", "")
    implied = {
        "attention_layout": layout,
        "fuse_qkv": fused,
        "rolling_batch_strategy": {
            "continuous": "continuous_batching",
            "naive": "naive_rolling_batch",
        }[strategy],
        "n_positions": tokens,
        "context_length_estimate": prompts,
    }
    assert artifact.compiled_for == {
        **COMPILED_FOR,
        "dtype": "float16",
        "max_rolling_batch_size": batch_size,
        **implied,
    }


@pytest.mark.parametrize(
    ("version", "kind", "reason"),
    [
        ("4.48.1", "llama", "its own class (release 0.0.28, by transformers 4.48.1)"),
        ("4.43.2", "gpt2", "no graphs for prompts of a gpt2 (release 0.0.25 to 0.0.27"),
        ("4.41.1", "mixtral", "different ways (release 0.0.23 and 0.0.24"),
        ("4.36.2", "llama", "transformers_version is '4.36.2' in config.json"),
        (None, "opt", "transformers_version is 'None' in config.json"),
        ("9" * 5000 + ".1", "opt", "in config.json, expected 4.41 or later"),
    ],
)
def test_optimums_graphs_that_are_not_found_are_not_used(tmp_path, version, kind, reason):
    path = folders.optimum_tnx(tmp_path, model_type=kind, transformers_version=version)
    shutil.rmtree(path / "checkpoint")
    artifact = detect(path)
    assert (artifact.compiled, artifact.compiled_for) == (None, {})
    assert f"Optimum Neuron compiled in {path} is not used, but compiled again" in artifact.unused
    assert reason in artifact.unused


@pytest.mark.parametrize("version", ["4.43.2", "4.48.1"])
def test_what_is_compiled_anew_is_not_what_optimum_had_compiled(tmp_path, version):
    path = folders.own_output(tmp_path, "optimum_tnx", transformers_version=version)
    artifact = detect(path)
    assert (artifact.format, artifact.unused) == ("djl_neuronx", "")
    assert artifact.compiled == path / "compiled"
    assert artifact.compiled_for == {
        "n_positions": 64,
        "context_length_estimate": (32, 64),
        "compiler_version": folders.COMPILER,
    }


def test_optimums_own_library_gives_weights_and_no_graphs(tmp_path):
    artifact = detect(folders.optimum_hlo(tmp_path))
    assert facts(artifact) == ("optimum_tnx", None, "safetensors", "bfloat16", "checkpoint", None)
    assert artifact.compiled_for == {}
    shutil.rmtree(artifact.path / "checkpoint")
    folders.split(artifact.path / "checkpoint")
    assert detect(artifact.path).backend == "tnx", "which alone reads them"


@pytest.mark.parametrize("name", ["optimum_tnx", "optimum_nxd"])
def test_optimum_without_weights_tells_where_they_are(tmp_path, name):
    path = BUILDERS[name](tmp_path)
    shutil.rmtree(path / "checkpoint")
    artifact = detect(path)
    assert (artifact.weights, artifact.weights_source) == ((), "org/model@0a1b")
    with pytest.raises(ArtifactNotFoundError, match="took them from org/model@0a1b"):
        artifact.weights_for("tnx", WHOLE)


def test_nxdi_without_weights_tells_where_they_were(tmp_path):
    path = folders.nxdi(tmp_path)
    shutil.rmtree(path / "weights")
    with pytest.raises(
        ArtifactNotFoundError, match=r"weights is missing.*option\.compiled_graph_path"
    ):
        detect(path)
    recorded = json.loads((path / "neuron_config.json").read_text())
    recorded["neuron_config"]["save_sharded_checkpoint"] = False
    write_json(path / "neuron_config.json", recorded)
    artifact = detect(path)
    assert (artifact.weights, artifact.weights_source) == ((), "/models/original")
    shutil.copy(folders.huggingface(tmp_path.parent / "whole") / "model.safetensors", path)
    assert facts(detect(path)) == ("nxdi", "nxdi", "safetensors", "bfloat16", ".", ".")


# What was compiled against what is wanted.


def test_settings_that_fit_or_are_recorded_nowhere_pass(tmp_path):
    artifact = detect(folders.lmi_aot(tmp_path))
    artifact.check_fit({**RECORDED["lmi_aot"], "fuse_qkv": True})
    artifact.check_fit({})


def test_a_mismatch_names_each_key_with_both_values(tmp_path):
    artifact = detect(folders.lmi_aot(tmp_path))
    with pytest.raises(ArtifactMismatchError) as caught:
        artifact.check_fit({**COMPILED_FOR, "tensor_parallel_degree": 8, "n_positions": 128})
    assert caught.value.differences == {
        "tensor_parallel_degree": (2, 8),
        "n_positions": ((64,), 128),
    }
    assert str(tmp_path) in str(caught.value)


# Folders of graphs.


def test_a_compile_cache_is_no_model_and_says_what_it_is_for(tmp_path):
    path = folders.neff_cache(tmp_path)
    with pytest.raises(UnknownFormatError, match=r"compile cache.*NEURON_COMPILE_CACHE_URL"):
        detect(path)
    assert not graphs_in(path)


def test_a_cache_may_hold_unfinished_modules(tmp_path):
    path = folders.neff_cache(tmp_path)
    (path / f"neuronxcc-{folders.COMPILER}" / "MODULE_unfinished").mkdir()
    assert not graphs_in(path)


def test_a_jumpstart_cache_is_no_model_either(tmp_path):
    folders.neff_cache(tmp_path / "PRE_COMPILED_NEURON_GRAPH_INFER")
    with pytest.raises(UnknownFormatError, match=r"compile cache.*NEURON_COMPILE_CACHE_URL"):
        detect(tmp_path)


def test_saved_graphs(tmp_path):
    assert graphs_in(folders.presharded(tmp_path / "tnx")) == "tnx"
    assert graphs_in(folders.nxdi(tmp_path / "nxdi")) == "nxdi"


def test_a_cache_with_saved_graphs_beside_is_a_cache(tmp_path):
    assert not graphs_in(folders.neff_cache(folders.presharded(tmp_path)))


def test_a_model_with_a_cache_beside_is_a_model(folder):
    folders.neff_cache(folder)
    assert detect(folder).format == "huggingface"


@pytest.mark.parametrize("make", [lambda path: None, folders.huggingface, Path.touch])
def test_no_folder_of_graphs(tmp_path, make):
    make(tmp_path / "graphs")
    assert not graphs_in(tmp_path / "graphs")


# Links.


@pytest.mark.parametrize("shared", [False, True])
def test_the_hubs_cache_is_followed(folder, tmp_path, shared):
    """snapshots/<revision>/* are links to ../../blobs/*, which may be links to a store of all models."""
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for i, file in enumerate(folder.iterdir()):
        blob = repository / "blobs" / f"{i:040x}"
        shutil.move(file, blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
        if shared:
            (tmp_path / "blobs" / "0a").mkdir(parents=True, exist_ok=True)
            blob.rename(tmp_path / "blobs" / "0a" / f"{i:064x}")
            blob.symlink_to(f"../../blobs/0a/{i:064x}")
    assert detect(snapshot).dtype == "bfloat16"
    (tmp_path / "named").symlink_to(snapshot)
    assert detect(tmp_path / "named").dtype == "bfloat16"
    shutil.rmtree(repository / "blobs")
    with pytest.raises(ArtifactNotFoundError, match="is a link to a file that is gone"):
        detect(snapshot)


def test_links_inside_the_folder_and_to_the_folder_are_followed(folder, tmp_path):
    (folder / "..data").mkdir()
    shutil.move(folder / "model.safetensors", folder / "..data")
    (folder / "model.safetensors").symlink_to("..data/model.safetensors")
    (tmp_path / "link").symlink_to(folder)
    assert detect(tmp_path / "link").dtype == "bfloat16"


def test_a_read_me_may_be_a_link_to_anywhere(folder):
    (folder / "README.md").symlink_to("/etc/passwd")
    assert detect(folder).format == "huggingface"


# eos_token_id.


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [2, 5]}, {"eos_token_id": 9}, {2, 5}),
        ({"eos_token_id": 0}, {"eos_token_id": 9}, {0}),
        ({"eos_token_id": None}, {"eos_token_id": 9}, {9}),
        (None, {"eos_token_id": [7, 8]}, {7, 8}),
        (None, {"text_config": {"eos_token_id": 3}}, {3}),
        ({}, {}, set()),
    ],
)
def test_eos_ids(folder, generation, config, expected):
    (folder / "generation_config.json").unlink()
    write_json(folder / "config.json", {"model_type": "x", **config})
    if generation is not None:
        write_json(folder / "generation_config.json", generation)
    assert detect(folder).eos_ids == expected


@pytest.mark.parametrize("wrong", ["</s>", [2, "5"], -1, True])
def test_an_eos_that_is_no_id_is_an_error(folder, wrong):
    (folder / "generation_config.json").unlink()
    write_json(folder / "config.json", {"model_type": "x", "eos_token_id": wrong})
    with pytest.raises(ArtifactError, match="eos_token_id is"):
        detect(folder)


@pytest.mark.parametrize("most", [-1, 0, "many", 100, 1e3, None])
def test_most_tokens_that_transformers_refuses_are_an_error(folder, most):
    """The oracle loads the file as a start does."""
    generation = pytest.importorskip("transformers").GenerationConfig
    write_json(folder / "generation_config.json", {"max_new_tokens": most})
    try:
        generation.from_pretrained(folder)
    except (TypeError, ValueError):
        with pytest.raises(
            ArtifactError, match=f"max_new_tokens is {most!r} in .*generation_config"
        ):
            detect(folder)
    else:
        assert detect(folder).generation == {"max_new_tokens": most}


@pytest.mark.parametrize("nested", [False, True])
def test_eos_ids_beyond_the_vocabulary_are_dropped_and_told(folder, caplog, nested):
    config = {"vocab_size": 10, "eos_token_id": [9, 10**30]}
    whole = {"model_type": "x", **({"text_config": config} if nested else config)}
    write_json(folder / "config.json", whole)
    write_json(folder / "generation_config.json", {"eos_token_id": 10})
    artifact = detect(folder)
    assert artifact.eos_ids == artifact.eos_ids == {9}, "config.json's, as the other has none left"
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "eos_ids_unused ids=[10] vocab_size=10",
        f"eos_ids_unused ids=[{10**30}] vocab_size=10",
    ]


@pytest.mark.parametrize("written", ["LlamaForCausalLM", ["A", 5], 5, None])
def test_architectures_of_any_type(folder, written):
    write_json(folder / "config.json", {**CONFIG, "architectures": written})
    assert detect(folder).config["architectures"] == written


# Which tensors a model must have.


@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "gpt2",
        "gpt_bigcode",
        "gptj",
        "gpt_neox",
        "opt",
        "bloom",
        "gpt_neo",
        "qwen3",
        "gemma",
        "gemma2",
        "phi",
        "phi3",
        "granite",
    ],
)
def test_no_tensor_is_asked_of_a_model_that_transformers_does_not_save(tmp_path, model_type):
    """Against the library's own checkpoints of each family that is known in detail."""
    pytest.importorskip("torch")
    from tests.doubles.tiny_models import save_tiny_model

    settings = {"gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}}
    save_tiny_model(model_type, tmp_path, **settings.get(model_type, {}))
    assert detect(tmp_path).model_type == model_type
    names = read_header(tmp_path / "model.safetensors").keys()
    config = json.loads((tmp_path / "config.json").read_text())
    for lost in (name for name in names if re.search(r"(layers|h)\.1\.", name)):
        with pytest.raises(ArtifactError, match=rf"lack 1 tensors .*: {re.escape(lost)}\."):
            check_tensors(names - {lost}, config, tmp_path)


@pytest.mark.parametrize(
    ("config", "stack"),
    [
        ({"model_type": "llama", "num_hidden_layers": 2}, "model.layers"),
        ({"model_type": "gpt2", "n_layer": 2}, "h"),
        ({"model_type": "qwen3_moe", "num_hidden_layers": 2}, "model.layers"),
    ],
)
def test_layers_that_config_json_does_not_have_are_refused(tmp_path, config, stack):
    embedding = "wte.weight" if config["model_type"] == "gpt2" else "model.embed_tokens.weight"
    names = {embedding, *(f"{stack}.{i}.mlp.weight" for i in range(3))}
    with pytest.raises(ArtifactError, match=rf"1 layers more than the 2 .*: {stack}\.2\.\*\."):
        check_tensors(names, config, tmp_path)
    # Computed tensors are no layer.
    check_tensors(names - {f"{stack}.2.mlp.weight"} | {f"{stack}.2.attn.bias"}, config, tmp_path)
    # DeepSeek's layers that draft tokens follow the model's own.
    check_tensors(names, {**config, "num_nextn_predict_layers": 1}, tmp_path)


def test_a_vision_tower_may_have_more_layers_than_the_language_model(tmp_path):
    config = {"model_type": "qwen2_vl", "num_hidden_layers": 2}
    tower = [f"visual.blocks.{i}.{name}.weight" for i in range(4) for name in ("qkv", "proj")]
    check_tensors([*tower, *(f"model.layers.{i}.mlp.weight" for i in range(2))], config, tmp_path)


def test_a_checkpoint_with_more_layers_than_its_configuration_is_refused(folder):
    write_json(folder / "config.json", {**CONFIG, "num_hidden_layers": folders.LAYERS - 1})
    with pytest.raises(ArtifactError, match=r"1 layers more than the 1 of config\.json"):
        detect(folder)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gpt_neo", "mpt"])
def test_the_number_of_layers_has_the_name_that_its_family_gives_it(model_type):
    config = pytest.importorskip("transformers").AutoConfig.for_model(model_type)
    assert num_layers(config.to_dict()) == config.num_hidden_layers
    # Around a language model the outer number is another one, as of a vision tower.
    whole = {"text_config": config.to_dict(), "num_layers": 99}
    assert num_layers(whole) == config.num_hidden_layers


@pytest.mark.parametrize("dtype", [["float16"], {"default": "float16"}, 16])
def test_a_dtype_that_is_no_name_is_none(tmp_path, dtype):
    path = folders.split(tmp_path)
    assert detect(path).dtype == "float16"
    folders.edit_json(path / "config.json", torch_dtype=dtype)
    assert detect(path).dtype is None


def test_the_dtype_is_the_one_of_most_bytes(folder):
    names = folders.tensor_names()
    tensors = {name: ("BF16", [500]) for name in names[:1]} | {n: ("F32", [2]) for n in names[1:]}
    folders.safetensors(folder / "model.safetensors", tensors)
    assert detect(folder).dtype == "bfloat16"


def test_pickles_with_an_index_have_all_tensors_of_the_configuration(tmp_path):
    path = folders.huggingface(tmp_path)
    (path / "model.safetensors").unlink()
    folders.pickled(path / "one.bin")
    names = folders.tensor_names()
    write_json(
        path / "pytorch_model.bin.index.json", {"weight_map": dict.fromkeys(names, "one.bin")}
    )
    assert detect(path).kind == "pickle"
    some = dict.fromkeys(names[:-1], "one.bin")
    write_json(path / "pytorch_model.bin.index.json", {"weight_map": some})
    with pytest.raises(ArtifactError, match=f"lack 1 tensors .*: {re.escape(names[-1])}"):
        detect(path)


def test_layers_of_an_unknown_family_may_differ_but_not_be_missing(folder):
    folders.edit_json(folder / "config.json", model_type="new_family")
    names = [
        name for name in folders.tensor_names() if not name.endswith("layers.1.mlp.up_proj.weight")
    ]
    folders.safetensors(folder / "model.safetensors", {name: ("F32", [2]) for name in names})
    assert detect(folder).model_type == "new_family"
    folders.edit_json(folder / "config.json", num_hidden_layers=3)
    with pytest.raises(ArtifactError, match=r"lack 1 tensors .*: model\.layers\.2\.\*"):
        detect(folder)


def test_tied_quantised_and_headless_models_lack_what_they_may(folder):
    names = [name for name in folders.tensor_names() if name != "lm_head.weight"]
    tensors = {name: ("F32", [2]) for name in names}
    folders.safetensors(folder / "model.safetensors", tensors)
    for change in ({"tie_word_embeddings": True}, {"architectures": ["LlamaModel"]}):
        folders.edit_json(folder / "config.json", **{**CONFIG, **change})
        assert detect(folder).dtype == "float32"
    del tensors["model.layers.1.mlp.up_proj.weight"]
    folders.safetensors(
        folder / "model.safetensors",
        {
            **tensors,
            "lm_head.weight": ("F32", [2]),
            "model.layers.1.mlp.up_proj.qweight": ("U8", [900]),
        },
    )
    folders.edit_json(folder / "config.json", **CONFIG, quantization_config={"bits": 4})
    assert detect(folder).dtype == "uint8"


# Nothing fits, or not everything is there.


def test_a_missing_folder_names_path_origin_and_fix(tmp_path):
    with pytest.raises(
        ArtifactNotFoundError, match=r"/gone \(from OPTION_MODEL_ID\) does not exist.*[Cc]orrect"
    ):
        detect(tmp_path / "gone", origin="OPTION_MODEL_ID")
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactNotFoundError, match="is a file; expected a folder"):
        detect(tmp_path / "file")


def test_an_unknown_format_lists_what_was_sought_and_found(tmp_path):
    with pytest.raises(UnknownFormatError, match=r"looked for config\.json.*found nothing"):
        detect(tmp_path)
    for i in range(12):
        (tmp_path / f"file{i:02}").touch()
    with pytest.raises(UnknownFormatError, match=r"found file00, .*file07 and 4 more"):
        detect(tmp_path)


def test_two_formats_that_fit_are_an_error_that_lists_both(folder, monkeypatch):
    class Twin(formats.HuggingFace):
        name = "twin"
        looks_for = "config.json too"

    monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, Twin()))
    with pytest.raises(
        ArtifactError, match=r"huggingface \(config.*\) and twin \(config\.json too\)"
    ):
        detect(folder)


def test_missing_weights_list_what_was_expected_and_found(folder):
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    with pytest.raises(
        ArtifactNotFoundError,
        match=r"expected model\.safetensors or .*found config\.json, .*weights\.",
    ):
        detect(folder)


# Safetensors headers.


@pytest.mark.parametrize("kept", [3, 8, 40, -1])
def test_a_truncated_file_names_both_sizes(sharded, kept):
    path = sharded / "two.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    with pytest.raises(
        ArtifactError, match=rf"two\.safetensors is cut off.* the file has {len(whole[:kept])}\."
    ) as caught:
        detect(sharded)
    if kept == -1:
        assert f"requires {len(whole)} bytes" in str(caught.value)


def test_a_file_with_bytes_to_spare_is_damaged_too(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ArtifactError, match="cut off or damaged"):
        detect(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32"}}',
        b'{"a": {"dtype": "F32", "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
        b"\xff\xfe\xff",
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e999]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4.0]}}',
        b'{"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, "4"]}}',
        b'{"a": {"dtype": 5, "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-8, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, -8]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, '
        b'"b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, '
        b'"b": {"dtype": "F32", "shape": [2], "data_offsets": [40, 0]}}',
    ],
)
def test_a_malformed_header(folder, header):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ArtifactError, match="malformed safetensors header"):
        detect(folder)


@pytest.mark.parametrize("shape", ["[3]", "[-2]", "[-1, -2]", "[2, 2]"])
def test_a_shape_that_does_not_fit_its_bytes(folder, shape):
    header = b'{"a": {"dtype": "F32", "shape": %s, "data_offsets": [0, 8]}}' % shape.encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ArtifactError, match=r"gives a 8 bytes"):
        detect(folder)


def test_a_huge_header_length_is_not_read(folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + bytes(100))
    with pytest.raises(ArtifactError, match="the file has 108"):
        detect(folder)


@pytest.mark.parametrize("shard", ["../config.json", "/etc/passwd", "sub/one.safetensors", 3, ""])
def test_an_index_names_only_files_beside_it(sharded, shard):
    write_json(sharded / "model.safetensors.index.json", {"weight_map": {"a": shard}})
    with pytest.raises(ArtifactError, match="expected the name of a file beside it"):
        detect(sharded)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {}}])
def test_an_index_without_a_map(sharded, index):
    write_json(sharded / "model.safetensors.index.json", index)
    with pytest.raises(ArtifactError, match="no weight_map"):
        detect(sharded)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff{}", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[]", "holds a JSON list; expected an object"),
        (b"{}", "names no model_type"),
        (b'{"model_type": 3}', "names no model_type"),
    ],
)
def test_a_malformed_config(folder, text, message):
    (folder / "config.json").write_bytes(text)
    with pytest.raises(ArtifactError, match=message):
        detect(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_what_cannot_be_read_is_an_access_error(folder, name):
    """A folder in a file's place: permissions do not stop the user that many containers run as."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    with pytest.raises(ArtifactAccessError, match=r"(Is a directory|is a folder)"):
        detect(folder)

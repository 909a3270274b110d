"""Synthetic model folders in every format, a few kilobytes each, written from the formats' descriptions.

Nothing of torch or of the Neuron libraries is needed: what is not read by `detect` is zeros.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle
import random
import shutil
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "U8": 1, "F8_E4M3": 1, "U32": 4, "C64": 8}
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_attention_heads": 1,
    "max_position_embeddings": 64,
    "vocab_size": 16,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LAYERS = CONFIG["num_hidden_layers"]
COMPILER = "2.21.18209.0+043b1bf7"
TP = 2
NEFF = b"\x7fNEFF: not looked into"
IN_LAYER = (
    "input_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.up_proj.weight",
)


def tensor_names() -> list[str]:
    """Of the whole model."""
    layers = [f"model.layers.{i}.{name}" for i in range(LAYERS) for name in IN_LAYER]
    return ["model.embed_tokens.weight", *layers, "model.norm.weight", "lm_head.weight"]


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """Write a file by the format's description; name → (dtype, shape)."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(end))


def tensors(seed, num_bytes):
    """A safetensors file of that size with one tensor."""
    length = num_bytes - 128
    entry = {"dtype": "U8", "shape": [length], "data_offsets": [0, length]}
    header = json.dumps({"w": entry}).ljust(120).encode()
    return len(header).to_bytes(8, "little") + header + random.Random(seed).randbytes(length)


def pickled(path: Path, value: object | None = None) -> None:
    """An archive as torch.save writes it, without the tensors' bytes."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(
            "archive/data.pkl", pickle.dumps(OrderedDict() if value is None else value, protocol=2)
        )
        archive.writestr("archive/version", "3\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(stream.getvalue())


def torchscript(path: Path) -> None:
    """An archive as torch.jit.save writes it, without code."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/version", "3\n")


def huggingface(path: Path, **config: object) -> Path:
    """A whole model in one file, with the files that come beside it."""
    write_json(path / "config.json", {**CONFIG, **config})
    write_json(path / "generation_config.json", {"eos_token_id": [2, 3]})
    write_json(path / "tokenizer_config.json", {})
    safetensors(path / "model.safetensors", {name: ("BF16", [4, 4]) for name in tensor_names()})
    return path


def sharded(path: Path) -> Path:
    """A whole model in two files and an index."""
    huggingface(path)
    (path / "model.safetensors").unlink()
    halves = {"one.safetensors": tensor_names()[:5], "two.safetensors": tensor_names()[5:]}
    for shard, names in halves.items():
        safetensors(path / shard, {name: ("F32", [3]) for name in names})
    places = {name: shard for shard, names in halves.items() for name in names}
    write_json(path / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    return path


def split(path: Path) -> Path:
    """As transformers-neuronx's `save_pretrained_split` lays it out."""
    write_json(path / "config.json", {**CONFIG, "torch_dtype": "float16"})
    write_json(path / "tokenizer_config.json", {})
    _split_weights(path)
    return path


def _split_weights(path: Path) -> None:
    files = {name: f"p{i}.{name}" for i, name in enumerate(tensor_names())}
    write_json(path / "pytorch_model.bin" / "key_to_filename.json", files)
    for name in files.values():
        pickled(path / "pytorch_model.bin" / name)


def presharded(path: Path, *, tp: int = TP) -> Path:
    """As transformers-neuronx's `model.save(path, sharded_weights=True)` lays it out."""
    write_json(path / "config.json", {**CONFIG, "is_presharded_checkpoint": True})
    names = ["DecoderLMHead", *(f"decoder_layer_{i}" for i in range(LAYERS))]
    for name in names:
        safetensors(
            path / f"{name}.safetensors",
            {f"attn_q_weight*{rank}": ("BF16", [4, 2]) for rank in range(tp)}
            | {f"extra_parameter0*{rank}": ("BF16", [0]) for rank in range(tp)},
        )
    for digest in ("0123456789abcdef0123", "456789abcdef01234567"):
        (path / f"{digest}.neff").write_bytes(NEFF)
    return path


def compile_only(path: Path) -> Path:
    """The old LMI container's partition_schema=compile_only."""
    presharded(path)
    (path / "VERSION").write_text(f"{COMPILER}\n", encoding="utf-8")
    return path


def lmi_aot(path: Path) -> Path:
    """The old LMI container's partition."""
    section = {
        "auto_cast_type": "bf16",
        "batch_size": 4,
        "checkpoint_id": None,
        "checkpoint_revision": None,
        "compiler_type": "neuronx-cc",
        "compiler_version": COMPILER,
        "num_cores": TP,
        "sequence_length": 64,
    }
    write_json(path / "config.json", {**CONFIG, "neuron": section})
    write_json(path / "tokenizer_config.json", {})
    (path / "serving.properties").write_text("option.rolling_batch=auto\n", encoding="utf-8")
    compile_only(path / "compiled")
    return path


def optimum_tnx(path: Path, **config: object) -> Path:
    """Optimum Neuron 0.0.25 to 0.0.27, of a folder with split weights; `config` changes config.json."""
    section = {
        "task": "text-generation",
        "batch_size": 4,
        "num_cores": TP,
        "auto_cast_type": "fp16",
        "sequence_length": 64,
        "compiler_type": "neuronx-cc",
        "compiler_version": COMPILER,
        "checkpoint_id": "org/model",
        "checkpoint_revision": "0a1b",
    }
    written = {**CONFIG, "transformers_version": "4.43.2", "neuron": section}
    write_json(path / "config.json", {**written, **config})
    split(path / "checkpoint")
    (path / "compiled").mkdir()
    (path / "compiled" / "0123456789abcdef0123.neff").write_bytes(NEFF)
    return path


def optimum_hlo(path: Path) -> Path:
    """Optimum Neuron 0.1 and 0.2: its own copy of transformers-neuronx."""
    write_json(path / "config.json", CONFIG)
    recorded = {"_serialized_key": "HloNeuronConfig", "tp_degree": TP, "batch_size": 4}
    write_json(path / "neuron_config.json", {**recorded, "neuronxcc_version": COMPILER})
    huggingface(path / "checkpoint")
    (path / "compiled").mkdir()
    (path / "compiled" / "0123456789abcdef0123.neff").write_bytes(NEFF)
    return path


def optimum_nxd(path: Path, version: str = "0.4.0") -> Path:
    """Optimum Neuron 0.3 and 0.4, with the checkpoint's files copied; by its `NxDNeuronConfig` and `save`."""
    write_json(path / "config.json", CONFIG)
    recorded = {
        "_serialized_key": "NxDNeuronConfig",
        "optimum_neuron_version": version,
        "neuronxcc_version": COMPILER,
        **dict.fromkeys(("batch_size", "max_batch_size"), 4),
        **dict.fromkeys(("sequence_length", "n_active_tokens", "max_context_length"), 64),
        **dict.fromkeys(("pp_degree", "ep_degree"), 1),
        "tp_degree": TP,
        "torch_dtype": "bfloat16",
        "continuous_batching": True,
        "on_device_sampling": True,
        "max_topk": 256,
        "fused_qkv": True,
        "glu_mlp": True,
        "output_logits": False,
        "enable_bucketing": False,
        "speculation_length": 0,
        "capacity_factor": None,
        "target": None,
        "start_rank_id": 0,
        "local_ranks_size": TP,
        "checkpoint_id": "org/model",
        "checkpoint_revision": "0a1b",
    }
    if version < "0.4":
        recorded |= {"padding_side": "right", "logical_nc_config": 1, "num_cores_per_group": 1}
    write_json(path / "neuron_config.json", recorded)
    torchscript(path / "model.pt")
    huggingface(path / "checkpoint")
    return path


def optimum_cut(path: Path) -> Path:
    """The same with the weights cut for each rank, as `save(path, weight_path)` leaves them."""
    shutil.rmtree(optimum_nxd(path) / "checkpoint")
    _ranks(path / "checkpoint")
    return path


NXDI_RECORD = json.loads((Path(__file__).parent / "nxdi_neuron_config.json").read_text("utf-8"))
"""The `NeuronConfig` as NxD Inference 0.9.0 writes it for `NXDI_KEYWORDS`."""
NXDI_KEYWORDS = {
    "tp_degree": TP,
    "batch_size": 4,
    "ctx_batch_size": 1,
    "is_continuous_batching": True,
    "seq_len": 64,
    "torch_dtype": "bfloat16",
    "enable_bucketing": True,
    "context_encoding_buckets": [32, 64],
    "save_sharded_checkpoint": True,
}


def nxdi(path: Path, **keywords: object) -> Path:
    """NxD Inference with save_sharded_checkpoint; `keywords` change its record."""
    recorded = {**NXDI_RECORD, **keywords}
    whole = {**CONFIG, "neuron_config": recorded, "_name_or_path": "/models/original"}
    write_json(path / "neuron_config.json", whole)
    torchscript(path / "model.pt")
    _ranks(path)
    return path


def vllm(path: Path, *digests: str, **keywords: object) -> Path:
    """A checkpoint that vllm-neuron has served: graphs without weights, for each configuration by its digest."""
    huggingface(path)
    for digest in digests or ("0cc175b9c0f1b6a831c399e269772661",):
        inner = nxdi(
            path / "neuron-compiled-artifacts" / digest, save_sharded_checkpoint=False, **keywords
        )
        shutil.rmtree(inner / "weights")
    return path


def _ranks(path: Path) -> None:
    for rank in range(TP):
        name = f"tp{rank}_sharded_checkpoint.safetensors"
        safetensors(path / "weights" / name, {"lm_head.weight": ("BF16", [8, 4])})


def neff_cache(path: Path) -> Path:
    """A compile cache as NEURON_COMPILE_CACHE_URL names it."""
    module = path / f"neuronxcc-{COMPILER}" / "MODULE_0123456789abcdef0123+4567abcd"
    write_json(module / "compile_flags.json", [])
    (module / "model.neff").write_bytes(NEFF)
    return path


def own_output(path: Path, layout: str = "lmi_aot", **config: object) -> Path:
    """The output of this package's compilation, here over the layout of another program."""
    BUILDERS[layout](path, **config)
    files = {
        file.relative_to(path).as_posix(): file_entry(file)
        for file in path.rglob("*")
        if file.is_file()
    }
    write_manifest(path, layout, files, {"n_positions": 64, "context_length_estimate": [32, 64]})
    return path


def file_entry(file: Path) -> dict[str, object]:
    content = file.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def write_manifest(
    path: Path, layout: str, files: Mapping[str, object], graph_options: Mapping[str, object]
) -> None:
    facts = {
        "graph_options": graph_options,
        "artifact_digest": "sampled:aa",
        "compiler": "neuronx-cc",
        "compiler_version": COMPILER,
        "target": "inf2",
    }
    manifest = {"format": "djl_python_neuronx", "version": 1, "layout": layout, "files": files}
    manifest |= {"facts": facts, "effective_options": {}, "packages": {}, "created": "2026-11-22"}
    write_json(path / "manifest.json", manifest)


BUILDERS = {
    "huggingface": huggingface,
    "split": split,
    "tnx_presharded": presharded,
    "lmi_compile_only": compile_only,
    "lmi_aot": lmi_aot,
    "optimum_tnx": optimum_tnx,
    "optimum_nxd": optimum_nxd,
    "nxdi": nxdi,
    "nxdi_beside": vllm,
    "djl_neuronx": own_output,
}
"""Name of the format → its builder, for each that can be served."""


def edit_json(path: Path, **changes: object) -> None:
    """Set keys of a JSON file; None deletes."""
    value = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    write_json(path, {key: one for key, one in value.items() if one is not None})


def lfs_pointer(path: Path) -> None:
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")

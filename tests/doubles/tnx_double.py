"""A stand-in for transformers-neuronx where there is no copy of it: the names, shapes and rules of the real one.

`test_tnx_double.py` compares the signatures with the real library wherever that is installed. Logits are `toy_logits`
of every token that a row attends to, so that a row or position mixed up gives other tokens.
"""

from __future__ import annotations

import enum
import json
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.doubles.toy_backend import toy_logits

NEFF = "0123456789abcdef0123.neff"
CALLS: dict[str, dict[str, object]] = {}
"""Methods that were called beside the constructors, in order, with their arguments by name."""


class GQA(enum.Enum):
    SHARD_OVER_HEADS = "shard-over-heads"
    REPLICATED_HEADS = "replicated-heads"


class QuantizationConfig:
    def __init__(self, quant_dtype="s8", dequant_dtype="f16", quantize_method="vector_dynamic",
                 quantize_attn=True, no_quantize_list=()):  # fmt: skip
        self.quant_dtype = quant_dtype


class KVCacheQuantizationConfig:
    def __init__(self, quant_dtype="s8", dequant_dtype="bf16", quantize_method="direct_cast"):
        self.quant_dtype = quant_dtype


class ContinuousBatchingConfig:
    def __init__(self, **kwargs):
        self.batch_size_for_shared_caches = kwargs.pop("batch_size_for_shared_caches")
        self.max_model_len = kwargs.pop("max_model_len", None)
        paged = kwargs.pop("optimized_paged_attention", False)
        self.enable_chunked_prefill = kwargs.pop("enable_chunked_prefill", False)
        assert not kwargs
        assert paged or not self.enable_chunked_prefill
        self.block_size = self.num_blocks = None

    def init_cache_engine(self, block_size, num_blocks):
        self.block_size, self.num_blocks = block_size, num_blocks
        CALLS["init_cache_engine"] = {"block_size": block_size, "num_blocks": num_blocks}


class GenerationConfig:
    def __init__(
        self,
        *,
        max_length=None,
        do_sample=False,
        top_k=50,
        top_p=1.0,
        top_p_min_tokens=1,
        global_top_k=None,
        eos_token_id=None,
        temperature=1.0,
        dynamic=False,
        deterministic=False,
        per_batch_line=False,
    ):
        self.top_k, self.dynamic, self.per_batch_line = top_k, dynamic, per_batch_line


class NeuronConfig:
    def __init__(self, *, continuous_batching=None, cache_layout="SBH", fuse_qkv=False, group_query_attention=None,
                 on_device_generation=None, quant=None, kv_cache_quant=None, shard_over_sequence=False,
                 compilation_worker_count=None, **kwargs):  # fmt: skip
        assert not kwargs, f"Unexpected keyword arguments: {kwargs}"
        self.continuous_batching = continuous_batching
        self.on_device_generation = on_device_generation
        self.compilation_worker_count = compilation_worker_count
        self.bsh_cache_layout = cache_layout == "BSH"
        self.group_query_attention = group_query_attention


class Model:
    """A row of the cache is a row of token ids; -1 is what was never written."""

    made: ClassVar[list[Model]] = []
    continuous_batching = True

    @classmethod
    def from_pretrained(cls, pretrained_model_path, *model_args, **kwargs):
        config = json.loads((Path(pretrained_model_path) / "config.json").read_text())
        return cls(types.SimpleNamespace(**config), *model_args, **kwargs)

    def _begin(self, config, n_positions, batch_size, context_length_estimate, neuron_config, amp):
        self.amp = amp
        self.config, self.neuron_config = config, neuron_config or NeuronConfig()
        lengths = [n_positions] if isinstance(n_positions, int) else sorted(n_positions)
        self.token_buckets, self.context_buckets = lengths, context_length_estimate or []
        self.batch_size, self.ready, self.loaded_from = batch_size, False, None
        self.cache = np.full((batch_size, lengths[-1]), -1, np.int64)
        self.configs: list[GenerationConfig] = []
        self.attn_v_cache = {batch_size: [torch.zeros(lengths[-1], batch_size, 1, 2)]}
        self.attn_k_cache = {batch_size: [torch.zeros(lengths[-1], batch_size, 1, 2)]}
        self.decoder_lm_head, self.layers = self, [self]
        self.decoder_lm_head_for_speculation: dict[tuple[int, int], Any] = {}
        shared = self.neuron_config.continuous_batching
        assert not shared or (
            self.continuous_batching and shared.batch_size_for_shared_caches == batch_size
        )
        self.chunked = bool(shared and shared.enable_chunked_prefill)
        if self.chunked:
            assert self.neuron_config.bsh_cache_layout
            assert shared.block_size < shared.max_model_len
            self.block_buckets = [length * batch_size // shared.block_size for length in lengths]
            assert self.block_buckets[-1] <= shared.num_blocks
            assert min(self.context_buckets) >= batch_size  # the library cuts the rows off there
            self.cache = np.full((shared.num_blocks, shared.block_size), -1, np.int64)
        self.made.append(self)

    def enable_speculative_decoder(self, speculation_length, batch_sizes=None, token_tree=None):
        assert not self.ready
        arguments = {"speculation_length": speculation_length, "batch_sizes": batch_sizes}
        CALLS["enable_speculative_decoder"] = arguments
        # Dimensions that are cut to a graph's columns: tokens, cache ids, start ids, last token ids ...
        head = types.SimpleNamespace(inputs_sdim=(1, 1, None, 0, None))
        self.decoder_lm_head_for_speculation[speculation_length, self.batch_size] = head

    def save(self, directory, sharded_weights=False):
        assert self.ready
        (Path(directory) / NEFF).write_text(self._programs())

    def load(self, directory):
        self.loaded_from = Path(directory)

    def to_neuron(self):
        CALLS["to_neuron"] = {}
        if self.loaded_from and (self.loaded_from / NEFF).read_text() != self._programs():
            raise FileNotFoundError(
                "Could not find a matching NEFF for your HLO in this directory."
            )
        self.ready = True

    def _programs(self):
        return repr((self.token_buckets, self.context_buckets))

    def reset(self):
        self.cache[:] = -1

    def update_generation_config(self, generation_config):
        assert (
            generation_config.per_batch_line
            == self.neuron_config.on_device_generation.per_batch_line
        )
        self.configs.append(generation_config)

    def __call__(self, input_ids, cache_ids=None, start_ids=None, **kwargs):
        assert self.ready
        assert set(kwargs) == ({"input_metadata"} if self.chunked else set())
        run = self._continuous if self.neuron_config.continuous_batching else self._static
        if self.chunked:
            run = self._in_blocks
        rows = np.stack(run(input_ids, cache_ids, start_ids, **kwargs))
        if torch.stack(self.attn_v_cache[self.batch_size]).isnan().all():
            rows[:] = np.nan  # of which numpy's argmax makes 0
        if self.neuron_config.on_device_generation:
            return torch.from_numpy(rows.argmax(1)[:, None].astype(np.int32))
        return torch.from_numpy(
            np.ascontiguousarray(rows.T)
        ).T  # a view of [V, B], as the real one gives

    def _logits(self, row, first, last):
        return toy_logits(row[first : last + 1], self.config.vocab_size)

    def _continuous(self, ids, cache_ids, start_ids):
        assert ids.shape == cache_ids.shape
        assert ids.dtype == cache_ids.dtype
        slots = start_ids.tolist()
        assert len(slots) == len(ids) <= self.batch_size
        if ids.shape[1] > 1 and cache_ids[0, 0] == 0:
            assert ids.shape[1] <= self.context_buckets[-1]
            last = cache_ids.max(dim=1).values.tolist()
            for row, slot in enumerate(slots):
                self.cache[slot, : last[row] + 1] = ids[row, : last[row] + 1]
            return [
                self._logits(self.cache[slot], 0, end)
                for slot, end in zip(slots, last, strict=True)
            ]
        if int(cache_ids.max()) >= self.token_buckets[-1]:
            raise StopIteration
        tokens, positions = np.zeros(self.batch_size, int), np.zeros(self.batch_size, int)
        tokens[slots], positions[slots] = ids[:, 0], cache_ids[:, 0]
        self.cache[np.arange(self.batch_size), positions] = (
            tokens  # also of slots that are not here
        )
        return [self._logits(self.cache[slot], 0, positions[slot]) for slot in slots]

    def _in_blocks(self, ids, cache_ids, start_ids, input_metadata):
        size = self.cache.shape[1]
        tables = input_metadata.block_tables.numpy()
        ends, starts = input_metadata.seq_lens_tensor.numpy(), input_metadata.context_lens.numpy()
        assert ids.shape == cache_ids.shape == (1, len(start_ids)) == (1, (ends - starts).sum())
        assert ids.shape[1] <= self.context_buckets[-1]
        assert -(-ends // size).sum() <= self.block_buckets[-1]
        self.cache.reshape(-1)[start_ids] = ids[0]
        answers = [toy_logits(np.zeros(1, int), self.config.vocab_size)] * self.batch_size
        first = 0
        for i, table in enumerate(tables):
            row = self.cache[table].reshape(-1)
            answers[i] = self._logits(row, 0, ends[i] - 1)
            new = cache_ids[0, first : first + ends[i] - starts[i]].tolist()
            assert new == list(range(starts[i], ends[i]))
            first += len(new)
        return answers

    def _static(self, ids, cache_ids, start_ids):
        assert len(ids) == self.batch_size
        positions = range(ids.shape[1]) if cache_ids is None else cache_ids.tolist()
        if positions[-1] >= self.token_buckets[-1]:
            raise StopIteration
        for i, position in enumerate(positions):
            self.cache[:, position] = ids[:, i]
        firsts = start_ids.tolist()
        return [
            self._logits(row, first, positions[-1])
            for row, first in zip(self.cache, firsts, strict=True)
        ]


class LlamaForSampling(Model):
    def __init__(self, config, *, n_positions=2048, batch_size=1, amp="f32", tp_degree=2, context_length_estimate=None,
                 context_unroll=None, unroll=None, neuron_config=None, prefixed_length=0, **kwargs):  # fmt: skip
        self._begin(config, n_positions, batch_size, context_length_estimate, neuron_config, amp)


class OPTForSampling(Model):
    continuous_batching = False

    def __init__(self, config, batch_size=1, amp=None, tp_degree=2, n_positions=2048, unroll=None,
                 context_length_estimate=None, context_unroll=1, neuron_config=None, **kwargs):  # fmt: skip
        self._begin(config, n_positions, batch_size, context_length_estimate, neuron_config, amp)


class GPT2ForSamplingWithContextBroadcasting(Model):
    continuous_batching = False

    def __init__(
        self,
        config,
        batch_size=1,
        prompt_batch_size=1,
        amp="f32",
        tp_degree=2,
        unroll=None,
        context_length_estimate=None,
        context_unroll=1,
        neuron_config=None,
        reorder_cache=False,
        **kwargs,
    ):
        assert prompt_batch_size == batch_size  # else it fails on the first batch
        assert isinstance(kwargs["n_positions"], int)
        assert set(kwargs) == {"n_positions"}
        self._begin(
            config, kwargs["n_positions"], batch_size, context_length_estimate, neuron_config, amp
        )


CONFIGS = (
    QuantizationConfig,
    KVCacheQuantizationConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
    NeuronConfig,
)
MODELS = (LlamaForSampling, OPTForSampling, GPT2ForSamplingWithContextBroadcasting)


def install(monkeypatch: pytest.MonkeyPatch) -> list[Model]:
    """Make it the library that is imported; returns the models that are made from now on."""
    package, config = (
        types.ModuleType("transformers_neuronx"),
        types.ModuleType("transformers_neuronx.config"),
    )
    for entry in (GQA, *CONFIGS, *MODELS):
        setattr(package, entry.__name__, entry)
        setattr(config, entry.__name__, entry)
    package.ops = types.SimpleNamespace(
        parallel_cpu=lambda cache: [shard.clone() for shard in cache],
        parallel_write=lambda cache, shards: [
            a.copy_(b) for a, b in zip(cache, shards, strict=True)
        ],
    )
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, config.__name__, config)
    Model.made.clear()
    CALLS.clear()
    return Model.made

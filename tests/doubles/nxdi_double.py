"""A stand-in for NxD Inference where there is no copy of it: the names, shapes and rules of the real one (0.9).

`test_nxdi_double.py` compares signatures, defaults and device calls with the real library wherever that is installed.
Logits are `toy_logits` of every token that a row attends to, so that a row or position mixed up gives other tokens.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.doubles.toy_backend import toy_logits

PACKAGE = "neuronx_distributed_inference"
CONFIG, GRAPHS = "neuron_config.json", "model.pt"
CTE, TKG = "context_encoding_model", "token_generation_model"
SPEC = "speculation_model"


class OnDeviceSamplingConfig:
    def __init__(self, **kwargs):
        self.do_sample = kwargs.pop("do_sample", False)
        self.top_k = kwargs.pop("top_k", 1)
        self.top_p = kwargs.pop("top_p", 1.0)
        self.temperature = kwargs.pop("temperature", 1.0)
        self.dynamic = kwargs.pop("dynamic", False)
        self.deterministic = kwargs.pop("deterministic", False)
        self.global_topk = kwargs.pop("global_topk", 256)


class HybridShardingConfig:
    def __init__(self, **kwargs):
        self.moe_cte_tp_degree = kwargs.pop("moe_cte_tp_degree", 1)


class NeuronConfig:
    def __init__(self, **kwargs) -> None:
        self.batch_size = kwargs.pop("batch_size", 1)
        self.padding_side = kwargs.pop("padding_side", "right")
        self.allow_input_truncation = kwargs.pop("allow_input_truncation", False)
        self.seq_len = kwargs.pop("seq_len", 128)
        self.output_logits = kwargs.pop("output_logits", False)
        self.torch_dtype = getattr(torch, kwargs.pop("torch_dtype", "bfloat16"))
        self.max_context_length = kwargs.pop("max_context_length", self.seq_len)
        self.max_length = kwargs.pop("max_length", self.seq_len)
        self.ctx_batch_size = kwargs.pop("ctx_batch_size", self.batch_size)
        self.tkg_batch_size = kwargs.pop("tkg_batch_size", self.batch_size)
        self.max_batch_size = kwargs.pop("max_batch_size", self.batch_size)
        self.is_continuous_batching = kwargs.pop("is_continuous_batching", False)
        self.kv_cache_batch_size = kwargs.pop("kv_cache_batch_size", self.batch_size)
        self.on_device_sampling_config = kwargs.pop("on_device_sampling_config", None)
        if type(self.on_device_sampling_config) is dict:
            self.on_device_sampling_config = OnDeviceSamplingConfig(
                **self.on_device_sampling_config
            )
        self.lora_config = kwargs.pop("lora_config", None)
        self.async_mode = kwargs.pop("async_mode", False)
        self.enable_bucketing = kwargs.pop("enable_bucketing", False)
        self.context_encoding_buckets = kwargs.pop("context_encoding_buckets", None)
        self.token_generation_buckets = kwargs.pop("token_generation_buckets", None)
        self.token_generation_batches = kwargs.pop("token_generation_batches", None)
        self.is_prefix_caching = kwargs.pop("is_prefix_caching", False)
        self.tp_degree = kwargs.pop("tp_degree", 1)
        self.pp_degree = kwargs.pop("pp_degree", 1)
        self.ep_degree = kwargs.pop("ep_degree", 1)
        self.world_size = kwargs.pop("world_size", None)
        if self.world_size is None:
            self.world_size = self.tp_degree * self.pp_degree * self.ep_degree
        self.save_sharded_checkpoint = kwargs.pop("save_sharded_checkpoint", False)
        self.skip_warmup = kwargs.pop("skip_warmup", False)
        self.apply_seq_ids_mask = kwargs.pop("apply_seq_ids_mask", False)
        lnc = kwargs.pop("logical_nc_config", 1)
        self.logical_nc_config = int(os.environ.get("NEURON_LOGICAL_NC_CONFIG", lnc))
        self.fused_qkv = kwargs.pop("fused_qkv", False)
        self.speculation_length = kwargs.pop("speculation_length", 0)
        for name in (self.context_encoding_buckets, self.token_generation_buckets):
            assert name is None or name[-1] <= self.max_length
        assert self.max_context_length <= self.max_length
        os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] = "trn1"


class InferenceConfig:
    def __init__(
        self,
        neuron_config,
        fused_spec_config=None,
        load_config=None,
        metadata=None,
        **kwargs,
    ):
        self.neuron_config, self.fused_spec_config = neuron_config, fused_spec_config
        load_config(self)
        self.metadata = metadata

    @classmethod
    def get_neuron_config_cls(cls):
        return NeuronConfig

    def save(self, model_path):
        Path(model_path).mkdir(parents=True, exist_ok=True)
        fields = {name: value for name, value in vars(self).items() if name != "neuron_config"}
        nested = {**fields, "neuron_config": vars(self.neuron_config)}
        (Path(model_path) / CONFIG).write_text(json.dumps(nested, default=_plain))

    @classmethod
    def load(cls, model_path, **kwargs):
        fields = {**json.loads((Path(model_path) / CONFIG).read_text()), **kwargs}
        config = NeuronConfig(**fields.pop("neuron_config"))
        return cls(config, load_config=lambda self: vars(self).update(fields))


def _plain(value):
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else vars(value)


def load_pretrained_config(model_path_or_name=None, hf_config=None):
    assert (model_path_or_name is None) != (hf_config is None)
    read = (
        hf_config.to_dict()
        if hf_config is not None
        else json.loads((Path(model_path_or_name) / "config.json").read_text())
    )
    read.pop("dtype", None)
    return lambda self: vars(self).update(read)


class Wrapper:
    """A submodel: the graphs of its buckets, chosen by the length of the mask."""

    def __init__(self, application, tag, buckets, batch_size):
        self.application, self.tag = application, tag
        self.neuron_config = types.SimpleNamespace(buckets=buckets, batch_size=batch_size)

    def bucket_of(self, length, rows, strategy="first_fit"):
        buckets = self.neuron_config.buckets
        if self.tag == SPEC:
            length += self.application.neuron_config.speculation_length
        if isinstance(buckets[0], list):
            fitting = [bucket for bucket in buckets if rows <= bucket[0] and length <= bucket[1]]
            if not fitting:
                raise ValueError(
                    f"Input batch_size={rows}, seq_len={length} exceeds largest bucket"
                )
            return min(fitting)
        later = [i for i, bucket in enumerate(buckets) if length < bucket]
        if later:
            skipped = strategy == "second_fit"
            return [
                self.neuron_config.batch_size,
                buckets[min(later[0] + skipped, len(buckets) - 1)],
            ]
        if length == buckets[-1]:
            return [self.neuron_config.batch_size, length]
        raise ValueError(
            f"Input len {length} exceeds largest bucket ({buckets[-1]}) for {self.tag}"
        )


class Builder:
    """Division of the weights, of which there are the names alone."""

    def __init__(self, application):
        self.application = application

    def shard_checkpoint(self, serialize_path=None):
        own = self.application
        model = types.SimpleNamespace(
            state_dict=lambda: dict.fromkeys(own.parameters, torch.ones(1))
        )
        checkpoint = own.get_state_dict(own.model_path, own.config)
        ranks = range(own.neuron_config.world_size)
        return [
            self.shard_weights_with_cache(rank, model, checkpoint, serialize_path) for rank in ranks
        ]

    def shard_weights_with_cache(self, rank, model, checkpoint, serialize_path=None):
        return dict(checkpoint)


class NeuronApplicationBase:
    """The methods of an application that a class may leave out."""

    parameters = ("embed_tokens.weight", "lm_head.weight", "kv_mgr.past_key_values.0")

    @classmethod
    def get_config_cls(cls):
        raise NotImplementedError("get_config_cls is not implemented")

    @staticmethod
    def update_state_dict_for_tied_weights(state_dict):
        raise NotImplementedError("State-dict update not implemented")

    @classmethod
    def get_state_dict(cls, model_name_or_path, config):
        state = dict.fromkeys(["embed_tokens.weight", "lm_head.weight"])
        if getattr(config, "tie_word_embeddings", False):
            del state["lm_head.weight"]
            cls.update_state_dict_for_tied_weights(state)
        return state

    def get_builder(self, debug=False):
        return Builder(self)


class NeuronLlamaForCausalLM(NeuronApplicationBase):
    """A row of the cache is a row of token ids; -1 is what was never written."""

    made: ClassVar[list[NeuronLlamaForCausalLM]] = []
    poison: ClassVar[int] = -1
    """The token that is not a number. Its values are not in any layer; those that read it, masked or not, are not from
    the next layer on. `spoiled` has the first such layer of each column."""
    layers: ClassVar[int] = 3
    windowed: ClassVar[bool] = False
    """True if the cache is a ring of a column less than the window: position p is at p modulo its length."""

    @classmethod
    def get_config_cls(cls):
        return InferenceConfig

    @classmethod
    def get_neuron_config_cls(cls):
        return cls.get_config_cls().get_neuron_config_cls()

    def __init__(self, model_path, config=None, neuron_config=None):
        self.config = config or InferenceConfig.load(model_path)
        self.neuron_config = own = neuron_config or self.config.neuron_config
        self.model_path, self.is_loaded_to_neuron = model_path, False
        assert not own.is_continuous_batching or own.ctx_batch_size == 1
        prompts, lengths = [own.max_context_length], [own.max_length]
        if own.enable_bucketing:
            prompts, lengths = own.context_encoding_buckets, own.token_generation_buckets
        if own.token_generation_batches is not None:
            counts = sorted({*own.token_generation_batches, own.tkg_batch_size}, reverse=True)
            lengths = [[count, length] for count in counts for length in lengths]
        self.context_encoding_model = Wrapper(self, CTE, prompts, own.ctx_batch_size)
        self.models, self.lengths = [self.context_encoding_model], lengths
        if own.speculation_length:
            self.speculation_model = Wrapper(self, SPEC, lengths, own.batch_size)
            self.models.append(self.speculation_model)
        else:
            self.enable_token_generation()
        self.prior_outputs = self.prior_seq_ids = self.next_cpu_inputs = None
        self.async_mode = own.async_mode
        if self.async_mode:
            os.environ["NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"] = "2"
        window = getattr(self.config, "sliding_window", None) if self.windowed else None
        self.ring = window - 1 if window else 0
        shape = (own.kv_cache_batch_size, (self.ring or own.max_length) + 1)
        self.cache, self.spoiled = np.full(shape, -1, np.int64), np.full(shape, self.layers)
        self.calls: list[tuple[str, int, list[list[int]], list[int], list[int]]] = []
        self.fail: Exception | None = None
        self.made.append(self)

    def enable_token_generation(self, enable_wlt_optimization=True, **model_init_kwargs):
        rows = self.neuron_config.tkg_batch_size
        self.token_generation_model = Wrapper(self, TKG, self.lengths, rows)
        self.models.append(self.token_generation_model)
        # One submodel alone may choose the layout of the weights.
        assert not (self.neuron_config.speculation_length and enable_wlt_optimization)

    @staticmethod
    def update_state_dict_for_tied_weights(state_dict):
        state_dict["lm_head.weight"] = state_dict["embed_tokens.weight"]

    # --------------------------------------------------------------- compile and load

    def compile(self, compiled_model_path, debug=False, pre_shard_weights_hook=None, dry_run=False,
                disable_fail_fast=False):  # fmt: skip
        self.config.save(compiled_model_path)
        work = Path(os.environ["BASE_COMPILE_WORK_DIR"])  # the default is one for all processes
        shutil.rmtree(work, ignore_errors=True)
        self.config.save(work)
        (Path(compiled_model_path) / GRAPHS).write_text(json.dumps(self._graphs()))
        self.shard_weights(compiled_model_path)

    def shard_weights(self, compiled_model_path, debug=False, pre_shard_weights_hook=None):
        folder = Path(compiled_model_path) / "weights"
        divided = self.neuron_config.save_sharded_checkpoint
        for rank, _ in enumerate(self.get_builder().shard_checkpoint() if divided else ()):
            folder.mkdir(exist_ok=True)
            (folder / f"tp{rank}_sharded_checkpoint.safetensors").write_text("")

    def load(
        self, compiled_model_path, start_rank_id=None, local_ranks_size=None, skip_warmup=False
    ):
        folder = Path(compiled_model_path)
        # As 0.4 to 0.6 choose the weights' place.
        place = getattr(self.config, "_name_or_path", self.model_path)
        assert place != ""
        assert Path(place).is_dir()
        self.graphs = json.loads((folder / GRAPHS).read_text())
        if self.neuron_config.save_sharded_checkpoint:
            for rank in range(self.neuron_config.world_size):
                (folder / f"weights/tp{rank}_sharded_checkpoint.safetensors").read_text()
        else:
            self.get_builder().shard_checkpoint()
        self.is_loaded_to_neuron, self.warmed = True, not skip_warmup
        ranks = types.SimpleNamespace(close=lambda: None)
        self.traced_model = types.SimpleNamespace(nxd_model=types.SimpleNamespace(ranks=ranks))

    def reset(self):
        pass

    def _graphs(self):
        """The shapes of input_ids and mask, for each graph."""
        own = self.neuron_config
        prompts = [
            [CTE, own.ctx_batch_size, n, n]
            for n in self.context_encoding_model.neuron_config.buckets
        ]
        pairs = [
            bucket if isinstance(bucket, list) else [own.tkg_batch_size, bucket]
            for bucket in self.token_generation_model.neuron_config.buckets
        ]
        drafts = [[SPEC, own.batch_size, own.speculation_length, n] for n in self.lengths]
        return [
            *prompts,
            *(drafts if own.speculation_length else ()),
            *([TKG, rows, 1, length] for rows, length in pairs),
        ]

    # --------------------------------------------------------------- forward

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def forward(
        self, input_ids=None, seq_ids=None, attention_mask=None, position_ids=None, past_key_values=None,
        inputs_embeds=None, sampling_params=None, prev_hidden=None, labels=None, use_cache=None,
        output_attentions=None, output_hidden_states=None, adapter_ids=None, medusa_args=None, return_dict=None,
        llava_args=(), input_capture_hook=None, tensor_capture_hook=None, slot_mapping=None, block_table=None,
        full_context_lens=None, computed_context_lens=None, tf_args=None,
    ):  # fmt: skip
        assert self.is_loaded_to_neuron
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        if attention_mask is None:
            attention_mask = _inferred(position_ids)
        self.validate_sampling_params(sampling_params)
        sampling_params[sampling_params[:, 2] == 0, :2] = 1  # in place, as the real one
        if self.prior_seq_ids is None:
            self.prior_seq_ids = seq_ids
        inputs = [input_ids, attention_mask, position_ids, seq_ids, sampling_params]
        tokens, logits = self._ahead(inputs) if self.async_mode else self._run(inputs)[:2]
        on_device = self.neuron_config.on_device_sampling_config is not None
        both = on_device and self.neuron_config.output_logits
        return types.SimpleNamespace(
            tokens=tokens if on_device else logits,
            logits=logits if both or not on_device else None,
            hidden_states=[] if both else tokens if on_device else logits,
        )

    def validate_sampling_params(self, params):
        config = self.neuron_config.on_device_sampling_config
        if config is not None:
            top_k, top_p, temperature = params.T
            if not ((top_k == -1) | ((top_k >= 0) & (top_k <= config.global_topk))).all():
                raise ValueError(f"Invalid top-k values found. Found {top_k=}.")
            if not ((top_p > 0) & (top_p <= 1)).all() or not (temperature >= 0).all():
                raise ValueError("Invalid sampling parameters found.")

    def _ahead(self, inputs):
        """One step ahead where the rows stay the same: the next ids come from the device."""
        _, mask, positions, seq_ids, params = inputs
        if positions.min() == 0:
            self.prior_outputs = self.prior_seq_ids = None
            return self._run(inputs)[:2]
        lengths = [graph[3] for graph in self._graphs() if graph[0] == TKG]
        known = mask.shape[1]
        near = any(known < length <= known + 2 for length in lengths)
        if near or not torch.equal(self.prior_seq_ids, seq_ids):
            self.prior_outputs = self.prior_seq_ids = None
            return self._run(inputs, "second_fit" if near else "first_fit")[:2]
        if self.prior_outputs is None:
            self.prior_outputs = self._run(inputs)
        tokens, logits, given = self.prior_outputs
        self.prior_seq_ids = seq_ids
        if self.neuron_config.seq_len - int(positions.max()) <= 2:
            self.prior_outputs = self.prior_seq_ids = None
        else:
            later = positions + 1
            self.prior_outputs = self._run([given, _inferred(later), later, seq_ids, params])
        return tokens, logits

    def _run(self, inputs, strategy="first_fit"):
        """Return int32[B] tokens, float32[B, 1, V] logits, and the tokens as a graph's input, filled rows included."""
        ids, mask, positions, seq_ids, params = inputs
        run = self._prefill if positions.min() == 0 else self._decode
        if run == self._decode and ids.shape[1] == self.neuron_config.speculation_length:
            return *map(torch.from_numpy, self._verify(ids, mask, positions, seq_ids)), None
        tokens, logits, given = run(ids, mask, positions, seq_ids, params, strategy)
        return torch.from_numpy(tokens), torch.from_numpy(logits), torch.from_numpy(given)

    def _enter(self, tag, bucket, columns, seq_ids, positions):
        shape = [tag, bucket[0], columns, bucket[1]]
        if shape not in self.graphs:
            known = [graph[1:] for graph in self.graphs]
            raise ValueError(f"Input shape {shape[1:]} not found in input_shape_map: {known}")
        shapes = [[bucket[0], columns], [bucket[0], bucket[1]]]
        self.calls.append((tag, self.graphs.index(shape), shapes, list(seq_ids), list(positions)))

    def _prefill(self, ids, mask, positions, seq_ids, params, strategy):
        size, answers = self.context_encoding_model.neuron_config.batch_size, []
        assert len(ids) % size == 0
        for first in range(0, len(ids), size):
            part = slice(first, first + size)
            bucket = self.context_encoding_model.bucket_of(mask.shape[1], size, strategy)
            if ids.shape[1] > bucket[1]:
                most = self.neuron_config.max_context_length
                raise ValueError(
                    f"Inputs supplied are longer than max_context_length ({most} tokens)."
                )
            tokens, where = (np.asarray(each[part]) for each in (ids, positions))
            wider = ((0, 0), (0, bucket[1] - tokens.shape[1]))
            tokens, where = np.pad(tokens, wider), np.pad(where, wider, constant_values=1)
            lines = seq_ids[part].tolist()
            self._enter(CTE, bucket, bucket[1], lines, where.max(axis=1).tolist())
            for row, line in enumerate(lines):
                end = int(where[row].argmax()) + 1
                bad = tokens[row] == self.poison
                kept = np.arange(bucket[1])
                if self.ring:
                    kept = np.arange(max(end, self.ring) - self.ring, max(end, self.ring))
                column = kept % (self.ring or bucket[1])
                self.cache[line, column] = tokens[row, kept]
                spoiled = np.where(bad, 0, 1) if bad.any() else np.full(bad.shape, self.layers)
                self.spoiled[line, column] = spoiled[kept]
                seen = tokens[row, max(end - self.ring - 1, 0) if self.ring else 0 : end]
                answers.append(self._logits(seen, bool(bad.any())))
        return self._answer(np.stack(answers), params)

    def _decode(self, ids, mask, positions, seq_ids, params, strategy):
        own, count, named = self.neuron_config, len(seq_ids), seq_ids.tolist()
        bucket = self.token_generation_model.bucket_of(mask.shape[1], count, strategy)
        # Of as many rows as compiled for, row i is line i. Fewer are sorted and filled up; the others repeat the first.
        rows, lines = own.tkg_batch_size, list(range(own.tkg_batch_size))
        order = lines
        if count < rows:
            rows = bucket[0]
            lines = named + [line for line in range(rows) if line not in named]
            order = np.argsort(lines, kind="stable").tolist()
            lines = sorted(lines)
        chosen = [row if row < count else 0 for row in order]
        self._enter(
            TKG,
            [len(order), bucket[1]],
            1,
            lines if count < rows else named,
            positions[chosen].flatten().tolist(),
        )
        where, read, own_params = (np.asarray(each)[chosen] for each in (positions, mask, params))
        where = where[:, 0]
        # Those of a step ahead are filled up already.
        tokens = np.asarray(ids)[:, 0] if len(ids) == rows > count else np.asarray(ids)[chosen, 0]
        if where.max() >= own.max_length:
            raise IndexError("a position beyond the cache")
        read = np.pad(read, ((0, 0), (0, bucket[1] - read.shape[1]))).astype(bool)
        answers, cache, spoiled = [], self.cache.copy(), self.spoiled.copy()
        for row, line in enumerate(lines):
            width, column, columns = bucket[1], where[row], np.flatnonzero(read[row])
            if self.ring:
                width, column = self.ring, where[row] % self.ring
                columns = np.arange(max(where[row] - self.ring, 0), where[row]) % self.ring
            layer = 0 if tokens[row] == self.poison else int(self.spoiled[line, :width].min()) + 1
            seen = np.append(self.cache[line, columns], tokens[row])
            answers.append(self._logits(seen, layer <= self.layers))
            if order[row] < count or not own.apply_seq_ids_mask:
                cache[row, column], spoiled[row, column] = (
                    tokens[row],
                    min(layer, self.layers),
                )
        self.cache, self.spoiled = cache, spoiled
        found, logits, ahead = self._answer(np.stack(answers), own_params)
        return found[named], logits[named], ahead

    def _verify(self, ids, mask, positions, seq_ids):
        """Columns behind one another, of all rows: row i is line i. Those of drafts may be written again."""
        own, (count, width) = self.neuron_config, ids.shape
        assert count == own.batch_size
        assert (positions == positions[:, :1] + torch.arange(width)).all()
        bucket = self.speculation_model.bucket_of(mask.shape[1], count)
        ends = positions.max(axis=1).values.tolist()
        self._enter(SPEC, bucket, width, seq_ids.tolist(), ends)
        if max(ends) >= own.max_length:
            raise IndexError("a position beyond the cache")
        logits = np.zeros((count, width, self.config.vocab_size), np.float32)
        for line in range(count):
            tokens, places = ids[line].numpy(), positions[line].numpy()
            known = self.cache[line, np.flatnonzero(mask[line].numpy())]
            # Each column reads the values of all, masked or not.
            bad = tokens == self.poison
            layers = np.where(bad, 0, 1 if bad.any() else self.layers + 1)
            layers = np.minimum(layers, int(self.spoiled[line, : bucket[1]].min()) + 1)
            for column in range(width):
                seen = np.append(known, tokens[: column + 1])
                logits[line, column] = self._logits(seen, layers[column] <= self.layers)
            self.cache[line, places] = tokens
            self.spoiled[line, places] = np.minimum(layers, self.layers)
        return logits.argmax(axis=2).astype(np.int32), logits

    def _logits(self, seen, bad):
        found = toy_logits(np.asarray(seen, np.int64), self.config.vocab_size)
        return np.full_like(found, np.nan) if bad else found

    def _answer(self, logits, params):
        config = self.neuron_config.on_device_sampling_config
        tokens = logits.argmax(axis=1).astype(np.int32)  # of NaN the first
        for row in range(len(logits) if config is not None else 0):
            top_k, top_p, temperature = np.asarray(params[row]).tolist()
            if not config.dynamic and config.temperature == 1:
                temperature = 1  # traced without the division
            if (
                (config.dynamic or config.do_sample)
                and top_k != 1
                and not np.isnan(logits[row]).any()
            ):
                best = np.argsort(-logits[row])[: int(top_k) or None]
                weights = torch.softmax(torch.from_numpy(logits[row][best] / temperature), 0)
                outside = (
                    weights.cumsum(0) > top_p
                )  # the token that crosses it too, as the real one
                outside[0] = False
                weights[outside] = 0
                tokens[row] = best[int(torch.multinomial(weights, 1))]
        return tokens, logits[:, None].astype(np.float32), tokens[:, None]


class NeuronMistralForCausalLM(NeuronLlamaForCausalLM):
    windowed = True


class NeuronBaseForCausalLM(NeuronLlamaForCausalLM):
    """The base of classes that lie outside the library."""

    get_config_cls = NeuronApplicationBase.get_config_cls
    update_state_dict_for_tied_weights = staticmethod(
        NeuronApplicationBase.update_state_dict_for_tied_weights
    )


def _inferred(positions):
    """The mask that the library derives from positions if it gets none."""
    if positions.shape[1] > 1:
        return (positions >= torch.arange(positions.shape[1])).int()
    return (torch.arange(int(positions.max())) < positions).int()


CONFIGS = (OnDeviceSamplingConfig, NeuronConfig)


def install(monkeypatch: pytest.MonkeyPatch, poison: int = -1) -> list[NeuronLlamaForCausalLM]:
    """Make it the library that is imported; returns the applications that are made from now on."""
    monkeypatch.setattr(NeuronLlamaForCausalLM, "poison", poison)
    contents: dict[str, list[Any]] = {
        "": [],
        "models": [],
        "models.config": [*CONFIGS, HybridShardingConfig, InferenceConfig],
        "models.application_base": [NeuronApplicationBase],
        "models.model_base": [NeuronBaseForCausalLM],
        "models.llama": [],
        "models.llama.modeling_llama": [NeuronLlamaForCausalLM],
        "models.mistral": [],
        "models.mistral.modeling_mistral": [NeuronMistralForCausalLM],
        "utils": [],
        "utils.constants": [],
        "utils.hf_adapter": [load_pretrained_config],
    }
    for name, entries in contents.items():
        module: Any = types.ModuleType(".".join(filter(None, (PACKAGE, name))))
        for entry in entries:
            setattr(module, entry.__name__, entry)
        if name == "utils.constants":
            module.MODEL_TYPES = {"llama": {"causal-lm": NeuronLlamaForCausalLM}}
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert importlib.import_module(f"{PACKAGE}.models.config").NeuronConfig is NeuronConfig
    NeuronLlamaForCausalLM.made.clear()
    return NeuronLlamaForCausalLM.made

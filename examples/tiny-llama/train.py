#!/usr/bin/env python3
"""Trains tiny-llama, a Llama checkpoint of less than 1 MB with known answers.

The script makes its own text (see `tasks.py`), trains a byte-level BPE
tokenizer and a model of about 200,000 parameters on it, and writes a Hugging
Face checkpoint together with two files of checks: prompts with the completion
that greedy decoding gives, kept only where that completion is right by the rule
of its task and clear enough not to depend on rounding.

Usage::

    python examples/tiny-llama/train.py                # train, save, write the checks
    python examples/tiny-llama/train.py --output DIR   # the same, into DIR
    python examples/tiny-llama/train.py --check        # only verify what is saved
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tasks import CHAT_TASKS, POOL, TASKS, Example
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
BOS, EOS, PAD, _, _, _, TURN_END = range(len(SPECIAL_TOKENS))
VOCAB_SIZE = 400
MAX_LENGTH = 512
MAX_PROMPT_LENGTH = 400
IGNORED = -100
WARM_UP_STEPS = 300
PART_TOKENS = 3072
ECHO_SHARE = 0.08
ECHO_TOKENS = 120
SHORTEST = 0.05
GROWING = 0.5

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|> ' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": BOS,
    "eos_token_id": [EOS, TURN_END],
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.05,
    "intermediate_size": 172,
    "max_position_embeddings": MAX_LENGTH,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": PAD,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 300.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}

GENERATION_CONFIG: dict[str, Any] = {
    "bos_token_id": BOS,
    "do_sample": False,
    "eos_token_id": [EOS, TURN_END],
    "pad_token_id": PAD,
}

TOKENIZER_CONFIG: dict[str, Any] = {
    "added_tokens_decoder": {
        str(index): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for index, token in enumerate(SPECIAL_TOKENS)
    },
    "bos_token": "<s>",
    "chat_template": CHAT_TEMPLATE,
    "clean_up_tokenization_spaces": False,
    "eos_token": "</s>",
    "model_max_length": MAX_LENGTH,
    "pad_token": "<pad>",
    "padding_side": "left",
    "tokenizer_class": "PreTrainedTokenizerFast",
}

MIN_GAP = 0.5
CHECKS_PER_TASK = 17
CHAT_CHECKS_PER_TASK = 20
TRIES_PER_TASK = 72
MAX_NEW_TOKENS = 130
MAX_SAME_COMPLETION = 2
SPARE_TOKENS = 8


@dataclass(frozen=True)
class Row:
    """One tokenised training document.

    Attributes:
        ids: The token ids, with the leading bos token.
        labels: The ids that have to be predicted, `IGNORED` for the others.
    """

    ids: list[int]
    labels: list[int]


@dataclass(frozen=True)
class Trial:
    """The result of greedy decoding for one example.

    Attributes:
        example: The example.
        prompt_ids: The token ids of its prompt.
        text: The completion, without special tokens.
        tokens: The number of new tokens, with the one that ends the text.
        gap: The smallest distance between the best two logits of any step.
        max_new_tokens: The limit that was used.
    """

    example: Example
    prompt_ids: list[int]
    text: str
    tokens: int
    gap: float
    max_new_tokens: int


def draw_example(
    rng: random.Random, names: Sequence[str], weights: Sequence[float], longest: float = 1.0
) -> Example:
    """Draws an example, with a length that is mostly short and sometimes long.

    Args:
        rng: The random generator.
        names: The names of the tasks to choose from.
        weights: Their shares.
        longest: The largest scale to draw.

    Returns:
        The example.
    """
    name = rng.choices(names, weights)[0]
    return TASKS[name][0](rng, longest * rng.random() ** 3)


def example_text(example: Example) -> str:
    """Gives all text of an example, to train the tokenizer on.

    Args:
        example: The example.

    Returns:
        The text, without special tokens.
    """
    if example.messages is None:
        return example.prompt + example.answer
    return "\n".join(message["content"] for message in example.messages)


def train_tokenizer(seed: int) -> Tokenizer:
    """Trains the tokenizer on the ASCII part of the text.

    The characters outside of ASCII get no merges, so that each of them takes
    two to four tokens: a reader of the tokens has to wait for whole characters.

    Args:
        seed: Seed of the text.

    Returns:
        The tokenizer.
    """
    rng = random.Random(seed)
    names = list(TASKS)
    # The items have to become tokens with their leading space, whatever the text is.
    texts = [f" {item}" * 20000 for item in POOL]
    for _ in range(4000):
        text = example_text(draw_example(rng, names, [1.0] * len(names)))
        words = (word for word in text.split(" ") if word.isascii())
        texts.append(" ".join(words))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(r" ?\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]|\s+"), behavior="isolated"
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A",
        pair="<s> $A <s> $B",
        special_tokens=[("<s>", BOS)],
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the tokenizer in a form that old and new libraries read.

    Args:
        tokenizer: The tokenizer.
        folder: Where to write `tokenizer.json` and `tokenizer_config.json`.
    """
    content = json.loads(tokenizer.to_str())
    merges = content["model"]["merges"]
    content["model"]["merges"] = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in merges
    ]
    write_json(folder / "tokenizer.json", content)
    write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)


def write_json(path: Path, content: object) -> None:
    """Writes a JSON file, one entry per line, with a newline at its end.

    Args:
        path: The file.
        content: What to write.
    """
    text = json.dumps(content, ensure_ascii=False, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def write_lines(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Writes a file of one JSON record per line.

    Args:
        path: The file.
        records: The records.
    """
    lines = (json.dumps(record, ensure_ascii=False) for record in records)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a file of one JSON record per line.

    Args:
        path: The file.

    Returns:
        The records.
    """
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def make_row(example: Example, tokenizer: Tokenizer) -> Row:
    """Tokenises an example as it comes at serving time: prompt, then answer.

    Args:
        example: The example.
        tokenizer: The tokenizer.

    Returns:
        The row. Only what the assistant says has labels.
    """
    if example.messages is None:
        prompt = tokenizer.encode(example.prompt).ids
        answer = tokenizer.encode(example.answer, add_special_tokens=False).ids
        answer += [EOS] * example.ends
        return Row(prompt + answer, [IGNORED] * len(prompt) + answer)
    ids = [BOS]
    labels = [IGNORED]
    for message in example.messages:
        head = tokenizer.encode(f"<|{message['role']}|>", add_special_tokens=False).ids
        body = [*tokenizer.encode(f" {message['content']}", add_special_tokens=False).ids, TURN_END]
        spoken = message["role"] == "assistant"
        ids += head + body
        labels += [IGNORED] * len(head) + (body if spoken else [IGNORED] * len(body))
    return Row(ids, labels)


def echo_row(rng: random.Random, longest: int) -> Row:
    """Makes a row of random tokens and the same tokens again.

    It teaches what nearly all tasks need, to find a token in the prompt and to
    go on from there. Out of the tasks alone the model learns that very late.

    Args:
        rng: The random generator.
        longest: The largest number of tokens to repeat.

    Returns:
        The row, with labels for the tokens that can be known.
    """
    length = rng.randint(3, longest)
    ids = [rng.randrange(VOCAB_SIZE - ECHO_TOKENS, VOCAB_SIZE) for _ in range(length)]
    return Row([BOS, *ids, *ids], [IGNORED] * (length + 2) + ids[1:])


def batches(
    seed: int, tokenizer: Tokenizer, batch_rows: int, steps: int
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Yields training batches, in parts of rows of about one length.

    The first batches are echoes only (see `echo_row`). The examples of the tasks
    are short at first and get longer over the first part of the steps: looking
    things up in the prompt is learned sooner in short prompts.

    Args:
        seed: Seed of the text.
        tokenizer: The tokenizer.
        batch_rows: The number of rows of a batch.
        steps: The number of batches.

    Yields:
        For each part the token ids and the labels, padded on the right.
    """
    rng = random.Random(seed)
    names = list(TASKS)
    weights = [share for _, share in TASKS.values()]
    for step in range(steps):
        progress = (step - WARM_UP_STEPS) / steps
        longest = min(1.0, SHORTEST + max(progress, 0.0) / GROWING)
        rows = []
        for _ in range(batch_rows):
            if progress < 0 or rng.random() < ECHO_SHARE:
                row = echo_row(rng, 24 if progress < 0 else 24 + int(160 * longest))
            else:
                row = make_row(draw_example(rng, names, weights, longest), tokenizer)
            if len(row.ids) <= MAX_LENGTH:
                rows.append(row)
        rows.sort(key=lambda row: len(row.ids))
        parts: list[list[Row]] = [[]]
        for row in rows:
            if parts[-1] and (len(parts[-1]) + 1) * len(row.ids) > PART_TOKENS:
                parts.append([])
            parts[-1].append(row)
        yield [pad_rows(part) for part in parts]


def pad_rows(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes tensors of rows.

    Args:
        rows: The rows.

    Returns:
        The token ids and the labels, padded on the right.
    """
    width = max(len(row.ids) for row in rows)
    ids = [row.ids + [PAD] * (width - len(row.ids)) for row in rows]
    labels = [row.labels + [IGNORED] * (width - len(row.labels)) for row in rows]
    return torch.tensor(ids), torch.tensor(labels)


def part_loss(
    model: PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Computes the loss of one part of a batch.

    A row counts by the square root of its labels: long answers do not drown the
    short ones, and short ones do not make a long answer's tokens worthless.

    Args:
        model: The model.
        ids: The token ids.
        labels: The labels.

    Returns:
        The weighted sum of the losses, and the sum of the weights.
    """
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    mask = targets != IGNORED
    logits = model.lm_head(hidden[mask])
    losses = torch.nn.functional.cross_entropy(logits, targets[mask], reduction="none")
    counts = mask.sum(dim=1, keepdim=True).clamp(min=1)
    weights = counts.float().rsqrt().expand_as(mask)[mask]
    return (losses * weights).sum(), float(weights.sum())


def backward(model: PreTrainedModel, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Adds the gradient of a batch to the model's.

    Args:
        model: The model, without gradients.
        parts: The token ids and the labels of each part of the batch.

    Returns:
        The loss.
    """
    loss_sum = weight_sum = 0.0
    for ids, labels in parts:
        loss, weight = part_loss(model, ids, labels)
        loss.backward()
        loss_sum += loss.item()
        weight_sum += weight
    for value in model.parameters():
        if value.grad is not None:
            value.grad /= weight_sum
    return loss_sum / weight_sum


def make_optimizers(
    model: PreTrainedModel, steps: int, peak: float
) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LambdaLR]]:
    """Makes Muon for the matrices of the layers, and AdamW for everything else.

    Args:
        model: The model.
        steps: The number of steps.
        peak: The highest learning rate of AdamW.

    Returns:
        The optimizers and their schedules.
    """
    hidden = [value for value in model.model.layers.parameters() if value.ndim == 2]
    known = {id(value) for value in hidden}
    others = [value for value in model.parameters() if id(value) not in known]
    optimizers = [
        torch.optim.Muon(hidden, lr=5 * peak, weight_decay=0.02),
        torch.optim.AdamW(others, lr=peak, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]
    warm_up = max(1, steps // 40)

    def rate(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))

    schedules = [torch.optim.lr_scheduler.LambdaLR(item, rate) for item in optimizers]
    return optimizers, schedules


def train_model(
    folder: Path, tokenizer: Tokenizer, seed: int, steps: int, batch_rows: int, peak: float
) -> PreTrainedModel:
    """Trains the model that `folder` has a configuration of.

    Args:
        folder: The folder with `config.json`.
        tokenizer: The tokenizer.
        seed: Seed of the weights and of the text.
        steps: The number of steps.
        batch_rows: The number of rows that a step sees.
        peak: The highest learning rate.

    Returns:
        The model, in evaluation mode.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.train()
    optimizers, schedules = make_optimizers(model, steps, peak)
    source = batches(seed + 1, tokenizer, batch_rows, steps)
    started = time.monotonic()
    recent: collections.deque[float] = collections.deque(maxlen=100)
    for step, parts in enumerate(source, start=1):
        recent.append(backward(model, parts))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
        if step % 100 == 0 or step == steps:
            mean = sum(recent) / len(recent)
            print(f"step {step} loss {mean:.4f} {time.monotonic() - started:.0f} s", flush=True)
    return model.eval()


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Writes the weights, without the second name of the tied embedding.

    Args:
        model: The model.
        folder: Where to write `model.safetensors`.
    """
    weights = {
        name: value.contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a saved checkpoint the way a user would.

    Args:
        folder: The folder of the checkpoint.

    Returns:
        The model in float32 and its tokenizer.
    """
    model = AutoModelForCausalLM.from_pretrained(folder).to(torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def chat_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]) -> str:
    """Renders messages, up to the point where the assistant speaks.

    Args:
        tokenizer: The tokenizer.
        messages: The messages.

    Returns:
        The text, which starts with the bos token.
    """
    return str(
        tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    )


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: str, messages: Sequence[dict[str, str]] | None
) -> list[int]:
    """Tokenises a prompt, or the messages of a chat.

    Args:
        tokenizer: The tokenizer.
        prompt: The prompt, used if there are no messages.
        messages: The messages in front of the answer, or None.

    Returns:
        The token ids, with one bos token.
    """
    if messages is None:
        return list(tokenizer(prompt)["input_ids"])
    text = chat_prompt(tokenizer, messages)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@torch.inference_mode()
def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    limits: Sequence[int],
    batch_size: int,
) -> list[tuple[str, int, float]]:
    """Completes prompts greedily with the `generate` of transformers.

    Args:
        model: The model.
        tokenizer: The tokenizer.
        prompts: The token ids of the prompts.
        limits: The most new tokens, for each prompt.
        batch_size: How many prompts to run at once, padded on the left.

    Returns:
        For each prompt the text, its number of tokens and the smallest gap
        between the best two logits.
    """
    results: dict[int, tuple[str, int, float]] = {}
    order = sorted(range(len(prompts)), key=lambda index: (limits[index], len(prompts[index])))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        width = max(len(prompts[index]) for index in chosen)
        ids = [[PAD] * (width - len(prompts[index])) + prompts[index] for index in chosen]
        mask = [[0] * (width - len(prompts[index])) + [1] * len(prompts[index]) for index in chosen]
        output = model.generate(
            input_ids=torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            max_new_tokens=max(limits[index] for index in chosen),
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(output.logits, dim=1).float().topk(2, dim=-1).values
        gaps = best[..., 0] - best[..., 1]
        for row, index in enumerate(chosen):
            tokens = output.sequences[row, width:].tolist()[: limits[index]]
            ends = [place for place, token in enumerate(tokens) if token in (EOS, TURN_END)]
            count = ends[0] + 1 if ends else len(tokens)
            text = tokenizer.decode(tokens[:count], skip_special_tokens=True)
            results[index] = (text, count, float(gaps[row, :count].min()))
    return [results[index] for index in range(len(prompts))]


def draw_trials(
    rng: random.Random, tokenizer: PreTrainedTokenizerBase, name: str, count: int
) -> list[Trial]:
    """Draws different examples of a task that have not been completed yet.

    Args:
        rng: The random generator.
        tokenizer: The tokenizer.
        name: The name of the task.
        count: How many to draw.

    Returns:
        The examples with their prompts and limits, and no completion.
    """
    trials: dict[tuple[int, ...], Trial] = {}
    for attempt in range(count * 10):
        if len(trials) == count:
            break
        scale = (attempt % 24) / 23 if attempt % 2 else rng.random() ** 2
        example = TASKS[name][0](rng, scale)
        messages = example.messages[:-1] if example.messages else None
        ids = prompt_ids(tokenizer, example.prompt, messages)
        length = len(tokenizer(example.answer, add_special_tokens=False)["input_ids"])
        limit = length + (SPARE_TOKENS if example.ends else 0)
        if len(ids) <= MAX_PROMPT_LENGTH and limit <= MAX_NEW_TOKENS:
            trials.setdefault(tuple(ids), Trial(example, ids, "", 0, 0.0, limit))
    return list(trials.values())


def run_trials(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, trials: Sequence[Trial]
) -> list[Trial]:
    """Completes the examples.

    Args:
        model: The model.
        tokenizer: The tokenizer.
        trials: The examples.

    Returns:
        The same with their completions.
    """
    results = complete(
        model,
        tokenizer,
        [trial.prompt_ids for trial in trials],
        [trial.max_new_tokens for trial in trials],
        batch_size=32,
    )
    return [
        Trial(trial.example, trial.prompt_ids, *result, trial.max_new_tokens)
        for trial, result in zip(trials, results, strict=True)
    ]


def is_right(trial: Trial) -> bool:
    """Tells whether a completion is the answer and stops where it should.

    Args:
        trial: The completion.

    Returns:
        True if it is right.
    """
    ended = trial.tokens < trial.max_new_tokens
    return trial.text == trial.example.answer and ended == trial.example.ends


def choose(trials: Sequence[Trial], count: int, used: collections.Counter[str]) -> list[Trial]:
    """Chooses completions for the checks, spread over their lengths.

    Args:
        trials: Right and clear completions of one task.
        count: How many to choose at most.
        used: How often each completion has been chosen; it is updated.

    Returns:
        The chosen ones.
    """
    ranked = sorted(trials, key=lambda trial: len(trial.prompt_ids) + trial.tokens)
    stride = max(1, len(ranked) // count)
    chosen: list[Trial] = []
    # The longest first, then every stride-th, then whatever is left.
    ranked.reverse()
    for trial in [trial for first in range(stride) for trial in ranked[first::stride]]:
        if len(chosen) == count:
            break
        if used[trial.text] < MAX_SAME_COMPLETION:
            used[trial.text] += 1
            chosen.append(trial)
    return chosen


def write_checks(folder: Path, seed: int) -> None:
    """Writes `checks.jsonl` and `chat_checks.jsonl` for a saved checkpoint.

    A completion gets in if it is right, if every step has a gap of `MIN_GAP` or
    more, and if the model gives the same in bfloat16.

    Args:
        folder: The folder of the checkpoint.
        seed: Seed of the prompts.
    """
    model, tokenizer = load(folder)
    low_model = copy.deepcopy(model).to(torch.bfloat16)
    rng = random.Random(seed)
    used: collections.Counter[str] = collections.Counter()
    checks: list[dict[str, Any]] = []
    chat_checks: list[dict[str, Any]] = []
    seen: set[str] = set()
    print(f"{'task':16} tries right clear bfloat16 chosen")
    for name in TASKS:
        trials = run_trials(model, tokenizer, draw_trials(rng, tokenizer, name, TRIES_PER_TASK))
        right = [trial for trial in trials if is_right(trial)]
        clear = [trial for trial in right if trial.gap >= MIN_GAP]
        low = run_trials(low_model, tokenizer, clear) if clear else []
        same = [trial for trial, other in zip(clear, low, strict=True) if is_right(other)]
        same = [trial for trial in same if trial.example.prompt not in seen]
        wanted = CHAT_CHECKS_PER_TASK if name in CHAT_TASKS else CHECKS_PER_TASK
        chosen = choose(same, wanted, used)
        print(
            f"{name:16} {len(trials):5} {len(right):5} {len(clear):5} {len(same):8} {len(chosen):6}"
        )
        for trial in chosen:
            answer = {"completion": trial.text, "max_new_tokens": trial.max_new_tokens}
            if trial.example.messages:
                chat_checks.append({"messages": list(trial.example.messages[:-1]), **answer})
            else:
                seen.add(trial.example.prompt)
                checks.append({"prompt": trial.example.prompt, **answer})
    rng.shuffle(checks)
    write_lines(folder / "checks.jsonl", checks)
    write_lines(folder / "chat_checks.jsonl", chat_checks)
    print(f"{len(checks)} checks, {len(chat_checks)} chat checks")


def verify(folder: Path) -> bool:
    """Verifies the checks, one prompt at a time, against the saved checkpoint.

    Args:
        folder: The folder of the checkpoint.

    Returns:
        True if every completion comes out as written and clear.
    """
    model, tokenizer = load(folder)
    failures = 0
    total = 0
    for name in ("checks.jsonl", "chat_checks.jsonl"):
        records = read_lines(folder / name)
        results = complete(
            model,
            tokenizer,
            [
                prompt_ids(tokenizer, item.get("prompt", ""), item.get("messages"))
                for item in records
            ],
            [item["max_new_tokens"] for item in records],
            batch_size=1,
        )
        total += len(records)
        for record, (text, _, gap) in zip(records, results, strict=True):
            if text != record["completion"] or gap < MIN_GAP:
                failures += 1
                print(f"{name}: gap {gap:.2f}, got {text!r} for {json.dumps(record)}")
    print(f"{total - failures} of {total} checks hold")
    return failures == 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line.

    Args:
        arguments: The arguments, or None for those of the process.

    Returns:
        The options.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--batch-rows", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="verify the saved model only")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the script.

    Args:
        arguments: The arguments, or None for those of the process.

    Returns:
        The exit status.
    """
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    folder: Path = options.output
    if not options.check:
        folder.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        write_json(folder / "config.json", CONFIG)
        write_json(folder / "generation_config.json", GENERATION_CONFIG)
        tokenizer = train_tokenizer(options.seed)
        save_tokenizer(tokenizer, folder)
        model = train_model(
            folder,
            tokenizer,
            options.seed,
            options.steps,
            options.batch_rows,
            options.learning_rate,
        )
        save_model(model, folder)
        print(f"trained in {time.monotonic() - started:.0f} s")
        write_checks(folder, options.seed + 2)
    return 0 if verify(folder) else 1


if __name__ == "__main__":
    sys.exit(main())

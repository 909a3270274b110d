"""Tokenizer folders of the kinds that models come with, made by the `tokenizers` library."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? 12 + 30 = 42.\n",
    "naïve café, façade, Grüße aus Köln; 你好，世界！今天天气很好。 こんにちは。\n",
    "emoji 😀 👩‍👩‍👧 🇩🇪 and <html> tags, \tindented\n\n  lines END STOP ###\n",
] * 4

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('System role is not supported') }}{% endif %}"
    "{% if m['role'] == 'echo' %}{{ raise_exception('Bad message ' + m['content']) }}{% endif %}"
    "<|turn|>{{ m['role'] }}: {{ m['content'] + '' }}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant:{% endif %}"
)


def write(folder: Path, tokenizer: Tokenizer, **config: object) -> Path:
    """A folder with the tokenizer's files and a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    return folder


def _add_bos(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )


def byte_level() -> Tokenizer:
    """As in GPT-2 and Llama 3: characters of several bytes are split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS[:1],
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens(
        [AddedToken("<think>", normalized=False), AddedToken("答 案", normalized=False)]
    )
    tokenizer.add_special_tokens(["<|turn|>"])
    _add_bos(tokenizer)
    return tokenizer


def sentencepiece(*, metaspace: bool = False) -> Tokenizer:
    """As in Llama 2: ▁ for a space, which the start of a text gains and loses; bytes for rare characters."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    alphabet = sorted({char for char in CORPUS[0] if char not in "\n "} | set("▁你好é"))
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
        )
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    tokenizer.train_from_iterator(CORPUS[0].split(), trainer)
    # The trainer marks all its extra tokens special; models have byte tokens as ordinary ones.
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = described["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.add_special_tokens(["<|turn|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    _add_bos(tokenizer)
    return tokenizer


def wordpiece() -> Tokenizer:
    """As in BERT: what a token reads like depends on its neighbours, so there are no pieces."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(
            vocab_size=300, special_tokens=["[UNK]", "<s>", "</s>"], show_progress=False
        ),
    )
    _add_bos(tokenizer)
    return tokenizer


def continuation(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text as they come after another, not at a start."""
    before = tokenizer.encode("a", add_special_tokens=False).ids
    ids: list[int] = tokenizer.encode(f"a{text}", add_special_tokens=False).ids
    assert ids[: len(before)] == before
    return ids[len(before) :]


def special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """The entries of tokenizer_config.json that name them."""
    known = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return {
        role: token for role, token in known.items() if tokenizer.token_to_id(token) is not None
    }

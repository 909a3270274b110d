"""TextStream against the tokenizers' own decode, and its stop strings against a search in the whole text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from djl_python_neuronx.artifacts.tokenizer import load_tokenizer
from djl_python_neuronx.engine.detokenizer import TextStream
from djl_python_neuronx.errors import StepError
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.types import FinishReason, GenerationRequest, TokenOutput
from tests.artifacts import tokenizer_folders as folders
from tests.engine.steps import across_the_border

MADE = {
    "byte_level": folders.byte_level(),
    "llama": folders.sentencepiece(),
    "metaspace": folders.sentencepiece(metaspace=True),
    "wordpiece": folders.wordpiece(),
}
TEXTS = st.lists(
    st.sampled_from(
        [*folders.CORPUS[0].split(), "你好", "世界！", "😀", "👩‍👩‍👧", "é", " ", "\n", "###"]
    )
).map(" ".join)


class WithoutPieces:
    """A tokenizer whose table is hidden, so that the window is decoded."""

    def __init__(self, tokenizer):
        self.special_ids = tokenizer.special_ids
        self.special_id = tokenizer.special_id
        self.pieces = None
        self.decode = tokenizer.decode


class WithoutDecode:
    """A tokenizer of which only the table is needed."""

    def __init__(self, tokenizer):
        self.special_ids = tokenizer.special_ids
        self.special_id = tokenizer.special_id
        self.pieces = tokenizer.pieces


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    table = {
        name: load_tokenizer(folders.write(root / name, made, **folders.special_tokens(made)))
        for name, made in MADE.items()
    }
    return table | {
        f"{name}, window": WithoutPieces(table[name]) for name in ("byte_level", "llama")
    }


def request_for(prompt_ids, *stop_strings, **fields):
    return GenerationRequest("r", prompt_ids, stop_strings=stop_strings, **fields)


def feed_all(stream, ids, sizes=(), reason=FinishReason.LENGTH):
    """Deltas of ids cut into outputs of these sizes, the rest one by one."""
    deltas, start = [], 0
    sizes = list(sizes)
    while start < len(ids):
        size = sizes.pop(0) if sizes else 1
        part = tuple(ids[start : start + size])
        start += size
        deltas.append(stream.feed(TokenOutput("r", part, reason if start >= len(ids) else None)))
    return deltas


def summary(deltas):
    """Text by deltas and by tokens, and the last delta; checks what holds for every stream."""
    said = [delta for delta in deltas if delta is not None]
    assert deltas[: len(said)] == said, "nothing may follow the end"
    assert [delta.finished for delta in said] == [False] * (len(said) - 1) + [True]
    by_delta = "".join(delta.text for delta in said)
    tokens = [token for delta in said for token in delta.tokens]
    assert by_delta == "".join(token.text for token in tokens)
    assert said[-1].num_generated_tokens == len(tokens)
    return by_delta, tokens, said[-1]


NAMES = ["byte_level", "llama", "metaspace", "wordpiece", "byte_level, window", "llama, window"]


@pytest.mark.parametrize("name", NAMES)
@given(prompt=TEXTS, generated=TEXTS, sizes=st.lists(st.integers(1, 5)))
@settings(max_examples=60, deadline=None)
def test_the_text_is_what_decode_adds_to_the_prompts(tokenizers, name, prompt, generated, sizes):
    tokenizer, made = tokenizers[name], MADE[name.split(",")[0]]
    prompt_ids = made.encode(prompt).ids
    ids = folders.continuation(made, f" {generated}")
    assume(ids)
    text, tokens, last = summary(
        feed_all(TextStream(request_for(prompt_ids), tokenizer), ids, sizes)
    )
    assert made.decode(prompt_ids + ids) == made.decode(prompt_ids) + text
    assert "\ufffd" not in text
    assert all("\ufffd" not in token.text for token in tokens)
    assert [token.id for token in tokens] == ids
    assert last.finish_reason is FinishReason.LENGTH
    assert last.num_prompt_tokens == len(prompt_ids)


@given(
    ids=st.lists(st.integers(0, MADE["byte_level"].get_vocab_size() - 1), min_size=1),
    sizes=st.lists(st.integers(1, 5)),
)
@settings(max_examples=150, deadline=None)
def test_any_ids_at_all_read_as_decode_reads_them(tokenizers, ids, sizes):
    made = MADE["byte_level"]
    text, _, _ = summary(
        feed_all(TextStream(request_for([0]), tokenizers["byte_level"]), ids, sizes)
    )
    assert text == made.decode(ids)


@pytest.mark.parametrize("name", ["byte_level", "llama"])
def test_the_table_needs_no_decode(tokenizers, name):
    made = MADE[name]
    stream = TextStream(request_for(made.encode("The fox").ids), WithoutDecode(tokenizers[name]))
    ids = folders.continuation(made, " quick 😀 fox")
    assert summary(feed_all(stream, ids))[0] == " quick 😀 fox"


@pytest.mark.parametrize("name", NAMES)
@given(words=st.lists(TEXTS, min_size=1), sizes=st.lists(st.integers(1, 5)))
@settings(max_examples=30, deadline=None)
def test_special_tokens_show_their_names_where_they_are_not_skipped(tokenizers, name, words, sizes):
    """None is skipped, or all but the one that comes within the text."""
    tokenizer, made = tokenizers[name], MADE[name.split(",")[0]]
    bos, eos = made.token_to_id("<s>"), made.token_to_id("</s>")
    prompt_ids = made.encode("The").ids
    ids = [one for text in words for one in (*folders.continuation(made, f" {text}"), bos)]

    def decoded(token_ids):
        return made.decode(token_ids, skip_special_tokens=False)

    for include, how in (
        (True, {"skips_special": False, "include_stop": True}),
        (False, {"skips_special": False}),
        (False, {"shown_ids": frozenset([bos]), "include_stop": True}),
    ):
        stream = TextStream(request_for(prompt_ids, **how), tokenizer)
        text, tokens, _ = summary(feed_all(stream, [*ids, eos], sizes, FinishReason.EOS))
        shown = decoded([*prompt_ids, *ids, *([eos] if include else [])])
        assert decoded(prompt_ids) + text == shown, "the token that ends a text is no part of it"
        assert tokens[-1].special
    hidden = [part for one in ids for part in ((one, eos) if one != bos else (one,))]
    stream = TextStream(request_for(prompt_ids, shown_ids=frozenset([bos])), tokenizer)
    text, _, _ = summary(feed_all(stream, hidden, sizes))
    assert decoded(prompt_ids) + text == decoded([*prompt_ids, *ids])


def test_the_leading_space_of_a_continuation_stays(tokenizers):
    made = MADE["llama"]
    space_fox = made.token_to_id("▁fox")
    assert space_fox is not None
    for prompt_ids, text in ([made.encode("The").ids, " fox"], [[1], "fox"]):
        stream = TextStream(request_for(prompt_ids), tokenizers["llama"])
        assert stream.feed(TokenOutput("r", (space_fox,))).text == text


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_at_the_end_of_a_prompt_take_no_space(tokenizers, name):
    """A chat's prompt ends with turn markers: behind them the text still goes on, it does not start."""
    made = MADE[name.split(",")[0]]
    prompt_ids = [*made.encode("The").ids, *[made.token_to_id("<s>")] * 8]
    ids = folders.continuation(made, " fox")
    text, _, _ = summary(feed_all(TextStream(request_for(prompt_ids), tokenizers[name]), ids))
    assert made.decode(prompt_ids) + text == made.decode(prompt_ids + ids)
    assert text.startswith(" ")


@pytest.mark.parametrize("name", ["byte_level", "byte_level, window"])
def test_a_character_appears_whole_and_a_cut_one_only_at_the_end(tokenizers, name):
    ids = MADE["byte_level"].encode("😀", add_special_tokens=False).ids
    assert len(ids) == 4
    stream = TextStream(request_for([5]), tokenizers[name])
    assert [delta.text for delta in feed_all(stream, ids)] == ["", "", "", "😀"]
    stream = TextStream(request_for([5]), tokenizers[name])
    assert [delta.text for delta in feed_all(stream, ids[:3])] == ["", "", "\ufffd"]


@pytest.mark.parametrize("name", NAMES)
def test_special_and_ending_tokens_are_listed_without_text(tokenizers, name):
    made = MADE[name.split(",")[0]]
    bos, eos = made.token_to_id("<s>"), made.token_to_id("</s>")
    word = made.encode("a", add_special_tokens=False).ids[-1]
    prompt_ids = made.encode("The").ids
    stream = TextStream(request_for(prompt_ids), tokenizers[name])
    deltas = feed_all(stream, [word, bos, word, eos], reason=FinishReason.EOS)
    text, tokens, last = summary(deltas)
    assert made.decode(prompt_ids) + text == made.decode([*prompt_ids, word, word])
    assert [token.special for token in tokens] == [False, True, False, True]
    assert tokens[1].text == tokens[3].text == ""
    assert last.finish_reason is FinishReason.EOS
    assert last.num_generated_tokens == len(tokens)
    # A stop token with a text of its own is not shown either, unless it was not what ended the sequence.
    for reason, shown in ((FinishReason.EOS, False), (FinishReason.LENGTH, True)):
        text, tokens, _ = summary(
            feed_all(TextStream(request_for(prompt_ids), tokenizers[name]), [word], reason=reason)
        )
        assert (bool(text), tokens[0].special) == (shown, not shown)


def test_ids_beyond_the_vocabulary_have_no_text(tokenizers):
    text, tokens, _ = summary(
        feed_all(TextStream(request_for([0, 99_999]), tokenizers["byte_level"]), [99_999, 40])
    )
    assert (text, tokens[0].text) == (MADE["byte_level"].decode([40]), "")


def cut(text, stops, include=False, early=0):
    """The kept part of a text: up to the stop string that ends first, of those the longest; a plain search.

    `include`: with the stop string; `early`: characters in which none ends the text.
    """
    for end in range(early + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end if include else end - max(map(len, found))], True
    return text, False


@given(
    text=st.text("ab\n", max_size=40),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=6), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 6)),
    reason=st.sampled_from([FinishReason.LENGTH, FinishReason.EOS]),
    include=st.booleans(),
    least=st.sampled_from([0, 0, 1, 3, 9]),
)
@settings(max_examples=400, deadline=None)
def test_stop_strings_cut_like_a_search_in_the_whole_text(
    tokenizers, text, stops, sizes, reason, include, least
):
    made = MADE["byte_level"]
    ids = made.encode(text, add_special_tokens=False).ids
    if reason is FinishReason.EOS:
        ids.append(made.token_to_id("</s>"))
    assume(ids)
    sampling = SamplingParams(min_new_tokens=least)
    request = request_for([5], *stops, include_stop=include, sampling=sampling)
    stream = TextStream(request, tokenizers["byte_level"])
    shown, tokens, last = summary(feed_all(stream, ids, sizes, reason))
    early = len(made.decode(ids[:least]))
    expected, stopped = cut(text, stops, include, early)
    assert shown == expected
    if not stopped:
        assert (last.finish_reason, len(tokens)) == (reason, len(ids))
        return
    assert last.finish_reason is FinishReason.STOP
    assert last.num_generated_tokens == len(tokens)
    # The last listed token is the one that completed the stop string.
    completed = [cut(made.decode(ids[:n]), stops, early=early)[1] for n in range(len(ids) + 1)]
    assert len(tokens) == completed.index(True)


@given(
    text=st.text("ab", min_size=1, max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1),
)
@settings(max_examples=200, deadline=None)
def test_no_more_is_held_back_than_could_become_a_stop_string(tokenizers, text, stops):
    made = MADE["byte_level"]
    text, _ = cut(text, stops)
    stream = TextStream(request_for([5], *stops), tokenizers["byte_level"])
    known = shown = ""
    for char in text:
        shown += stream.feed(
            TokenOutput("r", tuple(made.encode(char, add_special_tokens=False).ids))
        ).text
        known += char
        held = known[len(shown) :]
        beginnings = {stop[:n] for stop in stops for n in range(len(stop))}
        assert known == shown + held
        assert held == max((b for b in beginnings if known.endswith(b)), key=len)


@pytest.mark.parametrize("name", NAMES)
def test_a_stop_string_over_several_tokens(tokenizers, name):
    made = MADE[name.split(",")[0]]
    prompt_ids = made.encode("The").ids
    ids = folders.continuation(made, " quick brown fox jumps")
    stream = TextStream(request_for(prompt_ids, "never", "own fox"), tokenizers[name])
    text, tokens, last = summary(feed_all(stream, ids, [2]))
    assert text == " quick br"
    assert last.finish_reason is FinishReason.STOP
    assert last.num_generated_tokens == len(tokens) < len(ids)


@pytest.mark.parametrize("name", NAMES)
def test_a_stop_token_is_shown_only_where_it_is_asked_for(tokenizers, name):
    made = MADE[name.split(",")[0]]
    prompt_ids, eos = made.encode("The").ids, made.token_to_id("</s>")
    fox = folders.continuation(made, " fox")
    word = fox[-1]
    cases = [
        # a special token that is a stop string; one that is not; a stop token with a text; the model's own eos
        (("</s>",), {}, [*fox, eos], " fox</s>"),
        ((), {"stop_token_ids": frozenset({eos})}, [*fox, eos], " fox"),
        ((), {"stop_token_ids": frozenset({word})}, fox, " fox"),
        ((), {}, [*fox, word], " fox"),
    ]
    for stops, fields, ids, shown in cases:
        for include in (True, False):
            request = request_for(prompt_ids, *stops, include_stop=include, **fields)
            stream = TextStream(request, tokenizers[name])
            assert stream.stop_tokens == ({eos: "</s>"} if stops else {})
            text, tokens, last = summary(feed_all(stream, ids, reason=FinishReason.EOS))
            hidden = made.decode(prompt_ids + ids[:-1]).removeprefix(made.decode(prompt_ids))
            assert text == (shown if include else hidden)
            assert last.finish_reason is FinishReason.EOS
            assert len(tokens) == len(ids)


def test_text_that_is_shown_with_its_stop_string_is_not_held_back(tokenizers):
    made = MADE["byte_level"]
    stream = TextStream(request_for([5], "END", include_stop=True), tokenizers["byte_level"])
    ids = made.encode("xE", add_special_tokens=False).ids
    assert stream.feed(TokenOutput("r", tuple(ids))).text == "xE"


def test_a_long_stop_string_that_almost_comes_is_released(tokenizers):
    stop = "a" * 2000 + "b"
    a = MADE["byte_level"].encode("a", add_special_tokens=False).ids[0]
    stream = TextStream(request_for([5], stop), tokenizers["byte_level"])
    deltas = feed_all(stream, [a] * 2100)
    assert {delta.text for delta in deltas[:2000]} == {""}
    assert {delta.text for delta in deltas[2000:-1]} == {"a"}
    assert summary(deltas)[0] == "a" * 2100


def test_a_stop_string_is_prepared_as_far_as_the_text_has_matched(tokenizers):
    """All of it for each of many sequences would keep the event loop for a second."""
    stream = TextStream(request_for([5], "ab" * 500, "b" * 1000), tokenizers["byte_level"])
    made = MADE["byte_level"].encode("abab", add_special_tokens=False).ids
    stream.feed(TokenOutput("r", tuple(made)))
    assert all(len(stop._borders) <= 5 for stop in stream._stops)


def test_an_end_without_a_token_releases_what_is_held(tokenizers):
    made = MADE["byte_level"]
    stream = TextStream(request_for([5], "END"), tokenizers["byte_level"])
    assert (
        stream.feed(TokenOutput("r", tuple(made.encode("xE", add_special_tokens=False).ids))).text
        == "x"
    )
    last = stream.feed(TokenOutput("r", (), FinishReason.TIME))
    assert (last.text, last.tokens, last.finished) == ("E", (), True)
    assert stream.feed(TokenOutput("r", (5,))) is None


def test_eos_may_come_without_a_token(tokenizers):
    stream = TextStream(GenerationRequest("r", [5]), tokenizers["llama"])
    delta = stream.feed(TokenOutput("r", [], FinishReason.EOS))
    assert (delta.finish_reason, delta.tokens, delta.stop) == (FinishReason.EOS, (), "")


def test_an_error_passes_through(tokenizers):
    error = StepError("the step failed")
    stream = TextStream(request_for([5, 6]), tokenizers["byte_level"])
    stream.feed(TokenOutput("r", (40, 41)))
    delta = stream.feed(TokenOutput("r", (), FinishReason.ERROR, error))
    assert (delta.error, delta.finish_reason, delta.tokens) == (error, FinishReason.ERROR, ())
    assert (delta.num_prompt_tokens, delta.num_generated_tokens) == (2, 2)
    assert stream.feed(TokenOutput("r", (42,))) is None


def test_logprobs_are_those_of_the_models_distribution(tokenizers):
    logits = np.random.default_rng(0).normal(size=(2, 50)).astype(np.float32)
    stream = TextStream(request_for([5]), tokenizers["byte_level"])
    received = across_the_border(TokenOutput("r", (40, 41), logits=logits.copy()))
    delta = stream.feed(received)
    exact = logits.astype(np.float64)
    expected = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
    assert [token.logprob for token in delta.tokens] == pytest.approx(
        [expected[0, 40], expected[1, 41]], abs=1e-5
    )
    assert all(type(token.logprob) is float for token in delta.tokens)
    assert received.top is None
    last = stream.feed(TokenOutput("r", (40,))).tokens[0]
    assert (last.logprob, last.top) == (None, ())


@pytest.mark.parametrize("name", ["byte_level", "llama"])
def test_top_tokens_come_with_each_token_and_have_their_own_text(tokenizers, name):
    tokenizer, made = tokenizers[name], MADE[name]
    eos = made.token_to_id("</s>")
    fox, quick = (made.encode(f"a{word}").ids[-1] for word in (" fox", " quick"))
    part = made.encode("😀", add_special_tokens=False).ids[-1]
    logits = np.full((2, made.get_vocab_size()), -np.inf, np.float32)
    logits[0, [part, fox]] = 2.0, 3.0
    logits[1, [eos, quick, fox]] = 1.0, 1.0, 1.0
    stream = TextStream(request_for([5]), tokenizer)
    output = TokenOutput("r", (quick, quick), logits=logits, top_logprobs=3)
    output.logits[0, quick] = 1.0
    first, second = stream.feed(across_the_border(output)).tokens
    assert [one.id for one in first.top] == [fox, part, quick]
    assert [one.id for one in second.top] == sorted([eos, quick, fox])
    texts = {fox: " fox", quick: " quick", part: "\ufffd", eos: "</s>"}
    for token in (first, second):
        assert [one.text for one in token.top] == [texts[one.id] for one in token.top]
        (own,) = [one.logprob for one in token.top if one.id == quick]
        assert own == token.logprob
    total = np.log(np.exp([1.0, 2.0, 3.0]).sum())
    assert [one.logprob for one in first.top] == pytest.approx([3 - total, 2 - total, 1 - total])


@pytest.mark.parametrize("name", ["byte_level, window", "llama, window"])
def test_a_window_stays_as_short_at_the_end_of_a_long_text(tokenizers, name, monkeypatch):
    tokenizer, lens = tokenizers[name], []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **_: lens.append(len(ids)) or decode(ids))
    ids = folders.continuation(MADE[name.split(",")[0]], " hello world" * 100)
    feed_all(TextStream(request_for(ids[:50]), tokenizer), ids)
    assert max(lens[len(lens) // 2 :]) <= max(lens[:20])

"""The sampler against a plain float64 reference that sorts and normalises, and against itself in other company."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from djl_python_neuronx.engine.masks import constraints_of
from djl_python_neuronx.engine.sampler import Sampler, cumulated, locate, logprobs, most_likely
from djl_python_neuronx.errors import RequestError
from djl_python_neuronx.sampling import MAX_LISTED, SamplingParams
from tests.distributions import EOS, EXCLUDING, assert_followed, hugging_face

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]


def reference(
    logits: Float32Array,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> Float64Array:
    """float64[V]: the distribution that the rules define, step by step."""
    logits, history = logits.copy(), [*prompt, *output]
    for token, bias in params.logit_bias:
        logits[token] += bias
    for token in set(history):
        penalty = np.float32(params.repetition_penalty)
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(output):
        count = np.float32([*output].count(token))
        logits[token] -= np.float32(params.frequency_penalty) * count
        logits[token] -= np.float32(params.presence_penalty)
    logits[[*excluded(len(logits), params, prompt, output)]] = -np.inf
    if params.temperature == 0 or params.top_k == 1:
        only = np.zeros(len(logits))
        only[logits.argmax()] = 1
        return only
    scaled = logits.astype(np.float64) / params.temperature
    probabilities: Float64Array = np.exp(scaled - scaled.max())
    if 0 < params.top_k < len(logits):
        probabilities[logits < np.sort(logits)[-params.top_k]] = 0
    probabilities /= probabilities.sum()
    if params.top_p < 1:
        descending = np.sort(probabilities)[::-1]
        size = 1 + int((descending.cumsum() < params.top_p).sum())
        probabilities[probabilities < descending[size - 1]] = 0
    probabilities[probabilities < params.min_p * probabilities.max()] = 0
    probabilities /= probabilities.sum()
    if params.typical_p < 1:
        with np.errstate(divide="ignore"):
            information = -np.log(probabilities)
        entropy = probabilities[probabilities > 0] @ information[probabilities > 0]
        distances = abs(information - entropy)
        order = distances.argsort()
        size = 1 + int((probabilities[order].cumsum() < params.typical_p).sum())
        probabilities[distances > distances[order][size - 1]] = 0
        probabilities /= probabilities.sum()
    return probabilities


def excluded(
    vocab_size: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> set[int]:
    """The tokens that may not follow."""
    ids, size = [*prompt, *output], params.no_repeat_ngram_size
    found = {*params.suppress_tokens, *(params.begin_suppress_tokens if not output else ())}
    if params.allowed_token_ids is not None:
        found |= set(range(vocab_size)) - set(params.allowed_token_ids)
    if len(output) < params.min_new_tokens or len(ids) < params.min_length:
        found.add(EOS)
    for words, before in ((params.bad_words_ids, ids), (params.bad_words, [*output])):
        for *others, last in words:
            if words is params.bad_words_ids and [*others, last] == [EOS]:
                continue
            if before[len(before) - len(others) :] == others:
                found.add(last)
    for i in range(len(ids) - size + 1 if size else 0):
        *others, last = ids[i : i + size]
        if ids[len(ids) - size + 1 :] == others:
            found.add(last)
    return found


def int32s(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def assign(
    sampler: Sampler,
    slot: int,
    params: SamplingParams,
    prompt: Sequence[int],
    seed: int,
    output: Sequence[int] = (),
) -> None:
    """Start a sequence as the engine does."""
    constraints = constraints_of(params, prompt, {EOS}, sampler._listed.shape[1])
    sampler.assign(slot, params, prompt, seed, output, constraints)


def draw(
    logits: Float32Array,
    params: SamplingParams,
    count: int,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> Int32Array:
    """int32[count]: tokens that as many slots with seeds 0, 1, ... draw from the same logits."""
    sampler = Sampler(8, len(logits))
    drawn = []
    for start in range(0, count, 8):
        for slot in range(8):
            assign(sampler, slot, params, prompt, start + slot, output)
        drawn.append(
            sampler.sample(
                np.tile(logits, (8, 1)), np.arange(8, dtype=np.int32), np.full(8, 5, np.int32)
            )
        )
    return np.concatenate(drawn)


def assert_follows(drawn: Int32Array, probabilities: Float64Array) -> None:
    """Nothing outside the support, and a chi-square within five standard deviations."""
    counts = np.bincount(drawn, minlength=len(probabilities))
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * len(drawn)
    order = expected.argsort()
    # Bins of at least 10 expected draws, made of the tokens in ascending order.
    bins = (expected[order].cumsum() // 10).astype(int)
    observed, wanted = np.bincount(bins, counts[order]), np.bincount(bins, expected[order])
    observed, wanted = observed[wanted > 5], wanted[wanted > 5]
    chi2 = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = max(1, len(wanted) - 1)
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5 + 1


def normal(vocab_size: int, seed: int = 0, scale: float = 2.0) -> Float32Array:
    return (np.random.default_rng(seed).standard_normal(vocab_size) * scale).astype(np.float32)


class TestParams:
    def test_defaults_are_greedy_and_off(self) -> None:
        assert SamplingParams() == SamplingParams(
            temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=None
        )
        logits = normal(300)
        assert np.array_equal(
            reference(logits, SamplingParams(temperature=1.0), [7, 8], [8]),
            reference(logits, SamplingParams(temperature=1.0)),
        )

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("temperature", -0.1),
            ("temperature", float("nan")),
            ("temperature", float("inf")),
            ("temperature", "0.5"),
            ("temperature", True),
            ("temperature", None),
            ("top_k", -1),
            ("top_k", 1.0),
            ("top_p", 0),
            ("top_p", 1.01),
            ("min_p", -0.5),
            ("min_p", 2),
            ("repetition_penalty", 0),
            ("repetition_penalty", [1.1]),
            ("typical_p", 0),
            ("typical_p", True),
            ("presence_penalty", 2.1),
            ("frequency_penalty", -2.1),
            ("logit_bias", ((5,),)),
            ("logit_bias", ((5, "1"),)),
            ("logit_bias", ((5, float("nan")),)),
            ("logit_bias", tuple((i, 1.0) for i in range(MAX_LISTED + 1))),
            ("allowed_token_ids", ()),
            ("allowed_token_ids", (5, -1)),
            ("allowed_token_ids", (5, True)),
            ("bad_words", ((),)),
            ("bad_words", (5,)),
            ("bad_words_ids", ((5, "6"),)),
            ("bad_words_ids", tuple((i, 5) for i in range(MAX_LISTED // 2 + 1))),
            ("suppress_tokens", 5),
            ("begin_suppress_tokens", (2.0,)),
            ("no_repeat_ngram_size", 65),
            ("min_new_tokens", -1),
            ("min_length", 2**31),
            ("seed", -1),
            ("seed", 2**64),
            ("seed", False),
        ],
    )
    def test_what_no_rule_can_honour_is_refused_by_name(self, name: str, value: object) -> None:
        with pytest.raises(RequestError, match=rf"^{name} (is|has) .*; expected \w"):
            SamplingParams(**{name: value})  # type: ignore[arg-type]

    def test_a_long_wrong_value_is_not_repeated(self) -> None:
        with pytest.raises(RequestError) as caught:
            SamplingParams(temperature="secret " * 50)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 150

    def test_integers_pass_for_floats(self) -> None:
        params = SamplingParams(
            temperature=1, top_p=1, min_p=0, repetition_penalty=2, seed=2**64 - 1
        )
        assert draw(normal(50), params, 8).min() >= 0

    def test_from_mapping_takes_the_wire_names_and_leaves_the_rest(self) -> None:
        values = {"temperature": 0.5, "top_k": 3, "seed": None, "stream": True}
        assert SamplingParams.from_mapping(values) == SamplingParams(temperature=0.5, top_k=3)
        values = {"logit_bias": {"5": 1, "07": -2.5}, "bad_words_ids": [[5, 6], [7]]}
        assert SamplingParams.from_mapping(values) == SamplingParams(
            logit_bias=((5, 1), (7, -2.5)), bad_words_ids=((5, 6), (7,))
        )
        for wrong in ({"x": 1}, {"-5": 1}, {"5" * 4999: 1}, {"5": None}, [5], 5, "5"):
            with pytest.raises(RequestError, match=r"^logit_bias "):
                SamplingParams.from_mapping({"logit_bias": wrong})
        assert set(SamplingParams.WIRE_NAMES) == set(vars(SamplingParams()))


class TestGreedy:
    def test_a_tie_goes_to_the_lowest_id(self) -> None:
        logits = np.zeros(300, np.float32)
        logits[[7, 9, 200]] = 3.0
        assert set(draw(logits, SamplingParams(), 8)) == {7}
        assert set(draw(logits, SamplingParams(temperature=1.0, top_k=1), 8)) == {7}

    @pytest.mark.parametrize(
        ("penalty", "presence", "size"),
        [
            *((0.5, 0, 0), (1.0, 0, 0), (1.2, 0, 0), (3.0, 0, 0)),
            *((1.0, 0.4, 0), (1.2, -0.4, 0), (1.0, 0.0, 1), (0.5, -2.0, 2), (1.0, -2.0, 3)),
        ],
    )
    @pytest.mark.parametrize("vocab_size", [300, 5003])
    def test_whole_history_counts(
        self, penalty: float, presence: float, size: int, vocab_size: int
    ) -> None:
        """Thirty steps on nearly equal logits, where a wrong history changes the winner."""
        params = SamplingParams(
            repetition_penalty=penalty,
            presence_penalty=presence,
            frequency_penalty=presence / 3,
            no_repeat_ngram_size=size,
            bad_words=((5,),),
        )
        sampler = Sampler(2, vocab_size)
        logits = normal(vocab_size, seed=1).round(1)
        prompt = np.argsort(logits)[-9:-1:2].tolist() * 2
        output: list[int] = []
        assign(sampler, 1, params, prompt, 0)
        for step in range(30):
            token = int(sampler.sample(logits[None], int32s(1), int32s(step))[0])
            assert token == reference(logits, params, prompt, output).argmax()
            output.append(token)
            if step == 15:  # as a sequence that resumes
                assign(sampler, 1, params, prompt, 0, output)

    def test_penalty_agrees_with_hugging_face(self) -> None:
        torch = pytest.importorskip("torch", reason="torch is not installed")
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        logits = normal(500, seed=3)
        for penalty in (0.7, 1.3):
            history = np.argsort(logits)[-40::2].tolist()
            theirs = transformers.RepetitionPenaltyLogitsProcessor(penalty)
            scores = theirs(torch.tensor([history]), torch.tensor(logits[None]))
            assert draw(logits, SamplingParams(repetition_penalty=penalty), 8, history)[0] == int(
                scores.argmax()
            )


RULES = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, top_p=0.1),
    SamplingParams(temperature=1.5, min_p=0.05),
    SamplingParams(temperature=1.5, top_k=300, top_p=0.7, min_p=0.02),
    SamplingParams(temperature=2.0, top_k=100, top_p=0.99, min_p=0.2),
    SamplingParams(temperature=1.0, top_p=1e-300),
    SamplingParams(temperature=1.0, top_k=40, top_p=0.9, repetition_penalty=1.4),
    SamplingParams(temperature=1.0, top_k=40, repetition_penalty=0.6),
    SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.4),
    SamplingParams(temperature=1.0, top_p=0.95, min_p=0.1, repetition_penalty=0.8),
    SamplingParams(temperature=1.0, typical_p=0.3),
    SamplingParams(temperature=0.8, top_k=10, top_p=0.95, typical_p=0.95),
    SamplingParams(temperature=1.3, top_p=0.8, min_p=0.01, typical_p=0.6),
    SamplingParams(temperature=2.0, min_p=0.02, typical_p=0.8, presence_penalty=-1.0),
    SamplingParams(temperature=1.0, presence_penalty=1.5, frequency_penalty=0.7),
    SamplingParams(temperature=1.0, top_k=60, presence_penalty=0.5, frequency_penalty=-0.6),
    SamplingParams(temperature=1.5, logit_bias=((3, 5.0), (17, -100.0)), repetition_penalty=1.3),
    SamplingParams(temperature=1.5, top_k=9, logit_bias=((3, 9), (30, 8.5)), frequency_penalty=2),
]
MASKS = [
    SamplingParams(temperature=1.5, top_k=top_k, **fields)
    for fields in EXCLUDING
    for top_k in (0, 145)
]


def histories(logits: Float32Array) -> list[tuple[list[int], list[int]]]:
    """Prompts and outputs: of likely tokens, and with n-grams and words of `EXCLUDING`."""
    prompt = [*np.argsort(logits)[-60::2].tolist(), 17, 4]
    return [(prompt, []), (prompt, [30, 21, 17]), (prompt[:5], [*prompt, 30, 17, 4, 17])]


class TestDistribution:
    @pytest.mark.parametrize(
        ("name", "way"),
        [
            (name, way)
            for name in SamplingParams.WIRE_NAMES
            for way in ("top_k", "whole row")
            if name != "seed" and (name, way) != ("top_k", "whole row")
        ],
    )
    def test_each_parameter_has_a_rule_in_the_reference(self, name: str, way: str) -> None:
        """In both ways to draw some entry of RULES sets it, and the reference differs without it."""
        logits = normal(300)
        default = getattr(SamplingParams(), name)
        assert any(
            not np.array_equal(
                reference(logits, params, *history),
                reference(logits, replace(params, **{name: default}), *history),
            )
            for params in RULES + MASKS
            if (params.top_k > 0) == (way == "top_k") and getattr(params, name) != default
            for history in histories(logits)
        ), f"set {name} in an entry of RULES ({way}), and apply it in reference()"

    @pytest.mark.parametrize("vocab_size", [150, 5003])
    def test_the_reference_is_hugging_face_s(self, vocab_size: int) -> None:
        logits = normal(vocab_size, seed=vocab_size)
        for params, history in product(RULES + MASKS, histories(logits)):
            wanted = hugging_face(logits, params, *history)
            found = reference(logits, params, *history)
            np.testing.assert_allclose(found, wanted, atol=1e-7, err_msg=f"{params} {history}")

    def test_900_draws_of_each_combination_follow_hugging_face(self) -> None:
        logits = normal(300, seed=8)
        axes = ((0.7, 1.0, 1.6), (0, 4, 40), (1.0, 0.9, 0.5), (0.0, 0.1), (1.0, 0.8))
        draws = {}
        for combination in product(*axes):
            names = ("temperature", "top_k", "top_p", "min_p", "typical_p")
            params = SamplingParams(**dict(zip(names, combination, strict=True)))
            draws[params] = draw(logits, params, 900), hugging_face(logits, params)
        assert_followed(draws)

    @pytest.mark.parametrize("vocab_size", [150, 5003])
    def test_follows_the_reference(self, vocab_size: int) -> None:
        logits = normal(vocab_size, seed=vocab_size)
        turns = itertools.cycle(histories(logits))
        for params, history in zip(RULES + MASKS, turns, strict=False):
            wanted = reference(logits, params, *history)
            assert_follows(draw(logits, params, 2400, *history), wanted)
        # Whatever follows is allowed, and nothing else: greedy on logits that are the same for all.
        for params, history in product(MASKS, histories(logits)):
            flat = np.zeros(vocab_size, np.float32)
            kept = np.flatnonzero(reference(flat, replace(params, top_k=0), *history))
            greedy = replace(params, temperature=0.0)
            for token in [*range(35), 147]:
                flat[token] = 1.0
                (found,) = set(draw(flat, greedy, 8, *history).tolist())
                assert found == (token if token in kept else kept[0]), (params, history)
                flat[token] = 0.0

    @pytest.mark.parametrize(
        "params", [rule for rule in RULES if rule.repetition_penalty == 1], ids=repr
    )
    def test_ties_stay_or_go_together(self, params: SamplingParams) -> None:
        logits = normal(700, seed=2).round(1)
        assert_follows(draw(logits, params, 2400), reference(logits, params, []))

    @pytest.mark.parametrize("offset", [-5000.0, 80.0, 5000.0])
    def test_a_common_offset_changes_nothing(self, offset: float) -> None:
        logits = (normal(300, seed=4) * 64).round() / np.float32(64)
        params = SamplingParams(temperature=0.5, top_p=0.9, min_p=0.001)
        moved = (logits + offset).astype(np.float32)
        assert_follows(draw(moved, params, 2400), reference(logits, params, []))

    @settings(max_examples=30, deadline=None)
    @given(
        vocab_size=st.sampled_from([40, 4095, 4096, 6007]),
        top_k=st.integers(2, 24),
        penalty=st.sampled_from([1.0, 1.1, 5.0, 0.5]),
        seed=st.integers(0, 2**32),
        coarse=st.booleans(),
        offset=st.sampled_from([0, -20]),
    )
    def test_top_k_keeps_exactly_the_k_best(
        self, vocab_size: int, top_k: int, penalty: float, seed: int, coarse: bool, offset: int
    ) -> None:
        """Hot enough, every kept token is drawn: 1200 draws miss one of 60 with a chance of 1e-7."""
        logits = normal(vocab_size, seed) + np.float32(offset)
        if coarse:
            logits = logits.round(1)
        params = SamplingParams(temperature=1e4, top_k=top_k, repetition_penalty=penalty)
        history = tuple(np.argsort(logits)[-top_k:].tolist())
        wanted = np.flatnonzero(reference(logits, params, list(history)))
        assert set(draw(logits, params, 20 * len(wanted) + 200, history)) <= set(wanted.tolist())
        if len(wanted) <= 60:
            assert set(draw(logits, params, 1200, history)) == set(wanted.tolist())

    def test_a_vocabulary_of_one_value_is_uniform(self) -> None:
        logits = np.full(5000, 2.5, np.float32)
        for params in (
            SamplingParams(temperature=1.0, top_k=5),
            SamplingParams(temperature=1.0, top_p=0.5),
        ):
            assert_follows(draw(logits, params, 800), np.full(5000, 1 / 5000))

    def test_a_masked_vocabulary(self) -> None:
        logits = np.full(5003, -np.inf, np.float32)
        logits[[3, 4000, 5002]] = [1.0, 2.0, 0.5]
        for params in RULES:
            assert_follows(draw(logits, params, 400, (4000,)), reference(logits, params, [4000]))

    @pytest.mark.parametrize("temperature", [1e-40, 1e-5, 1e5, 1e300])
    @pytest.mark.parametrize("top_k", [0, 10])
    def test_extreme_temperatures(self, temperature: float, top_k: int) -> None:
        logits = normal(300, seed=5)
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=0.5)
        drawn = draw(logits, params, 400)
        if temperature < 1:
            assert set(drawn) == {logits.argmax()}
        else:
            assert len(set(drawn)) >= 5

    def test_a_sum_that_is_rounded_up_leads_to_a_token_with_weight(self) -> None:
        for vocab_size in (1, 7, 300, 5000):
            weights = (np.arange(vocab_size) % 3 == 0).astype(np.float32)
            mass = cumulated(weights) * 1.001
            for uniform in np.linspace(0, np.nextafter(1, 0), 50):
                assert weights[locate(float(uniform), weights, mass)] == 1


class TestSeeds:
    def test_the_draw_depends_on_seed_and_position_only(self) -> None:
        logits = normal(300)[None]
        sampler = Sampler(1, 300)

        def at(seed: int, position: int) -> int:
            sampler.assign(0, SamplingParams(temperature=5.0), [], seed)
            return int(sampler.sample(logits, int32s(0), int32s(position))[0])

        first = [at(1, position) for position in range(20)]
        assert first == [at(1, position) for position in range(20)]
        assert first != [at(2, position) for position in range(20)]
        assert len(set(first)) > 10

    def test_neighbouring_seeds_and_positions_are_independent(self) -> None:
        sampler = Sampler(64, 16)
        slots = np.arange(64, dtype=np.int32)
        for slot in range(64):
            sampler.assign(slot, SamplingParams(temperature=1.0), [], slot)
        table = np.array(
            [
                sampler.sample(np.zeros((64, 16), np.float32), slots, slots * 0 + i)
                for i in range(64)
            ]
        )
        uniform = np.full(256, 1 / 256)
        assert_follows((table[1:] * 16 + table[:-1]).ravel(), uniform)
        assert_follows((table[:, 1:] * 16 + table[:, :-1]).ravel(), uniform)
        assert_follows((table[1:, :-1] * 16 + table[:-1, 1:]).ravel(), uniform)


VALUES: dict[str, list[Any]] = {
    # Each field's default and every value in RULES, with more where edges lie.
    name: [*{getattr(params, name): None for params in (SamplingParams(), *RULES, *MASKS)}]
    for name in SamplingParams.WIRE_NAMES
    if name != "seed"
}
VALUES["temperature"] += [0.3, 2.5]
VALUES["top_k"] += [1, 5, 50, 3000]
VALUES["top_p"] += [0.4]
PARAMS = st.builds(
    SamplingParams, **{name: st.sampled_from(values) for name, values in VALUES.items()}
)


class TestBatch:
    @settings(max_examples=40, deadline=None)
    @given(
        rows=st.lists(
            st.tuples(PARAMS, st.integers(0, 2**64 - 1), st.integers(0, 40)),
            min_size=2,
            max_size=12,
        ),
        vocab_size=st.sampled_from([150, 4100, 4999]),
        scale=st.sampled_from([0.1, 2.0, 8.0]),
        data=st.randoms(use_true_random=False),
    )
    def test_a_row_is_the_same_in_any_company(
        self,
        rows: list[tuple[SamplingParams, int, int]],
        vocab_size: int,
        scale: float,
        data: object,
    ) -> None:
        slots = list(range(len(rows) + 5))
        data.shuffle(slots)  # type: ignore[attr-defined]
        together, alone = Sampler(len(slots), vocab_size), Sampler(1, vocab_size)
        placed = sorted(zip(slots, range(len(rows))))  # noqa: B905
        logits = [
            normal(len(rows) * vocab_size, step, scale).reshape(len(rows), -1) for step in range(3)
        ]
        for slot, i in placed:
            params, seed, prompt_len = rows[i]
            assign(together, slot, params, range(prompt_len), seed)
        order = [i for _, i in placed]
        index = np.array([slot for slot, _ in placed], np.int32)
        positions = np.array([rows[i][2] for i in order], np.int32)
        found = [together.sample(logits[step][order], index, positions + step) for step in range(3)]
        for row, i in enumerate(order):
            params, seed, prompt_len = rows[i]
            assign(alone, 0, params, range(prompt_len), seed)
            for step in range(3):
                token = alone.sample(logits[step][i : i + 1], int32s(0), int32s(prompt_len + step))[
                    0
                ]
                assert token == found[step][row]

    def test_logits_are_only_read_and_may_be_a_view(self) -> None:
        sampler = Sampler(len(RULES), 5003)
        for slot, params in enumerate(RULES):
            sampler.assign(slot, params, range(0, 5003, 7), slot)
        logits = normal(2 * len(RULES) * 5003).reshape(len(RULES), 2, 5003)
        before = logits.copy()
        slots = np.arange(len(RULES), dtype=np.int32)
        tokens = sampler.sample(logits[:, -1], slots, slots)
        assert np.array_equal(before, logits)
        for slot, params in enumerate(RULES):
            assert reference(logits[slot, -1], params, list(range(0, 5003, 7)))[tokens[slot]] > 0

    @pytest.mark.parametrize(
        "params", [SamplingParams(), SamplingParams(repetition_penalty=1.5), *RULES], ids=repr
    )
    def test_a_row_without_a_distribution_is_minus_one_and_alone(
        self, params: SamplingParams
    ) -> None:
        vocab_size = 5003
        logits = normal(5 * vocab_size).reshape(5, -1)
        logits[1, 4990] = np.nan
        logits[2] = -np.inf
        logits[3, 17] = np.inf
        sampler = Sampler(5, vocab_size)
        for slot in range(5):
            sampler.assign(slot, params, [1, 2], slot)
        slots = np.arange(5, dtype=np.int32)
        tokens = sampler.sample(logits, slots, slots)
        assert tokens[1:4].tolist() == [-1, -1, -1]
        for slot in (0, 4):
            assert reference(logits[slot], params, [1, 2])[tokens[slot]] > 0

    def test_a_new_sequence_does_not_inherit_history(self) -> None:
        logits = np.zeros(100, np.float32)
        logits[[4, 9]] = [2.0, 1.9]
        sampler = Sampler(1, 100)
        params = SamplingParams(repetition_penalty=2.0)

        def next_token() -> int:
            return int(sampler.sample(logits[None], int32s(0), int32s(0))[0])

        sampler.assign(0, params, [4], 0)
        assert next_token() == 9
        sampler.assign(0, params, [], 0)
        assert [next_token(), next_token()] == [4, 9]
        sampler.release(0)
        sampler.release(0)
        sampler.assign(0, SamplingParams(), [4], 0)
        assert next_token() == 4

    def test_rows_for_a_device(self) -> None:
        sampler = Sampler(3, 100)
        sampler.assign(0, SamplingParams(temperature=1e-60, top_k=7, top_p=1e-60), [], 0)
        sampler.assign(1, SamplingParams(temperature=0.5, top_k=7, top_p=0.75), [], 0)
        sampler.assign(2, SamplingParams(temperature=0.5, top_k=7, top_p=0.75), [], 0)
        sampler.assign(2, SamplingParams(top_p=0.3), [], 0)
        rows = sampler.device_rows(np.array([1, 2], np.int32))
        assert rows.tolist() == [[7, 0.75, 0.5], [1, 1, 1]]
        # A library refuses a top_p of 0, and with it the step of all rows.
        assert (sampler.device_rows(np.array([0], np.int32)) > 0).all()
        assert rows.dtype == np.float32


def test_logprobs_are_the_log_softmax() -> None:
    logits = np.stack([normal(5000, scale=3), normal(5000, 1) + 500, normal(5000, 2)])
    logits[2, 9] = -np.inf
    wide = logits.astype(np.float64)
    expected = wide - wide.max(axis=1, keepdims=True)
    expected -= np.log(np.exp(expected).sum(axis=1, keepdims=True))
    before = logits.copy()
    for row, wanted in zip(logits, expected, strict=True):
        found = logprobs(row, [3, 4, 9])
        np.testing.assert_allclose(found, wanted[[3, 4, 9]], rtol=1e-6, atol=1e-5)
        assert found.dtype == np.float32
    assert np.array_equal(before, logits)


@settings(max_examples=100, deadline=None)
@given(
    row=st.lists(st.sampled_from([-np.inf, -40.0, -1.0, 0.0, 0.5, 7.0]), max_size=60),
    repeats=st.integers(1, 100),
    count=st.integers(1, 25),
)
def test_the_most_likely_tokens_are_the_first_of_a_stable_sort(row, repeats, count) -> None:  # type: ignore[no-untyped-def]
    logits = np.array([*row, 0.25] * repeats, np.float32)
    before = logits.copy()
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    finite = [i for i in order if logits[i] > -np.inf]
    assert most_likely(logits, count) == finite[:count]
    assert np.array_equal(before, logits)

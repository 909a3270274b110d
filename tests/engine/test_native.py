"""The compiled kernel of the sampler against the rules in numpy: the same tokens, with each processor's instructions.

`python -m tests.engine.test_native LIBRARY` runs that comparison alone: with a library whose memory is checked, in a
process of its own.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from djl_python_neuronx.engine import native
from djl_python_neuronx.engine.masks import UInt32Array
from djl_python_neuronx.engine.sampler import Float32Array, Int32Array, Sampler
from djl_python_neuronx.sampling import SamplingParams
from tests.distributions import EXCLUDING

ROOT = Path(__file__).parents[2]
SPECIAL = (np.nan, -np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, -0.0)


def one_of(*usual: float, **limits: Any) -> st.SearchStrategy[float]:
    return st.sampled_from(usual) | st.floats(**limits)


RULES = {
    "temperature": one_of(0, 0.8, 1, 1e-40, 1e-5, 1e5, 1e300, min_value=0, max_value=3),
    "top_k": st.sampled_from([0, 0, 1, 2, 3, 50, 300, 1024, 5000]) | st.integers(0, 40),
    "top_p": one_of(1, 1, 0.9, 0.5, 0.01, 1e-300, min_value=1e-9, max_value=1),
    "min_p": one_of(0, 0, 0.05, 1, min_value=0, max_value=1),
    "typical_p": one_of(1, 1, 0.95, 0.5, 0.01, 1e-300, min_value=1e-9, max_value=1),
    "presence_penalty": one_of(0, 0, 2, -2, min_value=-2, max_value=2),
    "frequency_penalty": one_of(0, 0, 0.5, -2, min_value=-2, max_value=2),
    "logit_bias": st.just(())
    | st.dictionaries(st.integers(0, 0), one_of(-100, 100, 1e300, min_value=-5, max_value=5)).map(
        lambda found: tuple(found.items())
    ),
    "repetition_penalty": one_of(1, 1, 1.1, 5, 0.5, 1e30, 1e-30, min_value=0.5, max_value=2),
}
PARAMS = st.builds(SamplingParams, **RULES)


@dataclass
class Excludes:
    """A constraint: after each token another share of the vocabulary may follow."""

    share: float
    seed: int

    def narrow(self, bits: UInt32Array, output_ids: list[int]) -> None:
        rng = np.random.default_rng([self.seed, len(output_ids), *output_ids[-1:]])
        words = rng.integers(0, 2**32, len(bits), np.uint32)
        # Whole words of either kind, and mixed ones.
        kinds = rng.random(len(bits)) / max(self.share, 1e-9)
        bits &= np.where(kinds < 0.5, np.uint32(0), np.where(kinds < 1, words, ~np.uint32(0)))


@dataclass(frozen=True)
class Case:
    """Logits and what is asked of them."""

    vocab_size: int
    rows: list[tuple[SamplingParams, int, int, float | None]]
    """Parameters, seed, length of the prompt, share of the words of the mask that exclude tokens; None: no mask."""
    seed: int
    scale: float
    coarse: bool
    masked: float
    """Share of the logits that are -inf."""
    planted: list[tuple[int, float, float]]
    """Row, place as a share of the row, value."""
    layout: str
    position: int
    note: bool

    def logits(self) -> Float32Array:
        """float32[rows, vocab_size] in the layout."""
        count, rng = len(self.rows), np.random.default_rng(self.seed)
        values = rng.standard_normal((count, self.vocab_size)) * self.scale
        values = values.round(1) if self.coarse else values
        values[rng.random(values.shape) < self.masked] = -np.inf
        for row, share, value in self.planted:
            values[row % count, int(share * self.vocab_size)] = value
        with np.errstate(over="ignore"):
            made = values.astype(np.float32)
        match self.layout:
            case "a column of three":
                return np.repeat(made[:, None], 3, axis=1)[:, 1]
            case "backwards":
                return made[::-1].copy()[::-1]
            case "transposed":
                return np.asfortranarray(made)
            case "float64":
                return made.astype(np.float64)  # type: ignore[return-value]
        made.flags.writeable = False
        return made

    def tokens(self, library: Path | None, threads: int = 1) -> list[list[int]]:
        """The tokens of three steps, and of a proposal before each of them."""
        sampler = Sampler(len(self.rows) + 2, self.vocab_size, library=library, threads=threads)
        assert (sampler._kernel is None) == (library is None)
        rng = np.random.default_rng(self.seed)
        slots = rng.permutation(len(self.rows) + 2)[: len(self.rows)].astype(np.int32)
        for slot, (params, seed, length, excluded) in zip(slots, self.rows, strict=True):
            constraints = [] if excluded is None else [Excludes(excluded, seed)]
            known = rng.integers(0, self.vocab_size, length).tolist()
            prompt, output = known[: length // 2], known[length // 2 :]
            sampler.assign(int(slot), params, prompt, seed, output, constraints)
        logits, found = self.logits(), []
        for step in range(3):
            positions = np.full(len(slots), self.position + step, np.int32)
            found.append(sampler.sample(logits, slots, positions, note=False).tolist())
            found.append(sampler.sample(logits, slots, positions, note=self.note).tolist())
        return found


CASES = st.builds(
    Case,
    vocab_size=st.sampled_from([1, 2, 63, 300, 1023, 1024, 1025, 2048, 5003, 20_000]),
    rows=st.lists(
        st.tuples(
            PARAMS,
            st.integers(0, 2**64 - 1),
            st.integers(0, 80),
            st.sampled_from([None, None, 0, 0.5, 1, 2]),
        ),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([0.01, 1, 3, 20, 1e30, 1e38]),
    coarse=st.booleans(),
    masked=st.sampled_from([0, 0, 0.01, 0.9, 0.9995, 1]),
    planted=st.lists(
        st.tuples(st.integers(0, 4), st.floats(0, 1, exclude_max=True), st.sampled_from(SPECIAL)),
        max_size=3,
    ),
    layout=st.sampled_from(["plain", "a column of three", "backwards", "transposed", "float64"]),
    position=st.sampled_from([0, 7, 2**31 - 4]),
    note=st.booleans(),
)


def compile_kernel(library: Path, *flags: str) -> Path:
    tool = pytest.importorskip("tools.build_native", reason="needs hatchling")
    if reason := tool.compile_kernel(ROOT, library, *flags):
        pytest.skip(f"the kernel cannot be built: {reason}")
    return library


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The kernel as it is shipped, which takes the best instructions, and for others that this processor has."""
    folder = tmp_path_factory.mktemp("kernels")
    made = {"shipped": compile_kernel(folder / "shipped.so", "-O3")}
    there = Path("/proc/cpuinfo").read_text().split()
    for name, flags in {"none": (), "avx2": ("-mavx2", "-mfma")}.items():
        if not flags or {"avx2", "fma"} <= set(there):
            made[name] = compile_kernel(folder / f"{name}.so", "-O3", "-DONE_TARGET", *flags)
    return made


def test_each_parameter_is_compared() -> None:
    constraints = {name for fields in EXCLUDING for name in fields}
    assert {*RULES, *constraints, "seed"} == set(SamplingParams.WIRE_NAMES)


def test_the_kernel_is_where_a_build_puts_it() -> None:
    tool = pytest.importorskip("tools.build_native", reason="needs hatchling")
    assert (native.LIBRARY, native.SOURCE) == (ROOT / tool.LIBRARY, ROOT / tool.SOURCE)


@settings(max_examples=150)
@given(case=CASES)
def test_the_same_tokens(case: Case, libraries: dict[str, Path]) -> None:
    wanted = case.tokens(None)
    for name, library in libraries.items():
        assert case.tokens(library) == wanted, name


def test_many_draws_of_each_combination(libraries: dict[str, Path]) -> None:
    """Where a rule cuts between two tokens, and where their sums are rounded: 120 draws of each."""
    rules = product((1.0, 0.3), (0, 5, 2000), (1.0, 0.95, 0.3), (0.0, 0.1), (1.0, 0.7), (1.0, 1.2))
    names = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
    for values in rules:
        params = SamplingParams(**dict(zip(names, values, strict=True)))  # type: ignore[arg-type]
        logits = np.random.default_rng(3).standard_normal((1, 4099), np.float32).repeat(60, axis=0)
        slots: Int32Array = np.arange(60, dtype=np.int32)
        drawn = {}
        for library in (None, libraries["shipped"]):
            sampler = Sampler(60, 4099, library=library)
            for slot in slots.tolist():
                sampler.assign(slot, params, range(0, 4099, 5), slot)
            steps = [sampler.sample(logits, slots, slots + 60 * step) for step in range(2)]
            drawn[library] = np.concatenate(steps)
        first, second = drawn.values()
        assert np.array_equal(first, second), params


NUCLEUS = SamplingParams(temperature=1.0, top_p=0.9)


class TestThreads:
    def case(self, params: SamplingParams = NUCLEUS) -> Case:
        rows = [(params, seed, 9, None if seed % 2 else 0.5) for seed in range(64)]
        return Case(20_000, rows, 5, 1, False, 0, [(3, 0.5, np.nan)], "plain", 7, True)

    def test_the_same_tokens_whatever_their_number(self, libraries: dict[str, Path]) -> None:
        for params in (SamplingParams(), NUCLEUS):
            wanted = self.case(params).tokens(None)
            for threads in (2, 3, 64):
                for _ in range(10):
                    assert self.case(params).tokens(libraries["shipped"], threads) == wanted

    def test_a_process_that_is_forked_while_they_wait(self, libraries: dict[str, Path]) -> None:
        wanted = self.case().tokens(libraries["shipped"], 3)
        child = os.fork()
        if not child:
            os._exit(self.case().tokens(libraries["shipped"], 3) != wanted)
        assert os.waitpid(child, 0)[1] == 0
        assert self.case().tokens(libraries["shipped"], 3) == wanted


def test_memory_is_checked(tmp_path: Path) -> None:
    """The same comparison under AddressSanitizer and UndefinedBehaviorSanitizer."""
    compiler = shutil.which("gcc")
    if compiler is None or platform.libc_ver()[0] != "glibc":
        pytest.skip("needs gcc with its sanitizers, on glibc")
    checks = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")
    library = compile_kernel(tmp_path / "checked.so", "-DONE_TARGET", "-DPER_THREAD=1", *checks)
    found = [
        subprocess.check_output([compiler, f"-print-file-name={name}.so"], text=True).strip()
        for name in ("libasan", "libubsan")
    ]
    environ = {
        **os.environ,
        "LD_PRELOAD": " ".join(found),
        # Python itself does not free everything.
        "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0",
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, "-m", __name__, library]
    ran = subprocess.run(
        command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr[-5000:]


def test_a_kernel_that_cannot_be_used_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, libraries: dict[str, Path]
) -> None:
    old, broken, missing = (tmp_path / name for name in ("old.so", "broken.so", "missing.so"))
    source = tmp_path / "old.c"
    source.write_text("int version(void) { return -1; } long scratch_size, sample;")
    compiler = shutil.which("cc")
    reasons = {missing: "there was no C compiler", None: "option.native_sampling"}
    broken.write_bytes(b"not a library" * 100)
    reasons[broken] = "is no whole library"
    whole = libraries["shipped"].read_bytes()
    for size in (0, 10, 63, 64, 4096, 8192, len(whole) // 2, len(whole) - 1):
        cut = tmp_path / f"{size}.so"
        cut.write_bytes(whole[:size])
        reasons[cut] = f"has {size} bytes"
    if compiler:
        subprocess.run([compiler, "-shared", "-fPIC", "-o", old, source], check=True)
        reasons[old] = "was built from another sampling.c"
    native.load.cache_clear()
    caplog.set_level(logging.INFO, "djl_python_neuronx")
    for library, reason in reasons.items():
        caplog.clear()
        for _ in range(2):
            assert native.load(library) is None
        (record,) = caplog.records
        assert "sampling_with_numpy" in record.message
        assert reason in record.message
        assert ("advice=" in record.message) == (library is not None)
    native.load.cache_clear()


def test_what_is_outside_the_sampler_is_refused(libraries: dict[str, Path]) -> None:
    sampler = Sampler(2, 100, library=libraries["shipped"])
    logits, slots = np.zeros((2, 100), np.float32), np.arange(2, dtype=np.int32)
    for wrong in (np.zeros((2, 99), np.float32), np.zeros((3, 100), np.float32), logits[0]):
        with pytest.raises(ValueError, match=r"\(2,\); there are 2 slots, 100 tokens"):
            sampler.sample(wrong, slots, slots)
    for slot in (-1, 2):
        with pytest.raises(IndexError, match=f"slot {slot} does not exist; there are 2"):
            sampler.sample(logits, np.array([0, slot], np.int32), slots)


if __name__ == "__main__":

    @settings(max_examples=60, derandomize=True, database=None, deadline=None)
    @given(case=CASES, threads=st.integers(1, 3))
    def compare(case: Case, threads: int) -> None:
        """One example."""
        assert case.tokens(Path(sys.argv[1]), threads) == case.tokens(None)

    compare()

"""Types of the tables of the architectures that a library supports, and of its known wrong results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning.fields import Field
from djl_python_neuronx.planning.model import ModelFacts

_NOTHING: Final[Mapping[str, str]] = {}
_NO_FIELDS: Final[Mapping[str, Field]] = {}
_LOADER = ("model_loader",)


class Heads(NamedTuple):
    """Numbers of attention heads, summed over all cores."""

    query: int
    kv: int


def round_up(value: int, step: int) -> int:
    """Return the smallest multiple of `step` that is not below `value`."""
    return -(-value // step) * step


def _uneven(number: int, degree: int) -> bool:
    return number % degree != 0 and degree % number != 0


@dataclass(frozen=True)
class Defect:
    """Something that a library computes wrong, or stops at, with some options or models."""

    problem: str
    applies: Callable[[ServingOptions, ModelFacts], object] = lambda _options, _model: True
    """True if the defect affects this model with these options (filled in)."""
    names: tuple[str, ...] = _LOADER
    """Options that decide whether it matters; `model_loader`: the model alone decides."""
    fix: str = ""
    backends: tuple[str, ...] = ()
    """Backends without the defect."""
    stops: bool = False
    """The library fails. Otherwise its answers are wrong."""


@dataclass(frozen=True)
class Capability:
    """Support of one architecture by a library."""

    continuous_batching: bool = True
    """Sequences join and leave at any step. False: static batches, with a second prefill of all when one joins."""
    pads_heads: bool = True
    """Heads that the tensor parallel degree does not divide are padded. False: it must divide them."""
    context_buckets: bool = True
    """Several prompt lengths are compiled. False: a prompt runs token by token."""
    token_buckets: bool = True
    """Several sequence lengths are compiled for decode graphs."""
    prompt_batch_size: bool = False
    """The constructor takes the rows of a prefill apart from those of a decode."""
    speculation: bool = True
    """The model can verify the tokens that a draft model proposes."""
    even_kv_heads: bool = False
    """A core gets whole KV heads, or a group of cores shares one: the numbers must divide."""
    degree_divides: tuple[str, ...] = ()
    """Sizes, as fields of `ModelFacts`, that the tensor parallel degree must divide."""
    whole_experts: bool = False
    """A core gets whole experts, or a group of cores shares one: the numbers must divide."""
    window_cache: bool = False
    """The KV cache is only as long as the sliding window."""
    verified: bool = True
    """Compared with Hugging Face's logits. False: only its source was read."""
    ignored_options: frozenset[str] = frozenset()
    """Options that the library has, and the code of this architecture ignores or fails on. They are not passed."""
    unsupported_options: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    """Option to the reason why the library stops at it."""
    bsh_collectives: str = ""
    """The reason that `collectives_layout=BSH` needs `attention_layout=BSH`; empty if it does not."""
    defects: tuple[Defect, ...] = ()
    fields: Mapping[str, Field] = field(default_factory=lambda: _NO_FIELDS)
    """Every field of `config.json` that changes a number; empty: not listed yet."""

    def supports(self, name: str) -> bool:
        """Return whether an option of the library takes effect."""
        return name not in self.ignored_options and name not in self.unsupported_options

    def indivisible(self, model: ModelFacts, degree: int) -> str | None:
        """Name the condition that a degree breaks, such as ``a divisor of the 32 heads``; None if it breaks none.

        Source: transformers-neuronx 0.13, mixtral/model.py; neuronx-distributed-inference 0.9, models/*/modeling_*.py.
        """
        heads, kv_heads = model.num_heads or degree, model.num_kv_heads or degree
        if not self.pads_heads and heads % degree:
            return f"a divisor of the {heads} heads"
        if self.even_kv_heads and heads != kv_heads and _uneven(kv_heads, degree):
            return f"a divisor or a multiple of the {kv_heads} KV heads"
        for name in self.degree_divides:
            size = getattr(model, name)
            if size and size % degree:
                return f"a divisor of the {name.replace('_', ' ')} of {size}"
        experts, width = model.num_experts, model.intermediate_size or 0
        if self.whole_experts and _uneven(experts, degree):
            return f"a divisor or a multiple of the {experts} experts"
        if self.whole_experts and width % -(-degree // experts):
            return f"a divisor of the width of all {experts} experts, {experts} x {width}"
        return None


def sequences_beyond_window(options: ServingOptions, model: ModelFacts) -> bool:
    """Return whether sequences can be longer than the model's sliding window."""
    return model.sliding_window is not None and (options.max_model_len or 0) > model.sliding_window


def window_ignored(library: str) -> Defect:
    """The defect that a library ignores the model's sliding window."""
    return Defect(
        f"{library} attends to all tokens, beyond the model's window",
        sequences_beyond_window,
        ("n_positions",),
        "set n_positions to the window at most",
    )

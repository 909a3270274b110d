"""Models of NxD Inference that lie outside its package, in folders as in `contrib/models` of its repository.

`contrib.toml` has what a run on a CPU rig has shown of each, by the digest of its source: a name proves nothing about
the code that is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from djl_python_neuronx.planning.fields import with_rotary
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.tables import read_table


@dataclass(frozen=True, kw_only=True)
class Row:
    """A folder of code: the way to load it, and what of it is shown."""

    folder: str
    """Name below `contrib/models`."""
    sha256: str
    """Digest of its source, see `artifacts.model_code`."""
    verdict: Literal["right", "wrong", "fails", "unknown"]
    """`right`: logits and tokens equal those of transformers, in continuous batches with joins and slots reused, within
    the limits below. `wrong`: they differ. `fails`: it does not import, load or run. `unknown`: it was never run."""
    reason: str = ""
    """Of `wrong` and `fails`: the first difference and its cause, as the end of "it …"; lower case, no full stop."""
    model_types: tuple[str, ...]
    """`model_type` of the checkpoints that it was compared with."""
    stand_in: str = ""
    """`model_type` of another class of transformers that it was compared with, which computes the same: transformers
    has none of the model's own."""
    class_name: str = ""
    """The class of the application, where the file defines several."""
    made: Literal["auto_config", "from_pretrained", "plain_config"] = "auto_config"
    """How its configuration is made: by the library's `load_pretrained_config` of transformers' `AutoConfig`, or of
    transformers' `PretrainedConfig`; or by the `from_pretrained` of the class's own configuration."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the configuration to set, once it is made."""
    unset: tuple[str, ...] = ()
    """Fields of the configuration to set to None, as TOML has no null."""
    fix: str = ""
    """Name of the fix in `backends/nxdi/contrib/fixes.py` that it needs."""
    releases: tuple[str, ...] = ("0.9", "0.10")
    """Of NxD Inference, with right answers: 0.9 was run, and 0.10 is the same library by its release notes."""
    degrees: tuple[int, ...] = (1, 2)
    """Tensor parallel degrees with right answers."""
    longest: str | int | None = None
    """Tokens of a sequence (`n_positions`) with right answers, or the field of config.json, or of its scaled positions,
    that has this number."""
    slots: int | None = None
    """Most slots with right answers; None: any number."""
    rotary: tuple[str, ...] = ("default",)
    """Kinds of rotary positions (`rope_type`) with right answers."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Fields of config.json, and of its scaled positions, to the values with right answers; the text "absent" stands
    for null and for no field."""

    def most_tokens(self, model: ModelFacts) -> int | None:
        """Return the most tokens of a sequence with right answers: up to `longest`, and to any window of the model."""
        fields, longest = with_rotary(model.config), self.longest
        most = fields.get(longest) if isinstance(longest, str) else longest
        limits = [size for size in (most, model.sliding_window) if isinstance(size, int)]
        return min(limits, default=None)


@cache
def rows() -> Mapping[str, Row]:
    """Return the rows of `contrib.toml` by the digest of their source."""
    table = read_table(__file__, "contrib.toml", dict[Literal["model"], tuple[Row, ...]])
    return {row.sha256: row for row in table["model"]}


def row_of(digest: str) -> Row:
    """Return the row of the code with a digest; without one a row with the verdict `unknown`."""
    unknown = Row(folder="", sha256=digest, verdict="unknown", model_types=())
    return rows().get(digest, unknown)


@dataclass(frozen=True)
class Code:
    """The code of a model in the place of the library's own."""

    folder: Path
    digest: str
    """See `artifacts.model_code`."""
    class_name: str = ""
    """The class of the application; empty: the row's, or the only one."""
    foreign_graphs: bool = False
    """Graphs came with the model that another program compiled, of which code is unknown."""

    @property
    def row(self) -> Row:
        """Its row, see `row_of`."""
        return row_of(self.digest)

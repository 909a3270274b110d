"""What compiled files depend on, and in what two sets of such facts differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from djl_python_neuronx.artifacts.layouts.folder import some
from djl_python_neuronx.errors import ArtifactMismatchError


def _plain_json(value: object) -> object:
    """What reading it back will give: lists for tuples, text keys."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, RecursionError) as error:
        raise ValueError(error) from error


Options = Annotated[dict[str, Any], BeforeValidator(_plain_json)]
"""Values of JSON by name."""

_FACTS = ("artifact_digest", "compiler", "compiler_version", "target")


class CompileFacts(BaseModel):
    """All that compiled files depend on: with equal facts one compile does for the other.

    Raises:
        ValueError: an option's value is not JSON's, or its name is that of another fact.
    """

    model_config = ConfigDict(frozen=True)

    graph_options: Options
    artifact_digest: str
    """See `digest.artifact_digest`."""
    compiler: str
    """Its package, such as `neuronx-cc`."""
    compiler_version: str
    target: str
    """The kind of device, such as `inf2`."""

    @model_validator(mode="after")
    def _no_double_names(self) -> CompileFacts:
        if taken := set(self.graph_options) & set(_FACTS):
            msg = f"graph options cannot be named {some(sorted(taken))}: facts have these names"
            raise ValueError(msg)
        return self

    @property
    def key(self) -> str:
        """32 hexadecimal digits that name these facts."""
        text = json.dumps(self.model_dump(), sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def flat(self) -> dict[str, object]:
        """Every fact by its name; options by theirs, a table's as `table.name`."""
        return {**{name: getattr(self, name) for name in _FACTS}, **_flatten(self.graph_options)}


class Difference(NamedTuple):
    """One fact that is not as wanted."""

    key: str
    compiled: object
    wanted: object


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()
"""Stands in a `Difference` for the value of an option that one side does not have at all."""


def differences(wanted: CompileFacts, compiled: CompileFacts) -> list[Difference]:
    """The facts in which both differ, by name; empty if and only if their keys are equal."""
    ours, theirs = wanted.flat(), compiled.flat()
    values = ((key, theirs.get(key, ABSENT), ours.get(key, ABSENT)) for key in {*ours, *theirs})
    return sorted(Difference(*row) for row in values if _json(row[1]) != _json(row[2]))


def check_facts(wanted: CompileFacts, compiled: CompileFacts, where: str) -> None:
    """Refuse what was compiled for something else.

    Raises:
        ArtifactMismatchError: each differing fact with its compiled and its wanted value.
    """
    found = differences(wanted, compiled)
    if found:
        raise ArtifactMismatchError(
            {one.key: (one.compiled, one.wanted) for one in found}, where=where
        )


def _json(value: object) -> str:
    """Tells 1 from 1.0 and from true, as the key of the facts does."""
    return "absent" if value is ABSENT else json.dumps(value, sort_keys=True)


def _flatten(options: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in options.items():
        # Quoted where it could be taken for a name in a table.
        key = prefix + (json.dumps(name) if "." in name or '"' in name else name)
        flat.update(
            _flatten(value, f"{key}.") if isinstance(value, dict) and value else {key: value}
        )
    return flat

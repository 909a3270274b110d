"""Which files of a remote folder are fetched: what the formats need, and nothing that only other libraries read."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple


class Selection(NamedTuple):
    """A choice among the names of a remote folder. Its name is part of the place in the cache."""

    name: str
    choose: Callable[[Collection[str]], Collection[str]]
    """Names relative to the folder, with `/`, to those that are wanted."""


# Other libraries' copies of the weights, and what training leaves behind. A list of what is not wanted, because
# compiled formats name their files as they like (`p0.transformer.wte`, `<hash>.neff`, `VERSION`).
_FOREIGN_FOLDERS = frozenset({"onnx", "openvino", "coreml", "original", "metal", "runs"})
_FOREIGN_FILES = re.compile(
    r".*\.(h5|msgpack|onnx|onnx_data|ot|tflite|gguf|ggml|mlmodel|pth|nemo|md|png|jpe?g|gif|svg|webp|mp4|pdf|ipynb)"
    r"|consolidated.*|training_args\.bin|(optimizer|scheduler)\.(pt|bin)",
    re.IGNORECASE,
)
_SAFETENSORS = re.compile(
    r"(?P<kind>model|adapter_model)(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
)
_PICKLE = re.compile(r"(?P<kind>pytorch_model|adapter_model)(-\d+-of-\d+)?\.bin(\.index\.json)?")
_SAME = {"pytorch_model": "model", "adapter_model": "adapter_model"}


def _for_serving(names: Collection[str]) -> list[str]:
    kept = [name for name in names if not _is_foreign(name)]
    safe = set(_kinds(kept, _SAFETENSORS))
    pickled = {
        name
        for name in kept
        if (match := _PICKLE.fullmatch(posixpath.basename(name)))
        and (posixpath.dirname(name), _SAME[match["kind"]]) in safe
    }
    return sorted(name for name in kept if name not in pickled)


def _is_foreign(name: str) -> bool:
    *folders, file = name.split("/")
    return (
        any(part.startswith(".") for part in (*folders, file))
        or not _FOREIGN_FOLDERS.isdisjoint(folders)
        or _FOREIGN_FILES.fullmatch(file) is not None
    )


def _kinds(names: Iterable[str], pattern: re.Pattern[str]) -> Iterable[tuple[str, str]]:
    for name in names:
        if match := pattern.fullmatch(posixpath.basename(name)):
            yield posixpath.dirname(name), match["kind"]


SERVING = Selection("serving", _for_serving)
"""What any of our formats reads. Pickled weights only where no safetensors ones lie beside them."""

EVERYTHING = Selection("everything", sorted)
"""All of it: compile caches, folders of our own making."""

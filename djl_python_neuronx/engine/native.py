"""The sampler's kernel, `sampling.c`: loaded with ctypes, where the package has it."""

from __future__ import annotations

import ctypes
import functools
import logging
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("_sampling.so")
"""Made when the package is built with a compiler at hand, or by ``python -m tools.build_native``."""
SOURCE = Path(__file__).with_name("sampling.c")
_ALIGNMENT = 64


class _State(ctypes.Structure):
    """`struct sampler`."""

    _fields_ = (
        ("vocab_size", ctypes.c_int64),
        ("num_slots", ctypes.c_int64),
        ("max_threads", ctypes.c_int64),
        ("rules", ctypes.c_void_p),
        ("seen", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
    )


@functools.cache
def load(path: Path | None) -> ctypes.PyDLL | None:
    """The library, or None with one line in the log that has the reason. `path` None: it is switched off.

    The GIL is kept while it runs: no other thread of Python can delay the device's next call.
    """
    reason = "switched off by option.native_sampling (DJL_NEURONX_NATIVE)"
    if path is not None:
        try:
            library = ctypes.PyDLL(str(path))
            current = library.version() & 0xFFFFFFFF == zlib.crc32(SOURCE.read_bytes())
            library.scratch_size.restype = library.sample.restype = ctypes.c_int64
            library.scratch_size.argtypes = (ctypes.c_int64,)
            library.sample.argtypes = (
                *(ctypes.c_void_p, ctypes.c_void_p),
                *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int32),
            )
        except (OSError, AttributeError) as error:
            reason = str(error)
        else:
            if current:
                return library
            reason = f"{path} was built from another {SOURCE.name}; build it again"
    logger.info("sampling_with_numpy reason=%r", reason)
    return None


class Kernel:
    """The library with the state of one sampler."""

    def __init__(
        self,
        library: ctypes.PyDLL,
        rules: npt.NDArray[np.void],
        seen: npt.NDArray[np.bool_],
        max_threads: int,
    ) -> None:
        """`rules`, [slots] of `struct rules`, and `seen`, bool[slots, vocab], are read and written in place."""
        self._shape = num_slots, vocab_size = seen.shape
        self._slots, self._positions, self._tokens = np.zeros((3, num_slots), np.int32)
        size = max_threads * library.scratch_size(vocab_size) * np.float32().nbytes
        scratch = np.empty(size + _ALIGNMENT, np.uint8)
        arrays = (rules, seen, self._slots, self._positions, self._tokens)
        addresses = [array.ctypes.data for array in arrays]
        aligned = -(-scratch.ctypes.data // _ALIGNMENT) * _ALIGNMENT
        state = _State(vocab_size, num_slots, max_threads, *addresses, aligned)
        self._sample = functools.partial(library.sample, ctypes.addressof(state))
        self._kept: tuple[Any, ...] = (*arrays, scratch, state)

    def sample(
        self,
        logits: npt.NDArray[np.float32],
        slots: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        note: bool,
    ) -> npt.NDArray[np.int32]:
        """See `Sampler.sample`."""
        count, vocab_size = logits.shape
        if count != len(slots) or vocab_size != self._shape[1]:
            msg = f"logits have shape {logits.shape}, expected {(len(slots), self._shape[1])}"
            raise ValueError(msg)
        if logits.dtype != np.float32 or logits.strides[1] != logits.itemsize:
            logits = np.ascontiguousarray(logits, np.float32)
        self._slots[:count] = slots
        self._positions[:count] = positions
        done = self._sample(logits.ctypes.data, logits.strides[0], count, note)
        if done != count:
            msg = f"slot {self._slots[done]} does not exist; there are {self._shape[0]}"
            raise IndexError(msg)
        tokens: npt.NDArray[np.int32] = self._tokens[:count].copy()
        return tokens

"""The sampler's kernel, `sampling.c`: loaded with ctypes, where the package has it."""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("_sampling.so")
"""Made when the package is built with a compiler at hand, or by ``python -m tools.build_native``."""
SOURCE = Path(__file__).with_name("sampling.c")
_ELF = struct.Struct("<4s36xQ10xHH")
"""Magic number, and place, size and number of the section headers, which are the end of a file. Source: elf(5)."""
_ADVICE = "install a C compiler, then the package again (in a checkout: make install UPGRADE=1)"
_ALIGNMENT = 64
_WRONG_TYPE, _WRONG_SHAPE, _WRONG_SLOT = -1, -2, -3


class _State(ctypes.Structure):
    """`struct sampler`."""

    _fields_ = (
        ("vocab_size", ctypes.c_int64),
        ("num_slots", ctypes.c_int64),
        ("max_threads", ctypes.c_int64),
        ("rules", ctypes.c_void_p),
        ("listed", ctypes.c_void_p),
        ("masks", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("pointer", ctypes.c_void_p),
    )


@functools.cache
def load(path: Path | None) -> ctypes.PyDLL | None:
    """The library, or None with one line in the log that has the reason. `path` None: it is switched off.

    The GIL is kept while it runs: no other thread of Python can delay the device's next call.
    """
    if path is None:
        reason = "switched off by option.native_sampling (DJL_NEURONX_NATIVE)"
        logger.info("sampling_with_numpy reason=%r", reason)
        return None
    try:
        _check_whole(path)
        library = ctypes.PyDLL(str(path))
        current = library.version() & 0xFFFFFFFF == zlib.crc32(SOURCE.read_bytes())
        library.scratch_size.restype = library.sample.restype = ctypes.c_int64
        library.scratch_size.argtypes = (ctypes.c_int64,)
        arrays = (ctypes.py_object,) * 3
        library.sample.argtypes = (ctypes.c_void_p, *arrays, ctypes.c_int32)
    except FileNotFoundError:
        reason = f"{path} does not exist: there was no C compiler at the installation"
    except (OSError, AttributeError) as error:
        reason = str(error)
    else:
        if current:
            logger.info("sampling_with_kernel library=%s", path)
            return library
        reason = f"{path} was built from another {SOURCE.name}"
    logger.warning("sampling_with_numpy reason=%r advice=%r", reason, _ADVICE)
    return None


def _check_whole(path: Path) -> None:
    """Refuse a library whose end is missing: to load it would end the process by a signal.

    Raises:
        OSError: it cannot be read, or is not whole.
    """
    content = path.read_bytes()
    magic, start, size, count = _ELF.unpack_from(content.ljust(_ELF.size))
    if magic != b"\x7fELF" or len(content) < start + size * count:
        msg = f"{path} has {len(content)} bytes and is no whole library"
        raise OSError(msg)


class Kernel:
    """The library with the state of one sampler."""

    def __init__(
        self,
        library: ctypes.PyDLL,
        rules: npt.NDArray[np.void],
        listed: npt.NDArray[np.void],
        masks: npt.NDArray[np.uint32],
        max_threads: int,
    ) -> None:
        """Arrays in place: of `struct rules` for each slot, of `struct listed` for each slot and token, and masks."""
        num_slots, vocab_size = listed.shape
        max_threads = min(max_threads, num_slots)
        slots, positions, self._tokens = np.zeros((3, num_slots), np.int32)
        size = max_threads * library.scratch_size(vocab_size) * np.float32().nbytes
        scratch = np.empty(size + _ALIGNMENT, np.uint8)
        arrays = (rules, listed, masks, slots, positions, self._tokens)
        state = _State(
            *(vocab_size, num_slots, max_threads),
            *(array.ctypes.data for array in arrays),
            -(-scratch.ctypes.data // _ALIGNMENT) * _ALIGNMENT,
            ctypes.cast(ctypes.pythonapi.PyCapsule_GetPointer, ctypes.c_void_p),
        )
        self._sample = functools.partial(library.sample, ctypes.addressof(state))
        self._kept: tuple[Any, ...] = (*arrays, scratch, state)

    def sample(
        self,
        logits: npt.NDArray[np.float32],
        slots: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        note: bool,
    ) -> npt.NDArray[np.int32]:
        """See `Sampler.sample`.

        Raises:
            ValueError: the arrays do not have the sampler's shape, or not the same number of rows.
            IndexError: a slot does not exist.
        """
        # After a sleep each line costs 5 to 40 µs, the last for `logits.ctypes.data` (2 vCPU VM, 2026-11): so C takes
        # the arrays apart.
        count = self._sample(
            logits.__array_struct__, slots.__array_struct__, positions.__array_struct__, note
        )
        if count >= 0:
            tokens: npt.NDArray[np.int32] = self._tokens[:count].copy()
            return tokens
        if count == _WRONG_TYPE:
            copies = np.array(logits, np.float32, order="C")
            return self.sample(copies, slots.astype(np.int32), positions.astype(np.int32), note)
        num_slots, vocab_size = self._kept[1].shape
        if count == _WRONG_SHAPE:
            shapes = f"{logits.shape}, {slots.shape}, {positions.shape}"
            msg = f"logits, slots, positions: {shapes}; there are {num_slots} slots, {vocab_size} tokens"
            raise ValueError(msg)
        msg = f"slot {slots[_WRONG_SLOT - count]} does not exist; there are {num_slots}"
        raise IndexError(msg)

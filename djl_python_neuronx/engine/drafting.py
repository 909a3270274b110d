"""Drafts for a step, from a proposer that may fail: that costs speed and no request."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Tokens

from djl_python_neuronx.engine.drafts import Proposer
from djl_python_neuronx.engine.faults import MAX_FAILED_STEPS, translate
from djl_python_neuronx.engine.runner import DeviceCall
from djl_python_neuronx.engine.sampler import Sampler
from djl_python_neuronx.engine.sequence import Sequence
from djl_python_neuronx.errors import BackendError

logger = logging.getLogger(__name__)


class Drafting:
    """Asks the proposer, and gives it up when it fails again and again. Engine thread, but for `device_call`."""

    def __init__(self, proposer: Proposer | None, max_drafts: int) -> None:
        """`max_drafts`: see `ModelSpec`; 0: nobody is asked."""
        self.proposer = proposer if max_drafts else None
        """Who drafts; None: nobody, or one that was given up."""
        self.error: BackendError | None = None
        """Why nothing could be drafted for the last step."""
        self.seconds = 0.0
        """What drafting for the last step took."""
        self._max_drafts = max_drafts
        self._failures = 0

    @property
    def device_call(self) -> DeviceCall | None:
        """The call that the proposer's device is busy with."""
        proposer = self.proposer  # another thread may give it up meanwhile
        return None if proposer is None else proposer.device_call

    def skip(self) -> None:
        """The next step has no drafts."""
        self.seconds, self.error = 0.0, None

    def propose(self, sequences: Tokens[Sequence], sampler: Sampler) -> list[list[int]]:
        """Drafts behind each sequence's newest token; empty where there are none at all. Never raises."""
        self.skip()
        if self.proposer is None:
            return []
        counts = [min(self._max_drafts, sequence.num_missing - 1) for sequence in sequences]
        if max(counts) < 1:
            return []
        started_s = time.monotonic()
        drafts: list[list[int]] = []
        try:
            drafts = self.proposer.propose(sequences, counts, sampler)
            self._failures = 0
        except Exception as error:
            self._failures += 1
            self.error = translate(error)
            gone = self.error.fatal or self._failures >= MAX_FAILED_STEPS
            if gone:
                self.proposer = None
            logger.warning("drafts_failed given_up=%s", gone, exc_info=error)
        self.seconds = time.monotonic() - started_s
        return drafts

    def release(self, slot: int) -> None:
        """The sequence of this slot is over."""
        if self.proposer is not None:
            self.proposer.release(slot)

"""The payoff of drafts: whether decodes with them give tokens faster than decodes without."""

from __future__ import annotations

import logging

import numpy as np

logger = logging.getLogger(__name__)

CYCLE, FIRST = 4096, 256
"""Decodes from the end of a trial to that of the next one, and up to the end of the first."""
PART, TRIAL = 16, 64
"""Decodes of a part of a trial, and of all four: without drafts, with them, and the same again under later load."""
_OFF, _ON = 0.95, 1.05
"""Drafts are switched off below the first share of the speed without them, and on again from the second on."""


class Payoff:
    """Switches drafts off while they lose, and on again, by a trial in each cycle. The same times give the same trials.

    Speed: tokens per second of a sequence, from the start of a decode to the start of the next call, so that the
    proposal, the wider step and the host count. A trial costs some thousandths of the time, whatever it shows. Drafts
    change at most once in a cycle, and a speed that is as good either way changes nothing. A change needs two trials in
    a row, so that one stall causes none.
    """

    def __init__(self) -> None:
        """Drafts are on."""
        self.is_off = False
        """Drafts are off, but for trials."""
        self._left = FIRST
        """Decodes until the end of the trial."""
        self._repeats = False
        """The trial repeats one that was for a change."""
        self._sums = np.zeros((2, 2))
        """Tokens and seconds in the trial so far, without drafts and with them."""

    @property
    def drafts(self) -> bool:
        """True if the next decode has drafts."""
        return self._of_trial % 2 == 1 if self._left <= TRIAL else not self.is_off

    @property
    def _of_trial(self) -> int:
        """The number of the next decode's part in a trial."""
        return (TRIAL - self._left) // PART

    def note(self, seconds: float, tokens: float) -> None:
        """Record a decode: the time to the next call, and the mean number of tokens that its sequences got."""
        # In the first two of a part a draft model reads what it has missed, and a decode may still be under way.
        if self._left <= TRIAL and self._left % PART not in {0, PART - 1}:
            self._sums[self._of_trial % 2] += tokens, seconds
        self._left -= 1
        if not self._left:
            self._judge()

    def _judge(self) -> None:
        (tokens, seconds), (with_drafts, drafted_s) = self._sums.tolist()
        known = tokens * drafted_s
        gain = with_drafts * seconds / known if known else 1.0
        was_off, is_off = self.is_off, gain < (_ON if self.is_off else _OFF)
        self._repeats = is_off != was_off and not self._repeats
        if not self._repeats:
            self.is_off = is_off
        if self.is_off and not was_off:
            logger.warning("speculation_off gain=%.2f", gain)
        elif was_off and not self.is_off:
            logger.info("speculation_on gain=%.2f", gain)
        self._left = TRIAL if self._repeats else CYCLE
        self._sums[:] = 0

"""Pace: the time and length of answers, for what those that wait will need."""

from __future__ import annotations

_OF_MEAN, _OF_DEVIATION = 1 / 32, 1 / 16
_SPREAD = 2.0


class Pace:
    """Running means over the answers that have ended, with the newest ones weighing most.

    Mean and mean deviation are those of TCP's round trips (RFC 6298), which also estimate how late is too late.
    """

    def __init__(self) -> None:
        """No answer has ended."""
        self.service_s = 0.0
        """Mean time that a sequence holds its slot."""
        self._tokens = self._deviation = 0.0

    def note(self, service_s: float, num_tokens: int) -> None:
        """Record an answer: the time from its slot to its end, and its tokens."""
        if not self._tokens:
            self.service_s, self._tokens, self._deviation = service_s, num_tokens, num_tokens / 2
            return
        self._deviation += _OF_DEVIATION * (abs(num_tokens - self._tokens) - self._deviation)
        self._tokens += _OF_MEAN * (num_tokens - self._tokens)
        self.service_s += _OF_MEAN * (service_s - self.service_s)

    def needed_s(self, max_new_tokens: int | None) -> float:
        """Return the time that most answers of at most so many tokens need from their slot on; 0 if it is unknown."""
        if not self._tokens:
            return 0.0
        tokens = self._tokens + _SPREAD * self._deviation
        if max_new_tokens is not None:
            tokens = min(tokens, max_new_tokens)
        return self.service_s / self._tokens * tokens

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
        self._first_s = self._further_s = self._tokens = self._deviation = 0.0

    def note(self, service_s: float, first_s: float | None, num_tokens: int) -> None:
        """Record an answer: the times from its slot to its end and to its first token, and its tokens.

        `first_s`: None if its prompt was scored, which takes a time of its own kind.
        """
        weight = _OF_MEAN if self.service_s else 1
        self.service_s += weight * (service_s - self.service_s)
        if first_s is None:
            return
        if self._tokens:
            weight = _OF_MEAN
            self._deviation += _OF_DEVIATION * (abs(num_tokens - self._tokens) - self._deviation)
        else:
            weight, self._deviation = 1, num_tokens / 2
        self._tokens += weight * (num_tokens - self._tokens)
        self._first_s += weight * (first_s - self._first_s)
        self._further_s += weight * (service_s - first_s - self._further_s)

    def needed_s(self, max_new_tokens: int | None) -> float:
        """Return the time that most answers of at most so many tokens need from their slot on; 0 if it is unknown."""
        tokens = self._tokens + _SPREAD * self._deviation
        if max_new_tokens is not None:
            tokens = min(tokens, max_new_tokens)
        if tokens <= 1 or self._tokens <= 1:
            return self._first_s
        return self._first_s + (tokens - 1) * self._further_s / (self._tokens - 1)

"""Python's switch interval, short while any engine loop runs."""

from __future__ import annotations

import sys
import threading

INTERVAL_S = 1e-4
"""A busy Python thread delays the return from the device by this long: 5.2 ms at Python's default of 5 ms, 0.3 ms
at 0.1 ms (2 vCPU, 2026-11)."""


class ShortSwitchInterval:
    """Held by every running loop; the last one to let go restores what was there before the first."""

    _lock = threading.Lock()
    _holders: set[ShortSwitchInterval] = set()  # noqa: RUF012  (shared on purpose: the interval is the process's)
    _before_s = 0.0

    def hold(self) -> None:
        """Shorten the interval; idempotent."""
        cls = type(self)
        with cls._lock:
            if not cls._holders:
                cls._before_s = sys.getswitchinterval()
                sys.setswitchinterval(INTERVAL_S)
            cls._holders.add(self)

    def let_go(self) -> None:
        """Restore it if nobody else holds it; idempotent."""
        cls = type(self)
        with cls._lock:
            if self in cls._holders:
                cls._holders.remove(self)
                if not cls._holders:
                    sys.setswitchinterval(cls._before_s)

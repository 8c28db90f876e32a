"""Where threads of a warp part and meet again.

Every thread has a program counter of its own. ``BSSY`` notes in one of a warp's convergence registers ``B0``
to ``B15`` which threads are together, and ``BSYNC`` makes each of them wait until all that have not exited
are there. ``WARPSYNC`` names the threads itself. ``BAR.SYNC`` waits for all threads of the block that have
not exited.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .threads import WARP, Threads

Array = NDArray[Any]

_READY, _AT_BARRIER, _AT_MEETING = 0, 1, 2


class Convergence:
    """Program counters of all threads, and for whom each one waits.

    Attributes:
        counters: ``[N]`` int64, index of the next instruction of threads that are not running now.
        members: per convergence register ``[N]`` bool.
    """

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self.counters = np.zeros(threads.count, np.int64)
        self.members: dict[str, Array] = {}
        self._state = np.zeros(threads.count, np.int8)
        self._parties: dict[int, Array] = {}  # whom the threads at an instruction wait for

    def restart(self) -> None:
        """All threads are at the first instruction."""
        self.counters[:] = 0
        self._state[:] = _READY
        self.members.clear()
        self._parties.clear()

    def register(self, name: str) -> Array:
        """Threads in a convergence register of their warp."""
        if name not in self.members:
            self.members[name] = np.zeros(self._threads.count, bool)
        return self.members[name]

    def gather(self, name: str, group: Array) -> None:
        """``BSSY``: in warps of the group, its threads are together."""
        register = self.register(name)
        warps = _warps_of(group)
        np.copyto(register, group, where=warps)

    def meet(self, at: int, group: Array, party: Array) -> None:
        """Threads of a group wait at an instruction for those of a party."""
        self.counters[group] = at
        self._state[group] = _AT_MEETING
        known = self._parties.setdefault(at, np.zeros(self._threads.count, bool))
        np.copyto(known, party, where=_warps_of(group))

    def wait(self, at: int, group: Array) -> None:
        """Threads of a group wait at a barrier of the block."""
        self.counters[group] = at
        self._state[group] = _AT_BARRIER

    def release(self) -> Array | None:
        """Let go on who need wait no longer; returns blocks ``[B]`` whose barrier is complete, if any."""
        alive = self._threads.alive
        for at, party in self._parties.items():
            here = (self._state == _AT_MEETING) & (self.counters == at)
            if not here.any():
                continue
            missing = party & alive & ~here
            free = here & ~_warps_of(missing)
            self._state[free] = _READY
            self.counters[free] += 1
        waiting = self._state == _AT_BARRIER
        if not waiting.any():
            return None
        shape = len(self._threads.blocks), -1
        complete = (waiting | ~alive).reshape(shape).all(1) & (waiting & alive).reshape(shape).any(1)
        if not complete.any():
            return None
        free = waiting & np.repeat(complete, self._threads.warps * WARP)
        self._state[free] = _READY
        self.counters[free] += 1
        return complete

    def next_group(self) -> tuple[int, Array | None, int] | None:
        """Instruction, threads and limit of whoever is furthest behind; None where all wait for each other.

        The threads are None where they are all. Up to the limit no other thread is ready.
        """
        ready = self._threads.alive & (self._state == _READY)
        if not ready.any():
            return None
        counters = self.counters[ready]
        at = int(counters.min())
        others = counters[counters != at]
        limit = int(others.min()) if len(others) else 2**62
        if not len(others) and ready.all():
            return at, None, limit
        return at, ready & (self.counters == at), limit


def _warps_of(threads: Array) -> Array:
    """All threads of the warps of some."""
    return np.repeat(threads.reshape(-1, WARP).any(1), WARP)

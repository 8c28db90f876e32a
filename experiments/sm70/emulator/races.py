"""Collects races, each pair of instruction and kind once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from page4.experiments.sm70.assembly import Instruction

from .errors import Race
from .shared_memory import Report
from .threads import Threads

Array = NDArray[Any]


class RaceList:
    """Races of the threads that run now, added to those of earlier ones."""

    def __init__(self, threads: Threads, found: dict[tuple[int, str], Race]) -> None:
        self._threads, self._found = threads, found

    def reporter(self, instruction: Instruction, who: Array, addresses: Array) -> Report:
        """What shared memory calls for an access of these threads to these addresses."""

        def report(kind: str, wrong: Array, touched: Array) -> None:
            key = instruction.index, kind
            if key in self._found:
                return
            first = int(np.argmax(wrong))
            thread = int(who[first])
            warp = int(self._threads.warp[thread])
            x, y, z = (int(value) for value in self._threads.blocks[self._threads.block[thread]])
            others = tuple(int(other) for other in np.flatnonzero(touched[first]) if other != warp)
            self._found[key] = Race(instruction, kind, (x, y, z), warp, others, int(addresses[first]))

        return report

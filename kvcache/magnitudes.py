"""Magnitudes of stored K or V, counted exactly: FP16 has few enough of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from page4.kernels.errors import InputError

MAGNITUDES: NDArray[np.float64] = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
"""Every finite FP16 magnitude, ascending; a magnitude's index is its bit pattern."""


@dataclass(frozen=True)
class Magnitudes:
    """How often each FP16 magnitude occurred, per KV head.

    The histogram is exact, so sums of parts are what one run over everything would have counted: maxima merge
    by max, and percentiles and errors carry no binning error.

    Attributes:
        counts: int64 ``[Hkv, 31744]``, indexed as :data:`MAGNITUDES`.
    """

    counts: NDArray[np.int64]

    @classmethod
    def of(cls, values: Tensor, what: str = "values") -> Magnitudes:
        """Count FP16 values ``[T, Hkv, D]``.

        Raises:
            InputError: a value is NaN or infinite, as FP16 makes of whatever lies above 65,504; ``what``
                names the values.
        """
        if values.dtype != torch.float16:
            raise TypeError(f"values are {values.dtype}, expected float16")
        heads, bins = values.shape[1], len(MAGNITUDES)
        bits = values.contiguous().view(torch.int16).long() & 0x7FFF
        if values.numel() and int(bits.max()) >= bins:
            raise InputError(
                f"{what} hold NaN, infinity or more than FP16 can: nothing can be calibrated from that"
            )
        bits += bins * torch.arange(heads, device=values.device)[:, None]
        counts = torch.bincount(bits.flatten(), minlength=heads * bins).view(heads, bins)
        return cls(counts.cpu().numpy())

    def __add__(self, other: Magnitudes) -> Magnitudes:
        return Magnitudes(self.counts + other.counts)

    @property
    def heads(self) -> list[Magnitudes]:
        """Each head's own."""
        return [Magnitudes(counts[None]) for counts in self.counts]

    @property
    def total(self) -> int:
        """Values counted, zeros included."""
        return int(self.counts.sum())

    @property
    def maximum(self) -> float:
        """Largest magnitude; 0 where nothing was counted."""
        present = np.flatnonzero(self._all_heads)
        return float(MAGNITUDES[present[-1]]) if len(present) else 0.0

    def percentile(self, percent: float) -> float:
        """Least magnitude that ``percent`` % of the values do not exceed (nearest rank); 0 of nothing."""
        rank = math.ceil(percent / 100 * self.total)
        if rank <= 0:
            return 0.0
        return float(MAGNITUDES[np.searchsorted(np.cumsum(self._all_heads), min(rank, self.total))])

    def share_above(self, limit: float) -> float:
        """Share of the values beyond ``limit``."""
        return float(self._all_heads[limit < MAGNITUDES].sum() / max(self.total, 1))

    def occurring(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The magnitudes that occurred, ascending, and how often each did."""
        present = np.flatnonzero(self._all_heads)
        return MAGNITUDES[present], self._all_heads[present]

    def by_log2(self, bins_per_octave: int = 4) -> list[tuple[float, int]]:
        """Counts of nonzero values by ``log2``: (lower edge, count) of the bins from first to last in use.

        An edge is a multiple of ``1 / bins_per_octave``.
        """
        values, counts = self.occurring()
        values, counts = values[values > 0], counts[values > 0]
        if not len(values):
            return []
        bins = np.floor(np.log2(values) * bins_per_octave).astype(np.int64)
        first = int(bins[0])
        summed = np.zeros(int(bins[-1]) - first + 1, dtype=np.int64)
        np.add.at(summed, bins - first, counts)
        return [((first + i) / bins_per_octave, int(count)) for i, count in enumerate(summed)]

    @property
    def _all_heads(self) -> NDArray[np.int64]:
        return self.counts.sum(axis=0)

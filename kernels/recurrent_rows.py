"""The rows of a step as recurrent kernels read them: whose they are, and where each request's begin."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from page4.kernels.errors import InputError


@dataclass(frozen=True)
class RequestRows:
    """Rows of B requests of one phase, N in all, packed request after request.

    Nothing is read on the host, so that a CUDA graph can be replayed with other values.

    Attributes:
        requests: int32 or int64 ``[B]``, the request's row in caches; -1 for padding, which is skipped.
        read_slots: int64 ``[B]``, recurrent slot with the state before the request's first row.
        positions: int64 ``[N]``, positions of the rows' tokens; only that of each first row is read.
        longest: rows of the longest request.
        first_row, rows: int64 ``[B]``, first packed row and number of rows of each request. Without them
            every request has ``longest`` rows.
    """

    requests: Tensor
    read_slots: Tensor
    positions: Tensor
    longest: int
    first_row: Tensor | None = None
    rows: Tensor | None = None

    def check(self, num_rows: int, device: torch.device) -> None:
        """Refuse lists that do not fit together or to ``num_rows`` packed rows.

        Raises:
            InputError: shapes, dtypes, strides or devices that disagree, or no row.
        """
        batch = self.requests.shape[0]
        if self.longest < 1:
            raise InputError(f"longest is {self.longest}, every request needs at least one row")
        if (self.first_row is None) != (self.rows is None):
            raise InputError("first_row and rows are given together or not at all")
        if self.rows is None and num_rows != batch * self.longest:
            raise InputError(f"{batch} requests of {self.longest} rows each do not make {num_rows} rows")
        wide, either = (torch.int64,), (torch.int32, torch.int64)
        for name, x, size, dtypes in (
            ("requests", self.requests, batch, either),
            ("read_slots", self.read_slots, batch, wide),
            ("positions", self.positions, num_rows, wide),
            ("first_row", self.first_row, batch, wide),
            ("rows", self.rows, batch, wide),
        ):
            if x is None:
                continue
            if x.shape != (size,) or x.dtype not in dtypes or not x.is_contiguous():
                expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
                raise InputError(
                    f"{name} must be contiguous {expected} [{size}], got {x.dtype} {list(x.shape)}"
                )
            if x.device != device:
                raise InputError(f"{name} is on {x.device}, the rows are on {device}")

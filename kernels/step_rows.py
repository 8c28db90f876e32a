"""The rows of a step as kernels read them: which request, position and page slot each row belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from page4.kernels.errors import InputError
from page4.kernels.qsa_prepare import PAGE_TOKENS


@dataclass(frozen=True)
class StepRows:
    """All N rows of a step, decode and prefill alike; rows of one request are adjacent and ascending.

    Padding rows carry -1 in ``positions``, ``request`` and ``slots``; kernels skip them.

    Attributes:
        positions: int64 ``[N]``, position of the row's token in its sequence.
        request: int32 ``[N]``, the request's row in block tables and rings.
        index: int32 ``[N]``, the row's place among its request's rows of this step, from 0.
        count: int32 ``[N]``, how many rows of this step its request has.
        slots: int64 ``[N]``, ``page * 16 + offset`` of the row's K and V; -1 writes none.
        block_tables: int64 ``[requests, pages]``, page of every 16 tokens; entries past a request's length
            are never followed.
    """

    positions: Tensor
    request: Tensor
    index: Tensor
    count: Tensor
    slots: Tensor
    block_tables: Tensor

    @classmethod
    def of(
        cls,
        starts: Sequence[int],
        counts: Sequence[int],
        block_tables: Tensor,
        requests: Sequence[int] | None = None,
        rows: int | None = None,
    ) -> StepRows:
        """Rows built on the host: ``counts[i]`` rows of request ``requests[i]`` from position ``starts[i]``.

        ``requests`` defaults to 0, 1, ...; with ``rows``, padding rows follow until there are that many.

        Raises:
            InputError: lists of unequal length, or more rows than ``rows``.
        """
        names = range(len(starts)) if requests is None else requests
        if not len(starts) == len(counts) == len(names):
            raise InputError(
                f"{len(starts)} starts, {len(counts)} counts and {len(names)} requests do not match"
            )
        fields = [
            (start + i, name, i, count)
            for start, count, name in zip(starts, counts, names, strict=True)
            for i in range(count)
        ]
        total = len(fields) if rows is None else rows
        if len(fields) > total:
            raise InputError(f"the step has {len(fields)} rows, more than the {total} asked for")
        fields += [(-1, -1, 0, 0)] * (total - len(fields))
        table = torch.tensor(fields, dtype=torch.int64, device=block_tables.device).view(-1, 4)
        positions, request, index, count = table.t().contiguous().unbind()
        live = positions >= 0
        page = block_tables[request.clamp_min(0), positions.clamp_min(0) // PAGE_TOKENS]
        slots = torch.where(live, page * PAGE_TOKENS + positions % PAGE_TOKENS, -1)
        return cls(positions, request.int(), index.int(), count.int(), slots, block_tables)

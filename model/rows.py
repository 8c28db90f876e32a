"""The rows of one step: tokens of many requests, packed, with what each request needs to go on.

A batch is packed from segments on the host, or made of device tensors alone where a decode step must not wait
for the host; layers see no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one request in one step.

    Attributes:
        request: the request's row in the cache.
        position: position of the first token; everything before it is in the cache.
        token_ids: the tokens, ``[T]`` int64.
        preceding: the ``ngram_size - 1`` token ids before ``position``, oldest first, EOS where the text had
            not begun.
        decode: the phase, given by the caller and never inferred from the number of rows. A decode
            segment keeps the recurrent state after *every* row (speculation may stop at any of them); a
            prefill segment keeps the state after its last row only.
        read_slot: recurrent slot holding the state before ``position``.
    """

    request: int
    position: int
    token_ids: Tensor
    preceding: tuple[int, ...]
    decode: bool
    read_slot: int = 0

    @property
    def length(self) -> int:
        """Number of rows T."""
        return self.token_ids.shape[0]


@dataclass(frozen=True)
class RowGroup:
    """Adjacent segments of one phase and length: the mixers run them as one ``[B, T]`` batch."""

    start: int
    length: int
    decode: bool
    longest: int  # tokens of the longest request, these rows included, or a bound of them
    requests: Tensor  # [B] int64; -1: a padded request, of which nothing is read or written
    read_slots: Tensor  # [B] int64

    @property
    def stop(self) -> int:
        """Packed row after the group's last."""
        return self.start + self.length * self.requests.shape[0]

    def rows_of(self, x: Tensor) -> Tensor:
        """This group's rows of a packed tensor, ``[N, ...] -> [B, T, ...]``."""
        return x[self.start : self.stop].unflatten(0, (-1, self.length))

    def put_rows(self, x: Tensor, values: Tensor) -> None:
        """Writes ``[B, T, ...]`` back to this group's rows of ``[N, ...]``."""
        x[self.start : self.stop] = values.flatten(0, 1).to(x.dtype)


@dataclass(frozen=True)
class RowBatch:
    """All rows of one step.

    Attributes:
        segments: sorted so that equal phases and lengths are adjacent; rows are packed in this order. None
            are known of a batch of device tensors.
        token_ids: ``[N]`` int64.
        positions: ``[N]`` int64; -1 for the rows of a padded request.
        token_history: ``[N, ngram_size]`` int64, the tokens ending at each row, oldest first.
        starts: first row of each segment.
        groups: runs of segments of equal phase and length.
    """

    segments: tuple[Segment, ...]
    token_ids: Tensor
    positions: Tensor
    token_history: Tensor
    starts: tuple[int, ...]
    groups: tuple[RowGroup, ...] = field(repr=False)

    @classmethod
    def pack(cls, segments: Sequence[Segment], device: torch.device) -> RowBatch:
        """Packs segments (each with at least one token) in a canonical order."""
        ordered = tuple(sorted(segments, key=_group_key))
        starts, tokens, positions, histories = [], [], [], []
        row = 0
        for segment in ordered:
            assert segment.length > 0, "a segment has at least one token"
            starts.append(row)
            row += segment.length
            ids = segment.token_ids.to("cpu", torch.int64)
            tokens.append(ids)
            positions.append(torch.arange(segment.position, segment.position + segment.length))
            context = torch.cat([torch.tensor(segment.preceding, dtype=torch.int64), ids])
            histories.append(context.unfold(0, len(segment.preceding) + 1, 1))
        groups, row = [], 0
        for (decode, length), run in groupby(ordered, key=_group_key):
            members = list(run)
            requests = torch.tensor([s.request for s in members], device=device)
            read_slots = torch.tensor([s.read_slot for s in members], device=device)
            longest = max(s.position for s in members) + length
            groups.append(RowGroup(row, length, decode, longest, requests, read_slots))
            row += length * len(members)
        return cls(
            segments=ordered,
            token_ids=torch.cat(tokens).to(device),
            positions=torch.cat(positions).to(device),
            token_history=torch.cat(histories).to(device),
            starts=tuple(starts),
            groups=tuple(groups),
        )

    @classmethod
    def of_decode_rows(
        cls, requests: Tensor, first: Tensor, history: Tensor, read_slots: Tensor, rows: int, longest: int
    ) -> RowBatch:
        """T decode rows of each of B requests, from device tensors; nothing waits for the device.

        Args:
            requests: int64 ``[B]``, rows in the cache; -1 pads.
            first: int64 ``[B]``, position of each request's first row.
            history: int64 ``[B, n - 1 + T]``, the tokens before the first row, then those of the rows.
            read_slots: int64 ``[B]``, recurrent slot with the state before the first row.
            rows: T.
            longest: a bound of the tokens of the longest request, these rows included.
        """
        positions = first[:, None] + torch.arange(rows, device=first.device)
        positions = torch.where(requests[:, None] < 0, -1, positions)
        return cls(
            segments=(),
            token_ids=history[:, -rows:].flatten(),
            positions=positions.flatten(),
            token_history=history.unfold(1, history.shape[1] - rows + 1, 1).flatten(0, 1),
            starts=(),
            groups=(RowGroup(0, rows, True, longest, requests, read_slots),),
        )

    @property
    def decode(self) -> bool:
        """Whether all rows are those of decode steps."""
        return all(group.decode for group in self.groups)

    def rows(self, request: int) -> slice:
        """The rows of one request."""
        for segment, start in zip(self.segments, self.starts, strict=True):
            if segment.request == request:
                return slice(start, start + segment.length)
        raise KeyError(request)


def _group_key(segment: Segment) -> tuple[bool, int]:
    return segment.decode, segment.length

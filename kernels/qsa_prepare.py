"""Cache writes of a sparse-attention layer: K/V pages, the raw index-key ring, and compressed index keys."""

from __future__ import annotations

import torch
from torch import Tensor

from page4.kernels.codecs import (
    STORAGE_DTYPES,
    check_kv_format,
    check_token_scales,
    encode_int8_rows,
    encode_kv,
)
from page4.kernels.errors import InputError
from page4.kernels.norm_rope import apply_rope, rms_norm_zero_centred, rotary_cos_sin

PAGE_TOKENS = 16


def write_kv_pages(
    values: Tensor,
    pages: Tensor,
    slots: Tensor,
    kv_format: str,
    scale: float,
    token_scales: Tensor | None = None,
) -> None:
    """Encode K or V rows and store them in their page slots, in place.

    ``slot = page * 16 + offset``; a slot of -1 marks a padded row, which is skipped. ``int8`` computes a
    scale for every row and head and stores it in the same slot of ``token_scales``.

    Shapes: ``values`` is ``[R, Hkv, D]``, ``pages`` is ``[P, Hkv, 16, D]`` in the format's storage dtype,
    ``slots`` is int64 ``[R]``, ``token_scales`` FP32 ``[P, Hkv, 16]`` for ``int8`` and None for others.

    Raises:
        InputError: shapes or dtypes that disagree, a slot outside -1..16P-1, or a scale that the format
            refuses (``int8`` has none for all rows, so it must be 1.0).
    """
    check_kv_format(kv_format)
    rows, heads, dim = values.shape
    if pages.ndim != 4 or pages.shape[1:] != (heads, PAGE_TOKENS, dim):
        raise InputError(f"pages have shape {list(pages.shape)}; need [P, {heads}, {PAGE_TOKENS}, {dim}]")
    if pages.dtype != STORAGE_DTYPES[kv_format]:
        raise InputError(f"pages of format {kv_format} are {STORAGE_DTYPES[kv_format]}, got {pages.dtype}")
    check_token_scales(token_scales, kv_format, pages.shape[:3], "token scales")
    if token_scales is not None and scale != 1.0:
        raise InputError(
            f"KV format {kv_format} has a scale per token and head; scale must be 1.0, got {scale}"
        )
    if slots.shape != (rows,) or slots.dtype != torch.int64:
        raise InputError(f"slots must be int64 [{rows}], got {slots.dtype} {list(slots.shape)}")
    num_slots = pages.shape[0] * PAGE_TOKENS
    if bool(((slots < -1) | (slots >= num_slots)).any()):
        raise InputError(f"slots must lie in -1..{num_slots - 1} for {pages.shape[0]} pages")
    live = slots >= 0
    live_slots = slots[live]
    page, offset = live_slots // PAGE_TOKENS, live_slots % PAGE_TOKENS
    if token_scales is None:
        encoded = encode_kv(values[live], kv_format, scale)  # [live, Hkv, D]
    else:
        encoded, token_scales[page, :, offset] = encode_int8_rows(values[live])
    pages[page, :, offset] = encoded


def update_index_keys(
    raw: Tensor,
    positions: Tensor,
    ring: Tensor,
    requests: Tensor,
    compressed_pages: Tensor,
    block_tables: Tensor,
    norm_weight: Tensor,
    rotary_dim: int,
    theta: float,
    eps: float = 1e-6,
) -> None:
    """Store raw index keys of B requests and compress every r-token block they complete, in place.

    Formula: block ``b`` covers positions ``r b .. r b + r - 1`` and its key is
    ``rope_at(r b)(rms_norm(mean(raw keys of the block)))`` in FP32, rounded once to the dtype of the pages.
    Keys of a block that began before these rows are read from the ring, where position ``p`` lives in row
    ``p % cap``. Raw keys are rounded to the ring's dtype before use, so the result does not depend on how
    rows are split into calls.

    Writing positions again (a rejected draft replaced by real tokens) rewrites the ring rows and the blocks
    that the new rows complete. A ring of ``r * ceil((r + K) / r)`` rows keeps the keys of the open block from
    being overwritten by ``K`` rejected draft rows.

    Shapes: ``raw`` is ``[B, T, Di]``, ``positions`` int64 ``[B, T]`` (consecutive and ascending within a
    request), ``ring`` ``[requests, cap, Di]`` with ``requests`` int64 ``[B]`` naming each one's row,
    ``compressed_pages`` ``[P, 16 / r, Di]`` (which tells r), ``block_tables`` int64 ``[B, n]`` (page of every
    16 tokens), ``norm_weight`` ``[Di]``.

    Raises:
        InputError: shapes that disagree, positions that are not consecutive, a ring below r rows, or a block
            table too short for the completed blocks.

    Source: Qwen4Exp QSA indexer (keys are cached raw; norm and RoPE are applied to the block mean).
    """
    batch, rows, dim = raw.shape
    capacity, per_page = ring.shape[1], compressed_pages.shape[1]
    if ring.shape[2] != dim or compressed_pages.shape[2] != dim or PAGE_TOKENS % per_page:
        raise InputError(
            f"index keys of dim {dim} need a ring [requests, cap, {dim}] and pages [P, 16 / r, {dim}], "
            f"got {list(ring.shape)} and {list(compressed_pages.shape)}"
        )
    ratio = PAGE_TOKENS // per_page
    if capacity < ratio:
        raise InputError(f"the index-key ring needs at least {ratio} rows, got {capacity}")
    if positions.shape != (batch, rows) or requests.shape != (batch,) or block_tables.shape[:1] != (batch,):
        raise InputError(
            f"{batch} requests of {rows} rows need positions [{batch}, {rows}], requests [{batch}] and "
            f"block tables [{batch}, n], got {list(positions.shape)}, {list(requests.shape)} and "
            f"{list(block_tables.shape)}"
        )
    if batch == 0 or rows == 0:
        return
    start = positions[:, :1]  # [B, 1]
    consecutive = start + torch.arange(rows, device=positions.device)
    if bool(((start < 0) | (positions != consecutive)).any()):
        raise InputError("positions of index keys must be consecutive, ascending and not negative")

    raw = raw.to(ring.dtype)
    # The block that is open at the start began at most ratio - 1 rows earlier; those keys are in the ring.
    context = ratio - 1
    earlier = start - context + torch.arange(context, device=ring.device)  # [B, 3], may begin below 0
    keys = torch.cat((ring[requests[:, None], earlier % capacity], raw), dim=1)  # [B, 3 + T, Di]
    ring[requests[:, None], positions[:, -capacity:] % capacity] = raw[:, -capacity:]

    candidates = (rows + context) // ratio  # blocks that T rows can complete
    block = start // ratio + torch.arange(candidates, device=ring.device)  # [B, C]
    completed = (block + 1) * ratio <= start + rows
    request, column = completed.nonzero(as_tuple=True)
    block = block[request, column]  # [n]
    if len(block) == 0:
        return
    if bool((block >= block_tables.shape[1] * per_page).any()):
        raise InputError(
            f"the block tables have {block_tables.shape[1]} pages; {int(block.max() + 1) * ratio} tokens "
            f"need {-(-int(block.max() + 1) // per_page)}"
        )
    first = block * ratio - start[request, 0] + context  # [n] row of the block's first key
    members = first[:, None] + torch.arange(ratio, device=ring.device)
    compute = torch.promote_types(keys.dtype, torch.float32)
    pooled = keys[request[:, None], members].to(compute).mean(dim=1)  # [n, Di]
    normed = rms_norm_zero_centred(pooled, norm_weight, eps)
    cos, sin = rotary_cos_sin(block * ratio, rotary_dim, theta)
    rotated = apply_rope(normed[:, None], cos, sin).squeeze(1)
    pages = block_tables[request, block // per_page]
    compressed_pages[pages, block % per_page] = rotated.to(compressed_pages.dtype)

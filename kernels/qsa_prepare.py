"""Cache writes of a sparse-attention layer: K/V pages, the raw index-key ring, and compressed index keys."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from page4.kernels.codecs import STORAGE_DTYPES, check_kv_format, encode_kv
from page4.kernels.errors import InputError
from page4.kernels.norm_rope import apply_rope, rms_norm_zero_centred, rotary_cos_sin

PAGE_TOKENS = 16
COMPRESS_RATIO = 4
BLOCKS_PER_PAGE = PAGE_TOKENS // COMPRESS_RATIO


def write_kv_pages(values: Tensor, pages: Tensor, slots: Tensor, kv_format: str, scale: float) -> None:
    """Encode K or V rows and store them in their page slots, in place.

    ``slot = page * 16 + offset``; a slot of -1 marks a padded row, which is skipped.

    Shapes: ``values`` is ``[R, Hkv, D]``, ``pages`` is ``[P, Hkv, 16, D]`` in the format's storage dtype,
    ``slots`` is int64 ``[R]``.

    Raises:
        InputError: shapes or dtypes that disagree, a slot outside -1..16P-1, or a scale that the format
            refuses.
    """
    check_kv_format(kv_format)
    rows, heads, dim = values.shape
    if pages.ndim != 4 or pages.shape[1:] != (heads, PAGE_TOKENS, dim):
        raise InputError(f"pages have shape {list(pages.shape)}; need [P, {heads}, {PAGE_TOKENS}, {dim}]")
    if pages.dtype != STORAGE_DTYPES[kv_format]:
        raise InputError(f"pages of format {kv_format} are {STORAGE_DTYPES[kv_format]}, got {pages.dtype}")
    if slots.shape != (rows,) or slots.dtype != torch.int64:
        raise InputError(f"slots must be int64 [{rows}], got {slots.dtype} {list(slots.shape)}")
    num_slots = pages.shape[0] * PAGE_TOKENS
    if bool(((slots < -1) | (slots >= num_slots)).any()):
        raise InputError(f"slots must lie in -1..{num_slots - 1} for {pages.shape[0]} pages")
    live = slots >= 0
    live_slots = slots[live]
    encoded = encode_kv(values[live], kv_format, scale)  # [live, Hkv, D]
    pages[live_slots // PAGE_TOKENS, :, live_slots % PAGE_TOKENS] = encoded


def update_index_keys(
    raw: Tensor,
    positions: Tensor,
    ring: Tensor,
    compressed_pages: Tensor,
    block_table: Tensor,
    norm_weight: Tensor,
    rotary_dim: int,
    theta: float,
    eps: float = 1e-6,
) -> None:
    """Store one request's raw index keys and compress every 4-token block they complete, in place.

    Formula: block ``b`` covers positions ``4b .. 4b + 3`` and its key is
    ``rope_at(4b)(rms_norm(mean(raw keys of the block)))`` in FP32, rounded once to the dtype of the pages.
    Keys of a block that began before these rows are read from the ring, where position ``p`` lives in row
    ``p % cap``. Raw keys are rounded to the ring's dtype before use, so the result does not depend on how
    rows are split into calls.

    Writing positions again (a rejected draft replaced by real tokens) rewrites the ring rows and the blocks
    that the new rows complete. A ring of ``4 * ceil((4 + K) / 4)`` rows keeps the keys of the open block from
    being overwritten by ``K`` rejected draft rows.

    Shapes: ``raw`` is ``[R, Di]``, ``positions`` int64 ``[R]`` (consecutive, ascending), ``ring``
    ``[cap, Di]``, ``compressed_pages`` ``[P, 4, Di]``, ``block_table`` int64 ``[n]`` (page of every 16
    tokens), ``norm_weight`` ``[Di]``.

    Raises:
        InputError: shapes that disagree, positions that are not consecutive, a ring below 4 rows, or a block
            table too short for the completed blocks.

    Source: Qwen4Exp QSA indexer (keys are cached raw; norm and RoPE are applied to the block mean).
    """
    rows, dim = raw.shape
    capacity = ring.shape[0]
    if ring.shape != (capacity, dim) or compressed_pages.shape[1:] != (BLOCKS_PER_PAGE, dim):
        raise InputError(
            f"index keys of dim {dim} need a ring [cap, {dim}] and pages [P, {BLOCKS_PER_PAGE}, {dim}], "
            f"got {list(ring.shape)} and {list(compressed_pages.shape)}"
        )
    if capacity < COMPRESS_RATIO:
        raise InputError(f"the index-key ring needs at least {COMPRESS_RATIO} rows, got {capacity}")
    if positions.shape != (rows,):
        raise InputError(f"positions have shape {list(positions.shape)}; {rows} rows need [{rows}]")
    if rows == 0:
        return
    start = int(positions[0])
    if start < 0 or not torch.equal(positions, torch.arange(start, start + rows, device=positions.device)):
        raise InputError("positions of index keys must be consecutive, ascending and not negative")
    first_block = start // COMPRESS_RATIO
    last_block = (start + rows) // COMPRESS_RATIO  # exclusive
    if last_block > block_table.shape[0] * BLOCKS_PER_PAGE:
        raise InputError(
            f"the block table has {block_table.shape[0]} pages; {start + rows} tokens need "
            f"{-(-(start + rows) // PAGE_TOKENS)}"
        )

    raw = raw.to(ring.dtype)
    earlier = torch.arange(first_block * COMPRESS_RATIO, start, device=ring.device)
    keys = torch.cat((ring[earlier % capacity], raw))  # rows from the start of the first block
    ring[positions[-capacity:] % capacity] = raw[-capacity:]
    if first_block == last_block:
        return

    blocks = torch.arange(first_block, last_block, device=ring.device)
    keys = keys[: len(blocks) * COMPRESS_RATIO]
    compute = torch.promote_types(keys.dtype, torch.float32)
    pooled = rearrange(keys.to(compute), "(b r) d -> b r d", r=COMPRESS_RATIO).mean(dim=1)
    normed = rms_norm_zero_centred(pooled, norm_weight, eps)
    cos, sin = rotary_cos_sin(blocks * COMPRESS_RATIO, rotary_dim, theta)
    rotated = apply_rope(normed[:, None], cos, sin).squeeze(1)
    pages = block_table[blocks // BLOCKS_PER_PAGE]
    compressed_pages[pages, blocks % BLOCKS_PER_PAGE] = rotated.to(compressed_pages.dtype)

"""The last token that top-k, top-p and min-p keep of a row of logits, without sorting.

All three keep the first tokens in the order of logits (descending, ties to the lower token), so what they
keep is a threshold and, among the tokens that equal it, a last one. Both come from bisections over the tokens
above a bound that is known from the tiles' sums: a few hundred or thousand, which several programs list
first. The order of the list means nothing: keys and tokens decide. The program that searches keeps the list's
first ones in registers and reads the others again in every step; if the list overflows, it reads the row.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from page4.kernels.token_weights_triton import load_logits, relative_exponent, token_weights

_NO_KEY = tl.constexpr(-(2**31))


@triton.jit
def _key(b_logit):
    """An int32 that orders as the logit does, above INT_MIN; -0.0 becomes +0.0."""
    bits = tl.where(b_logit == 0.0, 0.0, b_logit).to(tl.int32, bitcast=True)
    return tl.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), -(2**31) + 1)


@triton.jit
def _logit(key):
    """The logit that has a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _eligible_keys(b_logit, maximum, scale, least_exponent):
    """Keys of logits that have at least a relative exponent; INT_MIN for the others."""
    m_eligible = (b_logit > -float("inf")) & (relative_exponent(b_logit, maximum, scale) >= least_exponent)
    return tl.where(m_eligible, _key(b_logit), _NO_KEY)


@triton.jit
def _load_source(p_row, p_bits, vocabulary, p_listed, listed, o):
    """Logits of the list (its first ``listed`` entries) or, if ``listed`` is -1, of the row; -inf beyond."""
    b_row = load_logits(p_row, p_bits, o, tl.where(listed < 0, vocabulary, 0))
    b_list = tl.load(p_listed + o, mask=o < listed, other=-float("inf"), cache_modifier=".cg")
    return tl.where(listed < 0, b_row, b_list)


@triton.jit
def _load_tokens(p_tokens, listed, o):
    """Tokens of the list's entries, or of the row's."""
    b_token = tl.load(p_tokens + o, mask=o < listed, other=-1, cache_modifier=".cg")
    return tl.where(listed < 0, o, b_token)


@triton.jit
def _tally(
    b_key, b_weight, p_row, p_bits, vocabulary, p_listed, listed, maximum, scale, log2_min_p, least,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Number, weight and least key of the eligible tokens whose keys are at least ``least``.

    ``b_key`` and ``b_weight`` are the first ``CHUNK`` tokens' of the source.
    """
    m_counted = b_key >= least
    b_count = m_counted.to(tl.int32)
    b_mass = tl.where(m_counted, b_weight, 0)
    b_least = tl.where(m_counted, b_key, 2**31 - 1)
    for first in range(CHUNK, tl.where(listed < 0, vocabulary, listed), CHUNK):
        b_logit = _load_source(p_row, p_bits, vocabulary, p_listed, listed, first + tl.arange(0, CHUNK))
        b_other = _eligible_keys(b_logit, maximum, scale, log2_min_p)
        m_counted = b_other >= least
        b_count += m_counted.to(tl.int32)
        b_mass += tl.where(m_counted, token_weights(b_logit, maximum, scale), 0)
        b_least = tl.minimum(b_least, tl.where(m_counted, b_other, 2**31 - 1))
    return tl.sum(b_count, axis=0), tl.sum(b_mass, axis=0), tl.min(b_least, axis=0)


@triton.jit
def _bisect(
    b_key, b_weight, p_row, p_bits, vocabulary, p_listed, listed, maximum, scale, log2_min_p,
    needed, low, count_low, mass_low, BY_MASS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The greatest key such that the tokens from it on reach ``needed``, in number or in weight.

    ``low`` is a token's key that does so, with its tally. Returns the key, its tally, and that of the tokens
    above it, of which only ``low`` and its own tally mean something when exactly ``needed`` tokens were met.
    """
    high = _key(maximum) + 1
    count_high = tl.full([], 0, tl.int32)
    mass_high = tl.full([], 0, tl.int64)
    searching = (high - 1 != low) & (count_low - count_high > 1)
    if not BY_MASS:
        searching = searching & (count_low != needed)
    while searching:
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
        count, mass, least = _tally(
            b_key, b_weight, p_row, p_bits, vocabulary, p_listed, listed, maximum, scale, log2_min_p,
            middle, CHUNK,
        )  # fmt: skip
        reached = count >= needed
        if BY_MASS:
            reached = mass >= needed
        if reached:
            low, count_low, mass_low = least, count, mass
        else:
            high, count_high, mass_high = middle, count, mass
        searching = (high - 1 != low) & (count_low - count_high > 1)
        if not BY_MASS:
            searching = searching & (count_low != needed)
    return low, count_low, mass_low, count_high, mass_high


@triton.jit
def _last_tie(
    b_key, p_row, p_bits, vocabulary, p_listed, p_tokens, listed, maximum, scale, log2_min_p, key, ties,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The token that is number ``ties`` (from 1), from the lowest on, of those that have the key."""
    b_token = _load_tokens(p_tokens, listed, tl.arange(0, CHUNK))
    # Number n is token n - 1 or a later one. With a constant instead, a vocabulary of one would make the loop
    # dead code, on whose loads Triton 3.6 fails.
    low = ties - 2
    high = vocabulary - 1
    while high - low > 1:
        middle = (low + high) // 2
        b_count = ((b_key == key) & (b_token <= middle)).to(tl.int32)
        for first in range(CHUNK, tl.where(listed < 0, vocabulary, listed), CHUNK):
            o = first + tl.arange(0, CHUNK)
            b_logit = _load_source(p_row, p_bits, vocabulary, p_listed, listed, o)
            m_tied = _eligible_keys(b_logit, maximum, scale, log2_min_p) == key
            b_count += (m_tied & (_load_tokens(p_tokens, listed, o) <= middle)).to(tl.int32)
        if tl.sum(b_count, axis=0) >= ties:
            high = middle
        else:
            low = middle
    return high


@triton.jit
def _kth_tile(b_tile_max, k):
    """A key that at least ``k`` of the tiles' maxima reach, and not many more; INT_MIN if they are fewer."""
    b_key = tl.where(b_tile_max > -float("inf"), _key(b_tile_max), _NO_KEY)
    low = tl.min(b_key, axis=0)
    high = tl.max(b_key, axis=0) + 1
    count = tl.sum((b_key > _NO_KEY).to(tl.int32), axis=0)
    low = tl.where(count < k, _NO_KEY, low)
    most = k + k // 4  # a few tokens more to list are faster than more steps here
    searching = (count > most) & (high - 1 != low)
    while searching:
        middle = (low & high) + ((low ^ high) >> 1)
        above = tl.sum((b_key >= middle).to(tl.int32), axis=0)
        if above >= k:
            low = middle
        else:
            high = middle
        searching = ((above < k) | (above > most)) & (high - 1 != low)
    return low


@triton.jit
def filter_bounds(b_tile_max, total, vocabulary, top_k, top_p, log2_min_p):
    """The least relative exponent and the least key of tokens that filters may keep or that bound others.

    A top-k of 0 and a top-p of 1 are off, and so is a log2 of min-p of -inf; otherwise the exponent of the
    maximum has been added to it. ``total`` is the row's sum.
    """
    least_exponent = log2_min_p
    least_key = tl.full([], _NO_KEY, tl.int32)
    if top_k > 0:
        least_key = _kth_tile(b_tile_max, top_k)
    elif log2_min_p == -float("inf"):
        # Tokens that weigh less than (1 - p) / V of the sum cannot be needed. A quarter of it leaves room
        # for roundings.
        share = (1.0 - top_p) * (total.to(tl.float32) * 0.5**40)
        if top_p < 1.0 - 0.5**18:
            exponent = ((share / vocabulary).to(tl.int32, bitcast=True) >> 23) - 127  # floor(log2)
            least_exponent = (exponent - 2).to(tl.float32)
    return least_exponent, least_key


@triton.jit
def list_tokens(
    p_row, p_bits, vocabulary, p_listed, p_tokens, p_count, b_tile_max, maximum, scale,
    least_exponent, least_key, i_part, parts,
    TILE: tl.constexpr, TILES_PAD: tl.constexpr, BT: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Appends the tokens above both bounds, of every ``parts``-th tile that has any, to the row's list.

    ``p_count`` counts them all, also those that the list has no room for.
    """
    o_tile = tl.arange(0, TILES_PAD)
    b_tile_key = _eligible_keys(b_tile_max, maximum, scale, least_exponent)
    m_tile = (b_tile_key > _NO_KEY) & (b_tile_key >= least_key)
    b_number = tl.where(m_tile, tl.cumsum(m_tile.to(tl.int32), axis=0) - 1, -1)  # of tiles that have any
    for number in range(i_part, tl.max(b_number, axis=0) + 1, BT * parts):
        b_tile = tl.zeros([BT], tl.int32)
        for i in tl.static_range(BT):
            i_tile = tl.min(tl.where(b_number == number + i * parts, o_tile, TILES_PAD), axis=0)
            b_tile = tl.where(tl.arange(0, BT) == i, i_tile, b_tile)
        o_token = b_tile[:, None] * TILE + tl.arange(0, TILE)[None, :]  # [BT, TILE]
        b_logit = load_logits(p_row, p_bits, o_token, vocabulary)
        b_key = _eligible_keys(b_logit, maximum, scale, least_exponent)
        m_listed = (b_key > _NO_KEY) & (b_key >= least_key)
        # Few tokens are listed: counting them one by one is faster than a sum before each.
        o_entry = tl.atomic_add(p_count + o_token * 0, 1, mask=m_listed, sem="relaxed")
        m_listed = m_listed & (o_entry < CAPACITY)
        tl.store(p_listed + o_entry, b_logit, mask=m_listed)
        tl.store(p_tokens + o_entry, o_token, mask=m_listed)


@triton.jit
def search_filters(
    p_row, p_bits, vocabulary, p_listed, p_tokens, listed, maximum, total,
    scale, top_k, top_p, log2_min_p, CHUNK: tl.constexpr,
):  # fmt: skip
    """Threshold, last token that equals it, and weight of what the filters keep of a row.

    Looks at the first ``listed`` entries of the list, or at the whole row if ``listed`` is -1; the other
    arguments are those of :func:`filter_bounds`.
    """
    b_logit = _load_source(p_row, p_bits, vocabulary, p_listed, listed, tl.arange(0, CHUNK))
    b_key = _eligible_keys(b_logit, maximum, scale, log2_min_p)
    b_weight = token_weights(b_logit, maximum, scale)
    count, mass, key = _tally(
        b_key, b_weight, p_row, p_bits, vocabulary, p_listed, listed, maximum, scale, log2_min_p,
        _NO_KEY + 1, CHUNK,
    )  # fmt: skip
    needed_all = mass
    tied = tl.full([], 0, tl.int32)  # kept tokens with the threshold's key, where not all of them are
    if (top_k > 0) & (count > top_k):
        key, count, mass, count_above, mass_above = _bisect(
            b_key, b_weight, p_row, p_bits, vocabulary, p_listed, listed, maximum, scale, log2_min_p,
            top_k, key, count, mass, False, CHUNK,
        )  # fmt: skip
        needed_all = mass
        if count > top_k:
            tied = top_k - count_above
            needed_all = mass_above + tied * token_weights(_logit(key), maximum, scale)
    kept = needed_all
    if top_p < 1.0:
        base = tl.where((top_k == 0) & (log2_min_p == -float("inf")), total, needed_all)
        needed = (base.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
        needed = tl.minimum(tl.maximum(needed, 1), needed_all)
        key, count, mass, count_above, mass_above = _bisect(
            b_key, b_weight, p_row, p_bits, vocabulary, p_listed, listed, maximum, scale, log2_min_p,
            needed, key, count, mass, True, CHUNK,
        )  # fmt: skip
        weight = token_weights(_logit(key), maximum, scale)
        tied = ((needed - mass_above + weight - 1) // weight).to(tl.int32)
        kept = mass_above + tied * weight
        tied = tl.where(tied == count - count_above, 0, tied)
    last = tl.full([], 0, tl.int32) + vocabulary
    if tied > 0:
        last = _last_tie(
            b_key, p_row, p_bits, vocabulary, p_listed, p_tokens, listed, maximum, scale, log2_min_p,
            key, tied, CHUNK,
        )  # fmt: skip
    return _logit(key), last, kept

"""Damage to the files of a checkpoint: bits, lengths, tokens of JSON, pieces that move, and cut ends."""

from __future__ import annotations

import random
import re
import struct

_HOSTILE_NUMBERS = (b"-1", b"0", b"1e999", b"18446744073709551615", b"9223372036854775808", b"0.5", b"NaN")
_HOSTILE_VALUES = (b"null", b"[]", b"{}", b'""', b"true", b'"../m.safetensors"', b"[" * 5000, b'"\\ud800"')
_DTYPES = (b"F32", b"F16", b"BF16", b"I32", b"I64", b"F8_E4M3", b"F8_E5M2", b"U8", b"F64", b"BOOL", b"F4")
_TOKEN = re.compile(rb'"[^"]*"|-?\d+|[\[\]{}:,]')


def mutate_shard(content: bytes, rng: random.Random) -> bytes:
    """A safetensors file with something wrong."""
    (length,) = struct.unpack_from("<Q", content)
    kind = rng.randrange(8)
    if kind == 0:
        said = [0, 1, length - 1, length + 1, 2**63, 2**64 - 1, 10**8 + 1, rng.randrange(2 * length)]
        size = rng.choice(said)
        return struct.pack("<Q", size) + content[8:]
    if kind <= 4:  # the header, its length kept true for the most part
        header = content[8 : 8 + length]
        changed = mutate_json(header, rng)
        said = len(changed) if rng.random() < 0.7 else length
        return struct.pack("<Q", said) + changed + content[8 + length :]
    return mutate_bytes(content, rng)


def mutate_json(text: bytes, rng: random.Random) -> bytes:
    """A JSON text with a token replaced, dropped, doubled or swapped for another, or with wrong bytes."""
    tokens = list(_TOKEN.finditer(text))
    kind = rng.randrange(7)
    if kind == 0 or not tokens:
        return mutate_bytes(text, rng)
    token, other = rng.choice(tokens), rng.choice(tokens)
    if kind == 1:
        token = rng.choice([t for t in tokens if t[0].lstrip(b"-").isdigit()] or tokens)
        new = rng.choice([*_HOSTILE_NUMBERS, str(rng.randrange(600)).encode()])
    elif kind == 2:
        new = rng.choice(_HOSTILE_VALUES)
    elif kind == 3:
        token = rng.choice([t for t in tokens if t[0].strip(b'"') in _DTYPES] or tokens)
        new = b'"' + rng.choice(_DTYPES) + b'"'
    elif kind == 4:
        new = b""
    elif kind == 5:
        new = token[0] + token[0]
    else:  # swap
        first, second = sorted((token, other), key=lambda t: t.start())
        if first.end() > second.start():
            return text
        middle = text[first.end() : second.start()]
        return text[: first.start()] + second[0] + middle + first[0] + text[second.end() :]
    return text[: token.start()] + new + text[token.end() :]


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """A bit or bytes changed, the end cut or extended, or a piece removed, repeated or moved."""
    kind = rng.randrange(6)
    changed = bytearray(content)
    place, other = (rng.randrange(len(content) + 1) for _ in range(2))
    width = rng.choice([1, 1, 2, 4, 8, 64])
    if kind == 0 and content:
        changed[place % len(content)] ^= 1 << rng.randrange(8)
    elif kind == 1:
        changed[place : place + width] = rng.randbytes(min(width, len(content) - place))
    elif kind == 2:
        del changed[place:]
    elif kind == 3:
        changed += rng.choice([rng.randbytes(width), b"\0" * width])
    elif kind == 4:
        del changed[place : place + width]
    else:
        changed[other:other] = content[place : place + width]
    return bytes(changed)

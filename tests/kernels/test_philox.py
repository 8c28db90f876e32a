"""Counter-based random numbers: known answers, keys and counters, integers and floats made of them."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from page4.kernels.philox import Purpose, below, philox4x32, random_words, uniform

from .attention_cases import DEVICE

WORD = st.integers(0, 2**32 - 1)


def words(text: str) -> Tensor:
    return torch.tensor([int(word, 16) for word in text.split()])


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers that come with the paper's Random123
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    assert philox4x32(words(counter), words(key)).tolist() == words(expected).tolist()


@triton.jit
def tritons_kernel(p_seed, p_position, p_purpose, p_out, N: tl.constexpr) -> None:
    o = tl.arange(0, N)
    position = tl.load(p_position + o)
    c0, c1 = (position & 0xFFFFFFFF).to(tl.uint32), ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    x0, x1, x2, x3 = tl.philox(tl.load(p_seed + o), c0, c1, tl.load(p_purpose + o).to(tl.uint32), c0 * 0)
    tl.store(p_out + o * 4, x0.to(tl.int64))
    tl.store(p_out + o * 4 + 1, x1.to(tl.int64))
    tl.store(p_out + o * 4 + 2, x2.to(tl.int64))
    tl.store(p_out + o * 4 + 3, x3.to(tl.int64))


def test_words_equal_those_of_tritons_philox() -> None:
    generator = torch.Generator().manual_seed(0)
    seed = torch.randint(-(2**63), 2**63 - 1, (64,), generator=generator)
    position = torch.randint(0, 2**62, (64,), generator=generator) >> torch.arange(64)
    purpose = torch.arange(64) % 4
    out = torch.empty(64, 4, dtype=torch.int64, device=DEVICE)
    tritons_kernel[(1,)](seed.to(DEVICE), position.to(DEVICE), purpose.to(DEVICE), out, N=64)
    assert torch.equal(random_words(seed, position, purpose), out.cpu())


def test_seed_position_and_purpose_all_count() -> None:
    seed, position, purpose = torch.meshgrid(
        torch.tensor([0, 1, -1, 2**32, 2**62]),
        torch.tensor([0, 1, 2**32, 2**33 + 1]),
        torch.tensor(list(Purpose)),
        indexing="ij",
    )
    found = random_words(seed, position, purpose).reshape(-1, 4)
    assert len(found.unique(dim=0)) == len(found) == 5 * 4 * 4


@given(WORD, WORD, st.integers(0, 2**62 - 1))
def test_below_is_the_scaled_integer(high: int, low: int, limit: int) -> None:
    found = int(below(torch.tensor([high, low]), torch.tensor(limit)))
    assert found == (high * 2**32 + low) * limit // 2**64
    assert 0 <= found < max(limit, 1)


@given(WORD, WORD)
def test_uniform_takes_the_upper_53_bits(high: int, low: int) -> None:
    found = Fraction(float(uniform(torch.tensor([high, low]))))
    assert found == Fraction((high * 2**32 + low) >> 11, 2**53)
    assert found < 1

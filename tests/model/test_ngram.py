"""N-gram hashing: published constants, and what an EOS does to a context."""

from __future__ import annotations

import math

import pytest
import torch

from page4.model import Qwen4ExpConfig
from page4.model.ngram import NGramEmbedding, primes_from, splitmix64
from tests.oracle.tiny import EOS, tiny_dict


def embedding(index: int = 0, **overrides: object) -> NGramEmbedding:
    return NGramEmbedding(Qwen4ExpConfig.from_dict(tiny_dict(**overrides)), index)


def test_splitmix64_follows_the_published_sequence() -> None:
    """First outputs for seed 1234567, as listed with the reference C code (Vigna, 2015)."""
    golden = 0x9E3779B97F4A7C15
    outputs = [splitmix64((1234567 + i * golden) % 2**64) for i in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_multipliers_of_the_published_model() -> None:
    """Vocabulary 248320 and seed 1234 give the layer_multipliers of the public checkpoint."""
    multipliers = embedding(vocab_size=248320).layer_multipliers
    assert multipliers.tolist() == [23703573157769, 20109073645365, 8052911324071]


def test_primes() -> None:
    assert primes_from(0, 5) == [2, 3, 5, 7, 11]
    assert primes_from(11, 2) == [11, 13]
    assert all(all(p % d for d in range(2, math.isqrt(p) + 1)) for p in primes_from(20_000, 8))


def test_every_layer_draws_further_primes_and_its_own_multipliers() -> None:
    first, second = embedding(0), embedding(1)
    sizes = [int(s) for e in (first, second) for s in e.ngram_heads_vocab_sizes]
    assert sizes == primes_from(500, 8)
    assert not set(first.layer_multipliers.tolist()) & set(second.layer_multipliers.tolist())


def test_table_rows_are_padded_and_every_head_stays_inside_its_own() -> None:
    e = embedding()
    sizes, offsets = e.ngram_heads_vocab_sizes, e.ngram_heads_offsets
    assert offsets.tolist() == [0, *sizes.cumsum(0)[:-1].tolist()]
    rows = e.ngram_embedding.weight.shape[0]
    assert rows % 128 == 0
    assert 0 <= rows - int(sizes.sum()) < 128


@pytest.mark.parametrize(
    ("history", "context"),
    [
        ([7, 8, 9], [9, 8, 7]),
        ([7, EOS, 9], [9, EOS, EOS]),  # nothing from before an EOS
        ([EOS, 8, 9], [9, 8, EOS]),
        ([7, 8, EOS], [EOS, 8, 7]),  # an EOS sees the text it ends
        ([EOS, EOS, 9], [9, EOS, EOS]),  # start of a text
    ],
)
def test_context_is_cut_at_an_eos_before_the_token(history: list[int], context: list[int]) -> None:
    assert embedding().context(torch.tensor([history]))[:, 0].tolist() == context


def test_hash_by_hand() -> None:
    e = embedding()
    history = [7, 8, 9]
    m = e.layer_multipliers.tolist()
    two = (9 * m[0]) ^ (8 * m[1])
    three = two ^ (7 * m[2])
    rows = [
        hashed % int(e.ngram_heads_vocab_sizes[head]) + int(e.ngram_heads_offsets[head])
        for head, hashed in enumerate((two, two, three, three))
    ]
    expected = e.ngram_embedding.weight[rows].flatten()
    assert torch.equal(e(torch.tensor([history]))[0], expected)

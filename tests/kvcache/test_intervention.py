"""Interventions: what a study may change of K and V, and that nothing else notices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from page4.kernels.codecs import encode_kv
from page4.kernels.errors import InputError
from page4.kvcache import HybridCache, KVScales
from page4.kvcache.intervention import Intervention, LinearStorage, hadamard
from page4.kvcache.scales import UNIT_SCALES
from page4.model import Qwen4ExpForCausalLM
from tests.kvcache.scenario import TOKENS, config, play, qsa_caches, rows_of
from tests.oracle.steps import Stepper
from tests.oracle.tiny import tiny_model

LAYERS: tuple[int | None, ...] = (2, 3, None)
"""Of the tiny model; None is the MTP layer."""
HEADS, DIM = 2, 32


def bases(seed: int) -> Tensor:
    """Well-conditioned random matrices, one a head."""
    generator = torch.Generator().manual_seed(seed)
    return torch.eye(DIM) + 0.1 * torch.randn(HEADS, DIM, DIM, generator=generator)


@pytest.mark.parametrize("size", [1, 2, 32, 256])
def test_a_hadamard_matrix_is_its_own_inverse_and_spreads_every_component(size: int) -> None:
    matrix = hadamard(size)
    assert torch.allclose(matrix @ matrix, torch.eye(size, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(matrix.abs(), torch.full_like(matrix, size**-0.5), atol=1e-12)


@pytest.mark.parametrize("size", [0, 48])
def test_no_hadamard_matrix_of_other_sizes(size: int) -> None:
    with pytest.raises(InputError, match=f"a dimension that is a power of two, got {size}"):
        hadamard(size)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (torch.zeros(HEADS, DIM, DIM), "one is singular"),
        (torch.ones(HEADS, DIM, 3), r"needs matrices \[Hkv, D, D\], got \[2, 32, 3\]"),
        (torch.eye(DIM), r"got \[32, 32\]"),
    ],
)
def test_a_basis_must_be_invertible(matrix: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        LinearStorage(v=matrix)


def played(model: Qwen4ExpForCausalLM, changes: dict[int | None, Intervention]) -> tuple[Tensor, Tensor]:
    cache = model.new_cache(config("fp32"))
    cache.intervene(changes)
    return play(model, cache)


def test_another_basis_changes_what_is_stored_and_no_logit(model: Qwen4ExpForCausalLM) -> None:
    """Beyond FP32 rounding of products with the bases and their inverses, 32 terms each."""
    plain = played(model, {})
    changed = played(model, {layer: LinearStorage(bases(1), bases(2)) for layer in LAYERS})
    for expected, actual in zip(plain, changed, strict=True):
        assert not torch.equal(expected, actual)
        assert (expected - actual).abs().max() <= 1e-4 * expected.abs().max()


def test_queries_of_a_group_meet_the_basis_of_their_kv_head() -> None:
    storage = LinearStorage(bases(3), bases(4))
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(5, 3 * HEADS, DIM, generator=generator)
    k, v = torch.randn(2, 5, HEADS, DIM, generator=generator)
    stored_k, stored_v = storage.stored(k, v)
    for head in range(3 * HEADS):
        expected = (q[:, head] * k[:, head // 3]).sum(-1)
        actual = (storage.queries(q)[:, head] * stored_k[:, head // 3]).sum(-1)
        assert torch.allclose(expected, actual, atol=1e-4)
    assert torch.allclose(storage.attended(stored_v), v, atol=1e-4)


def test_a_scale_per_head_is_a_basis(model: Qwen4ExpForCausalLM) -> None:
    """The bytes are those of each head over its own scale."""
    scales = torch.tensor([0.0125, 0.03125])  # one of them no power of two

    def run(kv_format: str, cache: HybridCache) -> Tensor:
        stepper = Stepper(model, cache)
        stepper.prefill(TOKENS)
        return rows_of(cache.qsa[0].k_pages, stepper, len(TOKENS))

    exact = run("fp32", model.new_cache(config("fp32")))
    cache = model.new_cache(config("e4m3", scales=KVScales((UNIT_SCALES,) * 2, UNIT_SCALES)))
    cache.intervene({2: LinearStorage(torch.eye(DIM) / scales[:, None, None])})
    stored = run("e4m3", cache)
    for head, scale in enumerate(scales.tolist()):
        # Multiplied by a reciprocal, a value on the edge between two codes may become either.
        expected = encode_kv(exact[:, head], "e4m3", scale)
        assert (stored[:, head] != expected).float().mean() < 1e-3


class Forgetful(Intervention):
    """Attends to no complete block."""

    def chosen(self, blocks: Tensor) -> Tensor:
        return torch.zeros_like(blocks)


def test_a_choice_of_blocks_can_be_replaced(model: Qwen4ExpForCausalLM) -> None:
    """Of the target's layers: its logits change; of the draft's: its own alone."""
    plain_target, plain_draft = played(model, {})
    target, draft = played(model, {2: Forgetful(), 3: Forgetful()})
    assert not torch.equal(target, plain_target) and not torch.equal(draft, plain_draft)
    target, draft = played(model, {None: Forgetful()})
    assert torch.equal(target, plain_target) and not torch.equal(draft, plain_draft)


def test_layers_without_kv_cannot_be_changed(model: Qwen4ExpForCausalLM) -> None:
    with pytest.raises(InputError, match="nothing can be changed in layer 1: it has no K/V"):
        model.new_cache(config()).intervene({1: Intervention()})
    headless = tiny_model(mtp_num_hidden_layers=0)
    with pytest.raises(InputError, match="in layer None"):
        headless.new_cache(config("fp16", scales=None)).intervene({None: Intervention()})


def test_kernels_refuse_what_they_would_ignore() -> None:
    model = tiny_model(num_hidden_layers=1, layer_types=["full_attention"], ple_layer_ids=[])
    model.use_backend("triton")
    cache = model.new_cache(config())
    cache.intervene({0: LinearStorage(bases(1))})
    assert len(qsa_caches(cache)) == 2
    with pytest.raises(InputError, match="need backend 'reference', the model runs on 'triton'"):
        Stepper(model, cache).prefill(TOKENS[:8])

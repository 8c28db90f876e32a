"""Norm and RoPE: equal to the public implementation, FP32 inside, and relative in position."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextRMSNorm, apply_rotary_pos_emb

from page4.kernels.errors import InputError
from page4.kernels.norm_rope import apply_rope, rms_norm_zero_centred, rotary_cos_sin


@pytest.mark.parametrize("group_size", [None, 24, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norm_equals_the_public_implementation(group_size: int | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    public = Qwen4ExpTextRMSNorm(96, group_size=group_size)
    public.weight.data.normal_()
    x = torch.randn(3, 5, 96).to(dtype)
    ours = rms_norm_zero_centred(x, public.weight, group_size=group_size)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, public(x), rtol=0, atol=0)


def test_zero_weight_gives_unit_mean_square() -> None:
    x = 7.0 * torch.randn(4, 64, dtype=torch.float64)
    y = rms_norm_zero_centred(x, torch.zeros(64), eps=0.0)
    torch.testing.assert_close(y.square().mean(-1), torch.ones(4, dtype=torch.float64))


def test_groups_are_normed_independently() -> None:
    x = torch.cat((torch.randn(2, 8), 1000.0 * torch.randn(2, 8)), dim=-1)
    y = rms_norm_zero_centred(x, torch.zeros(16), group_size=8)
    torch.testing.assert_close(y[:, :8], rms_norm_zero_centred(x[:, :8], torch.zeros(8)))


def test_fp16_statistics_do_not_overflow() -> None:
    x = torch.full((1, 8), 60000.0, dtype=torch.float16)  # its square is beyond FP16
    torch.testing.assert_close(
        rms_norm_zero_centred(x, torch.zeros(8)), torch.ones(1, 8, dtype=torch.float16)
    )


def test_rope_equals_the_public_implementation() -> None:
    torch.manual_seed(0)
    cos, sin = rotary_cos_sin(torch.arange(5, 18), 16, 1e4)
    x = torch.randn(1, 13, 3, 40)
    public, _ = apply_rotary_pos_emb(x, x, cos[None], sin[None], unsqueeze_dim=2)
    torch.testing.assert_close(apply_rope(x, cos[None], sin[None]), public, rtol=0, atol=0)


def test_rope_leaves_the_features_after_rotary_dim_alone() -> None:
    x = torch.randn(6, 2, 32)
    cos, sin = rotary_cos_sin(torch.arange(6), 8, 1e4)
    y = apply_rope(x, cos, sin)
    assert torch.equal(y[..., 8:], x[..., 8:])
    assert torch.equal(y[0], x[0])  # position 0 is the identity


def test_rope_products_depend_on_the_distance_only() -> None:
    q, k = torch.randn(1, 1, 32, dtype=torch.float64), torch.randn(1, 1, 32, dtype=torch.float64)

    def product(query_at: int, key_at: int) -> torch.Tensor:
        rotated = [
            apply_rope(x, *rotary_cos_sin(torch.tensor([p]), 32, 1e7))
            for x, p in ((q, query_at), (k, key_at))
        ]
        return (rotated[0] * rotated[1]).sum()

    torch.testing.assert_close(product(107, 100), product(9, 2), rtol=1e-5, atol=1e-5)


def test_the_frequencies_are_powers_of_theta() -> None:
    cos, sin = rotary_cos_sin(torch.tensor([3]), 4, 100.0)
    angle = torch.tensor([3.0, 0.3, 3.0, 0.3])  # theta^0 and theta^(-1/2), written twice
    torch.testing.assert_close(cos[0], angle.cos())
    torch.testing.assert_close(sin[0], angle.sin())


@pytest.mark.parametrize(
    "call",
    [
        lambda: rms_norm_zero_centred(torch.ones(2, 8), torch.zeros(7)),
        lambda: rms_norm_zero_centred(torch.ones(2, 8), torch.zeros(8), group_size=3),
        lambda: rms_norm_zero_centred(torch.ones(2, 8), torch.zeros(8), group_size=0),
        lambda: rotary_cos_sin(torch.arange(3), 7, 1e4),
        lambda: rotary_cos_sin(torch.arange(3), 8, 0.0),
        lambda: apply_rope(torch.ones(3, 1, 4), torch.ones(3, 8), torch.ones(3, 8)),
    ],
)
def test_wrong_inputs_are_refused(call: object) -> None:
    with pytest.raises(InputError):
        call()  # type: ignore[operator]

"""Draft sampling in Triton: the tokens and the stored bits of the reference."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from page4.experiments.sm70.compiling import CAPABILITIES, compile_for
from page4.kernels.draft_sampling import DraftDistributions, sample_drafts_reference
from page4.kernels.draft_sampling_triton import DraftWorkspace, choose_draft_kernel, sample_drafts_triton
from page4.kernels.errors import InputError
from page4.kernels.sampling_params import SamplingParams

from .attention_cases import DEVICE


def params_on(device: str) -> SamplingParams:
    return SamplingParams.of(
        [1.0] * 6,
        draft_temperature=[0.0, 0.3, 1.0, 1.5, 1.0, 0.7],
        seed=[1, 2**40, -3, 4, 5, 6],
        device=device,
    )


@pytest.mark.parametrize("vocabulary", [1, 33, 1024, 2501])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tokens_and_stored_bits_equal_the_reference(vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    padded = torch.full((6, vocabulary + 5), torch.nan, dtype=dtype)
    padded[:, :vocabulary] = (3 * torch.randn(6, vocabulary, generator=generator)).to(dtype)
    padded[2, :vocabulary] = padded[2, 0]  # ties
    padded[5, 0] = torch.nan
    positions = torch.tensor([7, 2**33 + 1, 0, 12, -1, 5])
    expected = DraftDistributions.empty(padded[:, :vocabulary], 2)
    tokens = sample_drafts_reference(padded[:, :vocabulary], positions, params_on("cpu"), expected, 1)

    logits = padded.to(DEVICE)[:, :vocabulary]
    store = DraftDistributions.empty(logits, 2)
    workspace = DraftWorkspace.allocate(6, vocabulary, DEVICE)
    out = torch.full((6,), 77, device=DEVICE)
    args = (positions.to(DEVICE), params_on(DEVICE), workspace, store, 1)
    sample_drafts_triton(logits, *args, out=out)
    assert out.tolist() == [*tokens[:4].tolist(), 77, -1]  # nothing of the padded request
    for field in fields(store):
        found = getattr(store, field.name).cpu()
        assert torch.equal(found.nan_to_num(9.0), getattr(expected, field.name).nan_to_num(9.0)), field.name
    # What is sampled where it is stored needs no copy.
    again = sample_drafts_triton(store.logits[:, 1], *args)
    assert again[[1, 2, 3]].tolist() == tokens[[1, 2, 3]].tolist()


def test_wrong_inputs_are_refused() -> None:
    logits, positions = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64)
    params, workspace = SamplingParams.of([1.0] * 2), DraftWorkspace.allocate(2, 5)
    with pytest.raises(InputError, match="adjacent"):
        sample_drafts_triton(torch.zeros(5, 2).T, positions, params, workspace)
    with pytest.raises(InputError, match="workspace"):
        sample_drafts_triton(logits, positions, params, DraftWorkspace.allocate(1, 5))
    with pytest.raises(InputError, match="out must be"):
        sample_drafts_triton(logits, positions, params, workspace, out=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(InputError, match="store their distributions"):
        sampled = SamplingParams.of([1.0] * 2, draft_temperature=[1.0] * 2)
        sample_drafts_triton(logits, positions, sampled, workspace)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_draw_compiles_without_spills(capability: int) -> None:
    signature = {
        "p_logits": "*fp16", "stride_request": "i32:16", "p_positions": "*i64", "p_scale": "*fp32",
        "p_seed": "*i64", "p_tile_max": "*fp32", "p_tile_sum": "*i64", "p_store_scale": "*fp32",
        "p_store_max": "*fp32", "p_store_total": "*i64", "stride_store": "i32", "p_tokens": "*i64",
        "vocabulary": "i32:16", "tiles": "i32",
    }  # fmt: skip
    sizes = {"TILE": 1024, "TILES_PAD": 256, "DEPENDENT": capability >= 90}
    compiled = compile_for(
        choose_draft_kernel, signature, sizes, capability, num_warps=4, enable_fp_fusion=False
    )
    assert compiled.stack_bytes == 0
    saturated = compiled.ptx.count("fma.rn.sat.f32")
    assert compiled.ptx.count("fma") == compiled.ptx.count("fma.rn.f32") + saturated and saturated > 0

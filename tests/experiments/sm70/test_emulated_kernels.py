"""The kernels' own specifications, on their machine code for compute capability 7.0.

Each of these tests of ``tests/kernels`` compares a launch with the reference. Here the launch compiles the
kernel for sm_70 and executes it on the emulator, which also reports accesses out of bounds, undefined values
and races.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from page4.experiments.sm70.compiling import Compiler
from page4.experiments.sm70.emulator import Run
from tests.kernels import (
    test_block_select_triton as selection,
)
from tests.kernels import (
    test_causal_conv_triton as convolution,
)
from tests.kernels import (
    test_codecs_triton as codecs,
)
from tests.kernels import (
    test_draft_sampling_triton as sampling,
)
from tests.kernels import (
    test_gated_delta_triton as delta,
)
from tests.kernels import (
    test_hyper_connection_triton as streams,
)
from tests.kernels import (
    test_index_scores_triton as scores,
)
from tests.kernels import (
    test_moe_triton as experts,
)
from tests.kernels import (
    test_mtp_verify_triton as verification,
)
from tests.kernels import (
    test_page4_attention_triton as attention,
)
from tests.kernels import (
    test_product_check_triton as product,
)
from tests.kernels import (
    test_qsa_prepare_triton as prepare,
)

if torch.cuda.is_available():
    pytest.skip("kernels run on the GPU of this machine", allow_module_level=True)

from .emulated_launch import emulated_launches


@pytest.fixture(autouse=True)
def launches(compiler: Compiler) -> Iterator[list[Run]]:
    with emulated_launches(compiler) as runs:
        yield runs
    assert runs, "nothing was launched"
    assert not [race for run in runs for race in run.races]


FORMATS = ("fp16", "e4m3", "e5m2", "e3m4", "e2m5", "int8")
BYTE_FLOATS = ("e4m3", "e5m2", "e3m4", "e2m5")


@pytest.mark.parametrize("kv_format", BYTE_FLOATS)
def test_codecs(kv_format: str) -> None:
    codecs.test_all_codes_decode_as_in_the_reference(kv_format, False)
    codecs.test_edges_encode_as_in_the_reference(kv_format, False)
    codecs.test_words_hold_four_codes(kv_format)
    codecs.test_every_kind_of_nan_becomes_the_nan_code(kv_format, False)


@pytest.mark.parametrize(
    "specification",
    [
        codecs.test_int8_rows_encode_as_in_the_reference,
        product.test_this_machine_multiplies_correctly,
        scores.test_heads_that_point_away_score_exactly_zero,
        scores.test_half_precision_products_accumulate_in_fp32,
        scores.test_keys_beyond_two_gibi_elements,
        selection.test_signed_zeros_tie,
        selection.test_more_words_than_one_program_lists,
        selection.test_a_workspace_and_a_plan_serve_step_after_step,
        prepare.test_only_padding_writes_nothing,
        prepare.test_far_positions_turn_as_in_the_reference,
        attention.test_padding_groups_write_nothing,
        attention.test_the_workspace_may_hold_anything,
    ],
)
def test_specifications(specification: Callable[[], None]) -> None:
    specification()


def test_selection_of_scores_of_both_signs() -> None:
    selection.test_scores_of_both_signs_and_all_magnitudes(32)
    selection.test_512_of_many_blocks(512)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_prepare(kv_format: str) -> None:
    prepare.test_a_prompt_and_a_verify_step_in_every_format(kv_format)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_attention(kv_format: str) -> None:
    attention.test_formats(kv_format)


@pytest.mark.parametrize(("kv_heads", "group", "rows", "dim"), [(1, 6, 4, 64), (2, 12, 2, 128)])
def test_attention_of_other_shapes(kv_heads: int, group: int, rows: int, dim: int) -> None:
    attention.test_heads_and_dimensions(kv_heads, group, rows, dim, "e4m3")


def test_merge_of_splits() -> None:
    attention.test_merge_of_empty_and_live_splits([2])
    attention.test_rows_without_tokens_give_zero_and_minus_infinity(3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gated_delta_steps(dtype: torch.dtype) -> None:
    """Key heads of several value heads, read slots that the step overwrites, chunks that fill the ring."""
    delta.test_a_verify_step(4, dtype)
    delta.test_head_counts_and_taps(2, 6, 4)
    delta.test_a_chunk_of_a_prompt_leaves_one_state(8)


def test_gated_delta_rows_have_the_same_bits_alone() -> None:
    delta.test_rows_one_by_one_give_the_bits_of_a_verify_step()
    delta.test_gates_keep_their_precision_where_decay_is_weak()


def test_gated_delta_of_wide_heads() -> None:
    delta.test_head_dimensions(128, 128)


@pytest.mark.parametrize("pieces", [(21, 8, 1), (3, 1, 4, 4, 2)])
def test_convolution(pieces: tuple[int, ...]) -> None:
    convolution.test_pieces_of_any_length_give_what_the_whole_text_gives(pieces, 4, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_hyper_connections(dtype: torch.dtype) -> None:
    streams.test_every_launch((5, 4, 48), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_experts(dtype: torch.dtype) -> None:
    experts.test_every_launch(dtype)


@pytest.mark.parametrize(("seed", "max_listed"), [(0, 2048), (3, 2048), (5, 16)])
def test_verification(seed: int, max_listed: int) -> None:
    """Greedy and sampled requests, filters, masks, padding and NaN; lists that overflow."""
    verification.test_tokens_equal_the_reference(1500, seed, max_listed)


def test_verification_of_ties_and_drafts() -> None:
    verification.test_filters_keep_the_lowest_of_equal_tokens()
    verification.test_nothing_to_recover_gives_the_argmax()
    sampling.test_tokens_and_stored_bits_equal_the_reference(1500, torch.float16)

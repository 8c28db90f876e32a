"""What a V100 would run, on the GPU that is there: every kernel's PTX for sm_70 against its reference.

The driver compiles PTX for sm_70 for every newer GPU, ``mma.m8n8k4`` too. So the kernels run their
specifications with launchers that see a V100 and launches that go through the driver. Then the emulator runs
the machine code of the same launches, and must compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from page4.experiments.sm70.compiling import Binary, Compiler
from page4.experiments.sm70.driver import Driver
from page4.experiments.sm70.launches import Launch
from page4.experiments.sm70.promises import PROMISES
from page4.experiments.sm70.toolchain import VERSION, Toolchain, installed, side_install
from page4.kernels.errors import InputError
from tests.experiments.sm70.emulated_launch import emulate
from tests.kernels import test_block_select_triton as selection
from tests.kernels import test_causal_conv_triton as convolution
from tests.kernels import test_draft_sampling_triton as drafts
from tests.kernels import test_gated_delta_triton as delta
from tests.kernels import test_hyper_connection_triton as streams
from tests.kernels import test_index_scores_triton as scores
from tests.kernels import test_moe_triton as experts
from tests.kernels import test_mtp_verify_triton as verification
from tests.kernels import test_page4_attention_gluon as gluon
from tests.kernels import test_page4_attention_triton as plain
from tests.kernels import test_product_check_triton as product
from tests.kernels import test_qsa_prepare_triton as prepare
from tests.kernels.driver_launches import driver_launches

gpu_only = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (7, 0),
    reason="needs a GPU of compute capability 7.0 or newer",
)
FORMATS = ("fp16", "e4m3", "e5m2", "e3m4", "e2m5", "int8")
OTHER_CAPABILITIES = (
    "page4_attention_ampere_kernel", "page4_attention_hopper_kernel",
    "delta_keys_kernel", "delta_solve_kernel", "delta_state_kernel", "delta_norm_kernel",
)  # fmt: skip


def score(heads: int, dim: int, rows_per_group: int) -> None:
    definition = scores.test_scores_equal_the_definition.hypothesis.inner_test  # type: ignore[attr-defined]
    definition(
        seed=dim, row_counts=[4, 9, 1], shape=(heads, dim), dtypes=("float16", "float16"),
        rows_per_group=rows_per_group, padding=1,
    )  # fmt: skip


def attend(config: Any, shape: tuple[int, int, int, int], kv_format: str = "e4m3") -> None:
    gluon.test_heads_dimensions_and_warps(*shape, config, kv_format)


VOLTA, MERGE, PLAIN = "page4_attention_volta_kernel", "merge_kernel", "page4_attention_kernel"
SELECT = ("select_kernel", "plan_kernel")
VERIFY = ("tile_sums_kernel", "gather_rows_kernel", "decide_kernel")
EXPERTS = ("route_kernel", "swiglu_kernel", "combine_kernel")
STREAMS = ("group_norm_kernel", "activate_kernel", "mix_streams_kernel", "write_streams_kernel")
SPECIFICATIONS: dict[str, tuple[tuple[str, ...], Callable[[], None]]] = {
    **{
        f"attention-{name}": (
            (VOLTA, MERGE), partial(gluon.test_formats, gluon.mma884(2, 32, 4), name, False)
        )
        for name in FORMATS
    },
    "attention-8-warps": (
        (VOLTA, MERGE), partial(gluon.test_formats, gluon.mma884(2, 64, 8), "e4m3", False)
    ),
    "attention-24-members": ((VOLTA,), partial(attend, gluon.mma884(1, 32, 4), (2, 6, 4, 256))),
    "attention-head-splits": (
        (VOLTA,), partial(attend, gluon.mma884(1, 32, 2, head_splits=2), (1, 16, 6, 64), "int8")
    ),
    "attention-D128": ((VOLTA, MERGE), partial(attend, gluon.mma884(3, 64, 4), (1, 5, 7, 128), "fp16")),
    "attention-1-row": ((VOLTA,), partial(attend, gluon.mma884(1, 32, 2), (3, 1, 1, 128))),
    "attention-any-scales": (
        (VOLTA, MERGE), partial(gluon.test_scales_of_tokens_may_differ_by_any_factor, 8.0, 3)
    ),
    "attention-without-tokens": (
        (VOLTA, MERGE),
        partial(gluon.test_rows_without_tokens_and_padding_groups, 3, 64, gluon.mma884(3, 32, 2)),
    ),
    "attention-requests": (
        (VOLTA, MERGE), partial(gluon.test_groups_of_several_requests, 64, gluon.mma884(2, 32, 2))
    ),
    **{f"plain-{name}": ((PLAIN, MERGE), partial(plain.test_formats, name)) for name in FORMATS},
    "merge": ((MERGE,), partial(plain.test_merge_of_empty_and_live_splits, [2])),
    "scores": (("index_scores_volta_kernel",), partial(score, 4, 128, 4)),
    "scores-3-heads": (("index_scores_volta_kernel",), partial(score, 3, 64, 3)),
    "scores-1-head": (("index_scores_volta_kernel",), partial(score, 1, 256, 7)),
    "scores-plain": (("index_scores_kernel",), partial(score, 3, 24, 4)),
    "select-signed-zeros": (SELECT, selection.test_signed_zeros_tie),
    "select-magnitudes": (SELECT, partial(selection.test_scores_of_both_signs_and_all_magnitudes, 32)),
    "select-512": (SELECT, partial(selection.test_512_of_many_blocks, 512)),
    "select-words": (("plan_kernel",), selection.test_more_words_than_one_program_lists),
    "select-steps": (SELECT, selection.test_a_workspace_and_a_plan_serve_step_after_step),
    **{
        f"prepare-{name}": (
            ("qsa_prepare_kernel",), partial(prepare.test_a_prompt_and_a_verify_step_in_every_format, name)
        )
        for name in FORMATS
    },
    "prepare-padding": (("qsa_prepare_kernel",), prepare.test_only_padding_writes_nothing),
    "prepare-far": (("qsa_prepare_kernel",), prepare.test_far_positions_turn_as_in_the_reference),
    "verify": (VERIFY, partial(verification.test_tokens_equal_the_reference, 1000, 0, 16384)),
    "verify-long": (VERIFY, partial(verification.test_tokens_equal_the_reference, 2501, 2, 16384)),
    "drafts": (
        ("tile_sums_kernel", "choose_draft_kernel"),
        partial(drafts.test_tokens_and_stored_bits_equal_the_reference, 2501, torch.float16),
    ),
    "streams": (STREAMS, partial(streams.test_every_launch, (5, 4, 48), torch.float16)),
    "experts": (EXPERTS, partial(experts.test_every_launch, torch.float16)),
    "delta-verify": (("gated_delta_kernel",), partial(delta.test_a_verify_step, 4, torch.float16)),
    "delta-chunk": (
        ("gated_delta_kernel", "store_inputs_kernel"),
        partial(delta.test_a_chunk_of_a_prompt_leaves_one_state, 20),
    ),
    "convolution": (("causal_conv_kernel",), convolution.test_half_precision_rows_accumulate_in_fp32),
    "product": (("product_kernel",), product.test_this_machine_multiplies_correctly),
}  # fmt: skip
# One of every kernel at least; those that take the emulator seconds.
COMPARED = (
    *(f"attention-{name}" for name in FORMATS), "attention-D128", "attention-without-tokens", "merge",
    "plain-e4m3", "scores", "scores-plain", "select-magnitudes", "select-words", "prepare-e4m3",
    "prepare-int8", "verify", "drafts", "streams", "experts",
    "delta-verify", "delta-chunk", "convolution", "product",
)  # fmt: skip
# Lists in parallel, a row each, that programs append to as they come: the order of entries means nothing.
LISTS = {"gather_rows_kernel": ("p_listed", "p_tokens")}
specified = pytest.mark.parametrize(("kernels", "specification"), SPECIFICATIONS.values(), ids=SPECIFICATIONS)


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    """Of the installed Triton."""
    yield from _compiler(installed())


@pytest.fixture(scope="module")
def reading_compiler() -> Iterator[Compiler]:
    """Of a Triton whose tools read code for sm_70."""
    try:
        toolchain = installed() if installed().version == VERSION else side_install()
    except InputError as reason:
        pytest.skip(str(reason))
    yield from _compiler(toolchain)


def _compiler(toolchain: Toolchain) -> Iterator[Compiler]:
    compiler = Compiler(toolchain)
    yield compiler
    compiler.close()


def on_cpu(values: list[Any]) -> list[Any]:
    """The values, with copies of tensors that share memory as the tensors do."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies: list[Any] = []
    for value in values:
        if not isinstance(value, Tensor):
            copies.append(value)
            continue
        storage = value.untyped_storage()
        copy = storages.setdefault(storage.data_ptr(), storage.cpu().clone())
        empty = torch.empty(0, dtype=value.dtype)
        copies.append(empty.set_(copy, value.storage_offset(), value.shape, value.stride()))  # type: ignore[call-overload]
    return copies


def check_same(name: str, gpu: Tensor, emulated: Tensor) -> None:
    """Equal integers; of bytes, which may be codes, few apart by one; FP numbers within FP16's roundings.

    Tensor cores and functions such as ``ex2`` round in ways of their own on every GPU.
    """
    if gpu.dtype == torch.uint8:
        apart = (gpu.int() - emulated.int()).abs()
        assert apart.max() <= 1 and (apart > 0).sum() <= 1 + apart.numel() // 1000, name
    elif not gpu.dtype.is_floating_point:
        assert torch.equal(gpu, emulated), name
    else:
        a, b = gpu.double(), emulated.double()
        known = b.isfinite()
        assert torch.equal(a.nan_to_num()[~known], b.nan_to_num()[~known]), name
        assert torch.equal(a.isnan(), b.isnan()), name
        if known.any():
            a, b = a[known], b[known]
            assert (a - b).square().mean() <= (2.0**-11) ** 2 * b.square().mean(), name
            assert (a - b).abs().max() <= 2.0**-9 * b.abs().max(), name


def entries(logits: Tensor, tokens: Tensor) -> Tensor:
    """What lists ``[N, C]`` of 32-bit values hold in any order: each row's pairs as int64, ascending.

    Places that nothing was written to count too. Copies of the same memory agree in them.
    """
    high, low = logits.cpu().view(torch.int32).long(), tokens.cpu().view(torch.int32).long()
    return ((high << 32) | (low & 0xFFFFFFFF)).sort(dim=1).values


@pytest.fixture
def driver() -> Driver:
    torch.empty(1, device="cuda")  # PyTorch's context becomes the current one
    return Driver()


def launched_by(launches: list[Launch]) -> set[str]:
    return {launch.kernel.fn.__name__ for launch in launches}


@gpu_only
@specified
def test_code_for_a_v100_equals_the_reference(
    kernels: tuple[str, ...], specification: Callable[[], None], compiler: Compiler, driver: Driver
) -> None:
    with driver_launches(compiler, driver) as launches:
        specification()
        torch.cuda.synchronize()
    assert launched_by(launches) >= set(kernels)


@gpu_only
@pytest.mark.parametrize("name", COMPARED)
def test_the_emulator_computes_what_a_gpu_computes(
    name: str, reading_compiler: Compiler, driver: Driver
) -> None:
    """Launch by launch, on copies of the same memory."""
    kernels, specification = SPECIFICATIONS[name]

    def watch(launch: Launch, binary: Binary, values: list[Any], execute: Callable[[], None]) -> None:
        copies = on_cpu(values)
        execute()
        torch.cuda.synchronize()
        emulate(reading_compiler, binary, launch, copies)
        kernel, names = launch.kernel.fn.__name__, list(launch.job(70).signature)
        on_gpu, emulated = dict(zip(names, values, strict=True)), dict(zip(names, copies, strict=True))
        lists = LISTS.get(kernel)
        if lists:
            found, expected = (entries(*(of.pop(name) for name in lists)) for of in (on_gpu, emulated))
            check_same(f"{kernel} {' and '.join(lists)}", found, expected)
        for argument, value in on_gpu.items():
            if isinstance(value, Tensor):
                check_same(f"{kernel} {argument}", value.cpu(), emulated[argument])

    with driver_launches(reading_compiler, driver, watch) as launches:
        specification()
    assert launched_by(launches) >= set(kernels)


def test_no_kernel_is_forgotten() -> None:
    for names in (SPECIFICATIONS, COMPARED):
        launched = {kernel for name in names for kernel in SPECIFICATIONS[name][0]}
        assert launched == set(PROMISES) - set(OTHER_CAPABILITIES)


def test_copies_share_memory_as_the_tensors_do() -> None:
    memory = torch.arange(12.0)
    values = [memory.view(3, 4)[:, 1:3], 5, memory.view(torch.int32)[6:], torch.zeros(2)]
    copies = on_cpu(values)
    assert copies[1] == 5 and torch.equal(copies[0], values[0]) and torch.equal(copies[2], values[2])
    copies[2].zero_()
    assert copies[0].tolist() == [[1, 2], [5, 0], [0, 0]] and memory[6] == 6.0


def test_lists_are_the_same_in_any_order_of_whole_entries() -> None:
    logits, tokens = torch.tensor([[2.0, -1.0, torch.nan]]), torch.tensor([[7, 5, 3]], dtype=torch.int32)
    order = torch.tensor([1, 0, 2])
    assert torch.equal(entries(logits, tokens), entries(logits[:, order], tokens[:, order]))
    others = ((logits, tokens[:, order]), (logits[:, order], tokens), (logits, tokens.clamp_max(6)))
    for other in (*others, (logits.clamp_max(1.0), tokens)):
        assert not torch.equal(entries(logits, tokens), entries(*other))


def test_what_differs_is_not_the_same() -> None:
    nan, inf = torch.nan, torch.inf
    same = torch.tensor([1.0, -2.0, nan, -inf, inf])
    check_same("x", same, same * torch.tensor([1.0001, 1, 1, 1, 1]))
    for other in (
        [1.01, -2, nan, -inf, inf],
        [1, -2, 0, -inf, inf],
        [1, -2, nan, inf, inf],
        [1, nan, nan, -inf, inf],
    ):
        with pytest.raises(AssertionError):
            check_same("x", same, torch.tensor(other))
    codes = torch.zeros(100, dtype=torch.uint8)
    check_same("x", codes, codes.index_fill(0, torch.tensor([7]), 1))
    for places, value in (([7], 2), ([7, 8], 1)):
        with pytest.raises(AssertionError):
            check_same("x", codes, codes.index_fill(0, torch.tensor(places), value))
    with pytest.raises(AssertionError):
        check_same("x", codes.int(), codes.int().index_fill(0, torch.tensor([7]), 1))

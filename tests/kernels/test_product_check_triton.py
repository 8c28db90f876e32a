"""A Triton that multiplies wrongly is found at the start, not in somebody's results."""

from __future__ import annotations

import pytest
import torch

from page4.experiments.sm70.compiling import CAPABILITIES, compile_for
from page4.kernels.errors import InputError
from page4.kernels.product_check_triton import (
    SIZE,
    check_products,
    check_result,
    known_factors,
    product_kernel,
)
from tests.kernels.attention_cases import DEVICE


def test_this_machine_multiplies_correctly() -> None:
    check_products(torch.device(DEVICE))


def test_products_that_are_wrong_are_refused() -> None:
    a, b = (x.float() for x in known_factors("cpu"))
    check_result(a @ b, "cpu")
    one_is_off = a @ b
    one_is_off[3, 5] += 1.0
    for wrong in (torch.zeros(SIZE, SIZE), one_is_off, (a @ b).T, torch.full((SIZE, SIZE), torch.nan)):
        with pytest.raises(InputError, match="multiplies FP16 matrices wrongly"):
            check_result(wrong, "cpu")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_product_compiles(capability: int) -> None:
    types = {"p_a": "*fp16", "p_b": "*fp16", "p_c": "*fp32"}
    compiled = compile_for(product_kernel, types, {"N": SIZE}, capability, num_warps=4)
    assert ("mma" in compiled.ptx) == (capability >= 80)

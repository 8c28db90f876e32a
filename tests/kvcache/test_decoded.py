"""K and V of a request, decoded: as attention reads them, in every format."""

from __future__ import annotations

import pytest
import torch

from page4.kernels.codecs import decode_kv, encode_int8_rows, encode_kv
from page4.kvcache import FORMAT_NAMES, get_format
from page4.kvcache.decoded import decoded_rows
from page4.model import Qwen4ExpForCausalLM
from tests.kvcache.scenario import SCALES, TOKENS, config
from tests.oracle.steps import Stepper


@pytest.mark.parametrize("kv_format", FORMAT_NAMES)
def test_rows_are_what_the_format_makes_of_the_exact_ones(model: Qwen4ExpForCausalLM, kv_format: str) -> None:
    """Of the first sparse layer, whose inputs no format has changed; for tokens that start inside a page."""
    exact, own = model.new_cache(config("fp32")), model.new_cache(config(kv_format))
    own.open()  # so that the request is not in row 0 and its pages are not the first
    own.reserve(0, 20)
    steppers = [Stepper(model, cache) for cache in (exact, own)]
    for stepper in steppers:
        stepper.prefill(TOKENS[:45])
    wanted = decoded_rows(exact.qsa[0], steppers[0].request, 13, 45)
    found = decoded_rows(own.qsa[0], steppers[1].request, 13, 45)
    has_scale = get_format(kv_format).needs_scale
    scales = (SCALES.target[0].k, SCALES.target[0].v) if has_scale else (1.0, 1.0)
    for before, after, scale in zip(wanted, found, scales, strict=True):
        assert after.shape == (32, model.config.num_key_value_heads, model.config.head_dim)
        assert after.dtype == torch.float32
        if kv_format == "int8":
            codes, row_scales = encode_int8_rows(before)
            expected = decode_kv(codes, "int8") * row_scales[..., None]
        else:
            expected = decode_kv(encode_kv(before, kv_format, scale), kv_format) * scale
        assert torch.equal(after, expected)

"""The convolution launch against its reference, over rings that requests leave from step to step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from page4.kernels.causal_conv_triton import causal_conv_triton
from page4.kernels.errors import InputError
from page4.kernels.gated_delta import causal_conv1d_reference

from .recurrent_cases import DEVICE, normal, request_rows

CHANNELS, ROWS = 11, 4


def texts(requests: int, length: int, channels: int = CHANNELS, seed: int = 0) -> Tensor:
    return normal(torch.Generator().manual_seed(seed), requests, length, channels)


def weight_of(taps: int, channels: int = CHANNELS) -> Tensor:
    return normal(torch.Generator().manual_seed(1), channels, taps)


def whole(text: Tensor, weight: Tensor, dilation: int) -> Tensor:
    """The convolution of whole texts in float64."""
    length = (weight.shape[1] - 1) * dilation
    before = torch.zeros(text.shape[0], length, text.shape[2], dtype=torch.float64, device=DEVICE)
    return causal_conv1d_reference(text.double(), weight.double(), before, dilation)[0]


def new_ring(requests: int, taps: int, dilation: int, channels: int = CHANNELS) -> Tensor:
    """Full of NaN: what no row wrote must not be read, not even times zero."""
    return torch.full((requests, (taps - 1) * dilation + ROWS, channels), torch.nan, device=DEVICE)


@pytest.mark.parametrize("dilation", [1, 3])
@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("pieces", [(40,), (1,) * 20, (3, 1, 4, 4, 2), (9, 13, 4, 14), (21, 8, 1)])
def test_pieces_of_any_length_give_what_the_whole_text_gives(
    pieces: tuple[int, ...], taps: int, dilation: int
) -> None:
    text, weight = texts(2, sum(pieces)), weight_of(taps)
    expected, ring = whole(text, weight, dilation), new_ring(3, taps, dilation)
    start = 0
    for count in pieces:
        rows = request_rows([2, -1, 0], [0] * 3, [start, 0, start], count)
        x = text[:, start : start + count]
        packed = torch.cat((x[0], torch.full_like(x[0], torch.nan), x[1]))
        out = torch.full_like(packed, 7.0)
        causal_conv_triton(packed, weight, ring, rows, dilation, out)
        for i, place in ((0, 0), (1, 2)):
            own = out[place * count : (place + 1) * count].double()
            torch.testing.assert_close(own, expected[i, start : start + count], rtol=1e-5, atol=1e-5)
        assert (out[count : 2 * count] == 7).all()
        start += count
    assert ring[1].isnan().all()


@settings(max_examples=20)
@given(st.data())
def test_rejected_rows_are_written_again(data: st.DataObject) -> None:
    """Lives of requests of other lengths: prompts, then steps that keep some of their rows."""
    taps, dilation = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    channels = data.draw(st.sampled_from([1, 7, 16, 600]))
    text, weight = texts(3, 60, channels), weight_of(taps, channels)
    expected, ring = whole(text, weight, dilation), new_ring(3, taps, dilation, channels)
    positions = [0, 0, 0]
    for _ in range(data.draw(st.integers(1, 4))):
        decode = data.draw(st.booleans())
        most = ROWS if decode else 18
        requests = data.draw(st.permutations(range(3)))[: data.draw(st.integers(1, 3))]
        counts = [data.draw(st.integers(0, min(most, 60 - positions[r]))) for r in requests]
        if not any(counts):
            continue
        starts = [positions[r] for r in requests]
        rows = request_rows(requests, [0] * len(requests), starts, counts)
        kept = [data.draw(st.integers(1, n)) if decode and n else n for n in counts]
        x = torch.cat(
            [
                torch.cat((text[r, p : p + k], torch.full((n - k, channels), 50.0, device=DEVICE)))
                for r, p, n, k in zip(requests, starts, counts, kept, strict=True)
            ]
        )
        padded = torch.nn.functional.pad(x, (0, 3), value=torch.nan)[:, :channels]
        out = causal_conv_triton(padded, weight, ring, rows, dilation).double()
        first = 0
        for r, p, n, k in zip(requests, starts, counts, kept, strict=True):
            torch.testing.assert_close(out[first : first + k], expected[r, p : p + k], rtol=1e-4, atol=1e-4)
            positions[r] += k
            first += n


def test_rows_one_by_one_give_the_bits_of_a_verify_step() -> None:
    text, weight = texts(1, 30)[0], weight_of(4)
    ring = new_ring(1, 4, 3)
    causal_conv_triton(text[:20], weight, ring, request_rows([0], [0], [0], 20), 3)
    together, alone = ring.clone(), ring.clone()
    out = causal_conv_triton(text[20:24], weight, together, request_rows([0], [0], [20], 4), 3)
    for t in range(4):
        row = text[20 + t : 21 + t]
        single = causal_conv_triton(row, weight, alone, request_rows([0], [0], [20 + t], 1), 3)
        assert torch.equal(single[0], out[t])
    assert torch.equal(alone, together)


def test_half_precision_rows_accumulate_in_fp32() -> None:
    x = torch.full((1, 1), 60000.0, dtype=torch.float16, device=DEVICE)
    ring = x.expand(1, 4, 1).contiguous()
    ones = torch.ones(1, 4, dtype=torch.float16, device=DEVICE)
    y = causal_conv_triton(x, ones, ring, request_rows([0], [0], [9], 1))
    assert y.item() == 4 * x.float().item()  # beyond FP16


def test_wrong_inputs_are_refused() -> None:
    x, weight, ring = texts(1, 4)[0], weight_of(4), new_ring(1, 4, 3)
    rows = request_rows([0], [0], [0], 4)
    for changes, message in (
        ({"x": x[:, :-1]}, "convolution weight must be contiguous"),
        ({"x": x.T.contiguous().T}, "adjacent channels"),
        ({"x": x[:3]}, "do not make 3 rows"),
        ({"ring": ring[:, :9].contiguous()}, "ring has 9 places, the convolution needs more than 9"),
        ({"ring": ring.half()}, "the ring is torch.float16"),
        ({"ring": ring[..., :-1]}, "ring must be"),
        ({"out": x.half()}, "out must be float32"),
        (
            {"rows": replace(rows, requests=rows.requests.float())},
            "requests must be contiguous int32 or int64",
        ),
        ({"rows": replace(rows, read_slots=rows.read_slots[:0])}, "read_slots must be"),
    ):
        arguments = {"x": x, "weight": weight, "ring": ring, "rows": rows, "dilation": 3} | changes
        with pytest.raises(InputError, match=message) as caught:
            causal_conv_triton(**arguments)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)

"""Verification in Triton: the reference's tokens, bit for bit, with poison wherever nothing may be read."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from page4.experiments.sm70.compiling import CAPABILITIES, compile_for
from page4.experiments.sm70.launches import recorded_launches
from page4.experiments.sm70.pretend_gpu import GPUS, pretend_gpu
from page4.kernels.draft_sampling import DraftDistributions, sample_drafts_reference
from page4.kernels.errors import InputError
from page4.kernels.mtp_verify import verify_reference
from page4.kernels.mtp_verify_triton import (
    MAX_REGISTERS,
    VerifyWorkspace,
    decide_kernel,
    gather_rows_kernel,
    verify_triton,
)
from page4.kernels.sampling_params import SamplingParams
from page4.kernels.token_weights import TILE, row_totals, summed_powers
from page4.kernels.token_weights_triton import launch_tile_sums, tile_sums_kernel

from .attention_cases import DEVICE

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Step:
    """A batch of random requests: greedy and sampled ones, filters, masks, padding, rows with NaN."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self.choose = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.requests, self.num_drafts = self.choose.randint(1, 4), self.choose.randint(0, 5)
        self.vocabulary, self.dtype = vocabulary, self.choose.choice(DTYPES)
        self.spread = self.choose.choice([0.1, 1.0, 4.0, 30.0])
        rows = (self.requests, self.num_drafts + 1, vocabulary)
        target = self.spread * torch.randn(rows, generator=self.generator)
        if self.choose.random() < 0.3:
            target = target.round()  # ties
        draft = target + 0.3 * self.spread * torch.randn(rows, generator=self.generator)
        for bad in (math.nan, math.inf, -math.inf):
            if self.choose.random() < 0.15:
                target[self.any(rows[0]), self.any(rows[1]), self.any(vocabulary)] = bad
        if self.choose.random() < 0.2:
            target[self.any(rows[0]), :, vocabulary // 2 :] = -math.inf
        self.logits, self.draft = self.padded(target), self.padded(draft)
        self.positions = torch.full((self.requests,), 50)
        if self.choose.random() < 0.4:
            self.positions[self.any(self.requests)] = self.choose.choice([-1, 2**35])
        self.allowed = self.mask() if self.choose.random() < 0.4 else None
        self.values: dict[str, list[Any]] = {
            "temperature": self.each(0.0, 0.3, 0.7, 1.0, 1.5),
            "draft_temperature": self.each(0.0, 0.5, 1.0, 1.5),
            "top_k": self.each(0, 0, 1, 3, 20, vocabulary, 5 * vocabulary),
            "top_p": self.each(1.0, 1.0, 0.9, 0.5, 1e-6, 0.9999999),
            "min_p": self.each(0.0, 0.0, 0.05, 1.0, 1e-20),
            "seed": [self.choose.getrandbits(62) for _ in range(self.requests)],
        }
        self.store = DraftDistributions.empty(self.draft[:, 0], self.num_drafts)
        self.drafts = torch.full((self.requests, self.num_drafts + 3), 1)[:, : self.num_drafts]
        params = self.params("cpu")
        for j in range(self.num_drafts):
            positions = torch.where(self.positions >= 0, self.positions + j, -1)
            self.drafts[:, j] = sample_drafts_reference(self.draft[:, j], positions, params, self.store, j)
        if self.num_drafts and self.choose.random() < 0.3:
            wrong = self.choose.choice([-1, vocabulary, 2**40])
            self.drafts[self.any(self.requests), self.any(self.num_drafts)] = wrong

    def any(self, count: int) -> int:
        return self.choose.randrange(count)

    def each(self, *values: Any) -> list[Any]:
        return [self.choose.choice(values) for _ in range(self.requests)]

    def params(self, device: str) -> SamplingParams:
        return SamplingParams.of(**self.values, device=device)

    def padded(self, x: Tensor) -> Tensor:
        """The same values with NaN behind each row."""
        wide = torch.full((*x.shape[:2], x.shape[2] + self.any(8)), math.nan, dtype=self.dtype)
        wide[..., : x.shape[2]] = x.to(self.dtype)
        return wide[..., : x.shape[2]]

    def mask(self) -> Tensor:
        words = -(-self.vocabulary // 32)
        size = (self.requests, self.num_drafts + 1, words + 2)
        bits = torch.randint(-(2**31), 2**31, size, generator=self.generator).to(torch.int32)
        if self.choose.random() < 0.3:
            bits[0] = 0  # nothing is allowed
        if self.choose.random() < 0.3:
            bits[-1] = 0
            bits[-1, :, 0] = 1  # one token is
        return bits[..., :words]


def there(x: Tensor) -> Tensor:
    """The tensor on the device, with its strides: a copy of a view would be dense."""
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE)
    return copy.copy_(x)


@pytest.mark.parametrize(
    ("vocabulary", "seed", "max_listed"),
    [(v, seed, listed) for v in (1, 33, 1000) for seed, listed in ((0, 16384), (1, 2), (2, 16384))]
    + [(2501, seed, 16384) for seed in range(4)],
)
def test_tokens_equal_the_reference(vocabulary: int, seed: int, max_listed: int) -> None:
    """Also where a filter's search cannot list its tokens, but for two."""
    step = Step(7919 * seed + vocabulary, vocabulary)
    args = (step.logits, step.drafts, step.positions)
    accepted, emitted = verify_reference(*args, step.params("cpu"), step.store, step.allowed)
    workspace = VerifyWorkspace.allocate(
        step.requests + 1, step.num_drafts, vocabulary, DEVICE, max_listed=max_listed
    )
    store = DraftDistributions(*(there(x) for x in vars(step.store).values()))
    allowed = None if step.allowed is None else there(step.allowed)
    found = (
        torch.full((step.requests,), 77, device=DEVICE),
        torch.full((step.requests, step.num_drafts + 4), 77, device=DEVICE)[:, : step.num_drafts + 1],
    )
    for _ in range(2):  # the second time in a workspace that was used
        verify_triton(*map(there, args), step.params(DEVICE), workspace, store, allowed, *found)
        live = step.positions >= 0
        assert torch.equal(found[0].cpu()[live], accepted[live])
        assert torch.equal(found[1].cpu()[live], emitted[live])
        assert (found[0].cpu()[~live] == 77).all() and (found[1].cpu()[~live] == 77).all()
        assert not workspace.arrivals.any()
        assert not workspace.row_arrivals.any() and not workspace.listed_counts.any()


def test_a_program_takes_tiles_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does where there are more tiles than programs; the last turns are not full."""
    monkeypatch.setattr("page4.kernels.token_weights_triton._PROGRAMS", 8)
    test_tokens_equal_the_reference(20 * TILE + 7, 5, 16384)


def test_sums_of_tiles_are_the_definitions() -> None:
    """Bit for bit: draws alone would hardly tell."""
    logits = 4 * torch.randn(3, 1, 2 * TILE + 5, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor([1.0, 1.44, 2.5])
    maximum = torch.empty(3, 3, device=DEVICE)
    total = torch.empty(3, 3, dtype=torch.int64, device=DEVICE)
    positions = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    launch_tile_sums(there(logits), positions, there(scale), None, None, maximum, total)
    assert torch.equal(total.cpu(), summed_powers(row_totals(logits[:, 0], scale).power))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("turns", [1, 3])
def test_tiles_are_those_of_what_is_allowed(
    turns: int, masked: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maxima, sums and copies of sampled, greedy and padded requests, and of rows with NaN, inf and -inf."""
    monkeypatch.setattr("page4.kernels.token_weights_triton._PROGRAMS", 1 if turns > 1 else 64)
    generator = torch.Generator().manual_seed(1)
    tiles, vocabulary = 3, 2 * TILE + 33
    wide = torch.full((6, 1, vocabulary + 7), math.nan, dtype=dtype)
    logits = wide[..., :vocabulary]
    logits.copy_(4 * torch.randn(logits.shape, generator=generator))
    logits[1, 0, 5], logits[1, 0, TILE + 2], logits[1, 0, -1] = math.nan, math.inf, -math.inf
    logits[2, 0, :TILE] = -math.inf
    logits[3, 0, ::2], logits[3, 0, 1::2] = -0.0, 0.0
    words = torch.randint(-(2**31), 2**31, (6, 1, -(-vocabulary // 32) + 2), generator=generator)
    words[1, 0] = -1
    bits = words.to(torch.int32)[..., :-2]
    bits[4, 0, TILE // 32 :] = 0
    scale = torch.tensor([1.44, 1.0, 2.5, 0.7, 0.0, 1.0])
    positions = torch.tensor([0, 1, 2, 3, 4, -1])
    maximum = torch.full((6, tiles), 77.0, device=DEVICE)
    total = torch.full((6, tiles), 77, dtype=torch.int64, device=DEVICE)
    store = torch.full((6, vocabulary + 9), 77.0, dtype=dtype, device=DEVICE)
    allowed = there(bits) if masked else None
    launch_tile_sums(
        there(logits), there(positions), there(scale), allowed, store[:, :vocabulary], maximum, total
    )

    x = logits[:, 0].float()
    if masked:
        token = torch.arange(vocabulary)
        x = torch.where(((bits[:, 0, token // 32] >> (token % 32)) & 1) != 0, x, -math.inf)
    padded = torch.nn.functional.pad(x, (0, tiles * TILE - vocabulary), value=-math.inf)
    largest = padded.view(6, tiles, TILE).amax(2)
    found, sums = maximum.cpu(), total.cpu()
    assert torch.equal(found[:5].isnan(), largest[:5].isnan())
    assert torch.equal(found[:5].nan_to_num(9e9), largest[:5].nan_to_num(9e9))
    expected = summed_powers(row_totals(x[:4], scale[:4]).power)
    finite = largest[:4].isfinite()
    assert torch.equal(sums[:4][finite], expected[finite])
    for i in range(tiles):  # of the greedy request
        first = (padded[4, i * TILE : (i + 1) * TILE] == largest[4, i]).nonzero()[0] + i * TILE
        assert sums[4, i] == first
    assert (found[5] == 77).all() and (sums[5] == 77).all()
    copies = store.cpu().float()
    assert torch.equal(copies[:4, :vocabulary].nan_to_num(9e9), x[:4].nan_to_num(9e9))
    assert (copies[4:] == 77).all() and (copies[:, vocabulary:] == 77).all()


def test_maxima_in_pairs_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of those GPUs that compare two FP16 numbers at a time."""
    monkeypatch.setattr("page4.kernels.token_weights_triton._compares_pairs", lambda *_: True)
    test_tiles_are_those_of_what_is_allowed(3, True, torch.float16, monkeypatch)
    test_tiles_are_those_of_what_is_allowed(3, False, torch.float16, monkeypatch)


@pytest.mark.parametrize(("capability", "dtype"), [(c, d) for c in CAPABILITIES for d in DTYPES])
def test_only_fp16_is_compared_in_pairs(capability: int, dtype: torch.dtype) -> None:
    """From compute capability 8.0 on."""
    with pretend_gpu(GPUS[capability]) as device, recorded_launches() as launches:
        launch_tile_sums(
            torch.empty(2, 1, 2048, dtype=dtype), torch.empty(2, dtype=torch.int64), torch.empty(2),
            None, None, torch.empty(2, 2), torch.empty(2, 2, dtype=torch.int64),
        )  # fmt: skip
    assert device.type == "cuda"
    constants = launches[0].job(capability).constants
    assert constants["PAIRS"] == (capability >= 80 and dtype == torch.float16)


def test_filters_keep_the_lowest_of_equal_tokens() -> None:
    logits = torch.zeros(40, 1, 8)
    logits[:, 0, 1] = -1.0
    none, positions = torch.zeros(40, 0, dtype=torch.int64), torch.arange(40)
    values: dict[str, Any] = {"temperature": [1.0] * 40, "top_k": [3] * 40}
    _, emitted = verify_triton(
        there(logits), there(none), there(positions), SamplingParams.of(**values, device=DEVICE),
        VerifyWorkspace.allocate(40, 0, 8, DEVICE),
    )  # fmt: skip
    assert set(emitted.flatten().tolist()) == {0, 2, 3}


def test_without_distributions_drafts_are_greedy() -> None:
    step = Step(3, 300)
    params = step.values | {"draft_temperature": [0.0] * step.requests}
    args = (step.logits, step.drafts, step.positions)
    expected = verify_reference(*args, SamplingParams.of(**params))
    workspace = VerifyWorkspace.allocate(step.requests, step.num_drafts, 300, DEVICE)
    found = verify_triton(*map(there, args), SamplingParams.of(**params, device=DEVICE), workspace)
    assert torch.equal(found[0].cpu(), expected[0]) and torch.equal(found[1].cpu(), expected[1])


def test_nothing_to_recover_gives_the_argmax() -> None:
    """p and q agree in all but the draft's rounding: its rejection leaves no weight."""
    logits = torch.tensor([[[0.0, 90.0, 90.0], [0.0, 0.0, 0.0]]])
    store = DraftDistributions(
        logits[:, :1].clone(), torch.ones(1, 1), torch.full((1, 1), 90.0), torch.tensor([[2**40]])
    )  # q is twice p, so half of the drafts are rejected
    params = {"temperature": [math.log2(math.e)], "draft_temperature": [math.log2(math.e)]}
    found = set()
    for seed in range(20):
        args = (logits, torch.tensor([[2]]), torch.tensor([4]))
        expected = verify_reference(*args, SamplingParams.of(**params, seed=[seed]), store)
        got = verify_triton(
            *map(there, args), SamplingParams.of(**params, seed=[seed], device=DEVICE),
            VerifyWorkspace.allocate(1, 1, 3, DEVICE),
            DraftDistributions(*map(there, vars(store).values())),
        )  # fmt: skip
        assert torch.equal(got[0].cpu(), expected[0]) and torch.equal(got[1].cpu(), expected[1])
        found.add(tuple(got[1][0, :1].tolist()) if got[0] == 0 else "accepted")
    assert found == {(1,), "accepted"}


def test_no_requests_are_verified() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    accepted, emitted = verify_triton(
        torch.zeros(0, 2, 5), none.view(0, 1), none, SamplingParams.of([]), VerifyWorkspace.allocate(0, 1, 5)
    )
    assert accepted.shape == (0,) and emitted.shape == (0, 2)


def test_wrong_inputs_are_refused() -> None:
    logits, drafts, positions = torch.zeros(2, 2, 5), torch.zeros(2, 1, dtype=torch.int64), torch.arange(2)

    def refused(match: str, **wrong: Any) -> None:
        inputs: dict[str, Any] = {
            "logits": logits, "drafts": drafts, "positions": positions,
            "params": SamplingParams.of([1.0] * 2),
            "workspace": VerifyWorkspace.allocate(2, 1, 5),
        }  # fmt: skip
        with pytest.raises(InputError, match=match):
            verify_triton(**(inputs | wrong))

    refused("adjacent", logits=torch.zeros(2, 5, 2).mT)
    refused("workspace", workspace=VerifyWorkspace.allocate(1, 1, 5))
    refused("workspace", workspace=VerifyWorkspace.allocate(2, 1, 2000))
    refused("accepted", accepted=torch.zeros(1, dtype=torch.int64))
    refused("emitted", emitted=torch.zeros(2, 2))
    refused("sampled from", params=SamplingParams.of([1.0] * 2, draft_temperature=[1.0, 0.0]))


POINTERS = {
    "p_positions": "*i64", "p_allowed": "*i32", "p_tile_sum": "*i64", "p_top_k": "*i32", "p_seed": "*i64",
    "p_tokens": "*i32", "p_counts": "*i32", "p_row_arrivals": "*i32", "p_total": "*i64", "p_last": "*i32",
    "p_drafts": "*i64", "p_draft_total": "*i64",
    "p_request_tiles": "*i64", "p_arrivals": "*i32", "p_accepted": "*i64", "p_emitted": "*i64",
}  # fmt: skip
OPTIONAL = ("p_allowed", "p_store", "p_draft_logits", "p_draft_scale", "p_draft_max", "p_draft_total")
KERNELS = {
    "tile sums": (tile_sums_kernel, {"ROWS": 4, "TILE": 1024}, 1),
    "gather": (
        gather_rows_kernel,
        {"ROWS": 4, "TILE": 1024, "TILES_PAD": 256, "BT": 2, "CAPACITY": 16384, "CHUNK": 512},
        4,
    ),
    "decide": (decide_kernel, {"ROWS": 4, "ROWS_PAD": 4, "TILE": 1024, "TILES_PAD": 256, "BT": 2}, 8),
}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("name", list(KERNELS))
def test_kernels_compile_without_spills(name: str, optional: bool, dtype: str, capability: int) -> None:
    kernel, constants, warps = KERNELS[name]
    pairs = capability >= 80 and dtype == "fp16"
    sizes: dict[str, Any] = constants | {"DEPENDENT": capability >= 90}
    if name == "tile sums":
        sizes["PAIRS"] = pairs
    signature = {}
    for argument in kernel.fn.__code__.co_varnames[: kernel.fn.__code__.co_argcount]:
        if argument in OPTIONAL and not optional:
            sizes[argument] = None
        elif argument in ("p_logits", "p_draft_logits", "p_store"):
            signature[argument] = f"*{dtype}"
        elif argument.startswith("p_"):
            signature[argument] = POINTERS.get(argument, "*fp32")
        elif argument not in sizes:
            signature[argument] = "i32:16" if argument.endswith(("vocabulary", "request", "row")) else "i32"
    options = {} if name == "tile sums" else {"maxnreg": MAX_REGISTERS}
    compiled = compile_for(
        kernel, signature, sizes, capability, num_warps=warps, enable_fp_fusion=False, **options
    )
    assert compiled.stack_bytes == 0
    # Eight steps of a power of two are fused. Nothing else is: its results would not be the reference's.
    fused, saturated = compiled.ptx.count("fma"), compiled.ptx.count("fma.rn.sat.f32")
    assert fused == compiled.ptx.count("fma.rn.f32") + saturated and saturated > 0
    if name == "tile sums":
        assert "ld.global.v4" in compiled.ptx
        assert ("max.NaN.f16x2" in compiled.ptx) == pairs

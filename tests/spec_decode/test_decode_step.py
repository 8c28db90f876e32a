"""The decode step on the kernels: padded, in buckets, and as a captured graph.

On a GPU the graphs are replayed; elsewhere Triton's interpreter runs the same launches one by one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from page4.kvcache import KVScales, ScalePair, get_format
from page4.model import Qwen4ExpForCausalLM
from page4.spec_decode import (
    GREEDY,
    DecoderConfig,
    Request,
    SamplingOptions,
    Served,
    Server,
    SpeculativeDecoder,
    generate,
)
from page4.spec_decode.decode_step import StepShape
from tests.oracle.tiny import agreeable_model, random_tokens

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
needs_gpu = pytest.mark.skipif(not GPU, reason="CUDA graphs need a GPU")
# One layer of each kind, as the interpreter takes its time.
LAYERS: dict[str, Any] = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "ple_layer_ids": [1],
}  # fmt: skip
SCALES = KVScales((ScalePair(0.02, 0.02),), ScalePair(0.02, 0.02))
SAMPLED = SamplingOptions(0.9, top_p=0.95, seed=11, sample_drafts=True)


@pytest.fixture(scope="module")
def kernels() -> Qwen4ExpForCausalLM:
    model = agreeable_model(seed=3, **LAYERS).to(DEVICE)
    model.use_backend("triton")
    return model


@pytest.fixture(scope="module")
def reference() -> Qwen4ExpForCausalLM:
    return agreeable_model(seed=3, **LAYERS).to(DEVICE)


def build(model: Qwen4ExpForCausalLM, kv_format: str = "fp32", **options: object) -> SpeculativeDecoder:
    needed = [
        get_format(str(name)).needs_scale for name in (kv_format, options.get("draft_kv_format") or kv_format)
    ]
    scales = KVScales(SCALES.target if needed[0] else (), SCALES.draft if needed[1] else None)
    defaults = {"max_length": 96, "prefill_chunk": 16, "num_draft_tokens": 2, "max_requests": 4}
    return SpeculativeDecoder(
        model,
        DecoderConfig(kv_format=kv_format, scales=scales, **(defaults | options)),  # type: ignore[arg-type]
    )


def tokens(decoder: SpeculativeDecoder, options: list[SamplingOptions], new: int = 3) -> list[list[int]]:
    prompts = [random_tokens(3 + 2 * i, seed=i) for i in range(len(options))]
    generations, _ = generate(decoder, prompts, new, sampling=options, overlap=True)
    return [g.tokens for g in generations]


@pytest.mark.parametrize(
    ("kv_format", "draft"),
    [("fp32", "fp32"), ("e4m3", "e4m3"), ("e4m3", "fp16")] if GPU else [("e4m3", "fp16")],
)
def test_the_kernels_emit_what_the_reference_does(
    kernels: Qwen4ExpForCausalLM, reference: Qwen4ExpForCausalLM, kv_format: str, draft: str
) -> None:
    """Three requests in four lanes: greedy, sampled, and with a mask."""
    options = [GREEDY, SAMPLED, SamplingOptions(1.1, seed=3, allowed_tokens=tuple(range(1, 128, 3)))]
    ours = tokens(build(kernels, kv_format, draft_kv_format=draft), options)
    assert ours == tokens(build(reference, kv_format, draft_kv_format=draft), options)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED][not GPU :], ids=repr)
def test_padded_lanes_touch_nothing(kernels: Qwen4ExpForCausalLM, options: SamplingOptions) -> None:
    """One request in the second of two lanes; the rows of all others hold NaN before and after.

    Neither a state, a ring, nor a stored distribution of a live request may be that of a padded lane
    (1Cat-vLLM#656, vllm#47066, sglang#1779).
    """
    decoder, alone = build(kernels), build(kernels)
    prompt = random_tokens(4, seed=5)
    request, expected = (begin(d, prompt, options) for d in (decoder, alone))
    rows = [row for row in range(4) if row != request.row]
    poison(decoder, rows)
    shape = replace(decoder.shape([request]), lanes=2)
    before = [t[rows].clone() for t in recurrent_and_rings(decoder)]
    results = []
    for _ in range(2):
        results.append(decoder.runner.run([-1, request.row], shape)[1].tolist())
        step = alone.launch([expected])
        if step.done is not None:
            step.done.synchronize()
        assert results[-1] == step.result[0].tolist()
    for then, tensor in zip(before, recurrent_and_rings(decoder), strict=True):
        assert torch.equal(then, tensor[rows]) or bool((then.isnan() == tensor[rows].isnan()).all())
    if options.samples_drafts:
        assert not decoder.state.distributions(torch.float32).scale[0].any(), "lane 0 was padding"
    assert bool((decoder.state.values[rows] == -7).all())


def begin(decoder: SpeculativeDecoder, prompt: list[int], options: SamplingOptions) -> Request:
    request = decoder.open(prompt, options)
    decoder.prefill({request: len(prompt) - 1})
    decoder.start(request)
    decoder.cache.reserve(request.row, 64)
    return request


def recurrent_and_rings(decoder: SpeculativeDecoder) -> list[Tensor]:
    """Everything that has a row for each request."""
    cache = decoder.cache
    layers = [*cache.qsa, cache.draft.mixer] if cache.draft is not None else cache.qsa
    return [*(slots.state for slots in cache.recurrent), *(layer.ring for layer in layers)]  # type: ignore[union-attr]


def poison(decoder: SpeculativeDecoder, rows: list[int]) -> None:
    for tensor in recurrent_and_rings(decoder):
        tensor[rows] = torch.nan
    decoder.state.values[rows] = -7


class AsksNothing(TorchDispatchMode):
    """Fails at whatever waits for a device, or brings a literal of the host to it."""

    FORBIDDEN = (
        "_local_scalar_dense", "nonzero", "masked_select", "bincount", "unique", "lift_fresh", "is_nonzero",
        "equal", "pin_memory",
    )  # fmt: skip

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        assert not any(name.startswith(word) for word in self.FORBIDDEN), f"{name} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            masks = [x for x in args[1] if x is not None and x.dtype == torch.bool]
            assert not masks, f"{name} by a mask waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [GREEDY, replace(SAMPLED, allowed_tokens=(1, 2, 3))][not GPU :], ids=repr)
def test_a_step_asks_the_device_nothing(kernels: Qwen4ExpForCausalLM, options: SamplingOptions) -> None:
    """So that it can be captured (areslp@0fda07e); the GPU says so itself in the tests below."""
    decoder = build(kernels, num_draft_tokens=2)
    request = begin(decoder, [3, 1, 4], options)
    lanes = torch.tensor([request.row, -1], device=DEVICE)
    shape = replace(decoder.shape([request]), lanes=2)
    decoder.runner.step.run(lanes, shape)  # makes what is made once
    with AsksNothing():
        decoder.runner.step.run(lanes, shape)
        with torch.inference_mode(), pytest.raises(AssertionError, match="bincount waits for the device"):
            kernels.model.layers[0].mlp(torch.ones(2, 48, device=DEVICE), decode=False)


def test_lanes_and_lengths_come_in_buckets(kernels: Qwen4ExpForCausalLM) -> None:
    runner = build(kernels, max_requests=6, max_length=1000).runner
    assert [runner.bucket(lanes, 10)[0] for lanes in range(1, 7)] == [1, 2, 4, 4, 6, 6]
    assert [runner.bucket(1, n)[1] for n in (1, 256, 257, 512, 513, 1005)] == [256, 256, 512, 512, 1007, 1007]


def test_the_reference_takes_shapes_as_they_are(reference: Qwen4ExpForCausalLM) -> None:
    runner = build(reference).runner
    assert runner.bucket(3, 77) == (3, 77)


def test_requests_keep_their_lanes_and_distributions_move_along(reference: Qwen4ExpForCausalLM) -> None:
    decoder = build(reference, max_requests=4)
    requests = [decoder.open([1, 2]) for _ in range(4)]
    store = decoder.state.distributions(torch.float32)
    assert decoder._assign(requests, 4) == requests
    store.logits[:] = torch.arange(4.0)[:, None, None]
    store.total[:] = torch.arange(4)[:, None]
    assert decoder._assign([requests[0], requests[2], requests[3]], 4) == [requests[0], None, *requests[2:]]
    assert decoder._assign([requests[3], requests[2]], 2) == [requests[3], requests[2]]
    assert store.logits[:2, 0, 0].tolist() == [3.0, 2.0] and store.total[:2, 0].tolist() == [3, 2]


@needs_gpu
@pytest.mark.parametrize(
    ("kv_format", "draft"),
    [("fp16", None), ("e4m3", None), ("int8", None), ("e4m3", "fp16"), ("int8", "e4m3")],
)
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_replayed_step_equals_an_eager_one_bit_for_bit(
    kernels: Qwen4ExpForCausalLM, kv_format: str, draft: str | None, options: SamplingOptions
) -> None:
    """Captured at 4 lanes, replayed with 3 requests; everything that a step leaves behind."""
    decoders = [
        build(kernels.half(), kv_format, draft_kv_format=draft, cuda_graphs=graphs)
        for graphs in (True, False)
    ]
    left = []
    for decoder in decoders:
        each = [replace(options, seed=i) for i in range(3)]
        requests = [begin(decoder, random_tokens(9 + 5 * i, seed=i), each[i]) for i in range(3)]
        results = []
        for _ in range(6):
            step = decoder.launch(requests)
            decoder.collect(step)
            results.append(step.result[:3].clone())
        rows = [request.row for request in requests]
        kept = [t[rows] for t in recurrent_and_rings(decoder)]
        kept += [decoder.state.values[rows], *(layer.k_pages for layer in decoder.cache.qsa)]
        left.append([torch.stack(results).cpu(), *kept])
    assert len(decoders[0].runner._captured) == 1 and not decoders[1].runner._captured
    for a, b in zip(*left, strict=True):
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@needs_gpu
def test_a_step_never_waits_for_the_device(kernels: Qwen4ExpForCausalLM) -> None:
    decoder = build(kernels.half(), "fp16", cuda_graphs=False)
    requests = [begin(decoder, random_tokens(9, seed=i), SAMPLED) for i in range(3)]
    decoder.collect(decoder.launch(requests))  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            decoder.launch(requests)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
def test_graphs_serve_requests_that_come_and_go(kernels: Qwen4ExpForCausalLM) -> None:
    """Many buckets share their memory; tokens are those of eager steps."""
    model = kernels.half()
    prompts = [random_tokens(5 + 37 * i, seed=i) for i in range(7)]
    outputs = []
    for graphs in (True, False):
        decoder = build(model, "fp16", max_length=512, max_requests=4, num_draft_tokens=3, cuda_graphs=graphs)
        server = Server(decoder)
        served = [Served(p, 20 + 9 * i, sampling=SAMPLED if i % 2 else GREEDY) for i, p in enumerate(prompts)]
        for request in served:
            server.submit(request)
            server.step()
        server.run()
        outputs.append([request.tokens for request in served])
    assert outputs[0] == outputs[1]


def test_a_shape_names_what_launches_depend_on(reference: Qwen4ExpForCausalLM) -> None:
    decoder = build(reference)
    greedy, sampled = decoder.open([1, 2]), decoder.open([1, 2], SAMPLED)
    masked = decoder.open([1], SamplingOptions(allowed_tokens=(1, 2)))
    assert decoder.shape([greedy]) == StepShape(1, 4, 3, 2)
    assert decoder.shape([greedy, sampled]) == StepShape(2, 4, 3, 2, samples=True, samples_drafts=True)
    assert decoder.shape([masked]) == StepShape(1, 4, 3, 2, samples=True, masked=True)

"""The list of kernels: whole, without repetitions, and with a promise for each."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path

import pytest

from page4 import kernels
from page4.experiments.autotune.predicted_config import PredictedTuningConfig
from page4.experiments.autotune.shipped import shipped_files
from page4.experiments.sm70.compiling import CAPABILITIES
from page4.experiments.sm70.kernel_list import KernelCase, kernel_cases
from page4.experiments.sm70.prediction.config import PredictConfig
from page4.experiments.sm70.pretend_gpu import GPUS
from page4.experiments.sm70.promises import KNOWN, PROMISES, promise_of
from page4.experiments.sm70.step_inputs import FORMATS, HEAD_DIMS, ROWS
from page4.kernels.codecs import STORAGE_DTYPES
from page4.kernels.errors import InputError
from page4.kernels.gluon_tiles import decode_assembly
from page4.kernels.volta_tiles import decode_pairs_assembly
from page4.kvcache import RECOMMENDED

CASES = {capability: kernel_cases(capability) for capability in CAPABILITIES}
EVERYWHERE = {
    "page4_attention_kernel", "merge_kernel", "select_kernel", "plan_kernel", "qsa_prepare_kernel",
    "product_kernel", "tile_sums_kernel", "gather_rows_kernel", "decide_kernel", "choose_draft_kernel",
    "gated_delta_kernel", "causal_conv_kernel", "store_inputs_kernel", "group_norm_kernel", "activate_kernel",
    "mix_streams_kernel", "write_streams_kernel", "route_kernel", "swiglu_kernel", "combine_kernel",
}  # fmt: skip
CHUNKS = {"delta_keys_kernel", "delta_solve_kernel", "delta_state_kernel", "delta_norm_kernel"}
SOME = {
    70: {"page4_attention_volta_kernel", "index_scores_volta_kernel"},
    80: {"page4_attention_ampere_kernel", "index_scores_kernel"} | CHUNKS,
    90: {"page4_attention_ampere_kernel", "page4_attention_hopper_kernel", "index_scores_kernel"} | CHUNKS,
}


def attention(capability: int) -> list[KernelCase]:
    return [case for case in CASES[capability] if case.kernel.startswith("page4_attention")]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_are_those_that_run_on_the_gpu(capability: int) -> None:
    assert {case.kernel for case in CASES[capability]} == EVERYWHERE | SOME[capability]


def test_no_kernel_is_forgotten() -> None:
    """A kernel is a jitted function whose name ends so; what is missing needs a call in kernel_list.py."""
    folder = Path(kernels.__path__[0])
    modules = [importlib.import_module(f"page4.kernels.{file.stem}") for file in folder.glob("*.py")]
    defined = {
        name
        for module in modules
        for name, value in vars(module).items()
        if name.endswith("_kernel") and hasattr(value, "arg_names")
    }
    assert defined == {case.kernel for cases in CASES.values() for case in cases}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_formats_dimensions_and_rows_are_all_there(capability: int) -> None:
    plain = [c.launch.arguments for c in CASES[capability] if c.kernel == "page4_attention_kernel"]
    assert {(a["FORMAT"], a["D"]) for a in plain} == {(name, dim) for name in FORMATS for dim in HEAD_DIMS}
    assert {a["ROWS"] for a in plain} == set(ROWS)
    gluon = [c.launch.arguments for c in attention(capability) if "DECODE" in c.launch.arguments]
    assert {a["D"] for a in gluon} == set(HEAD_DIMS) and {a["ROWS"] for a in gluon} == set(ROWS)
    assert {a["SPLITS"] == 1 for a in gluon} == {True, False}
    read = {name for name in FORMATS if name != "int8" or capability == 70}  # and fp16 is not decoded
    assert len({a["DECODE"] for a in gluon} | {None}) == len(read)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_no_code_is_compiled_twice(capability: int) -> None:
    requests = [json.dumps(case.job.request, sort_keys=True) for case in CASES[capability]]
    assert len(set(requests)) == len(requests) < 275


def test_shipped_configurations_are_there() -> None:
    for file in shipped_files():
        (gpu,) = (gpu for gpu in GPUS.values() if any(model in file.gpu for model in gpu.models))
        if "attention" in file.kernel.name:
            launched = [case.launch.arguments for case in attention(gpu.capability)]
            sizes = Counter((a["SPLITS"], a["BN"], a["ROWS"], a["D"]) for a in launched)
            for entry in file.entries.values():
                config, key = entry.config, entry.key
                assert sizes[config.splits, config.tile_tokens, key.rows_per_group, key.head_dim]


def test_tuned_kernels_are_compiled_in_the_recommended_format_too() -> None:
    """It has no entries of its own and takes those of e4m3 (`kernels/tuning.py`), but decodes otherwise."""
    decoding = {RECOMMENDED, decode_assembly(RECOMMENDED, native=False), decode_pairs_assembly(RECOMMENDED)}
    for file in (file for file in shipped_files() if "attention" in file.kernel.name):
        (gpu,) = (gpu for gpu in GPUS.values() if any(model in file.gpu for model in gpu.models))
        arguments = [case.launch.arguments for case in attention(gpu.capability)]
        launched = {
            (a["SPLITS"], a["BN"], a["ROWS"], a["D"])
            for a in arguments
            if not decoding.isdisjoint({a.get("FORMAT"), a.get("DECODE")})
        }
        tuned = [entry for entry in file.entries.values() if entry.key.kv_format == "e4m3"]
        assert tuned
        for entry in tuned:
            config, key = entry.config, entry.key
            assert (config.splits, config.tile_tokens, key.rows_per_group, key.head_dim) in launched


def test_every_format_of_the_kernels_is_checked_predicted_and_tuned_for() -> None:
    """fp32 exists for parity alone."""
    formats = set(STORAGE_DTYPES) - {"fp32"}
    assert set(FORMATS) == formats
    assert set(PredictConfig().formats) == set(PredictedTuningConfig().kv_formats) == formats
    assert set(PredictedTuningConfig().followers) == formats - {"e4m3"}


def test_every_kernel_has_a_promise_and_every_promise_a_kernel() -> None:
    assert set(PROMISES) == {case.kernel for cases in CASES.values() for case in cases}
    with pytest.raises(InputError, match="new_kernel has no entry in PROMISES"):
        promise_of("new_kernel")


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: f"{known.kernel}-{known.capability}-{known.kind}")
def test_everything_known_is_about_something(known: object) -> None:
    assert any(
        known.covers(case.kernel, case.capability, case.job.constants)  # type: ignore[attr-defined]
        for cases in CASES.values()
        for case in cases
    )


def test_all_combinations_hold_the_usual_ones() -> None:
    usual, every = (
        {json.dumps(case.job.request, sort_keys=True) for case in kernel_cases(80, thorough)}
        for thorough in (False, True)
    )
    assert usual < every


def test_an_unknown_gpu_is_refused() -> None:
    with pytest.raises(InputError, match="75 is none of 70, 80, 90"):
        kernel_cases(75)

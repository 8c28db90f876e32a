"""What is installed here: versions, hardware, stack, checkpoint and KV formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import page4.model
from page4.experiments.capacity.geometry import PUBLIC, load_geometry
from page4.experiments.provenance import hardware, package_versions
from page4.kernels.errors import InputError
from page4.kvcache import FORMAT_NAMES, RECOMMENDED, CacheConfig, get_format
from page4.kvcache.capacity import page_bytes, snapshot_bytes
from page4.kvcache.overlay_folder import formats_in
from page4.kvcache.pages import PAGE_TOKENS
from page4.kvcache.prefix_cache import PrefixConfig

CHECKPOINT = Path(page4.model.__file__).parent / "checkpoint"
OVERLAYS = CHECKPOINT.with_name("checkpoint-kvscales")
"""The shipped checkpoint, and the overlays of its KV scales, a folder per format."""


def overlay_folder(scales: str | Path) -> Path:
    """The folder that `--scales` names: the shipped overlays for the word "shipped", else the user's own.

    A `Path` is always a folder, also one that is called "shipped"; in text that is "./shipped".
    """
    return OVERLAYS if scales == "shipped" else Path(scales)


# torch and triton releases that were tested together, by the name of their constraints file.
STACKS = {("2.13", "3.7"): "default", ("2.10", "3.6"): "v100"}


def collect_info() -> dict[str, Any]:
    """One record for `page4 info`, of JSON types only."""
    versions = package_versions()
    return {
        "versions": versions,
        "stack": stack_name(versions["torch"], versions["triton"]),
        "hardware": hardware(),
        "checkpoint": checkpoint_state(CHECKPOINT),
        "attention": attention_state(),
        "delta_prefill": delta_prefill_state(),
        "kv_formats": {name: get_format(name).bytes_per_value for name in FORMAT_NAMES},
        "kv_scale_bytes": {name: get_format(name).scale_bytes for name in FORMAT_NAMES},
        "recommended_kv_format": RECOMMENDED,
        "shipped_scales": formats_in(OVERLAYS),
        "prefix": prefix_state(),
    }


def stack_name(torch: str | None, triton: str | None) -> str | None:
    """Name of the tested stack with these versions, or None."""
    pair = tuple(".".join((version or "").split(".")[:2]) for version in (torch, triton))
    return STACKS.get((pair[0], pair[1]))


def checkpoint_state(folder: Path) -> dict[str, Any]:
    """Whether a checkpoint lies in the folder, and the size of its weight files in bytes."""
    shards = sorted(folder.glob("*.safetensors"))
    found = bool(shards) and (folder / "config.json").is_file()
    return {"found": found, "bytes": sum(shard.stat().st_size for shard in shards)}


def prefix_state() -> dict[str, Any]:
    """What kept prefixes take, by the public checkpoint's geometry and by format, in bytes.

    `page` is 16 tokens in all layers, `snapshot` the states after a prefix, and `group` what goes to the host
    tier at once: the pages of an `interval`, in tokens, and a snapshot.
    """
    geometry, interval = load_geometry(PUBLIC), PrefixConfig().interval
    state: dict[str, Any] = {"geometry": PUBLIC, "interval": interval, "page": {}, "group": {}}
    for name in FORMAT_NAMES:
        cache = CacheConfig(kv_format=name)
        page = page_bytes(geometry, cache).total
        snapshot = snapshot_bytes(geometry, cache, torch.float16).total
        state["page"][name] = page
        state["snapshot"] = snapshot
        state["group"][name] = interval // PAGE_TOKENS * page + snapshot
    return state


def attention_state() -> dict[str, Any]:
    """Which attention kernel `backend=triton` runs here for FP16 queries and e4m3, and who configures it.

    `implementation` is None where none can run, and `why` says why. `file` is the shipped file of tuned
    configurations, with `entries` of them, of which `predicted` were never measured; None where the kernel
    decides by rule.
    """
    state: dict[str, Any] = {"implementation": None, "why": "", "file": None, "entries": 0, "predicted": 0}
    try:
        from page4.kernels import page4_attention_dispatch as dispatch
        from page4.kernels import tuning
        from page4.kernels.tunable import get_tunable
        from page4.kernels.tuning_file import read_tuning_file, tuning_path
    except ImportError:
        return state | {"why": "Triton is not installed"}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    capability = dispatch.device_capability(device)
    try:
        name, why = dispatch.choose_implementation("auto", capability, torch.float16, "e4m3")
    except InputError as error:
        return state | {"why": str(error)}
    state |= {"implementation": name, "why": why}
    kernel = f"page4_attention_{name}"
    path = tuning_path(kernel, tuning.device_name(device), tuning.triton_version())
    if (tuning.SHIPPED_FOLDER / path).is_file():
        file = read_tuning_file(tuning.SHIPPED_FOLDER / path, get_tunable(kernel))
        predicted = sum(entry.predicted for entry in file.entries.values())
        state |= {"file": path.as_posix(), "entries": len(file.entries), "predicted": predicted}
    return state


def delta_prefill_state() -> dict[str, Any]:
    """Which form of the gated delta rule `backend=triton` runs on prompts here; None where none can."""
    try:
        from page4.kernels.gated_delta_dispatch import choose_prefill_form
        from page4.kernels.page4_attention_dispatch import device_capability
    except ImportError:
        return {"form": None, "why": "Triton is not installed"}
    if not torch.cuda.is_available():
        return {"form": None, "why": "it needs a GPU"}
    form, why = choose_prefill_form("auto", device_capability(torch.device("cuda")))
    return {"form": form, "why": why}


def describe(record: dict[str, Any]) -> list[tuple[str, str]]:
    """The record as (name, text) lines for people."""
    hardware, checkpoint = record["hardware"], record["checkpoint"]
    lines = [(name, version or "not installed") for name, version in record["versions"].items()]
    lines.append(("stack", record["stack"] or "not one of the tested ones"))
    lines.append(("CPU", f"{hardware['cpu']}, {hardware['cpu_count']} threads"))
    for gpu in hardware["gpus"]:
        memory = gpu["memory"] / 2**30
        lines.append(("GPU", f"{gpu['name']}, capability {gpu['capability']}, {memory:.0f} GiB"))
    if not hardware["gpus"]:
        lines.append(("GPU", "none that PyTorch can use"))
    size = f"{checkpoint['bytes'] / 1e6:.1f} MB of weights"
    lines.append(("checkpoint", size if checkpoint["found"] else "not found in page4.model"))
    attention = record["attention"]
    lines.append(("attention kernel", f"{attention['implementation'] or 'none'}: {attention['why']}"))
    prefill = record["delta_prefill"]
    lines.append(("delta rule of prompts", f"{prefill['form'] or 'none'}: {prefill['why']}"))
    tuned = f"{attention['entries']} tuned ones in {attention['file']}"
    if attention["predicted"]:
        tuned += f", {attention['predicted']} of them predicted, not measured"
    lines.append(("configurations", tuned if attention["file"] else "by rule, none tuned for this machine"))
    prefix = record["prefix"]
    groups = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in prefix["group"].items())
    lines.append(
        (
            "kept prefixes",
            f"{prefix['geometry']}: a snapshot has {prefix['snapshot'] / 1e6:.0f} MB, with the pages of "
            f"{prefix['interval']} tokens: {groups}",
        )
    )
    scales = record["kv_scale_bytes"]
    formats = (
        f"{name} ({size} B{f' + {scales[name]} B per token and head' if scales[name] else ''})"
        for name, size in record["kv_formats"].items()
    )
    lines.append(("KV formats", ", ".join(formats)))
    lines.append(("recommended of 8 bits", record["recommended_kv_format"]))
    lines.append(("shipped scales", ", ".join(record["shipped_scales"]) or "not found in page4.model"))
    return lines

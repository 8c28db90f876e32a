"""Several calibrations of one model, as if one run had seen everything."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from page4.experiments.calibrate.state import Observed, load
from page4.experiments.result_folder import CONFIG_FILE, INPUTS_FILE
from page4.experiments.strict_yaml import parse_yaml
from page4.kernels.errors import InputError

# What a folder's shards may differ in: which part they saw, and how a report is made of what was seen.
_NOT_SHARED = ("shard", "device", "backend", "kv_format", "rule", "percent")


def merged(folders: Sequence[Path], checkpoint: str) -> tuple[Observed, list[dict[str, Any]]]:
    """The sum of what the folders observed, and of what they are.

    Counts are exact, so maxima merge by max, and percentiles are those of all the values together.

    Args:
        folders: Result folders of `page4 calibrate`, in any order.
        checkpoint: Digest of the checkpoint that they must be of.

    Raises:
        InputError: A folder is no calibration or an unfinished one, is of another checkpoint or listed twice,
            or a shard is missing.
    """
    total, sources = Observed(None, 0, 0, 0), []
    runs: dict[str, dict[int, Path]] = defaultdict(dict)
    for folder in folders:
        config, inputs = _read(folder)
        if inputs.get("checkpoint") != checkpoint:
            raise InputError(f"{folder} was calibrated with another checkpoint or revision")
        observed = load(folder)
        if observed is None or observed.observation is None or observed.windows < observed.total:
            done = 0 if observed is None else observed.windows
            raise InputError(f"{folder} is not finished: {done} windows are done; run its command again")
        shared = {key: value for key, value in config.items() if key not in _NOT_SHARED}
        shards = runs[json.dumps([shared, inputs], sort_keys=True)]
        if config["shard"] in shards:
            raise InputError(
                f"{folder} and {shards[config['shard']]} are the same shard of the same calibration"
            )
        shards[config["shard"]] = folder
        if len(shards) == 1:
            sources.append({"corpus": inputs["corpus"], "shards": config["shards"]})
        seen = observed.observation if total.observation is None else total.observation + observed.observation
        windows, tokens = total.windows + observed.windows, total.tokens + observed.tokens
        total = Observed(seen, windows, tokens, windows)
    for shared_by, shards in runs.items():
        count = json.loads(shared_by)[0]["shards"]
        missing = sorted(set(range(count)) - shards.keys())
        if missing:
            raise InputError(f"shard {missing[0]} of {count} is missing beside {next(iter(shards.values()))}")
    return total, sorted(sources, key=lambda source: str(source["corpus"]))


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Configuration and inputs of a result folder.

    Raises:
        InputError: It is not that of a calibration.
    """
    try:
        config = parse_yaml((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        inputs = json.loads((folder / INPUTS_FILE).read_text(encoding="utf-8"))
        if not isinstance(config["shard"], int) or not isinstance(config["shards"], int):
            raise ValueError("shard and shards are no numbers")
        if "corpus" not in inputs:
            raise ValueError("it has no corpus of its own")
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise InputError(f"{folder} is not the folder of a calibration: {reason}") from error
    return config, inputs

"""``python -m page4.experiments.training --set key=value ...``: the same run as ``page4 train``."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from page4.experiments.config import load_config
from page4.experiments.training.config import TrainConfig
from page4.experiments.training.loop import train
from page4.kernels.errors import InputError


def main() -> int:
    """Runs a training call; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m page4.experiments.training", description=__doc__)
    parser.add_argument("--config", type=Path, help="YAML file of settings")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--quick", action="store_true", help="a tiny model for a few steps")
    arguments = parser.parse_args()
    try:
        config = load_config(TrainConfig, arguments.config, arguments.overrides, quick=arguments.quick)
        train(config, log=partial(print, flush=True))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`page4 train`."""

from __future__ import annotations

from page4.experiments.cli_options import ConfigFile, Device, Json, Out, Overrides, Quick, Seed


def train(
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    device: Device = None,
    seed: Seed = None,
    out: Out = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Train the small checkpoint on the packed corpus; the same command resumes an interrupted run.

    The checkpoint goes to runs/train, or to --out. `page4 corpus` builds the text it needs.
    """
    import dataclasses
    import json
    from functools import partial

    from page4.experiments.config import load_config
    from page4.experiments.training.config import TrainConfig
    from page4.experiments.training.loop import train as run

    config = load_config(
        TrainConfig, config_file, overrides or [], quick=quick, device=device, seed=seed, out=out
    )
    result = run(config, log=partial(print, flush=True))
    if as_json:
        print(json.dumps(dataclasses.asdict(result), default=str))

"""`page4 generate`."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from page4.experiments.cli_options import AllowUnit, ConfigFile, Device, Json, Model, Overrides, Seed
from page4.experiments.progress import progress_on
from page4.kernels.errors import InputError


def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="[FILE]", help="Text to continue; - or nothing: standard input.")
    ] = "-",
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    device: Device = None,
    seed: Seed = None,
    as_json: Json = False,
    model: Model = None,
    kv_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="KV format of the target; may differ by layer: e4m3,3:fp16. By default that of --scales, "
            "else e2m5 for the shipped checkpoint and fp16 for others.",
        ),
    ] = None,
    draft_format: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="KV format of the draft; the target's by default.")
    ] = None,
    scales: Annotated[
        str | None,
        typer.Option(
            metavar="prompt|shipped|DIR",
            help="Static KV scales: of this prompt (those of a short one may clip what comes later), or from "
            "overlays. By default the shipped ones for the shipped checkpoint in a format that has some, "
            "else the prompt's.",
        ),
    ] = None,
    allow_unit_target_scales: AllowUnit = False,
    drafts: Annotated[
        int | None, typer.Option("-K", "--drafts", help="Drafted tokens per step; 3 by default.")
    ] = None,
    no_spec: Annotated[bool, typer.Option("--no-spec", help="Decode without speculation.")] = False,
    max_new_tokens: Annotated[
        int | None, typer.Option("-n", "--max-new-tokens", help="128 by default.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0, the default, is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most probable tokens; 0: all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the most probable of this mass; 1: all.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Keep tokens of this share of the greatest probability; 0: all.")
    ] = None,
    sample_drafts: Annotated[
        bool, typer.Option("--sample-drafts", help="Sample drafts, too, at the same temperature.")
    ] = False,
    prefix_cache: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep the prompt's prefixes here, and reuse those of earlier runs; within 16 GiB, or "
            "--set folder_gib=N.",
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end of the text.")
    ] = False,
) -> None:
    """Continue a text, and print what comes as it comes.

    Speculative decoding changes no greedy token, and no distribution when tokens are sampled.

    The shipped checkpoint decodes with the recommended KV format and the static scales that come with it.
    """
    if no_spec and drafts:
        raise InputError(f"--no-spec and --drafts {drafts} contradict each other")
    text = _read(prompt)

    with contextlib.ExitStack() as waiting:
        # Before the imports, which take seconds.
        progress = waiting.enter_context(progress_on(sys.stderr, "loading PyTorch", passing=True))
        from page4.experiments.config import load_config
        from page4.experiments.generate import continue_text
        from page4.experiments.generate_config import GenerateConfig

        config = load_config(
            GenerateConfig,
            config_file,
            overrides or [],
            device=device,
            seed=seed,
            model=model,
            kv_format=kv_format,
            draft_kv_format=draft_format,
            scales=scales,
            allow_unit_target_scales=allow_unit_target_scales or None,
            num_draft_tokens=0 if no_spec else drafts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            sample_drafts=sample_drafts or None,
            prefix_cache=prefix_cache,
            ignore_eos=ignore_eos or None,
        )

        wrote = False

        def write(piece: str) -> None:
            nonlocal wrote
            waiting.close()  # the text begins where the bar was
            wrote = True
            sys.stdout.write(piece)
            sys.stdout.flush()

        try:
            report = continue_text(config, text, write, progress)
        except BaseException:
            if wrote:
                print()  # what is said of it begins a line of its own
            raise
    print()
    if report["prefix"] is not None:
        reused = f"{report['prefix']['reused_tokens']:,} of {report['prompt_tokens']:,}"
        print(f"page4: {reused} prompt tokens reused from {config.prefix_cache}", file=sys.stderr)
    if as_json:
        print(json.dumps(report))


def _read(prompt: str) -> str:
    """The prompt's text.

    Raises:
        InputError: It is not UTF-8.
    """
    if prompt == "-" and sys.stdin.isatty():
        print("page4: type a text to continue, then Ctrl-D on a new line", file=sys.stderr)
    data = sys.stdin.buffer.read() if prompt == "-" else Path(prompt).read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{'standard input' if prompt == '-' else prompt} is not UTF-8: {error}") from error

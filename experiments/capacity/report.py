"""The study's table, summary and figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from page4.experiments.capacity.config import GIB, CapacityConfig
from page4.experiments.capacity.gains import Row, formats, gains
from page4.experiments.capacity.origin import CONTEXT, DRAFTS, RANKS
from page4.experiments.plots import COLOURS, MARKERS, format_tokens

MIB = 2**20


def summarise(config: CapacityConfig, rows: Sequence[Row], origin: dict[str, Any] | None) -> dict[str, Any]:
    """The content of ``summary.json``: the last context and concurrency of each degree and formats."""
    shown = _shown(config, rows)
    capacities = [row | {"gains": gains(row, rows)} for row in shown]
    return {"budget_bytes": config.budget, "capacities": capacities, "origin": origin}


def markdown(config: CapacityConfig, rows: Sequence[Row], origin: dict[str, Any] | None) -> str:
    """The tables and what their columns mean."""
    context, requests = config.contexts[-1], config.concurrency[-1]
    lines = [
        f"Cache of one GPU with {config.gpu_gib:g} GiB, of which {config.reserved_gib:g} are reserved; "
        f"{config.geometry}, K = {config.num_draft_tokens}, {_open(requests)} of {context:,} tokens at most.",
        "",
        "| ranks | K/V format | bytes/token | state, MiB | request, GiB | tokens that fit | full requests | "
        "x tokens | x token bytes | x request bytes |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in _shown(config, rows):
        found = gains(row, rows)
        fits = found["tokens_that_fit"]
        lines.append(
            f"| {row['tensor_parallel']} | {formats(row)} | {row['bytes_per_token']:,.0f} | "
            f"{row['state_bytes'] / MIB:.1f} | {row['request_bytes'] / GIB:.3f} | {row['max_tokens']:,} | "
            f"{row['max_requests']} | {'-' if fits is None else f'{fits:.3f}'} | {found['per_token']:.3f} | "
            f"{found['per_request']:.3f} |"
        )
    lines += [
        "",
        "*bytes/token* are those of pages: K, V and compressed index keys of target and draft. *state* is "
        f"what a request takes whatever its length: recurrent state for {config.num_draft_tokens + 1} rows "
        "and raw index keys. *request* is the two together for one request of this length. *tokens that fit* "
        "are those of all open requests together, beside the states of all of them and of the row that "
        "padding points to; so many *full requests* of this length fit at once. The quotients compare with "
        "the first format: *tokens that fit*, *bytes/token* and *request*. Only the last counts a request's "
        "state against its own tokens.",
    ]
    if origin is not None:
        lines += ["", *_origin(origin)]
    return "\n".join(lines) + "\n"


def figure(config: CapacityConfig, rows: Sequence[Row]) -> Figure:
    """Left, GiB of a request by its length on the most ranks; right, what formats save, on all degrees."""
    degree = config.tensor_parallel[-1]
    single = [row for row in rows if row["concurrency"] == config.concurrency[0]]
    drawn = Figure(figsize=(10.5, 4.2), layout="constrained")
    left, right = drawn.subplots(1, 2)
    pairs = list(dict.fromkeys(formats(row) for row in rows))
    for index, pair in enumerate(pairs):
        line = [row for row in single if formats(row) == pair and row["tensor_parallel"] == degree]
        sizes = [row["request_bytes"] / GIB for row in line]
        left.plot(config.contexts, sizes, color=COLOURS[index % 7], marker=MARKERS[index % 7], label=pair)
    left.axhline(line[0]["state_bytes"] / GIB, color="0.5", linestyle=":", label="state alone")
    left.set_yscale("log", base=2)
    left.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    left.set_ylabel(f"a request on one of {degree} ranks (GiB)")
    for index, pair in enumerate(pairs[1:], 1):
        for d, tp in enumerate(config.tensor_parallel):
            line = [row for row in single if formats(row) == pair and row["tensor_parallel"] == tp]
            quotients = [gains(row, rows)["per_request"] for row in line]
            style = ("-", "--", "-.", ":")[d % 4]
            label = f"{pair}, {tp} rank{'s' if tp > 1 else ''}"
            right.plot(config.contexts, quotients, color=COLOURS[index % 7], linestyle=style, label=label)
    right.set_ylabel(f"bytes of a request, {pairs[0]} over the format")
    for axes in (left, right):
        _axes(axes, config.contexts)
    drawn.suptitle(f"Cache of a request: {config.geometry}, K = {config.num_draft_tokens}", x=0.01, ha="left")
    return drawn


def _shown(config: CapacityConfig, rows: Sequence[Row]) -> list[Row]:
    last = config.contexts[-1], config.concurrency[-1]
    return [row for row in rows if (row["context"], row["concurrency"]) == last]


def _open(requests: int) -> str:
    return f"{requests} requests open" if requests > 1 else "one request open"


def _origin(origin: dict[str, Any]) -> list[str]:
    lines = [
        f"**Where the serving stack's x{origin['reported_quotient']:.3f} (README, *The question*) can "
        f"come from** ({RANKS} ranks, K = {DRAFTS}, requests of {CONTEXT:,} tokens, one rank):",
        "",
        "| counted | FP16, bytes/token | E4M3, bytes/token | a request beside, MiB | E4M3 over FP16 |",
        "| --- | --- | --- | --- | --- |",
    ]
    for account in origin["accounts"]:
        lines.append(
            f"| {account['account']} | {account['fp16_bytes_per_token']:,.0f} | "
            f"{account['e4m3_bytes_per_token']:,.0f} | {account['request_bytes'] / MIB:.1f} | "
            f"{account['quotient']:.3f} |"
        )
    return [
        *lines,
        "",
        "A serving engine that says how many tokens fit divides its pool by what a request of full length "
        "needs, state included. The exact state explains a part of the difference between the quotients. The "
        f"rest follows if a request keeps {origin['needed_over_exact_state']:.2f} times the exact state "
        "(copies for prefix reuse, layers padded to equal groups, pages as large as a state), or if the E4M3 "
        f"arm had {100 * origin['smaller_pool']:.1f} % less memory for its cache (an FP32 workspace of "
        "attention). The stack gave no breakdown, so which of them it was cannot be told. With equal state "
        f"in both arms, its FP16 figure means a pool of {origin['pool_bytes'] / GIB:.2f} GiB a rank.",
    ]


def _axes(axes: Axes, contexts: Sequence[int]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(contexts)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_tokens(round(x))))
    axes.set_xlabel("context length (tokens)")
    axes.legend(frameon=False, fontsize=8)

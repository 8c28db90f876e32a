"""Measuring one cell: rows of samples from a decoder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from page4.experiments.acceptance.cells import Cell, distinct_formats
from page4.experiments.acceptance.config import AcceptanceConfig, Arm
from page4.experiments.acceptance.prompts import Prompts
from page4.experiments.acceptance.scales import ScalesByFormat, arm_scales
from page4.experiments.samples import Row
from page4.model import Qwen4ExpForCausalLM
from page4.spec_decode import (
    DecoderConfig,
    RoundResult,
    SpeculativeDecoder,
    generate,
    measure_rounds,
    repeated_ngrams,
)

ROUND_COLUMNS: dict[str, type] = {
    "arm": str,
    "length": int,
    "text": str,
    "prompt": str,
    "batch": int,
    "round": int,
    "prefix": int,
    "accepted": int,
    "prefill_tokens": int,
    "prefill_seconds": float,
    "round_seconds": float,
}
"""A row per arm, length, prompt and round; the last three are the batch's, the same on all its rows."""

GENERATION_COLUMNS: dict[str, type] = {
    "arm": str,
    "length": int,
    "text": str,
    "prompt": str,
    "new_tokens": int,
    "steps": int,
    "accepted": int,
    "repeated_4grams": float,
    "prefill_tokens_per_s": float,
    "decode_tokens_per_s": float,
    "step_p50_ms": float,
    "step_p90_ms": float,
}
"""A row per arm, length and prompt of free generation, one request at a time."""

CHECK_COLUMNS: dict[str, type] = {
    "check": str,
    "arm": str,
    "length": int,
    "text": str,
    "prompt": str,
    "compared": int,
    "mismatches": int,
}
"""A row per control: speculative against plain greedy tokens, and accepted counts of a second run."""


class Measurer:
    """Runs cells on one model.

    Args:
        model: The model, on its device.
        config: Resolved.
        prompts: The study's prompts.
        scales: Calibrated KV scales of every format that needs them.
    """

    def __init__(
        self,
        model: Qwen4ExpForCausalLM,
        config: AcceptanceConfig,
        prompts: Prompts,
        scales: ScalesByFormat,
    ) -> None:
        self._model = model
        self._config = config
        self._prompts = prompts
        self._scales = scales
        self._decoders: dict[tuple[str, str, int], SpeculativeDecoder] = {}

    def key(self, cell: Cell) -> tuple[str | int, ...]:
        """Key of the cell's first row in the table of its kind: the cell is done when that row is there."""
        arm, prompt = cell.arm.name, self._prompts.anchors[cell.prompts[0]].id
        if cell.kind == "rounds":
            return arm, cell.length, prompt, 0
        return ("plain_greedy", arm, prompt) if cell.kind == "check" else (arm, cell.length, prompt)

    def rounds(self, cell: Cell) -> list[Row]:
        """One round from every real-text prefix of the cell's prompts."""
        texts, prefixes = round_inputs(self._config, self._prompts, cell)
        sampling = [self._config.sampling(index) for index in cell.prompts]
        result = measure_rounds(self._decoder(cell.arm), texts, prefixes, sampling)
        return round_rows(self._prompts, cell, result)

    def generation(self, cell: Cell) -> list[Row]:
        """Continue the cell's one prompt freely."""
        (index,) = cell.prompts
        prompt = self._prompts.tokens(index, cell.arm, cell.length)
        decoder, sampling = self._decoder(cell.arm), self._config.sampling(index)
        (generation,), stats = generate(decoder, [prompt], self._config.generation_tokens, sampling=sampling)
        milliseconds = 1000 * np.asarray(stats.step_seconds)
        return [
            {
                **_about(self._prompts, cell, index),
                "new_tokens": len(generation.tokens),
                "steps": len(generation.accepted),
                "accepted": sum(generation.accepted),
                "repeated_4grams": repeated_ngrams(generation.tokens, 4),
                "prefill_tokens_per_s": stats.prefill_tokens / stats.prefill_seconds,
                "decode_tokens_per_s": stats.decode_tokens / sum(stats.step_seconds),
                "step_p50_ms": float(np.quantile(milliseconds, 0.5)),
                "step_p90_ms": float(np.quantile(milliseconds, 0.9)),
            }
        ]

    def check(self, cell: Cell) -> list[Row]:
        """Compare speculative with plain output of the cell's prompt, both greedy, in the arm's formats."""
        (index,) = cell.prompts
        prompt = self._prompts.tokens(index, cell.arm, cell.length)
        tokens = self._config.generation_tokens
        (speculative,), _ = generate(self._decoder(cell.arm), [prompt], tokens)
        (plain,), _ = generate(self._decoder(cell.arm, num_draft_tokens=0), [prompt], tokens)
        return [
            {
                "check": "plain_greedy",
                **_about(self._prompts, cell, index),
                "compared": tokens,
                "mismatches": sum(a != b for a, b in zip(speculative.tokens, plain.tokens, strict=True)),
            }
        ]

    def first_pass(self, cells: Sequence[Cell]) -> list[Row]:
        """Run the first rounds of every pair of formats ahead of all others, which warms the machine up."""
        return [row for cell in self._first_cells(cells) for row in self.rounds(cell)]

    def rerun_keys(self, cells: Sequence[Cell]) -> list[tuple[str, str, str]]:
        """Keys of the rows that `rerun_rows` makes of `first_pass`."""
        return [
            ("rerun", cell.arm.name, self._prompts.anchors[index].id)
            for cell in self._first_cells(cells)
            for index in cell.prompts
        ]

    def _first_cells(self, cells: Sequence[Cell]) -> list[Cell]:
        """The first rounds of every pair of formats."""
        first = {cell.arm: cell for cell in reversed(cells) if cell.kind == "rounds"}
        return [first[arm] for arm in distinct_formats(self._config)]

    def _decoder(self, arm: Arm, num_draft_tokens: int | None = None) -> SpeculativeDecoder:
        """Arms with the same formats share a decoder: nothing but their prompts can differ."""
        drafts = self._config.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        key = (*arm.formats, drafts)
        if key not in self._decoders:
            assert self._config.batch_size is not None
            self._decoders[key] = SpeculativeDecoder(
                self._model,
                DecoderConfig(
                    kv_format=arm.target_format,
                    draft_kv_format=arm.draft_format,
                    num_draft_tokens=drafts,
                    prefill_chunk=self._config.prefill_chunk,
                    max_length=self._config.max_length,
                    max_requests=self._config.batch_size,
                    scales=arm_scales(arm, self._model.config.qsa_layers, self._scales),
                ),
            )
        return self._decoders[key]


def round_inputs(config: AcceptanceConfig, prompts: Prompts, cell: Cell) -> tuple[list[list[int]], list[int]]:
    """Texts of a cell's prompts, and the prefixes of them that its rounds start from."""
    texts = [prompts.tokens(i, cell.arm, cell.length, config.rounds_span) for i in cell.prompts]
    return texts, config.prefixes(cell.length)


def round_rows(prompts: Prompts, cell: Cell, result: RoundResult) -> list[Row]:
    """A row of `ROUND_COLUMNS` for every prompt and round of a cell."""
    return [
        {
            **_about(prompts, cell, index),
            "batch": cell.batch,
            "round": turn,
            "prefix": prefix,
            "accepted": int(accepted[turn]),
            "prefill_tokens": result.prefill_tokens,
            "prefill_seconds": result.prefill_seconds,
            "round_seconds": result.round_seconds[turn],
        }
        for index, accepted in zip(cell.prompts, result.accepted.tolist(), strict=True)
        for turn, prefix in enumerate(result.prefix_lengths)
    ]


def rerun_rows(first: Sequence[Row], samples: Sequence[Row]) -> list[Row]:
    """Compare accepted counts of `Measurer.first_pass` with those of the same rounds measured later."""
    later = {_round_key(row): row["accepted"] for row in samples}
    differ: dict[tuple[str, int, str, str], list[bool]] = {}
    for row in first:
        prompt = (row["arm"], row["length"], row["text"], row["prompt"])
        differ.setdefault(prompt, []).append(row["accepted"] != later[_round_key(row)])
    return [
        {
            "check": "rerun",
            "arm": arm,
            "length": length,
            "text": text,
            "prompt": prompt,
            "compared": len(different),
            "mismatches": sum(different),
        }
        for (arm, length, text, prompt), different in differ.items()
    ]


def _about(prompts: Prompts, cell: Cell, index: int) -> Row:
    anchor = prompts.anchors[index]
    return {
        "arm": cell.arm.name,
        "length": cell.length,
        "text": anchor.text.name,
        "prompt": anchor.id,
    }


def _round_key(row: Row) -> tuple[str, int, str, int]:
    return row["arm"], row["length"], row["prompt"], row["round"]

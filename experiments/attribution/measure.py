"""Measuring one cell of the study: rounds of an arm whose K and V are intervened in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from page4.experiments.acceptance.cells import Cell
from page4.experiments.acceptance.config import AcceptanceConfig, Arm
from page4.experiments.acceptance.measure import round_inputs, round_rows
from page4.experiments.acceptance.prompts import Prompts
from page4.experiments.attribution.arms import Condition
from page4.experiments.attribution.calibration import Calibration, Interventions
from page4.experiments.attribution.interventions import ChoiceRecorder, ChoiceReplay
from page4.experiments.attribution.treatments import FrozenChoice, Numbers
from page4.experiments.samples import Row
from page4.kvcache import KVScales
from page4.model import Qwen4ExpForCausalLM
from page4.spec_decode import DecoderConfig, SpeculativeDecoder, measure_rounds


class Measurer:
    """Runs cells on one model.

    Args:
        model: On the reference backend.
        config: How rounds are measured, resolved.
        conditions: Of the arms.
        prompts: The study's prompts.
        calibration: Of the model's layers.
        numbers: What was calibrated, by name of the arm.
    """

    def __init__(
        self,
        model: Qwen4ExpForCausalLM,
        config: AcceptanceConfig,
        conditions: Sequence[Condition],
        prompts: Prompts,
        calibration: Calibration,
        numbers: Mapping[str, Numbers],
    ) -> None:
        self._model, self._config, self._prompts = model, config, prompts
        self._calibration, self._numbers = calibration, numbers
        self._conditions = {condition.arm: condition for condition in conditions}

    def key(self, cell: Cell) -> tuple[str | int, ...]:
        """Key of the cell's first row: the cell is done when that row is there."""
        return cell.arm.name, cell.length, self._prompts.anchors[cell.prompts[0]].id, 0

    def rounds(self, cell: Cell) -> list[Row]:
        """One greedy round from every real-text prefix of the cell's prompts.

        A cell's noise follows from the study's seed and the cell alone.
        """
        texts, prefixes = round_inputs(self._config, self._prompts, cell)
        treatment, numbers = self._conditions[cell.arm].treatment, self._numbers[cell.arm.name]
        interventions: Interventions
        if isinstance(treatment, FrozenChoice):
            recorders = {layer: ChoiceRecorder() for layer in self._calibration.layers}
            measure_rounds(self._decoder(self._config.baseline, None, recorders, cell), texts, prefixes)
            interventions = {layer: ChoiceReplay(recorder) for layer, recorder in recorders.items()}
        else:
            interventions = treatment.interventions(numbers, self._calibration, self._noise_seed(cell))
        decoder = self._decoder(cell.arm, treatment.scales(numbers), interventions, cell)
        return round_rows(self._prompts, cell, measure_rounds(decoder, texts, prefixes))

    def _decoder(
        self, arm: Arm, scales: KVScales | None, interventions: Interventions, cell: Cell
    ) -> SpeculativeDecoder:
        """A new decoder for every cell: interventions have a state, and the caches of all arms need room."""
        config = DecoderConfig(
            kv_format=arm.target_format,
            draft_kv_format=arm.draft_format,
            num_draft_tokens=self._config.num_draft_tokens,
            prefill_chunk=self._config.prefill_chunk,
            max_length=self._config.max_length,
            max_requests=len(cell.prompts),
            scales=scales,
        )
        return SpeculativeDecoder(self._model, config, interventions)

    def _noise_seed(self, cell: Cell) -> int:
        """Far enough from those of other cells that layers can count on from it."""
        drawn = np.random.SeedSequence([self._config.seed, cell.length, cell.batch]).generate_state(1)
        return int(drawn[0]) * 2**16

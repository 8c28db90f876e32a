"""The predictions that are measured: what a folder of `page4 sm70 predict` holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from page4.experiments.config import load_config
from page4.experiments.kernel_cases import StepShape
from page4.experiments.samples import Row, read_samples
from page4.experiments.sm70.prediction.cells import CELL_COLUMNS
from page4.experiments.sm70.prediction.columns import ATTENTION_COLUMNS, STEP_KERNEL_COLUMNS
from page4.experiments.sm70.prediction.config import PredictConfig
from page4.experiments.sm70.validation.config import ValidateConfig
from page4.kernels.errors import InputError

ATTENTION = "attention"
FILES = ("config.yaml", "predictions.csv", "kernels.csv")


@dataclass(frozen=True)
class Predictions:
    """A folder's predictions.

    Attributes:
        config: they were made with.
        attention, step_kernels: rows that have a time, of the steps to measure.
    """

    config: PredictConfig
    attention: list[Row]
    step_kernels: list[Row]

    def shape(self, row: Row) -> StepShape:
        """The step of a row."""
        context = self.config.context if "kernel" not in row else self.config.step_context
        return StepShape(
            **{name: row[name] for name in CELL_COLUMNS},
            context=context,
            overlap=self.config.overlap,
            head_dim=self.config.head_dim,
            topk=self.config.topk,
        )


def read_predictions(config: ValidateConfig) -> Predictions:
    """The rows of a folder that the configuration asks for.

    Raises:
        InputError: a folder without predictions, or with those of another version.
    """
    folder: Path = config.folder
    if not (folder / "predictions.csv").is_file():
        raise InputError(f"{folder} holds no predictions.csv: name a folder of page4 sm70 predict")

    def wanted(row: Row) -> bool:
        return (
            row["status"] == "predicted"
            and (not config.requests or row["requests"] in config.requests)
            and (not config.kv_formats or row["kv_format"] in config.kv_formats)
        )

    attention = read_samples(folder / "predictions.csv", ATTENTION_COLUMNS)
    file = folder / "kernels.csv"
    calls = read_samples(file, STEP_KERNEL_COLUMNS) if file.is_file() else []
    return Predictions(
        load_config(PredictConfig, folder / "config.yaml"),
        [row for row in attention if wanted(row)],
        [row for row in calls if wanted(row)],
    )

"""Finished studies, for those who look at results: the notebooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from page4.experiments.config import ConfigT, load_config
from page4.experiments.result_folder import CONFIG_FILE
from page4.kernels.errors import InputError

SUMMARY_FILE = "summary.json"


def is_finished(folder: Path) -> bool:
    """Whether a study has left its summary in the folder."""
    return (folder / SUMMARY_FILE).is_file()


def read_config(config_class: type[ConfigT], folder: Path) -> ConfigT:
    """The resolved configuration of the study in a folder.

    Raises:
        InputError: There is none, or it is another study's.
    """
    if not is_finished(folder):
        raise InputError(f"{folder} holds no finished study; name a result folder that has a {SUMMARY_FILE}")
    return load_config(config_class, folder / CONFIG_FILE)


def read_or_measure(
    config_class: type[ConfigT],
    run: Callable[[ConfigT, Path], dict[str, Any]],
    folder: Path,
    overrides: Sequence[str] = (),
) -> ConfigT:
    """The resolved configuration of the study in a folder, which is measured first where there is none.

    Args:
        config_class: Of the study.
        run: Measures one.
        folder: The result folder.
        overrides: `key=value` settings of a quick study that is to be in the folder; none of them: the study
            that is there, whatever its settings, or a quick one.

    Raises:
        InputError: A setting is wrong, or the folder holds another study than the one that is asked for.
    """
    if overrides or not is_finished(folder):
        config = load_config(config_class, None, overrides, quick=True)
        if not is_finished(folder):
            print(f"{folder} holds no finished study: a quick one is measured there")
        run(config, folder)
    return read_config(config_class, folder)

"""Which tuned configurations the kernels of a study ran with, and from which files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from page4.kernels.errors import InputError

if TYPE_CHECKING:
    from page4.kernels.tuning import Configurations


@dataclass(frozen=True)
class StudyKernels:
    """The configurations of a study's kernels.

    Attributes:
        digests: name -> SHA-256 of every file of configurations for the study's device: inputs of the study,
            so that it is not gone on with after they changed.
        configurations: what kernels look their configurations up in; None without Triton kernels.
    """

    digests: Mapping[str, str]
    configurations: Configurations | None

    def provenance(self) -> dict[str, Any]:
        """The source, its files with their SHA-256, and every configuration used; {} without kernels."""
        return {} if self.configurations is None else {"kernel_configs": self.configurations.record()}


@contextmanager
def study_kernels(backend: str, source: Path | str, device: str) -> Iterator[StudyKernels]:
    """Let the kernels of a study use ``shipped`` configurations, ``defaults`` or a folder.

    The backend "reference" has no kernels to configure; a folder that does not exist is refused all the same.

    Raises:
        InputError: The folder of configurations does not exist.
    """
    if source not in ("shipped", "defaults") and not Path(source).is_dir():
        raise InputError(f"the folder of kernel configurations {source} does not exist")
    if backend != "triton":
        yield StudyKernels({}, None)
        return
    from page4.kernels.tuning import configuration_digests, use_configurations  # needs Triton

    found = configuration_digests(source, torch.device(device))
    with use_configurations(source) as configurations:
        yield StudyKernels(
            {f"kernel_configs/{path}": sha256 for path, sha256 in found.items()}, configurations
        )

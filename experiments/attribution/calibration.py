"""What the study's treatments are calibrated from: K and V of an FP16 run over the prompts' beginnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TypeVar

from page4.kvcache.intervention import Intervention, LinearStorage, hadamard
from page4.model import Qwen4ExpForCausalLM
from page4.spec_decode import KVObservation, observe_texts
from page4.spec_decode.calibration import DRAFT

Interventions = Mapping[int | None, Intervention]
"""By number of the layer; None is the MTP layer."""

T = TypeVar("T")


class Calibration:
    """The layers of a model, and observations of them, each made when it is first needed.

    Args:
        model: On the reference backend.
        texts: The beginnings.
        prefill_chunk: Tokens per step.
    """

    def __init__(
        self, model: Qwen4ExpForCausalLM, texts: Sequence[Sequence[int]], prefill_chunk: int
    ) -> None:
        self._model, self._texts, self._chunk = model, texts, prefill_chunk

    @cached_property
    def observed(self) -> KVObservation:
        """K and V as they are."""
        return observe_texts(self._model, self._texts, self._chunk)

    @cached_property
    def rotated(self) -> KVObservation:
        """K rotated, and V as it is."""
        return observe_texts(self._model, self._texts, self._chunk, self.rotation())

    @property
    def target_layers(self) -> tuple[int, ...]:
        """Numbers of the target's layers with K/V."""
        return self._model.config.qsa_layers

    @property
    def layers(self) -> list[int | None]:
        """Layers with K/V by number, then the MTP layer, None."""
        return [*self.target_layers, *([None] if self._model.mtp is not None else [])]

    @property
    def head_dim(self) -> int:
        """D of K and V."""
        return self._model.config.head_dim

    def of_layers(self, by_name: Mapping[str, T]) -> dict[int | None, T]:
        """Values that go by the names of an observation's layers, by number."""
        return {layer: by_name[DRAFT if layer is None else str(layer)] for layer in self.layers}

    def rotation(self) -> Interventions:
        """K of every layer and head rotated by a Hadamard matrix.

        Raises:
            InputError: the heads' dimension is no power of two.
        """
        matrices = hadamard(self.head_dim).expand(self._model.config.num_key_value_heads, -1, -1)
        return {layer: LinearStorage(k=matrices) for layer in self.layers}

"""The prompts of a study, by arm and length."""

from __future__ import annotations

from collections.abc import Sequence

from page4.experiments.acceptance.config import AcceptanceConfig, Arm
from page4.experiments.prompt_windows import (
    SHIPPED,
    Anchor,
    Encode,
    choose_anchors,
    cut_prompt,
    load_texts,
    nonce,
)
from page4.kernels.errors import InputError


class Prompts:
    """Anchors and their nonces.

    Attributes:
        anchors: Where the prompts are cut; cells name prompts by their index here.
    """

    def __init__(self, config: AcceptanceConfig, anchors: Sequence[Anchor], encode: Encode) -> None:
        self._config = config
        self._encode = encode
        self.anchors = list(anchors)

    @classmethod
    def choose(cls, config: AcceptanceConfig, encode: Encode) -> Prompts:
        """Anchors of a resolved configuration in its texts.

        Raises:
            InputError: The texts cannot be read, are too short, or a length has no room for a nonce.
        """
        assert config.lengths is not None and config.num_prompts is not None
        texts = load_texts(config.prompts or SHIPPED, encode, config.texts)
        longest, shortest = config.lengths[-1], config.lengths[0]
        anchors = choose_anchors(texts, config.num_prompts, longest, config.rounds_span, config.seed)
        prompts = cls(config, anchors, encode)
        nonces = [prompts._nonce(anchor, arm) for anchor in anchors for arm in config.all_arms]
        if max(map(len, nonces)) >= shortest:
            raise InputError(
                f"a length of {shortest} tokens has no room beside a nonce of {max(map(len, nonces))}"
            )
        return prompts

    def tokens(self, index: int, arm: Arm, length: int, rounds_span: int = 0) -> list[int]:
        """A prompt of an arm, `length` tokens with its nonce, and `rounds_span` more of the text."""
        anchor = self.anchors[index]
        return cut_prompt(anchor, length, self._nonce(anchor, arm), rounds_span)

    def beginnings(self) -> list[list[int]]:
        """What scales are calibrated from: the first tokens of every prompt of the shortest length."""
        assert self._config.lengths is not None
        base, shortest = self._config.baseline, self._config.lengths[0]
        prompts = (self.tokens(index, base, shortest) for index in range(len(self.anchors)))
        return [prompt[: self._config.calibration_tokens] for prompt in prompts]

    def _nonce(self, anchor: Anchor, arm: Arm) -> list[int]:
        return self._encode(nonce(self._config.seed, anchor.id, arm.nonce_id))

"""The prompts of the study, and the windows of other text that its scales are calibrated from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from page4.experiments.calibrate.config import TEXTS, CalibrateConfig
from page4.experiments.calibrate.shingles import check_overlap
from page4.experiments.calibrate.windows import Window, cut_windows
from page4.experiments.prompt_windows import (
    SHIPPED,
    Anchor,
    Encode,
    Text,
    choose_anchors,
    cut_prompt,
    load_texts,
    nonce,
    read_texts,
)
from page4.experiments.quant_error.config import QuantErrorConfig
from page4.kernels.errors import InputError

_FOLLOWING = 2  # tokens of the text from the anchor on


class Prompts:
    """Anchors, and what is read before them.

    Attributes:
        anchors: Where the prompts are cut.

    Raises:
        InputError: The texts cannot be read, are too short, or a length has no room for a nonce.
    """

    def __init__(self, config: QuantErrorConfig, encode: Encode) -> None:
        assert config.lengths is not None and config.num_prompts is not None
        texts = load_texts(config.prompts or SHIPPED, encode, config.texts)
        self.anchors = choose_anchors(texts, config.num_prompts, config.lengths[-1], _FOLLOWING, config.seed)
        self._nonces = [encode(nonce(config.seed, anchor.id, 0)) for anchor in self.anchors]
        longest = max(map(len, self._nonces))
        if longest >= config.lengths[0]:
            raise InputError(
                f"a length of {config.lengths[0]} tokens has no room beside a nonce of {longest}"
            )

    def tokens(self, index: int, length: int) -> list[int]:
        """A prompt of `length` tokens, nonce included, and the two tokens after it.

        The last row predicts the first of them; the draft's reads that one and predicts the second.
        """
        return cut_prompt(self.anchors[index], length, self._nonces[index], _FOLLOWING)

    def digest(self) -> str:
        """SHA-256 of the texts' tokens."""
        sha256 = hashlib.sha256()
        for name, tokens in sorted({anchor.text.name: anchor.text.tokens for anchor in self.anchors}.items()):
            sha256.update(repr((name, tokens)).encode())
        return sha256.hexdigest()


def calibration_windows(
    config: QuantErrorConfig, anchors: Sequence[Anchor], encode: Encode
) -> Sequence[Window]:
    """Windows of the corpus that scales are calibrated from; none where no arm has static scales.

    Raises:
        InputError: The corpus cannot be read, or overlaps the texts of the prompts.
    """
    if all(arm.rule is None for arm in config.arms):
        return []
    corpus = read_texts(config.corpus or TEXTS)
    used = {anchor.text.name for anchor in anchors}
    evaluation = read_texts(config.prompts or SHIPPED, sorted(used))
    check_overlap({name: text for name, _, text in corpus}, {name: text for name, _, text in evaluation})
    cut = CalibrateConfig(window=config.calibration_window, max_windows=config.calibration_windows)
    return cut_windows(cut, [Text(name, kind, encode(text)) for name, kind, text in corpus])

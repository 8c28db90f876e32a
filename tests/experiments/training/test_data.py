"""Windows cover a source before they repeat, and never cross into another one."""

from __future__ import annotations

import numpy as np
import pytest

from page4.experiments.corpus.pack import PackedData, SourceSpan
from page4.experiments.training.data import WindowSampler
from page4.kernels.errors import InputError

EVEN = {"prose": 1.0, "code": 1.0}


def _data() -> PackedData:
    tokens = np.arange(3000, dtype=np.uint16)
    return PackedData(
        tokens, (SourceSpan("a", "prose", 0, 1000), SourceSpan("b", "code", 1000, 3000)), {}, {}
    )


def test_windows_are_consecutive_and_stay_inside_a_source() -> None:
    windows = WindowSampler(_data(), seed=0).draw(64, 50, 4, EVEN)
    assert windows.shape == (64, 54)
    assert (windows[:, 1:] - windows[:, :-1] == 1).all()
    assert ((windows < 1000).all(1) | (windows >= 1000).all(1)).all()


def test_an_epoch_does_not_repeat_a_window() -> None:
    sampler = WindowSampler(_data(), seed=0)
    starts = sampler.draw(18, 50, 0, {"prose": 1.0, "code": 0.0})[:, 0].tolist()
    assert len(set(starts)) == 18


def test_weights_decide_how_often_a_genre_is_drawn() -> None:
    windows = WindowSampler(_data(), seed=0, max_epochs=100).draw(600, 20, 0, {"prose": 2.0, "code": 1.0})
    assert (windows[:, 0] < 1000).float().mean().item() == pytest.approx(0.5, abs=0.07)


def test_an_exhausted_corpus_is_refused() -> None:
    sampler = WindowSampler(_data(), seed=0, max_epochs=1)
    with pytest.raises(InputError, match="no text left"):
        for _ in range(100):
            sampler.draw(4, 50, 0, EVEN)


def test_a_restored_sampler_draws_the_same_windows() -> None:
    one, two = WindowSampler(_data(), seed=0), WindowSampler(_data(), seed=9)
    one.draw(5, 50, 4, EVEN)
    two.load_state_dict(one.state_dict())
    assert one.draw(8, 50, 4, EVEN).equal(two.draw(8, 50, 4, EVEN))

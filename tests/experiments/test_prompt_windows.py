"""Prompts: the same targets at every length, a nonce each, balance over texts, clear refusals."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from page4.experiments.prompt_windows import Text, choose_anchors, cut_prompt, load_texts, nonce
from page4.kernels.errors import InputError


def _texts(*sizes: int) -> list[Text]:
    return [Text(f"text{i}", "prose", [1000 * i + t for t in range(size)]) for i, size in enumerate(sizes)]


def _encode(text: str) -> list[int]:
    return list(text.encode())


def test_every_length_sees_the_same_targets_with_growing_context() -> None:
    for anchor in choose_anchors(_texts(900, 700), 5, longest=512, rounds_span=24, seed=3):
        prompts = {length: cut_prompt(anchor, length, [7, 8, 9], rounds_span=24) for length in (64, 128, 512)}
        for length, prompt in prompts.items():
            assert len(prompt) == length + 24
            assert prompt[:3] == [7, 8, 9]
            assert prompt[3:] == prompts[512][-(length + 24 - 3) :]


def test_the_text_goes_on_at_the_anchor() -> None:
    (anchor,) = choose_anchors(_texts(600), 1, longest=100, rounds_span=10, seed=0)
    prompt = cut_prompt(anchor, 100, [5], rounds_span=10)
    assert prompt[100:] == anchor.text.tokens[anchor.position : anchor.position + 10]
    assert prompt[99] == anchor.text.tokens[anchor.position - 1]


def test_anchors_are_balanced_over_texts_and_so_is_every_beginning_of_the_list() -> None:
    anchors = choose_anchors(_texts(2000, 3000, 5000), 11, longest=512, rounds_span=20, seed=1)
    assert len({anchor.id for anchor in anchors}) == 11
    for end in range(1, 12):
        counts = Counter(anchor.text.name for anchor in anchors[:end])
        assert max(counts.values()) - min(counts[f"text{i}"] for i in range(3)) <= 1


def test_a_few_prompts_see_every_kind_of_text() -> None:
    kinds = ["a", "a", "a", "a", "a", "b", "b", "c"]
    texts = [Text(f"{kind}{index}", kind, list(range(900))) for index, kind in enumerate(kinds)]
    for seed in range(10):
        chosen = [anchor.text.kind for anchor in choose_anchors(texts, 8, 512, 20, seed)]
        assert set(chosen[:3]) == {"a", "b", "c"} and set(chosen[3:5]) == {"a", "b"}
    first = {choose_anchors(texts, 1, 512, 20, seed)[0].text.name for seed in range(20)}
    assert len(first) > 3


def test_rounds_of_one_text_never_overlap() -> None:
    anchors = choose_anchors(_texts(1000), 12, longest=300, rounds_span=40, seed=2)
    positions = sorted(anchor.position for anchor in anchors)
    assert positions[0] >= 300 and positions[-1] + 40 <= 1000
    assert all(later - earlier > 40 for earlier, later in pairwise(positions))


def test_the_seed_decides_the_anchors() -> None:
    def positions(seed: int) -> list[str]:
        return [anchor.id for anchor in choose_anchors(_texts(5000, 5000), 6, 512, 20, seed)]

    assert positions(1) == positions(1)
    assert positions(1) != positions(2)


def test_every_prompt_and_every_nonce_id_has_its_own_nonce() -> None:
    sentences = [nonce(seed, f"text@{p}", i) for seed in (0, 1) for p in range(50) for i in range(3)]
    assert len(set(sentences)) == len(sentences)
    assert nonce(0, "text@7", 1) == nonce(0, "text@7", 1)


def test_a_text_too_short_for_the_length_is_named_with_what_it_allows() -> None:
    with pytest.raises(InputError, match=r"'text1' has 500 tokens, too few .* of 512: at most 476"):
        choose_anchors(_texts(900, 500), 2, longest=512, rounds_span=24, seed=0)


def test_a_text_that_fits_exactly_is_used() -> None:
    (anchor,) = choose_anchors(_texts(536), 1, longest=512, rounds_span=24, seed=0)
    assert anchor.position == 512


def test_more_prompts_than_a_text_has_room_for_are_refused() -> None:
    with pytest.raises(InputError, match="room for 3 prompts of 400 tokens"):
        choose_anchors(_texts(500), 4, longest=400, rounds_span=30, seed=0)


def test_a_length_without_room_for_context_is_refused() -> None:
    (anchor,) = choose_anchors(_texts(600), 1, longest=100, rounds_span=0, seed=0)
    with pytest.raises(InputError, match="no room beside its nonce of 8"):
        cut_prompt(anchor, 8, list(range(8)))


def test_a_folder_of_text_files_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two", encoding="utf-8")
    (tmp_path / "a.txt").write_text("één", encoding="utf-8")
    assert [(text.name, bytes(text.tokens).decode()) for text in load_texts(tmp_path, _encode)] == [
        ("a", "één"),
        ("b", "two"),
    ]
    assert [text.name for text in load_texts(tmp_path, _encode, names=["b"])] == ["b"]


def test_unreadable_folders_and_files_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        load_texts(tmp_path / "none", _encode)
    with pytest.raises(InputError, match="holds no"):
        load_texts(tmp_path, _encode)
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not UTF-8"):
        load_texts(tmp_path, _encode)
    with pytest.raises(InputError, match="no text named 'c'"):
        load_texts(tmp_path, _encode, names=["c"])

"""A corpus that repeats the evaluation texts is refused, however it is laid out."""

from __future__ import annotations

import pytest

from page4.experiments.calibrate.config import TEXTS
from page4.experiments.calibrate.shingles import check_overlap
from page4.experiments.prompt_windows import SHIPPED, read_texts
from page4.kernels.errors import InputError

EVALUATION = {
    "sea": "She had been forced into prudence in her youth, she learned romance as she grew older",
    "short": "of nothing else",
}


def test_other_text_passes_and_is_counted() -> None:
    overlap = check_overlap({"a": "one two three four five six", "b": "two three four five"}, EVALUATION, 4)
    assert (overlap.words, overlap.shingles, overlap.evaluation_shingles) == (4, 3, 13 + 1)


@pytest.mark.parametrize(
    "copy",
    [
        "it is said that she had been forced into prudence in her youth",
        "SHE had\nbeen -- *forced*, into\n\n> prudence...",
        "prudence in her youth, she learned romance. And then?",
    ],
)
def test_a_repeated_run_of_words_is_refused(copy: str) -> None:
    with pytest.raises(InputError, match="'copy' shares 5 words in a row with the evaluation text 'sea'"):
        check_overlap({"other": "nothing of it", "copy": copy}, EVALUATION, 5)


def test_fewer_words_in_a_row_pass() -> None:
    check_overlap({"a": "she had been forced. She learned romance as"}, EVALUATION, 5)


def test_a_text_shorter_than_a_shingle_counts_whole() -> None:
    with pytest.raises(InputError, match="with the evaluation text 'short'"):
        check_overlap({"a": "Of nothing else!"}, EVALUATION, 13)
    assert check_overlap({"empty": " - "}, EVALUATION).shingles == 0


def test_the_shipped_corpus_shares_nothing_with_the_shipped_prompts() -> None:
    corpus, evaluation = ({name: text for name, _, text in read_texts(f)} for f in (TEXTS, SHIPPED))
    assert check_overlap(corpus, evaluation).shingles > 9000
    mixed = corpus | {"mixed": next(iter(evaluation.values()))[50_000:50_400]}
    with pytest.raises(InputError, match="'mixed' shares 13 words"):
        check_overlap(mixed, evaluation)

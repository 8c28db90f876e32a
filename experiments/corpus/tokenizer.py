"""The tokenizer of the shipped checkpoint: a byte-level BPE of 4096 entries."""

from __future__ import annotations

from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from page4.experiments.corpus.build import Corpus

VOCAB_SIZE = 4096
END_OF_DOCUMENT = "<|endoftext|>"
# Code is the largest part of the corpus; a fraction of it keeps the merges those of ordinary text.
_CODE_STRIDE = 4


def training_texts(corpus: Corpus) -> Iterator[str]:
    """The training split, with every fourth file of the code."""
    genre = {report.name: report.genre for report in corpus.reports}
    for source, documents in corpus.train.items():
        for _, text in documents[:: _CODE_STRIDE if genre[source] == "code" else 1]:
            yield text


def train_tokenizer(texts: Iterator[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Trains a byte-level BPE whose id 0 ends a document. Every text encodes and comes back exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer

"""Prompts of a study: windows of held-out texts behind a nonce, paired over arms and over context lengths.

An anchor is a position in a text. The prompt of length L at an anchor is a nonce followed by the
L - len(nonce) tokens before the anchor, so every length predicts the same targets with a growing context. The
text after the anchor continues the prompt: rounds start from the prefixes L, L + stride, L + 2 stride, ...
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from page4.kernels.errors import InputError

Encode = Callable[[str], list[int]]

SHIPPED = Path(__file__).parent / "prompts"
"""Folder of the held-out texts that come with the package."""


@dataclass(frozen=True)
class Text:
    """A text and its tokens."""

    name: str
    kind: str
    tokens: list[int]


@dataclass(frozen=True)
class Anchor:
    """A place in a text from which prompts of every length are cut.

    Attributes:
        id: Unique within a study, `<text>@<position>`.
        text: The text.
        position: Index of the token that follows the shortest prefix.
    """

    id: str
    text: Text
    position: int


def load_texts(folder: Path, encode: Encode, names: Sequence[str] = ()) -> list[Text]:
    """Read and tokenise the texts of a folder, ordered by name.

    Args:
        folder: See `read_texts`.
        encode: The tokenizer's text -> token ids.
        names: Only these texts; all when empty.

    Raises:
        InputError: See `read_texts`.
    """
    return [Text(name, kind, encode(text)) for name, kind, text in read_texts(folder, names)]


def read_texts(folder: Path, names: Sequence[str] = ()) -> list[tuple[str, str, str]]:
    """Read the texts of a folder: (name, kind, text), ordered by name.

    The folder holds UTF-8 `.txt` files; `prompts.json`, where there is one, lists them with name, kind and
    SHA-256.

    Args:
        folder: Where the files are.
        names: Only these texts; all when empty.

    Raises:
        InputError: No such folder, no text in it, an unknown name, a file that is not UTF-8 or whose SHA-256
            differs from the one in `prompts.json`.
    """
    if not folder.is_dir():
        raise InputError(f"the prompt folder {folder} does not exist")
    files = {name: (folder / file, kind, digest) for name, file, kind, digest in _entries(folder)}
    if not files:
        raise InputError(f"the prompt folder {folder} holds no .txt file")
    for name in names:
        if name not in files:
            raise InputError(f"no text named {name!r} in {folder}; there are {', '.join(sorted(files))}")
    texts = []
    for name in sorted(names or files):
        file, kind, digest = files[name]
        texts.append((name, kind, _read(file, digest)))
    return texts


def choose_anchors(
    texts: Sequence[Text], count: int, longest: int, rounds_span: int, seed: int
) -> list[Anchor]:
    """Choose `count` anchors, balanced over the texts and spread within each.

    Anchors of one text lie in equal strata, one at random in each, so that no two rounds start from the same
    prefix. The list goes around the texts and their kinds, so every beginning of it is balanced too.

    Args:
        texts: At least one.
        count: How many anchors.
        longest: Longest prompt in tokens, nonce included.
        rounds_span: Tokens from the first to the last prefix of a prompt.
        seed: Decides the anchors, together with the texts' names.

    Raises:
        InputError: A text too short for `longest`, or without room for its share of the anchors.
    """
    shortest = longest + rounds_span
    for text in texts:
        if len(text.tokens) < shortest:
            raise InputError(
                f"the text {text.name!r} has {len(text.tokens)} tokens, too few for a prompt of {longest}: "
                f"at most {max(len(text.tokens) - rounds_span, 0)} fit before {rounds_span} for the rounds"
            )
    order = _alternating_kinds(texts, seed)
    shares = {index: count // len(texts) + (rank < count % len(texts)) for rank, index in enumerate(order)}
    chosen = {
        index: _strata(texts[index], share, longest, rounds_span, seed) for index, share in shares.items()
    }
    rounds = range(max(shares.values(), default=0))
    return [chosen[index][turn] for turn in rounds for index in order if turn < shares[index]]


def nonce(seed: int, prompt_id: str, nonce_id: int) -> str:
    """A short sentence that no other prompt and no other `nonce_id` begins with."""
    digest = hashlib.sha256(f"{seed}:{prompt_id}:{nonce_id}".encode()).hexdigest()
    return f"Request {digest[:12]}.\n\n"


NONCE_CHARACTERS = len(nonce(0, "", 0))
"""Of every nonce; each of its tokens has at least one."""


def cut_prompt(anchor: Anchor, length: int, nonce_tokens: Sequence[int], rounds_span: int = 0) -> list[int]:
    """Nonce and context, `length` tokens together, then `rounds_span` tokens of the text from the anchor on.

    Raises:
        InputError: `length` leaves no room for context, or the text does not reach that far.
    """
    context = length - len(nonce_tokens)
    start, end = anchor.position - context, anchor.position + rounds_span
    if context < 1:
        raise InputError(f"a prompt of {length} tokens has no room beside its nonce of {len(nonce_tokens)}")
    if start < 0 or end > len(anchor.text.tokens):
        raise InputError(
            f"the text {anchor.text.name!r} is too short for {length} tokens at {anchor.position}"
        )
    return [*nonce_tokens, *anchor.text.tokens[start:end]]


def _alternating_kinds(texts: Sequence[Text], seed: int) -> list[int]:
    """Indices of the texts at random, but for their kinds, which take turns: a few prompts see every kind."""
    order = np.random.default_rng(_seed(seed, "order")).permutation(len(texts)).tolist()
    seen: Counter[str] = Counter()
    turns = {}
    for index in order:
        turns[index] = seen[texts[index].kind]
        seen[texts[index].kind] += 1
    return sorted(order, key=turns.__getitem__)


def _strata(text: Text, share: int, longest: int, rounds_span: int, seed: int) -> list[Anchor]:
    """`share` anchors in ascending strata of the positions with room for context before and rounds after."""
    if share == 0:
        return []
    width = (len(text.tokens) - longest) // share
    if width < rounds_span + 1 and share > 1:
        most = (len(text.tokens) - longest) // (rounds_span + 1)
        raise InputError(
            f"the text {text.name!r} has room for {max(most, 1)} prompts of {longest} tokens without "
            f"overlapping rounds, {share} were asked: use fewer prompts, fewer rounds or a shorter length"
        )
    generator = np.random.default_rng(_seed(seed, text.name))
    slack = max(width - rounds_span - 1, 0)
    positions = [longest + turn * width + int(generator.integers(slack + 1)) for turn in range(share)]
    order = generator.permutation(share)  # a beginning of the list is spread over the text as well
    return [Anchor(f"{text.name}@{positions[turn]}", text, positions[turn]) for turn in order]


def _seed(seed: int, purpose: str) -> list[int]:
    return [seed, int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:4], "little")]


def _entries(folder: Path) -> list[tuple[str, str, str, str]]:
    """(name, file, kind, sha256) of every text; the last two are empty without `prompts.json`."""
    index = folder / "prompts.json"
    if not index.is_file():
        return [(file.stem, file.name, "", "") for file in sorted(folder.glob("*.txt"))]
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))
        return [(e["name"], e["file"], e["kind"], e["sha256"]) for e in listed]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{index} is not a list of texts with name, file, kind and sha256: {error}"
        ) from error


def _read(file: Path, digest: str) -> str:
    try:
        content = file.read_bytes()
        text = content.decode("utf-8")
    except OSError as error:
        raise InputError(f"cannot read the prompt {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"the prompt {file} is not UTF-8 text") from error
    if digest and hashlib.sha256(content).hexdigest() != digest:
        raise InputError(f"the prompt {file} is damaged: its SHA-256 is not the one in prompts.json")
    return text

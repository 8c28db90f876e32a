"""Normalising, judging and reading text, whatever package it came from."""

from __future__ import annotations

import gzip
import html
import re
import zlib
from pathlib import Path

MIN_CHARACTERS = 400


def decode(data: bytes) -> str:
    """UTF-8, or Latin-1 where the bytes are not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def read(path: Path) -> str:
    """Text of a file, unpacked when its name ends in ``.gz``."""
    return decode(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())


def normalise(text: str) -> str:
    """Unix line ends, no trailing blanks, at most one empty line in a row, one final newline."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\xa0", " ").replace("\x00", "")
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n{3,}", "\n\n", text)
    return text.strip() + "\n"


def strip_html(page: str) -> str:
    """The readable text of an HTML page's body."""
    body = re.search(r"<body[^>]*>(.*)</body>", page, re.S | re.I)
    text = body.group(1) if body else page
    text = re.sub(r"(?is)<(script|style|head|nav|footer)\b.*?</\1>", "", text)
    text = re.sub(r"(?i)<(br|/p|/div|/li|/tr|/h\d|/pre|/dt|/dd)[^>]*>", "\n", text)
    text = re.sub(r"(?s)<[^>]+>", "", text)
    return re.sub(r"[ \t]{2,}", " ", html.unescape(text))


def keep_document(text: str) -> bool:
    """Whether a document reads like prose, documentation or code, rather than data or generated tables.

    Too short, mostly digits and symbols, machine-long lines, or so repetitive that it compresses tenfold.
    """
    if len(text) < MIN_CHARACTERS:
        return False
    letters = sum(map(str.isalpha, text)) / len(text)
    digits = sum(map(str.isdigit, text)) / len(text)
    lines = text.splitlines()
    long_lines = sum(len(line) for line in lines if len(line) > 2500)
    if letters < 0.4 or digits > 0.2 or long_lines > 0.4 * len(text):
        return False
    sample = text[:200_000].encode()
    return len(zlib.compress(sample, 6)) > 0.1 * len(sample)

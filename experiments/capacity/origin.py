"""Accounts of the capacity that the origin reported for E4M3: what each way of counting would give.

The origin, the serving stack in the README's question, served the public checkpoint on four ranks with K = 3
and reported 433,401 tokens of KV capacity in FP16 and 775,096 in E4M3, without a breakdown. What a request
needs beside its pages is the same in both formats, so whatever is counted there brings the quotient of two
such capacities down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from page4.experiments.capacity.geometry import PUBLIC, load_geometry
from page4.kvcache import CacheConfig
from page4.kvcache.cache import CacheGeometry
from page4.kvcache.capacity import page_bytes, rank_geometry, state_bytes
from page4.kvcache.pages import PAGE_TOKENS

FP16_TOKENS, E4M3_TOKENS = 433_401, 775_096
RANKS, DRAFTS, CONTEXT = 4, 3, 262_144


@dataclass(frozen=True)
class Account:
    """One way of counting.

    Attributes:
        name: what is counted.
        fp16, e4m3: bytes of a token in pages, on one rank.
        request: bytes of a request of the full context beside its pages, the same in both formats.
    """

    name: str
    fp16: float
    e4m3: float
    request: float = 0.0

    @property
    def quotient(self) -> float:
        """Tokens in E4M3 over tokens in FP16 in the same memory, full requests counted with all they need."""
        return (self.fp16 + self.request / CONTEXT) / (self.e4m3 + self.request / CONTEXT)

    def to_json(self) -> dict[str, Any]:
        """The fields and the quotient."""
        return {
            "account": self.name,
            "fp16_bytes_per_token": self.fp16,
            "e4m3_bytes_per_token": self.e4m3,
            "request_bytes": self.request,
            "quotient": self.quotient,
        }


def accounts() -> list[Account]:
    """From K and V alone to what would explain the reported quotient."""
    rank = rank_geometry(load_geometry(PUBLIC), RANKS)
    fp16, e4m3 = (_page(rank, kv_format) / PAGE_TOKENS for kv_format in ("fp16", "e4m3"))
    mixed = _page(rank, "e4m3", "fp16") / PAGE_TOKENS
    keys = page_bytes(rank, CacheConfig()).compressed_keys / PAGE_TOKENS
    state = state_bytes(rank, CacheConfig(num_draft_tokens=DRAFTS), torch.float16).total
    needed = needed_per_request(fp16, e4m3)
    return [
        Account("K and V alone", fp16 - keys, e4m3 - keys),
        Account("pages: with compressed index keys, which stay 16-bit", fp16, e4m3),
        Account(f"and the state of a full request, {DRAFTS + 1} rows", fp16, e4m3, state),
        Account("that state twice, as with padding beside a single request", fp16, e4m3, 2 * state),
        Account("the draft left in FP16, pages alone", fp16, mixed),
        Account("what gives the reported quotient", fp16, e4m3, needed),
    ]


def needed_per_request(fp16: float, e4m3: float) -> float:
    """Bytes of a full request beside its pages that give the reported quotient."""
    reported = E4M3_TOKENS / FP16_TOKENS
    return CONTEXT * (fp16 - reported * e4m3) / (reported - 1)


def explained() -> dict[str, Any]:
    """The accounts and what the reported figures imply, for ``summary.json``."""
    found = accounts()
    exact, needed = found[2], found[-1]
    pool = FP16_TOKENS * (needed.fp16 + needed.request / CONTEXT)
    reported = E4M3_TOKENS / FP16_TOKENS
    return {
        "reported_quotient": reported,
        "accounts": [account.to_json() for account in found],
        "needed_over_exact_state": needed.request / exact.request,
        "pool_bytes": pool,
        # The other way round: exact state in both arms, but less memory for E4M3.
        "smaller_pool": 1 - reported / exact.quotient,
    }


def _page(rank: CacheGeometry, kv_format: str, draft: str | None = None) -> int:
    return page_bytes(rank, CacheConfig(kv_format=kv_format, draft_kv_format=draft)).total

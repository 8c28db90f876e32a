"""What the machine code of every kernel must show, and what is known not to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from page4.kernels.errors import InputError

GIVEN = "given"

# Shared memory that a program may ask for, by compute capability.
SHARED_BYTES = {70: 96 * 1024, 80: 163 * 1024, 90: 227 * 1024}


@dataclass(frozen=True)
class Promise:
    """What a kernel promises.

    Attributes:
        loads: bytes of the narrowest and of the widest access that its loads from global memory have: none is
            narrower, and one at least is as wide.
        stores: the same of its stores.
        tensor_cores: the least compute capability on which its products run on tensor cores; None for a
            kernel without products. ``tl.dot`` falls to FFMA below 8.0 in every Triton from 3.4 on.
    """

    loads: tuple[int, int]
    stores: tuple[int, int]
    tensor_cores: int | None = None


PROMISES = {
    "page4_attention_volta_kernel": Promise(loads=(4, 16), stores=(4, 8), tensor_cores=70),
    "page4_attention_ampere_kernel": Promise(loads=(4, 16), stores=(4, 16), tensor_cores=80),
    "page4_attention_hopper_kernel": Promise(loads=(4, 16), stores=(4, 8), tensor_cores=90),
    "page4_attention_kernel": Promise(loads=(4, 16), stores=(4, 16), tensor_cores=80),
    # A thread merges one number of the output, with its gate.
    "merge_kernel": Promise(loads=(2, 16), stores=(2, 4)),
    "index_scores_kernel": Promise(loads=(4, 16), stores=(4, 4), tensor_cores=80),
    "index_scores_volta_kernel": Promise(loads=(4, 16), stores=(4, 4), tensor_cores=70),
    "select_kernel": Promise(loads=(4, 16), stores=(4, 4)),
    # Rows of a bitmap need not begin at a multiple of 16 bytes.
    "plan_kernel": Promise(loads=(4, 4), stores=(4, 4)),
    # A rotated piece of 32 numbers is one a lane: 2 bytes in 16 bits, 1 in a byte format.
    "qsa_prepare_kernel": Promise(loads=(2, 8), stores=(1, 8)),
    "tile_sums_kernel": Promise(loads=(4, 16), stores=(4, 8)),
    "gather_rows_kernel": Promise(loads=(4, 16), stores=(4, 8)),
    # The logit of one draft is 2 bytes.
    "decide_kernel": Promise(loads=(2, 16), stores=(4, 8)),
    "choose_draft_kernel": Promise(loads=(4, 16), stores=(4, 8)),
    # Gates are one number a row, and heads of 128 numbers one number a thread.
    "gated_delta_kernel": Promise(loads=(2, 16), stores=(2, 16)),
    # The same gates, a chunk at a time; which request it is of is one number.
    "delta_keys_kernel": Promise(loads=(8, 16), stores=(16, 16), tensor_cores=80),
    "delta_solve_kernel": Promise(loads=(2, 16), stores=(4, 16), tensor_cores=80),
    "delta_state_kernel": Promise(loads=(4, 16), stores=(4, 16), tensor_cores=80),
    "delta_norm_kernel": Promise(loads=(2, 16), stores=(2, 16)),
    "causal_conv_kernel": Promise(loads=(2, 16), stores=(16, 16)),
    "store_inputs_kernel": Promise(loads=(4, 16), stores=(16, 16)),
    "group_norm_kernel": Promise(loads=(16, 16), stores=(16, 16)),
    "activate_kernel": Promise(loads=(8, 8), stores=(8, 8)),
    "mix_streams_kernel": Promise(loads=(8, 8), stores=(8, 8)),
    # A stream's injection weight is one number.
    "write_streams_kernel": Promise(loads=(2, 8), stores=(8, 8)),
    # A row chooses a few experts.
    "route_kernel": Promise(loads=(2, 2), stores=(4, 4)),
    # Experts of 64 features are 2 a lane.
    "swiglu_kernel": Promise(loads=(4, 4), stores=(4, 4)),
    "combine_kernel": Promise(loads=(2, 16), stores=(8, 16)),
    "product_kernel": Promise(loads=(16, 16), stores=(16, 16), tensor_cores=80),
}


def promise_of(kernel: str) -> Promise:
    """The promise of a kernel.

    Raises:
        InputError: nobody wrote one.
    """
    if kernel not in PROMISES:
        raise InputError(f"{kernel} has no entry in PROMISES (promises.py): say what its code must show")
    return PROMISES[kernel]


@dataclass(frozen=True)
class Known:
    """A promise that launches are known to break.

    Attributes:
        kind: of the problem, as in :class:`~page4.experiments.sm70.check.Problem`.
        kernel, capability: whose code.
        where: values that the kernel's constants have where the promise is broken; a run-time argument has
            the value ``given``. All launches with them break it; one that does not is reported.
        reason: why it is so, and why it stays.
    """

    kind: str
    kernel: str
    capability: int
    reason: str
    where: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def covers(self, kernel: str, capability: int, constants: Mapping[str, Any]) -> bool:
        """Whether launches with these constants are known to break the promise."""
        return (kernel, capability) == (self.kernel, self.capability) and all(
            constants.get(name, GIVEN) in values for name, values in self.where.items()
        )


_PLAIN = "page4_attention_kernel"
_AMPERE = "page4_attention_ampere_kernel"
_HOPPER = "page4_attention_hopper_kernel"
_NO_TENSOR_CORES = "tl.dot becomes FFMA, whose operands do not fit into registers"
_SIXTY_FOUR = "accumulators of 64 members beside the decoded operands; 8 to 32 bytes a thread spill"
_GATE = "the gate of finished rows is loaded beside all accumulators; 16 bytes a thread spill, once"

KNOWN = (
    Known("spills", _PLAIN, 70, _NO_TENSOR_CORES, {"D": (256,), "BM": (64, 128)}),
    Known(
        "shared memory", _PLAIN, 70, "128 members of 256 dimensions cannot be launched at all",
        {"D": (256,), "BM": (128,)},
    ),
    Known(
        "spills", _PLAIN, 80, "accumulators of 128 members beside the decoding of bytes",
        {"D": (256,), "BM": (128,), "FORMAT": ("e4m3",)},
    ),
    Known("spills", _PLAIN, 80, _GATE, {"D": (256,), "BM": (32,), "SPLITS": (1,), "FORMAT": ("fp16",)}),
    Known("spills", _AMPERE, 80, _GATE, {"D": (256,), "BM": (32,), "SPLITS": (1,), "DECODE": (None,)}),
    Known("spills", _HOPPER, 90, _SIXTY_FOUR, {"D": (256,), "BM": (64,), "ROWS": (6, 7, 8)}),
    Known("spills", _HOPPER, 90, _SIXTY_FOUR, {"D": (256,), "BM": (64,), "DECODE": (None,)}),
)  # fmt: skip

"""What a study may change about the K and V of a sparse layer, between projections and attention.

Interventions take part in the reference layers alone; the Triton kernels refuse a cache that has any.
"""

from __future__ import annotations

import torch
from torch import Tensor

from page4.kernels.errors import InputError


class Intervention:
    """Changes nothing; subclasses override what they change.

    One object belongs to one layer of one cache. It sees the rows of a step as they are written and read, and
    a row again whenever it is written again, as rejected drafts are.
    """

    def stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What is encoded in place of K (after norm and RoPE) and V, ``[N, Hkv, D]`` each, of any float."""
        return k, v

    def queries(self, q: Tensor) -> Tensor:
        """The queries ``[N, Hq, D]`` to score what was stored, of any float."""
        return q

    def chosen(self, blocks: Tensor) -> Tensor:
        """The blocks to attend to in place of those chosen, bool ``[rows, blocks]``.

        Called for some of a step's rows at a time, in an order that depends on the step's shape alone.
        """
        return blocks

    def attended(self, out: Tensor) -> Tensor:
        """The layer's output ``[N, Hq, D]``, FP32, before its gate, of what attention over V gave."""
        return out


UNCHANGED = Intervention()
"""Of every layer of a cache that nothing intervenes in."""


class LinearStorage(Intervention):
    """Stores K and V in another basis and reads them back: exact but for what the format rounds.

    Formula, for KV head h and row vectors: ``k -> k A_h`` and ``q -> q A_h^-T`` keep every product
    ``q . k``; ``v -> v B_h`` and ``out -> out B_h^-1`` keep every sum of V. A scale per head is
    ``A_h = I / scale_h``, a rotation an orthonormal ``A_h``.

    Args:
        k, v: A and B, ``[Hkv, D, D]``; None leaves K (V) as it is.
    Raises:
        InputError: a matrix is not square, or singular.
    """

    def __init__(self, k: Tensor | None = None, v: Tensor | None = None) -> None:
        self._k, self._k_read = _pair(k)
        self._v, self._v_read = _pair(v)

    def stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """K and V in the stored basis, FP32."""
        return _per_head(k, self._k), _per_head(v, self._v)

    def queries(self, q: Tensor) -> Tensor:
        """Queries in the basis dual to K's, FP32."""
        return _per_head(q, None if self._k_read is None else self._k_read.mT)

    def attended(self, out: Tensor) -> Tensor:
        """Sums of V in the basis of the model."""
        return _per_head(out, self._v_read)


def hadamard(size: int) -> Tensor:
    """The orthonormal Sylvester-Hadamard matrix ``[size, size]``, FP64; it is its own inverse.

    Every component of a rotated vector is a sum of all components with signs, so none stands out.
    Source: Ashkboos et al., QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs (2024).

    Raises:
        InputError: the size is no power of two.
    """
    if size < 1 or size & (size - 1):
        raise InputError(f"a Hadamard rotation needs a dimension that is a power of two, got {size}")
    matrix = torch.ones(1, 1, dtype=torch.float64)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) * 0.5**0.5
    while len(matrix) < size:
        matrix = torch.kron(matrix, step)
    return matrix


def _pair(matrices: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Matrices and their inverses, inverted in FP64."""
    if matrices is None:
        return None, None
    if matrices.ndim != 3 or matrices.shape[1] != matrices.shape[2]:
        raise InputError(f"a basis needs matrices [Hkv, D, D], got {list(matrices.shape)}")
    inverses, info = torch.linalg.inv_ex(matrices.double())
    if bool(info.any()) or not bool(inverses.isfinite().all()):
        raise InputError("a basis needs invertible matrices, one is singular")
    return matrices.float(), inverses.float()


def _per_head(rows: Tensor, matrices: Tensor | None) -> Tensor:
    """``[N, H, D]`` times the matrix of each head's KV head; H is a multiple of Hkv."""
    if matrices is None:
        return rows
    heads = matrices.shape[0]
    grouped = rows.float().unflatten(1, (heads, -1))  # [N, Hkv, H / Hkv, D]
    return torch.einsum("nhgd,hde->nhge", grouped, matrices.to(rows.device)).flatten(1, 2)

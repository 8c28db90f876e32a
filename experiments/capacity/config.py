"""Configuration of the capacity study."""

from __future__ import annotations

from dataclasses import dataclass

from page4.experiments.capacity.geometry import PUBLIC
from page4.kernels.errors import InputError
from page4.kvcache import LayerFormats
from page4.kvcache.layer_formats import draft_format

GIB = 2**30


@dataclass(frozen=True)
class CapacityConfig:
    """What is counted.

    Attributes:
        geometry: ``qwen3.8-flash-next``, the public checkpoint, or a folder with a ``config.json``.
        formats: KV formats (target, draft); the first is what the others are compared with. A target's may
            differ by layer: "e4m3,3:fp16".
        tensor_parallel: degrees; all figures are of one rank, which has one GPU.
        contexts: tokens of a request, ascending; capacities are shown for the last.
        concurrency: requests that are open at once, ascending; capacities are shown for the last.
        num_draft_tokens: K.
        gpu_gib: memory of a GPU, GiB.
        reserved_gib: of that, for weights, workspaces and everything else that is no cache.
    """

    geometry: str = PUBLIC
    formats: tuple[tuple[str, str], ...] = (
        ("fp16", "fp16"),
        ("e4m3", "e4m3"),
        ("e4m3", "fp16"),
        ("int8", "int8"),
    )
    tensor_parallel: tuple[int, ...] = (1, 2, 4)
    contexts: tuple[int, ...] = (1024, 4096, 8192, 32768, 65536, 131072, 262144)
    concurrency: tuple[int, ...] = (1, 2, 4)
    num_draft_tokens: int = 3
    gpu_gib: float = 32.0
    reserved_gib: float = 20.0

    def __post_init__(self) -> None:
        for name in ("formats", "tensor_parallel", "contexts", "concurrency"):
            if not getattr(self, name) or len(set(getattr(self, name))) < len(getattr(self, name)):
                raise InputError(f"{name} must list at least one value, and none twice")
        for name in ("tensor_parallel", "contexts", "concurrency"):
            values = getattr(self, name)
            if min(values) < 1 or list(values) != sorted(values):
                raise InputError(f"{name} must be positive and ascending, got {list(values)}")
        for target, draft in self.formats:
            draft_format(LayerFormats(target), draft)
        if not 0 <= self.num_draft_tokens <= 64:
            raise InputError(f"num_draft_tokens must be 0 to 64, got {self.num_draft_tokens}")
        if not 0 <= self.reserved_gib < self.gpu_gib:
            raise InputError(
                f"reserved_gib must be at least 0 and below gpu_gib, {self.gpu_gib:g}, "
                f"got {self.reserved_gib:g}"
            )

    @property
    def budget(self) -> int:
        """Bytes for the cache on each GPU."""
        return round((self.gpu_gib - self.reserved_gib) * GIB)

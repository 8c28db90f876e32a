"""What `page4 generate` is asked for, and what it chooses where it is not told: formats and scales."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from page4.experiments.info import CHECKPOINT, OVERLAYS, overlay_folder
from page4.kernels.errors import InputError
from page4.kvcache import RECOMMENDED, KVFormat, KVScales, LayerFormats
from page4.kvcache.layer_formats import draft_format
from page4.kvcache.overlay_folder import formats_in, overlay_format
from page4.kvcache.prefix_cache import PrefixConfig
from page4.spec_decode import DecoderConfig, SamplingOptions


@dataclass(frozen=True)
class GenerateConfig:
    """How to continue a text. Formats and scales that are None are chosen by checkpoint, see `resolve`.

    Attributes:
        model: Folder of the checkpoint; the shipped one by default.
        device: auto takes a GPU when there is one.
        backend: `reference` or `triton`; by default what the device has.
        kv_format, draft_kv_format: of the target's and the draft's cache; the draft's is the target's by
            default. The target's may differ by layer: "e4m3,3:fp16" is fp16 in layer 3 and e4m3 elsewhere.
        scales: Static scales: calibrated from the "prompt", the "shipped" checkpoint's overlays, or others in
            a folder. Those of a short prompt may clip later tokens, whose K or V are larger than any in it.
        allow_unit_target_scales: With an overlay that has no target scales, take 1.0 for all of them.
        num_draft_tokens: K; 0 decodes without speculation.
        max_new_tokens: Tokens to emit at most.
        ignore_eos: Go on after the end-of-text token.
        prefill_chunk: Prompt tokens per step.
        prefix_cache: Folder that keeps the prompt's prefixes for the next run; what it knows is not computed
            again. With static scales they have to be an overlay's: a prompt's own change with it.
        folder_gib: Limit of that folder, GiB; what was used longest ago makes room.
        host_gib: Host memory that prefixes pass through on their way from and to the folder, GiB.
        temperature, top_k, top_p, min_p, seed, sample_drafts: See `SamplingOptions`; temperature 0 is greedy.
    """

    model: Path | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["reference", "triton"] | None = None
    kv_format: str | None = None
    draft_kv_format: str | None = None
    scales: Literal["prompt", "shipped"] | Path | None = None
    allow_unit_target_scales: bool = False
    num_draft_tokens: int = 3
    max_new_tokens: int = 128
    ignore_eos: bool = False
    prefill_chunk: int = 2048
    prefix_cache: Path | None = None
    folder_gib: float = PrefixConfig.folder_gib
    host_gib: float = 2.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample_drafts: bool = False

    def __post_init__(self) -> None:
        """Refuse what can be refused without the checkpoint."""
        self.sampling()
        DecoderConfig(
            self.kv_format or RECOMMENDED,
            self.draft_kv_format,
            num_draft_tokens=self.num_draft_tokens,
            prefill_chunk=self.prefill_chunk,
        )
        prefix = self.prefix(model="a checkpoint")
        if prefix is not None:
            prefix.check_chunk(self.prefill_chunk)
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {self.max_new_tokens}, expected at least 1")

    @property
    def target(self) -> LayerFormats:
        """The target's formats, of a resolved configuration."""
        assert self.kv_format is not None
        return LayerFormats(self.kv_format)

    @property
    def draft(self) -> KVFormat:
        """The draft's format, of a resolved configuration."""
        return draft_format(self.target, self.draft_kv_format)

    @property
    def static_formats(self) -> list[str]:
        """The names of the formats that need static scales, of a resolved configuration."""
        used = dict.fromkeys([*self.target.distinct, self.draft])
        return [kv_format.name for kv_format in used if kv_format.needs_scale]

    def resolve(self) -> GenerateConfig:
        """The same configuration with formats and scales chosen: what is run.

        Without a format, it is the one that the overlay of `scales` is made for, of several overlays the
        recommended one. Without scales either, it is the recommended one for the shipped checkpoint, and fp16
        for another, whose scales would have to come from the prompt. Without scales, they are those shipped
        for the shipped checkpoint, if there are some for all formats in use, else the prompt's.

        Raises:
            InputError: `scales` names no overlay, or prefixes are to be kept with scales of the prompt.
        """
        shipped = (self.model or CHECKPOINT).resolve() == CHECKPOINT.resolve()
        chosen = replace(self, kv_format=self.kv_format or self._default_format(shipped))
        if chosen.scales is None:
            chosen = replace(chosen, scales="shipped" if shipped and chosen._ships() else "prompt")
        if chosen.prefix_cache is not None and chosen.scales == "prompt" and chosen.static_formats:
            raise InputError(
                f"a prefix cache in {chosen.static_formats[0]} needs scales that are the same for all "
                f"prompts: {chosen._same_scales(shipped)}"
            )
        return chosen

    def _default_format(self, shipped: bool) -> str:
        if self.scales is None:
            return RECOMMENDED if shipped else "fp16"
        return RECOMMENDED if self.scales == "prompt" else overlay_format(overlay_folder(self.scales))

    @property
    def _computed_formats(self) -> list[str]:
        """The names of the formats that compute scales as they write, which excludes overlays."""
        return [used.name for used in (*self.target.distinct, self.draft) if used.has_token_scales]

    def _ships(self) -> bool:
        """Whether scales are needed, the shipped overlays have them all, and no int8 refuses them."""
        needed = set(self.static_formats)
        return bool(needed) and not self._computed_formats and needed <= set(formats_in(OVERLAYS))

    def _same_scales(self, shipped: bool) -> str:
        """What to change in order to get scales that do not depend on the prompt."""
        static = " and ".join(self.static_formats)
        if self._computed_formats:
            computed = self._computed_formats[0]
            return (
                f"no overlay can be used beside {computed}, so take {computed} or fp16 in place of {static}"
            )
        if shipped and self._ships():
            return "use --scales shipped or those of another overlay"
        return f"use --scales DIR, an overlay that `page4 scales materialise` made for {static}"

    def sampling(self) -> SamplingOptions:
        """The options of the request."""
        return SamplingOptions(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            sample_drafts=self.sample_drafts,
        )

    def decoder(
        self, prompt_length: int, scales: KVScales | None, prefix: PrefixConfig | None = None
    ) -> DecoderConfig:
        """A decoder for this one request, of a resolved configuration."""
        return DecoderConfig(
            kv_format=self.target.text,
            draft_kv_format=self.draft_kv_format,
            scales=scales,
            num_draft_tokens=self.num_draft_tokens,
            prefill_chunk=self.prefill_chunk,
            max_length=prompt_length + max(1, self.max_new_tokens),
            prefix=prefix,
        )

    def prefix(self, model: str) -> PrefixConfig | None:
        """What is kept of the prompt for later runs with the same model."""
        if self.prefix_cache is None:
            return None
        interval = self.prefill_chunk * max(1, PrefixConfig().interval // self.prefill_chunk)
        return PrefixConfig(
            interval,
            host_gib=self.host_gib,
            folder=self.prefix_cache,
            folder_gib=self.folder_gib,
            model=model,
        )

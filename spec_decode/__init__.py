"""Speculative decoding: requests, drafting, verification, generation, the acceptance round, calibration."""

from .calibration import calibrate_scales
from .engine import DecoderConfig, SpeculativeDecoder
from .generation import Generation, GenerationStats, generate
from .metrics import acceptance_by_position, mean_acceptance, repeated_ngrams, tokens_per_step
from .request import Phase, Request
from .rounds import RoundResult, measure_rounds

__all__ = [
    "DecoderConfig",
    "Generation",
    "GenerationStats",
    "Phase",
    "Request",
    "RoundResult",
    "SpeculativeDecoder",
    "acceptance_by_position",
    "calibrate_scales",
    "generate",
    "mean_acceptance",
    "measure_rounds",
    "repeated_ngrams",
    "tokens_per_step",
]

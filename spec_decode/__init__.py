"""Speculative decoding: requests, decode steps, serving, generation, the acceptance round, calibration."""

from .calibration import KVObservation, KVObserver, calibrate_scales, observe_texts
from .engine import DecoderConfig, SpeculativeDecoder
from .generation import Generation, generate
from .metrics import acceptance_by_position, mean_acceptance, repeated_ngrams, tokens_per_step
from .request import Phase, Request
from .rounds import RoundResult, measure_rounds
from .sampling import GREEDY, SamplingOptions
from .served import Served, ServingStats
from .serving import Server

__all__ = [
    "GREEDY",
    "DecoderConfig",
    "Generation",
    "KVObservation",
    "KVObserver",
    "Phase",
    "Request",
    "RoundResult",
    "SamplingOptions",
    "Served",
    "Server",
    "ServingStats",
    "SpeculativeDecoder",
    "acceptance_by_position",
    "calibrate_scales",
    "generate",
    "mean_acceptance",
    "measure_rounds",
    "observe_texts",
    "repeated_ngrams",
    "tokens_per_step",
]

"""Measures of a model: loss by position, answers by length and depth, forget gates and pruning."""

from attnzoo.evaluation.answers import Answers, Guess, measure_answers, measure_guess
from attnzoo.evaluation.context import EffectiveContext, measure_context
from attnzoo.evaluation.gates import GateMap, PruneMap, decay_matrix, gate_maps, prune_maps
from attnzoo.evaluation.lengths import LengthCurve, growing_lengths, measure_lengths
from attnzoo.evaluation.losses import (
    Array,
    LossCurve,
    mean_and_error,
    measure_losses,
    moving_mean,
    perplexity_over_lengths,
    token_losses,
)
from attnzoo.evaluation.maps import AttentionMaps, LayerMap, measure_maps
from attnzoo.evaluation.needle import NeedlePicture, measure_needle, synthetic_needle, text_needle
from attnzoo.evaluation.pruning import (
    EpsRow,
    EpsSweep,
    PrunedShares,
    default_epsilons,
    heads_kept,
    measure_pruning,
    pruning,
    sweep_eps,
)

__all__ = [
    "Answers", "Array", "AttentionMaps", "EffectiveContext", "EpsRow", "EpsSweep", "GateMap", "Guess", "LayerMap",
    "LengthCurve", "LossCurve", "NeedlePicture", "PruneMap", "PrunedShares", "decay_matrix", "default_epsilons",
    "gate_maps", "growing_lengths", "heads_kept", "mean_and_error", "measure_answers", "measure_context",
    "measure_guess", "measure_lengths", "measure_losses", "measure_maps", "measure_needle", "measure_pruning",
    "moving_mean", "perplexity_over_lengths", "prune_maps", "pruning", "sweep_eps", "synthetic_needle", "text_needle",
    "token_losses",
]  # fmt: skip

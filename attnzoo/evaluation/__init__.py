"""What a model is measured by: loss by position, answers by length and depth, forget gates and what they prune."""

from attnzoo.evaluation.answers import Answers, measure_answers
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
from attnzoo.evaluation.needle import NeedlePicture, measure_needle, synthetic_needle, text_needle

__all__ = [
    "Answers",
    "Array",
    "GateMap",
    "LengthCurve",
    "LossCurve",
    "NeedlePicture",
    "PruneMap",
    "decay_matrix",
    "gate_maps",
    "growing_lengths",
    "mean_and_error",
    "measure_answers",
    "measure_lengths",
    "measure_losses",
    "measure_needle",
    "moving_mean",
    "perplexity_over_lengths",
    "prune_maps",
    "synthetic_needle",
    "text_needle",
    "token_losses",
]

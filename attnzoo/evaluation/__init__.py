"""What a trained model is measured by: loss per token index, perplexity over lengths, forget-gate matrices."""

from attnzoo.evaluation.gates import GateMap, PruneMap, decay_matrix, gate_maps, prune_maps
from attnzoo.evaluation.losses import Array, mean_and_error, moving_mean, perplexity_over_lengths, token_losses

__all__ = [
    "Array",
    "GateMap",
    "PruneMap",
    "decay_matrix",
    "gate_maps",
    "mean_and_error",
    "moving_mean",
    "perplexity_over_lengths",
    "prune_maps",
    "token_losses",
]

"""Training on Hugging Face accelerate: one call, which also resumes what was interrupted."""

from attnzoo.training.checkpoint import CheckpointError, load_run, newest_checkpoint
from attnzoo.training.loop import train
from attnzoo.training.metrics import read_metrics

__all__ = ["CheckpointError", "load_run", "newest_checkpoint", "read_metrics", "train"]

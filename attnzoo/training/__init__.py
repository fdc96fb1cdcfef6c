"""Training on Hugging Face accelerate by one call, which also resumes an interrupted run."""

from typing import TYPE_CHECKING

from attnzoo.lazy import lazy

if TYPE_CHECKING:
    from attnzoo.training.checkpoint import CheckpointError, newest_checkpoint
    from attnzoo.training.extension import extend
    from attnzoo.training.folder import load_run
    from attnzoo.training.loop import check_run, train
    from attnzoo.training.metrics import read_metrics

__all__ = ["CheckpointError", "check_run", "extend", "load_run", "newest_checkpoint", "read_metrics", "train"]

__getattr__ = lazy(
    __name__,
    {
        "CheckpointError": "checkpoint",
        "check_run": "loop",
        "extend": "extension",
        "load_run": "folder",
        "newest_checkpoint": "checkpoint",
        "train": "loop",
        "read_metrics": "metrics",
    },
)

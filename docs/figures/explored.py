"""A panel of a page of `attnzoo explore`, as it draws it."""

from __future__ import annotations

from matplotlib.figure import Figure

from attnzoo import get
from attnzoo.experiments.explore import measures, pictures


def explored() -> Figure:
    """The eigenvalues of DeltaNet's transitions and of products of them."""
    return pictures.plane(measures.eigenvalues(get("deltanet"), 0))

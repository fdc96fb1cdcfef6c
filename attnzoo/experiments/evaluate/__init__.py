"""Evaluations by name of a run, a preset or a model folder, for `attnzoo evaluate`."""

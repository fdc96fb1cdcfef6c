"""Softmax attention over levels of keys, shared by PaTH and Wall."""

"""Comparisons of variants, experiments about claims, the reports about both, and the built-in configurations."""

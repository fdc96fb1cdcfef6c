"""Comparisons of variants, the reports about them, and the built-in configurations."""

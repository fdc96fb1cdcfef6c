"""A model served over HTTP, by our engine or by vLLM."""

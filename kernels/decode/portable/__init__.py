"""Steps over pages on any GPU from compute capability 8.0 on."""

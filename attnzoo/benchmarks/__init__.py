"""Speed and memory of the kernels and forms on your machine, beside whatever peers are installed."""

"""Generation for many sequences at once: the engine, its batch, requests, sampling and proposed tokens."""

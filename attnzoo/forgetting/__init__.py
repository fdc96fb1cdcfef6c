"""One-Pass Forgetting: its rules, the network's target, and caches of limited size."""

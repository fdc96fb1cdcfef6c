"""Keys and values in pages that sequences of any length share: kept, evicted, offloaded, stepped in place."""

"""Memory of a form between calls: states, keys in storage, and memory that steps write in place."""

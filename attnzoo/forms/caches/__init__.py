"""What a form remembers between calls: states, keys in storage, and memory that steps are written into."""

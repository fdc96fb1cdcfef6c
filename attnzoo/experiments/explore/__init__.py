"""A page about one pair: its equations, its laws, and pictures of both readings of its gate."""

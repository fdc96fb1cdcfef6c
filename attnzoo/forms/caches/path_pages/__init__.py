"""Keys of PaTH in pages: every transition since a key carries it along."""

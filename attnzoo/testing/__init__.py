"""What the tests of a variant draw and compare with."""

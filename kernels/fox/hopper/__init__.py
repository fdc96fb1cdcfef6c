"""FoX on Hopper, in Gluon."""

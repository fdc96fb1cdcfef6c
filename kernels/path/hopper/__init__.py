"""PaTH on Hopper, in Gluon."""

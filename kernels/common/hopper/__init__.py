"""What the kernel families share on Hopper, in Gluon."""

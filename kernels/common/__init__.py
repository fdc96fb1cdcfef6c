"""What FoX and PaTH share: checks, gate sums, pruning, tiles, and the pieces that their kernels are made of."""

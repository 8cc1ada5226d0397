"""Plans as values: which device computes which part of each layer, and the resulting steps and device programs."""

"""Define plans (which device computes which part of each layer), and derive steps and device programs from them."""

"""Run a plan on one device: forward, backward, messages, gradient sums and reshards."""

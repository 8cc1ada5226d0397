"""Predicts the computation, traffic and memory of one training step before it runs. Contains only values and pure functions."""

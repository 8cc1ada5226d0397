"""Predicts one step before it runs: compute, traffic, memory, energy, and a replay of events. Values and pure functions."""

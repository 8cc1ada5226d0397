"""What a step costs before it runs: compute, traffic, memory, energy. Values and pure functions, in SI units."""

"""Measures the devices of a job: their layers, the links between them, and the other costs of a step."""

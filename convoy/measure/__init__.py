"""Measures the devices of a job: their layers, the links between them, what a step costs beside both."""

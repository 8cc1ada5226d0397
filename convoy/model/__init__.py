"""Describes a model as a graph of layers, traces an nn.Module into this graph, and builds networks by name."""

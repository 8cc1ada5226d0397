"""The model as a graph of layers, its tracing from an nn.Module, and networks by name."""

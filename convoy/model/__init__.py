"""The model as a graph of layers, how it is traced from an nn.Module, and networks by name."""

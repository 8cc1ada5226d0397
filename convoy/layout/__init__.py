"""Describe the layout of a tensor on the devices, and the transfers that move it to another layout."""

"""The settings of a training: the one list of them, run files, and values as people write them."""

"""The settings of a training: their list, run files, and parsers of user input."""

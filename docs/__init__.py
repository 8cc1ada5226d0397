"""Convoy's documentation: pages, and what is generated from the code while they are built."""

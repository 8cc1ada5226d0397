"""Showing it: tables, progress, figures."""

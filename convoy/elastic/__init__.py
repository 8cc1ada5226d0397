"""Elastic training: devices are lost, leave and join while a job trains, and no number changes."""

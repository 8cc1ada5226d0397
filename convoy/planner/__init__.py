"""Finds the plan with the shortest predicted step that fits the devices' memory."""

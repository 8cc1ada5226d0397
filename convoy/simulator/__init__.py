"""Plays one step on devices and links that exist only as numbers: when each computes, sends and receives."""

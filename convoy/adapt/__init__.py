"""Decides from step times which plan and which shares to train with next: pure state machines."""

"""The log of a run: one line of JSON per event, written while it trains and read by the reports."""

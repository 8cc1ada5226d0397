"""Studies of hypothetical fleets: step time, speedup and energy of the named plans at any size.

`sweep.py` prices thousands of points at once by closed forms (`terms.py`, `closed_form.py`); `fleets.py` replays unequal
devices step by step; `published.py` sets the model beside the figures that the works report; `figures.py` draws.
"""

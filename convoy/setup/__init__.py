"""`convoy fleet setup`: brings the hosts of a fleet to the state of this machine."""

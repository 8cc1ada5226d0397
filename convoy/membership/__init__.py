"""Which devices belong to a job while some are lost: pure values and decisions. Effects are in `comm` and `train`."""

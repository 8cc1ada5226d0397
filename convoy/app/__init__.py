"""What the verbs of the command line do, from settings to results: train, plan, measure, simulate."""

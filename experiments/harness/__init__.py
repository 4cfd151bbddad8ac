"""What all experiments share: one main, many runs, records of them, plots, and verdicts."""

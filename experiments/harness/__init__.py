"""What experiments share: their command line, data and trainings, and records and verdicts."""

"""fedsim."""

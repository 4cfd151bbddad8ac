"""The command line, `fedsim COMMAND`; `main` is its entry point."""

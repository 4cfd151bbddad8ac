"""`python -m fedsim.cli`: the same as the command `fedsim`."""

from fedsim.cli.main import main

if __name__ == "__main__":
    main()

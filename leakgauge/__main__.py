"""`python -m leakgauge` is the command `leakgauge`."""

from leakgauge.harness.cli.app import main

if __name__ == "__main__":
    main()

"""`python -m leakgauge` runs the command `leakgauge`."""

from leakgauge.harness.cli.main import main

if __name__ == "__main__":
    main()

"""`python -m leakgauge` runs the command `leakgauge`."""

from leakgauge.harness.core.search_path import leave_working_folder

leave_working_folder()  # before other imports, which would find a stranger's modules
from leakgauge.harness.cli.main import main  # noqa: E402

if __name__ == "__main__":
    main()

"""Keeps the working folder out of the import path of the command, and of processes that we start.

Imports nothing that Python has not loaded by itself: the first import of another module could run a stranger's file.
"""

import os
import sys


def variables() -> dict[str, str]:
    """Environment variables for a Python process that must not find modules in its working folder.

    Python searches the working folder first for `-c` and `-m`, and wherever PYTHONPATH has an empty entry.
    """
    named = [os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(named)}


def leave_working_folder() -> None:
    """Search no modules in the working folder, in this process and in those that it starts; for the command only.

    The folder stays if PYTHONPATH names it, or if this leakgauge is found only there, as in a checkout.
    """
    if sys.flags.ignore_environment and not sys.flags.safe_path:  # `python -E` hands no variable on, but -P
        os.execv(sys.executable, [sys.executable, "-P", *sys.orig_argv[1:]])
    os.environ.update(variables())
    if any(_is_here(folder) for folder in os.environ["PYTHONPATH"].split(os.pathsep) if folder):
        return
    library, before = os.path.dirname(os.__file__), sys.path[:]
    first = sys.path.index(library) if library in sys.path else len(sys.path)  # site-packages come later
    sys.path[:first] = [folder for folder in sys.path[:first] if not _is_here(folder)]
    specs = [spec for finder in sys.meta_path if (spec := finder.find_spec("leakgauge", None)) is not None]
    if not specs or not os.path.samefile(str(specs[0].origin), str(sys.modules["leakgauge"].__file__)):
        sys.path[:] = before
        os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), *filter(None, [os.environ["PYTHONPATH"]])])


def _is_here(folder: str) -> bool:
    return os.path.exists(folder or ".") and os.path.samefile(folder or ".", ".")

"""What a terminal shows of a run, as text."""

import io

from rich.console import Console

from leakgauge.reports.text.tables import printed


def plain(run, *, width=100, details=False):
    """The text of `printed`, with no line longer than `width`."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(printed(run, width, details=details))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"

"""The functions for scripts and notebooks: run a study as the command does, and show its report."""

from __future__ import annotations

import html
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from leakgauge.harness.core.result import Run
from leakgauge.harness.study.study import Study, load_study


def run(
    study: Study | str | Path,
    folder: str | Path,
    *,
    data: Path | None = None,
    workers: int | None = None,
    engine: str = "workers",
    address: str | None = None,
    device: str = "cpu",
    progress: bool = True,
    allow_code: bool = False,
    merge: bool = False,
    reuse: bool = False,
    cell_timeout: float | None = None,
    cell_memory: int | None = None,
) -> Run:
    """Run the unfinished cells of a study, write `folder/report.html`, and return all results.

    In a script, call it under `if __name__ == "__main__":`, because workers import the script again.

    Args:
        study: a study, the path of a TOML file, or the name of a shipped study.
        folder: folder of the results; the same call resumes.
        data: folder of the data sets; default `LEAKGAUGE_DATA`, or `~/.cache/leakgauge`.
        workers: worker processes; default one per core; 0: work in this process.
        engine: `workers` of this machine, `ray`, or the name of an engine of your own (see `study.engine`).
        address: HOST:PORT of a Ray cluster; default a private Ray of this machine.
        device: where clients train and attacks compute, `cpu` or `cuda`.
        allow_code: whether a TOML file may name code to import, as in `module:Class`; a `Study` object always may.
        progress: show progress: live in a terminal and in a notebook, else one line for each finished job.
        merge: keep the cells of other studies in the folder; without this, such a folder is refused.
        reuse: keep the results that other code made; without this, they are set aside and run again.
        cell_timeout, cell_memory: limits in seconds and megabytes; a training or an attack that exceeds one fails.

    Raises:
        StudyError: the study is invalid, or a data set is missing or does not fit a model; one line for each problem.
        UnknownNameError: `study` is neither a file nor a shipped study.
        StoreError: the folder cannot be written, or another process writes to it.
        Interrupted: Ctrl-C, SIGTERM or SIGHUP; finished results are kept.
    """
    from leakgauge.harness.cli.progress import listener, logged
    from leakgauge.harness.study.engine import open_engine
    from leakgauge.harness.study.run import run_study
    from leakgauge.harness.study.schedule import Limits
    from leakgauge.harness.study.store import write_atomically

    loaded = study if isinstance(study, Study) else load_study(study, allow_code=allow_code)
    with listener(loaded.name) if progress else nullcontext() as listen:
        results = run_study(
            loaded,
            folder,
            data=data,
            workers=workers,
            device=device,
            listen=listen and logged(listen, Path(folder)),
            merge=merge,
            reuse=reuse,
            limits=Limits(cell_timeout, cell_memory),
            engine=open_engine(engine, address, workers, allow_code=allow_code),
        )
    write_atomically(Path(folder) / "report.html", report(results).html.encode())
    return results


@dataclass(frozen=True, repr=False)
class Page:
    """A report, shown inline by a notebook. `html`: the whole page, which loads no other files."""

    name: str
    html: str

    def __repr__(self) -> str:
        return f"<Page of {self.name!r}: {len(self.html):,} characters of HTML>"

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{html.escape(self.html)}" style="width:100%;height:800px;border:0"></iframe>'


def report(run: Run) -> Page:
    """The HTML report of a run: the page that `leakgauge report` writes."""
    from leakgauge.reports.html import render

    return Page(run.name, render(run))

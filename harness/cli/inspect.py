"""`leakgauge.inspect` and the command `inspect`: attacks on given or recorded messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from leakgauge.harness.cli import options as cli
from leakgauge.harness.cli.report import DetailsOption, ImagesOption, publish
from leakgauge.harness.core.sinks import say

if TYPE_CHECKING:
    from torch import Tensor, nn

    from leakgauge.harness.core.result import Run
    from leakgauge.harness.integrations.synthetic import Part


def inspect(
    model: nn.Module | str,
    data: object,
    messages: Sequence[object] | None = None,
    *,
    folder: str | Path,
    records: Sequence[Sequence[int]] | None = None,
    train_step: Callable[[nn.Module, Tensor, Tensor], object] | None = None,
    sends: Literal["gradient", "update"] = "gradient",
    lr: float = 0.1,
    steps: int = 1,
    batch: int = 1,
    momentum: float = 0.0,
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd",
    weight_decay: float = 0.0,
    proximal: float = 0.0,
    victims: int | None = None,
    defense: Part | None = None,
    attacks: Sequence[Part] | None = None,
    threats: Sequence[str] = ("server",),
    auxiliary: object = None,
    classes: int | None = None,
    loss: object = None,
    limit: bool | None = None,
    minutes: float = 7.0,
    audit: int = 0,
    seed: int = 0,
    public: bool = False,
    root: Path | None = None,
    workers: int = 0,
    progress: bool = True,
) -> Run:
    """Attack gradients or updates, write `folder/report.html` with floor, limit and attacks, and return the results.

    The messages are written to `folder/recording` first. The same call resumes; a call with other messages is refused.

    Args:
        model: with the weights it has before the messages; or the name of a shipped model, with fresh weights.
        data: a torch `Dataset` or `DataLoader`, an iterator or a list of items (x, y) or of batches, arrays (x, y), a
            pair (train, test) of any of these, (x, y, x_test, y_test), a `DataSet`, or a name such as `digits`. Without
            a test part, the attacker gets half of the records that are behind no message.
        messages: gradients or updates (trained minus initial weights), one per victim: a flat tensor, a list of
            tensors in the order of `model.parameters()`, a dictionary by name, with or without the running statistics
            of batch norms and prefixes such as `module.`, or bytes that the defense made.
        records: for each message, the rows of `data` (of its training part) behind it; without rows, reconstructions
            cannot be scored, and probes are attacked instead.
        train_step: called as `train_step(model, x, y)` for each victim on a copy of the model, with `batch` records;
            returns what `messages` holds, or None if it trained the model in place, which needs `sends="update"`.
            With neither `messages` nor `train_step`, leakgauge's own client trains.
        sends, lr, steps, momentum: `gradient`, or `update` after `steps` full-batch steps of local SGD.
        optimizer, weight_decay, proximal: of these steps; `proximal` is the mu of FedProx.
        batch: records of each victim.
        victims: how many are drawn from the data; default 8, or fewer if attacks on all would take too long.
        defense: encodes the messages: a name, a table such as `{"name": "gaussian", "epsilon": 8.0}`, or an object;
            default: no defense.
        attacks: given like the defense; default: the floor, and those of `map`, `idlg`, `analytic` and
            `label-restoration` that fit.
        threats: adversaries; see `harness.core.threats`.
        auxiliary: the attacker's data, of the same kind.
        classes: number of classes, if some have no record; default: the network's outputs, or as the data say. 0: the
            labels are numbers, and the loss is squared.
        loss: what clients minimize: a name with its options (`learn.losses.parse`), a loss of torch, or a function of
            scores [b, k] and labels [b] that returns the mean over the batch; default: softmax cross-entropy for
            classes, binary cross-entropy for two classes and one output, squared loss for numbers.
        limit: compare with the best that any attack could do; default: if it does not take too long.
        minutes: time limit for all default attacks together; the report states what is cut short.
        audit: trials for each input of an audit of the defense; 0: no audit.
        public: the report may show the records.
        root: folder of the data sets; default `LEAKGAUGE_DATA`, or `~/.cache/leakgauge`.
        workers: worker processes, which do not have this process's objects; 0: work in this process.
        progress: show progress.

    Raises:
        ValueError, LookupError: model, data, messages, defense and attacks do not fit each other; the error is one
            line.
        StoreError: the folder cannot be written, or another process writes to it.

    Example:
        >>> import torch, leakgauge
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> run = leakgauge.inspect(model, "digits", folder="results", minutes=0.5)  # doctest: +SKIP
    """
    from leakgauge.harness.cli.python import run
    from leakgauge.harness.core.cell import PartSpec
    from leakgauge.harness.core.checks import listed, numbers, path_of, plain, positive
    from leakgauge.harness.data import default_root
    from leakgauge.harness.integrations import inspect as own
    from leakgauge.harness.integrations.synthetic import How, Sources, part_spec, record

    numbers((int, float), minutes=minutes)
    numbers((int,), workers=workers)
    positive(minutes=minutes)
    folder, threats = path_of("folder", folder), listed("threats", threats, str)
    place = default_root() if root is None else path_of("root", root)
    how = How(*map(plain, (sends, lr, steps, batch, momentum, victims, seed, optimizer, weight_decay, proximal)))
    parts = PartSpec("none") if defense is None else part_spec("defense", defense)
    named = None if attacks is None else [part_spec("attack", attack) for attack in listed("attacks", attacks)]
    sent = None if messages is None else listed("messages", messages)
    source = Sources(sent, None if records is None else listed("records", records), train_step)
    task, recording = record(
        folder, model, data, auxiliary, source, how, parts, place, public=public, classes=classes, loss=loss
    )
    count = how.victims if messages is None else None
    asked = own.Asked(named, threats, limit, minutes, count, None, how.batch, audit, how.seed)
    study = own.study_of(task, recording, asked, place)
    for note in study.notes:
        say(note)
    made = run(study, folder, data=place, workers=workers, progress=progress)
    if not progress:
        say(*(flag.message for record in made.trainings.values() for flag in record.flags if flag.code == "misfit"))
    return made


def inspect_(
    folder: Annotated[Path, Argument(help="Folder of a recording.")],
    model: Annotated[str, Option(help="The model: a shipped one, torchvision:NAME or module:factory.")],
    data: Annotated[str, Option(help="Data of the same kind, as mnist; needed if the recording has no records.")] = "",
    loss: Annotated[str, Option(help="Loss of the clients, as binary-cross-entropy; default: the model's own.")] = "",
    out: Annotated[Path | None, Option("-o", "--out", help="Folder of the results; default: DIR/results.")] = None,
    attacks: Annotated[str, Option(help="As in map,idlg; default: the floor, and attacks within the time limit.")] = "",
    threat: Annotated[list[str] | None, Option(help="An adversary; repeatable; default: server.")] = None,
    number: Annotated[int | None, Option("--round", min=0, help="Attacked round; default: first with records.")] = None,
    victims: Annotated[int | None, Option(min=1, help="Number of victims; default: all, up to 8.")] = None,
    batch: Annotated[int, Option(min=1, help="Records of each victim, if probes are attacked.")] = 1,
    limit: Annotated[bool | None, Option("--limit/--no-limit", help="With the limit; default: if time allows.")] = None,
    minutes: Annotated[float, Option(min=0, help="Time limit in minutes for all default attacks together.")] = 7.0,
    audit: Annotated[int, Option(min=0, help="Trials for each input of an audit of the defense.")] = 0,
    seed: Annotated[int, Option(help="Seed of the attacks, if the recording has none.")] = 0,
    show: Annotated[bool, Option("--show-records", help="The records may appear in the report.")] = False,
    images: ImagesOption = "public",
    details: DetailsOption = False,
    root: Annotated[Path | None, Option("--root", help="Folder of the data sets.")] = None,
    workers: cli.WorkersOption = None,
    allow_code: cli.AllowCodeOption = False,
) -> None:
    """Attack the messages of a recorded training, print the table, and write the report."""
    from urllib.parse import quote

    from leakgauge.harness.cli.progress import listener, logged
    from leakgauge.harness.core.cell import TaskSpec
    from leakgauge.harness.core.code import RECORDING, code_allowed, import_from, named_code
    from leakgauge.harness.data import default_root
    from leakgauge.harness.federation.recording import read
    from leakgauge.harness.integrations import inspect as own
    from leakgauge.harness.integrations.synthetic import part_spec
    from leakgauge.harness.study.run import run_study

    place, results = root or default_root(), out or folder / "results"
    pairs = {"data": quote(data, safe=":/=,"), "public": "yes" if show else ""}
    query = "&".join(f"{key}={value}" for key, value in pairs.items() if value)
    with cli.bugs(results / "run.log"), cli.user_errors():
        if code_allowed(allow_code):
            import_from(Path.cwd())
        elif code := named_code(attacks.split(",")):
            raise cli.refusal(cli.USAGE, f"{code[0]!r} names code to import; pass --allow-code if you trust it")
        try:
            recording = read(folder)
            task = TaskSpec(f"{RECORDING}{folder}{'?' if query else ''}{query}", model, loss=loss)
            named = [part_spec("attack", attack) for attack in attacks.split(",")] if attacks else None
            asked = own.Asked(named, threat or ["server"], limit, minutes, victims, number, batch, audit, seed)
            study = own.study_of(task, recording, asked, place, allow_code=allow_code)
        except (LookupError, ValueError) as error:
            raise cli.refusal(cli.USAGE, *str(error).splitlines()) from error
        say(*study.notes)
        with listener(study.name) as listen:
            finished = run_study(study, results, data=place, workers=workers, listen=logged(listen, results))
        publish(finished, results, images, details=details)

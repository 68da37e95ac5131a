"""Makes a recording from a user's model, data and messages, or refuses them with a one-line error."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor, nn

from leakgauge.harness.core import rng
from leakgauge.harness.core.cell import PartSpec, Scalar, TaskSpec
from leakgauge.harness.core.checks import numbers, scalars, shown
from leakgauge.harness.core.code import RECORDING, named_function
from leakgauge.harness.core.contract import Attack, Defense, Examples, Sender
from leakgauge.harness.core.form import SERIES, Form, Vocabulary
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Layout, Vector
from leakgauge.harness.data import DataSet
from leakgauge.harness.data.arrays import Array, odd_ranges
from leakgauge.harness.data.given import FormOf, given, whole
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import make_plan, make_setting
from leakgauge.harness.federation.recording import Facts, Recorded, Recorder, Recording, read, spec_of_facts
from leakgauge.harness.federation.round import Client, Round, client_key
from leakgauge.harness.integrations.parts import name_of
from leakgauge.harness.learn import modules
from leakgauge.harness.learn.batch import Indices, Work, choose_engine, train_clients
from leakgauge.harness.learn.losses import text_of
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.learn.wrapped import plain_name
from leakgauge.harness.study.prepare import load_data, make_task
from leakgauge.harness.study.store import StoreError

Part = str | Mapping[str, Scalar] | Attack | Defense[Any, Any] | Callable[..., Any]
"""A defense or an attack: its name, a table of its name and parameters as in a study, or the object."""

_Load = Callable[[object], tuple[DataSet, bool]]

VICTIMS = 8
_NAME = "inspect"  # name of the model and the data that are registered in this process

_MOST_BYTES = 2**40


class How(NamedTuple):
    """What the victims send, after local SGD of `steps` steps on all `batch` records of a victim."""

    sends: Literal["gradient", "update"] = "gradient"
    lr: float = 0.1
    steps: int = 1
    batch: int = 1
    momentum: float = 0.0
    victims: int | None = None
    seed: int = 0
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    weight_decay: float = 0.0
    proximal: float = 0.0

    def facts(self, clients: int) -> Facts:
        """The public facts of a federation with this number of victims."""
        own = self.optimizer, self.weight_decay, self.proximal
        return Facts(clients, clients, self.sends, self.steps, None, 0, self.lr, self.momentum, 0, *own)


class Sources(NamedTuple):
    """The messages with the rows behind each, or the function that makes them; with neither, leakgauge's own client."""

    messages: Sequence[object] | None = None
    records: Sequence[Sequence[int]] | None = None
    train_step: TrainStep | None = None


class _Victims(NamedTuple):
    """The name of the data, the data, the rows of its training part behind each message (None: unknown), and the number
    of rows of each message in `sizes`.
    """

    name: str
    data: DataSet
    rows: list[Indices] | None
    sizes: list[int]

    def batches(self) -> list[Examples]:
        """The records of each victim."""
        x, y = self.data.train
        return [Examples(x[rows], y[rows]) for rows in self.rows or []]


def part_spec(kind: Literal["defense", "attack"], part: Part) -> PartSpec:
    """The name and all parameters of a defense or an attack.

    Raises:
        LookupError: no part has this name.
        ValueError: its parameters are wrong, or `part` is neither a name, a table, a defense, a function of an update
            nor an attack.
    """
    if isinstance(part, str | Mapping) or inspect.isroutine(part):
        stated: dict[Any, Any] = dict(part) if isinstance(part, Mapping) else {"name": part}
        if inspect.isroutine(stated.get("name")):
            stated["name"] = named_function(stated["name"])
        table = scalars(kind, stated)
        name = table.pop("name", None)
        if not isinstance(name, str):
            raise ValueError(f"expected a {kind} with its name, as in {{'name': ..., 'epsilon': 1.0}}, got {part}")
        return PartSpec(name, registry.build(kind, name, table).parameters())
    if not isinstance(part, Defense if kind == "defense" else Attack):
        raise ValueError(f"expected a {kind}: a name, a table or an object, got {type(part).__name__}")
    return PartSpec(name_of(part), part.parameters())


def record(
    folder: Path,
    model: nn.Module | str,
    data: object,
    auxiliary: object,
    source: Sources,
    how: How,
    defense: PartSpec,
    root: Path,
    *,
    public: bool = False,
    classes: int | None = None,
    loss: object = None,
) -> tuple[TaskSpec, Recording]:
    """Write the messages to `folder/recording`, register model and data here; returns the task and the recording.

    A recording of the same messages in the folder stays, so that an inspection can resume.

    Raises:
        ValueError, LookupError: model, data, messages or defense do not fit each other; one line.
        StoreError: the folder cannot be written.
    """
    _check(source, how)
    if classes is not None:
        numbers((int, np.integer), classes=classes)
    module = model if isinstance(model, nn.Module) else None
    named = model if isinstance(model, str) else modules.given(_NAME, model)
    if module is None and source.train_step is not None:
        raise ValueError(f"train_step needs the model as a torch.nn.Module, got a {type(model).__name__}")
    form_of = functools.partial(_form, module)
    load = functools.partial(_loaded, root=root, model=named, classes=classes, form_of=form_of)
    victims = _victims(data, auxiliary, source, how, root, load)
    text = text_of(loss) or _usual_loss(victims.data, named, classes)
    spec, federation = TaskSpec(victims.name, named, loss=text), spec_of_facts(how.facts(len(victims.sizes)), 1)
    vectors: Sequence[Vector | bytes] | None = None
    built = registry.build_defense(defense)
    task = make_task(spec, victims.data, federation).under(built.local)
    if source.messages is not None or source.train_step is not None:
        names = Names.of(task.layout, module)
        sent = source.messages if source.messages is not None else _made(source, module, victims, how, names)
        vectors, complete = flattened(sent, names)
        if names.statistics and not complete:
            if module is None:
                raise ValueError(
                    f"the messages lack the running statistics of {model!r}: give the model as a torch.nn.Module"
                )
            spec = dataclasses.replace(spec, model=modules.without_statistics(named))
            task = make_task(spec, victims.data, federation).under(built.local)
    params = task.init(Key(how.seed).child("training", "init"))
    new = folder / "recording.new"
    try:
        shutil.rmtree(new, ignore_errors=True)
        _write(new, task, params, victims, vectors, how, defense, built)
        kept = _kept(folder, new)
    except OSError as error:
        raise StoreError(f"cannot write to {folder}: {error.strerror or error}") from error
    options = f"?data={quote(victims.name, safe=':/=,')}" + ("&public=yes" if public else "")
    return dataclasses.replace(spec, data=f"{RECORDING}{kept.folder}{options}"), kept


def _check(source: Sources, how: How) -> None:
    victims = 0 if how.victims is None else how.victims
    numbers((int, np.integer), seed=how.seed, batch=how.batch, steps=how.steps, victims=victims)
    numbers((int, float, np.number), lr=how.lr, momentum=how.momentum)
    numbers((int, float, np.number), weight_decay=how.weight_decay, proximal=how.proximal)
    if source.messages is not None and source.train_step is not None:
        raise ValueError("expected messages or train_step, got both")
    if source.records is not None and source.messages is None:
        raise ValueError("expected messages together with records, the rows behind each message")
    if source.messages is not None and how.victims is not None:
        raise ValueError("expected no victims together with messages: each message is a victim")
    if source.messages is not None and not source.messages:
        raise ValueError("expected at least one message, got none")
    if how.sends not in ("gradient", "update"):
        raise ValueError(f"expected sends='gradient' or 'update', got {how.sends!r}")
    if how.batch < 1 or (how.victims is not None and how.victims < 1):
        raise ValueError(f"expected batch and victims >= 1, got batch={how.batch} and victims={how.victims}")
    if how.sends == "gradient" and how.steps != 1:
        raise ValueError(f"expected steps=1 with sends='gradient', got steps={how.steps}: say sends='update'")


def _victims(data: object, auxiliary: object, source: Sources, how: How, root: Path, load: _Load) -> _Victims:
    """The data as a study names them, and the rows behind each message.

    Data without a test part are split: the victims' records and half of the other records, from which candidate sets
    are drawn, are for training; the other half belongs to the attacker.
    """
    loaded, has_test = load(data)
    count, key = len(loaded.train.y), Key(how.seed).child("inspect")
    rows = _rows(source, how, count, key)
    sizes = [len(each) for each in rows] if rows is not None else [how.batch] * len(source.messages or ())
    if auxiliary is not None:
        try:
            test = _read(auxiliary, root, lambda x: loaded.stated)[0].like(loaded)
        except ValueError as error:
            raise ValueError(f"auxiliary: {error}") from error
        odd = odd_ranges(*[[part.x.numpy() for part in (loaded.train, test)]] * 2)
        named = given(_NAME, dataclasses.replace(loaded, test=test, note="; ".join(filter(None, (loaded.note, odd)))))
    elif has_test:
        named = data if isinstance(data, str) and load_data(data, root) is loaded else given(_NAME, loaded)
    else:
        taken = np.unique(np.concatenate(rows)) if rows else np.empty(0, np.int64)
        rest = np.setdiff1d(np.arange(count), taken)
        if len(rest) < 4:
            text = f"expected 4 or more records outside all messages, as data of the attacker, got {len(rest)}"
            raise ValueError(f"{text}: give more data, or auxiliary=")
        rest = rest[rng.permutation(key.child("rest"), len(rest))]
        inside, outside = np.sort(np.concatenate([taken, rest[: len(rest) // 2]])), np.sort(rest[len(rest) // 2 :])
        rows = None if rows is None else [np.searchsorted(inside, each) for each in rows]
        train, test = (Examples(loaded.train.x[half], loaded.train.y[half]) for half in (inside, outside))
        named = given(_NAME, dataclasses.replace(loaded, train=train, test=test))
    load_data.cache_clear()
    return _Victims(named, load_data(named, root), rows, sizes)


def _rows(source: Sources, how: How, count: int, key: Key) -> list[Indices] | None:
    """The rows behind each message, given or drawn; None: unknown."""
    if source.messages is None:
        victims = VICTIMS if how.victims is None else how.victims
        if victims * how.batch > count:
            raise ValueError(f"expected at least {victims} x {how.batch} records, got {count}: ask for fewer victims")
        drawn = rng.permutation(key.child("victims"), count)[: victims * how.batch]
        return list(drawn.reshape(victims, how.batch))
    if source.records is None:
        return None
    if len(source.records) != len(source.messages):
        raise ValueError(f"expected records for each of {len(source.messages)} messages, got {len(source.records)}")
    return [_different(number, each, count) for number, each in enumerate(source.records)]


def _different(number: int, rows: object, count: int) -> Indices:
    """The different rows behind a message."""
    try:
        each = np.atleast_1d(np.asarray(rows))
    except (TypeError, ValueError, RuntimeError):
        each = np.empty(0)
    fits = each.ndim == 1 and each.size and each.dtype.kind in "iu" and 0 <= each.min() <= each.max() < count
    if not fits or len(np.unique(each)) < len(each):
        text = f"expected different rows from 0 to {count - 1}, got {shown(rows)}"
        raise ValueError(f"records of message {number}: {text}")
    return each.astype(np.int64)


def _loaded(data: object, root: Path, model: str, classes: int | None, form_of: FormOf) -> tuple[DataSet, bool]:
    """The data with the classes of the model, and whether they have a test part; else all records are for training.

    classes: as stated; None: as many as the outputs of a given network; 0: labels are numbers, for squared loss.
    """
    found, has_test = _read(data, root, form_of)
    width = modules.width(model, found.input_shape, found.form)
    if width == 1 and found.classes:
        if len(found.classes) == 2:
            return found, has_test
        text = f"expected two classes, or numbers, for a network with one output, got {len(found.classes)} classes"
        raise ValueError(f"{text}; give numbers as floats")
    if classes and width and width != classes:
        raise ValueError(f"expected classes={width}, the number of the network's outputs, got classes={classes}")
    several = found.train.y.ndim == 2
    count = classes if classes is not None else 0 if several else width if found.classes or width > 1 else 0
    return (found.with_classes(count) if count else found), has_test


def _usual_loss(loaded: DataSet, model: str, classes: int | None) -> str:
    """`binary-cross-entropy` for floats 0 and 1 and one output; empty: the model's own."""
    values: list[float] = []
    if not loaded.classes and classes != 0 and loaded.train.y.ndim == 1:
        values = torch.unique(loaded.train.y).tolist()
    if len(values) != 2 or modules.width(model, loaded.input_shape, loaded.form) != 1:
        return ""
    if values != [0.0, 1.0]:
        text = f"expected 0 and 1 as the labels of two classes, got {values[0]:g} and {values[1]:g}"
        raise ValueError(f"{text}; if they are numbers, state loss='squared'")
    return "binary-cross-entropy"


def _read(data: object, root: Path, form_of: FormOf) -> tuple[DataSet, bool]:
    """The data as they are, and whether they have a test part."""
    if isinstance(data, str):
        return load_data(data, root), True
    load_data.cache_clear()
    has_test = whole(_NAME, data, form_of=form_of)
    return load_data(f"given:{_NAME}", root), has_test


def _form(module: nn.Module | None, x: Array) -> Form | Vocabulary | None:
    """What a network takes inputs for: whole numbers as token ids, if it looks them up; [n, a, b] as series or images.

    None: by the shape.
    """
    if module is None:
        return None
    looks_up = any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in module.modules())
    if looks_up and x.ndim == 2 and x.dtype.kind in "iu" and x.size:
        return Vocabulary(1 + int(x.max()))
    if x.ndim != 3 or x.dtype.kind not in "biuf" or _runs(module, (1, *x.shape[1:])):
        return None
    return SERIES if _runs(module, x.shape[1:]) else None


def _runs(module: nn.Module, shape: tuple[int, ...]) -> bool:
    try:
        with rng.global_generators(Key(0, ("form",))), torch.no_grad():
            copy.deepcopy(module).cpu()(torch.zeros(2, *shape))
    except (Exception, SystemExit):  # of a user's network
        return False
    return True


def _made(source: Sources, module: nn.Module | None, victims: _Victims, how: How, names: Names) -> list[object]:
    assert source.train_step is not None
    assert module is not None
    batches = [(victims.data.original(x), y) for x, y in victims.batches()]
    with rng.global_generators(Key(how.seed).child("inspect", "train_step")):
        return stepped(source.train_step, module, batches, how.sends, names)


def _write(
    folder: Path,
    task: ModelTask,
    params: Vector,
    victims: _Victims,
    sent: Sequence[Vector | bytes] | None,
    how: How,
    defense: PartSpec,
    built: Defense[Any, Any],
) -> None:
    """Write model and messages; updates go through the defense, messages in bytes are already encoded."""
    clients = len(victims.sizes)
    facts, key = how.facts(clients), Key(how.seed).child("training")
    sized = {k: Examples(torch.empty(size, 0), torch.empty(size)) for k, size in enumerate(victims.sizes)}
    federation = spec_of_facts(facts, 1)
    setting = make_setting(task, federation, sized, built.local)
    if built.superposes and sent is not None:
        raise ValueError(f"defense {defense.name!r} adds up all messages, so no single one arrives: leave them out")
    state = built.init(setting)
    keys = [client_key(key, 0, k) for k in range(clients)]
    if sent is None:
        plan = make_plan(federation, how.lr, built.local, built.step_noise(setting))
        work = [Work(batch, own.child("train")) for batch, own in zip(victims.batches(), keys, strict=True)]
        sent = list(train_clients(task, params, work, plan, choose_engine(task)).updates)
    with Recorder(folder, facts, task.layout, defense, most_bytes=_MOST_BYTES, seed=how.seed) as recorder:
        recorder.model(0, params, how.lr)
        for k, (wire, size) in enumerate(zip(sent, victims.sizes, strict=True) if not built.superposes else ()):
            if not isinstance(wire, bytes):
                client = Client.of(Sender(k, size), wire, built.remember(setting), keys[k])
                (wire,) = Round(built, setting, state).exchange([client], key.child("channel", k)).received
            rows = None if victims.rows is None else victims.rows[k]
            recorder.message(Recorded(0, k, size, wire, size, how.steps, rows))


def _kept(folder: Path, new: Path) -> Recording:
    """The recording in `folder`: the new one, or an equal one that is already there.

    Raises:
        ValueError: the folder holds a different recording.
    """
    place = folder / "recording"
    if not place.exists():
        new.rename(place)
        return read(place)
    before, now = read(place), read(new)
    shutil.rmtree(new)
    if before.digest != now.digest:
        raise ValueError(f"{folder} holds the inspection of another model or of other messages: name another folder")
    return before


TrainStep = Callable[[nn.Module, Tensor, Tensor], object]
"""(model, x, y) -> a message, or None if the function trains the model in place."""

_STATISTICS = ("running_mean", "running_var")


class Names(NamedTuple):
    """The tensors that messages may hold.

    Attributes:
        layout: of the flat vector.
        statistics: the tensors in the layout that are running statistics of batch norms.
        places: the names in the layout, by themselves and by `plain_name`.
        ignored: other tensors of the model, by `plain_name`; a state_dict may hold them, the vector does not.
    """

    layout: Layout
    statistics: frozenset[str]
    places: Mapping[str, str]
    ignored: frozenset[str] = frozenset()

    @classmethod
    def of(cls, layout: Layout, module: nn.Module | None) -> Names:
        """The names of a model."""
        statistics = frozenset(name for name in layout.names if name.rpartition(".")[2] in _STATISTICS)
        others = [] if module is None else [plain_name(name) for name in module.state_dict(keep_vars=False)]
        places = {plain_name(name): name for name in layout.names} | {name: name for name in layout.names}
        return cls(layout, statistics, places, frozenset(others) - places.keys())

    def of_layout(self, key: str) -> str:
        """The name in the layout of a tensor, whose own name may have prefixes of wrappers; empty: it has none."""
        return self.places.get(key, self.places.get(plain_name(key), ""))

    @property
    def parameters(self) -> Layout:
        """The layout without running statistics: the order of `model.parameters()`."""
        pairs = zip(self.layout.names, self.layout.shapes, strict=True)
        kept = [pair for pair in pairs if pair[0] not in self.statistics]
        return Layout(tuple(name for name, _ in kept), tuple(shape for _, shape in kept))


def flattened(messages: Sequence[object], names: Names) -> tuple[Sequence[Vector | bytes], bool]:
    """The messages as vectors [d], and whether they hold the running statistics of batch norms; bytes stay bytes.

    Raises:
        ValueError: a message does not fit the model; names the message and its first wrong tensor, expected and got.
    """
    if encoded := [message for message in messages if isinstance(message, bytes)]:
        if len(encoded) < len(messages):
            raise ValueError(
                f"expected bytes in all messages or in none, got them in {len(encoded)} of {len(messages)}"
            )
        return encoded, True
    flat = [_flat(message, names, f"message {number}") for number, message in enumerate(messages)]
    kinds = {complete for _, complete in flat}
    if len(kinds) > 1:
        raise ValueError("expected running statistics in all messages or in none: some have them")
    return [vector for vector, _ in flat], kinds == {True}


def _flat(message: object, names: Names, what: str) -> tuple[Vector, bool]:
    """One message, and whether it is complete."""
    if isinstance(message, np.ndarray):
        message = torch.from_numpy(message.astype(float)) if message.dtype.kind in "iuf" else message.tolist()
    if isinstance(message, Tensor):
        return _one_tensor(message, names, what)
    if isinstance(message, Mapping):
        layout, tensors = _by_name(message, names, what)
    elif isinstance(message, list | tuple):
        layout = names.layout if len(message) == len(names.layout.names) else names.parameters
        if len(message) != len(layout.names):
            text = f"expected {len(layout.names)} tensors, one for each of model.parameters(), got {len(message)}"
            missing = layout.names[len(message) :]
            first = f"; the first that is missing is {missing[0]!r}" if missing else ""
            raise ValueError(f"{what}: {text}{first}")
        tensors = list(message)
    else:
        kind = type(message).__name__
        raise ValueError(f"{what}: expected a flat tensor, a list of tensors or a dictionary by name, got {kind}")
    checked = [
        _checked(tensor, name, shape, what, number)
        for number, (tensor, name, shape) in enumerate(zip(tensors, layout.names, layout.shapes, strict=True))
    ]
    return layout.join(checked), layout == names.layout


def _one_tensor(message: Tensor, names: Names, what: str) -> tuple[Vector, bool]:
    sizes = [names.parameters.dim, names.layout.dim]
    if message.ndim != 1 or len(message) not in sizes:
        wanted = " or ".join(f"{size:,}" for size in dict.fromkeys(sizes))
        raise ValueError(f"{what}: expected a flat tensor of {wanted} numbers, got shape {tuple(message.shape)}")
    layout = names.layout if len(message) == names.layout.dim else names.parameters
    vector = _real(message, "the vector", what)
    for name, tensor in zip(layout.names, layout.split(vector), strict=True):
        _finite(tensor, name, what)
    return vector.clone(), layout == names.layout


def _by_name(message: Mapping[Any, object], names: Names, what: str) -> tuple[Layout, list[object]]:
    """The layout of a message, and its tensors; names may have the prefixes of wrappers, such as `module.`."""
    tensors, unknown = dict[str, object](), list[object]()
    for key, tensor in message.items():
        name = names.of_layout(str(key))
        if name in tensors:
            raise ValueError(f"{what}: expected {name!r} once, got it twice, also as {key!r}")
        if name:
            tensors[name] = tensor
        elif plain_name(str(key)) not in names.ignored:
            unknown.append(key)
    layout = names.layout if any(name in tensors for name in names.statistics) else names.parameters
    for name in layout.names:
        if name not in tensors:
            raise ValueError(f"{what}: expected a tensor {name!r}, got none; it has {_some(message)}")
    if unknown:
        raise ValueError(f"{what}: the model has no tensor {unknown[0]!r}; it has {_some(names.layout.names)}")
    return layout, [tensors[name] for name in layout.names]


def _some(names: Collection[object]) -> str:
    shown = ", ".join(repr(name) for name in list(names)[:4])
    return f"{shown}, ..." if len(names) > 4 else shown or "none"


def _checked(tensor: object, name: str, shape: tuple[int, ...], what: str, number: int) -> Tensor:
    if tensor is None:
        raise ValueError(
            f"{what}: tensor {number} ({name!r}) is None: no gradient reaches it; give zeros, or freeze it"
        )
    if not isinstance(tensor, Tensor):
        kind = type(tensor).__name__
        try:
            tensor = torch.as_tensor(np.array(tensor))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{what}: tensor {number}: expected {name!r} as a tensor, got {kind}") from error
    if tuple(tensor.shape) != shape:
        text = f"tensor {number}: expected {name!r} of shape {shape}, got shape {tuple(tensor.shape)}"
        raise ValueError(f"{what}: {text}; the order is that of model.parameters()")
    values = _real(tensor, f"tensor {number} ({name!r})", what)
    _finite(values, name, what)
    return values


def _real(tensor: Tensor, name: str, what: str) -> Tensor:
    """A tensor of real numbers as float32 on the CPU."""
    try:
        if tensor.is_complex() or tensor.dtype == torch.bool:
            raise TypeError
        return tensor.detach().to_dense().to("cpu", torch.float32)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"{what}: expected {name} of real numbers, got {tensor.dtype} on {tensor.device}") from error


def _finite(tensor: Tensor, name: str, what: str) -> None:
    if wrong := int((~tensor.isfinite()).sum()):
        raise ValueError(f"{what}: expected finite numbers, got {wrong} of {tensor.numel()} that are not in {name!r}")


def stepped(
    train_step: TrainStep, module: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], sends: str, names: Names
) -> list[object]:
    """The message of a user's training for each batch, by name if it trains in place; the model is not changed.

    Raises:
        ValueError: the training fails, or trains in place although gradients are sent.
    """
    messages: list[object] = []
    for number, (x, y) in enumerate(batches):
        own = copy.deepcopy(module)
        try:
            sent = train_step(own, x.clone(), y.clone())
        except (Exception, SystemExit) as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ValueError(f"train_step failed for victim {number}: {text}") from error
        if sent is None and sends == "gradient":
            raise ValueError(
                "train_step returned nothing, so its update counts: say sends='update', or return gradients"
            )
        if sent is None:
            before, after = module.state_dict(), own.state_dict()
            sent = {key: after[key].detach() - before[key].detach() for key in before if names.of_layout(key)}
            if not any(bool(tensor.any()) for tensor in sent.values()):
                raise ValueError(
                    "train_step returned nothing, and changed nothing: expected it to train the model in place"
                )
        messages.append(sent)
    return messages

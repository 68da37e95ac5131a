"""What strangers bring: any file ends in one line, any terminal takes the output, and any data are read."""

import io
import os
import pickle
import resource
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    get_worker_info,
)

import leakgauge
from leakgauge import claim, load_study
from leakgauge.harness import data
from leakgauge.harness.cli.main import main
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.sinks import say
from leakgauge.harness.data.given import given
from leakgauge.harness.data.vision import unpickle
from leakgauge.harness.federation import registry
from tests.by_rows import by_rows
from tests.command import call
from tests.data_files import one_line, pixels
from tests.test_strangers import STUDY

N, SHAPE = 60, (1, 4, 4)
X = pixels(N, *SHAPE, name="doors").astype(np.float32) / 255
Y = np.arange(N) % 10


def net(outputs=10, *layers, inputs=16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(inputs, outputs))


def inspected(folder, model, given_data, **named):
    named = {"victims": 2, "progress": False, "limit": False, "attacks": ["prior", "analytic"]} | named
    return leakgauge.inspect(model, given_data, folder=folder, minutes=0.02, **named)


def ssim_of(run, attack):
    (found,) = [one for one in run.results.values() if one.cell.attack.name == attack]
    return {one.name: one.value for one in found.estimates}


# files


def pipe(path):
    os.mkfifo(path)


def loop(path):
    path.symlink_to(path)


def a_socket(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def zeros(path):
    path.symlink_to("/dev/zero")


def sparse(path):
    with path.open("wb") as file:
        file.truncate(2**40)


def nested(opened):
    """An npz whose array states a shape of many brackets."""
    return lambda path: _npz(path, opened)


def _npz(path, opened):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {opened}}}".ljust(6000).encode() + b"\n"
    with zipfile.ZipFile(path, "w") as out:
        for name in ("x", "y"):
            out.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)


KINDS = {"pipe": pipe, "loop": loop, "socket": a_socket, "zeros": zeros, "sparse": sparse, "folder": os.mkdir}
NPZ = {
    "90 (": nested("(" * 90),
    "5000 [": nested("[" * 5000),
    "unclosed": nested("(((3,),"),
    "5000 -": nested("-" * 5000),
}
READERS = {
    "baseline": lambda path: ("baseline", "show", path),
    "check": lambda path: ("check", path.parent, "--baseline", path),
    "study": lambda path: ("show", path),
    "verdicts": lambda path: ("compare", path, path),
    "recipe": lambda path: ("reproduce", path),
}


@pytest.fixture
def small():
    """At most 3 GB more of address space, and 10 s of the processor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + 3 * 2**30, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def study_of(path):
    text = STUDY.replace('"digits"', f'"npz:{path}"')
    (path.parent / "s.toml").write_text(text)
    return path.parent / "s.toml"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_a_command_ends_in_one_line_for_what_is_no_regular_file(kind, reader, tmp_path, monkeypatch, small):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.toml"
    KINDS[kind](path)
    done = call(*READERS[reader](path))
    assert done.exit_code in (2, 4, 5), done.output
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("kind", KINDS | NPZ)
def test_data_in_no_regular_file_or_with_a_nested_header_end_a_run_in_one_line(kind, tmp_path, small):
    path = tmp_path / "x.npz"
    (KINDS | NPZ)[kind](path)
    done = call("run", study_of(path), "-o", tmp_path / "out", "--workers", "0")
    assert done.exit_code == 2, done.output
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "folder"])
def test_a_folder_of_images_with_an_entry_that_is_no_regular_file_is_refused_and_does_not_wait(kind, tmp_path, small):
    for name in ("cat", "dog"):
        (tmp_path / "own" / name).mkdir(parents=True)
        for number in range(6):
            Image.fromarray(pixels(5, 5)).save(tmp_path / "own" / name / f"{number}.png")
    KINDS[kind](tmp_path / "own" / "dog" / "x.png")
    if kind == "zeros":  # a link out of the folder is left out
        assert data.load(f"folder:{tmp_path / 'own'}", tmp_path).note.startswith("1 links left out")
        return
    with pytest.raises(data.DataUnreadable) as error:
        data.load(f"folder:{tmp_path / 'own'}", tmp_path)
    assert f"cannot read {tmp_path / 'own'}" in one_line(error)


def shared(make, levels=34):
    part = make([0])
    for _ in range(levels):
        part = make([part, part])
    return part


@by_rows(
    {"data": shared(list), "labels": [0]},
    {"data": np.zeros((1, 3072), np.uint8), "labels": shared(tuple)},
    {b"label_names": [shared(list)] * 3},
)
def test_a_pickle_of_shared_parts_is_refused_before_it_is_unpacked(built, tmp_path, small):
    (tmp_path / "x").write_bytes(pickle.dumps(built))
    with pytest.raises(data.DataUnreadable) as error:
        unpickle(tmp_path / "x")
    assert "uses of earlier parts" in one_line(error)


def test_a_pickle_of_plain_arrays_is_read(tmp_path):
    kept = {"data": np.zeros((5, 3072), np.uint8), "labels": [1, 2, 3, 1, 2], "filenames": ["a"] * 5}
    (tmp_path / "x").write_bytes(pickle.dumps(kept))
    assert unpickle(tmp_path / "x")["labels"] == [1, 2, 3, 1, 2]


def test_a_byte_order_mark_changes_nothing_and_utf_16_is_named(tmp_path):
    (tmp_path / "s.toml").write_bytes(b"\xef\xbb\xbf" + STUDY.encode())
    (tmp_path / "plain.toml").write_text(STUDY)
    marked, plain = (load_study(tmp_path / name) for name in ("s.toml", "plain.toml"))
    assert (marked.text, marked.cells) == (plain.text, plain.cells)
    (tmp_path / "b.json").write_bytes(b"\xef\xbb\xbf" + Path("baselines/smoke.json").read_bytes())
    assert call("baseline", "show", tmp_path / "b.json").exit_code == 0
    for name, words in (("s.toml", ("show",)), ("b.json", ("baseline", "show"))):
        (tmp_path / name).write_text(STUDY, encoding="utf-16")
        done = call(*words, tmp_path / name)
        assert done.exit_code in (2, 4)
        assert "expected UTF-8, got UTF-16" in done.stderr


# output


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_stream_of_any_encoding_takes_every_character(encoding, monkeypatch):
    for name in ("stdout", "stderr"):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
        monkeypatch.setattr(sys, name, stream)
        say("epsilon ≥ 3 \U0001f600", err=name == "stderr")
        assert rb"\u2265 3 \U0001f600" in raw.getvalue()


TITLED = STUDY.replace('"tiny"', '"tiny"\ntitle = "ε ≥ 3 → ∞"').replace(
    ', {name = "gaussian", noise_std = [0.01, 0.1]}', ""
)
TITLED += '[[attacks]]\nname = "analytic"\ntarget = {count = 2}\n'


@by_rows(("ascii", "strict"), ("ascii", "surrogateescape"), ("latin-1", "strict"))
def test_a_run_whose_terminal_lacks_characters_prints_its_table_and_writes_its_report(
    encoding, errors, tmp_path, monkeypatch
):
    (tmp_path / "s.toml").write_text(TITLED, encoding="utf-8")
    words = ["leakgauge", "run", str(tmp_path / "s.toml"), "-o", str(tmp_path / "out"), "--workers", "0"]
    monkeypatch.setattr(sys, "argv", words)
    raw = io.BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(raw, encoding=encoding, errors=errors, write_through=True))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    assert (rb"\xb7" if encoding == "ascii" else b"\xb7") in raw.getvalue()
    assert "ε ≥ 3 → ∞" in (tmp_path / "out" / "report.html").read_text("utf-8")


@pytest.mark.slow
def test_a_run_in_the_c_locale_writes_its_report(tmp_path):
    (tmp_path / "s.toml").write_text(TITLED, encoding="utf-8")
    words = [sys.executable, "-m", "leakgauge", "run", tmp_path / "s.toml", "-o", tmp_path / "out", "--workers", "1"]
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(words, capture_output=True, check=False, env={**os.environ, **locale})
    assert done.returncode == 0, done.stderr
    assert "ε ≥ 3 → ∞" in (tmp_path / "out" / "report.html").read_text("utf-8")


# parameters


@pytest.mark.parametrize("value", [1e-300, 5e-324, -1e-300, 1e-13, 1e13, 1e300, 10**300])
@pytest.mark.parametrize("name", [*registry.classes("defense"), "laplace+sdq"])
def test_a_parameter_that_formulas_cannot_resolve_is_refused_in_one_line_by_every_defense(name, value):
    for key, default in registry.defaults("defense", name).items():
        if isinstance(default, float):
            with pytest.raises(StudyError) as error:
                claim(name, {key: value}, {}, 1, None)
            assert f"{key}: expected 0 or a magnitude from 1e-12 to 1e+12, got" in one_line(error)


@pytest.mark.parametrize("key", ["noise_std", "clip"])
@pytest.mark.parametrize("name", ["gaussian", "cepam-clip", "jopeq"])
def test_the_smallest_parameters_have_a_claim(name, key):
    if key in registry.defaults("defense", name):
        assert claim(name, {key: 1e-12}, {}, 1, None)["defense"] == name


# data


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


def again(size):
    """Batches in one array that the generator fills anew."""
    held = np.empty((size, *SHAPE), np.float32)
    for at in range(0, N, size):
        held[:] = X[at : at + size]
        yield held, Y[at : at + size]


ITEMS = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
NAMED = [{"image": x, "label": y} for x, y in zip(X, Y, strict=True)]
DATA = {
    "loader": lambda: DataLoader(ITEMS, batch_size=7),
    "shuffled": lambda: DataLoader(ITEMS, batch_size=7, shuffle=True, drop_last=True),
    "sampler": lambda: DataLoader(ITEMS, batch_size=7, sampler=list(range(N))),
    "collated": lambda: DataLoader(
        ITEMS, batch_size=3, collate_fn=lambda items: tuple(map(torch.stack, zip(*items, strict=True)))
    ),
    "one by one": lambda: DataLoader(ITEMS, batch_size=None),
    "names": lambda: DataLoader(NAMED, batch_size=7),
    "generator": lambda: (pair for pair in zip(X, Y, strict=True)),
    "batches": lambda: ((X[at : at + 3], Y[at : at + 3]) for at in range(0, N, 3)),
    "one buffer": lambda: again(6),
    "iterable": Stream,
    "loader of an iterable": lambda: DataLoader(Stream(), batch_size=7),
    "pairs": lambda: list(zip(X, Y, strict=True)),
    "batch sampler": lambda: DataLoader(ITEMS, batch_sampler=BatchSampler(SequentialSampler(ITEMS), 7, False)),
    "sampled batches": lambda: DataLoader(
        ITEMS, sampler=BatchSampler(SequentialSampler(ITEMS), 7, False), batch_size=None
    ),
    "list of batches": lambda: [(X[at : at + 7], Y[at : at + 7]) for at in range(0, N, 7)],
    "batches of one": lambda: [(X[at : at + 1], Y[at : at + 1]) for at in range(N)],
}


@pytest.mark.parametrize("kind", DATA)
def test_loaders_and_iterators_are_the_data_that_they_yield(kind):
    for held in (DATA[kind](), (DATA[kind](), DATA[kind]())):
        loaded = data.load(given("streamed", held), None)
        parts = [loaded.train, loaded.test] if isinstance(held, tuple) and len(held) == 2 else [loaded.train]
        expected = data.load(given("whole", (X, Y, X, Y) if len(parts) == 2 else (X, Y)), None)
        assert torch.equal(loaded.train.x, expected.train.x)
        assert torch.equal(loaded.test.y, expected.test.y)


ROWS = range(40), range(40, N)
PARTS = {
    "arrays": lambda: ((X[:40], Y[:40]), (X[40:], Y[40:])),
    "loaders": lambda: [DataLoader(Subset(ITEMS, rows)) for rows in ROWS],
    "data sets": lambda: [Subset(ITEMS, rows) for rows in ROWS],
    "both": lambda: (Subset(ITEMS, ROWS[0]), (X[40:], Y[40:])),
}


@pytest.mark.parametrize("kind", PARTS)
def test_two_parts_of_any_form_are_training_and_test_data(kind):
    held = PARTS[kind]()
    loaded = data.load(given("parts", held), None)
    assert torch.equal(loaded.train.x, torch.from_numpy(X[:40]))
    assert torch.equal(loaded.test.y, torch.from_numpy(Y[40:]))


@by_rows((X.astype(object), Y.astype(object)), (torch.from_numpy(X).to_sparse(), Y.tolist()))
def test_arrays_of_numbers_as_objects_and_sparse_tensors_are_arrays(x, y):
    loaded = data.load(given("arrays", (x, y)), None)
    expected = data.load(given("whole", (X, Y)), None)
    assert torch.equal(loaded.train.x, expected.train.x)
    assert torch.equal(loaded.train.y, expected.train.y)


class Sharded(IterableDataset):
    def __iter__(self):
        at = get_worker_info().id
        return iter(zip(X[at::2], Y[at::2], strict=True))


def test_an_iterable_data_set_with_workers_is_read_whole():
    loaded = data.load(given("sharded", DataLoader(Sharded(), batch_size=7, num_workers=2)), None)
    assert sorted(torch.cat([loaded.train.y, loaded.test.y]).tolist()) == sorted(Y.tolist())


APART, FLAT = "bring both to one scale", "fill little of [0, 1]"


@by_rows(
    ((X, Y, 255 * X, Y), APART),
    ((255 * X, Y, X, Y), APART),
    ((X, Y, X / 255, Y), APART),
    (((X - 0.5) / 0.5, Y, X, Y), APART),
    ((X, Y, X - 0.5, Y), APART),
    ((X / 255, Y), FLAT),
    ((X / 255, Y, X / 255, Y), FLAT),
    (((X > 0.5).astype(np.uint8), Y), FLAT),
    ((0 * X, Y), FLAT),
    ((X, Y), ""),
    ((255 * X, Y, 255 * X[:20], Y[:20]), ""),
    (((X - 0.5) / 0.5, Y), ""),
)
def test_ranges_that_differ_or_fill_little_are_noted(held, words):
    note = data.load(given("ranges", held), None).note
    assert words in note
    assert bool(words) == (APART in note or FLAT in note)


def test_the_data_of_the_attacker_have_the_scale_and_the_classes_of_the_victims(tmp_path):
    held, labels = (10 * X - 5, Y + 1), np.where(Y < 5, 3, 8)
    inspected(tmp_path / "a", net(), held, auxiliary=(8 * X[:30] - 4, labels[:30]))
    loaded = data.load("given:inspect", tmp_path)
    assert torch.allclose(loaded.original(loaded.test.x), torch.from_numpy(8 * X[:30] - 4), atol=1e-4)
    assert set(loaded.test.y.tolist()) == {2, 7}
    for auxiliary, words in (((255 * X, Y), "0 to 255"), ((X, Y + 1), "got 10"), ((X[..., :2], Y), "(1, 4, 2)")):
        with pytest.raises(ValueError, match="auxiliary: expected") as error:
            inspected(tmp_path / "b", net(), (X, Y), auxiliary=auxiliary)
        assert words in one_line(error)


@pytest.mark.parametrize("kind", ["arrays", "items", "batches"])
def test_labels_of_several_classes_are_read_and_have_a_loss_of_their_own(kind, tmp_path):
    marks = (pixels(N, 3, name="marks") % 2).astype(np.float64)
    forms = {"arrays": (X, marks), "items": list(zip(X, marks, strict=True)), "batches": iter([(X, marks)])}
    loaded = data.load(given("several", forms[kind]), None)
    assert (loaded.classes, loaded.train.y.dtype) == (("0", "1", "2"), torch.float32)
    assert torch.equal(torch.cat([loaded.train.y, loaded.test.y]).sum(0), torch.from_numpy(marks).float().sum(0))
    assert ssim_of(inspected(tmp_path / "a", net(3), (X, marks)), "analytic")["label_accuracy"] == 1
    with pytest.raises(ValueError, match="of one-hot labels, take the argmax"):
        inspected(tmp_path / "b", net(), (X, np.eye(10)[Y]))


def test_whole_floats_are_classes_of_a_network_with_several_outputs(tmp_path):
    run = inspected(tmp_path / "a", net(), (X, Y.astype(float)))
    assert ssim_of(run, "analytic")["label_accuracy"] == 1
    with pytest.raises(ValueError, match=r"expected labels from 0 to 9 for 10 classes, got 0, 0\.5"):
        inspected(tmp_path / "b", net(), (X, Y / 2))


def test_an_inspection_takes_a_loader_and_its_rows_are_those_of_its_data_set(tmp_path):
    run = inspected(tmp_path, net(), DataLoader(ITEMS, batch_size=7, shuffle=True))
    assert ssim_of(run, "analytic")["ssim"] > 0.99
    again = inspected(tmp_path, net(), DataLoader(ITEMS, batch_size=7, shuffle=True))
    assert again.results.keys() == run.results.keys()


@by_rows(({"sends": "update", "steps": 10**9}, "at most 6,250,000 steps of 1 records, got 1,000,000,000"))
def test_a_count_that_fills_memory_is_refused_in_one_line(named, words, tmp_path, small):
    with pytest.raises(ValueError) as error:
        inspected(tmp_path, net(), (X, Y), **named)
    assert words in one_line(error)


def endless():
    while True:
        yield X[0], 1


@by_rows(
    (iter(()), "got none from a tuple_iterator; an iterator is read only once"),
    (endless(), "got 1,001 items, expected at most 1,000"),
    ((x for x in X), "expected (x, y)"),
    ({"x": X, "y": Y}, "a DataLoader or an iterator of items (x, y)"),
    (3, "a DataLoader or an iterator of items (x, y)"),
)
def test_data_that_are_none_or_have_no_end_are_refused_in_one_line(held, words, tmp_path, monkeypatch):
    monkeypatch.setenv("LEAKGAUGE_MAX_ITEMS", "1000")
    with pytest.raises(ValueError) as error:
        inspected(tmp_path, net(), held)
    assert words in one_line(error)

"""Files of strangers: what is too large, or names code, is refused early, in one line and with code 2."""

import gzip
import io
import os
import subprocess
import sys
import textwrap
import time
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import leakgauge
from leakgauge.harness import data
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.data import DataUnreadable
from leakgauge.harness.gate import rerun
from leakgauge.harness.gate.rerun import Bench
from leakgauge.harness.study.study import load_study, resolve
from tests.by_rows import by_rows
from tests.command import call, refused

STUDY = textwrap.dedent("""
    name = "tiny"
    lineup = false
    tasks = [{data = "digits", model = "mlp-small"}]
    federations = [{clients = 3, rounds = 2, samples = 60, test_samples = 40, algorithm = "fedsgd"}]
    defenses = [{name = "none"}, {name = "gaussian", noise_std = [0.01, 0.1]}]
    [[attacks]]
    name = "prior"
    guess = ["mean", "other"]
    target = {count = 2}
""")


@pytest.fixture(autouse=True)
def _strict(monkeypatch):
    """As for a user: no permission in the environment."""
    monkeypatch.delenv("LEAKGAUGE_ALLOW_CODE")


def write(folder, text):
    (folder / "s.toml").write_text(text)
    return folder / "s.toml"


def a_list(count):
    return f"[{', '.join(str(at / 1000) for at in range(1, count + 1))}]"


@by_rows(
    ("[0.01, 0.1]", f"{a_list(1000)}, clip = {a_list(1000)}, delta = {a_list(1000)}", "2,000,000,002 cells"),
    ("[0.01, 0.1]", f"{a_list(10_000)}", "20,002 cells, expected at most 20,000; --max-cells"),
    (
        "attacks]]",
        f"attacks]]\nx = []\n[[attacks]]\na = {a_list(999)}\nb = {a_list(999)}",
        "5,988,006 cells, expected at most",
    ),
    ("clients = 3", "clients = 1_000_000_000", "federations[0].clients: got 1,000,000,000, expected at most 1,0"),
    ("rounds = 2", "rounds = 1_000_001", "rounds: got 1,000,001, expected at most 1,000,000; --max-number"),
    ("count = 2", f"count = {'9' * 4000}", "count: got an integer of about 4,001 digits, expected at most 1,000,0"),
    ("count = 2", f"count = 0x{'f' * 9000}", "digits, expected at most 1,000,000; --max-number"),
    ("rounds = 2", f"rounds = {'9' * 5000}", "limit (4300 digits) for integer string conversion: value has 5000"),
    ('name = "tiny"', 'name = "tiny"\nseeds = [9223372036854775808]', "at most 9,223,372,036,854,775,807"),
    ("rounds = 2", "rounds = 2, lr = 1e400", "federations[0].lr: got inf, expected a finite number"),
    ("0.01, 0.1", "1e400", "defenses[1].noise_std[0]: got inf"),
    ("rounds = 2", f"rounds = {'[' * 5000}1{']' * 5000}", "more than 8 deep, which is the limit"),
    ("rounds = 2", f"rounds = {'[' * 20}1{']' * 20}", "more than 8 deep, which is the limit"),
    ('name = "tiny"', f'name = "tiny"\n{"a." * 3000}a = 1', "more than 8 deep, which is the limit"),
)
def test_a_study_that_asks_for_too_much_is_refused_at_once_with_number_limit_and_option(old, new, words, tmp_path):
    start = time.process_time()
    assert words in refused("show", write(tmp_path, STUDY.replace(old, new, 1)))
    assert time.process_time() - start < 2


def test_the_options_raise_and_lower_the_limits_of_a_study(tmp_path):
    study = write(tmp_path, STUDY.replace("clients = 3", "clients = 300"))
    assert "the grid has 6 cells, expected at most 5; --max-cells" in refused("show", study, "--max-cells", 5)
    assert "got 300, expected at most 299" in refused("run", study, "-o", tmp_path / "out", "--max-number", 299)
    assert len(load_study(study, max_cells=6, max_number=300).cells) == 6
    assert len(
        load_study(write(tmp_path, STUDY.replace("rounds = 2", "rounds = 2_000_000")), max_number=2_000_000).cells
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", ["[" * 100_000, "9" * 5000, "1e400", "-1e400", "9" * 4000])
def test_absurd_values_of_claim_are_refused_in_lines(value):
    for words in (("--set", f"epsilon={value}"), ("--setting", f"clients={value}"), ("--setting", f"lr={value}")):
        done = call("claim", "gaussian", *words)
        assert done.exit_code in (0, 2), (words[1][:20], done.exception)


def test_nesting_without_end_in_results_is_one_line(tmp_path):
    (tmp_path / "study.json").write_text("[" * 100_000)
    assert "cannot read" in refused("report", tmp_path)


def refusal_of(name, root=Path("nowhere")):
    with pytest.raises(DataUnreadable) as caught:
        data.load(name, root)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_npz(path, shape, dtype="u1"):
    np.savez_compressed(path, x=np.zeros(shape, dtype), y=np.arange(shape[0]) % 2)


@pytest.mark.matrix
def test_files_that_unpack_to_too_much_are_refused_before_they_do(tmp_path, monkeypatch):
    write_npz(tmp_path / "own.npz", (200, 1000, 1000))
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    header = (0x803).to_bytes(4, "big") + b"".join(n.to_bytes(4, "big") for n in (200, 1000, 1000))
    with gzip.open(raw / "train-images-idx3-ubyte.gz", "wb", compresslevel=1) as file:
        file.write(header + bytes(200_000_000))
    (tmp_path / "adult.data.gz").write_bytes((raw / "train-images-idx3-ubyte.gz").read_bytes())
    for name, size in ((f"npz:{tmp_path}/own.npz", "200,0"), ("mnist", "134,217,729"), ("adult", "134,217,729")):
        said = refusal_of(name, tmp_path)
        assert f"bytes unpack to {size}" in said
        assert "expected at most 134,217,728; the environment variable LEAKGAUGE_MAX_UNPACKED=BYTES raises" in said
    write_npz(tmp_path / "own.npz", (100, 8, 8))
    assert len(data.load(f"npz:{tmp_path}/own.npz", tmp_path).train.x) == 80
    monkeypatch.setenv("LEAKGAUGE_MAX_UNPACKED", "7000")
    assert "unpack to 7,456 or more, expected at most 7,000" in refusal_of(f"npz:{tmp_path}/own.npz")
    monkeypatch.setenv("LEAKGAUGE_MAX_UNPACKED", "8000")
    assert len(data.load(f"npz:{tmp_path}/own.npz", tmp_path).train.x) == 80


def test_a_zip_that_lies_about_its_sizes_gives_no_more_than_it_declares(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((100, 100, 100), "u1"))
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x.npy", buffer.getvalue())
        file.writestr("y.npy", buffer.getvalue())
    content = bytearray((tmp_path / "a.npz").read_bytes())
    size = len(buffer.getvalue()).to_bytes(4, "little")
    (tmp_path / "a.npz").write_bytes(content.replace(size, (500).to_bytes(4, "little")))
    assert "cannot read" in refusal_of(f"npz:{tmp_path}/a.npz")


def write_images(folder, count=4, size=(4, 4)):
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = np.random.default_rng(len(name) * number).integers(0, 255, (*size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


@by_rows(
    (15_000, "(225000000 pixels) exceeds limit of 178956970 pixels"),
    (12_000, "(144000000 pixels) exceeds limit of 89478485 pixels"),
    (9_000, "unpack to 81,000,000 or more, expected at most 80,000,000"),
)
def test_an_image_that_unpacks_to_too_much_is_refused_by_its_header(side, words, tmp_path, monkeypatch):
    monkeypatch.setenv("LEAKGAUGE_MAX_UNPACKED", "80000000")
    write_images(tmp_path)
    Image.new("1", (side, side)).save(tmp_path / "cat" / "0.png")
    assert words in refusal_of(f"folder:{tmp_path}")


def test_many_images_count_together(tmp_path, monkeypatch):
    write_images(tmp_path, count=5)
    monkeypatch.setenv("LEAKGAUGE_MAX_UNPACKED", "440")
    assert "unpack to 448 or more, expected at most 440" in refusal_of(f"folder:{tmp_path}")
    monkeypatch.setenv("LEAKGAUGE_MAX_UNPACKED", "448")
    assert data.load(f"folder:{tmp_path}", tmp_path).note == ""


def test_links_in_a_folder_lead_neither_out_of_it_nor_twice_to_an_image(tmp_path):
    own, secret = tmp_path / "own", tmp_path / "secret"
    write_images(own, count=8)
    write_images(secret)
    before = data.load(f"folder:{own}", tmp_path)
    (own / "cat" / "again").symlink_to(own)
    (own / "cat" / "up").symlink_to("..")
    (own / "loop").symlink_to(own)
    (own / "cat" / "0-copy.png").symlink_to("0.png")
    (own / "cat" / "1-copy.png").symlink_to(own / "dog" / "1.png")
    (own / "cat" / "theirs").symlink_to(secret / "cat")
    (own / "eel").symlink_to(secret / "cat")
    (own / "dog" / "theirs.png").symlink_to(secret / "dog" / "0.png")
    after = data.load(f"folder:{own}", tmp_path)
    assert after.digest == before.digest
    assert after.classes == ("cat", "dog")
    assert after.note == "8 links left out: to folders, out of the folder, or to images already included"
    (tmp_path / "link").symlink_to(own)
    assert data.load(f"folder:{tmp_path}/link", tmp_path).digest == before.digest


def test_links_to_images_that_no_class_holds_are_followed_once_and_never_from_training_to_test(tmp_path):
    write_images(tmp_path / "all")
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            for number in (0, 1) if part == "train" else (1, 2):
                (tmp_path / part / name / f"{number}.png").symlink_to(tmp_path / "all" / name / f"{number}.png")
    loaded = data.load(f"folder:{tmp_path}", tmp_path)
    assert (len(loaded.train.x), len(loaded.test.x)) == (4, 2)
    assert loaded.note.startswith("2 links left out")


MARK = """
import pathlib
from tests.doubles import Counting, Echo
pathlib.Path(__file__).with_suffix(".ran").touch()
def prior(x, box): return None
"""


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A module that leaves a file when it is imported."""
    (tmp_path / "stranger.py").write_text(MARK)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "stranger.ran"
    sys.modules.pop("stranger", None)


CODE = {
    "a defense": ('name = "none"', 'name = "stranger:Counting"'),
    "a cascade": ('name = "none"', 'name = "laplace+stranger:Counting"'),
    "a file": ('name = "none"', 'name = "./stranger.py:Counting"'),
    "an attack": ('name = "prior"\nguess = ["mean", "other"]', 'name = "stranger:Echo"'),
    "a prior": ('name = "prior"\nguess = ["mean", "other"]', 'name = "map"\nprior = ["tv", "stranger:prior"]'),
}


@pytest.mark.parametrize("kind", CODE)
def test_a_study_that_names_code_imports_nothing_without_permission(kind, stranger, tmp_path):
    study = write(tmp_path, STUDY.replace(*CODE[kind]))
    for words in (("show", study), ("show", study, "--json"), ("run", study, "-o", tmp_path / "out")):
        assert "names code to import; pass --allow-code if you trust it" in refused(*words)
    for call_it in (load_study, lambda path: leakgauge.run(path, tmp_path / "out")):
        with pytest.raises(StudyError, match="names code to import"):
            call_it(study)
    assert not stranger.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["a defense", "an attack", "a prior"])
def test_a_study_that_names_code_is_read_with_permission(kind, stranger, tmp_path, monkeypatch):
    study = write(tmp_path, STUDY.replace(*CODE[kind]))
    assert call("show", study, "--json", "--allow-code").exit_code == 0
    assert stranger.exists()
    assert load_study(study, allow_code=True).cells
    monkeypatch.setenv("LEAKGAUGE_ALLOW_CODE", "1")
    assert load_study(study).cells
    monkeypatch.setenv("LEAKGAUGE_ALLOW_CODE", "0")
    with pytest.raises(StudyError):
        load_study(study)


@pytest.mark.matrix
def test_workers_import_what_the_parent_accepted(tmp_path):
    text = STUDY.replace('{name = "none"}, {name = "gaussian", noise_std = [0.01, 0.1]}', '{name = "none"}')
    study = write(tmp_path, text.replace('name = "prior"\nguess = ["mean", "other"]', 'name = "tests.doubles:Echo"'))
    run = leakgauge.run(study, tmp_path / "out", workers=1, progress=False, allow_code=True)
    assert (len(run.results), len(run.failures)) == (1, 0)


def test_a_rerun_of_results_that_name_code_needs_permission_too(tmp_path):
    cells = resolve(
        tomllib.loads(STUDY.replace(*CODE["an attack"]).replace("stranger", "tests.doubles")), allow_code=True
    )
    with pytest.raises(StudyError, match=r"'tests.doubles:Echo' names code to import; pass --allow-code"):
        rerun._run(cells.cells, Path(), tmp_path / "again", Bench(tmp_path))
    assert not (tmp_path / "again").exists()
    assert rerun._forbidden(cells.cells, Bench(tmp_path, allow_code=True)) == ""
    assert rerun._forbidden(resolve(tomllib.loads(STUDY)).cells, Bench(tmp_path)) == ""


BROKEN = {
    "gone": ("nowhere.to_be_found:X", "No module named 'nowhere'"),
    "torn": ("torn:X", "SyntaxError"),
    "exits": ("exits:X", "SystemExit: 1"),
    "raises": ("raises:X", "ZeroDivisionError: of a plug-in"),
    "empty": ("pathlib:Nothing", "has no attribute 'Nothing'"),
    "other": ("pathlib:Path", "expected a subclass of Defense"),
    "gaussian": ("tests.doubles:Counting", "two defenses are named 'gaussian'"),
}


def plug_ins(folder):
    """A folder that is installed as a distribution, with broken entry points and a good one, in both groups."""
    info = folder / "plugs-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugs\nVersion: 1.0\n")
    lines = "\n".join(f"{name} = {where}" for name, (where, _) in BROKEN.items())
    attacks = "\n".join(f"{name} = {BROKEN[name][0]}" for name in ("torn", "exits"))
    text = f"[leakgauge.defenses]\n{lines}\ncounting = tests.doubles:Counting\n[leakgauge.attacks]\n{attacks}\n"
    (info / "entry_points.txt").write_text(text)
    (folder / "torn.py").write_text("def (:")
    (folder / "exits.py").write_text("raise SystemExit(1)")
    (folder / "raises.py").write_text("raise ZeroDivisionError('of a plug-in')")


@pytest.mark.matrix
def test_a_broken_plug_in_is_a_warning_with_its_name_and_a_good_one_needs_no_permission(tmp_path):
    plug_ins(tmp_path / "site")
    study = write(tmp_path, STUDY.replace('name = "none"', 'name = "counting"'))
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), root])}
    code = "from leakgauge.harness.cli.main import main; main()"

    def command(*words):
        words = [sys.executable, "-c", code, *map(str, words)]
        return subprocess.run(words, capture_output=True, text=True, check=False, env=environment)

    shown = command("show", study, "--json")
    assert shown.returncode == 0, shown.stderr
    for name, (where, why) in BROKEN.items():
        start = f"plug-in {name} = {where} is left out: "
        lines = [line for line in shown.stderr.splitlines() if start in line and why in line]
        assert len(lines) == 1, shown.stderr
    assert "Traceback" not in shown.stderr
    listed = command("list", "defenses")
    assert (listed.returncode, "counting" in listed.stdout, "torn" in listed.stdout) == (0, True, False)
    named = command("show", write(tmp_path, STUDY.replace('name = "none"', 'name = "torn"')))
    assert (named.returncode, "no defense 'torn'" in named.stderr) == (2, True)


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(1), RecursionError(), OSError(5, "odd"), EOFError()])
def test_no_uncaught_exception_has_the_code_of_the_gate(error, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr("leakgauge.harness.study.run.run_study", fails)
    monkeypatch.setattr("leakgauge.harness.study.store.load_run", fails)
    study, out = write(tmp_path, STUDY), tmp_path / "out"
    out.mkdir()
    kind = type(error).__name__
    for words in (("report", out), ("export", out), ("compare", out, out), ("check", out, "--baseline", study)):
        done = call(*words)
        assert done.exit_code == 70
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"leakgauge: internal error, please report it: {kind}")
        assert line.endswith("; 'leakgauge --verbose ...' prints the traceback")
        assert "in fails" in call("--verbose", *words).stderr
    done = call("run", study, "-o", out)
    assert done.exit_code == 70
    assert done.stderr.splitlines()[-1].endswith(f"the traceback is in {out / 'run.log'}")
    assert "in fails" in (out / "run.log").read_text()
    assert "in fails" in call("run", study, "-o", out, "--verbose").stderr


@pytest.mark.parametrize("asked", ["list defenses", "gate --help"])
@pytest.mark.matrix
@pytest.mark.ci(without=("list defenses",))
def test_a_reader_that_goes_away_is_no_leak(asked):
    words = [sys.executable, "-c", "from leakgauge.harness.cli.main import main; main()", *asked.split()]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        said = process.stderr.read()
        assert (process.wait(), said) == (141, "")

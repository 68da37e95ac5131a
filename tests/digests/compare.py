"""Compares the results of four studies with digests stored beside this file; any changed number is reported.

    python tests/digests/compare.py run          run the four studies, and compare
    python tests/digests/compare.py check DIR... compare existing folders of results
    python tests/digests/compare.py record       run the four studies, and store their digests

A digest covers every number and verdict of a result and the bytes of its arrays: messages, models, pictures, scores. It
leaves out texts, names, versions and times. Another processor adds in another order and rounds differently, so each has
its own file, `STUDY.PROCESSOR.json`. A digest of a few reference computations is part of the name, because processors
of one name may round differently, and so do other kernels (`ATEN_CPU_CAPABILITY`) and an installation without compiled
loops. `record` removes the files of other processors: their numbers changed, too. If this processor has no file, the
digests are made here, with the code of the commit that recorded last, and the command says so. Ids and claims are
compared with every file.

MKL rounds the closed form's linear algebra in one of two ways, depending on the memory layout of the process (about
1 process in 14 differs). So up to `ROUNDED` cells of a study may differ if their estimates agree to four digits.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from leakgauge.harness.core.native import library

HERE = Path(__file__).parent
TREE = HERE.parents[1]
CODE = ("harness", "attacks", "defenses", "reports", "studies", "leakgauge", "tests/digests/*.toml")
"""What decides the numbers of the studies."""
FLAGS = ("-O3", "-g0", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
"""As for the compiled loops in setup.py."""
ROUNDED = 2
STUDIES = {
    "demo": "demo",
    "smoke": "smoke",
    "digest-adaptive": HERE / "adaptive.toml",
    "digest-membership": HERE / "membership.toml",
}
TEXTS = {"trace", "environment", "execution", "version", "digest"}
"""Keys whose values are no results."""
VERDICTS = {"verdict", "code", "name", "kind"}
"""Keys whose texts are results."""


def numbers(value, key=""):
    """The numbers and verdicts in `value`, sorted within a record: names and the order of fields are no results."""
    if isinstance(value, dict):
        return sorted(one for key, inner in value.items() if key not in TEXTS for one in numbers(inner, key))
    if isinstance(value, list):
        return [one for inner in value for one in numbers(inner, key)]
    if isinstance(value, str):
        return [value] if key in VERDICTS else []
    return [repr(value)] if isinstance(value, float | int) and not isinstance(value, bool) and value else []


def sha(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def arrays_of(path):
    """A digest of each array in an npz, sorted; none if the file is missing."""
    if not path.exists():
        return []
    with np.load(io.BytesIO(path.read_bytes())) as file:
        found = [np.ascontiguousarray(file[name]) for name in file.files]
    return sorted(hashlib.sha256(f"{a.dtype.str} {a.shape}".encode() + a.tobytes()).hexdigest() for a in found)


def rounded(value, digits):
    """`value` with its numbers rounded to significant digits; numbers up to 1e-6 become zero."""
    if isinstance(value, dict):
        return {key: rounded(inner, digits) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner, digits) for inner in value]
    return (float(f"{value:.{digits}g}") if abs(value) > 1e-6 else 0.0) if isinstance(value, float) else value


def digests(folder):
    """{id: [exact digest, digest of rounded estimates or claims]} of a folder of results."""
    found = {}
    for path in sorted(folder.glob("cells/*/*.json")):
        if path.name == "timing.json":
            continue
        data = json.loads(path.read_text("utf-8"))
        found[f"cell {path.parent.name}"] = [
            sha([path.name, numbers(data), arrays_of(path.parent / "arrays.npz")]),
            sha(rounded([one.get("value") for one in data.get("estimates", [])], 4)),
        ]
    for path in sorted(folder.glob("trainings/*/record.json")):
        data = json.loads(path.read_text("utf-8"))
        claims = [numbers(rounded([data["one_round"], data["whole_run"]], 6)), data["dim"], data["classes"]]
        found[f"training {path.parent.name}"] = [
            sha([numbers(data), arrays_of(path.parent / "kept.npz")]),
            sha(claims),
        ]
    return found


def promised(found):
    """The ids, and the digests of claims, which are the same on every processor."""
    return {key: pair[1] if key.startswith("training") else "" for key, pair in found.items()}


def processor():
    """The processor, and the vector instructions of torch's kernels: they decide how sums are rounded."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def arithmetic():
    """A digest of reference computations: equal if this machine rounds linear algebra like the one that recorded."""
    torch.set_num_threads(1)
    with threadpool_limits(1):
        return _arithmetic()


def _arithmetic():
    wave = torch.arange(90_000, dtype=torch.float64).sin().view(300, 300)
    square = wave @ wave.T + torch.eye(300)
    single = wave.float()
    image = single[:64, :64].contiguous().view(1, 4, 32, 32)
    found = [square, torch.linalg.solve(square, wave), *torch.linalg.eigh(square), torch.linalg.svdvals(wave)]
    found += [single @ single.T, torch.nn.functional.conv2d(image, image[:, :, :5, :5], padding=2), single.exp()]
    found += [torch.from_numpy(np.linalg.svd(wave.numpy(), compute_uv=False))]
    digest = hashlib.sha256(b"".join(one.contiguous().numpy().tobytes() for one in found))
    digest.update(f"compiled loops: {library() is not None}".encode())
    return digest.hexdigest()[:16]


def slug():
    """The name of this processor, and how it rounds, for a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", f"{processor()} {arithmetic()}".lower()).strip("-")


def own_file(name):
    return HERE / f"{name}.{slug()}.json"


def stored(path):
    return json.loads(path.read_text("utf-8"))


def store(name, folder):
    data = {"processor": processor(), "arithmetic": arithmetic(), "digests": digests(folder)}
    own_file(name).write_text(json.dumps(data, indent=1) + "\n", "utf-8")


def git(*words):
    done = subprocess.run(["git", *words], cwd=TREE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@contextmanager
def checkout(commit):
    """A temporary worktree of a commit, with compiled loops if this installation has them."""
    with tempfile.TemporaryDirectory() as parent:
        tree = Path(parent) / "tree"
        git("worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            if library() is not None:
                core = tree / "harness" / "core"
                subprocess.run(["cc", *FLAGS, core / "native.c", "-o", core / "_native.so", "-lm"], check=True)
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def make(name, folder):
    """Make the digests of a study that this processor lacks, with the code of the commit that recorded last."""
    commit = git("log", "-1", "--format=%H", "--", f"tests/digests/{name}.*.json")
    assert commit, f"no commit recorded digests of {name}: the whole history is needed"
    if not git("diff", "--name-only", commit, "--", *CODE):
        store(name, folder)
        return print(f"{name}: no digests of this processor ({slug()}); stored these, of the code that recorded last")
    print(f"{name}: no digests of this processor ({slug()}); made with the code of {commit[:12]}, which recorded last")
    with checkout(commit) as tree, tempfile.TemporaryDirectory() as out:
        before = tree / Path(STUDIES[name]).relative_to(TREE) if isinstance(STUDIES[name], Path) else STUDIES[name]
        run(before, Path(out) / name, tree)
        store(name, Path(out) / name)
    return None


def compare(name, folder):
    """One line for each difference between a folder of results and the digests stored of this study."""
    others = [path for path in sorted(HERE.glob(f"{name}.*.json")) if path != own_file(name)]
    if not own_file(name).exists():
        make(name, folder)
    was, now = stored(own_file(name))["digests"], digests(folder)
    lines = [f"{name}: {key} is missing" for key in was if key not in now]
    lines += [f"{name}: {key} is new" for key in now if key not in was]
    for path in others:
        if promised(stored(path)["digests"]) != promised(now):
            lines.append(f"{name}: ids or claims differ from those of {path.name}")
    both = {key: (pair, now[key]) for key, pair in was.items() if key in now}
    near = [key for key, (a, b) in both.items() if key[0] == "c" and a[0] != b[0] and a[1] == b[1]]
    if 0 < len(near) <= ROUNDED:
        print(f"{name}: rounded differently, equal to four digits: {', '.join(near)}")
        both = {key: pair for key, pair in both.items() if key not in near}
    return lines + [f"{name}: {key} differs" for key, (a, b) in both.items() if a != b]


def run(study, folder, tree=TREE):
    """Run a study by the command of the code in `tree`."""
    env = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "leakgauge", "run", str(study), "--out", str(folder)]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode in (0, 5), done.stdout + done.stderr


def main(verb, *folders):
    if verb == "check":
        paths = [Path(folder) for folder in folders]
        found = {json.loads((path / "study.json").read_text("utf-8"))["name"]: path for path in paths}
    else:
        found = {name: Path(tempfile.mkdtemp()) / name for name in folders or STUDIES}
        for name, folder in found.items():
            run(STUDIES[name], folder)
    lines = []
    for name, folder in found.items():
        if verb == "record":
            for path in HERE.glob(f"{name}.*.json"):
                path.unlink()
            store(name, folder)
        else:
            lines += compare(name, folder)
            print(f"{name}: {len(digests(folder))} digests compared")
    for line in lines:
        print(line, file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

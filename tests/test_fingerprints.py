"""Fingerprints do not hang on last digits: they are the same whatever rounds, and other for a weaker attack."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from leakgauge.attacks._engine import prior, reconstruct
from leakgauge.attacks._search import adam, lbfgs
from leakgauge.harness.core.contract import Attack
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.fingerprints import Fingerprint
from leakgauge.harness.study import fingerprints
from leakgauge.harness.study.study import load_study, resolve
from tests.by_rows import by_rows
from tests.doubles import study_table

CELLS = """
name = "digits"
threats = ["server", "server+labels"]
tasks = [{ data = "digits", model = ["mlp-small", "lenet-dlg"] }]
federations = [{ clients = 10, rounds = 1, algorithm = "fedsgd", batch = 32, lr = 1.0 }]
defenses = [{ name = "none" }, { name = "sdq", bits = 1 }]
limit = false
attacks = [
    { name = "map", objective = ["l2", "likelihood"], target = { count = 2 } },
    { name = "idlg", target = { count = 2 } },
    { name = "inverting-gradients", target = { count = 2 } },
]
"""
SCRIPT = """
import json, sys
from leakgauge.harness.core import native
if sys.argv[2] == "plain":
    native.library = lambda real="float": None
from leakgauge.harness.study.fingerprints import take
from leakgauge.harness.study.study import load_study
print(json.dumps([[*one.key, one.digest, *one.numbers] for one in take(load_study(sys.argv[1]).cells)]))
"""


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    path = tmp_path_factory.mktemp("study") / "digits.toml"
    path.write_text(CELLS)
    return path


@pytest.fixture(scope="module")
def here(cells):
    return {one.key: one for one in fingerprints.take(load_study(cells).cells)}


@by_rows(0, 3)
def test_seeds_without_attacks_leave_the_fingerprints_as_they_are(audit):
    def taken(**seeds):
        federation, attacks = {"clients": 4, "rounds": 1, "algorithm": "fedsgd"}, [{"name": "analytic"}]
        return fingerprints.take(resolve(study_table(federation, ["sdq"], attacks, audit=audit, **seeds)).cells)

    assert taken(seeds=[0, 1, 2], attack_seeds=[1]) == taken(seeds=[1])


@pytest.mark.matrix
@by_rows(
    ({"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}, "plain"),
    ({"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "AVX2"}, "compiled"),
)
@pytest.mark.ci("kernels1-compiled")
def test_other_kernels_give_the_same_fingerprints(kernels, loops, cells, here):
    env = {**os.environ, **kernels, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, cells, loops], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == len(here)
    for what, defense, attack, case, digest, *numbers in rows:
        one = here[what, defense, attack, case]
        assert one.like(Fingerprint(*one.key, digest, tuple(numbers))), one
        if what == "attack":  # far within the tolerance: no search carries last digits on
            pairs = zip(one.numbers, numbers, strict=True)
            assert all(math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6) for a, b in pairs), (one, numbers)


WEAKER = {
    "half of the evaluations": lambda patch: patch.setattr(fingerprints, "_EVALUATIONS", 10),
    "no prior": lambda patch: patch.setattr(prior.ImagePrior, "energy", lambda self, z, x: z.sum((1, 2)) * 0),
    "a longer step": lambda patch: patch.setattr(adam.Schedule, "size", lambda self, used: 2 * self.step),
    "a short memory": lambda patch: patch.setattr(lbfgs, "_HISTORY", 1),
    "no closed form": lambda patch: patch.setattr(reconstruct._Group, "_try_closed_form", lambda *given: None),
    "the wrong start": lambda patch: patch.setattr(
        reconstruct._Group, "_starts", lambda self, key, restart: torch.ones(len(self.targets), 64).to(self.targets)
    ),
}


@pytest.mark.parametrize("name", WEAKER)
@pytest.mark.table(3)
@pytest.mark.ci(2)
def test_a_weaker_attack_has_another_fingerprint(name, cells, here, monkeypatch):
    WEAKER[name](monkeypatch)
    found = fingerprints.take([one for one in load_study(cells).cells if one.training.task.model == "mlp-small"])
    changed = {one.what for one in found if not one.like(here[one.key])}
    assert changed == {"attack"}


def test_a_users_attack_that_cannot_mix_precisions_gets_single_precision(here, cells, monkeypatch):
    asked = []

    class Single(Attack):
        """Multiplies the parameters by numbers of its own."""

        @property
        def needs(self):
            return frozenset({"messages", "models"})

        def run(self, seen, key):
            asked.append(seen.model.params.dtype)
            return seen.model.params @ torch.ones(len(seen.model.params))

    (cell, *_) = load_study(cells).cells
    kept = []

    def searched(attack, seen, key):
        kept.append(searched_before(Single(), seen, key))
        return searched_before(attack, seen, key)

    searched_before = fingerprints._searched
    monkeypatch.setattr(fingerprints, "_searched", searched)
    fingerprints.take([cell])
    assert asked == [torch.float64, torch.float32]
    assert kept[0].dtype == torch.float32


MALICIOUS = {
    "name": "malicious",
    "threats": ["malicious-server"],
    "tasks": [{"data": "digits", "model": ["mlp-small", "lenet-dlg"]}],
    "federations": [{"clients": 4, "rounds": 1, "algorithm": "fedsgd", "batch": 0, "lr": 0.5, "samples": 40}],
    "defenses": [{"name": "none"}],
    "attacks": [{"name": "active-membership", "target": {"kind": "members", "count": 4, "outside": 8, "round": 0}}],
}


def test_an_attack_whose_broadcast_does_not_fit_the_model_has_its_refusal_as_fingerprint():
    found = [one for one in fingerprints.take(resolve(MALICIOUS).cells) if one.what == "attack"]
    assert sorted((bool(one.digest), bool(one.numbers)) for one in found) == [(False, True), (True, False)]


@by_rows(
    ({"data": "mnist", "model": "linear"}, "no MNIST file"), ({"data": "digits", "model": "cnn3"}, "at least 22 x 22")
)
def test_a_missing_data_set_or_a_model_that_does_not_fit_is_the_users_mistake(task, said, tmp_path):
    with pytest.raises(StudyError, match=said):
        fingerprints.take(resolve(MALICIOUS | {"tasks": [task]}).cells, tmp_path)


def test_shipped_attacks_search_in_double_precision_and_never_fall_back(monkeypatch):
    monkeypatch.setattr(fingerprints, "_searched", lambda attack, seen, key: attack.run(seen.double(), key))
    names = ("learned", "spear", "dlg", "label-restoration")
    few = {"learned": {"samples": 60, "epochs": 2}, "spear": {"samples": 100}}
    study = MALICIOUS | {
        "threats": ["server"],
        "tasks": [{"data": "digits", "model": "mlp-small"}],
        "attacks": [{"name": one, "target": {"count": 2, "batch": [1, 2]}} | few.get(one, {}) for one in names],
    }
    found = [one for one in fingerprints.take(resolve(study).cells) if one.what == "attack"]
    assert len(found) == 2 * len(names) + 4  # and two lineups for each target
    assert {one.attack.partition("(")[0] for one in found if one.numbers} == {*names, "lineup"}

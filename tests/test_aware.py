"""A defense-aware attack does no worse than a naive one with the same prior, beyond noise, on every defense."""

import functools
from pathlib import Path

import numpy as np
import pytest

from leakgauge.harness.core import stats
from leakgauge.harness.core.cell import FederationSpec, Target, TaskSpec
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import View
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import Keep, train
from leakgauge.harness.federation.observe import TrainedFederation, observe
from leakgauge.harness.learn.batch import choose_engine
from leakgauge.harness.study.prepare import load_data, make_task
from leakgauge.harness.study.score import score_reconstruction

FEDERATION = FederationSpec(clients=4, rounds=1, algorithm="fedsgd", batch=16)
PROBE = Target(round=0, count=8)
KEY = Key(0)
NAMES = [*registry.classes("defense"), "laplace+sdq", "t-noise+sdq-lattice", "gaussian+sdq"]
GAINS = ("gaussian", "laplace", "sdq", "jopeq", "jopeq-t", "ota", "udp", "top-k", "random-mask", "soteria", "precode")
QUICK = {*GAINS, "none", "dp-sgd", "sqsgd", "gaussian+sdq"}
"""The defenses on which the aware attack gains, and one of each other kind."""

MILD = {
    "gaussian": {"clip": 4.0, "noise_std": 0.01},
    "laplace": {"clip": 0.5, "noise_std": 0.01},
    "sqsgd": {"epsilon": 2000.0},
    "top-k": {"fraction": 0.1},
    "dp-sgd": {"noise_std": 0.01},
    "ota": {"epsilon": 1e5, "power": 1e9},
    "ota-orthogonal": {"epsilon": 1e5, "power": 1e9},
    "udp": {"epsilon": 1e4},
}
"""Parameters at which something leaks; the other defenses have their defaults."""


@functools.cache
def federation(name):
    """Digits and the first model of a federation with this defense."""
    loaded = load_data("digits", Path())
    defense = registry.build("defense", name, MILD.get(name, {}))
    task = make_task(TaskSpec("digits", "lenet-dlg", "dlg"), loaded).under(defense.local)
    clients = {k: np.arange(20 * k, 20 * k + 20) for k in range(4)}
    x, y = loaded.train
    holdings = {k: Examples(x[rows], y[rows]) for k, rows in clients.items()}
    engine, keep = choose_engine(task), Keep(frozenset({0}))
    trained = train(task, FEDERATION, defense, holdings, loaded.test, KEY.child("training"), engine=engine, keep=keep)
    return TrainedFederation(task, FEDERATION, defense, trained, loaded.train, loaded.test, clients, engine, KEY)


@functools.cache
def ssim(name, attack, **parameters):
    """[n] SSIM of an attack."""
    seen, truth = observe(federation(name), View.parse("server"), PROBE)
    guesses = registry.build("attack", attack, parameters).run(seen, KEY).guesses
    found, _ = score_reconstruction([v.x for v in truth.victims], [v.y for v in truth.victims], guesses)
    (estimate,) = [e for e in found if e.name == "ssim"]
    return [0.0 if value is None else value for value in estimate.values]


@functools.cache
def floor():
    """Mean SSIM of the best of three guesses without any message; no defense changes it."""
    return max(np.mean(ssim("none", "prior", guess=guess)) for guess in ("mean", "flat", "other"))


def naive_and_aware(name):
    """[n] SSIM of `map` against a defense, without and with its likelihood."""
    return [ssim(name, "map", objective=how, evaluations=60) for how in ("l2", "likelihood")]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
@pytest.mark.table(7)
@pytest.mark.ci(2)
def test_the_aware_attack_does_no_worse_than_the_naive_one(name):
    naive, aware = naive_and_aware(name)
    low = stats.mean_interval(np.subtract(naive, aware)).low
    # below the floor both find nothing, and the likeliest image is then flat, with an SSIM near zero
    beaten = low is not None and low > 0 and np.mean(naive) > floor()
    assert not beaten, f"naive {np.mean(naive):.3f}, aware {np.mean(aware):.3f}, the difference at least {low:.3f}"


@pytest.mark.parametrize("name", GAINS)
@pytest.mark.matrix
def test_the_aware_attack_does_better(name):
    naive, aware = naive_and_aware(name)
    low = stats.mean_interval(np.subtract(aware, naive)).low
    assert low is not None
    assert low > 0.1
    assert np.mean(aware) > floor() + 0.2

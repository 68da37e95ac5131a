"""The expected time of a study, with defenses and attacks that take a known time."""

import time
from dataclasses import dataclass

import pytest

from leakgauge.harness.study.cost import estimate, span
from leakgauge.harness.study.study import resolve
from tests.doubles import Counting, Echo, study_table

_MESSAGE = 0.004
_VICTIM = 0.02
_UNIT = 0.0005


@dataclass(frozen=True)
class Slow(Counting):
    """A defense whose message takes a known time."""

    def encode(self, state, memory, update, link, private):
        time.sleep(_MESSAGE)
        return super().encode(state, memory, update, link, private)


@dataclass(frozen=True)
class Patient(Echo):
    """An attack whose evaluations take a known time."""

    evaluations: int = 1000

    def run(self, seen, key):
        time.sleep(len(seen.messages) * (_VICTIM + self.evaluations * _UNIT))
        return super().run(seen, key)


@dataclass(frozen=True)
class Broken(Counting):
    """A defense without an init."""

    def init(self, setting):
        raise RuntimeError("broken")


def study(defense="tests.test_cost:Slow", audit=0, data="digits", **federation):
    one = {"clients": 20, "rounds": 50, "algorithm": "fedsgd", "batch": 8, "evaluate_every": 50, **federation}
    attack = {"name": "tests.test_cost:Patient", "evaluations": 4000, "target": {"count": 12}}
    defenses = defense if isinstance(defense, tuple) else [defense]
    return resolve(study_table(one, defenses, [attack], data=data, model="linear", seeds=[0], audit=audit))


@pytest.mark.parametrize("federation", [{}, {"participants": 10, "rounds": 100}])
@pytest.mark.matrix
def test_turns_victims_and_evaluations_are_scaled_up(tmp_path, federation):
    cost = estimate(study(**federation), tmp_path)
    assert 10 * _MESSAGE < cost.training / 50 < 40 * (_MESSAGE + 0.001)
    sleeps = 12 * (_VICTIM + 4000 * _UNIT)
    assert sleeps / 2 < cost.attacks < 2 * sleeps
    assert (cost.audits, cost.measured, cost.kinds) == (0, 3, 3)
    assert str(cost).endswith("attacks on one core (3 of 3 kinds of jobs measured on this machine)")


@pytest.mark.matrix
def test_local_steps_are_scaled_up(tmp_path):
    few, many = (
        estimate(study("none", algorithm="fedavg", local_steps=steps, batch=4), tmp_path).training
        for steps in (10, 1000)
    )
    assert many > 10 * few


def test_an_audit_has_a_price_and_a_goal_its_tries(tmp_path):
    plain, audited = (estimate(study("gaussian", audit=number), tmp_path, 0.0) for number in (0, 100))
    assert audited == plain._replace(audits=3.5)
    goal = estimate(study(({"name": "gaussian", "target": {"accuracy_loss": 0.1}},)), tmp_path, 0.0)
    assert goal.training == pytest.approx(7 * plain.training)


@pytest.mark.matrix
def test_what_cannot_be_measured_costs_what_its_size_suggests(tmp_path):
    cost = estimate(study("tests.test_cost:Broken"), tmp_path)
    assert (cost.measured, cost.kinds) == (0, 3)
    assert 0 < cost.training < 10
    assert str(cost) == "how long it takes is unknown: broken"
    cost = estimate(study(), tmp_path, 0.0)
    assert str(cost) == "how long it takes is unknown: no job could be measured in time"
    half = {"name": "gaussian", "epsilon": [8.0], "clip": 1.0}, {"name": "tests.test_cost:Broken"}
    assert str(estimate(study(half), tmp_path)).endswith("measured on this machine; a job that cannot run: broken)")


def test_without_its_data_a_study_has_no_cost_but_a_reason(tmp_path):
    problem = str(estimate(study(data="mnist"), tmp_path))
    assert problem.startswith("how long it takes is unknown: ")
    assert "mnist" in problem


@pytest.mark.parametrize(("seconds", "text"), [(2, "2 s"), (119, "119 s"), (240, "4 min"), (128_160, "35.6 h")])
def test_a_duration_has_a_unit(seconds, text):
    assert span(seconds) == text

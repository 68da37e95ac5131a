"""RMIA's temperature and variant: chosen by the shadows, each attacked once, and never by the target."""

import dataclasses

import pytest
import torch

from leakgauge import Key, rng
from leakgauge.attacks._members.scores import confidence, rmia
from leakgauge.attacks._members.shadowing import Shadowing, halves, outputs, shadow
from leakgauge.attacks.rmia import RMIA
from leakgauge.harness.core.cell import PartSpec
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.stats import auc
from leakgauge.harness.federation import registry
from tests.by_rows import by_rows
from tests.test_shadow_attacks import TASK, brief, observed

KEY = Key(5)
OLD = {
    "online": RMIA(temperature=1.0, variant="online", weight=0.5),
    "offline": RMIA("offline", temperature=1.0, weight=0.5),
}


class Planted:
    """Models with planted outputs of two classes; a model is its number, and a record its place."""

    def __init__(self, phi, inside):
        self.table, self.inside = torch.stack([phi, torch.zeros_like(phi)], -1), inside

    def outputs(self, model, x):
        return self.table[int(model), x]

    def examples(self):
        return Examples(torch.arange(self.table.shape[1]), torch.zeros(self.table.shape[1]).long())

    def shadowing(self, rows):
        rows, pool = torch.tensor(rows), self.examples()
        aside = Examples(*(each[:0] for each in pool))
        return Shadowing(rows, pool, self.inside[rows], self.inside[rows], aside, rows // 2)

    def scores(self, attack, target, rows):
        return attack.scores(self, torch.tensor(target), self.examples(), self.shadowing(rows))


def planted(runs, scale=1.0, noisy=0.0, records=3000):
    """A third of the records shows membership; the rest is noise where models are unsure, and where they are sure.

    The first matter at a high temperature and the last at a low one, so the best one lies between and is about
    3.3 times `scale`. `noisy`: standard deviation that only records inside have.
    """
    group, inside = torch.arange(records) % 3, halves(KEY.child("halves"), runs, records, records // 2)
    center, gap, spread = (torch.tensor(each)[group] for each in ((-4.0, 4.0, 16.0), (0.0, 2.0, 0.0), (1.0, 0.7, 4.0)))
    noise = rng.normal(KEY.child("noise"), (2, runs, records), dtype=torch.float64)
    return Planted(scale * (center + gap * inside + spread * noise[0] + noisy * inside * noise[1]), inside)


def area(scores, members):
    return auc(scores[members].numpy(), scores[~members].numpy()).value


@by_rows((0.3, 1.0), (0.6, 2.0), (2.0, 3.0))
def test_mock_targets_choose_the_temperature_that_is_best_for_a_target(scale, best):
    world, rows = planted(18, scale), list(range(2, 18))
    assert RMIA(variant="online", weight=0.5).choose(world, world.shadowing(rows)) == (best, None, 0.5)
    areas = {
        temperature: area(
            world.scores(RMIA(temperature=temperature, variant="online", weight=0.5), 0, rows), world.inside[0]
        )
        for temperature in (1.0, 1.5, 2.0, 3.0)
    }
    assert max(areas, key=areas.get) == best


@by_rows((0.0, None), (8.0, 0.3))
def test_mock_targets_choose_the_variant(noisy, best):
    world, rows = planted(6, 0.6, noisy), list(range(2, 6))
    assert RMIA(temperature=2.0, weight=0.5).choose(world, world.shadowing(rows)) == (2.0, best, 0.5)
    areas = {
        variant: area(world.scores(RMIA(temperature=2.0, variant=variant, weight=0.5), 0, rows), world.inside[0])
        for variant in ("online", "offline")
    }
    assert max(areas, key=areas.get) == ("online" if best is None else "offline")


def test_another_membership_of_the_target_leaves_the_choice_and_the_scores_of_other_records():
    world, rows = planted(18, 0.6), list(range(2, 18))
    # run 1 has the records that run 0 lacks; the third target has the odd records of run 0 and the even ones of run 1
    mixed = torch.where(torch.arange(3000)[:, None] % 2 == 1, world.table[0], world.table[1])
    world.table = torch.cat([world.table, mixed[None]])
    first, second, third = (world.scores(RMIA(), target, rows) for target in (0, 1, 18))
    temperature, _, weight = RMIA().choose(world, world.shadowing(rows))
    assert torch.equal(first, world.scores(RMIA(temperature=temperature, variant="online", weight=weight), 0, rows))
    assert torch.equal(third[1::2], first[1::2])
    assert torch.equal(third[::2], second[::2])
    assert not torch.equal(first, second)


def test_a_federation_with_other_members_gets_the_same_choice():
    scores = [RMIA().run(brief(observed(first)), KEY).scores for first in (0, 1000)]
    trained = shadow(brief(observed()), KEY, runs=4, online=True, simulate=False)
    temperature, offline_a, weight = RMIA().choose(TASK, trained)
    variant = "online" if offline_a is None else "offline"
    fixed = RMIA(temperature=temperature, variant=variant, weight=weight)
    for first, own in zip((0, 1000), scores, strict=True):
        assert torch.equal(own, fixed.run(brief(observed(first)), KEY).scores)


@pytest.mark.parametrize("mode", OLD)
def test_the_parameters_of_earlier_versions_give_their_scores(mode):
    seen = brief(observed(auxiliary=slice(800, 1700)))
    trained = shadow(seen, KEY, runs=4, online=mode == "online", simulate=False)
    models = [seen.final, *trained.models]
    own, aside = (confidence(outputs(TASK, models, x), y).sigmoid() for x, y in (seen.candidates, trained.aside))
    a = 0.3 if mode == "offline" else None
    expected = rmia(own[0], own[1:], trained.candidates, aside[0], aside[1:], offline_a=a)
    assert torch.equal(OLD[mode].run(seen, KEY).scores, expected)


@pytest.mark.parametrize("mode", OLD)
def test_a_stored_cell_keeps_its_name_and_its_attack(mode):
    stated = {"mode": mode, "offline_a": 0.3, "shadows": 4, "simulate": False}
    cell = PartSpec("rmia", stated | {"temperature": 1.0, "variant": "online", "weight": 0.5})
    assert cell == PartSpec("rmia", stated)
    assert registry.build_attack(cell) == dataclasses.replace(OLD[mode], variant="online", weight=0.5)
    now = PartSpec("rmia", registry.defaults("attack", "rmia"))
    assert now.parameters["temperature"] == now.parameters["variant"] == "auto"
    assert registry.build_attack(now) == RMIA()


@by_rows(
    ([0, 1], {}, (1.5, None, 0.4)),
    ([0, 2], {}, (1.5, None, 0.4)),
    ([0, 1], {"mode": "offline"}, (1.5, 0.3, 0.5)),
    ([0, 1], {"temperature": 2.0}, (2.0, None, 0.4)),
    ([0, 1], {"variant": "offline"}, (1.5, 0.3, 0.5)),
    ([0, 1, 2, 3], {"mode": "offline", "temperature": 1.0, "variant": "online"}, (1.0, 0.3, 0.5)),
)
def test_without_two_shadows_of_other_pairs_the_usual_parameters_hold(rows, parameters, expected):
    world = planted(4)
    assert RMIA(**parameters).choose(world, world.shadowing(rows)) == expected


def test_a_shadow_whose_outputs_are_not_finite_is_neither_target_nor_rival():
    world = planted(6, 0.6)
    expected = RMIA().choose(world, world.shadowing([0, 1, 2, 3]))
    world.table[4:] = torch.nan
    assert RMIA().choose(world, world.shadowing(range(6))) == expected


def test_the_shadows_of_a_pair_share_their_number_and_no_record():
    trained = shadow(brief(observed()), KEY, runs=5, online=True, simulate=False)
    assert trained.pairs.tolist() == [0, 0, 1, 1, 2]
    assert not (trained.inside[::2][:2] & trained.inside[1::2]).any()

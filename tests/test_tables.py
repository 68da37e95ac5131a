"""Tables: columns and when a guess of them is right, the mixture, and records that a search restores."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from leakgauge import Key, rng
from leakgauge.attacks._engine.matching import Evaluation
from leakgauge.attacks._engine.tables import FirstLayer, Mixture, restore, settle, typical
from leakgauge.attacks.map import MAP
from leakgauge.attacks.prior import Prior
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.laplace import Laplace
from leakgauge.defenses.none import NoDefense
from leakgauge.defenses.top_k import TopK
from leakgauge.harness.core.contract import Examples, Guess
from leakgauge.harness.core.form import Table
from leakgauge.harness.core.metrics import metric
from leakgauge.harness.core.table import Column, columns_right, commonest, likeliest_number, records
from leakgauge.harness.data import DataSet
from leakgauge.harness.learn.gradients import gradients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.score import score_reconstruction
from tests.by_rows import by_rows
from tests.victims import sent

COLUMNS = (Column("age", 1, 0.05), Column("color", 3), Column("shape", 4), Column("size", 1, 0.1))
WIDTH = 9
TASK = ModelTask(build("mlp-small", (WIDTH,), 2), stated=Table(COLUMNS))


def table(n, key=0):
    """Two kinds of people: the kind decides color and shape nine times in ten, and moves both numbers."""
    draw = rng.uniform(Key(key, ("table",)), (n, 6), dtype=torch.float64)
    kind = (draw[:, 0] < 0.4).long()
    color = torch.where(draw[:, 1] < 0.9, kind, 2)
    shape = torch.where(draw[:, 2] < 0.9, 3 * kind, (draw[:, 3] * 4).long())
    parts = [0.3 + 0.4 * kind + 0.2 * draw[:, 4], color, shape, 0.5 * kind + 0.4 * draw[:, 5]]
    hot = [torch.nn.functional.one_hot(parts[1], 3), torch.nn.functional.one_hot(parts[2], 4)]
    return torch.cat([parts[0][:, None], *hot, parts[3][:, None]], 1).float()


def share(guesses, x):
    found = torch.cat([guess.x for guess in guesses])
    return columns_right(x, found, COLUMNS).double().mean()


def seen(defense, x, task=TASK):
    batches = [(record[None], torch.tensor([number % 2])) for number, record in enumerate(x)]
    return replace(sent(task, batches, defense), auxiliary=Examples(table(1000, 9), torch.arange(1000) % 2))


def test_a_record_has_its_largest_category_and_numbers_in_range():
    x = torch.tensor([[-0.2, 0.1, 0.4, 0.3, 0.0, -1.0, -0.5, -2.0, 1.5]])
    assert records(x, COLUMNS).tolist() == [[0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]]
    whole = table(50)
    assert torch.equal(records(whole, COLUMNS), whole)


def test_a_number_is_right_within_its_tolerance_and_a_category_if_it_is_the_largest():
    x = table(1).repeat(4, 1)
    guess = x.clone()
    guess[0, 0] += 0.05
    guess[1, 0] -= 0.051
    guess[2, 1:4] = x[2, 1:4] * 0.1
    guess[3, 1:4] = x[3, 1:4].roll(1)
    assert columns_right(x, guess, COLUMNS).tolist() == [
        [True] * 4,
        [False, True, True, True],
        [True] * 4,
        [True, False, True, True],
    ]


def test_the_commonest_is_the_guess_that_is_right_most_often():
    x, auxiliary = table(501), table(1000, 9)
    found = commonest(x, COLUMNS)
    assert found[1:4].argmax() == x[:, 1:4].sum(0).argmax()
    for place in (0, 8):
        others = x.clone()[:, None].repeat(1, 101, 1)
        others[:, :, place] = torch.linspace(0, 1, 101)
        column = {0: 0, 8: 3}[place]
        best = columns_right(x[:, None], others, COLUMNS)[:, :, column].double().mean(0).max()
        assert columns_right(x, found.expand_as(x), COLUMNS)[:, column].double().mean() > best - 0.02
    guess = Prior(guess="majority").run(seen(NoDefense(), x[:2]), Key(0)).guesses[1]
    assert torch.equal(guess.x, commonest(auxiliary, COLUMNS)[None])


def test_of_several_commonest_numbers_it_is_the_middle_one():
    x = torch.tensor([[0.1], [0.5], [0.9], [0.7], [0.3]])
    assert commonest(x, (Column("a", 1, 0.01),)).tolist() == [0.5]
    found = likeliest_number(torch.stack([x[:, 0], 1 - x[:, 0] / 2]), torch.ones(2, 5), 0.01)
    assert found.tolist() == [0.5, 0.75]


def test_the_weight_within_the_tolerance_decides():
    x, weights = torch.tensor([0.9, 0.1, 0.15, 0.2, 0.5]), torch.tensor([0.3, 0.1, 0.15, 0.1, 0.2])
    assert float(likeliest_number(x, weights, 0.06)) == pytest.approx(0.15)
    assert float(likeliest_number(x, weights, 0.01)) == pytest.approx(0.9)


def test_without_columns_there_is_no_majority():
    with pytest.raises(ValueError, match="expected data with known columns, such as adult, for guess 'majority'"):
        Prior(guess="majority").run(seen(NoDefense(), table(2), replace(TASK, stated=None)), Key(0))


def test_columns_must_fit_the_inputs():
    data = Examples(table(4), torch.tensor([0, 1, 0, 1]))
    assert DataSet("mine", data, data, ("a", "b"), public=True, stated=Table(COLUMNS)).form.columns == COLUMNS
    with pytest.raises(ValueError, match=r"expected columns for inputs \(9,\), got 3 of another width"):
        DataSet("mine", data, data, ("a", "b"), public=True, stated=Table(COLUMNS[:3]))


def test_scores_have_every_column_and_a_failed_record_is_wrong():
    x = table(3)
    guesses = [Guess(one[None], torch.tensor([0]), 0.0, 1) for one in x]
    guesses[1] = replace_guess(guesses[1], x[1:2].roll(1, 1))
    guesses[2] = Guess(x[2:] * torch.nan, torch.tensor([0]), 0.0, 1)
    (columns, *rest), _ = score_reconstruction(list(x[:, None]), [torch.tensor([0])] * 3, guesses, None, Table(COLUMNS))
    right = columns_right(x[1], x[1].roll(1), COLUMNS).double()
    assert columns.name == "columns"
    assert columns.values == (1.0, float(right.mean()), 0.0)
    assert [one.name for one in rest[:4]] == ["column/age", "column/color", "column/shape", "column/size"]
    assert rest[1].values == (1.0, float(right[1]), 0.0)
    assert metric("column/age").words == "age right"
    assert metric("column/age").higher_leaks


def replace_guess(guess, x):
    return Guess(x, guess.y, guess.objective, guess.evaluations)


def test_a_mixture_knows_which_columns_go_together():
    held = table(400, 3)
    alone, mixed = (Mixture.fit(table(1000, 9), COLUMNS, Key(0), classes) for classes in (1, 4))
    assert mixed.energy(held).mean() < alone.energy(held).mean() - 1
    swapped = torch.cat([held[:, :4], held.roll(1, 0)[:, 4:]], 1)
    assert alone.energy(swapped).mean() == pytest.approx(float(alone.energy(held).mean()))
    assert mixed.energy(swapped).mean() > mixed.energy(held).mean() + 1


def test_a_mixture_is_a_distribution_of_values():
    codes = torch.cartesian_prod(torch.arange(3), torch.arange(4))
    x = torch.cat([torch.nn.functional.one_hot(codes[:, 0], 3), torch.nn.functional.one_hot(codes[:, 1], 4)], 1)
    mixture = Mixture.fit(table(1000, 9)[:, 1:8], COLUMNS[1:3], Key(0))
    assert mixture.energy(x.double()).neg().exp().sum() == pytest.approx(1.0)


def test_draws_of_a_mixture_have_its_distribution():
    mixture = Mixture.fit(table(1000, 9), COLUMNS, Key(0))
    x = mixture.draw(4000, Key(3))
    assert torch.equal(x, records(x, COLUMNS))
    assert torch.allclose(x.mean(0), table(1000, 9).double().mean(0), atol=0.03)
    # columns go together as in the data: color and shape of one kind
    pairs = [(one[:, 1] * one[:, 4]).double().mean() for one in (x, table(1000, 9))]
    assert float(pairs[0]) == pytest.approx(float(pairs[1]), abs=0.03)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_few_records_are_enough_for_a_mixture(n):
    mixture = Mixture.fit(table(n), COLUMNS, Key(0))
    assert mixture.energy(table(20, 5)).isfinite().all()


def near(x, std):
    """A misfit: records near x [m, b, p], with normal noise."""

    def misfit(candidates, instances):
        off = candidates - x.flatten(1)[instances]
        return Evaluation(off.square().sum(1) / (2 * std**2), None)

    return misfit


def test_settling_finds_the_best_record_and_sampling_the_distributions_of_single_columns():
    mixture = Mixture.fit(table(1000, 9), COLUMNS, Key(0))
    x = table(8, 4)[:, None]
    start = commonest(table(1000, 9), COLUMNS).expand_as(x).clone()
    found = settle(near(x, 0.01), mixture, start)
    assert columns_right(x, found.x, COLUMNS).all()
    assert torch.equal(found.x, records(found.x, COLUMNS))
    # without evidence the likeliest values, whatever the start: of one kind's records more become the commonest one's
    rare = torch.tensor([[0.8, 0, 1, 0, 0, 0, 0, 1, 0.7]]).expand(64, 1, -1).clone()
    blind = typical(near(rare, 1e6), mixture, rare, Key(1)).x
    usual = commonest(table(1000, 9), COLUMNS)
    assert columns_right(usual, blind[:, 0], COLUMNS)[:, 1:3].double().mean() > 0.6
    assert not columns_right(usual, rare[:, 0], COLUMNS)[:, 1:3].any()
    # with evidence, they stay
    assert columns_right(rare[:, 0], typical(near(rare, 0.01), mixture, rare, Key(1)).x[:, 0], COLUMNS).all()


def test_the_first_layer_alone_tells_a_record_through_noise():
    x, y = table(12, 4), torch.nn.functional.one_hot(torch.arange(12) % 2, 2).float()
    params, mixture = TASK.init(Key(1)), Mixture.fit(table(1000, 9), COLUMNS, Key(0))
    whole = gradients(TASK, params, x[:, None], y[:, None])
    noisy = whole + 0.1 * whole[:, : 32 * WIDTH].std() * rng.normal(Key(2), whole.shape)
    start = commonest(table(1000, 9), COLUMNS).expand(12, 1, -1).clone()
    told, found = FirstLayer.of(TASK, noisy).settle(mixture, start, Key(3))
    assert columns_right(x, found.x[:, 0], COLUMNS).double().mean() > 0.9
    assert (told.least(x[:, None]) < told.least(x.roll(1, 0)[:, None]) + 5).double().mean() > 0.8
    assert FirstLayer.of(TASK, whole * (rng.uniform(Key(4), whole.shape) < 0.2)) is None
    assert FirstLayer.of(ModelTask(build("cnn2", (1, 16, 16), 2)), torch.zeros(1, 4)) is None


@by_rows(
    (NoDefense(), 0.99),
    (Laplace(epsilon=60.0, clip=1.0), 0.8),
    (TopK(fraction=0.1), 0.8),
    (Gaussian(clip=10.0, noise_std=0.02), 0.85),
    ids=["none", "laplace", "top-k", "gaussian"],
)
@pytest.mark.matrix
def test_map_restores_columns_that_the_majority_does_not(defense, least):
    x = table(8, 4)
    here = seen(defense, x)
    found = MAP(evaluations=60, warm=60).run(here, Key(3))
    floor = share(Prior(guess="majority").run(here, Key(3)).guesses, x)
    assert share(found.guesses, x) > max(least, floor + 0.1)
    assert "mixture of" in found.prior
    assert all(torch.equal(guess.x, records(guess.x, COLUMNS)) for guess in found.guesses)


@pytest.mark.matrix
def test_behind_much_noise_nothing_is_worse_than_the_majority():
    x = table(64, 4)
    here = seen(Gaussian(clip=1.0, noise_std=10.0), x)
    floor = share(Prior(guess="majority").run(here, Key(3)).guesses, x)
    assert share(MAP(evaluations=20).run(here, Key(3)).guesses, x) > floor - 0.06


def test_without_evidence_records_are_nearly_as_good_as_the_majority():
    x, others = table(400, 4), table(1000, 9)
    mixture, usual = Mixture.fit(others, COLUMNS, Key(0)), commonest(others, COLUMNS)
    misfit = near(x[:, None], 1e6)
    found = restore(misfit, mixture, x.roll(1, 0)[:, None], None, Key(1))
    floor = columns_right(x, usual.expand_as(x), COLUMNS).double().mean()
    # the likeliest whole records are 0.12 below it
    assert columns_right(x, found.x[:, 0], COLUMNS).double().mean() > floor - 0.1


@pytest.mark.matrix
def test_the_same_key_restores_the_same_records():
    x = table(4, 4)
    here = seen(Gaussian(clip=10.0, noise_std=0.02), x)
    first, second = (MAP(evaluations=20, warm=20).run(here, Key(3)).guesses for _ in range(2))
    assert all(torch.equal(a.x, b.x) for a, b in zip(first, second, strict=True))
    assert np.isfinite([guess.objective for guess in first]).all()
    assert share(first, x) > 0.85

"""The batched L-BFGS, against the textbook recursion and scipy; then when and why each problem ends."""

import numpy as np
import pytest
import scipy.optimize
import torch

from leakgauge import Key, rng
from leakgauge.attacks._engine.matching import Evaluation
from leakgauge.attacks._search import lbfgs
from leakgauge.attacks._search.lbfgs import Stop, _Memory, minimize


@pytest.fixture(autouse=True, params=[True, False], ids=["loops", "torch"])
def memory(request, monkeypatch):
    """Every test with the compiled loops, if there are any, and without them."""
    if not request.param:
        monkeypatch.setattr(lbfgs, "library_for", lambda tensor: None)


class Calls:
    """A function of each row alone, by autograd, that records the evaluated instances."""

    def __init__(self, values):
        self.values = values
        self.evaluated = []

    def __call__(self, candidates, instances):
        self.evaluated.append(instances.tolist())
        x = candidates.detach().requires_grad_()
        value = self.values(x, instances)
        return Evaluation(value.detach(), torch.autograd.grad(value.sum(), x)[0])


def rosenbrock(x, instances):
    return (100 * (x[:, 1:] - x[:, :-1].square()).square() + (1 - x[:, :-1]).square()).sum(1)


def draw(name, *shape):
    return rng.normal(Key(0).child(name), shape, torch.float64)


def quadratics(n, width):
    """n functions (x - c)' A (x - c) / 2 with eigenvalues from 1 to 100; the function and the centers."""
    basis = torch.linalg.qr(draw("basis", n, width, width))[0]
    matrices = basis @ torch.diag(torch.logspace(0, 2, width, dtype=torch.float64)) @ basis.mT
    centers = draw("centers", n, width)

    def values(x, instances):
        r = x - centers[instances]
        return 0.5 * torch.einsum("ni,nij,nj->n", r, matrices[instances], r)

    return Calls(values), centers


def until(n, evaluations=1000, tolerance=1e-20, **rest):
    return Stop(evaluations, torch.full((n,), tolerance, dtype=torch.float64), **rest)


@pytest.mark.parametrize(("pairs", "size"), [(1, 5), (3, 5), (5, 5), (12, 5)])
def test_directions_equal_those_of_the_two_loop_recursion(pairs, size):
    # Nocedal & Wright 2006, Algorithm 7.4
    n, width = 3, 20
    steps = draw("steps", pairs, n, width)
    changes = steps * torch.linspace(0.5, 3, width, dtype=torch.float64) + 0.05 * draw("changes", pairs, n, width)
    memory = _Memory.empty(steps[0], size)
    steps, changes = (one.to(lbfgs._PAIRS).double() for one in (steps, changes))
    for step, change in zip(steps, changes, strict=True):
        gradient = draw("gradient", n, width)
        found = memory.directions(torch.ones(n, dtype=torch.bool), step, change, gradient)
    for i in range(n):
        stored = list(zip(steps[-size:, i], changes[-size:, i], strict=True))
        q, alphas = gradient[i].clone(), []
        for s, y in reversed(stored):
            alphas.append(s @ q / (s @ y))
            q -= alphas[-1] * y
        s, y = stored[-1]
        r = s @ y / (y @ y) * q
        for (s, y), alpha in zip(stored, reversed(alphas), strict=True):
            r += s * (alpha - y @ r / (s @ y))
        assert found[i].numpy() == pytest.approx(-r.numpy(), rel=1e-9, abs=1e-12)


def test_problems_with_unequal_numbers_of_pairs_have_their_own_directions():
    n, width = 3, 20
    steps, gradient = draw("steps", 4, n, width), draw("gradient", n, width)
    changes = steps * torch.linspace(0.5, 3, width, dtype=torch.float64)
    together = _Memory.empty(gradient, 3)
    for number, (step, change) in enumerate(zip(steps, changes, strict=True)):
        rows = torch.arange(n) >= number if number < n else torch.arange(n) == 0
        found = together.directions(rows, step, change, gradient)
    for i in range(n):
        alone = _Memory.empty(gradient[:1], 3)
        for number in [number for number in range(4) if (i >= number if number < n else i == 0)]:
            pair = steps[number, i : i + 1], changes[number, i : i + 1]
            expected = alone.directions(torch.tensor([True]), *pair, gradient[i : i + 1])
        assert torch.allclose(found[i], expected[0], rtol=1e-10, atol=1e-12)


def test_quadratics_are_solved_and_leave_the_batch():
    function, centers = quadratics(6, 30)
    found = minimize(function, torch.zeros(6, 30, dtype=torch.float64), until(6))
    assert found.x.numpy() == pytest.approx(centers.numpy(), abs=1e-9)
    assert np.bincount(np.concatenate(function.evaluated)).tolist() == found.evaluations.tolist()
    assert function.evaluated[-1] != function.evaluated[0]
    assert max(map(len, function.evaluated)) == 6


def test_problems_that_are_watched_seldom_end_at_the_next_look():
    function, centers = quadratics(6, 30)
    start = torch.zeros(6, 30, dtype=torch.float64)
    found = minimize(function, start, until(6, evaluations=1001), watch=16)
    assert found.x.numpy() == pytest.approx(centers.numpy(), abs=1e-9)
    assert (found.evaluations % 16 == 0).all()
    spent = minimize(function, start, until(6, evaluations=21, tolerance=0.0), watch=16)
    assert set(spent.evaluations.tolist()) == {21}


def test_each_problem_may_have_its_own_budget():
    function, _ = quadratics(6, 30)
    budgets = torch.tensor([3, 7, 21, 21, 30, 1])
    stop = until(6, evaluations=21, tolerance=0.0, each=budgets)
    found = minimize(function, torch.zeros(6, 30, dtype=torch.float64), stop)
    assert found.evaluations.tolist() == [3, 7, 21, 21, 21, 1]


def test_directions_stay_those_of_the_two_loop_recursion_after_many_pairs():
    # an error of the inverse that a pair leaves behind would grow from pair to pair
    n, width, size = 2, 30, 8
    matrices = torch.linalg.qr(draw("basis", n, width, width))[0] * torch.logspace(0, 3, width, dtype=torch.float64)
    matrices = matrices @ matrices.mT
    memory, fresh = _Memory.empty(torch.zeros(n, width), size), _Memory.empty(torch.zeros(n, width), size)
    steps, gradients = draw("steps", 500, n, width).float(), draw("gradients", 500, n, width).float()
    every = torch.ones(n, dtype=torch.bool)
    for number, (step, gradient) in enumerate(zip(steps, gradients, strict=True)):
        change = (matrices @ step.double()[..., None])[..., 0].float()
        found = memory.directions(every, step, change, gradient)
        if number >= len(steps) - size:
            expected = fresh.directions(every, step, change, gradient)
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))


def test_rosenbrock_needs_at_most_half_as_many_evaluations_again_as_scipy():
    start = 2 * draw("start", 16, 2)  # in four dimensions there is a second minimum
    found = minimize(Calls(rosenbrock), start, until(16, tolerance=1e-12))
    assert (found.value <= 1e-12).all()
    how = {"jac": scipy.optimize.rosen_der, "method": "L-BFGS-B", "options": {"maxcor": 100}}
    peers = [scipy.optimize.minimize(scipy.optimize.rosen, row, **how) for row in start.numpy()]
    assert int(found.evaluations.sum()) < 1.5 * sum(peer.nfev for peer in peers)
    assert scipy.optimize.rosen(found.x.numpy().T).max() < 1e-11


@pytest.mark.parametrize("scale", [2.0**-60, 2.0**40])
def test_the_scale_of_the_values_changes_nothing(scale):
    # a gradient of 1e-5 once made a first step of 1e-5, which is lost in the rounding of an image
    function, _ = quadratics(3, 30)
    scaled = Calls(lambda x, instances: scale * function.values(x, instances))
    start = torch.zeros(3, 30, dtype=torch.float64)
    plain, found = (minimize(f, start, until(3, evaluations=60, tolerance=0.0)) for f in (function, scaled))
    assert torch.equal(found.x, plain.x)


def test_one_problem_ends_as_it_would_alone():
    start = torch.zeros(6, 30, dtype=torch.float64)
    function, _ = quadratics(6, 30)
    together = minimize(function, start, until(6, tolerance=1e-8))
    for i in range(6):
        alone = Calls(lambda x, instances, i=i: function.values(x, instances + i))
        found = minimize(alone, start[i : i + 1], until(1, tolerance=1e-8))
        assert abs(int(found.evaluations[0]) - int(together.evaluations[i])) <= 1
        assert torch.allclose(found.x[0], together.x[i], atol=1e-4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_problem_that_is_not_finite_fails_alone(bad):
    function, centers = quadratics(4, 10)
    broken = Calls(lambda x, instances: torch.where(instances == 2, bad, function.values(x, instances)))
    start = torch.ones(4, 10, dtype=torch.float64)
    found = minimize(broken, start, until(4))
    assert found.value[2] == torch.inf
    assert torch.equal(found.x[2], start[2])
    assert found.evaluations[2] == 1
    assert found.x[[0, 1, 3]].numpy() == pytest.approx(centers[[0, 1, 3]].numpy(), abs=1e-9)


def test_a_step_to_a_value_that_is_not_finite_is_halved():
    function = Calls(lambda x, instances: (x - x.log()).sum(1))  # NaN below zero, least at 1
    found = minimize(function, torch.full((2, 5), 40.0, dtype=torch.float64), until(2, tolerance=5 + 1e-12))
    assert (found.value <= 5 + 1e-12).all()
    assert found.x.numpy() == pytest.approx(1.0, abs=1e-5)


def test_a_gradient_that_is_not_finite_is_not_accepted():
    def function(x, instances):
        value, gradient = x.square().sum(1), 2 * x
        return Evaluation(value, torch.where((value < 0.5)[:, None], torch.nan, gradient))

    found = minimize(function, torch.full((1, 3), 2.0, dtype=torch.float64), until(1))
    assert found.value[0] >= 0.5
    assert found.evaluations[0] < 200  # no step lowers the value


def test_same_arguments_give_the_same_numbers():
    start = draw("start", 8, 6).float()
    first, second = (minimize(Calls(rosenbrock), start, until(8, evaluations=120)) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_the_value_is_that_of_x_and_never_above_the_start_which_is_not_modified():
    start = 3 * draw("start", 8, 6)
    before = start.clone()
    for evaluations in (1, 2, 3, 10, 40):
        found = minimize(Calls(rosenbrock), start, until(8, evaluations=evaluations))
        assert torch.equal(found.value, rosenbrock(found.x, None))
        assert (found.value <= rosenbrock(start, None)).all()
        assert int(found.evaluations.max()) == evaluations
        assert torch.equal(start, before)


def test_a_zero_gradient_ends_at_once():
    found = minimize(Calls(lambda x, instances: 1 + x.square().sum(1)), torch.zeros(1, 4), until(1))
    assert found.evaluations.tolist() == [1]


def test_a_value_that_hardly_falls_stalls():
    # falls by a ten-thousandth of itself in 50 evaluations, forever
    function = Calls(lambda x, instances: 1 + 1e-6 * (1 + x.square()).sum(1).pow(0.1))
    found = minimize(function, torch.full((1, 4), 1e3), until(1, evaluations=5000, decrease=1e-3))
    assert found.evaluations.tolist() == [400]  # the first window of 200 starts at an infinite value

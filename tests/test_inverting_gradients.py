"""Inverting gradients and its signed Adam: the source's trajectory, stopping, and reconstructions."""

import dataclasses
import math

import pytest
import torch

from leakgauge import Defense, Key, rng
from leakgauge.attacks._engine.matching import Evaluation
from leakgauge.attacks._search.adam import Schedule, descend
from leakgauge.attacks.inverting_gradients import InvertingGradients
from leakgauge.harness.federation import registry
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from tests.doubles import small_task
from tests.victims import make

KEY = Key(0)
MLP = small_task()
CHEAP = InvertingGradients(evaluations=40)


@dataclasses.dataclass(frozen=True, eq=False)
class Raw(Defense):
    """A defense that sends any numbers unchanged, finite or not."""

    def encode(self, state, memory, update, link, private):
        return update.numpy().tobytes(), None

    def estimate(self, state, received, link):
        return torch.frombuffer(bytearray(received), dtype=torch.float32)

    def likelihood(self, state, received, links):
        raise AssertionError("a naive attack uses no likelihood")

    def claim(self, history, setting):
        raise NotImplementedError


@dataclasses.dataclass
class Bowl:
    """Squared distances to targets [n, D]; records its calls. breaks: {instance: the call after which it is NaN}."""

    targets: torch.Tensor
    breaks: dict = dataclasses.field(default_factory=dict)
    calls: list = dataclasses.field(default_factory=list)
    points: list = dataclasses.field(default_factory=list)

    def __call__(self, candidates, instances):
        self.calls.append(instances.tolist())
        self.points.append(candidates.clone())
        gap = candidates - self.targets[instances]
        value = gap.square().sum(1)
        for instance, turn in self.breaks.items():
            if len(self.calls) > turn:
                value = torch.where(instances == instance, torch.nan, value)
        return Evaluation(value, 2 * gap)


@pytest.mark.parametrize("box", [None, (0.0, 1.0)])
def test_the_iterates_are_those_of_the_published_recipe(box):
    # torch's Adam on the sign of the gradient, its MultiStepLR at 3/8, 5/8 and 7/8, a projection after every step; only
    # slopes that are rounding count as zero
    target, start = rng.normal(KEY.child("t"), (1, 30)), rng.uniform(KEY.child("s"), (1, 30))
    bowl = Bowl(target)
    descend(bowl, start, Schedule(64, 0.1, box=box))
    x = start.clone().requires_grad_()
    adam = torch.optim.Adam([x], lr=0.1)
    decay = torch.optim.lr_scheduler.MultiStepLR(adam, milestones=[24, 40, 56], gamma=0.1)
    for point in bowl.points:
        assert torch.allclose(point, x.detach(), atol=1e-6)
        slope = 2 * (x.detach() - target)
        x.grad = torch.where(slope.abs() > 2.0**-17 * slope.abs().max(), slope, 0.0).sign()
        adam.step()
        decay.step()
        if box:
            x.data.clamp_(*box)
    assert len(bowl.points) == 64


def test_the_best_iterate_is_returned_and_lies_in_the_box():
    bowl = Bowl(2 * rng.normal(KEY, (5, 20)))
    found = descend(bowl, 3 * rng.normal(KEY.child("s"), (5, 20)), Schedule(100, 0.3, box=(0.0, 1.0)))
    assert all(((point >= 0) & (point <= 1)).all() for point in bowl.points)
    values = torch.stack([(point - bowl.targets).square().sum(1) for point in bowl.points])
    assert torch.equal(found.value, values.amin(0))
    assert torch.equal((found.x - bowl.targets).square().sum(1), found.value)
    # the nearest point of a box is known; the last steps are 3e-4 long
    assert torch.allclose(found.x, bowl.targets.clamp(0, 1), atol=2e-3)


def test_a_problem_that_breaks_leaves_with_what_it_had_and_disturbs_no_other():
    targets, start = rng.normal(KEY, (4, 10)), torch.zeros(4, 10)
    schedule = Schedule(50, 0.1)
    whole = descend(Bowl(targets), start, schedule)
    bowl = Bowl(targets, breaks={1: 0, 2: 20})
    found = descend(bowl, start, schedule)
    assert torch.equal(found.x[[0, 3]], whole.x[[0, 3]])
    assert found.evaluations.tolist() == [50, 1, 21, 50]
    assert found.value[1] == math.inf
    assert torch.equal(found.x[1], start[1])
    assert found.value[2] == (found.x[2] - targets[2]).square().sum()
    assert bowl.calls[0] == [0, 1, 2, 3]
    assert bowl.calls[1] == [0, 2, 3]
    assert bowl.calls[21] == [0, 3]


def test_a_problem_ends_when_it_has_converged_or_its_gradient_is_zero():
    targets = torch.tensor([[0.0, 0.0], [5.0, 5.0], [0.35, 0.2]])
    found = descend(Bowl(targets), torch.zeros(3, 2), Schedule(40, 0.1, tolerance=0.05))
    assert found.evaluations[0] == 1
    assert found.evaluations[2] < 10
    flat = descend(Bowl(targets), targets, Schedule(40, 0.1))
    assert flat.evaluations.tolist() == [1, 1, 1]


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 3e-8), (torch.float64, 4e-17)])
def test_a_slope_that_is_only_rounding_moves_nothing(signed, dtype, rounding):
    start, target = torch.zeros(2, 6, dtype=dtype), torch.tensor([1.0, -2, 3, 0, 0, 0], dtype=dtype)

    def bowl(sign):
        def function(x, instances):
            off = torch.where(target == 0, 0, x - target)
            return Evaluation(off.square().sum(1), off + sign * rounding * (target == 0))

        return function

    one, other = (descend(bowl(sign), start, Schedule(40, 0.3, signed=signed)).x for sign in (1.0, -1.0))
    assert torch.equal(one, other)
    assert float(one[:, 3:].abs().max()) == 0.0
    assert float((one - target)[:, :3].abs().max()) < 0.5
    # the twin: a small slope that is more than rounding moves its variable
    found = descend(bowl(2000.0), start, Schedule(40, 0.3, signed=signed)).x
    assert float(found[:, 3:].abs().min()) > 0.3


def test_the_registry_knows_it_and_it_is_naive():
    attack = registry.build("attack", "inverting-gradients", {"lr": 0.05})
    assert attack == InvertingGradients(lr=0.05)
    assert not attack.aware


@pytest.mark.parametrize("task", [MLP, small_task("cnn-udp"), ModelTask(build("lenet-dlg", (1, 8, 8), 10), "dlg")])
def test_small_images_behind_a_bare_gradient_are_found(task):
    # noise images, for which the total variation is the worst prior
    case = make(task, n=5)
    guesses = InvertingGradients(evaluations=160, tv=1e-6).run(case.seen, KEY).guesses
    assert int((case.mse(guesses) < 1e-3).sum()) >= 4
    assert [guess.y.tolist() for guess in guesses] == case.y.tolist()
    assert all(guess.failure == "" and guess.evaluations <= 160 for guess in guesses)


def test_the_objective_falls_and_the_box_holds():
    seen = make(MLP, n=4, images=2).seen
    first, later = (InvertingGradients(evaluations=n).run(seen, KEY).guesses for n in (1, 80))
    for one, other in zip(first, later, strict=True):
        assert other.objective < one.objective / 4
        assert 0 < one.objective <= 2.1
        assert other.evaluations == 80
        for guess in (one, other):
            assert guess.x.min() >= 0
            assert guess.x.max() <= 1
            assert guess.x.shape == (2, 1, 8, 8)


def test_the_length_of_a_gradient_has_no_effect():
    # a clip changes it; at 1e25 its squares overflow in single precision
    brief = InvertingGradients(evaluations=10)
    guesses, *scaled = (brief.run(make(MLP, n=2, scale=scale).seen, KEY).guesses for scale in (1.0, 1e-25, 8.0, 1e25))
    for others in scaled:
        for one, other in zip(guesses, others, strict=True):
            assert other.objective == pytest.approx(one.objective, rel=0.1)


def test_another_key_gives_another_guess():
    one, other = (CHEAP.run(make(MLP).seen, key).guesses for key in (KEY, Key(1)))
    assert not any(torch.equal(a.x, b.x) for a, b in zip(one, other, strict=True))


def test_restarts_are_counted_and_the_lowest_objective_is_returned():
    seen = make(MLP, n=4).seen
    one, three = (dataclasses.replace(CHEAP, restarts=n).run(seen, KEY).guesses for n in (1, 3))
    assert all(b.objective <= a.objective * (1 + 1e-4) for a, b in zip(one, three, strict=True))
    assert any(b.objective < 0.99 * a.objective for a, b in zip(one, three, strict=True))
    assert [guess.evaluations for guess in three] == [120] * 4


def test_a_target_without_information_is_a_failure_and_disturbs_no_other():
    seen = dataclasses.replace(make(MLP, n=4).seen, defense=Raw())
    targets = torch.tensor([[math.nan], [0.0]]).expand(2, MLP.layout.dim).contiguous().numpy()
    broken = [message._replace(wire=row.tobytes()) for message, row in zip(seen.messages[1:3], targets, strict=True)]
    messages = (seen.messages[0], *broken, seen.messages[3])
    before, after = (CHEAP.run(each, KEY).guesses for each in (seen, dataclasses.replace(seen, messages=messages)))
    assert [guess.failure for guess in after] == ["", "the gradient is not finite", "the gradient is zero", ""]
    for i in (0, 3):
        assert torch.allclose(before[i].x, after[i].x, atol=1e-2)


def test_a_model_that_is_not_finite_fails_every_victim_without_an_exception():
    seen = make(MLP, n=4).seen
    model = seen.model._replace(params=torch.full_like(seen.model.params, math.nan))
    guesses = CHEAP.run(dataclasses.replace(seen, model=model), KEY).guesses
    assert [guess.failure for guess in guesses] == ["no restart had a finite objective"] * 4
    assert [guess.evaluations for guess in guesses] == [1] * 4
    assert all(guess.x.isfinite().all() for guess in guesses)

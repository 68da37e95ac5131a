"""Inverting gradients and its signed Adam: the source's trajectory, what ends a problem, and what is found."""

import dataclasses
import math

import pytest
import torch

from leakgauge.attacks._engine.matching import Evaluation, gradients
from leakgauge.attacks._search.adam import Schedule, descend
from leakgauge.attacks._search.lbfgs import Status
from leakgauge.attacks.inverting_gradients import InvertingGradients
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Defense, Message, Observation, Sender, Setting, Snapshot
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import View
from leakgauge.harness.federation import registry
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from tests.doubles import small_task

KEY = Key(0)
MLP = ModelTask(build("mlp-small", (1, 8, 8), 10))
CHEAP = InvertingGradients(evaluations=40)


def observation(task=MLP, n=4, images=1, scale=1.0):
    """n victims who sent the gradient of their images, and the images."""
    params = task.init(KEY.child("model"))
    x = rng.uniform(KEY.child("x"), (n, images, *task.input_shape), 0.1, 0.9)
    y = (3 + torch.arange(n * images).reshape(n, images)) % 10
    sent = scale * gradients(task, params, x, torch.nn.functional.one_hot(y, 10).float())
    setting = Setting(task.layout, n, n, 1, "gradient", 1, 0.1, images, 8)
    messages = tuple(Message(0, Sender(i, 8), row.numpy().tobytes(), None, images) for i, row in enumerate(sent))
    labels = tuple(row.sort().values for row in y)
    seen = Observation(View.parse("server+labels"), setting, task, Raw(), 0.1, messages=messages, labels=labels)
    return dataclasses.replace(seen, model=Snapshot(0, params, None)), x


def with_targets(seen, rows):
    """The same victims, who sent other gradients {victim: [d]}."""
    messages = list(seen.messages)
    for i, row in rows.items():
        messages[i] = messages[i]._replace(wire=row.numpy().tobytes())
    return dataclasses.replace(seen, messages=tuple(messages))


def mse(guesses, x):
    """[n] of single images."""
    return torch.stack([(guess.x - image).square().mean() for guess, image in zip(guesses, x, strict=True)])


@dataclasses.dataclass(frozen=True, eq=False)
class Raw(Defense):
    """A defense that sends numbers as they are, and does not mind what they are."""

    def encode(self, state, memory, update, link, private):
        return update.numpy().tobytes(), None

    def estimate(self, state, received, link):
        return torch.frombuffer(bytearray(received), dtype=torch.float32)

    def likelihood(self, state, received, links):
        raise AssertionError("a naive attack asks no likelihood")

    def claim(self, history, setting):
        raise NotImplementedError


@dataclasses.dataclass
class Bowl:
    """Squared distances to targets [n, D], `scales` [n] times; writes down what it is asked."""

    targets: torch.Tensor
    breaks: dict = dataclasses.field(default_factory=dict)
    asked: list = dataclasses.field(default_factory=list)
    points: list = dataclasses.field(default_factory=list)

    def __call__(self, candidates, instances):
        self.asked.append(instances.tolist())
        self.points.append(candidates.clone())
        gap = candidates - self.targets[instances]
        value = gap.square().sum(1)
        for instance, turn in self.breaks.items():
            if len(self.asked) > turn:
                value = torch.where(instances == instance, torch.nan, value)
        return Evaluation(value, 2 * gap)


@pytest.mark.parametrize("box", [None, (0.0, 1.0)])
def test_the_iterates_are_those_of_the_published_recipe(box):
    # torch's Adam on the sign of the gradient, its MultiStepLR at 3/8, 5/8 and 7/8, a projection after every step
    target, start = rng.normal(KEY.child("t"), (1, 30)), rng.uniform(KEY.child("s"), (1, 30))
    bowl = Bowl(target)
    descend(bowl, start, Schedule(64, 0.1, box=box))
    x = start.clone().requires_grad_()
    adam = torch.optim.Adam([x], lr=0.1)
    decay = torch.optim.lr_scheduler.MultiStepLR(adam, milestones=[24, 40, 56], gamma=0.1)
    for point in bowl.points:
        assert torch.allclose(point, x.detach(), atol=1e-6)
        x.grad = (2 * (x.detach() - target)).sign()
        adam.step()
        decay.step()
        if box:
            x.data.clamp_(*box)
    assert len(bowl.points) == 64


def test_the_best_iterate_is_told_and_lies_in_the_box():
    bowl = Bowl(2 * rng.normal(KEY, (5, 20)))
    found = descend(bowl, 3 * rng.normal(KEY.child("s"), (5, 20)), Schedule(100, 0.3, box=(0.0, 1.0)))
    assert all(((point >= 0) & (point <= 1)).all() for point in bowl.points)
    values = torch.stack([(point - bowl.targets).square().sum(1) for point in bowl.points])
    assert torch.equal(found.value, values.amin(0))
    assert torch.equal((found.x - bowl.targets).square().sum(1), found.value)
    # of a box the nearest point is known; the last steps are 3e-4 long
    assert torch.allclose(found.x, bowl.targets.clamp(0, 1), atol=2e-3)
    assert found.status == (Status.SPENT,) * 5


def test_a_problem_that_breaks_leaves_with_what_it_had_and_disturbs_no_other():
    targets, start = rng.normal(KEY, (4, 10)), torch.zeros(4, 10)
    schedule = Schedule(50, 0.1)
    whole = descend(Bowl(targets), start, schedule)
    bowl = Bowl(targets, breaks={1: 0, 2: 20})
    found = descend(bowl, start, schedule)
    assert torch.equal(found.x[[0, 3]], whole.x[[0, 3]])
    assert found.evaluations.tolist() == [50, 1, 21, 50]
    assert found.status == (Status.SPENT, Status.FAILED, Status.FAILED, Status.SPENT)
    assert found.value[1] == math.inf
    assert torch.equal(found.x[1], start[1])
    assert found.value[2] == (found.x[2] - targets[2]).square().sum()
    assert bowl.asked[0] == [0, 1, 2, 3]
    assert bowl.asked[1] == [0, 2, 3]
    assert bowl.asked[21] == [0, 3]


def test_a_problem_ends_where_it_has_converged_or_nothing_pulls():
    targets = torch.tensor([[0.0, 0.0], [5.0, 5.0], [0.35, 0.2]])
    found = descend(Bowl(targets), torch.zeros(3, 2), Schedule(40, 0.1, tolerance=0.05))
    assert found.status == (Status.CONVERGED, Status.SPENT, Status.CONVERGED)
    assert found.evaluations[0] == 1
    assert found.evaluations[2] < 10
    flat = descend(Bowl(targets), targets, Schedule(40, 0.1))
    assert flat.status == (Status.STALLED,) * 3
    assert flat.evaluations.tolist() == [1, 1, 1]


def test_the_registry_knows_it_and_it_is_naive():
    attack = registry.build("attack", "inverting-gradients", {"lr": 0.05})
    assert attack == InvertingGradients(lr=0.05)
    assert not attack.aware
    assert attack.needs == {"messages", "models", "auxiliary"}
    assert InvertingGradients(labels="given").needs == {"messages", "models", "labels"}


@pytest.mark.parametrize("task", [MLP, small_task("cnn-udp"), ModelTask(build("lenet-dlg", (1, 8, 8), 10), "dlg")])
def test_small_images_behind_a_bare_gradient_are_found(task):
    # uniform noise as images: the most that a total variation can be wrong about
    seen, x = observation(task, n=5)
    guesses = InvertingGradients(evaluations=160, tv=1e-6).run(seen, KEY).guesses
    assert int((mse(guesses, x) < 1e-3).sum()) >= 4
    assert [guess.y.tolist() for guess in guesses] == [labels.tolist() for labels in seen.labels]
    assert all(guess.failure == "" and guess.evaluations <= 160 for guess in guesses)


def test_the_objective_falls_and_the_box_holds():
    seen, _ = observation(n=4, images=2)
    first, later = (InvertingGradients(evaluations=n).run(seen, KEY).guesses for n in (1, 80))
    for one, other in zip(first, later, strict=True):
        assert other.objective < one.objective / 4
        assert 0 < one.objective <= 2.1
        assert other.evaluations == 80
        for guess in (one, other):
            assert guess.x.min() >= 0
            assert guess.x.max() <= 1
            assert guess.x.shape == (2, 1, 8, 8)


def test_the_length_of_a_gradient_says_nothing():
    # as a clip changes it; 1e25: its squares overflow in single precision
    seen, _ = observation(n=2)
    brief = InvertingGradients(evaluations=10)
    guesses = brief.run(seen, KEY).guesses
    for scale in (1e-25, 8.0, 1e25):
        for one, other in zip(guesses, brief.run(observation(n=2, scale=scale)[0], KEY).guesses, strict=True):
            assert other.objective == pytest.approx(one.objective, rel=0.1)


def test_the_same_key_gives_the_same_guess_and_another_key_another():
    seen, _ = observation()
    one, same, other = (CHEAP.run(seen, key).guesses for key in (KEY, KEY, Key(1)))
    for a, b, c in zip(one, same, other, strict=True):
        assert torch.equal(a.x, b.x)
        assert a[2:] == b[2:]
        assert not torch.equal(a.x, c.x)


def test_restarts_are_counted_and_the_lowest_objective_is_told():
    seen, _ = observation()
    one, three = (dataclasses.replace(CHEAP, restarts=n).run(seen, KEY).guesses for n in (1, 3))
    assert all(b.objective <= a.objective * (1 + 1e-4) for a, b in zip(one, three, strict=True))
    assert any(b.objective < 0.99 * a.objective for a, b in zip(one, three, strict=True))
    assert [guess.evaluations for guess in three] == [120] * 4


def test_a_target_that_says_nothing_is_a_failure_and_disturbs_no_other():
    seen, _ = observation()
    d = MLP.layout.dim
    broken = with_targets(seen, {1: torch.full((d,), math.nan), 2: torch.zeros(d)})
    before, after = CHEAP.run(seen, KEY).guesses, CHEAP.run(broken, KEY).guesses
    assert [guess.failure for guess in after] == ["", "the gradient is not finite", "the gradient is zero", ""]
    for i in (1, 2):
        assert after[i].evaluations == 0
        assert after[i].objective == math.inf
        assert not after[i].x.any()
    for i in (0, 3):
        assert torch.allclose(before[i].x, after[i].x, atol=1e-2)


def test_a_model_that_is_not_finite_fails_every_victim_without_an_exception():
    seen, _ = observation()
    params = torch.full_like(seen.model.params, math.nan)
    guesses = CHEAP.run(dataclasses.replace(seen, model=Snapshot(0, params, None)), KEY).guesses
    assert [guess.failure for guess in guesses] == ["no restart had a finite objective"] * 4
    assert [guess.evaluations for guess in guesses] == [1] * 4
    assert all(guess.x.isfinite().all() for guess in guesses)


def test_given_labels_are_used():
    seen, _ = observation()
    wrong = tuple((labels + 1) % 10 for labels in seen.labels)
    guesses = dataclasses.replace(CHEAP, labels="given").run(dataclasses.replace(seen, labels=wrong), KEY).guesses
    assert [guess.y.tolist() for guess in guesses] == [labels.tolist() for labels in wrong]


def test_another_loss_than_cross_entropy_is_refused():
    seen, _ = observation()
    with pytest.raises(ValueError, match="expected a softmax cross-entropy loss"):
        CHEAP.run(dataclasses.replace(seen, task=small_task("svm")), KEY)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"restarts": 0}, "expected restarts >= 1, got restarts=0"),
        ({"evaluations": 0}, "expected evaluations >= 1, got evaluations=0"),
        ({"lr": 0.0}, "expected lr > 0, got lr=0.0"),
        ({"lr": math.nan}, "expected lr > 0, got lr=nan"),
        ({"tv": -1.0}, "expected tv >= 0, got tv=-1.0"),
        ({"labels": "guessed"}, "expected labels 'inferred' or 'given', got 'guessed'"),
        ({"start": "zero"}, "expected start 'normal' or 'uniform', got 'zero'"),
    ],
)
def test_parameters_out_of_range_are_refused(parameters, said):
    with pytest.raises(ValueError, match=said):
        InvertingGradients(**parameters)

"""The limit of reconstruction: against closed forms, simulation, and defenses of known information."""

import dataclasses
import math
from functools import partial
from statistics import NormalDist

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from torch import nn

from leakgauge.attacks.map import MAP
from leakgauge.defenses.cepam_clip import CepamClip
from leakgauge.defenses.cepam_gaussian import CepamGaussian
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.jopeq import JoPEQ
from leakgauge.defenses.laplace import Laplace
from leakgauge.defenses.none import NoDefense
from leakgauge.defenses.piecewise import Piecewise
from leakgauge.defenses.sdq import SDQ
from leakgauge.defenses.sdq_lattice import LatticeSDQ
from leakgauge.defenses.sqsgd import SqSGD
from leakgauge.defenses.t_noise import TNoise
from leakgauge.harness.audit import limit as module
from leakgauge.harness.audit.attacked import proved_identification
from leakgauge.harness.audit.limit import NoLimit, limits
from leakgauge.harness.core.cell import Target
from leakgauge.harness.core.claim import Proof, Unit, claim_over, nothing_promised
from leakgauge.harness.core.contract import Examples, Guess, Links, Reconstruction, Sender, Setting, links_of
from leakgauge.harness.core.rng import Key, integers, normal, uniform
from leakgauge.harness.core.threats import Threat, View
from leakgauge.harness.federation.observe import Truth
from leakgauge.harness.federation.round import Client, Round
from leakgauge.harness.learn.gradients import gradients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.prior import gaussian_prior
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.flags import cell_flags
from leakgauge.harness.study.score import score_limits, score_reconstruction
from tests.by_rows import by_rows
from tests.test_chains import own
from tests.victims import make

SHAPE = (1, 4, 4)
LINEAR = ModelTask(build("linear", SHAPE, 4), "default")
NOISE = 0.1


def smooth(n, key):
    """[n, 1, 4, 4] images of a normal distribution with falling variances."""
    mixing = normal(Key(77), (16, 16)) * (0.7 ** torch.arange(16)) * 0.15
    return (0.5 + normal(key, (n, 16)) @ mixing.T).view(n, *SHAPE)


def federation(n, defense, task=LINEAR, x=None, images=1, zero=True, steps=0):
    """An observation of victims with images of the auxiliary data's distribution, and the truth."""
    case = make(task, n, images, NoDefense())
    x = smooth(n * images, Key(5)).view(n, images, *SHAPE) if x is None else x
    y = case.y % task.classes
    params = torch.zeros(task.layout.dim) if zero else case.seen.model.params
    labels = torch.nn.functional.one_hot(y, task.classes).float()
    sent = gradients(task, params, x, labels)
    setting = dataclasses.replace(case.seen.setting, sends="update", steps=steps) if steps else case.seen.setting
    here = Round(defense, setting, defense.init(setting))
    messages = []
    for message, update in zip(case.seen.messages, sent * (-case.seen.lr * steps if steps else 1), strict=True):
        client = Client.of(message.sender, update, defense.remember(setting), Key(3).child(message.sender.number))
        (wire,) = here.exchange([client], Key(4)).received
        messages.append(message._replace(wire=wire, shared=client.shared, steps=steps or 1))
    seen = dataclasses.replace(
        case.seen,
        setting=setting,
        defense=defense,
        messages=tuple(messages),
        model=case.seen.model._replace(params=params, state=here.state),
        auxiliary=Examples(smooth(2000, Key(6)), torch.zeros(2000, dtype=torch.int64)),
    )
    return seen, [Examples(*pair) for pair in zip(x, y, strict=True)]


@pytest.mark.matrix
def test_a_linear_model_has_the_error_of_the_linear_posterior_mean(monkeypatch):
    monkeypatch.setattr(module, "_MESSAGES", 3000)
    seen, truth = federation(3, Gaussian(clip=100.0, noise_std=NOISE))
    found = limits(seen, truth, Key(1))
    prior = gaussian_prior(seen.auxiliary.x, 0.0)
    covariance = (prior.factor @ prior.factor.T + prior.least * torch.eye(16)).double()
    for one, victim in zip(found, truth, strict=True):
        information = ((0.25 - torch.eye(4)[victim.y[0]]).square().sum() / NOISE**2 * torch.eye(16)).double()
        posterior = torch.linalg.inv(information + torch.linalg.inv(covariance))
        missed = torch.linalg.inv(covariance) @ (victim.x.flatten() - prior.mean).double()
        expected = (posterior @ missed).square().sum() + (posterior @ information @ posterior).trace()
        assert one.average[0] == pytest.approx(float(posterior.trace()) / 16, rel=0.03)
        assert one.error[0] == pytest.approx(float(expected) / 16, rel=0.03)
        assert one.blind[0] == pytest.approx(float((victim.x.flatten() - prior.mean).square().mean()), rel=1e-4)
        assert one.complete
        assert one.caveat == ""


@pytest.mark.matrix
def test_on_a_linear_model_map_reaches_the_limit_and_no_attack_is_below_it():
    n = 200
    drawn = federation(1, NoDefense())[0].auxiliary.x
    prior = gaussian_prior(drawn, 0.0)
    z = normal(Key(8), (n, 1, prior.factor.shape[1] + 16))
    seen, truth = federation(n, Gaussian(clip=100.0, noise_std=NOISE), x=prior.inputs(z).view(n, 1, *SHAPE))
    found = limits(seen, truth, Key(1))
    guesses = MAP(box=0.0, solve=False, evaluations=50).run(seen, Key(2)).guesses
    errors = np.array(
        [one.errors_of(victim.x, guess.x)[0] for one, victim, guess in zip(found, truth, guesses, strict=True)]
    )
    limit, average = (np.mean([getattr(one, name)[0] for one in found]) for name in ("error", "average"))
    assert errors.mean() == pytest.approx(limit, rel=0.05)
    assert errors.mean() >= average - 2.6 * errors.std() / math.sqrt(n)
    assert limit == pytest.approx(average, rel=0.05)


@by_rows(
    (Gaussian(clip=100.0, noise_std=0.2), 25.0),
    (Laplace(clip=100.0, noise_std=0.2, scale="public"), 2 / 0.04),
    (NoDefense(), 1e12),
)
def test_the_information_of_a_coordinate_is_that_of_its_noise(defense, each):
    seen, truth = federation(1, defense)
    update = gradients(LINEAR, seen.model.params, truth[0].x[None], torch.eye(4)[truth[0].y][None])
    found = module._information(seen, seen.observed_rounds[0], seen.messages[0], update, Key(1))
    # the likelihood of Laplace noise has a rounded tip
    assert float(found.mean()) == pytest.approx(each, rel=0.2)


@pytest.mark.parametrize(("clip", "kept"), [(0.3, 0.09), (100.0, 1.0)])
def test_a_clip_shrinks_what_uniform_errors_show(clip, kept):
    seen, truth = federation(1, CepamClip(clip=clip, noise_std=0.01))
    update = gradients(LINEAR, seen.model.params, truth[0].x[None], torch.eye(4)[truth[0].y][None])
    update = update / update.norm()
    observed, (message,) = seen.observed_rounds[0], seen.messages
    found = module._information(seen, observed, message, update, Key(1))
    links = links_of(seen.setting, [message])
    variance = seen.defense.error_variance(None, [message.wire], links)
    assert float((found * variance).mean()) == pytest.approx(kept, rel=0.3)


def test_information_of_t_noise():
    defense = TNoise(clip=100.0, s2=0.01, nu=4.0, scale="public")
    seen, truth = federation(1, defense)
    update = gradients(LINEAR, seen.model.params, truth[0].x[None], torch.eye(4)[truth[0].y][None])
    found = [
        float(module._information(seen, seen.observed_rounds[0], seen.messages[0], update, Key(i)).mean())
        for i in range(8)
    ]
    # (nu + 2) / (nu + 4) / s2 of a bivariate t (Lange, Little, Taylor 1989), in units of the clip
    assert np.mean(found) == pytest.approx(6 / 8 / 0.01 / 100**2, rel=0.15)


@by_rows(SDQ(bits=3), LatticeSDQ(bits=3), CepamGaussian(), CepamClip(), Piecewise(clip=1.0, epsilon=400.0))
def test_variances_are_those_of_the_errors(defense):
    task = ModelTask(build("mlp-small", (1, 8, 8), 10), "default")
    setting = Setting(task.layout, 8, 8, 1, "gradient", 1, 0.1, 0, 8)
    update, ratios = 0.01 * normal(Key(0), (task.layout.dim,)), []
    for i in range(40):
        client = Client.of(Sender(0, 8), update, None, Key(i))
        exchange = Round(defense, setting, None).exchange([client], Key(1))
        (variance,) = defense.error_variance(None, exchange.sent, exchange.links)
        shown = variance.isfinite()
        off = Round(defense, setting, None).estimate(exchange.sent[0], client.sender, client.shared) - update
        if isinstance(defense, Piecewise):
            scale = setting.dim / defense.count(setting.dim)
            off = (off + update) / scale - update
        ratios.append(float((off[shown].square() / variance[shown]).mean()))
        outsider = defense.error_variance(None, exchange.sent, Links(setting, [client.sender], None))
        assert outsider is not None
        assert float(outsider.min()) >= float(variance.min())
    assert np.mean(ratios) == pytest.approx(1.0, rel=0.1)


def test_noise_keeps_the_fisher_information():
    seen, _ = federation(1, JoPEQ())
    links = Links(seen.setting, [seen.messages[0].sender], [seen.messages[0].shared])
    assert JoPEQ().error_variance(None, [seen.messages[0].wire], links) is None


def test_norms_in_clear_lower_the_limit():
    seen, truth = federation(4, CepamGaussian(noise_std=1.0))
    (shown,) = seen.defense.plaintext_statistic(torch.ones(1, seen.setting.dim), seen.setting)
    assert shown.item() == pytest.approx(math.sqrt(seen.setting.dim))
    hidden = dataclasses.replace(seen, defense=_WithoutNorm(seen.defense))
    with_norm, without = (np.mean([one.error[0] for one in limits(s, truth, Key(1))]) for s in (seen, hidden))
    assert with_norm < 0.98 * without


class _WithoutNorm:
    """A defense whose norm counts as unseen."""

    def __init__(self, defense):
        self._defense = defense

    def plaintext_statistic(self, updates, setting):
        return updates.new_zeros(len(updates), 0)

    def __getattr__(self, name):
        return getattr(self._defense, name)


@pytest.mark.parametrize("name", ["lenet-dlg", "mlp-small", "cnn-udp"])
def test_slopes_are_those_of_autograd(name):
    task = ModelTask(build(name, (1, 8, 8), 10), "default")
    x = normal(Key(9), (1, 1, 1, 8, 8)).sigmoid()
    case = make(task, 1, 1, Gaussian(clip=100.0, noise_std=1.0))
    seen, victim = case.seen, Examples(x[0], case.y[0])
    directions = torch.eye(64, dtype=torch.float64)[:, :10]
    room = torch.empty(0, 0, dtype=torch.float64)
    found = module._slopes(seen, seen.observed_rounds[0], 0, victim, directions, Key(1), room)
    leaf = seen.model.params.double().requires_grad_()

    def sent(image):
        return torch.autograd.grad(task.loss(leaf, image, victim.y), leaf, create_graph=True)[0]

    ways = directions.T.view(-1, *victim.x.shape)
    whole = torch.stack([torch.autograd.functional.jvp(sent, victim.x.double(), way)[1] for way in ways])
    nothing = torch.zeros(1, len(leaf))
    weight = module._information(seen, seen.observed_rounds[0], seen.messages[0], nothing, Key(1))[0].double()
    shares = found.square().sum(1) / (whole.square() * weight).sum(1)
    assert shares.sqrt().numpy() == pytest.approx(1.0, rel=0.05)
    assert torch.nn.functional.cosine_similarity(found, whole * weight.sqrt()).min() > 0.95


def test_a_batch_and_several_steps():
    quiet = Gaussian(clip=100.0, noise_std=1e-3)
    one = [limit.error for limit in limits(*federation(2, quiet, images=1), Key(1))]
    two = [limit.error for limit in limits(*federation(2, quiet, images=2), Key(1))]
    assert [len(part) for part in two] == [2, 2]
    # four numbers of label 0 and 1 mix two images
    assert np.mean(two) > np.mean(one)
    loud = Gaussian(clip=100.0, noise_std=0.05)
    longer = [np.mean([limit.error for limit in limits(*federation(4, loud, steps=steps), Key(1))]) for steps in (1, 8)]
    assert longer[1] < 0.8 * longer[0]


def test_who_cannot_decode_has_the_mean_image(monkeypatch):
    seen, truth = federation(2, SqSGD())
    blind = dataclasses.replace(
        seen,
        view=View.parse("eavesdropper"),
        messages=tuple(message._replace(shared=None) for message in seen.messages),
    )
    for one in limits(blind, truth, Key(1)):
        assert one.error[0] == pytest.approx(one.blind[0], rel=1e-6)


def test_directions_left_out_count_as_known(monkeypatch):
    seen, truth = federation(2, Gaussian(clip=100.0, noise_std=NOISE))
    whole = limits(seen, truth, Key(1))
    monkeypatch.setattr(module, "_DIRECTIONS", 5)
    part = limits(seen, truth, Key(1))
    assert not part[0].complete
    assert part[0].caveat == "of 5 of 16 directions: the others count as known"
    assert all(few.error[0] < all_.error[0] for few, all_ in zip(part, whole, strict=True))


@by_rows(
    ({"messages": None}, "sees no message"),
    ({"auxiliary": None}, "no auxiliary data"),
    ({"auxiliary": Examples(torch.zeros(1, *SHAPE), torch.zeros(1))}, "two finite auxiliary inputs, got 1"),
    ({"auxiliary": Examples(torch.full((5, *SHAPE), torch.nan), torch.zeros(5))}, "finite auxiliary inputs"),
)
def test_without_a_limit_there_is_a_reason(change, why):
    seen, truth = federation(1, NoDefense())
    with pytest.raises(NoLimit, match=why):
        limits(dataclasses.replace(seen, **change), truth, Key(1))


def test_a_limit_of_a_few_directions_is_left_out_with_the_reason(monkeypatch):
    seen, truth = federation(1, NoDefense())
    monkeypatch.setattr(module, "_ENTRIES", 15 * seen.setting.dim)
    monkeypatch.setattr(module, "_COMPUTED", 16 * seen.setting.dim)
    assert limits(seen, truth, Key(1))
    monkeypatch.setattr(module, "_COMPUTED", 16 * seen.setting.dim - 1)
    with pytest.raises(NoLimit, match="parameters, only 15 directions of an image are affordable: a limit needs 16"):
        limits(seen, truth, Key(1))


def test_parameters_and_slopes_that_are_not_finite():
    seen, truth = federation(1, NoDefense())
    broken = seen.model._replace(params=torch.full_like(seen.model.params, torch.nan))
    with pytest.raises(NoLimit, match="parameter of the model is not finite"):
        limits(dataclasses.replace(seen, model=broken), truth, Key(1))
    seen, truth = federation(1, _Nowhere(clip=100.0, noise_std=1.0))
    with pytest.raises(NoLimit, match="slope of the defense's likelihood is not finite"):
        limits(seen, truth, Key(1))


@dataclasses.dataclass(frozen=True)
class _Nowhere(Gaussian):
    """A likelihood without a finite slope."""

    def likelihood(self, state, received, links):
        return lambda update: update.sum(-1) * math.nan


def guess(x, **other):
    return Guess(x, torch.zeros(len(x), dtype=torch.int64), 0.0, 1, **other)


def test_scores_and_flags():
    seen, truth = federation(3, Gaussian(clip=100.0, noise_std=NOISE))
    found, xs = limits(seen, truth, Key(1)), [victim.x for victim in truth]
    twice = [
        guess((x.flatten() + math.sqrt(4 * one.error[0])).view_as(x).double()) for x, one in zip(xs, found, strict=True)
    ]
    twice = [one._replace(x=one.x.clamp(-9, 9)) for one in twice]
    bad = guess(torch.full_like(xs[0], math.nan))
    inside = all(float(one.x.max()) <= 1 for one in twice)
    limit, average, efficiency = score_limits(xs, [*twice[:2], bad], found)
    assert limit.value == pytest.approx(np.mean([one.error[0] for one in found]))
    assert average.value == pytest.approx(np.mean([one.average[0] for one in found]))
    assert efficiency.n == 2
    assert efficiency.values[2] is None
    if inside:
        assert efficiency.value == pytest.approx(0.25, rel=1e-4)
    (missing,) = score_limits(xs, twice, "the adversary sees no message")
    assert missing.value is None
    assert missing.note == "the adversary sees no message"


def flags_of(attack, defense, offset, noise=NOISE, task=LINEAR):
    seen, truth = federation(8, Gaussian(clip=100.0, noise_std=noise), task, zero=task is LINEAR)
    found, xs = limits(seen, truth, Key(1)), [victim.x for victim in truth]
    guesses = [guess(x + offset) for x in xs]
    estimates, _ = score_reconstruction(xs, [victim.y for victim in truth], guesses)
    estimates += score_limits(xs, guesses, found)
    flags = cell_flags(
        attack, defense, Target("probe", 8), Reconstruction(tuple(guesses)), Truth(tuple(truth)), estimates, found
    )
    return {flag.code: flag for flag in flags}


class Unread(nn.Module):
    """A dense layer, a ReLU and a dense layer, whose forward depends on the numbers: its layers cannot be listed."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 12), nn.Linear(12, 4)

    def forward(self, x):
        h = self.first(x.flatten(1))
        h = torch.where(h > 0, h, torch.zeros_like(h))
        return self.last(h) if h.shape[1] == 12 else h


def test_a_weak_attack_on_a_module_whose_layers_are_unknown_is_flagged():
    flags = partial(flags_of, MAP(), Gaussian(noise_std=1.0), task=own(Unread(), SHAPE, 4), noise=0.02)
    assert "weak-attack" in flags(0.5)
    assert "weak-attack" not in flags(0.001)


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("noise", [0.05, 0.5])
def test_a_module_whose_layers_are_unknown_has_the_limit_of_its_twin(sums, noise, monkeypatch):
    unread = own(Unread(), SHAPE, 4)
    read = own(nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4)), SHAPE, 4)
    assert unread.structure is None
    assert read.structure is not None
    cases = [federation(8, Gaussian(clip=100.0, noise_std=noise), task, zero=False) for task in (read, unread)]
    cases[1][0].model.params.copy_(cases[0][0].model.params)
    known = limits(*cases[0], Key(1))
    if sums:
        monkeypatch.setattr(module, "_ENTRIES", 16 * 200)
    found = limits(*cases[1], Key(1))
    assert found[0].complete
    assert ("200 random sums" in found[0].caveat) == sums
    for name, off in (("error", 0.05), ("average", 0.05)):
        ours, theirs = (np.mean([getattr(one, name) for one in each]) for each in (found, known))
        assert ours == pytest.approx(theirs, rel=0.2 if sums else off)


def test_a_weak_attack_and_a_strong_defense_are_flagged():
    flags = partial(flags_of, MAP(), Gaussian(noise_std=1.0))
    assert flags(0.3)["weak-attack"].severity == "warning"
    assert "times the limit" in flags(0.3)["weak-attack"].message
    assert "weak-attack" not in flags(0.01)
    strong = flags(0.3, noise=30.0)
    assert "weak-attack" not in strong
    assert strong["strong-defense"].severity == "note"


def claim_of(defense, **setting):
    task = ModelTask(build("mlp-small", (1, 8, 8), 10), "default")
    return defense.claim([None], Setting(task.layout, 8, 8, 1, "gradient", 1, 0.1, 0, 8, **setting))


def test_the_bound_of_a_gaussian_proof_is_the_power_of_the_likelihood_ratio_test():
    defense = Gaussian(epsilon=1.0)
    mu = 2 * defense.clip / defense.sigma
    found = proved_identification(claim_of(defense), Threat.SERVER, 100)
    # 1 - f(1/100) of the trade-off function of N(mu, 1)
    assert found.share == pytest.approx(NormalDist().cdf(NormalDist().inv_cdf(0.01) + mu), rel=0.01)
    assert found.words == "analytic Gaussian, one message"


@pytest.mark.parametrize(("epsilon", "among"), [(0.5, 100), (2.0, 100), (1.0, 2)])
def test_the_bound_of_a_pure_proof(epsilon, among):
    proof = Proof.pure(epsilon, 1, Unit.MESSAGE, "")
    found = proved_identification(claim_over(1, epsilon, proof, source=""), Threat.SERVER, among)
    # the worst mechanism of this epsilon at the false-positive rate 1 / among
    worst = min(math.exp(epsilon) / among, 1 - math.exp(-epsilon) * (1 - 1 / among))
    assert found.share == pytest.approx(worst, rel=0.02)
    assert found.share >= worst * (1 - 1e-9)


def test_guesses_from_randomized_responses_keep_the_bound():
    among, epsilon, n = 10, 1.0, 200_000
    truth = torch.from_numpy(integers(Key(0), n, among))
    kept = uniform(Key(1), (n,)) < math.exp(epsilon) / (math.exp(epsilon) + among - 1)
    other = (truth + 1 + torch.from_numpy(integers(Key(2), n, among - 1))) % among
    right = float((torch.where(kept, truth, other) == truth).float().mean())
    proof = Proof.pure(epsilon, 1, Unit.MESSAGE, "")
    bound = proved_identification(claim_over(1, epsilon, proof, source=""), Threat.SERVER, among).share
    assert 0.8 * bound < right <= bound


@by_rows(
    claim_over(1, 1.0, Proof.pure(1.0, 1, Unit.COORDINATE, ""), source=""),
    claim_over(1, 1.0, Proof.pure(1.0, 1, Unit.MESSAGE, ""), source="", against=frozenset({Threat.PUBLIC})),
    claim_over(1, 1.0, Proof.none(Unit.MESSAGE, ""), source=""),
    claim_over(1, 50.0, Proof.pure(50.0, 1, Unit.MESSAGE, ""), source=""),
    claim_over(
        1, 1.0, Proof(PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0)), Unit.RECORD, "", ""), source="", delta=1e-5
    ),
    nothing_promised(1, "no noise"),
)
def test_proofs_that_say_nothing_of_a_message(claim):
    assert proved_identification(claim, Threat.SERVER, 100) is None


def test_a_further_proof_of_the_whole_message_counts():
    message = Proof.pure(1.0, 1, Unit.MESSAGE, "")
    coordinate = Proof.pure(0.1, 1, Unit.COORDINATE, "")
    claim = claim_over(1, 0.1, coordinate, source="", further=(message,))
    assert proved_identification(claim, Threat.SERVER, 100).share == pytest.approx(math.e / 100, rel=0.02)

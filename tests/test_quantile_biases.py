"""Biases by which records are alone in a neuron: what is broadcast, whether a client notices, what is certified."""

import dataclasses

import pytest
import torch

from leakgauge import rng
from leakgauge.attacks._engine.closed_form import neurons_of
from leakgauge.attacks.map import MAP
from leakgauge.attacks.quantile_biases import QuantileBiases
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.jopeq import JoPEQ
from leakgauge.defenses.none import NoDefense
from leakgauge.harness.audit.weights import suspicious
from leakgauge.harness.core.claim import Proof, Unit, claim_over
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.metrics import RECOGNIZABLE
from leakgauge.harness.core.rng import Key
from leakgauge.harness.data.embedded import photos
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.score import score_reconstruction
from leakgauge.harness.study.study import resolve
from tests.by_rows import by_rows
from tests.doubles import small_task, study_table
from tests.victims import LENET, Says, assert_found, sent

KEY = Key(17)
SMALL, MLP = small_task("mlp-small"), small_task("mlp")


@pytest.fixture(scope="module")
def halves(digits):
    """Digits in random order: auxiliary ones, and victims'."""
    order = torch.from_numpy(rng.permutation(KEY.child("digits"), len(digits.y)))
    x, y = digits.x[order], digits.y[order]
    return Examples(x[:600], y[:600]), Examples(x[600:], y[600:])


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    train = photos(tmp_path_factory.mktemp("none")).train
    order = torch.from_numpy(rng.permutation(KEY.child("pictures"), len(train.y)))
    x, y = train.x[order], train.y[order]
    return Examples(x[:1000], y[:1000]), Examples(x[1000:], y[1000:])


def cut(data, *sizes):
    total = sum(sizes)
    return list(zip(data.x[:total].split(sizes), data.y[:total].split(sizes), strict=True))


def honest(task, batches, auxiliary, key=KEY, **how):
    params = task.init(key)
    return dataclasses.replace(sent(task, batches, params=params, **how), auxiliary=auxiliary)


def biased(task, batches, auxiliary, attack, key=KEY, **how):
    """The server's observation of batches at the attack's biases."""
    seen = honest(task, batches[:1], auxiliary, key)
    params = attack.broadcast(dataclasses.replace(seen, messages=None), key.child("broadcast"))
    return dataclasses.replace(sent(task, batches, params=params, **how), auxiliary=auxiliary)


@pytest.mark.parametrize("name", ["mlp-small", "lenet5", "cnn2"])
def test_only_biases_up_to_the_first_dense_layer_change_and_each_neuron_has_its_own_share(name, pictures):
    task = ModelTask(build(name, (3, 32, 32), 10))
    before = honest(task, cut(pictures[1], 1), pictures[0])
    after = biased(task, cut(pictures[1], 1), pictures[0], QuantileBiases(batch=8))
    _, front, head = neurons_of(task, after.model.params, "a test")
    pairs = zip(*(task.layout.split(seen.model.params) for seen in (before, after)), strict=True)
    changed = [number for number, pair in enumerate(pairs) if not torch.equal(*pair)]
    assert changed == list(range(1, len(task.layout.shapes) - len(head) + 2, 2))
    shares = (front(pictures[0].x) @ head[0].T + head[1] > 0).float().mean(0).sort().values
    wanted = torch.logspace(torch.tensor(1 / 8).log10(), torch.tensor(0.5).log10(), len(shares))
    assert (shares - wanted).abs().max() < 0.01


@by_rows("mlp-small", "lenet5", "cnn2", pytest.param("cnn3", marks=pytest.mark.slow))
def test_no_client_notices(name, pictures):
    task = ModelTask(build(name, (3, 32, 32), 10))
    params = biased(task, cut(pictures[1], 1), pictures[0], QuantileBiases(batch=8)).model.params
    for number, size in enumerate((1, 8, 32)):
        own = Examples(pictures[1].x[:size], pictures[1].y[:size])
        assert suspicious(task, params, own, KEY.child(number)) == ()


@by_rows((SMALL, 8, (2, 4, 8, 8, 8)), (MLP, 16, (1, 16, 24)), (MLP, 32, (32, 48)))
def test_records_are_found_with_their_labels(task, batch, sizes, halves):
    batches, attack = cut(halves[1], *sizes), QuantileBiases(batch=batch)
    guesses = attack.run(biased(task, batches, halves[0], attack), KEY).guesses
    assert_found(batches, guesses, 1e-6)
    assert all(guess.objective < 1e-6 for guess in guesses)


@by_rows({"defense": Gaussian(clip=0.01, noise_std=1e-12)}, {"steps": 1, "lr": 0.25})
def test_a_clip_of_the_message_and_an_update_of_one_step_change_nothing(how, halves):
    batches, attack = cut(halves[1], 8, 16), QuantileBiases()
    assert_found(batches, attack.run(biased(MLP, batches, halves[0], attack, **how), KEY).guesses, 1e-6)


def test_at_most_one_certificate_in_a_hundred_is_wrong(halves):
    certain = wrong = 0
    for number, size in enumerate([8, 12, 16, 24, 32] * 16):
        rows = torch.from_numpy(rng.subset(KEY.child("imitated", number), len(halves[1].y), size))
        batch = halves[1].x[rows], halves[1].y[rows]
        attack, key = QuantileBiases(batch=8 + number % 16), KEY.child("federation", number)
        (guess,) = attack.run(biased(SMALL, [batch], halves[0], attack, key), key).guesses
        mean = halves[0].x.mean(0)
        found = torch.stack([(x - mean).abs().max() > 1e-4 for x in guess.x]) & (not guess.failure)
        off, at = torch.cdist(guess.x.flatten(1), batch[0].flatten(1)).min(1)
        certain += int(found.sum())
        wrong += int((found & ~((off < 0.05) & (guess.y == batch[1][at]))).sum())
    assert certain > 600
    assert wrong <= certain / 100


def test_records_that_share_all_neurons_are_not_returned_as_one_image(halves):
    (x, y), attack = cut(halves[1], 6)[0], QuantileBiases(batch=8)
    batch = torch.cat([x, x[:1] + 1e-3]), torch.cat([y, (y[:1] + 1) % 10])
    (guess,) = attack.run(biased(MLP, [batch], halves[0], attack), KEY).guesses
    assert_found([(x[1:], y[1:])], [guess._replace(x=guess.x[:5], y=guess.y[:5])], 1e-6)
    assert torch.allclose(guess.x[5:], halves[0].x.mean(0).expand(2, -1, -1, -1))
    assert guess.objective > 1e-3


@by_rows(
    ({"defense": JoPEQ()}, "no neuron certifies a single record"),
    ({"defense": Gaussian()}, "no neuron certifies a single record"),
    ({"defense": Gaussian(clip=1.0, noise_std=1e-5)}, "no neuron certifies a single record"),
    ({"steps": 3}, "the update has several steps"),
    ({"defense": Says(0.0)}, "the gradient is zero"),
    ({"defense": Says(float("nan"))}, "the gradient is not finite"),
)
def test_what_shows_no_single_record_is_a_failure(how, says, halves):
    batches, attack = cut(halves[1], 8, 8), QuantileBiases(batch=8)
    for guess in attack.run(biased(SMALL, batches, halves[0], attack, **how), KEY).guesses:
        assert says in guess.failure
        assert not guess.x.any()


@by_rows(
    (small_task("linear"), "linear has none"),
    (LENET, "lenet-dlg has none"),
    (small_task("resnet20"), "resnet20 has none"),
)
def test_models_without_such_neurons_are_refused(task, says, halves):
    with pytest.raises(ValueError, match=f"quantile-biases needs .*{says}"):
        QuantileBiases().broadcast(honest(task, cut(halves[1], 1), halves[0]), KEY)


@by_rows({"batch": 1}, {"evaluations": 0})
def test_parameters_out_of_range_are_refused(given):
    with pytest.raises(ValueError, match="expected batch >= 2 and evaluations >= 1"):
        QuantileBiases(**given)


def recognized(batch, guess):
    estimates, _ = score_reconstruction([batch[0]], [batch[1]], [guess])
    (ssim,) = (one for one in estimates if one.name == "ssim")
    return sum(value > RECOGNIZABLE for value in ssim.values) / len(ssim.values)


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 16])
def test_batches_behind_convolutions_are_recognized_more_often_than_by_an_honest_server(size, pictures):
    task, attack = ModelTask(build("lenet5", (3, 32, 32), 10)), QuantileBiases(batch=size, evaluations=150)
    (batch,) = cut(pictures[1], size)
    (guess,) = attack.run(biased(task, [batch], pictures[0], attack), KEY).guesses
    (other,) = MAP(evaluations=150, warm=150).run(honest(task, [batch], pictures[0]), KEY).guesses
    assert recognized(batch, guess) > 0.5
    assert recognized(batch, guess) > recognized(batch, other) + 0.3
    assert sorted(guess.y.tolist()) == sorted(batch[1].tolist())


@dataclasses.dataclass(frozen=True)
class Promises(NoDefense):
    """Sends the message as it is, and claims an epsilon of 1 against everybody."""

    def claim(self, history, setting):
        proof = Proof.pure(1.0, len(history), Unit.MESSAGE, "nothing at all")
        return claim_over(len(history), 1.0, proof, source="a plant")


def test_a_study_finds_the_images_without_notice_and_contradicts_a_false_claim(tmp_path):
    federation = {"clients": 4, "rounds": 2, "samples": 32, "test_samples": 200, "batch": 0, "algorithm": "fedsgd"}
    attacks = [{"name": "quantile-biases", "batch": 4, "target": {"round": 1, "count": 8, "batch": 4}}]
    defenses = ["tests.test_quantile_biases:Promises", {"name": "gaussian", "epsilon": 8.0}]
    table = study_table(federation, defenses, attacks, limit=False) | {"threats": ["malicious-server"]}
    results = run_study(resolve(table), tmp_path, workers=0).results.values()
    for result, success in zip(results, (1.0, 0.0), strict=True):
        found, flags = {one.name: one.value for one in result.estimates}, {flag.code for flag in result.flags}
        assert (found["recognized"], found["failed"], found["detectable"]) == (success, 1.0 - success, 0.0)
        assert ("claim-contradicted" in flags) == (success == 1.0)

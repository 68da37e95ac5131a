"""PRECODE: the bottleneck that training inserts, its noise, what messages show, what an adversary sees."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import cross_entropy, softplus

from leakgauge import Key, Links, Sender, Setting, rng
from leakgauge.attacks._engine.bottleneck import Without, before_noise, spanned
from leakgauge.attacks._engine.imitation import own_messages, own_updates
from leakgauge.attacks.lineup import Lineup
from leakgauge.defenses.precode import Precode
from leakgauge.harness.audit.limit import NoLimit, limits
from leakgauge.harness.core.cell import FederationSpec, Target, TaskSpec
from leakgauge.harness.core.claim import Verdict, judge
from leakgauge.harness.core.codec import pack_float64
from leakgauge.harness.core.contract import Examples, LocalRule, Observation, Snapshot
from leakgauge.harness.core.errors import NoLikelihood
from leakgauge.harness.core.threats import View
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.aggregate import aggregated
from leakgauge.harness.federation.loop import Keep, train
from leakgauge.harness.federation.observe import TrainedFederation, observe
from leakgauge.harness.learn import models
from leakgauge.harness.learn.batch import LocalPlan, Work, choose_engine, train_clients
from leakgauge.harness.learn.gradients import batch_loss
from leakgauge.harness.study.prepare import load_data, make_task
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.score import score_reconstruction
from leakgauge.harness.study.study import resolve
from tests.baselines_case import encode, setting_of
from tests.doubles import function_task, random_examples, small_task, study_table
from tests.victims import encoded

KEY = Key(12)
RULE = LocalRule(bottleneck=5, divergence=0.1)
every_model = pytest.mark.parametrize("name", ["linear", "mlp-small", "lenet-dlg", "resnet20-bn"])


class First(nn.Module):
    """A network whose tensors have not the order of its layers, but whose head comes last."""

    def __init__(self):
        super().__init__()
        self.second, self.first, self.head = nn.Linear(7, 6), nn.Linear(64, 7), nn.Linear(6, 10)

    def forward(self, x):
        return self.head(torch.sigmoid(self.second(torch.sigmoid(self.first(x.flatten(1))))))


def named(tensors, task):
    """The tensors of a task by name."""
    return dict(zip(task.layout.names, tensors, strict=True))


def by_hand(t, h, noise):
    """Codes and divergences in nats of representations h, from named tensors: the paper's definition."""
    parts = h @ t["bottleneck.encoder.weight"].T + t["bottleneck.encoder.bias"]
    mean, std = parts.chunk(2, 1)
    std = softplus(std)
    codes = mean if noise is None else mean + std * noise
    return codes, kl_divergence(Normal(mean, std), Normal(0.0, 1.0)).sum(1)


@pytest.mark.parametrize("noisy", [False, True])
def test_scores_and_loss_are_those_of_the_definition(noisy):
    task = small_task("mlp-small").under(RULE)
    params, (x, y) = task.init(KEY), random_examples(4)
    t, noise = named(task.layout.split(params), task), rng.normal(KEY.child("noise"), (4, 5))
    h = x.flatten(1)
    for name in ("fc1", "fc2"):
        h = torch.relu(h @ t[f"{name}.weight"].T + t[f"{name}.bias"])
    codes, nats = by_hand(t, h, noise if noisy else None)
    h = codes @ t["bottleneck.decoder.weight"].T + t["bottleneck.decoder.bias"]
    scores = h @ t["fc3.weight"].T + t["fc3.bias"]
    expected = cross_entropy(scores, y) + 0.1 * nats.mean() / math.log(2)
    torch.testing.assert_close(task.loss(params, x, y, [noise] if noisy else None), expected)
    if not noisy:
        torch.testing.assert_close(task.outputs(params, x), scores)
        torch.testing.assert_close(batch_loss(params, x, torch.eye(10)[y], task), expected)
    else:
        each = cross_entropy(scores, y, reduction="none") + 0.1 * nats / math.log(2)
        torch.testing.assert_close(task.losses(params, x, y, [noise]), each)


def test_the_divergence_has_its_value():
    # softplus(ln(e - 1)) = 1: a standard normal code; a mean of 1 costs half a nat an entry
    task = small_task("linear").under(LocalRule(bottleneck=2, divergence=1.0))
    params = torch.zeros(task.layout.dim)
    tensors = named(task.layout.split(params), task)
    tensors["bottleneck.encoder.bias"][2:] = math.log(math.e - 1)
    x, y = random_examples(3)
    assert float(task.loss(params, x, y)) == pytest.approx(math.log(10), abs=1e-6)
    tensors["bottleneck.encoder.bias"][:2] = 1.0
    assert float(task.loss(params, x, y)) == pytest.approx(math.log(10) + 1 / math.log(2), abs=1e-6)


@every_model
def test_all_other_tensors_start_as_without_it_and_it_is_inserted_once(name):
    task = small_task(name)
    wide = task.under(RULE)
    assert wide.under(RULE) is wide
    assert task.under(LocalRule()) is task
    width = task.structure.layers[len(task.structure.body.layers)].inputs
    assert wide.layout.dim == task.layout.dim + 3 * 5 * width + 2 * 5 + width
    for initialization in ("default", "dlg", "zero"):
        old, new = (dataclasses.replace(each, initialization=initialization) for each in (task, wide))
        before, after = named(old.layout.split(old.init(KEY)), old), named(new.layout.split(new.init(KEY)), new)
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
        added = torch.cat([after[name].flatten() for name in after.keys() - before.keys()])
        most = {"default": max(width, 5) ** -0.5, "dlg": 0.5, "zero": 0.0}[initialization]
        assert 0.8 * most <= float(added.abs().max()) <= max(width**-0.5, 5**-0.5, most)


def test_a_users_network_keeps_its_order_of_tensors():
    task = dataclasses.replace(small_task(), model=models.build(f"{__name__}:First", (1, 8, 8), 10))
    wide, x = task.under(RULE), random_examples(3).x
    own = [name for name in wide.layout.names if not name.startswith("bottleneck.")]
    assert own == list(task.layout.names)
    assert wide.layout.names.index("bottleneck.encoder.weight") == task.layout.names.index("head.weight")
    params = wide.init(KEY)
    t, net = named(wide.layout.split(params), wide), First()
    net.load_state_dict({name: t[name] for name in own})
    h = torch.sigmoid(net.second(torch.sigmoid(net.first(x.flatten(1)))))
    codes, _ = by_hand(t, h, None)
    scores = net.head(codes @ t["bottleneck.decoder.weight"].T + t["bottleneck.decoder.bias"])
    torch.testing.assert_close(wide.outputs(params, x), scores.detach())


def test_a_model_whose_last_dense_layer_is_not_known_is_refused():
    with pytest.raises(ValueError, match="is called as it is, but the defense inserts a bottleneck"):
        function_task((10, 64), lambda tensors, x, keep: x.flatten(1) @ tensors[0].T).under(RULE)
    other = dataclasses.replace(small_task(), model=models.build("tests.torch_models:Turned", (1, 8, 8), 10))
    with pytest.raises(ValueError, match="last weight of two axes is that of its last dense layer"):
        other.under(RULE)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_all_engines_draw_the_same_noise(clip):
    task = small_task("mlp-small").under(RULE)
    params, data = task.init(KEY).double(), random_examples(9).double()
    work = [Work(Examples(data.x[:n], data.y[:n]), KEY.child(n)) for n in (9, 5)]
    plan = LocalPlan(False, None, 2, 4, 0.5, 0.3, clip=clip)
    assert choose_engine(task) == "loop"
    found, expected = (train_clients(task, params, work, plan, how).updates for how in ("vmap", "loop"))
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    other = [own._replace(key=KEY.child("other", at)) for at, own in enumerate(work)]
    whole = dataclasses.replace(plan, batch=0)
    one, two = (train_clients(task, params, each, whole, "loop").updates for each in (work, other))
    assert not torch.allclose(one, two, rtol=1e-2)


def test_each_record_and_step_has_noise_of_its_own_which_is_standard_normal():
    task = small_task("mlp-small").under(LocalRule(bottleneck=50))
    (noise,) = task.dropout_masks(KEY, 400)
    # 20,000 draws: six standard errors
    assert abs(float(noise.mean())) < 6 / math.sqrt(20_000)
    assert abs(float(noise.square().mean()) - 1) < 6 * math.sqrt(2 / 20_000)
    assert len(noise[:, 0].unique()) == 400
    assert not torch.equal(noise, task.dropout_masks(KEY.child("other"), 400)[0])


def test_messages_are_plain_and_promise_nothing():
    update = rng.normal(Key(3), (200,))
    assert len(encode(Precode(), update)[0]) == 4 * 200
    assert judge(Precode().claim([None], setting_of(200))).verdict is Verdict.NOTHING_PROMISED
    assert Precode(width=3, beta=0.5).local == LocalRule(bottleneck=3, divergence=0.5)


def noisy_gradients(task, params, records, key, noise=True):
    """[n, d] of each record x, y alone, with noise of its own."""
    rows = []
    for number, (x, y) in enumerate(zip(*records, strict=True)):
        leaf, keep = params.clone().requires_grad_(), task.dropout_masks(key.child(number), 1) if noise else None
        rows.append(torch.autograd.grad(task.loss(leaf, x[None], y[None], keep), leaf)[0])
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["mlp-small", "lenet-dlg"])
def test_what_one_record_shows_is_free_of_noise(name):
    task = small_task(name).under(Precode(width=8).local)
    params, records = task.init(KEY), random_examples(3)
    sent = noisy_gradients(task, params, records, KEY.child("noise"))
    misfit, nothing = before_noise(task, params, sent)
    at, x = torch.arange(3), records.x.flatten(1)
    right, wrong = (misfit(candidates, at).value for candidates in (x, x.roll(1, 0)))
    assert float((right / nothing).max()) < 1e-10
    assert float((wrong / right).min()) > 1e4
    assert before_noise(small_task(name), params[: small_task(name).layout.dim], sent) is None


@pytest.mark.parametrize("name", ["mlp-small", "lenet-dlg"])
def test_the_slope_of_what_one_record_shows_is_that_of_its_value(name):
    task = small_task(name).under(Precode(width=8).local)
    params, records = task.init(KEY).double(), random_examples(2).double()
    misfit, _ = before_noise(task, params, noisy_gradients(task, params, records, KEY.child("noise")))
    z = torch.cat([records.x.flatten(1) + 0.1, torch.zeros(2, 10)], 1)  # with logits of labels, which have no effect
    found, at, step = misfit(z, torch.arange(2)), torch.arange(2), 1e-6
    way = rng.normal(KEY.child("way"), z.shape, dtype=torch.float64)
    numeric = (misfit(z + step * way, at).value - misfit(z - step * way, at).value) / (2 * step)
    torch.testing.assert_close((found.gradient * way).sum(1), numeric, rtol=1e-5, atol=0)
    assert not bool(found.gradient[:, 64:].any())


def links_of(task, samples, n, **how):
    setting = dataclasses.replace(Setting(task.layout, 4, 4, 1, "gradient", 1, 0.1, batch=0, samples=1), **how)
    return Links(setting, [Sender(0, samples)] * n, None)


def test_the_likelihood_of_one_record_does_not_depend_on_the_noise():
    task, defense = small_task("lenet-dlg").under(Precode(width=8).local), Precode(width=8)
    params, records = task.init(KEY), random_examples(3)
    sent = noisy_gradients(task, params, records, KEY.child("noise"))
    whole = noisy_gradients(task, params, records, KEY, noise=False)
    links = links_of(task, 1, 3)
    wires = [defense.encode(None, None, update, link, KEY)[0] for update, link in zip(sent, links.each(), strict=True)]
    for score in (defense.likelihood(None, wires, links), defense.exact_likelihood(None, wires, links)):
        assert float(score(whole).max()) < 100 < 1e5 < float(score(whole.roll(1, 0)).min())
    several = links_of(task, 5, 3)
    rough = defense.likelihood(None, wires, several)(whole)
    before = sum(task.layout.sizes[: task.layout.names.index("bottleneck.encoder.weight")])
    error = (whole - sent)[:, :before].square().mean(1) / sent[:, :before].square().mean(1)
    torch.testing.assert_close(rough, before * error / (2 * 0.5**2))
    with pytest.raises(NoLikelihood, match="only the client knows the noise"):
        defense.exact_likelihood(None, wires, several)
    decayed = links_of(task, 1, 3, sends="update", weight_decay=0.1)
    torch.testing.assert_close(defense.likelihood(None, wires, decayed)(whole), rough)


def test_a_lineup_names_the_record_behind_each_message():
    task, defense = small_task("lenet-dlg").under(Precode(width=8).local), Precode(width=8)
    params, x, pool = task.init(KEY), random_examples(2, seed=5), random_examples(60, seed=6)
    setting = Setting(task.layout, 2, 2, 1, "update", 1, 0.1, 0, 1)
    updates = -0.1 * noisy_gradients(task, params, x, KEY.child("noise"))
    messages = encoded(setting, defense, updates, [1, 1], KEY)
    messages = tuple(message._replace(sender=Sender(k, 1)) for k, message in enumerate(messages))
    lineups = [Examples(torch.cat([x.x[k : k + 1], pool.x[k:40:10]]), pool.y[[k] * 5]) for k in range(2)]
    known = {"auxiliary": Examples(pool.x[40:], pool.y[40:]), "lineups": tuple((each,) for each in lineups)}
    model = Snapshot(0, params, None)
    seen = Observation(View.parse("server+lineup"), setting, task, defense, 0.1, messages, model, **known)
    found = Lineup(references=2).run(seen, KEY)
    assert [int(record.scores.argmax()) for (record,) in found.records] == [0, 0]


def federation(model, init, **how):
    """Digits and the first model of a federation with the defense at its defaults."""
    spec = FederationSpec(clients=4, rounds=1, algorithm="fedsgd", batch=16, **how)
    loaded, defense = load_data("digits", Path()), Precode()
    task = make_task(TaskSpec("digits", model, init), loaded).under(defense.local)
    clients = {k: np.arange(20 * k, 20 * k + 20) for k in range(4)}
    holdings = {k: Examples(*(part[rows] for part in loaded.train)) for k, rows in clients.items()}
    given = task, spec, defense, holdings, loaded.test, KEY.child("training")
    trained = train(*given, engine="loop", keep=Keep(frozenset({0}), frozenset({0})))
    return TrainedFederation(
        task, spec, defense, trained, loaded.train, loaded.test, clients, "loop", KEY, classes=loaded.classes
    )


def ssim(seen, truth, attack, **parameters):
    """[n] SSIM of an attack."""
    guesses = registry.build("attack", attack, parameters).run(seen, KEY).guesses
    found, _ = score_reconstruction([v.x for v in truth.victims], [v.y for v in truth.victims], guesses)
    (estimate,) = [e for e in found if e.name == "ssim"]
    return np.array([0.0 if value is None else value for value in estimate.values])


@pytest.mark.parametrize(("model", "init"), [("mlp-small", "default"), ("lenet-dlg", "dlg")])
def test_a_search_with_wrong_noise_fails_and_one_that_reads_what_is_before_it_recovers(model, init):
    seen, truth = observe(federation(model, init), View.parse("server"), Target(round=0, count=4))
    naive = {
        "map": ssim(seen, truth, "map", objective="l2", evaluations=60, warm=60),
        "idlg": ssim(seen, truth, "idlg", evaluations=100),
        "inverting-gradients": ssim(seen, truth, "inverting-gradients", evaluations=100),
    }
    aware = ssim(seen, truth, "map", evaluations=60, warm=60)
    assert aware.min() > 0.98
    assert all(values.mean() < 0.65 for values in naive.values())  # the mean image has 0.55
    assert ssim(seen, truth, "dlg", objective="likelihood", evaluations=60, restarts=1).min() > 0.9
    if model == "mlp-small":  # the first dense layer is read as without the defense
        assert ssim(seen, truth, "analytic").min() > 0.999


def unordered():
    """The task of `First`, whose tensors have not the order of its layers."""
    return dataclasses.replace(small_task(), model=models.build(f"{__name__}:First", (1, 8, 8), 10))


@pytest.mark.parametrize(("name", "width"), [("mlp-small", 10), ("mlp-small", 256), ("lenet-dlg", 16), ("", 64)])
def test_a_server_that_chooses_the_model_silences_the_noise(name, width):
    plain = small_task(name) if name else unordered()
    task = plain.under(Precode(width=width).local)
    own, params, records = Without.of(task), plain.init(KEY), random_examples(3)
    assert own.task.layout == plain.layout
    assert own.task.structure.places == plain.structure.places
    sent = own.silenced(params)
    assert torch.equal(sent[own.kept], params)
    torch.testing.assert_close(task.outputs(sent, records.x), plain.outputs(params, records.x))
    one, two = (noisy_gradients(task, sent, records, KEY.child(noise))[:, own.kept] for noise in "ab")
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-7)
    without = noisy_gradients(plain, params, records, KEY, noise=False)
    for at, (found, asked) in enumerate(zip(plain.layout.split(one), plain.layout.split(without), strict=True)):
        if at != plain.layout.last_matrix:  # this one gets what the codes hold
            torch.testing.assert_close(found, asked, rtol=1e-3, atol=1e-5)


def test_a_bottleneck_that_is_too_narrow_for_the_scores_is_named():
    own = Without.of(small_task("mlp-small").under(Precode(width=9).local))
    with pytest.raises(ValueError, match="the bottleneck has 9 numbers, too few to pass on 10 scores"):
        own.silenced(own.task.init(KEY))


def test_a_model_without_a_bottleneck_stays_as_it_is():
    task = small_task("mlp-small")
    own, params = Without.of(task), task.init(KEY)
    assert own.task is task
    assert own.silenced(params) is params


@pytest.mark.parametrize(
    ("attack", "threat", "batch"),
    [
        ("imprint", "malicious-server", 4),
        ("quantile-biases", "malicious-server", 4),
        ("trap-weights", "malicious-server", 1),
        ("spear", "server", 2),
    ],
)
def test_attacks_on_the_first_layer_find_the_records_before_the_noise(attack, threat, batch, tmp_path):
    federation = {"clients": 4, "samples": 200, "rounds": 1, "algorithm": "fedsgd", "batch": batch}
    one = {"name": attack, "threat": threat, "target": {"kind": "messages", "count": 4}}
    run = run_study(
        resolve(study_table(federation, ["precode"], [one], limit=False)), folder=tmp_path, data=Path(), workers=0
    )
    assert not run.failures
    (result,) = run.results.values()
    values = [0.0 if value is None else value for value in result.estimate("ssim").values]
    assert len(values) == 4 * batch
    assert np.mean(np.array(values) > 0.98) > 0.7


@pytest.mark.parametrize(("batch", "least"), [(4, 0.95), (20, 0.15)])  # 16 inputs of the encoder; chance is 0.05
def test_a_lineup_names_records_of_a_batch(batch, least, tmp_path):
    federation = {"clients": 8, "samples": 8 * batch, "rounds": 1, "algorithm": "fedsgd", "batch": 0}
    one = {"name": "lineup", "threat": "server+lineup", "target": {"kind": "messages", "count": 4, "among": 20}}
    run = run_study(
        resolve(study_table(federation, ["precode"], [one], limit=False)), folder=tmp_path, data=Path(), workers=0
    )
    (result,) = run.results.values()
    assert result.estimate("named").n == 4 * batch
    assert result.estimate("named").value > least


def test_the_span_of_records_holds_no_others():
    task, records, others = (
        small_task("mlp-small").under(Precode(width=8).local),
        random_examples(3),
        random_examples(9),
    )
    params = task.init(KEY)
    sent = noisy_gradients(task, params, records, KEY.child("noise")).mean(0)
    scores = spanned(task, params, sent, 3)
    assert float(scores(records.x).min()) > -1 > -1e3 > float(scores(others.x[3:]).max())
    assert spanned(task, params, sent, 4) is None  # three records span no four dimensions
    assert spanned(small_task("mlp-small"), params, sent, 3) is None
    assert spanned(task, params, sent / 0, 3) is None  # not finite


def test_a_training_sends_the_wide_layout_and_its_rounds_are_seen():
    trained = federation("mlp-small", "default")
    (message, *_) = trained.training.messages[0]
    assert len(message.wire) == 4 * trained.task.layout.dim == 4 * trained.training.setting.dim
    assert trained.training.models[0].shape == (trained.task.layout.dim,)
    assert torch.equal(trained.training.models[0], trained.task.init(KEY.child("training", "init")))


def test_imitated_messages_have_noise_of_their_own():
    seen, _ = observe(federation("mlp-small", "default"), View.parse("server"), Target(round=0, count=2))
    batches = Examples(*(part[:2][:, None].expand(2, 3, *part.shape[1:]) for part in load_data("digits", Path()).test))
    plain = own_updates(seen, seen.observed_rounds[0], batches)
    updates, made = own_messages(seen, seen.observed_rounds[0], batches, 0, KEY)
    assert not torch.allclose(updates, plain, rtol=0.1)
    assert [message.wire for message in made.messages] == [update.numpy().tobytes() for update in updates[:, 0]]
    # a record has noise of its own: the mean of three equal ones is no gradient of one
    weight, bias = seen.task.layout.split(updates[0, 0])[4:6]
    assert torch.linalg.matrix_rank(torch.cat([weight, bias[:, None]], 1), rtol=1e-4) == 1  # their codes have one input
    decoder = seen.task.layout.split(updates[0, 0])[6]
    assert torch.linalg.matrix_rank(decoder, rtol=1e-4) > 1


def test_an_aggregator_leaves_out_what_is_behind_the_noise_and_certifies_nothing():
    task, defense = small_task("mlp-small").under(Precode(width=8).local), aggregated(Precode(width=8))
    sent = noisy_gradients(task, task.init(KEY), random_examples(2), KEY.child("noise"))
    links = Links(setting_of(0, layout=task.layout, participants=2), [Sender(0, 2)], None)
    wire = [pack_float64(sent.double().sum(0))]
    likelihood = defense.likelihood(None, wire, links)
    before, behind = sent.clone(), sent.clone()
    before[0, 0] += 1e-3
    behind[0, sum(task.layout.sizes[: task.layout.encoder]) :] += 1.0
    assert float(likelihood(behind[None])) < 1.0 < 1e3 < float(likelihood(before[None]))
    with pytest.raises(NoLikelihood, match="only the clients know the noise"):
        defense.exact_likelihood(None, wire, links)


def test_there_is_no_limit_of_reconstruction():
    seen, truth = observe(federation("mlp-small", "default"), View.parse("server"), Target(round=0, count=2))
    with pytest.raises(NoLimit, match="the gradients have noise of their own"):
        limits(seen, truth.victims, KEY)

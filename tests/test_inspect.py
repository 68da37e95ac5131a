"""Messages that somebody else made: attacked as those of our own loop, from Python and from a recorded folder."""

import copy
import dataclasses
import math
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import leakgauge
from leakgauge.harness.core.cell import PartSpec, TaskSpec
from leakgauge.harness.core.claim import IN_SUMS
from leakgauge.harness.core.contract import Examples, Sender
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.rng import Key, normal, uniform
from leakgauge.harness.core.vec import Layout
from leakgauge.harness.data import load
from leakgauge.harness.federation.loop import Keep, make_plan, replay_state, train
from leakgauge.harness.federation.recording import LIST, Facts, Recorded, Recorder, read, spec_of
from leakgauge.harness.federation.round import Client, Round, client_key
from leakgauge.harness.integrations.inspect import Asked, study_of
from leakgauge.harness.integrations.synthetic import Names, flattened, part_spec
from leakgauge.harness.learn.batch import Work, choose_engine, train_clients
from leakgauge.harness.study.jobs import RunContext
from leakgauge.harness.study.prepare import StoredTraining, as_recorded, make_task, prepare
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import resolve
from tests.by_rows import by_rows
from tests.command import call
from tests.doubles import study_table

MAP = {"name": "map", "evaluations": 30, "warm": 10}
QUIET = {"progress": False, "limit": False}


def seeded(key, module):
    with torch.no_grad():
        for number, (name, tensor) in enumerate(module.named_parameters()):
            if "norm" not in name:
                scale = (tensor.numel() / len(tensor)) ** -0.5
                tensor.copy_(normal(Key(number).child(key, name), tuple(tensor.shape)) * scale)
    return module


def dense():
    return seeded("dense", nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Sigmoid(), nn.Linear(20, 10)))


class Normed(nn.Module):
    """Two convolutions, the second with batch norm: after the first, no scale of an input is lost."""

    def __init__(self):
        super().__init__()
        self.first, self.conv = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.norm, self.fc = nn.BatchNorm2d(8), nn.Linear(512, 10)

    def forward(self, x):
        return self.fc(torch.sigmoid(self.norm(self.conv(torch.sigmoid(self.first(x))))).flatten(1))


def normed():
    return seeded("normed", Normed())


def lenet():
    return seeded(
        "lenet", nn.Sequential(nn.Conv2d(1, 4, 5, stride=2, padding=2), nn.Sigmoid(), nn.Flatten(), nn.Linear(64, 10))
    )


def gradient(model, x, y):
    return torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))


def digits():
    return load("digits", Path())


def some(rows):
    x, y = digits().train
    return x[rows], y[rows]


def values(run, name="mse"):
    assert not run.failures, [one.trace for one in run.failures.values()]
    return {
        cell.attack.name: run.results[cell.id].estimate(name).values
        for cell in run.cells
        if cell.attack.name != "lineup"
    }


# the same as our own loop


@pytest.mark.parametrize(("model", "algorithm"), [("mlp-small", "fedavg"), ("lenet-dlg", "fedsgd")])
@pytest.mark.matrix
def test_a_recorded_training_has_the_attack_results_of_our_own_bit_for_bit(tmp_path, model, algorithm):
    steps = {"local_steps": 2} if algorithm == "fedavg" else {}
    federation = {"clients": 3, "rounds": 2, "algorithm": algorithm, "batch": 0, "samples": 3, "lr": 0.1, **steps}
    defense = {"name": "gaussian", "epsilon": 1e5, "clip": 1.0}
    attacks = [
        {**MAP, "target": {"kind": "messages", "round": 1, "count": 3}},
        {"name": "prior", "target": {"kind": "messages", "round": 0, "count": 2}},
        {"name": "membership-loss", "target": {"kind": "members", "count": 3}},
    ]
    table = study_table(federation, [defense], attacks, model=model, limit=False, seeds=[5])
    ours = run_study(resolve(table), tmp_path / "ours", workers=0)
    spec = resolve(table).trainings[0]
    ready = prepare(spec, Path())
    both, own = frozenset({0, 1}), ready.key.child("training")
    parts = ready.task, spec.federation, ready.defense, ready.holdings, ready.test, own
    trained = train(*parts, engine=choose_engine(ready.task), keep=Keep(both, both))
    sends = "gradient" if algorithm == "fedsgd" else "update"
    facts = Facts(3, 3, sends, steps=1 if algorithm == "fedsgd" else 2, lr=0.1)
    with Recorder(tmp_path / "rec", facts, ready.task.layout, spec.defense, most_bytes=10**7, seed=5) as recorder:
        recorder.data(ready.data.train, ready.test, ready.data.classes)
        for number, model_before in (*trained.models.items(), (2, trained.final)):
            assert recorder.model(number, model_before, 0.1)
            for one in trained.messages.get(number, ()):
                client = one.sender.number
                rows = ready.clients[client][trained.truth[number][client]]
                assert recorder.message(Recorded(number, *one.sender, one.wire, one.images, one.steps, rows))
    table["tasks"][0]["data"] = f"recording:{tmp_path}/rec"
    table["federations"] = [dataclasses.asdict(spec_of(read(tmp_path / "rec")))]
    theirs = run_study(resolve(table), tmp_path / "theirs", workers=0)
    assert not theirs.failures
    for one, other in zip(ours.cells, theirs.cells, strict=True):
        assert ours.results[one.id].estimates == theirs.results[other.id].estimates
    (mine,), (found,) = ours.trainings.values(), theirs.trainings.values()
    # of a recording, weights and missing clients are unknown, so nothing is proved for sums of messages
    own = [
        dataclasses.replace(one, further=(), assumes=tuple(text for text in one.assumes if text != IN_SUMS))
        for one in (mine.one_round, mine.whole_run)
    ]
    assert (mine.message_bytes, *own) == (found.message_bytes, found.one_round, found.whole_run)
    assert [flag.code for flag in found.flags if flag.severity == "note"] == ["data"]


def test_what_is_sent_over_the_air_is_attacked_as_the_sum_that_a_training_of_its_key_hears(tmp_path):
    messages = {"kind": "messages", "round": 0, "count": 1}
    federation = {"clients": 3, "participants": 3, "rounds": 1, "algorithm": "fedsgd", "batch": 0, "samples": 6}
    defense = {"name": "ota", "epsilon": 1e4, "delta": 1e-5, "clip": 1.0}
    members = {"name": "membership-sum", "target": {"kind": "members", "round": 0, "count": 6}}
    attacks = [{**MAP, "target": messages}, members]
    table = study_table({**federation, "lr": 0.1}, [defense], attacks, model="linear", limit=False, seeds=[5])
    spec = resolve(table).trainings[0]
    ready, plan = prepare(spec, Path()), make_plan(spec.federation, 0.1)
    key = ready.key.child("training")
    start = ready.task.init(key.child("init"))
    here = Round(ready.defense, ready.setting, ready.defense.init(ready.setting))
    keys = {k: client_key(key, 0, k) for k in ready.holdings}
    work = [Work(examples, keys[k].child("train")) for k, examples in ready.holdings.items()]
    trained = train_clients(ready.task, start, work, plan, choose_engine(ready.task))
    facts = Facts(3, 3, "gradient", 1)
    with Recorder(tmp_path / "rec", facts, ready.task.layout, spec.defense, most_bytes=10**6, seed=5) as recorder:
        recorder.model(0, start, 0.1)
        for k, update, (batch,) in zip(keys, trained.updates, trained.batches, strict=True):
            sealed, _ = here.send(Client.of(Sender(k, 2), update, None, keys[k]))
            recorder.message(Recorded(0, k, 2, here.opened(sealed), 2, 1, ready.clients[k][batch]))
    ours = run_study(resolve(table), tmp_path / "ours", workers=0)
    table["tasks"][0]["data"] = f"recording:{tmp_path}/rec?data=digits"
    table["federations"] = [dataclasses.asdict(spec_of(read(tmp_path / "rec")))]
    theirs = run_study(resolve(table), tmp_path / "theirs", workers=0)
    assert not ours.failures | theirs.failures
    found = [[result.estimates for result in run.results.values()] for run in (ours, theirs)]
    assert found[0] == found[1]
    assert theirs.pictures(theirs.cells[0].id).original.shape[:2] == (1, 6)
    asked = Asked(attacks=[part_spec("attack", "prior")], victims=2)
    study = study_of(TaskSpec(table["tasks"][0]["data"], "linear"), read(tmp_path / "rec"), asked, Path())
    assert {cell.target.kind for cell in study.cells} == {"probe"}
    assert study.notes[0].startswith("ota adds up all messages of a round: probes were attacked")


def test_the_first_rounds_of_a_longer_training_have_its_noise_and_the_state_of_its_losses(tmp_path):
    federation = {"clients": 3, "rounds": 6, "batch": 0, "samples": 30, "local_steps": 1}
    attacks = [{"name": "prior", "target": {"kind": "messages", "round": 0, "count": 2}}]
    defense = {"name": "udp-crd", "epsilon": 50.0}
    spec = resolve(study_table(federation, [defense], attacks, model="linear")).trainings[0]
    ready, both = prepare(spec, Path()), frozenset({0, 1, 2})
    parts = ready.task, spec.federation, ready.defense, ready.holdings, ready.test, ready.key.child("training")
    trained = train(*parts, engine=choose_engine(ready.task), keep=Keep(both, both))
    facts = Facts(3, 3, "update", steps=1, rounds=6)
    with Recorder(tmp_path / "rec", facts, ready.task.layout, spec.defense, most_bytes=10**7, seed=0) as recorder:
        recorder.data(ready.data.train, ready.test, ready.data.classes)
        for number in sorted(both):
            recorder.model(number, trained.models[number], 0.1, trained.feedback[number].before)
            for one in trained.messages[number]:
                recorder.message(Recorded(number, *one.sender, one.wire, one.images, one.steps))
    found = dataclasses.replace(spec, task=dataclasses.replace(spec.task, data=f"recording:{tmp_path}/rec"))
    theirs = prepare(dataclasses.replace(found, federation=spec_of(read(tmp_path / "rec"))), Path())
    assert (theirs.setting.rounds, theirs.setting.samples) == (ready.setting.rounds, ready.setting.samples)
    held = as_recorded(
        *(read(tmp_path / "rec"), Keep(both, both), theirs.task, theirs.defense, theirs.setting, theirs.test),
        {k: np.arange(10) for k in range(3)},
        theirs.key.child("training"),
    )
    states = [replay_state(ready.defense, ready.setting, one.feedback[:2]) for one in (trained, held)]
    assert states[0] == states[1] != replay_state(ready.defense, ready.setting, [])
    assert held.feedback[:2] == trained.feedback[:2]


@pytest.mark.parametrize("build", [dense, lenet])
@pytest.mark.matrix
def test_gradients_by_hand_are_attacked_as_those_of_our_own_client(tmp_path, build):
    model = build()
    ours = leakgauge.inspect(model, "digits", folder=tmp_path / "a", attacks=[MAP, "prior"], victims=2, **QUIET)
    step = leakgauge.inspect(
        model, "digits", train_step=gradient, folder=tmp_path / "b", attacks=[MAP, "prior"], victims=2, **QUIET
    )
    assert values(ours) == values(step)
    assert read(tmp_path / "a/recording").messages(0)[0].wire == read(tmp_path / "b/recording").messages(0)[0].wire
    assert "<html" in (tmp_path / "b/report.html").read_text()


def test_all_forms_of_a_message_are_the_same_vector_whatever_the_order_of_a_dictionary():
    model = normed()
    parts = {name: tuple(one.shape) for name, one in model.state_dict().items() if "num_batches" not in name}
    layout = Layout(tuple(parts), tuple(parts.values()))
    names = Names.of(layout, model)
    full = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    bare = {name: tensor.detach() for name, tensor in model.named_parameters()}
    for whole, complete in ((full, True), (bare, False)):
        turned = dict(reversed(whole.items()))
        tensors = [tensor for name, tensor in whole.items() if name in layout.names]
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        found, told = flattened([whole, turned, tensors, tuple(tensors), flat], names)
        assert told is complete
        assert all(torch.equal(one, flat) for one in found)


@pytest.mark.matrix
def test_updates_of_two_steps_in_place_are_those_of_our_own_client_and_are_attacked(tmp_path):
    def train_step(model, x, y):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()

    model, how = dense(), {"sends": "update", "lr": 0.5, "steps": 2, "victims": 2, "attacks": [MAP], **QUIET}
    before = copy.deepcopy(model.state_dict())
    theirs = leakgauge.inspect(model, "digits", train_step=train_step, folder=tmp_path / "a", **how)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    leakgauge.inspect(model, "digits", folder=tmp_path / "b", **how)
    wires = [read(tmp_path / name / "recording").messages(0) for name in "ab"]
    for one, other in zip(*wires, strict=True):
        sent, ours = (torch.frombuffer(bytearray(message.wire), dtype=torch.float32) for message in (one, other))
        torch.testing.assert_close(sent, ours, rtol=1e-4, atol=1e-7)
        assert one.steps == 2
    assert max(values(theirs)["map"]) < 0.01


@pytest.mark.table(2)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_network_with_batch_norm_is_read_from_its_gradients_without_statistics(tmp_path, mode):
    model = normed().train(mode == "train")
    search = {"name": "idlg", "evaluations": 150, "restarts": 1}
    run = leakgauge.inspect(model, "digits", train_step=gradient, folder=tmp_path, victims=2, attacks=[search], **QUIET)
    assert min(values(run, "ssim")["idlg"]) > 0.9
    assert ("norm.running_mean" in read(tmp_path / "recording").layout.names) is False
    assert run.cells[0].training.task.model.endswith("?statistics=no") is (mode == "train")


def test_statistics_that_a_step_in_place_moves_are_part_of_the_message(tmp_path):
    def train_step(model, x, y):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        cross_entropy(model(x), y).backward()
        optimizer.step()

    how = {"sends": "update", "lr": 0.1, "victims": 2, "batch": 2, "attacks": ["prior"], **QUIET}
    leakgauge.inspect(normed(), "digits", train_step=train_step, folder=tmp_path / "a", **how)
    leakgauge.inspect(normed(), "digits", folder=tmp_path / "b", **how)
    found = [read(tmp_path / name / "recording") for name in "ab"]
    sent, ours = (torch.frombuffer(bytearray(one.messages(0)[0].wire), dtype=torch.float32) for one in found)
    torch.testing.assert_close(sent, ours, rtol=1e-3, atol=1e-6)
    places = dict(zip(found[0].layout.names, found[0].layout.split(sent), strict=True))
    assert bool(places["norm.running_var"].abs().max() > 1e-3)


def test_a_defense_and_its_bytes_are_accepted_and_judged(tmp_path):
    model, how = dense(), {"defense": {"name": "gaussian", "epsilon": 8.0}, "attacks": ["prior"], **QUIET}
    first = leakgauge.inspect(model, "digits", folder=tmp_path / "a", victims=2, **how)
    (record,) = first.trainings.values()
    assert record.spec.defense.name == "gaussian"
    assert record.one_round.epsilon == pytest.approx(8.0)
    wires = [one.wire for one in read(tmp_path / "a/recording").messages(0)]
    rows = [one.rows for one in read(tmp_path / "a/recording").messages(0)]
    again = leakgauge.inspect(model, "digits", wires, records=rows, folder=tmp_path / "b", **how)
    assert [one.wire for one in read(tmp_path / "b/recording").messages(0)] == wires
    assert values(first) == values(again)


def test_defaults_are_chosen_by_what_fits_and_the_report_says_what_was_left_out(tmp_path):
    run = leakgauge.inspect(dense(), "digits", folder=tmp_path, batch=2, victims=2, minutes=1e-4, progress=False)
    names = [cell.attack.name for cell in run.cells]
    assert names == ["prior", "map", "label-restoration", "lineup"]
    assert all(cell.target.count == 2 for cell in run.cells)
    notes = run.study["notes"]
    assert [note for note in notes if re.match("attack (idlg|analytic) was left out: it needs messages of one", note)]
    assert any(note.startswith("attack map spends") for note in notes)
    page = (tmp_path / "report.html").read_text()
    assert "Attack idlg was left out" in page
    assert tomllib.loads((tmp_path / "study.toml").read_text())["name"] == "inspect"


def test_own_data_keep_the_users_rows_and_half_of_the_others_is_the_attackers(tmp_path):
    x, y = digits().train
    x = x[:60] * 2 - 1  # of another range
    rows = [[50], [7]]
    model = dense()
    sent = [gradient(model, x[one], y[one]) for one in rows]
    run = leakgauge.inspect(
        model, (x, 2 * y[:60] - 9), sent, records=rows, folder=tmp_path, attacks=[MAP, "prior"], public=True, **QUIET
    )
    (note,) = run.study["notes"]
    scaled = "inputs scaled to [0, 1] by their range (the model gets the original units)"
    done = f"{scaled}; labels -9, -7, ..., 9 became the classes 0"
    assert done in note
    assert (tmp_path / "report.html").read_text().count(done) >= 3  # limits, flags, provenance
    shown = run.pictures(run.cells[0].id).original
    torch.testing.assert_close(torch.from_numpy(shown[:, 0, ..., 0]), (x[[50, 7], 0] + 1) / 2)
    assert max(values(run)["map"]) < min(values(run)["prior"]) / 3
    assert run.public_data


def test_the_same_call_resumes_and_other_messages_are_refused(tmp_path):
    call = {"folder": tmp_path, "attacks": ["prior"], "victims": 2, **QUIET}
    first = leakgauge.inspect(dense(), "digits", **call)
    again = leakgauge.inspect(dense(), "digits", **call)
    assert first.results.keys() == again.results.keys()
    with pytest.raises(ValueError, match="another model or of other messages: name another folder"):
        leakgauge.inspect(dense(), "digits", **{**call, "seed": 1})


def test_messages_without_known_records_give_probes_and_the_report_says_so(tmp_path):
    model, (x, y) = dense(), some([3])
    run = leakgauge.inspect(model, "digits", [gradient(model, x, y)], folder=tmp_path, attacks=["prior"], **QUIET)
    assert run.cells[0].target.kind == "probe"
    assert any("the records behind the messages are unknown" in note for note in run.study["notes"])


# errors


def broken(change):
    model, (x, y) = dense(), some([3])
    tensors = [tensor.clone() for tensor in gradient(model, x, y)]
    named = dict(zip(dict(model.named_parameters()), tensors, strict=True))
    return model, [change(tensors, named)]


@by_rows(
        (lambda t, n: t[:3], "message 0: expected 4 tensors, .* got 3; the first that is missing is '3.bias'"),
        (lambda t, n: [t[1], t[0], *t[2:]], r"tensor 0: expected '1.weight' of shape \(20, 64\), got shape \(20,\)"),
        (lambda t, n: [t[0], t[1] / 0, *t[2:]], "expected finite numbers, got 20 of 20 that are not in '1.bias'"),
        (lambda t, n: [*t[:3], None], r"tensor 3 \('3.bias'\) is None: no gradient reaches it"),
        (lambda t, n: torch.zeros(7), r"a flat tensor of 1,510 numbers, got shape \(7,\)"),
        (lambda t, n: torch.cat([one.flatten() for one in t]).mul(torch.nan), "not in '1.weight'"),
        (lambda t, n: {"2.bias": t[3]}, "expected a tensor '1.weight', got none; it has '2.bias'"),
        (lambda t, n: {**n, "head.bias": t[3]}, "the model has no tensor 'head.bias'; it has '1.weight'"),
        (lambda t, n: {**n, "3.bias": t[1]}, r"expected '3.bias' of shape \(10,\), got shape \(20,\)"),
        (lambda t, n: "gradient", "a flat tensor, a list of tensors or a dictionary by name, got str"),
        (lambda t, n: [*t[:3], t[3] * 1j], "of real numbers, got torch.complex64"),)  # fmt: skip
def test_a_message_that_does_not_fit_names_its_first_wrong_tensor(change, says, tmp_path):
    model, messages = broken(change)
    with pytest.raises(ValueError, match=says) as raised:
        leakgauge.inspect(model, "digits", messages, records=[[3]], folder=tmp_path, **QUIET)
    assert "\n" not in str(raised.value)


def returns_nothing(model, x, y):
    pass


def fails(model, x, y):
    raise KeyError("loader")


def out_of_memory(model, x, y):
    return [tensor[:1] for tensor in gradient(model, x, y)]


@by_rows(
        ({"train_step": returns_nothing}, "say sends='update'"),
        ({"train_step": returns_nothing, "sends": "update"}, "returned nothing, and changed nothing"),
        ({"train_step": fails}, "train_step failed for victim 0: KeyError: 'loader'"),
        ({"train_step": out_of_memory}, "tensor 0: expected '1.weight'"),
        ({"train_step": gradient, "messages": []}, "expected messages or train_step, got both"),
        ({"messages": []}, "at least one message"),
        ({"records": [[1]]}, "expected messages together with records"),
        ({"messages": [torch.zeros(1510)], "victims": 3}, "expected no victims together with messages"),
        ({"messages": [torch.zeros(1510)], "records": [[1], [2]]}, "records for each of 1 messages, got 2"),
        ({"messages": [torch.zeros(1510)], "records": [[9999]]}, "different rows from 0 to 1441"),
        ({"sends": "weights"}, "sends='gradient' or 'update'"),
        ({"steps": 3}, "expected steps=1 with sends='gradient', got steps=3"),
        ({"batch": 0}, "expected batch and victims >= 1"),
        ({"batch": math.nan}, "expected a whole number as batch, got nan"),
        ({"batch": True}, "expected a whole number as batch, got True"),
        ({"batch": None}, "expected a whole number as batch, got None"),
        ({"victims": "a"}, "expected a whole number as victims, got 'a'"),
        ({"victims": 10**400}, "expected a whole number as victims, got 1000"),
        ({"steps": 1.5, "sends": "update"}, "expected a whole number as steps, got 1.5"),
        ({"seed": []}, "expected a whole number as seed, got []".replace("[", r"\[")),
        ({"lr": 10**400}, "expected a number as lr, got 1000"),
        ({"lr": "a"}, "expected a number as lr, got 'a'"),
        ({"momentum": math.inf}, "expected a number as momentum, got inf"),
        ({"minutes": math.nan}, "expected a number as minutes, got nan"),
        ({"minutes": -1}, "expected minutes > 0, got minutes=-1"),
        ({"victims": 4000}, "at least 4000 x 1 records, got 1442"),
        ({"lr": -1.0}, "expected lr > 0"),
        ({"momentum": 0.5}, "momentum=0 with fedsgd"),
        ({"defense": "gausian"}, "did you mean 'gaussian'"),
        ({"defense": 3}, "expected a defense: a name, a table or an object, got int"),
        ({"defense": {"epsilon": 1.0}}, "expected a defense with its name"),
        ({"attacks": ["mapp"]}, "did you mean 'map'"),
        ({"threats": ["sever"]}, "no threat 'sever'"),
        ({"model": "mlp-small", "train_step": gradient}, "train_step needs the model as a torch.nn.Module"),
        ({"data": "digit"}, "did you mean 'digits'"),
        ({"auxiliary": (torch.zeros(9, 3), [0, 1, 2] * 3)}, "auxiliary: expected inputs"),
        ({"messages": [torch.zeros(1510)], "records": [[1]], "defense": "ota"}, "adds up all messages"),)  # fmt: skip
def test_a_call_that_cannot_be_answered_is_one_line(call, says, tmp_path):
    full = {"model": dense(), "data": "digits", "folder": tmp_path, **QUIET, **call}
    with pytest.raises((ValueError, LookupError), match=says) as raised:
        leakgauge.inspect(**full)
    assert "\n" not in str(raised.value)


# a recorded folder


def folder_of(tmp_path, **more):
    """A recording of two clients of a small federation, with its records."""
    task = prepare_task("linear")
    x, y = digits().train
    folder = tmp_path / "rec"
    recorder = Recorder(
        folder, Facts(2, 2, "gradient", steps=1), task.layout, PartSpec("none"), most_bytes=10**8, **more
    )
    recorder.data(Examples(x[:200], y[:200]), digits().test, digits().classes)
    params = task.init(Key(0))
    for number in (0, 1):
        recorder.model(number, params, 0.1)
        for client in (0, 1):
            row = 10 * client + number
            (sent,) = torch.autograd.grad(task.loss(leaf := params.clone().requires_grad_(), x[[row]], y[[row]]), leaf)
            recorder.message(Recorded(number, client, 1, sent.numpy().tobytes(), 1, 1, [row]))
    recorder.close()
    return folder


def prepare_task(model):
    return make_task(TaskSpec("digits", model), digits())


def command(*words):
    return call("inspect", *words)


def test_the_command_attacks_a_recorded_folder_and_writes_a_report(tmp_path):
    folder = folder_of(tmp_path)
    done = command(folder, "--model", "linear", "--attacks", "prior,analytic", "--workers", "0", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    run = leakgauge.load_run(tmp_path / "out")
    assert max(values(run)["analytic"]) < 1e-6
    assert "analytic" in (tmp_path / "out/report.html").read_text()
    later = command(
        folder, "--model", "linear", "--attacks", "analytic", "--round", 1, "--workers", "0", "-o", tmp_path / "b"
    )
    assert later.exit_code == 0, later.output
    assert leakgauge.load_run(tmp_path / "b").cells[0].target.round == 1


def test_a_changed_recording_is_noticed(tmp_path):
    folder = folder_of(tmp_path)
    call = [folder, "--model", "linear", "--attacks", "prior", "--no-limit", "--workers", "0", "-o", tmp_path / "out"]
    assert command(*call).exit_code == 0
    text = (folder / LIST).read_bytes()
    (folder / LIST).write_bytes(text[: text.rindex(b'{"kind":"end"')])
    changed = command(*call)
    assert changed.exit_code == 2
    assert "is not the one of the results" in changed.output


@by_rows(
    (["--model", "lenear"], "did you mean 'linear'"),
    (["--model", "mlp"], r"model 'mlp': tensor 0: the model has 'fc1.weight' of shape .256, 64."),
    (["--model", "linear", "--round", 7], "the recording has no model of round 7; it has those of 0, 1"),
    (["--model", "linear", "--victims", 3], "expected at most 2 victims with known records in round 0"),
    (["--model", "linear", "--attacks", "nothing"], "no attack 'nothing'"),
    (["--model", "linear", "--attacks", "tests.doubles:Boom"], "pass --allow-code if you trust it"),
    (["--model", "tests.own:net"], "pass --allow-code if you trust it"),
    (["--model", "linear", "--data", "tests.own:data"], "pass --allow-code if you trust it"),
    (["--model", "linear", "--threat", "server+auxiliary=tests.own:data"], "pass --allow-code if you trust it"),
)
def test_a_command_that_does_not_fit_the_recording_is_one_line(words, says, tmp_path, monkeypatch):
    monkeypatch.setenv("LEAKGAUGE_ALLOW_CODE", "0")
    done = command(folder_of(tmp_path), *words, "--workers", "0", "-o", tmp_path / "out")
    assert done.exit_code == 2, done.output
    assert re.search(says, done.output), done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "out/cells").exists()


def test_a_folder_without_a_recording_is_one_line(tmp_path):
    done = command(tmp_path, "--model", "linear")
    assert done.exit_code == 2
    assert f"there is no {LIST}" in done.output


def test_a_strangers_recording_names_no_code_that_is_imported(tmp_path, monkeypatch):
    monkeypatch.setenv("LEAKGAUGE_ALLOW_CODE", "0")
    folder = folder_of(tmp_path)
    text = (folder / LIST).read_text()
    (folder / LIST).write_text(text.replace('"defense":"none"', '"defense":"tests.killed:Boom"'))
    done = command(folder, "--model", "linear", "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert "pass --allow-code if you trust it" in done.output


def table_of(folder, **more):
    federation = dataclasses.asdict(spec_of(read(folder)))
    attacks = [{"name": "prior", "target": {"kind": "messages", "round": 0, "count": 2}}]
    return study_table(federation, ["none"], attacks, data=f"recording:{folder}", model="linear") | more


@by_rows(
    ({"federations": [{"clients": 3, "rounds": 2, "algorithm": "fedsgd", "batch": 0}]}, "got 3, expected 2"),
    ({"defenses": [{"name": "gaussian", "epsilon": 1.0}]}, "defense: got .*, expected no defense as in the"),
    ({"seeds": [4]}, "seeds: got 4, expected 3 as in the recording"),
    ({"attacks": [{"name": "imprint", "threat": "malicious-server"}]}, "in a recording they were chosen already"),
    ({"federations": [{"clients": 2, "rounds": 9, "algorithm": "fedsgd", "batch": 0}]}, "got 9, expected 2"),
)
def test_a_study_that_contradicts_its_recording_is_refused_before_it_runs(more, says, tmp_path):
    table = table_of(folder_of(tmp_path, seed=3), seeds=[3])
    with pytest.raises(StudyError, match=says):
        run_study(resolve({**table, **more}), tmp_path / "out", workers=0)


def test_a_message_that_its_defense_refuses_is_dropped_and_counted(tmp_path):
    folder = tmp_path / "rec"
    task = prepare_task("linear")
    recorder = Recorder(
        folder, Facts(2, 2, "gradient", steps=1), task.layout, PartSpec("none"), most_bytes=10**8, seed=0
    )
    recorder.data(digits().train, digits().test, digits().classes)
    recorder.model(0, task.init(Key(0)), 0.1)
    recorder.message(Recorded(0, 0, 1, uniform(Key(1), (650,)).numpy().tobytes(), 1, 1, [1]))
    recorder.message(Recorded(0, 1, 1, b"short", 1, 1, [2]))
    recorder.close()
    table = table_of(folder, attacks=[{"name": "prior", "target": {"kind": "messages", "round": 0, "count": 1}}])
    run = run_study(resolve(table), tmp_path / "out", workers=0)
    (record,) = run.trainings.values()
    assert [(one.round, one.client) for one in record.dropped] == [(0, 1)]
    strict = run_study(resolve({**table, "strict": True}), tmp_path / "strict", workers=0)
    assert "the study is strict" in next(iter(strict.failures.values())).message


def test_without_a_seed_nobody_has_the_shared_keys(tmp_path):
    task, wires = prepare_task("linear"), {}
    leakgauge.inspect(
        "linear", "digits", folder=tmp_path / "own", defense="random-mask", victims=1, attacks=["prior"], **QUIET
    )
    (sent,) = read(tmp_path / "own/recording").messages(0)
    for seed in (None, 0):
        folder = tmp_path / str(seed)
        facts, mask = Facts(1, 1, "gradient", steps=1), PartSpec("random-mask")
        recorder = Recorder(folder, facts, task.layout, mask, most_bytes=10**8, seed=seed)
        recorder.data(digits().train, digits().test, digits().classes)
        recorder.model(0, task.init(Key(0)), 0.1)
        recorder.message(sent)
        table = table_of(folder, defenses=[{"name": "random-mask"}])
        table["attacks"][0]["target"]["count"] = 1
        study = resolve(table)
        assert not run_study(study, tmp_path / f"out{seed}", workers=0).failures
        federation = StoredTraining.of(study.trainings[0], RunContext(tmp_path / f"out{seed}", Path())).federation
        wires[seed] = federation.training.messages[0][0].shared
    assert wires[None] is None
    assert wires[0] == client_key(Key(0).child("training"), 0, 0).child("shared")


def test_what_an_adversary_cannot_see_is_attacked_by_probes_and_membership_needs_no_limit(tmp_path):
    how = {"victims": 2, "threats": ["aggregator"], "progress": False}
    run = leakgauge.inspect("linear", "digits", folder=tmp_path / "a", attacks=["prior"], limit=False, **how)
    assert run.cells[0].target.kind == "probe"
    assert run.study["notes"][0].startswith("aggregator sees only sums of messages: probes were attacked")
    how = {"victims": 8, "attacks": ["membership-loss"], "progress": False}
    members = leakgauge.inspect("linear", "digits", folder=tmp_path / "b", **how)
    assert members.results[members.cells[0].id].estimate("auc").n == 16

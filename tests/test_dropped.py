"""A client whose update is not finite, or whose message is refused, is dropped for the round and named."""

import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch

from leakgauge.defenses.cepam_clip import CepamClip
from leakgauge.defenses.dp_fedavg import DPFedAvg
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.none import NoDefense
from leakgauge.defenses.ota import OTA
from leakgauge.defenses.ota_orthogonal import OTAOrthogonal
from leakgauge.defenses.sdq import SDQ
from leakgauge.defenses.top_k import TopK
from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.claim import EVERY_ROUND, Violation
from leakgauge.harness.core.codec import pack_float64
from leakgauge.harness.core.contract import Sender
from leakgauge.harness.core.rng import Key, normal
from leakgauge.harness.federation.loop import Keep, train
from leakgauge.harness.federation.round import Client, Round
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.store import Store
from tests.doubles import Counting, random_examples, small_task
from tests.fuzz import SETTING
from tests.terminal_text import plain
from tests.test_run import ECHO, study

TASK = small_task()
CLIENTS = {k: random_examples(10 + 3 * k, seed=k) for k in range(5)}
TEST = random_examples(40, seed=99)
EVERY = frozenset(range(3))


@dataclass(frozen=True)
class Garbled(Counting):
    """Counting, with messages cut off: `faults` lists them as round:client."""

    faults: str = ""

    def encode(self, state, memory, update, link, private):
        wire, memory = super().encode(state, memory, update, link, private)
        return (wire[:-1] if f"{state}:{link.sender.number}" in self.faults.split(",") else wire), memory


@dataclass
class Bounded:
    """A record with a number of the same name as the study's option."""

    strict: float


def broken_waveform(kind):
    """A defense over the air, whose client 2 sends what is no waveform."""

    class Broken(kind):
        def encode(self, state, memory, update, link, private):
            wire, memory = super().encode(state, memory, update, link, private)
            return (pack_float64(torch.full((len(update),), math.nan)) if link.sender.number == 2 else wire), memory

    return Broken()


def poisoned(*numbers):
    """The clients, of whom these have a record that is not finite."""
    bad = {k: CLIENTS[k]._replace(x=CLIENTS[k].x.clone().index_fill(0, torch.tensor([1]), math.nan)) for k in numbers}
    return CLIENTS | bad


def go(defense=None, data=CLIENTS, strict=False, **changes):
    spec = FederationSpec(**{"clients": 5, "rounds": 3, "batch": 0, "lr": 0.5, **changes})
    keep = Keep(EVERY, EVERY)
    key, defense = Key(0), defense or NoDefense()
    return train(TASK, spec, defense, data, TEST, key, engine="loop", keep=keep, strict=strict)


def numbers_of(messages):
    return [sender.number for message in messages for sender in (message.sender, *message.others)]


def test_a_client_that_diverges_is_dropped_and_the_others_are_averaged_by_their_weights():
    training = go(data=poisoned(2))
    assert [(one.round, one.client) for one in training.dropped] == [(number, 2) for number in range(3)]
    assert all(one.reason.startswith("expected a finite update, got nan at coordinate") for one in training.dropped)
    assert [numbers_of(training.messages[number]) for number in range(3)] == [[0, 1, 3, 4]] * 3
    assert all(2 not in training.truth[number] for number in range(3))
    assert training.violations[EVERY_ROUND] == Violation(1, 5, "client", covered=True)
    start, sent = training.models[1], training.messages[1]
    here = Round(NoDefense(), training.setting, None)
    mean = sum(one.sender.samples * here.read(one).double() for one in sent)
    mean /= sum(one.sender.samples for one in sent)
    torch.testing.assert_close(training.models[2], (start + mean).float(), rtol=1e-6, atol=1e-7)


def test_a_refused_message_drops_its_client_for_the_round_only():
    training = go(Garbled(faults="1:0,1:3"))
    assert [one[:2] for one in map(dataclasses.astuple, training.dropped)] == [(1, 0), (1, 3)]
    assert all(one.reason.startswith("expected a message of ") for one in training.dropped)
    assert [numbers_of(training.messages[number]) for number in range(3)] == [[*range(5)], [1, 2, 4], [*range(5)]]
    # the memory of a dropped client is that before the round
    assert [message.wire[1] for message in training.messages[2]] == [101, 102, 102, 101, 102]
    whole = go(Counting())
    assert torch.equal(training.models[1], whole.models[1])
    assert not torch.equal(training.models[2], whole.models[2])


def test_a_training_without_a_fault_drops_nobody_and_changes_no_bit():
    one, other = go(Counting()), go(Garbled(faults="7:0"))
    assert one.dropped == other.dropped == []
    assert torch.equal(one.final, other.final)
    assert one.messages == other.messages
    assert one.snr_db == other.snr_db


def test_a_round_without_a_message_that_counts_leaves_the_model_as_it_is():
    training = go(Garbled(faults=",".join(f"1:{k}" for k in range(5))))
    assert torch.equal(training.models[2], training.models[1])
    assert not torch.equal(training.final, training.models[2])
    assert len(training.dropped) == 5
    assert training.messages[1] == ()
    assert training.message_bytes[1] == 0.0
    assert training.snr_db[1] is None


def test_a_training_in_which_no_message_ever_counts_is_refused():
    faults = ",".join(f"{number}:{k}" for number in range(3) for k in range(5))
    with pytest.raises(ValueError, match="no message counted in any round: round 0, client 0: expected a message of"):
        go(Garbled(faults=faults))


@pytest.mark.parametrize("strict", [False, True])
def test_a_round_in_which_all_clients_diverge_is_a_diverged_training(strict):
    expected = r"round 0, client 0: expected a finite update, got nan .*; training diverged, no update of this round"
    with pytest.raises(ValueError, match=expected):
        go(data=poisoned(*CLIENTS), strict=strict)


def test_a_strict_training_fails_with_round_client_and_reason():
    with pytest.raises(
        ValueError, match=r"round 0, client 2: expected a finite update, got nan .*; the study is strict"
    ):
        go(data=poisoned(2), strict=True)
    with pytest.raises(
        ValueError, match=r"round 1, client 3: expected a message of .* bytes .*, got .*; the study is strict"
    ):
        go(Garbled(faults="1:3"), strict=True)
    assert torch.equal(go(strict=True).final, go().final)


@pytest.mark.parametrize("defense", [NoDefense(), TopK(fraction=0.2, feedback=True), Gaussian(), DPFedAvg()])
def test_a_client_that_always_diverges_might_as_well_not_be_there(defense):
    training = go(defense, data=poisoned(2))
    fine = go(defense, data={k: data for k, data in CLIENTS.items() if k != 2}, clients=4)
    if not isinstance(defense, DPFedAvg):
        assert torch.equal(training.final, fine.final)
        assert training.messages == fine.messages
        assert training.snr_db == fine.snr_db
        return
    # it divides by the public number of participants, which is broken
    moved, expected = (run.models[1] - run.models[0] for run in (training, fine))
    torch.testing.assert_close(5 * moved, 4 * expected, rtol=1e-4, atol=1e-6)
    assert training.violations["the number of participants is fixed beforehand and public"] == Violation(3, 3, "round")


def sending(defense, updates, setting=SETTING):
    """One round with these updates: the round and its clients."""
    here = Round(defense, setting, defense.init(setting))
    each = enumerate(updates)
    return here, [Client.of(Sender(k, 8), u, defense.remember(setting), Key(1).child(k)) for k, u in each]


UPDATES = list(0.01 * normal(Key(3), (4, SETTING.dim)))
CHANNEL, SERVER = Key(4), Key(5)


def test_over_the_air_a_client_that_diverged_sends_its_noise_alone():
    bad = [*UPDATES[:2], torch.full_like(UPDATES[2], math.inf), UPDATES[3]]
    here, clients = sending(OTA(), bad)
    found = here.collect(clients, CHANNEL, SERVER)
    assert list(found.dropped) == [2]
    assert [sender.number for sender in found.links.senders] == [0, 1, 3]
    silent = here.exchange([*clients[:2], clients[3], clients[2]._replace(update=torch.zeros(SETTING.dim))], CHANNEL)
    assert found.exchange.received == silent.received
    # the mean of three, with the noise of four
    (heard,) = silent.received
    total = here.estimate(heard, clients[0].sender, None)
    torch.testing.assert_close(found.mean, total / 3)
    training = go(OTA(), data=poisoned(2))
    assert [one.client for one in training.dropped] == [2, 2, 2]
    assert numbers_of(training.messages[1]) == [0, 1, 3, 4]
    assert OTA.relies not in training.violations


@pytest.mark.parametrize("kind", [OTA, OTAOrthogonal])
def test_a_waveform_that_is_not_finite_drops_its_client(kind):
    defense = broken_waveform(kind)
    here, clients = sending(defense, UPDATES)
    found = here.collect(clients, CHANNEL, SERVER)
    assert found.dropped == {2: "expected a finite message, got 150 non-finite entries"}
    here, others = sending(kind(), UPDATES)
    without = here.collect([*others[:2], others[3]], CHANNEL, SERVER)
    assert torch.equal(found.mean, without.mean)
    assert found.exchange.received == without.exchange.received
    # its noise is missing from the sum: the proof does not cover this
    broken = go(defense).violations
    assert broken.get(OTA.relies) == (Violation(3, 3, "round") if kind is OTA else None)


def test_a_sum_that_is_at_fault_as_a_whole_drops_all_clients():
    class Loud(OTA):
        def encode(self, state, memory, update, link, private):
            return pack_float64(torch.full((len(update),), 1.2e308, dtype=torch.float64)), memory

        def estimate(self, state, received, link):
            return 0 * super().estimate(state, received, link).nan_to_num()

    here, clients = sending(Loud(fading="equal"), UPDATES)
    found = here.collect(clients, CHANNEL, SERVER)
    assert found.dropped == dict.fromkeys(range(4), "expected a finite message, got 150 non-finite entries")
    assert found.mean is None
    assert found.exchange.sent == []


def test_a_message_beyond_the_public_bound_does_not_reach_the_mean():
    class Unclipped(DPFedAvg):
        def bounded(self, update):
            return update

    here, clients = sending(Unclipped(noise_std=1e-6), [*UPDATES[:3], 1e30 * UPDATES[3]])
    found = here.collect(clients, CHANNEL, SERVER)
    assert list(found.dropped) == [3]
    assert "expected an update of norm 1 or less, the public bound, got " in found.dropped[3]
    torch.testing.assert_close(found.mean, sum(UPDATES[:3]) / 4, atol=1e-5, rtol=0)


def test_a_finite_update_that_overflows_in_its_message_is_dropped():
    here, clients = sending(
        SDQ(), [*UPDATES[:3], torch.full((SETTING.dim,), 3e38) * torch.tensor([1.0, -1.0]).repeat(75)]
    )
    found = here.collect(clients, CHANNEL, SERVER)
    assert list(found.dropped) == [3]
    assert torch.isfinite(found.mean).all()


def test_a_claim_that_relies_on_the_others_counts_the_rounds_in_which_one_is_missing():
    data = {k: random_examples(10, seed=k) for k in range(5)}
    assert go(CepamClip(), data).violations[CepamClip.relies] == Violation(0, 3, "round")
    data[2].x[0] = math.nan
    assert go(CepamClip(), data).violations[CepamClip.relies] == Violation(3, 3, "round")


def test_a_stored_training_keeps_what_was_dropped(tmp_path):
    faults = ",".join(["0:1", *(f"1:{k}" for k in range(4))])
    small = study(
        limit=False,
        defenses=[{"name": "tests.test_dropped:Garbled", "faults": faults}],
        attacks=[{"name": ECHO, "target": {"kind": "messages", "round": 0, "count": count}} for count in (3, 4)]
        + [{"name": ECHO, "target": {"kind": "messages", "round": 1, "count": 1}}],
    )
    run = run_study(small, tmp_path, workers=0)
    (record,) = run.trainings.values()
    assert Store(tmp_path).read_training(record.spec.id) == record
    assert [(one.round, one.client) for one in record.dropped] == [(0, 1), *((1, k) for k in range(4))]
    (flag,) = (flag for flag in record.flags if flag.code == "dropped-clients")
    start = "5 updates of 4 clients were dropped, the first of client 1 in round 0: expected a message of "
    assert flag.message.startswith(start)
    assert "5 dropped" in plain(run)
    assert len(run.results) == 1
    kept = sorted(failure.message for failure in run.failures.values())
    assert [message[:40] for message in kept] == [
        "expected at most 3 messages in round 0, ",
        "no message of round 1 reached the receiv",
    ]


def test_a_strict_study_fails_its_cells_with_round_client_and_reason(tmp_path):
    run = run_study(
        study(defenses=[{"name": "tests.test_dropped:Garbled", "faults": "1:2"}], strict=True), tmp_path, workers=0
    )
    assert not run.trainings
    assert len(run.failures) == 3
    for failure in run.failures.values():
        assert "round 1, client 2: expected a message of " in failure.message
        assert "the study is strict" in failure.message

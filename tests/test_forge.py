"""A participant that sends bytes of its own choice: what the server accepts, and what this changes for the others."""

from functools import partial

import pytest
import torch

from leakgauge.harness.core.contract import Link
from leakgauge.harness.core.rng import Key, normal
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.forge import forged
from leakgauge.harness.federation.loop import replay_state
from leakgauge.harness.federation.round import Client, Round
from tests.by_rows import by_rows
from tests.test_defenses import SENDERS, SETTING, UPDATE, every_defense
from tests.test_model_replacement import rates

STATE_OF = partial(replay_state, setting=SETTING, feedback=[])
KEY = Key(5)


def a_round(name, parameters=None):
    defense = registry.build("defense", name, parameters or {})
    return Round(defense, SETTING, STATE_OF(defense))


def client(round_, number, update, own=b""):
    key = KEY.child("client", number)
    return Client.of(SENDERS[number], update, round_.defense.remember(SETTING), key)._replace(own=own)


def distance(round_, sent, update):
    """From the update to what the server accepts of a client's message; the others send zeros."""
    exchange = round_.among_silent([sent], sent.private)
    return float((round_.accept(exchange.received[0], exchange.links.each()[0]) - update).norm())


@pytest.mark.matrix
@every_defense
def test_the_server_accepts_a_chosen_message_which_is_no_further_from_the_aim(defense):
    round_ = a_round(defense)
    for size in (1.0, 30.0):
        honest = client(round_, 3, size * UPDATE)
        own = honest._replace(own=forged(round_, honest, STATE_OF))
        assert own.own
        assert distance(round_, own, honest.update) <= distance(round_, honest, honest.update)
        assert not round_.collect([own], KEY, KEY).dropped


@pytest.mark.matrix
@every_defense
def test_a_chosen_message_moves_the_mean_by_what_the_participant_can_subtract_whatever_the_others_send(defense):
    """So an epsilon against participants holds for chosen messages: they see the same mean, shifted as they know."""
    round_, means = a_round(defense), {}
    aim = client(round_, 3, 30 * UPDATE)
    for others in (1, 2):
        for own in (b"", forged(round_, aim, STATE_OF)):
            updates = [normal(Key(others, (k,)), UPDATE.shape) for k in range(3)]
            honest = [client(round_, k, update) for k, update in enumerate(updates)]
            collected = round_.collect([*honest, aim._replace(own=own)], KEY.child("channel"), KEY.child("server"))
            assert not collected.dropped
            means[others, bool(own)] = collected.mean.double()
    shift, same = (means[k, True] - means[k, False] for k in (1, 2))
    assert (shift - same).abs().max() <= 1e-5 * max(mean.abs().max() for mean in means.values())
    assert (means[1, True] - means[2, True]).abs().max() > 0


@by_rows(
    ("gaussian", {"noise_std": 0.01}, 1.3),
    ("laplace", {}, 1e3),
    ("t-noise", {}, 1e3),
    ("gaussian", {"noise_std": 1e-6}, 1.0),
    ("dp-fedavg", {}, 1.0),
)
def test_a_chosen_message_carries_no_noise_and_uses_the_room_that_the_bound_leaves_for_noise(name, parameters, most):
    """The norm is the aim's, or nearly what the server accepts; a search in steps of 1.2 may stop short of it."""
    round_ = a_round(name, parameters)
    honest = client(round_, 3, UPDATE * (100 / UPDATE.norm()))
    own = honest._replace(own=forged(round_, honest, STATE_OF))
    sent = round_.estimate(own.own, own.sender, own.shared)
    longest = round_.defense.longest(round_.state, Link(SETTING, own.sender, None))
    assert float(torch.cosine_similarity(sent, honest.update, dim=0)) > 0.999
    assert min(100.0, most, longest) / 1.25 < float(sent.norm()) <= min(100.001, 1.001 * longest)


def test_an_update_that_no_server_accepts_is_not_forged():
    round_ = a_round("gaussian")
    assert forged(round_, client(round_, 0, UPDATE * torch.inf), STATE_OF) == b""


def test_bytes_of_its_own_bring_a_participant_through_noise_that_stops_its_update(tmp_path):
    noise = {"name": "t-noise", "s2": 0.1, "nu": 5.0}
    honest, own = (rates(tmp_path / str(forges), noise, forges=forges)["t-noise"]["auc"] for forges in (False, True))
    assert honest.value < 0.6
    assert own.low > 0.7

"""Memories of clients: made when a client first takes part, and beyond a bound in a file, bit for bit."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leakgauge.defenses.sqsgd import SqSGD
from leakgauge.defenses.top_k import TopK
from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.rng import Key, normal
from leakgauge.harness.federation import loop
from leakgauge.harness.federation.loop import Keep, Memories, train
from leakgauge.harness.learn.partition import Holdings
from tests.doubles import Counting, random_examples, small_task

ROOT = Path(__file__).parents[1]
DATA = random_examples(400)
SPEC = FederationSpec(clients=200, participants=3, rounds=6, local_steps=1, batch=2)
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


def go(defense):
    clients = Holdings(DATA, {k: torch.arange(2 * k, 2 * k + 2).numpy() for k in range(200)})
    keep = Keep(frozenset(range(6)), frozenset(range(6)))
    return train(small_task(), SPEC, defense, clients, DATA, Key(0), engine="dense", keep=keep)


@st.composite
def memories_of_clients(draw):
    """Clients in the order in which they take part, each with its next memory."""
    shape = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    made = st.builds(lambda n, s, t: normal(Key(n), s).mul(9).to(t), st.integers(0, 99), shape, st.sampled_from(TYPES))
    return draw(st.lists(st.tuples(st.integers(0, 5), made | st.integers(0, 9)), max_size=30))


@settings(derandomize=True, deadline=None)
@given(memories_of_clients(), st.sampled_from([0, 40, 10**6]))
def test_every_client_finds_what_was_kept_last(kept, resident):
    held, wanted = Memories(lambda: "first", resident), {}
    for client, memory in kept:
        held.keep(client, memory)
        wanted[client] = memory
    for client in range(7):
        found, right = held.of(client), wanted.get(client, "first")
        assert type(found) is type(right)
        if isinstance(right, torch.Tensor):
            assert (found.dtype, found.shape) == (right.dtype, right.shape)
            assert torch.equal(found, right)
        else:
            assert found == right


def test_a_view_does_not_hold_the_tensor_that_it_is_a_part_of():
    held, whole = Memories(lambda: None), torch.arange(1000.0)
    held.keep(0, whole[:3])
    assert torch.equal(held.of(0), whole[:3])
    assert held.of(0).untyped_storage().nbytes() == 12


@pytest.mark.parametrize("defense", [TopK(fraction=0.05, feedback=True), SqSGD()], ids=["top-k", "sqsgd"])
def test_a_training_with_memories_on_the_disk_gives_the_same_bytes(defense, monkeypatch):
    here = go(defense)
    monkeypatch.setattr(loop, "RESIDENT", 0)
    there = go(defense)
    assert there.messages == here.messages
    assert torch.equal(there.final, here.final)


def test_a_client_that_never_takes_part_has_no_memory(monkeypatch):
    made = []

    class Counted(Counting):
        def remember(self, setting):
            made.append(setting)
            return super().remember(setting)

    training = go(Counted())
    some = {message.sender.number for sent in training.messages.values() for message in sent}
    assert 10 < len(some) <= 18
    assert len(made) == len(some) + 1  # and one for the check that messages repeat


@pytest.mark.slow
def test_ten_thousand_clients_with_residuals_take_less_than_1_2_gb():
    command = [sys.executable, "benchmarks/round.py", "--clients", "10000", "--rounds", "120"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

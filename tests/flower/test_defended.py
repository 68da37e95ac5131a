"""A defense on the wire of a Flower app does what it does in our own loop, bit for bit."""

import dataclasses
import time

import pytest
import torch
from flwr.app import ConfigRecord, MetricRecord

from leakgauge.flower import Facts, defend, defended, tap
from leakgauge.harness.core.rng import Key
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import Keep, train
from leakgauge.harness.federation.recording import read
from leakgauge.harness.learn.batch import choose_engine
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import resolve
from tests.flower.simulated import DEFENSES, SEED, SPECS, InOrder, app_of, as_record, as_vector, simulate, world

EVERY = frozenset(range(2))
ROWS = [(name, spec) for name in DEFENSES for spec in SPECS if (name, spec) != ("udp-crd", "batches")]


def in_turn(message, context, call_next):
    """The mod of the defense that the configuration names."""
    name = message.content["config"]["defense"]
    built = registry.build("defense", name, DEFENSES[name])
    return defended(name, DEFENSES[name], local=built.local, seed=SEED)(message, context, call_next)


def facts_of(spec):
    return Facts(spec.clients, spec.clients, "update", steps=spec.local_steps, batch=spec.batch, lr=spec.lr)


def ours(name, spec):
    """Our own loop."""
    task, clients, loaded, _ = world(spec)
    defense = registry.build("defense", name, DEFENSES[name])
    key, keep = Key(SEED).child("training"), Keep(EVERY, EVERY)
    return train(task, spec, defense, clients, loaded.test, key, engine=choose_engine(task), keep=keep)


@pytest.fixture(scope="module")
def flower(tmp_path_factory):
    """The final model, and the recording, of each defense in Flower, from one simulation."""
    folder, final = tmp_path_factory.mktemp("taps"), {}

    def main(grid):
        for name, which in ROWS:
            begun, spec = time.perf_counter(), SPECS[which]
            task, clients, loaded, rows = world(spec)

            def loss(server_round, arrays, task=task, loaded=loaded):
                params = as_vector(task, arrays)
                return MetricRecord(
                    {"loss": float(task.losses(params, *loaded.test).double().sum()) / len(loaded.test.y)}
                )

            sizes = [len(data.y) for data in clients.values()]
            facts = facts_of(spec)
            strategy = defend(InOrder(4), name, DEFENSES[name], facts=facts, sizes=sizes, seed=SEED)
            strategy = tap(strategy, folder / which / name, facts, rows=rows)
            start = as_record(task, task.init(Key(SEED).child("training", "init")))
            config = ConfigRecord({"defense": name, "spec": which})
            result = strategy.start(grid, start, num_rounds=2, train_config=config, evaluate_fn=loss)
            final[name, which] = as_vector(task, result.arrays)
            print(f"{name}, {which}: 2 rounds of 4 clients in {time.perf_counter() - begun:.1f} s")

    simulate(main, app_of([in_turn]), 4)
    return final, folder


@pytest.mark.parametrize(("name", "which"), ROWS)
def test_a_flower_app_sends_the_bytes_of_our_loop_and_ends_with_its_model(flower, name, which):
    final, folder = flower
    training, recording = ours(name, SPECS[which]), read(folder / which / name)
    assert recording.closed
    assert recording.models == tuple(training.models)
    for number in training.models:
        assert torch.equal(recording.model(number), training.models[number])
        sent = recording.messages(number)
        assert [one.client for one in sent] == [0, 1, 2, 3]
        if not registry.build("defense", name, DEFENSES[name]).superposes:  # else the messages arrive as one sum
            kept = training.messages[number]
            expected = [(one.sender.number, one.sender.samples, one.wire, one.images, one.steps) for one in kept]
            assert [tuple(one)[1:6] for one in sent] == expected
    assert torch.equal(final[name, which], training.final)


def results(table, folder):
    """What each attack of a study found."""
    run = run_study(resolve(table), folder, workers=0)
    assert not run.failures
    return [(result.cell.target, result.estimates, result.flags) for result in run.results.values()]


@pytest.mark.parametrize("name", ["none", "gaussian", "jopeq", "ota", "top-k"])
def test_attacks_find_in_a_recording_what_they_find_in_our_training(flower, tmp_path, name):
    spec = SPECS["whole"]
    superposes = registry.build("defense", name, {}).superposes
    targets = [{"kind": "probe", "round": 1, "count": 2}]
    targets.append({"kind": "messages", "round": 1, "count": 1 if superposes else 2})
    federation = {key: value for key, value in dataclasses.asdict(spec).items() if value is not None}
    table = {
        "name": "both",
        "lineup": False,
        "seeds": [SEED],
        "tasks": [{"data": "digits", "model": "mlp-small"}],
        "federations": [federation],
        "defenses": [{"name": name, **DEFENSES[name]}],
        "attacks": [{"name": "map", "evaluations": 12, "warm": 6, "target": target} for target in targets],
    }
    own = results(table, tmp_path / "ours")
    recorded = [{"data": f"recording:{flower[1] / 'whole' / name}?data=digits", "model": "mlp-small"}]
    there = results({**table, "tasks": recorded}, tmp_path / "recorded")
    assert own == there
    assert len(own) == len(targets)

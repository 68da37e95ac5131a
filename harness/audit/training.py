"""A small real training on digits, whose messages an audit reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leakgauge.harness import data
from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.contract import Defense, Examples, Setting
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.rng import Key
from leakgauge.harness.federation.loop import Keep, make_plan, make_setting, train
from leakgauge.harness.federation.round import client_key
from leakgauge.harness.federation.small import Federation
from leakgauge.harness.learn.batch import Work, choose_engine, train_clients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.partition import partition
from leakgauge.harness.learn.tasks import ModelTask

DIGITS_DIM = 650
"""Parameters of a softmax regression on digits."""


@dataclass(frozen=True, eq=False)
class DigitsTraining:
    """A softmax regression on digits, trained with the defense; every client has equally many samples."""

    defense: Defense[Any, Any]
    task: ModelTask
    spec: FederationSpec
    clients: dict[int, Examples]
    test: Examples
    setting: Setting
    key: Key

    @classmethod
    def of(cls, federation: Federation, key: Key) -> DigitsTraining:
        """A training with the federation's clients, samples, steps, batch and learning rate."""
        public, digits = federation.setting, data.load("digits", Path())
        samples, available = public.clients * public.samples, len(digits.train.y)
        if samples > available:
            raise StudyError("audit", [f"setting.samples: got {samples} of all clients, expected at most {available}"])
        task = ModelTask(build("linear", digits.input_shape, len(digits.classes)))
        spec = FederationSpec(
            clients=public.clients,
            rounds=public.rounds,
            algorithm="fedsgd" if public.sends == "gradient" else "fedavg",
            samples=samples,
            local_steps=public.steps,
            batch=public.batch,
            lr=public.lr,
            evaluate_every=public.rounds,
        )
        parts = partition(spec, digits.train.y, key.child("partition"))
        clients = {k: Examples(digits.train.x[part], digits.train.y[part]) for k, part in enumerate(parts)}
        setting = make_setting(task, spec, clients, federation.defense.local)
        return cls(federation.defense, task, spec, clients, digits.test, setting, key.child("training"))

    def run(self, device: str = "cpu") -> tuple[Tensor, Federation]:
        """[T, clients, d] the updates before the defense, trained again from each round's model, and the federation.

        Args:
            device: where the clients train.
        """
        engine, defense = choose_engine(self.task, device), self.defense
        keep = Keep(models=frozenset(range(self.spec.rounds)))
        placed = {number: own.on(device) for number, own in self.clients.items()}
        asked = (self.task, self.spec, defense, self.clients, self.test, self.key)
        run = train(*asked, engine=engine, keep=keep, device=device)
        updates, history = [], [defense.init(self.setting)]
        for number, lr in enumerate(run.learning_rates):
            plan = make_plan(self.spec, lr, defense.local, defense.step_noise(self.setting))
            work = [Work(own, client_key(self.key, number, k).child("train")) for k, own in placed.items()]
            params = run.models[number].to(device)
            updates.append(train_clients(self.task, params, work, plan, engine).updates.cpu())
            history.append(defense.advance(history[-1], run.feedback[number]))
        return torch.stack(updates), Federation(defense, self.setting, tuple(history[:-1]))

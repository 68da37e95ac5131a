"""MAP on updates of five local steps: one batch of one and of four images behind `lenet5`, trained and fresh.

CIFAR-10 test images that were not used for any choice, no defense, labels inferred. Prints mean SSIM with its 95 %
interval (too narrow for images of one batch) and processor seconds per image. `followed`: the attack unrolls the steps,
which is the default; `one step`: the attack treats the update as one long step. Needs `cifar10` (see README); a part of
it suffices.

    python benchmarks/fedavg.py [FOLDER] [--images 16]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from _victims import Victims, opened
from peer import TRAINING, fresh
from torch import Tensor

from leakgauge.attacks.map import MAP
from leakgauge.attacks.prior import Prior
from leakgauge.defenses.none import NoDefense
from leakgauge.harness.core.contract import Attack, Defense, Examples, Message, Observation, Sender, Setting, Snapshot
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import View
from leakgauge.harness.federation.round import Client, Round
from leakgauge.harness.learn.batch import LocalPlan, Work, train_clients
from leakgauge.harness.learn.prior import gaussian_prior
from leakgauge.harness.study.score import score_reconstruction

FIRST = 300
STEPS, RATE = 5, 0.02


PLAN = LocalPlan(gradient=False, steps=STEPS, epochs=None, batch=0, lr=RATE, momentum=0.0)


def messages(
    victims: Victims, batch: int, auxiliary: Examples, plan: LocalPlan, defense: Defense[Any, Any]
) -> Observation:
    """The server's observation of clients with `batch` images each: updates after steps on all images, or gradients."""
    task, n, steps = victims.task, len(victims.y) // batch, plan.steps or 1
    pairs = zip(victims.x.split(batch), victims.y.split(batch), strict=True)
    work = [Work(Examples(*pair), Key(8).child(number)) for number, pair in enumerate(pairs)]
    sent = train_clients(task, victims.params, work, plan, "loop").updates
    sends = "gradient" if plan.gradient else "update"
    setting = Setting(task.layout, n, n, 1, sends=sends, steps=steps, lr=plan.lr, batch=batch, samples=batch)
    state, found = defense.init(setting), []
    for number, update in enumerate(sent):
        client = Client.of(Sender(number, batch), update, defense.remember(setting), Key(6).child(number))
        (wire,) = Round(defense, setting, state).exchange([client], Key(6).child(number, "channel")).sent
        found.append(Message(0, client.sender, wire, client.shared, batch, steps))
    model, view = Snapshot(0, victims.params, state), View.parse("server")
    return Observation(view, setting, task, defense, plan.lr, messages=tuple(found), model=model, auxiliary=auxiliary)


def quality(attack: Attack, seen: Observation, x: Tensor, y: Tensor, batch: int) -> str:
    """Mean SSIM, its interval, and processor seconds per image."""
    start = time.process_time()
    guesses = attack.run(seen, Key(7)).guesses
    seconds = (time.process_time() - start) / len(y)
    (ssim, *_), _ = score_reconstruction(x.split(batch), y.split(batch), guesses)
    ends = "one batch" if ssim.low is None else f"[{ssim.low:.3f}, {ssim.high:.3f}]"
    return f"{ssim.value:.3f} {ends}, {seconds:.2f} s"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    _, data, x, y, auxiliary = opened(parser, FIRST)
    gaussian_prior(auxiliary.x, MAP().box)  # cached, so that no attack's time includes it
    start = fresh("lenet5", x, y)
    trained = train_clients(start.task, start.params, [Work(data.train, Key(4))], TRAINING, "loop").updates[0]
    attacks: dict[str, Attack] = {"floor": Prior(), "followed": MAP(), "one step": MAP(unroll=False)}
    for name, victims in (("trained", start._replace(params=start.params + trained)), ("fresh", start)):
        for batch in (1, 4):
            seen = messages(victims, batch, auxiliary, PLAN, NoDefense())
            for who, attack in attacks.items():
                print(f"{name:<8} batch {batch}  {who:<9} {quality(attack, seen, x, y, batch)}", flush=True)


if __name__ == "__main__":
    main()

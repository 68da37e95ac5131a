"""Model replacement: a participant sends an update that makes the next model one whose gradients name candidates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakgauge.attacks._members.neurons import fired, firing_for_candidates
from leakgauge.attacks._members.scores import finite
from leakgauge.attacks._members.traffic import weight_of
from leakgauge.harness.core.contract import Attack, Membership, Message, Observation, Sender
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector


@dataclass(frozen=True)
class ModelReplacement(Attack):
    """Makes the next model one that fires only for candidates, and reads the mean of all clients' updates of it.

    In the round before the attacked one, the participant sends the difference between its own model and the present
    one, times the number of clients, less what the others send, as far as its own honest update tells: so the mean
    moves the model about there. The next change of the model then is the
    mean update of clients who trained it, in which the gradient of a candidate stands out. The score is the log
    likelihood ratio that the record is in this mean. Nobody needs to see a message.

    Behind a clip or noise of the clients, the honest encoder holds such an update back. With `forges`, the participant
    encodes with parameters of its own: less noise, another clip, a longer update. Of these messages it sends the one
    that the server accepts and decodes to the nearest vector (`federation.forge`). Its own noise is then no obstacle,
    and a bound that leaves room for noise leaves it to the participant; what the decoder adds or cuts remains.

    Args:
        forges: sends the best message of the search, not what the defense encodes of the update.

    Must know: the models of the attacked round and of the next one, or the final model after the last round; the
    candidates with their labels; auxiliary data of the same kind. It chooses what its client sends (grant `craft`).

    Cannot: move the model there if the server refuses long updates, decodes to a bounded vector or makes large errors
    in proportion to length, as quantizers of few bits do; the score is then at chance, and so it is where the noise of
    the others hides their gradients. Codes that no encoder makes are not tried. Clients with different numbers of
    samples count as if all had the same number. The owner of a record stays unknown, and models without a dense ReLU
    layer before another dense layer are refused.

    Raises:
        ValueError: in `broadcast`: the model has no such layers, its loss is not softmax cross-entropy, or there are
            fewer than two auxiliary inputs; in `run`: the model after the attacked round was not kept.

    Source: the replacement of Bagdasaryan et al. 2020, "How to backdoor federated learning", sec. 4.2, with the neurons
        of `active-membership` (Nguyen et al. 2023) in the model. The combination and the search of bytes are ours.
    """

    forges: bool = False

    kind: ClassVar[str] = "membership"
    needs: ClassVar[frozenset[str]] = frozenset({"models", "final", "candidates", "auxiliary", "craft"})

    def broadcast(self, seen: Observation, key: Key) -> Vector:
        """The model that the participant wants."""
        return firing_for_candidates(seen, "model-replacement", key, steady=True)

    def run(self, seen: Observation, key: Key) -> Membership:
        """One score per candidate; nothing is drawn."""
        assert seen.model is not None
        assert seen.models is not None
        setting, start = seen.setting, seen.model
        kept, last = {model.round: model.params for model in seen.models}, start.round + 1 == setting.rounds
        after = kept.get(start.round + 1, seen.final if last else None)
        if after is None:
            raise ValueError(
                f"expected the model after round {start.round}, which was not kept: give target.rounds >= 2, or attack "
                f"the last round, {setting.rounds - 1}"
            )
        gradient, users, client = setting.sends == "gradient", setting.participants, Sender(0, setting.samples)
        own = min(setting.batch or setting.samples, setting.samples) if gradient else setting.samples
        mean = Message(start.round, client, b"", None, users * own, setting.steps, (client,) * (users - 1))
        moved = (start.params - after) / (seen.lr * (1 if gradient else setting.steps))
        shown = moved[None], [weight_of(setting, mean)], [mean.images]
        return Membership(finite(fired(seen, start.params, *shown, "model-replacement")[0]))

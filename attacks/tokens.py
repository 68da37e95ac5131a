"""Reads the text behind a message: its words, their order, and whole texts, with or without a defense."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leakgauge.attacks._engine.labels import restore
from leakgauge.attacks._engine.objective import received_gradients
from leakgauge.attacks._engine.reconstruct import failed, unusable
from leakgauge.attacks._text.chances import Chances
from leakgauge.attacks._text.channel import Channel
from leakgauge.attacks._text.network import Network
from leakgauge.attacks._text.search import Found, search
from leakgauge.attacks._text.spans import Exact
from leakgauge.harness.core.contract import Attack, Guess, Observation, Reconstruction
from leakgauge.harness.core.errors import NoLikelihood
from leakgauge.harness.core.form import Tokens as Form
from leakgauge.harness.core.rng import Key, normal
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.tasks import ModelTask

# nats a token that messages must tell; below, a search finds fewer words than the most frequent tokens are (measured:
# at 9 behind cepam-gaussian, not at 13 behind gaussian of epsilon 1,000)
_TOLD = 10.0
# sweeps by the defense's own likelihood for each of the attack's sweeps, and after how many of them the proposed tokens
# follow from the text so far
_JUDGED, _EACH = 1.5, 4
_LABELS = 20  # most classes that are tried out for a single text

_PRIOR = "frequencies of tokens and of pairs of neighbors in the auxiliary texts"


@dataclass(frozen=True)
class Tokens(Attack):
    """Reads texts from gradients of a network whose first layer is a table of words.

    If the defense leaves gradients as they are, words follow from the rows of that table that are not zero, and their
    places from equations or from the span of the layers' gradients. Behind a defense, messages of the adversary's own
    texts show how rows of absent and of present words look and how large errors are; a search then exchanges, swaps and
    shifts tokens for the likeliest text, by these errors first and by the defense's own likelihood in the end.

    Must know: one message of each victim, the model of its round, the defense with its parameters, and texts of the
    same kind; a server or an eavesdropper does. The likelihoods of several rounds add up.

    Cannot: read networks without an `nn.Embedding` that is called with the ids; tell the last token of a text from a
    span, if it is only predicted. An update of several steps counts as a gradient of their total length, except in the
    search. Labels that cannot be inferred are tried out, for single texts of few classes.

    Args:
        sweeps: sweeps of the search by fitted errors, each of about 500 texts; if the defense states a likelihood, half
            as many, and one and a half times as many by this likelihood; 0: no search.
        positions: a malicious server broadcasts random positions of this standard deviation, relative to the words'
            rows; each place then has slopes of its own, which show the order. About 10; 0: the honest model.

    Raises:
        ValueError: sweeps < 0, positions < 0 or not finite; in `broadcast`: the network has no trained positions.

    Source: the rows of embeddings: Melis et al. 2019, Gupta et al. 2022 (FILM); spans: Petrov et al. 2024 (DAGER).
        Likelihood ratios of rows, errors fitted through the defense, joint moves, the defense's likelihood
        and the positions of a malicious server are ours.
    """

    kind: ClassVar[str] = "reconstruction"
    aware: ClassVar[bool] = True
    forms: ClassVar[frozenset[str]] = frozenset({"tokens"})

    sweeps: int = 8
    positions: float = 0.0

    def __post_init__(self) -> None:
        if self.sweeps < 0 or not 0 <= self.positions < math.inf:
            got = f"sweeps={self.sweeps}, positions={self.positions}"
            raise ValueError(f"expected sweeps >= 0 and finite positions >= 0, got {got}")

    @property
    def needs(self) -> frozenset[str]:
        """Messages, the round's model, texts, and the choice of the model if it has other positions."""
        return frozenset({"messages", "models", "auxiliary"} | ({"broadcast"} if self.positions else set()))

    def broadcast(self, seen: Observation, key: Key) -> Vector:
        """The honest model with other positions."""
        task = seen.task
        if not isinstance(task, ModelTask) or not isinstance(task.form, Form):
            raise ValueError(f"expected texts of token ids, got inputs of the form {task.form.name}")
        assert seen.model is not None
        network = Network.of(task, seen.model.params)
        if network.places is None:
            raise ValueError("expected a network with trained positions, got one without; use positions = 0")
        tensors, (number, _) = [*task.layout.split(seen.model.params)], network.places
        size = self.positions * tensors[network.words].std() * network.scale
        tensors[number] = size * normal(key.child("positions"), tensors[number].shape)
        return torch.cat([tensor.flatten() for tensor in tensors])

    def at_once(self, dim: int) -> int:
        """A few victims, because each has a search of its own."""
        return 4

    def run(self, seen: Observation, key: Key) -> Reconstruction:
        """Ids and labels; the objective is minus the log likelihood and the log prior, or 0 for an exact solution."""
        task, rounds = seen.task, seen.observed_rounds
        if not isinstance(task, ModelTask) or not isinstance(task.form, Form):
            raise ValueError(f"expected texts of token ids, got inputs of the form {task.form.name}")
        assert seen.auxiliary is not None
        own, size, params = seen.auxiliary.x, task.form.vocabulary.size, rounds[0].model.params
        try:
            if not all(bool(observed.model.params.isfinite().all()) for observed in rounds):
                raise ValueError("the model is not finite")
            network = Network.of(task, params)
        except ValueError as error:
            return Reconstruction(tuple(failed(task, message, str(error)) for message in rounds[0].messages))
        guesses, known = list[Guess](), dict[int, tuple[Chances, list[Channel]]]()
        for victim, (message, estimate) in enumerate(
            zip(rounds[0].messages, received_gradients(seen, numbers=True), strict=True)
        ):
            if why := unusable(estimate):
                guesses.append(failed(task, message, why))
                continue
            single, texts = [o._replace(messages=(o.messages[victim],)) for o in rounds], message.images
            if texts not in known:
                chances = Chances.of(own, size, texts)
                keys = [key.child("own", texts, number) for number in range(len(rounds))]
                channels = [Channel(seen, o, network, chances, k) for o, k in zip(single, keys, strict=True)]
                known[texts] = chances, channels
            chances, channels = known[texts]
            each = [channel.of(o.messages[0]) for channel, o in zip(channels, single, strict=True)]
            own_key = key.child(message.sender.number)
            labels = (
                [seen.labels[victim]] if seen.labels is not None else _labels(seen, each[0], own_key.child("labels"))
            )
            guesses.append(self._guess(each, network, chances, labels, own_key))
        return Reconstruction(tuple(guesses), _PRIOR)

    def _guess(
        self, channels: list[Channel], network: Network, chances: Chances, labels: list[Tensor], key: Key
    ) -> Guess:
        """The guess for one victim, of whose labels there are one or several candidates [b]."""
        first = channels[0]
        b, t = first.observed.messages[0].images, first.seen.task.input_shape[0]
        estimate, x = first.estimate, None
        if first.exact:
            exact = Exact(network, first.observed.model.params, estimate, labels[0], t)
            x = exact.solve(chances, self.sweeps, key.child("spans"))
        # a search would move labels that are paired with other texts
        mixed = bool((labels[0] != labels[0][:1]).any())
        if x is not None and (mixed or first.explains(x, labels[0])):
            return Guess(x.float(), labels[0], 0.0, 0)
        words = torch.stack([channel.words() for channel in channels]).sum(0)
        start = _start(words + chances.first, b, t) if x is None else x
        if not self.sweeps or max(channel.told for channel in channels) < _TOLD * b * t:
            return Guess(start.float(), labels[0], 0.0, 0)

        def energy(x: Tensor, y: Tensor) -> Tensor:
            return torch.stack([channel.misfit(x, y) for channel in channels]).sum(0) - chances.of_texts(x)

        def judged(x: Tensor) -> Tensor:
            return torch.stack([channel.unlikelihood(x, y) for channel in channels]).sum(0) - chances.of_texts(x)

        y = min(labels, key=lambda y: float(energy(start[None], y)[0]))
        try:
            judge = judged if bool(judged(start[None]).isfinite()) else None
        except NoLikelihood:
            judge = None
        sweeps = self.sweeps if judge is None else math.ceil(self.sweeps / 2)
        found = search(lambda x: energy(x, y), chances, words, start, sweeps, key)
        if judge is not None:
            found = self._judged(found, channels, chances, words, y, lambda x: energy(x, y), judge, key.child("judged"))
        if not math.isfinite(found.energy):
            return failed(first.seen.task, first.observed.messages[0], "the likelihood of the texts is not finite")
        return Guess(found.x.float(), y, found.energy, found.evaluations)

    def _judged(
        self,
        found: Found,
        channels: list[Channel],
        chances: Chances,
        words: Tensor,
        y: Tensor,
        energy: Callable[[Tensor], Tensor],
        judge: Callable[[Tensor], Tensor],
        key: Key,
    ) -> Found:
        """A search from `found` by the defense's likelihood; for a single text, it tries what the text so far tells."""
        more = math.ceil(_JUDGED * self.sweeps)
        for turn in range(math.ceil(more / _EACH)):
            if len(found.x) == 1:
                words = torch.stack([channel.at_places(found.x, y) for channel in channels]).sum(0)
            before, sweeps = found.evaluations, min(_EACH, more - turn * _EACH)
            found = search(energy, chances, words, found.x, sweeps, key.child(turn), judge=judge)
            found = found._replace(evaluations=before + found.evaluations)
        return found


def _start(score: Tensor, b: int, t: int) -> Tensor:
    """[b, t] the likeliest tokens: different ones in each text, as far as they are likelier present than absent."""
    order = score.argsort(descending=True)
    likely = order[: max(t, min(b * t, int((score > 0).sum())))]
    rows = [torch.cat([likely[i::b], order])[:t] for i in range(b)]
    return torch.stack(rows)


def _labels(seen: Observation, channel: Channel, key: Key) -> list[Tensor]:
    """Candidates [b] of a victim's labels: the inferred ones, or all for a single text whose label cannot be."""
    task, texts = seen.task, channel.observed.messages[0].images
    if task.numbers or task.classes == 1 or seen.auxiliary is None or not bool(seen.auxiliary.y.any()):
        return [seen.auxiliary.y[:1].expand(texts)] if seen.auxiliary is not None else []
    try:
        params = channel.observed.model.params
        return [restore(task, params, channel.estimate[None], [texts], key, seen.auxiliary)[0]]
    except ValueError:
        few = torch.arange(min(task.classes, _LABELS))
        return list(few[:, None]) if texts == 1 else [few[:1].expand(texts)]

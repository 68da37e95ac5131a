"""The most probable image, given what was received and what is known of the defense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakgauge.attacks._engine.image_prior import ImagePrior
from leakgauge.attacks._engine.objective import Explains, Kind, received_gradients
from leakgauge.attacks._engine.reconstruct import Search, Start, match
from leakgauge.attacks._labels.infer import LabelSource, check_source, labels_over_rounds, needs
from leakgauge.harness.core.contract import Attack, Observation, Reconstruction
from leakgauge.harness.core.rng import Key

_DECREASE = 1e-5
"""Share of the objective that 200 evaluations must win: nearly all of it is noise, and single nats still count."""


@dataclass(frozen=True)
class MAP(Attack):
    """Maximum a posteriori: the defense's own likelihood of what was received, and a prior of images, by L-BFGS.

    Must know: the messages of each victim, the models it trained from, the defense with its parameters and how
    clients train (as everybody does), that the inputs are images in [0, 1], and data of the same kind, which tell
    the labels. So for a server or an eavesdropper. Of several rounds it adds the likelihoods up. Of a sum of
    several users' messages, as a channel makes it, it finds all users' images together.

    Cannot: see what the noise has drowned in every pixel; it then tells the smoothest image that fits. Labels that it
    infers wrongly are never corrected. Know in which order a client took its images: several passes are taken to have
    had the same one. Each step of an update costs as much as a gradient, and more.

    On models of a federation, fresh and after 100 rounds (study `trained-models`: 8 photographs, undefended, mean
    SSIM, floor 0.25): sigmoid and stride 1.00, dense ReLU 1.00 (both by the closed form; searched 0.93 to 0.99 and 0.90
    to 1.00), one ReLU convolution 1.00 and 0.93, ReLU with max-pooling 0.12 to 0.32 fresh and 0.44 to 0.49 trained,
    where it begins with a search by direction.

    Args:
        tv: weight of the total variation, in nats a unit of pixel difference. Fixed once, on 16 CIFAR-10 images with
            normal noise of 0.003, 0.01 and 0.05 (`benchmarks/prior_weight.py`), never for an image or a defense.
        box: weight of the squared distance of a pixel to [0, 1], in nats.
        restarts: from other random starts, and with the labels of several steps or users in another order; the one with
            the lowest objective is told.
        evaluations: of the objective and its gradient, for one victim and restart, at most.
        objective: `likelihood`, or `l2` for the same prior without knowledge of the defense: the squared distance of
            the gradients in units of `naive_std`, which tells the gain of the prior from that of the knowledge.
        naive_std: of `l2`, the noise that is assumed in each coordinate, whatever the defense.
        unroll: follow the steps of a client's local SGD; otherwise an update counts as one long step.
        labels: `inferred`, or `given`: the true ones, which a study must grant.
        start: law of the first dummy inputs: `uniform` (in [0, 1]) or `normal` (standard).
        ease: nats that the messages weigh at first for an update of zero; where they weigh more, the search goes on in
            stages, each a hundred times heavier, up to what the likelihood says. Without noise it is too steep for the
            prior to matter on the way: of six CIFAR-10 images behind a random 3 % of the coordinates the SSIM was 0.04
            without stages, 0.54, 0.53 and 0.52 with 3e4, 3e5 and 3e6; against noise of 0.003 and 0.03 nothing changed.
        warm: evaluations of a search by direction (`inverting-gradients`) that comes first where the model has kinks,
            for the gradient that the defense's estimate tells; 0: none.
        solve: the image of the closed form (`analytic`) is a candidate, too, where it covers the model and a message is
            of one image; told where nothing explains the messages better, and without a search where it explains all.

    Raises:
        ValueError: a parameter out of range; in `run`, a loss that is not softmax cross-entropy, or, to infer labels, a
            last layer that is not dense with one row a class.

    Source: Balunovic et al. 2022, "Bayesian framework for gradient leakage"; total variation and unrolled steps:
        Geiping et al. 2020.
    """

    kind: ClassVar[str] = "reconstruction"

    tv: float = 5.0
    box: float = 1000.0
    restarts: int = 1
    evaluations: int = 1500
    objective: Kind = "likelihood"
    naive_std: float = 0.01
    unroll: bool = True
    labels: LabelSource = "inferred"
    start: Start = "uniform"
    ease: float = 3e5
    warm: int = 800
    solve: bool = True

    def __post_init__(self) -> None:
        self._search()
        check_source(self.labels)
        if not (self.naive_std > 0 and self.naive_std < float("inf")):
            raise ValueError(f"expected naive_std > 0, got naive_std={self.naive_std}")

    def _search(self) -> Search:
        """The checked parameters."""
        prior = ImagePrior(self.tv, self.box)
        scale = 0.5 / self.naive_std**2 if self.objective == "l2" else 1.0
        explains = Explains(self.objective, scale, self.unroll, prior)
        return Search(
            self.restarts, self.evaluations, self.start, explains, _DECREASE, self.ease, self.warm, self.solve
        )

    @property
    def aware(self) -> bool:
        """Whether the defense's likelihood is asked."""
        return self.objective == "likelihood"

    @property
    def needs(self) -> frozenset[str]:
        """Messages, the round's model, and the labels where they are given, else auxiliary data to infer them with."""
        return needs(self.labels)

    def run(self, seen: Observation, key: Key) -> Reconstruction:
        """Raw inputs, not clipped, and the labels."""
        targets = received_gradients(seen)
        labels = labels_over_rounds(seen, self.labels, key.child("dummies"))
        return Reconstruction(match(seen, targets, labels, self._search(), key, rounds=None))

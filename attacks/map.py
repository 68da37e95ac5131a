"""Maximum a posteriori: the most probable image, given the messages and the defense."""

from __future__ import annotations

from dataclasses import dataclass

from leakgauge.attacks._engine.posterior import ByPosterior


@dataclass(frozen=True)
class MAP(ByPosterior):
    """Combines the defense's own likelihood of the messages with a prior of inputs, by L-BFGS (maximum a posteriori).

    Must know: the messages of each victim, the models of their rounds, the defense with its parameters, how clients
    train (public), that inputs are in [0, 1], and data of the same kind to fit the prior and to infer the labels; a
    server or an eavesdropper does. The likelihoods of several rounds are added. From a channel's sum of several users'
    messages, it reconstructs all users' images together.

    Cannot: see what the noise drowns in every pixel; it then returns the likeliest image that fits. Wrongly inferred
    labels are never corrected. The order in which a client took its images is unknown; all passes are assumed to use
    one order. Each step of an update costs at least as much as a gradient.

    Behind dense ReLU layers, it searches softened layers first, with messages that weigh little at first, which lead to
    the right active units behind quantizers: digits behind `mlp-small` and `sdq` have an SSIM of 0.99 instead of 0.90.
    Where the result does not explain the messages as well as the attack's own messages explain themselves, mostly for
    a wrong label, an eighth of the evaluations without softening, from the same start, replaces it.

    Of a table it restores records column by column: the value of each column that is likeliest by itself, under a
    mixture of laws with independent columns that is fitted to the same auxiliary records (`attacks._engine.tables`).
    Vero et al. 2023 (TabLeak) search a relaxation and take the middle of several restarts instead.

    Args:
        prior: `gaussian`: the normal law with the mean and the covariance of 3,000 auxiliary inputs at most, searched
            in its own coordinates from the mean; `tv`: total variation, which needs no auxiliary data, searched from
            random inputs; or `module:function` of somebody's own, called with auxiliary inputs [n, *input_shape] and
            `box` (see `attacks._engine.prior.Prior`). `gaussian` has twice the SSIM of `tv` behind `jopeq`,
            `cepam-gaussian` and noise of 0.1, with a quarter of the evaluations (`benchmarks/prior_weight.py`).
        tv: weight of the total variation, in nats per unit of pixel difference. Fixed once, on 16 CIFAR-10 images with
            normal noise of 0.003, 0.01 and 0.05 (`benchmarks/prior_weight.py`), never for one image or defense.
        box: weight of the squared distance of a pixel to [0, 1], in nats.
        restarts: random starts, each with another order of the labels of several steps or users; the result with the
            lowest objective is returned.
        evaluations: most evaluations of the objective and its gradient, per victim and restart.
        objective: `likelihood`, or `l2`: the squared distance of the gradients in units of `naive_std`, with the same
            prior but without knowledge of the defense. The difference is the gain from that knowledge.
        naive_std: the noise that `l2` assumes in each coordinate, whatever the defense.
        unroll: follow the steps of a client's local SGD; otherwise an update counts as one long step.
        labels: `inferred`, or `given`: the true labels, which a study must grant.
        start: law of the first dummy inputs of `tv`: `uniform` (in [0, 1]) or `normal` (standard).
        ease: first weight of the messages, in nats for an update of zero. If they weigh more, the search continues in
            stages, each a hundred times heavier, up to the likelihood's own weight. Without noise, the likelihood is
            too steep for the prior to matter on the way: for six CIFAR-10 images behind a random 3 % of the
            coordinates, the SSIM was 0.04 without stages and 0.54, 0.53 and 0.52 with 3e4, 3e5 and 3e6; under noise of
            0.003 and 0.03, stages changed nothing.
        warm: evaluations of each first search, and twice those of all softened layers, if the model has kinks; 0: none.
            Where the gradient of the first dense layer shows its inputs (one image; `gaussian`), the layers before it
            are searched alone, from three starts (a quarter of the evaluations, from one, if there are none before it);
            otherwise, and besides where noise hides much of them and no layers can be softened, the direction
            of the gradient that the defense's estimate shows: the angle between the gradients and the prior, by Adam in
            the prior's coordinates (with `tv`: as `inverting-gradients`).
        solve: add the image of the closed form (`analytic`) as a candidate, if it covers the model and a message has
            one image. It is returned if nothing explains the messages better, and without a search if it explains all.

    Raises:
        ValueError: a parameter is out of range; in `run`: a loss that is not softmax cross-entropy, nor, with given
            labels, squared; fewer than two auxiliary inputs for `gaussian`, or, to infer labels, a last layer that is
            not dense with one row per class.

    Source: Balunovic et al. 2022, "Bayesian framework for gradient leakage"; total variation and unrolled steps:
        Geiping et al. 2020.
    """

"""Maximum a posteriori: finds the most probable image, given the messages and the defense."""

from __future__ import annotations

from dataclasses import dataclass

from leakgauge.attacks._engine.posterior import ByPosterior


@dataclass(frozen=True)
class MAP(ByPosterior):
    """Combines the defense's own likelihood of the messages with a prior of inputs, by L-BFGS (maximum a posteriori).

    Must know: the messages of each victim, the models of their rounds, the defense with its parameters, how clients
    train (public), that inputs are in [0, 1], and data of the same kind to fit the prior and to infer the labels; a
    server or an eavesdropper does. It adds the log likelihoods of several rounds. From a channel's sum of several
    users' messages, it reconstructs all users' images together.

    Cannot: recover detail that noise hides in every pixel; it then returns the likeliest image that fits. Wrongly
    inferred labels are never corrected. The order in which a client took its images is unknown; the attack assumes the
    same order in all passes. Each step of an update costs at least as much as a gradient.

    Behind dense ReLU layers, it first searches with softened layers and a low weight of the messages. If the result
    explains them worse than imitated messages are explained by their own inputs, a search without softening follows,
    from the same start, with an eighth of the evaluations (`docs/attacks.md` has results).

    It restores records of a table column by column: each column gets its own likeliest value, under a mixture of
    distributions with independent columns that is fitted to the same auxiliary records (`attacks._engine.tables`). Vero
    et al. 2023 (TabLeak) instead search a relaxation and take the median of several restarts.

    Args:
        prior: `gaussian`: the normal distribution with the mean and covariance of at most 3,000 auxiliary inputs; the
            search runs in its coordinates and starts from the mean. `tv`: total variation, which needs no auxiliary
            data; the search starts from random inputs. `module:function`: your own function, called with auxiliary
            inputs [n, *input_shape] and `box` (see `attacks._engine.prior.Prior`). `docs/attacks.md` compares them.
        tv: weight of the total variation, in nats per unit of pixel difference. It was set once, on 16 CIFAR-10 images
            with normal noise of 0.003, 0.01 and 0.05 (`benchmarks/prior_weight.py`), not per image or defense.
        box: weight of the squared distance of a pixel to [0, 1], in nats.
        restarts: number of random starts, each with another order of the labels of several steps or users; the result
            with the lowest objective is returned.
        evaluations: maximum number of evaluations of the objective and its gradient, per victim and restart.
        objective: `likelihood`, or `l2`: the squared distance of the gradients in units of `naive_std`, with the same
            prior but without knowledge of the defense. Comparing the two shows the gain from that knowledge.
        naive_std: standard deviation of the noise that `l2` assumes in each coordinate, whatever the defense.
        unroll: whether to follow the steps of a client's local SGD; otherwise an update counts as one long step.
        labels: `inferred`, or `given`: the true labels, which a study must grant.
        start: distribution of the first dummy inputs of `tv`: `uniform` (in [0, 1]) or `normal` (standard).
        ease: first weight of the messages, in nats for an update of zero. If the likelihood weighs more, the search
            continues in stages, each with a hundred times the weight, up to the likelihood's own weight. Without noise,
            the likelihood is so steep that the search would ignore the prior (`docs/attacks.md` has an example).
        warm: evaluations of each preliminary search, and twice those of all searches with softened layers, if the model
            has kinks; 0: no such searches. If the gradient of the first dense layer shows its inputs (one image, or at
            least half of a batch's, which needs no other search; `gaussian`), the search matches only the layers before
            it, from three starts (without layers before it: from one start, with a quarter of the evaluations; a batch:
            with 1.6 times the evaluations).
            Otherwise, or additionally if noise hides much of the inputs, it matches the gradient's estimated direction:
            it minimizes the angle between the gradients plus the prior's energy, by Adam in the prior's coordinates
            (with `tv`: as `inverting-gradients` does). Behind one step of Adam, another search of as many evaluations
            follows the objective over the kinks that Adam's steps leave.
        solve: whether to add the image of the closed form (`analytic`) as a candidate, if the closed form covers the
            model and a message has one image. This image is returned if nothing explains the messages better, and
            without a search if it explains them completely. Behind batch norms and residual blocks, where searches end
            below the mean image, regressed inputs (`regressed`) replace those that do not explain the messages.

    Raises:
        ValueError: a parameter is out of range; in `run`: fewer than two auxiliary inputs for `gaussian`; labels that
            cannot be inferred, see `attacks._engine.labels.restore` and `by_slopes`.

    Source: Balunovic et al. 2022, "Bayesian framework for gradient leakage"; total variation and unrolled steps:
        Geiping et al. 2020.
    """

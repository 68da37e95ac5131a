"""Audits: the counted trials of a chosen test, and whole audits.

The reference of the counted trials is a loop in numpy for the Laplace mechanism, with one Philox stream, message and
score per trial. The reference of whole audits sends as many messages of the same defense, and does nothing with them.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from _measure import Rows, Work
from audit import mechanism_of
from scipy.stats import beta

from leakgauge.harness.audit.engine import apply_test, choose_test
from leakgauge.harness.audit.neighbors import pairs
from leakgauge.harness.core.rng import Key

KEY = Key(0, ("audit",))
CONFIDENCE, DIM, EPSILON = 0.95, 5, 5.0


def counted(trials: int) -> Work:
    """The counted trials of an audit of the Laplace mechanism, and its bound."""
    claim, mechanism = mechanism_of("laplace", {"epsilon": EPSILON}, {"dim": DIM})
    test = choose_test(mechanism, claim, trials, CONFIDENCE, KEY)

    def ours() -> float:
        return apply_test(mechanism, claim, test, trials, CONFIDENCE, KEY)[0].epsilon_lower

    return Work(ours, partial(laplace, trials), "loop in numpy", 2 * trials, "message")


def laplace(trials: int) -> float:
    """The bound by a loop over the trials."""
    above, scale = [0, 0], 2 / EPSILON
    for bit in (0, 1):
        center = np.full(DIM, 2.0 * bit - 1.0, np.float32)
        for trial in range(trials):
            stream = np.random.Generator(np.random.Philox(2 * trial + bit))  # noqa: TID251
            message = (center + stream.laplace(0.0, scale, DIM)).astype(np.float32).tobytes()
            above[bit] += float(np.frombuffer(message, np.float32).sum()) > 0
    wrong, right = above
    low = beta.ppf((1 - CONFIDENCE) / 2, right, trials - right + 1)
    high = beta.ppf(1 - (1 - CONFIDENCE) / 2, wrong + 1, trials - wrong)
    return float(np.log(low / high))


def whole(name: str, trials: int) -> Work:
    """A whole audit of a defense at its defaults, with its pilot; the reference makes only the counted messages."""
    claim, mechanism = mechanism_of(name, {}, {})
    first = pairs(mechanism.defense, mechanism.federation.setting, claim.unit, claim.relation, KEY)[0]

    def messages() -> None:
        for bit in (0, 1):
            mechanism.run(first, bit, trials, KEY.child(bit), only="estimates")

    def ours() -> float:
        test = choose_test(mechanism, claim, trials, CONFIDENCE, KEY)
        return apply_test(mechanism, claim, test, trials, CONFIDENCE, KEY)[0].epsilon_lower

    return Work(ours, messages, "its counted messages alone", 1, "audit")


def rows(quick: bool) -> Rows:
    """Counted trials, and whole audits."""
    chosen = ("jopeq",) if quick else ("jopeq", "gaussian", "cepam-gaussian", "sqsgd", "dp-sgd")
    trials = 100 if quick else 300
    found = {f"audit, {name}, {trials} trials": partial(whole, name, trials) for name in chosen}
    return {"audit, laplace, counted trials": partial(counted, 300), **found}

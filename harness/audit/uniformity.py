"""Tests of uniform numbers that a distribution read from messages: marginals, tails, variances, independence.

If the messages follow the distribution, all numbers are independent and uniform, whatever the updates. Each test covers
one way in which code departs from its distribution. Each gives one p-value that is valid by itself, so a caller splits
its level among the tests.

Source: the transform is Rosenblatt's (see `core.distribution`). Tests of counts are exact or Poisson; sums of many
    squares and products are compared with their limit distributions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy import special

from leakgauge.harness.core.distribution import SHARES, Integers
from leakgauge.harness.core.stats import Numbers

_FAR = 38.0  # the largest normal score, given to numbers that are 0 or 1
_EQUAL = 1e-6  # two numbers with a smaller difference count as equal: float32 rounding moves a repeated draw by less

_WHOLE, _CELLS = 3, 2**20
"""The first numbers of a message, in cells of the unit interval: independent messages never share all of them."""

_TAILS = (1e-2, 1e-3, 1e-4)
_GRAINS = (8, 12, 16, 20, 24)  # powers of two; numbers on a grid of 2^-k come from a generator or table of few values

_BINS = 64
_ROOM = 1.25  # factor on the standard deviation of a sum of lowest bits
_RARE = (0.003, 0.03)  # shares of messages that follow an alternative

_FEWEST, _SQUARE = 10, 0.9
"""Numbers and messages from which directions are tested, and the ratio of their counts below which the least one is."""

_EXTREME = 10.0
"""Factor on the p-values of directions: in 20,000 draws of 100 x 12 to 600 x 200 normal numbers, p-values below 1e-3
were up to twice as frequent as they should be, and those below 1e-4 up to six times."""

_MOST_SHARE = 0.25  # a larger missing share of noise is not reported, because its log ratios are not nearly normal


@dataclass(frozen=True, eq=False)
class Sample:
    """The uniform numbers of n messages of k numbers each, and what else is known about each message.

    Attributes:
        uniforms: [n, k].
        places: [n, k] coordinate of the update that a number carries, -1: none. tensors: [d] tensor of a coordinate.
        carried: [n, k] the update in those coordinates, else 0.
        norms, sizes: [n] norm of the update, and size of the client's data.
        senders, rounds, patterns: [n]; messages are ordered by run, round and sender. runs: [n] federation of each.
        bits: [n, k] lowest mantissa bits, or None. lowest: [n, k] bits that need not be fair coins, or None.
        ratios: [n, a] log likelihood ratios of alternatives to a discrete distribution; or None.
    """

    uniforms: Numbers
    places: Integers
    tensors: Integers
    carried: Numbers
    norms: Numbers
    sizes: Integers
    senders: Integers
    rounds: Integers
    runs: Integers
    patterns: Integers
    bits: Integers | None
    lowest: Integers | None
    ratios: Numbers | None

    @property
    def groups(self) -> dict[str, Integers]:
        """[n] labels of messages, by the name of the grouping."""
        decades = np.floor(np.log10(np.maximum(self.norms, 1e-12))).astype(np.int64)
        groups = {"sender": self.senders, "round": self.rounds, "size": self.sizes, "norm": decades}
        return groups | {"pattern": self.patterns, "run": self.runs}


def p_values(sample: Sample, *, coarse: bool) -> dict[str, float]:
    """A p-value for each test, by name.

    Args:
        coarse: float32 rounding is not small compared with the noise; tests of single bits and ties are left out.
    """
    u = sample.uniforms
    scores = np.clip(special.ndtri(u), -_FAR, _FAR)
    # rounding makes a few numbers exactly 1/2: their magnitude is small, not impossible; `_repeats` counts them
    magnitudes = np.clip(special.ndtri(np.abs(2 * u - 1)), special.ndtri(1e-4 if coarse else _EQUAL), _FAR)
    results, labels = dict(_marginals(u, scores)), _labels(sample)
    for name, values in {"noise": scores, "magnitude": magnitudes}.items():
        results |= dict(_groups(name, values, labels))
        results |= dict(_neighbors(name, values, sample))
        results |= dict(_covariates(name, values, sample))
        results |= dict(_directions(name, values))
    results |= dict(_patterns(scores))
    results |= dict(_clients(scores, sample))
    if not coarse:
        results |= dict(_repeats(u))
        if sample.bits is not None:
            results |= dict(_bits(sample.bits, sample))
        if sample.lowest is not None:
            results["lowest bits against centered signs"] = _lowest(sample.lowest, sample)
        if sample.ratios is not None:
            results |= ratio_values(sample.ratios, sample.groups)
    return results


def ratio_values(ratios: Numbers, groups: dict[str, Integers]) -> dict[str, float]:
    """p-values of the likelihood ratios of alternatives: in all messages, in a few of any kind, and in one group.

    If messages follow their distribution, the expected likelihood ratio of any number of messages is at most 1, and so
    is that of its average over alternatives. By Markov's inequality, the average exceeds 1 / p with probability at most
    p.

    Args:
        ratios: [n, a] logarithms. groups: [n] labels of messages.
    """
    if not ratios.size:
        return {}
    few = [np.logaddexp(np.log1p(-share), np.log(share) + ratios).sum(0) for share in _RARE]
    labels = [_ranks(label) for label in groups.values()]
    of_group = [ratios[inverse == group].sum(0) for inverse in labels for group in range(inverse.max() + 1)]
    logs_of = {"": ratios.sum(0), " in few messages": np.array(few), " in one group": np.array(of_group)}
    return {
        f"likelihood ratio{where}": math.exp(min(0.0, math.log(logs.size) - float(special.logsumexp(logs))))
        for where, logs in logs_of.items()
    }


def twin_values(one: Numbers, other: Numbers, *, discrete: bool) -> dict[str, float]:
    """p-values of messages [n, k] against their twins, which differ only in the private key.

    Args:
        discrete: equal outcomes of honest twins are likely, so only correlations are tested.
    """
    values = {}
    for name, pair in {"noise": (one, other), "magnitude": (np.abs(2 * one - 1), np.abs(2 * other - 1))}.items():
        a, b = (np.clip(special.ndtri(u), -_FAR, _FAR) for u in pair)
        values[f"{name} equal to the twin's"] = _correlation(a, b)
    if not discrete:
        ties = int((np.abs(one - other) < _EQUAL).sum())
        values["numbers equal to the twin's"] = _poisson(ties, 2 * _EQUAL * one.size)
    return values


def detectable(numbers: int, level: float, power: float = 0.95) -> float:
    """The smallest missing share of the noise's scale that the test of all squares detects with this power.

    Args:
        numbers: tested numbers, n k. level: of this one test, two-sided.
    """
    # a sum of n squares, each smaller by (1 - s)^2, falls below the lower critical value with probability `power`
    # chdtri is the upper quantile of chi-square
    critical, likely = (float(special.chdtri(numbers, 1 - lower)) for lower in (level / 2, power))
    return 1.0 - math.sqrt(critical / likely)


def detectable_by_ratios(ratios: Numbers, level: float, power: float = 0.95) -> float | None:
    """About the smallest of `SHARES` whose absence the likelihood ratios of all messages detect with this power.

    None: not even `_MOST_SHARE` is detected; the messages say too little about the update, or their channel hardly ever
    errs.

    Args:
        ratios: [n, a] logarithms of honest messages; the alternatives of `SHARES` come first. level: of this one test.
    """
    if not ratios.size:
        return None
    shares = np.array(SHARES)
    near = (shares > 0) & (shares <= _MOST_SHARE)
    # with many messages, the log ratio of an alternative is normal, as for a shifted normal number. The shift follows
    # from the squared Hellinger distance, in which a rare message has no large weight; few ratios are above log 4
    apart = np.square(1 - np.exp(np.minimum(ratios[:, : len(shares)][:, near], math.log(4)) / 2)).mean(0) / 2
    shift = np.sqrt(-8 * len(ratios) * np.log1p(-apart))
    needed = float(special.ndtri(power))
    needed += math.sqrt(needed**2 + 2 * math.log(ratios.shape[1] / level))
    return min(shares[near][shift >= needed].tolist(), default=None)


def _marginals(u: Numbers, scores: Numbers) -> Iterator[tuple[str, float]]:
    """The distribution of single numbers: its shape, its tails and its ends."""
    flat, n = np.sort(u, axis=None), u.size
    steps = np.arange(n + 1) / n
    gap = max(float((steps[1:] - flat).max()), float((flat - steps[:-1]).max()))
    yield "distribution", float(special.kolmogorov(np.sqrt(n) * gap))
    counts = np.histogram(flat, _BINS, (0.0, 1.0))[0]
    yield "histogram", _even(counts)
    for tail in _TAILS:
        for name, count in (("lower", (flat < tail).sum()), ("upper", (flat > 1 - tail).sum())):
            yield f"{name} tail {tail:g}", _binomial(int(count), n, tail)
    # the number nearest to an end: too far means that the noise is truncated, too near that its tail is too heavy
    nearest = float(np.minimum(flat, 1 - flat).min())
    none_nearer = np.exp(n * np.log1p(-min(2 * nearest, 1.0))) if nearest < 0.5 else 0.0
    yield "extremes", _two_sided(float(none_nearer), float(1 - none_nearer))
    yield "squares", _chi_square(float(np.square(scores).sum()), n)
    # one number of each message whose noise is truncated, such as a lie that is never told
    missed = np.stack([u.min(0), 1 - u.max(0)])
    yield "ends of one number", _least(float((1 - missed.max()) ** len(u)), missed.size)


def _labels(sample: Sample) -> dict[str, Integers]:
    """[n k] labels from 0 on: the group of each number, by the name of the grouping."""
    n, k = sample.uniforms.shape
    known = sample.places >= 0
    of_message = {"message": np.arange(n)} | sample.groups
    labels = {word: np.repeat(_ranks(values), k) for word, values in of_message.items()}
    labels["coordinate"] = _ranks(np.where(known, sample.places, -1 - np.arange(k)).ravel())
    labels["tensor"] = _ranks(np.where(known, sample.tensors[sample.places], -1).ravel())
    return labels


def _ranks(values: Integers) -> Integers:
    """[n] the rank of each value among the distinct values, without a sort; the values lie in a small range."""
    counted = values - values.min()
    ranks = np.cumsum(np.bincount(counted) > 0) - 1
    return np.asarray(ranks[counted], np.int64)


def _groups(name: str, z: Numbers, labels: dict[str, Integers]) -> Iterator[tuple[str, float]]:
    """Sums and sums of squares of the scores [n, k], overall and by every label of a number."""
    flat, squares = z.ravel(), np.square(z).ravel()
    yield f"{name}: mean", _normal(float(flat.sum()) / np.sqrt(flat.size))
    for word, inverse in labels.items():
        count = np.bincount(inverse)
        sums, sums_of_squares = (np.bincount(inverse, weights) for weights in (flat, squares))
        yield f"{name}: mean by {word}", _chi_square(float((sums**2 / count).sum()), len(count))
        each = _chi_squares(np.asarray(sums_of_squares, np.float64), count)
        # the smallest of several independent p-values
        yield f"{name}: squares by {word}", float(-np.expm1(len(each) * np.log1p(-min(float(each.min()), 1 - 1e-16))))


def _neighbors(name: str, z: Numbers, sample: Sample) -> Iterator[tuple[str, float]]:
    """Products of nearby scores: in a message, between rounds, between clients of a round."""
    n, k = z.shape
    for lag in (1, 2, 3):
        if k > lag:
            yield f"{name}: coordinates {lag} apart", _correlation(z[:, lag:], z[:, :-lag])
    order = np.lexsort((sample.rounds, sample.senders, sample.runs))
    same = (np.diff(sample.senders[order]) == 0) & (np.diff(sample.runs[order]) == 0)
    for lag in (1, 2):
        pairs = same if lag == 1 else same[1:] & same[:-1]
        if pairs.any():
            yield f"{name}: rounds {lag} apart", _correlation(z[order][lag:][pairs], z[order][:-lag][pairs])
    same = (np.diff(sample.rounds) == 0) & (np.diff(sample.runs) == 0)
    if same.any():
        yield f"{name}: clients of a round", _correlation(z[1:][same], z[:-1][same])
    # alternating sums: noise that cancels or repeats from one coordinate, round or client to the next
    signs = 1 - 2 * (np.arange(k) % 2)
    yield f"{name}: alternating coordinates", _chi_square(float(np.square(z @ signs).sum()) / k, n)
    for word, label in (("rounds", sample.rounds), ("clients", sample.senders)):
        yield f"{name}: alternating {word}", _chi_square(float(np.square((1 - 2 * (label % 2)) @ z).sum()) / n, k)


def _directions(name: str, z: Numbers) -> Iterator[tuple[str, float]]:
    """The variance of the scores [n, k] in the direction where it is smallest, and where it is largest.

    No other test sees a message that reveals one linear combination of the update whose weights are unknown. With more
    numbers than messages, the directions are combinations of messages.

    Source: Ma 2012, Theorem 2, and Johnstone 2001, Theorem 1.1: the extreme eigenvalues of a white Wishart matrix have
        the distribution of Tracy and Widom, here approximated by the gamma distribution of Chiani 2014. p-values are
        multiplied by `_EXTREME`.
    """
    n, k = max(z.shape), min(z.shape)
    if k < _FEWEST:
        return
    tall = z if z.shape[0] >= z.shape[1] else z.T
    least, *_, most = np.linalg.eigvalsh(tall.T @ tall).tolist()
    one, other = math.sqrt(n - 0.5), math.sqrt(k - 0.5)
    if k < _SQUARE * n:
        mean, spread = (one - other) ** 2, (one - other) * (1 / other - 1 / one) ** (1 / 3)
        ratio = spread / mean
        yield f"{name}: least direction", _tracy_widom((math.log(mean / max(least, 1e-300)) + ratio**2 / 8) / ratio)
    mean, spread = (one + other) ** 2, (one + other) * (1 / other + 1 / one) ** (1 / 3)
    yield f"{name}: largest direction", _tracy_widom((most - mean) / spread)


def _tracy_widom(value: float) -> float:
    """`_EXTREME` times the probability of a larger value under the Tracy-Widom distribution for real matrices."""
    return min(1.0, _EXTREME * float(special.gammaincc(46.446, max(0.0, (value + 9.84801) / 0.186054))))


def _clients(z: Numbers, sample: Sample) -> Iterator[tuple[str, float]]:
    """Every pair of clients, and every triple by the signs of their scores, over all rounds and numbers."""
    clients = int(sample.senders.max()) + 1
    if clients < 3 or not np.array_equal(sample.senders, np.arange(len(z)) % clients):
        return  # not every client sends in every round
    of_client = z.reshape(-1, clients, z.shape[1]).swapaxes(0, 1).reshape(clients, -1)
    signs, root = np.where(of_client > 0, 1.0, -1.0), math.sqrt(of_client.shape[1])
    pairs = (of_client @ of_client.T)[np.triu_indices(clients, 1)]
    yield "one pair of clients", _least(_normal(float(np.abs(pairs).max()) / root), len(pairs))
    products = (signs[:, None] * signs).reshape(clients**2, -1) @ signs.T
    first, second, third = np.array(list(itertools.combinations(range(clients), 3))).T
    triples = products.reshape(clients, clients, clients)[first, second, third]
    yield "signs of one triple of clients", _least(_normal(float(np.abs(triples).max()) / root), len(triples))


def _covariates(name: str, z: Numbers, sample: Sample) -> Iterator[tuple[str, float]]:
    """Linear relations of the scores with quantities that they must not depend on; exact, given the updates."""
    known = (sample.places >= 0).all(0)
    if known.any():
        u = sample.carried[:, known]
        size = np.sqrt(np.square(u).mean(1, keepdims=True))
        u = np.divide(u, size, out=np.zeros_like(u), where=size > 0)
        large = np.sign(np.abs(u) - np.median(np.abs(u), 1, keepdims=True))
        of_update = {"update": u, "sign of the update": np.sign(u), "size of the update": np.abs(u)}
        for word, weights in (of_update | {"larger half of the update": large}).items():
            yield f"{name} against the {word}", _linear(z[:, known], weights)
    logs = np.log10(np.maximum(sample.norms, 1e-12))
    columns = {"norm": logs, "data size": sample.sizes, "sender": sample.senders, "round": sample.rounds}
    for word, column in columns.items():
        centered = column - column.mean()
        yield f"{name} against the {word}", _linear(z, np.repeat(centered[:, None], z.shape[1], 1))


def _patterns(z: Numbers) -> Iterator[tuple[str, float]]:
    """Signs of three to five neighbors in a message: all patterns are equally frequent."""
    up = (z > 0).astype(np.int64)
    for length in (3, 4, 5):
        k = z.shape[1] // length * length
        if len(z) * k < 5 * length * 2**length:
            continue
        words = up[:, :k].reshape(-1, length) @ (1 << np.arange(length))
        yield f"signs of {length} neighbors", _even(np.bincount(words, minlength=2**length))


def _repeats(u: Numbers) -> Iterator[tuple[str, float]]:
    """Equal numbers, numbers without noise, and numbers on a coarse grid."""
    flat, n = np.sort(u, axis=None), u.size
    yield "equal numbers", _poisson(int((np.diff(flat) < _EQUAL).sum()), n * -np.expm1(-n * _EQUAL))
    yield "numbers without noise", _poisson(int((np.abs(flat - 0.5) < _EQUAL / 2).sum()), n * _EQUAL)
    if u.shape[1] >= _WHOLE:
        heads = np.floor(u[:, :_WHOLE] * _CELLS)
        repeats = len(heads) - len(np.unique(heads, axis=0))
        yield "noise of a message in another one", _poisson(repeats, len(heads) ** 2 / 2.0 / float(_CELLS) ** _WHOLE)
    for k in _GRAINS:
        off = np.abs(flat * 2.0**k - np.rint(flat * 2.0**k))
        yield f"grid of 2^-{k}", _binomial(int((off < 0.05).sum()), n, 0.1)


def _bits(bits: Integers, sample: Sample) -> Iterator[tuple[str, float]]:
    """The lowest mantissa bits are fair coins, also given the signs of the update."""
    yield "lowest bits", _binomial(int(bits.sum()), bits.size, 0.5)
    known = (sample.places >= 0).all(0)
    signs = np.sign(sample.carried[:, known])
    coins = np.asarray(2.0 * bits - 1.0, np.float64)
    yield "lowest bits against the update", _linear(coins[:, known], signs)
    agree = bits[:, known] == (signs > 0)
    counts = {"": (bits, np.ones_like(bits)), " against the update": (agree & (signs != 0), signs != 0)}
    for word, (hits, tries) in counts.items():
        each = _binomials(hits.sum(0), tries.sum(0)) if hits.size else np.ones(1)
        yield f"lowest bits of one number{word}", _least(float(each.min()), len(each))
    inverse = np.repeat(_ranks(sample.senders), bits.shape[1])
    excess = np.bincount(inverse, coins.ravel()) ** 2 / np.bincount(inverse)
    yield "lowest bits by sender", float(special.chdtrc(len(excess), float(excess.sum())))


def _lowest(bits: Integers, sample: Sample) -> float:
    """p-value of lowest bits against the signs of the update, for bits that favor one value whatever the signs are.

    Signs of updates are symmetric, given their magnitudes. Repeated updates widen the sum, by a factor below `_ROOM`.
    """
    signs = np.sign(sample.carried)
    return _linear(np.asarray((2.0 * bits - 1.0) / _ROOM, np.float64), signs - signs.mean(1, keepdims=True))


def _chi_square(value: float, df: int) -> float:
    return float(_chi_squares(np.array(value), np.array(df)))


def _chi_squares(values: Numbers, df: Integers) -> Numbers:
    """Two-sided p-values of chi-square sums."""
    lower, upper = special.chdtr(df, values), special.chdtrc(df, values)
    return np.asarray(np.minimum(1.0, 2 * np.minimum(lower, upper)), np.float64)


def _even(counts: Integers) -> float:
    mean = float(counts.mean())
    return float(special.chdtrc(len(counts) - 1, float(np.square(counts - mean).sum()) / mean))


def _correlation(a: Numbers, b: Numbers) -> float:
    """p-value of independent standard normal scores: the sum of their products."""
    return _normal(float((a * b).sum()) / np.sqrt(a.size))


def _linear(z: Numbers, weights: Numbers) -> float:
    """p-value of independent standard scores: their sum with fixed weights."""
    norm = float(np.sqrt(np.square(weights).sum()))
    return _normal(float((z * weights).sum()) / norm) if norm > 0 else 1.0


def _normal(value: float) -> float:
    return float(2 * special.ndtr(-abs(value)))


def _binomial(count: int, n: int, chance: float) -> float:
    """Two-sided p-value of a count."""
    return _two_sided(float(special.bdtr(count, n, chance)), float(special.bdtrc(count - 1, n, chance) if count else 1))


def _binomials(counts: Integers, n: Integers) -> Numbers:
    """Two-sided p-values of the counts of fair coins."""
    least = np.minimum(counts, n - counts)
    return np.asarray(np.minimum(1.0, 2 * special.bdtr(least.astype(float), n, 0.5)), np.float64)


def _least(p: float, count: int) -> float:
    """A bound on the probability that the least of this many p-values is at most p."""
    return min(1.0, count * p)


def _poisson(count: int, mean: float) -> float:
    """p-value of a count that is too large."""
    return float(special.pdtrc(count - 1, mean)) if count else 1.0


def _two_sided(lower: float, upper: float) -> float:
    return min(1.0, 2 * min(lower, upper))

"""SPEAR: recovers the exact small batch behind the gradient of a ReLU network, without a search over pixels.

With D = dL/dZ [b, m] and X [b, n] of the first layer, the weight's gradient is D^T X = U diag(s) V^T, of rank b, and
D^T = U M for some M [b, b]; then X = M^-1 diag(s) V^T. A column q of M gives the slopes U q of one image. These slopes
are zero at units that the image does not activate: q is orthogonal to the rows of U for these units. So b - 1 rows are
drawn; if one image activates none of their units, the vector orthogonal to the rows is a column of M, up to a factor.
The bias's gradient D^T 1 gives the factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.linalg import LinAlgError, inv_ex, solve_ex, svd  # type: ignore[attr-defined]  # public, not in __all__
from torch.nn.functional import linear, one_hot, relu

from leakgauge.attacks._engine.bottleneck import Without
from leakgauge.attacks._engine.closed_form import Unsolvable, dense_stack_of
from leakgauge.attacks._engine.labels import labels_of
from leakgauge.attacks._engine.objective import received_gradients
from leakgauge.attacks._engine.reconstruct import failed, unusable
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Attack, Guess, Message, Observation, Reconstruction, Task
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.gradients import gradients
from leakgauge.harness.learn.tasks import ModelTask

_UNEXPLAINED = 0.5
"""Largest share of a tensor of the received gradient that the batch may leave unexplained, up to a factor: exact
batches left at most 1e-11, batches with some correct images 0.03 to 0.57, chance batches 0.6 to 1, one of them 0.38."""

_FEW = "too few units of the first layer are inactive for an image"
_ROUNDING = 2.0**-24  # relative rounding of float32, the noise of an exact gradient; larger measured noise replaces it
_CLEAR = 10.0  # standard deviations of noise within which a slope may be zero; pure noise stays below 4 of them
_DRAWN = 4096  # maximum number of sets of rows drawn at once: enough to avoid loops, few enough for the memory
_ROUND = 4 * _DRAWN  # maximum number of sets of rows in the first round; rounds then double, and exchanges follow each
_REFINED = 64  # maximum number of candidates of a draw that are fitted to all their zeros
_POOL = 256  # maximum number of candidates in the pool
_PASSES = 2  # number of passes of exchanges over a batch, which bounds their time
_SCALES = 16  # number of factors, per sign, that are tried for an image known only up to its factor; from 1/30 to 30


@dataclass(frozen=True)
class Spear(Attack):
    """Recovers exact batches behind a dense ReLU network from the low rank and zeros of its first layer's gradient.

    Must know: one message of each victim, its number of images (public), and the model of its round: at least two dense
    layers with ReLU between them (`mlp`, `mlp-small`); a server or an eavesdropper does. Without the shared key, it
    uses an outsider's estimate. The defense's estimate is treated as the gradient itself. A common factor, for example
    from a clip, changes no image.

    Cannot: withstand more than slight noise, or find an image that activates nearly all units, two similar images, or
    an image that leaves no trace in the gradient. `map` attacks these cases and other models. An update of several
    full-batch steps on few images is solved if enough units stay inactive; its objective is then that of the
    first-order approximation, which is not small.

    Practical up to 10 images behind a fresh `mlp`, fewer behind a trained one, whose units are active more often
    (`docs/attacks.md` has counts). A batch that is not found takes 3 to 15 s.

    Edge cases, each a guess with a `failure`: a gradient or model that is zero or not finite; fewer directions in the
    gradient than images; fewer units than images; no hidden layer; a batch that does not explain the gradient. A batch
    with some wrong images is returned if it explains more than half of each tensor; its objective shows it.

    Args:
        samples: maximum number of sets of rows that are drawn per victim; `evaluations` of the guess is the number
            drawn.

    Raises:
        ValueError: samples < 1; in `run`: a loss that is not softmax cross-entropy.

    Source: Dimitrov et al. 2024, "SPEAR: exact gradient inversion of batches in federated learning". Differs:
        the noise measured in the gradient decides which slopes count as zero; candidates are fitted to all their zeros;
        exchanges also try candidates derived from an image that is known up to its factor; the labels are solved from
        the last layer's gradient. Behind a bottleneck with noise (`precode`), labels are inferred, in no order, and a
        batch counts only if its slopes contradict none of its images.
    """

    kind: ClassVar[str] = "reconstruction"
    needs: ClassVar[frozenset[str]] = frozenset({"messages", "models"})

    samples: int = 100_000

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"expected samples >= 1, got samples={self.samples}")

    def at_once(self, dim: int) -> int | None:
        """One: no victim needs another."""
        return 1

    def run(self, observation: Observation, key: Key) -> Reconstruction:
        """Inputs, not clipped, each with its label; the objective is the squared distance of the gradients."""
        (messages, model, _), targets = observation.observed_rounds[0], received_gradients(observation, softmax=True)
        own = Without.of(observation.task)
        task, params, guesses = own.task, model.params[own.kept], list[Guess]()
        refusal = _refusal(task, params)
        labels: Sequence[Tensor | None] = [None] * len(targets)
        if own.whole is not None and not refusal:  # the last layer's input has noise
            labels = labels_of(observation, targets.nan_to_num(0.0, 0.0, 0.0), "inferred", key.child("labels"))
        for message, target, known in zip(messages, targets[:, own.kept], labels, strict=True):
            if failure := refusal or unusable(target):
                guesses.append(failed(task, message, failure))
                continue
            try:
                rows = key.child("rows", message.sender.number)
                guesses.append(_guess(task, params, message, target, known, self.samples, rows))
            except (Unsolvable, LinAlgError) as error:
                guesses.append(failed(task, message, str(error)))
        return Reconstruction(tuple(guesses))


def _refusal(task: Task, params: Vector) -> str:
    """Why the attack cannot handle messages behind this model; an empty string if it can."""
    if not bool(params.isfinite().all()):
        return "the model is not finite"
    if dense_stack_of(task) is None:
        return "expected a model of dense layers with ReLU, got another model; use map instead"
    if len(task.layout.shapes) == 2:
        return "expected a model with a hidden layer, got none; use map instead, or analytic for one image"
    return ""


def _guess(
    task: Task, params: Vector, message: Message, target: Tensor, labels: Tensor | None, samples: int, key: Key
) -> Guess:
    """The batch behind one message; `labels`: None, or those of a message whose scores have noise."""
    structure = dense_stack_of(task)
    assert structure is not None  # else `_refusal` gave a reason
    assert isinstance(task, ModelTask)
    tensors, received = (structure.split(vector.double()) for vector in (params, target))
    batch = _find(_FirstLayer(*tensors[:2], *received[:2]), message.images, samples, key)
    y = _labels(tensors, received, batch.x) if labels is None else labels
    x = task.model.scale.stored(batch.x.reshape(-1, *task.input_shape)).to(params.dtype)
    if labels is not None:
        if batch.contradictions:
            return failed(
                task, message, f"the images found contradict the gradient: {_FEW}; use map instead", batch.drawn
            )
        return Guess(x, y, 0.0, batch.drawn)
    (own,) = gradients(task, params, x[None], one_hot(y, task.classes).to(params.dtype)[None])
    if not bool(own.isfinite().all()) or _unexplained(task, own, target) > _UNEXPLAINED:
        moved = f", or too many are active at some of the {message.steps} steps" if message.steps > 1 else ""
        why = f"{_FEW}{moved}; use map instead"
        return failed(task, message, f"the images found do not explain the gradient: {why}", batch.drawn)
    return Guess(x, y, float((own - target).square().sum()), batch.drawn)


def _unexplained(task: Task, own: Tensor, target: Tensor) -> float:
    """Squared sine of the angle between two gradients, for the tensor where it is largest.

    A common factor, for example from a clip, has no effect. Tensors are compared one by one, because the last layer
    often outweighs the first.
    """
    shares = []
    for explained, received in zip(task.layout.split(own.double()), task.layout.split(target.double()), strict=True):
        scale = explained.square().sum() * received.square().sum()
        equal = float(torch.equal(explained, received))
        shares.append(float((explained * received).sum().square() / scale) if scale > 0 else equal)
    return 1 - min(shares)


def _labels(tensors: Sequence[Tensor], received: Sequence[Tensor], x: Tensor) -> Tensor:
    """[b] int64: the label of each input x [b, n] behind a dense stack whose tensors received these gradients.

    The last layer's gradient is the sum over the images of p - [y = i] times the layer's input h, which is known. This
    is a linear system for the p - [y = i] of each image, up to a factor; the one negative entry is at the label.
    """
    h = x
    for weight, bias in zip(tensors[:-2:2], tensors[1:-2:2], strict=True):
        h = relu(linear(h, weight, bias))
    inputs = torch.cat([h, h.new_ones(len(h), 1)], dim=1)
    rows = torch.cat([received[-2], received[-1][:, None]], dim=1)
    # gelsd, because the h of images that a layer does not separate are linearly dependent
    errors: Tensor = torch.linalg.lstsq(inputs.T, rows.T, driver="gelsd").solution
    return errors.argmin(dim=1)


class _FirstLayer(NamedTuple):
    """The known tensors of a dense layer before a ReLU; float64, finite.

    Attributes:
        weight, bias: [m, n] and [m], the model's tensors.
        of_weight, of_bias: their gradients, up to one common factor.
    """

    weight: Tensor
    bias: Tensor
    of_weight: Tensor
    of_bias: Tensor


class _Found(NamedTuple):
    """x: [b, n] float64; contradictions: number of slopes that contradict their unit's input; drawn: sets of rows."""

    x: Tensor
    contradictions: int
    drawn: int


class _Evidence(NamedTuple):
    """[k, live]: whether a slope is zero up to noise, and whether it is nonzero; if neither, it is undecided."""

    none: Tensor
    some: Tensor


class _Batch(NamedTuple):
    """columns: [b, b], whose rows are columns of M up to a factor; contradictions: maximal if M has no inverse."""

    columns: Tensor
    contradictions: int


def _find(layer: _FirstLayer, images: int, samples: int, key: Key) -> _Found:
    """The batch with the fewest contradictions; the search ends at a batch with none, or after `samples` sets of rows.

    Args:
        images: b, the number of images.
        samples: at least 1.
        key: draws the rows.

    Guarantees:
        The inputs are finite.

    Raises:
        Unsolvable: the weight's gradient does not have b directions above its noise, or no b candidates were found.
    """
    factors = _factor(layer, images)
    # 64 expected hits for an image that activates half of the units
    drawn, size = 0, min(_ROUND, 64 << images)
    pool, best = torch.empty(0, images, dtype=torch.float64), None
    while drawn < samples and (best is None or best.contradictions):
        size = min(size, samples - drawn)
        for start in range(0, size, _DRAWN):
            count = min(_DRAWN, size - start)
            pool = factors.distinct(torch.cat([pool, factors.refine(factors.draw(count, key.child(drawn)))]), _POOL)
            drawn += count
            best = _better(best, factors.assemble(pool))
            if best is not None and best.contradictions == 0:
                break
        else:
            best = _better(best, factors.complete(pool))
            size = drawn
    # the rows of a draw alone give each candidate b - 1 zeros
    if best is not None and (images == 1 or int(factors.zeros(best.columns).sum()) >= images**2):
        x = factors.solve(best.columns[None])[0] @ (factors.values[:, None] * factors.right)
        if bool(x.isfinite().all()):
            return _Found(x, best.contradictions, drawn)
    raise Unsolvable(f"did not find {images} images in {drawn} draws: {_FEW}; use map instead")


def _unit(rows: Tensor) -> Tensor:
    norms: Tensor = rows.norm(dim=-1, keepdim=True)
    return rows / norms


def _replaced(rows: Tensor, i: int, others: Tensor) -> Tensor:
    """[k, *rows.shape]: one copy of `rows` for each of `others`, which replaces row i."""
    copies = rows.repeat(len(others), 1, 1)
    copies[:, i] = others
    return copies


def _better(*batches: _Batch | None) -> _Batch | None:
    """The batch with the fewest contradictions; the first batch if equal."""
    return min((batch for batch in batches if batch), key=lambda batch: batch.contradictions, default=None)


def _factor(layer: _FirstLayer, images: int) -> _Factors:
    """The checked singular value decomposition, with each row's noise measured in the part beyond rank b."""
    gradient = layer.of_weight
    units, inputs = gradient.shape
    if images > min(units, inputs):
        needed = f"expected at least {images} units and {images} inputs of the first layer for {images} images"
        raise Unsolvable(f"{needed}, got {units} units and {inputs} inputs; use map instead")
    left, values, right = svd(gradient, full_matrices=False)
    floor = _ROUNDING * values[0]
    beyond = torch.maximum(values[images], floor) if len(values) > images else floor
    rank = int((values[:images] > _CLEAR * beyond).sum())
    if rank < images:
        noisy = bool(beyond > 1e3 * floor)
        why = "too much noise; use map instead" if noisy else "two images are alike, or one has no gradient"
        raise Unsolvable(f"expected {images} directions of the gradient above its noise, got {rank}: {why}")
    left, values, right = left[:, :images], values[:images], right[:images]
    rest = gradient - (left * values) @ right
    noise = (rest.square().sum(1) / max(inputs - images, 1)).sqrt()
    noise = noise.maximum(_ROUNDING * gradient.square().mean(1).sqrt())
    live = (left * values).norm(dim=1) > _CLEAR * math.sqrt(images) * noise
    if int(live.sum()) < images:
        raise Unsolvable(f"expected at least {images} units of the first layer with a gradient, got {int(live.sum())}")
    total, scores = left.T @ layer.of_bias, (values[:, None] * right) @ layer.weight.T
    dead = scores[:, ~live], layer.bias[~live]
    return _Factors(left[live], values, right, noise[live], total, scores[:, live], layer.bias[live], *dead)


@dataclass(frozen=True, eq=False)
class _Factors:
    """A factored gradient. Candidates are unit rows q [k, b], which are columns of M up to a factor.

    Attributes:
        left, values, right: [live, b], [b], [b, n]; rows of units without a gradient are left out.
        noise: [live], standard deviation of an entry in a unit's row of the gradient.
        total: [b], M 1, because the bias's gradient is D^T 1.
        scores, bias: [b, live] and [live]; scores are M X W^T.
        dead_scores, dead_bias: [b, m - live] and [m - live].
    """

    left: Tensor
    values: Tensor
    right: Tensor
    noise: Tensor
    total: Tensor
    scores: Tensor
    bias: Tensor
    dead_scores: Tensor
    dead_bias: Tensor

    def blur(self, q: Tensor) -> Tensor:
        """[k, live]: noise of each slope, as a share of the root mean square of the candidate's slopes."""
        return self.spread(q) * self.noise * math.sqrt(len(self.left))

    def spread(self, q: Tensor) -> Tensor:
        """[k, 1]: factor by which a candidate magnifies noise."""
        norms: Tensor = (q / self.values).norm(dim=1, keepdim=True)
        return norms

    def assemble(self, pool: Tensor) -> _Batch | None:
        """The sparsest batch from a pool of candidates; None without b independent candidates."""
        chosen, _ = self.basis(pool, len(self.values))
        if len(chosen) < len(self.values):
            return None
        columns = pool[chosen]
        return _Batch(columns, int(self.contradictions(columns[None], self.evidence(columns))[0]))

    def complete(self, pool: Tensor) -> _Batch | None:
        """The sparsest batch after exchanges with the pool, then with candidates derived from the batch itself."""
        batch = self.assemble(pool)
        if batch is not None and batch.contradictions:
            batch = self.exchange(batch, pool)
        if batch is not None and batch.contradictions:
            batch = self.exchange(batch, self.rescaled(batch.columns))
        return batch

    def zeros(self, q: Tensor) -> Tensor:
        """[k, live]: whether a slope counts as zero: below the geometric mean of noise and signal.

        A candidate from few rows magnifies noise by an unknown factor, but a smaller threshold has fewer slopes below
        it by chance.
        """
        scaled = q * (len(self.left) ** 0.25 / self.spread(q).sqrt())
        shares: Tensor = scaled @ (self.left / self.noise[:, None].sqrt()).T
        return shares.abs() < 1

    def draw(self, size: int, key: Key) -> Tensor:
        """[k, b]: candidates from `size` sets of b - 1 rows; only candidates with at least b - 1 zeros."""
        units, images = self.left.shape
        picked = torch.from_numpy(rng.integers(key, size * (images - 1), units)).reshape(size, images - 1)
        rows = _unit(self.left[picked])
        # a unit drawn twice makes a singular system, which gives no candidate
        solution, singular = solve_ex(rows[:, :, :-1], -rows[:, :, -1])
        q = torch.cat([solution, solution.new_ones(size, 1)], dim=1)
        q = _unit(q[(singular == 0) & q.isfinite().all(dim=1)])
        return q[self.zeros(q).sum(dim=1) >= images - 1]

    def refine(self, q: Tensor) -> Tensor:
        q = self.distinct(q, _REFINED)
        for _ in range(2):
            q = self.fit(self.zeros(q))
        return q

    def fit(self, zeros: Tensor) -> Tensor:
        """[k, b]: candidates with the smallest slopes, in units of noise, at `zeros` [k, live]."""
        if not len(zeros):
            return self.left.new_empty(0, len(self.values))
        rows = self.left * self.values / self.noise[:, None]
        return _unit(svd(rows * zeros[:, :, None], full_matrices=False).Vh[:, -1] * self.values)

    def distinct(self, q: Tensor, most: int) -> Tensor:
        """At most `most` different candidates, sorted by decreasing number of zeros.

        Combinations of sparser candidates come last: two images with common zeros make many combinations, which would
        displace other candidates.
        """
        if not len(q):
            return q
        zeros = self.zeros(q)
        # equal sums of these numbers mean equal zeros; sorting sums is faster than sorting rows
        sums = zeros.double() @ torch.arange(zeros.shape[1], dtype=torch.float64).cos()
        _, group = torch.unique(sums, return_inverse=True)
        # the first of each group, in the original order
        first = torch.full((int(group.max()) + 1,), len(q)).scatter_reduce(0, group, torch.arange(len(q)), "amin")
        q = q[first[zeros[first].sum(dim=1).argsort(descending=True, stable=True)]]
        chosen, free = self.basis(q, len(self.values) - 1)
        free[chosen] = True
        q = q[(~free).long().argsort(stable=True)[: 4 * most]]
        sine = (1 - (q @ q.T).square()).clamp(min=0).sqrt()
        repeats = torch.tril(sine < self.resolution(q)[:, None], -1).any(dim=1)
        return q[~repeats][:most]

    def resolution(self, q: Tensor) -> Tensor:
        """[k]: sine of the angle below which candidates count as equal; see `zeros`."""
        return self.blur(q).mean(dim=1).sqrt()

    def basis(self, q: Tensor, size: int) -> tuple[list[int], Tensor]:
        """At most `size` independent candidates with the most zeros; and [k], which candidates do not depend on these.

        The greedy choice is optimal, because independent sets are a matroid.
        """
        count, limit, left = self.zeros(q).sum(dim=1), self.resolution(q), q
        chosen: list[int] = []
        free = torch.ones(len(q), dtype=torch.bool)
        while len(chosen) < size and bool(free.any()):
            chosen.append(int(torch.where(free, count, -1).argmax()))
            unit = _unit(left[chosen[-1]])
            left = left - (left @ unit)[:, None] * unit
            free = left.norm(dim=1) > limit
        return chosen, free

    def solve(self, columns: Tensor) -> Tensor:
        """[k, b, b]: inverses of M from its columns [k, b, b] up to factors; not finite if M has no inverse."""
        inverse, singular = inv_ex(columns.transpose(1, 2))
        inverse = inverse / (inverse @ self.total)[:, :, None]
        return torch.where((singular == 0)[:, None, None], inverse, torch.nan)

    def evidence(self, q: Tensor) -> _Evidence:
        slopes, blur = (q @ self.left.T).abs() * math.sqrt(len(self.left)), self.blur(q)
        return _Evidence(slopes < _CLEAR * blur, slopes > blur.sqrt())

    def contradictions(self, columns: Tensor, evidence: _Evidence) -> Tensor:
        """[k]: number of slopes of batches [k, b, b] that contradict their unit's input; maximal if M has no inverse.

        A slope is nonzero at a positive input, and zero at any other input.
        """
        inverse = self.solve(columns)
        active = inverse @ self.scores + self.bias > 0
        wrong = torch.where(active, evidence.none, evidence.some).sum(dim=(1, 2))
        wrong += (inverse @ self.dead_scores + self.dead_bias > 0).sum(dim=(1, 2))
        worst = len(self.values) * (len(self.bias) + len(self.dead_bias))
        return torch.where(inverse.isfinite().all(dim=2).all(dim=1), wrong, worst)

    def exchange(self, batch: _Batch, pool: Tensor) -> _Batch:
        """The batch after `_PASSES` passes that exchange each candidate for the best of a pool, if this helps."""
        of_pool = self.evidence(pool)
        for i in list(range(len(self.values))) * (_PASSES if len(pool) else 0):
            own = self.evidence(batch.columns)
            tried = _replaced(batch.columns, i, pool)
            evidence = _Evidence(_replaced(own.none, i, of_pool.none), _replaced(own.some, i, of_pool.some))
            wrong = self.contradictions(tried, evidence)
            if int(wrong.min()) < batch.contradictions:
                batch = _Batch(tried[wrong.argmin()], int(wrong.min()))
        return batch

    def rescaled(self, columns: Tensor) -> Tensor:
        """[k, b]: candidates for images that are right up to a factor.

        Row i of M^-1 is orthogonal to all columns except the i-th: if only one candidate is wrong, its image is right
        up to a factor. With the factor, the image determines the units that it activates, and these units determine the
        candidate.
        """
        inverse = self.solve(columns[None])[0]
        if not bool(inverse.isfinite().all()):
            return columns[:0]
        factors = torch.logspace(-1.5, 1.5, _SCALES, dtype=torch.float64)
        factors = torch.cat([factors, -factors])
        inactive = factors[:, None, None] * (inverse @ self.scores) + self.bias <= 0
        masks = torch.unique(inactive.reshape(-1, len(self.bias)), dim=0)
        return self.fit(masks[masks.sum(dim=1) >= len(self.values) - 1])

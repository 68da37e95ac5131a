"""Gradient inversion: our attacks compared with the usual loops, and the contribution of each part.

Photographs from scikit-image behind the LeNet of DLG, one image per victim, one thread. Times are processor seconds,
which depend less on other work on the machine than wall-clock seconds. The exit code is 1 if a bar is missed.

    python benchmarks/inversion.py [--part NAME] [--images N] [--classes N ...] [--runs N] [--evaluations N] [--gpu]
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from _label_shares import labels
from _loops import OUTER, LeNet, Matching, dlg, idlg
from _victims import Quality, Victims, judge, observed, photographs, sent
from torch import Tensor
from torch.nn.functional import one_hot

from leakgauge.attacks._engine.matching import Function, SquaredDistance, evaluator
from leakgauge.attacks._search.lbfgs import Stop, minimize
from leakgauge.harness.core import rng, stats
from leakgauge.harness.core.cell import Scalar
from leakgauge.harness.core.contract import Attack, Guess, Observation, Reconstruction
from leakgauge.harness.core.rng import Key
from leakgauge.harness.federation import registry

KEY = Key(2024, ("inversion",))
REPEATS = 30
CLOSED_MODELS, CLOSED_IMAGES = 4, 8
AWARE_CLASSES, AWARE_IMAGES = 100, 16
"""100 classes, as in the originals; the noise and the steps below were chosen for 100 classes. With the data's own 8
classes, gradient entries are about three times larger, and the same noise hides less.
"""


class Bar(NamedTuple):
    """A value that must be at least `least`."""

    name: str
    value: float
    least: float

    @property
    def missed(self) -> bool:
        """Whether the value is below `least` or NaN."""
        return not self.value >= self.least


class Row(NamedTuple):
    """One method on n images: seconds per reconstruction (one entry if all ran at once), and all evaluations."""

    seconds: tuple[float, ...]
    evaluations: int
    quality: Quality

    @property
    def mean(self) -> float:
        """Mean seconds per reconstruction."""
        return statistics.fmean(self.seconds)


class Case(NamedTuple):
    """A defense with parameters, and the mean SSIM that the defense-aware attack must reach."""

    title: str
    name: str
    parameters: dict[str, Scalar]
    least: float


def _quantizer(step: float) -> dict[str, Scalar]:
    """Parameters that make `jopeq` a dithered quantizer with one step for all coordinates and no noise.

    `sdq` has one step per tensor, a multiple of that tensor's own spread. These parameters use a public unit, do not
    clip entries up to 8, and have levels over a wider range. At this epsilon, the quantization error alone exceeds the
    required noise.
    """
    clip, bits = 8.0, 10
    return {
        "scale": "public",
        "clip": clip,
        "bits": bits,
        "gamma": step / clip * (2**bits + 1) / 2,
        "epsilon": 1e9,
    }


CASES = (
    Case("normal noise 0.01", "gaussian", {"clip": 1000.0, "noise_std": 0.01}, 0.70),
    Case("quantizer, step 0.05", "jopeq", _quantizer(0.05), 0.62),
    Case("quantizer, step 0.2", "jopeq", _quantizer(0.2), 0.33),
    Case("random 10 % of entries", "random-mask", {"share": 0.1}, 0.16),
)


def attack(name: str, parameters: dict[str, Scalar] | None = None, evaluations: int | None = None) -> Any:
    """The attack `name`; `evaluations` None: the attack's default."""
    return registry.build("attack", name, {**(parameters or {}), "evaluations": evaluations})


def undefended(victims: Victims) -> Observation:
    """The server's observation of the victims without a defense."""
    return observed(victims, registry.build("defense", "none", {}), KEY.child("clients"))


def loop(victims: Victims, model: LeNet, joint: bool, outer: int, number: int) -> Guess:
    """Run the usual loop on one victim."""
    x, y = victims.x[number : number + 1], victims.y[number : number + 1]
    target, key = model.gradient(x, y), KEY.child("start", number)
    start = rng.normal(key.child("inputs"), tuple(x.shape))
    if joint:
        return dlg(model, target, start, rng.normal(key.child("labels"), (1, victims.task.classes)), outer=outer)
    return idlg(model, target, start, outer=outer)


def ours(one: Attack, seen: Observation, number: int) -> Guess:
    """Run our attack on one victim."""
    assert seen.messages is not None
    alone = dataclasses.replace(seen, messages=seen.messages[number : number + 1])
    found = one.run(alone, KEY.child("attack"))
    assert isinstance(found, Reconstruction)
    return found.guesses[0]


def seconds_of(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result of `work`, and its processor seconds."""
    start = time.process_time()
    done = work()
    return done, time.process_time() - start


def reconstructions(images: int, classes: int, outer: int = OUTER, evaluations: int | None = None) -> list[Bar]:
    """Run loops and attacks alternately on one victim at a time, then our attacks on all victims at once.

    Args:
        outer: optimizer calls of the loops.
        evaluations: evaluations of our searches; None: their defaults.
    """
    victims = photographs(images, classes, KEY.child("loops", classes))
    model, seen = LeNet(victims.task.model, victims.params), undefended(victims)
    attacks = {"analytic": attack("analytic")}
    # one start per attack, as in the loops
    attacks |= {name: attack(name, {"restarts": 1}, evaluations) for name in ("idlg", "dlg", "inverting-gradients")}
    ways: dict[str, Callable[[int], Guess]] = {
        "usual loop, iDLG": partial(loop, victims, model, False, outer),
        "usual loop, DLG": partial(loop, victims, model, True, outer),
        **{name: partial(ours, one, seen) for name, one in attacks.items()},
    }
    done: dict[str, list[tuple[Guess, float]]] = {name: [] for name in ways}
    for number in range(images):
        print(f"image {number + 1} of {images}, one method after the other", file=sys.stderr)
        for name, way in ways.items():
            done[name].append(seconds_of(partial(way, number)))
    rows = {name: _row(victims, [g for g, _ in runs], [s for _, s in runs]) for name, runs in done.items()}
    for name, one in attacks.items():
        found, seconds = seconds_of(partial(one.run, seen, KEY.child("attack")))
        rows[f"{name}, at once"] = _row(victims, found.guesses, [seconds / images])
    print(f"\n{images} photographs, {classes} classes, no defense; 'at once': all victims in one run")
    print(
        f"{'':<30}{'s mean':>8}{'median':>8}{'evals':>7}{'ms each':>8}{'MSE':>9}{'SSIM':>7}"
        f"{'recovered':>10}{'exact':>6}{'failed':>7}{'labels':>7}"
    )
    for name, row in rows.items():
        _print_row(name, row, images)
    return _speed_bars(rows, classes)


def _row(victims: Victims, guesses: Sequence[Guess], seconds: Sequence[float]) -> Row:
    """The row of a method, from its guesses and seconds."""
    return Row(tuple(seconds), sum(guess.evaluations for guess in guesses), judge(victims, guesses))


def _print_row(name: str, row: Row, images: int) -> None:
    """One line of the table."""
    q = row.quality
    median = f"{statistics.median(row.seconds):8.2f}" if len(row.seconds) > 1 else f"{'':8}"
    each = 1000 * row.mean * images / row.evaluations
    print(
        f"{name:<30}{row.mean:8.2f}{median}{row.evaluations / images:7.0f}{each:8.2f}{q.mse:9.1e}{q.ssim:7.3f}"
        f"{q.recovered:10}{q.exact:6}{q.failed:7}{q.labels:7}",
        flush=True,
    )


def _speed_bars(rows: dict[str, Row], classes: int) -> list[Bar]:
    """Speed and recovered images relative to the loops; our attacks run on all victims at once, as in a study."""
    bars = []
    for name, usual, times in (("analytic", "iDLG", 30.0), ("idlg", "iDLG", 6.0), ("dlg", "DLG", 6.0)):
        own, theirs = rows[f"{name}, at once"], rows[f"usual loop, {usual}"]
        bars.append(Bar(f"{name} against the loop, {classes} classes: times faster", theirs.mean / own.mean, times))
        more = own.quality.recovered - theirs.quality.recovered
        bars.append(Bar(f"{name} against the loop, {classes} classes: more recovered", more, 0.0))
    return bars


def engine(images: int, classes: int) -> list[Bar]:
    """Compare one evaluation of the loop per image with one of ours, interleaved and without the optimizers."""
    bars = []
    print(f"\none evaluation per image, {classes} classes: {'images':>7}{'loop ms':>9}{'ours ms':>9}{'ratio':>7}")
    for joint in (False, True):
        for n in (1, images):
            theirs, own = _evaluations(n, classes, joint)
            ratio = statistics.median(a / b for a, b in zip(theirs, own, strict=True))
            label = "soft labels" if joint else "known labels"
            print(
                f"{label:>38} {n:6}{1e3 * statistics.median(theirs):9.2f}{1e3 * statistics.median(own):9.2f}"
                f"{ratio:7.2f}",
                flush=True,
            )
        bars.append(Bar(f"an evaluation with {label}, {classes} classes: times cheaper", ratio, 1 / 0.12))
    return bars


def _evaluations(images: int, classes: int, joint: bool) -> tuple[list[float], list[float]]:
    """Seconds per evaluation and image, of the loop and of ours, interleaved."""
    victims = photographs(images, classes, KEY.child("engine"))
    model = LeNet(victims.task.model, victims.params)
    start = rng.normal(KEY.child("engine", "inputs"), tuple(victims.x.shape))
    logits = rng.normal(KEY.child("engine", "labels"), (images, classes))
    closures = [
        Matching(model, model.gradient(x[None], y[None]), dummy[None], soft[None] if joint else y[None])
        for x, y, dummy, soft in zip(victims.x, victims.y, start, logits, strict=True)
    ]
    known = None if joint else one_hot(victims.y, classes).float()[:, None]
    function = evaluator(victims.task, victims.params, SquaredDistance(sent(victims)), images=1, labels=known)
    candidates = torch.cat([start.flatten(1), logits], 1) if joint else start.flatten(1)
    ways: tuple[Callable[[], Any], ...] = (
        partial(_all, closures),
        partial(function, candidates, torch.arange(images)),
    )
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(REPEATS + 1):
        for taken, work in zip(times, ways, strict=True):
            _, seconds = seconds_of(work)
            if repeat:  # the first run warms up
                taken.append(seconds / images)
    return times


def _all(closures: Sequence[Callable[[], Any]]) -> None:
    """Evaluate each closure once."""
    for closure in closures:
        closure()


def closed(models: int, images: int, classes: int) -> list[Bar]:
    """Run the closed form on several fresh models."""
    qualities = []
    seconds = 0.0
    for number in range(models):
        victims = photographs(images, classes, KEY.child("closed", classes, number))
        found, taken = seconds_of(partial(attack("analytic").run, undefended(victims), KEY.child("attack")))
        qualities.append(judge(victims, found.guesses))
        seconds += taken
    n, exact = models * images, sum(quality.exact for quality in qualities)
    worst = min(min(quality.each_ssim) for quality in qualities)
    print(
        f"\nclosed form, {classes} classes, {models} models of {images} images: {exact} of {n} at SSIM >= 0.999, the "
        f"lowest {worst:.6f}; {seconds / n:.2f} s per reconstruction, including the models",
        flush=True,
    )
    return [Bar(f"closed form, {classes} classes: exact of {n}", exact, n - n // 32)]


def finite(runs: int, evaluations: int, classes: Sequence[int]) -> list[Bar]:
    """Run `idlg` on `runs` models, images and starts, alternating over the numbers of classes."""
    qualities = []
    for run in range(runs):
        victims = photographs(1, classes[run % len(classes)], KEY.child("finite", run))
        found = attack("idlg", {"restarts": 1}, evaluations).run(undefended(victims), KEY.child("finite", run))
        qualities.append(judge(victims, found.guesses))
    infinite, failed, recovered = (
        sum(getattr(q, name) for q in qualities) for name in ("infinite", "failed", "recovered")
    )
    print(
        f"\nidlg, {runs} models, images and starts, one start and at most {evaluations} evaluations each: {infinite} "
        f"not finite, {failed - infinite} more above MSE 1, {recovered} recovered",
        flush=True,
    )
    return [Bar(f"idlg: finite of {runs}", runs - infinite, runs)]


def aware(images: int, cases: Sequence[Case], evaluations: int | None = None) -> list[Bar]:
    """Compare the defense-aware attack, the same prior without the defense, an attack without both, and the floors.

    evaluations: evaluations of the searches; None: their defaults.
    """
    victims = photographs(images, AWARE_CLASSES, KEY.child("aware"))
    attacks = {
        "knows": attack("map", evaluations=evaluations),
        "same prior": attack("map", {"objective": "l2"}, evaluations),
        "idlg": attack("idlg", {"restarts": 1}, evaluations),
        "mean": attack("prior"),
        "other": attack("prior", {"guess": "other"}),
    }
    spread = float(sent(victims).square().mean(1).sqrt().median())
    print(
        f"\nmean SSIM of {images} photographs with 95 % interval; {AWARE_CLASSES} classes, gradient entries "
        f"{spread:.3f} (rms, median image)\n{'':<24}" + "".join(f"{name:>22}" for name in attacks)
    )
    bars = []
    for case in cases:
        seen = observed(victims, registry.build("defense", case.name, case.parameters), KEY.child("aware", "clients"))
        print(f"{case.title:<24}", end="", flush=True)
        for name, one in attacks.items():
            ssim = judge(victims, one.run(seen, KEY.child("attack")).guesses).each_ssim
            estimate = stats.mean(name, ssim)
            print(f"{estimate.value:8.3f} [{estimate.low:5.3f}, {estimate.high:5.3f}]", end="", flush=True)
            if name == "knows":
                bars.append(Bar(f"{case.title}: mean SSIM", statistics.fmean(ssim), case.least))
        print()
    return bars


def many(count: int, evaluations: int, device: str) -> float:
    """Reconstructions per second for `count` victims in one batch; labels known, 100 classes."""
    victims = photographs(count, 100, KEY.child("many"))
    targets: Tensor = sent(victims).to(device)
    known = one_hot(victims.y, 100).float()[:, None].to(device)
    function: Function = evaluator(
        victims.task, victims.params.to(device), SquaredDistance(targets), images=1, labels=known
    )
    start = rng.normal(KEY.child("many", "inputs"), tuple(victims.x.shape)).flatten(1).to(device)
    began = time.perf_counter()
    found = minimize(function, start, Stop(evaluations, 3e-9 * targets.square().sum(1)))
    x = found.x.cpu().reshape(victims.x.shape)  # waits for the device
    seconds = time.perf_counter() - began
    guesses = [
        Guess(image[None], label[None], float(value), int(used))
        for image, label, value, used in zip(x, victims.y, found.value, found.evaluations, strict=True)
    ]
    recovered = judge(victims, guesses).recovered
    print(f"\n{count} at once on {device}: {count / seconds:.2f} reconstructions per second, {recovered} recovered")
    return count / seconds


def main(arguments: Sequence[str]) -> int:
    """Print the tables; return 1 if a bar is missed."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description="Gradient inversion against the usual loops.")
    parts = ("loops", "engine", "closed", "finite", "labels", "aware")
    parser.add_argument("--part", choices=(*parts, "all"), default="all")
    parser.add_argument("--images", type=int, default=8, help="number of images of the loops and the engine")
    parser.add_argument("--classes", type=int, nargs="+", default=[8, 100], help="numbers of classes")
    parser.add_argument("--runs", type=int, default=100, help="number of runs of idlg; all must be finite")
    parser.add_argument("--evaluations", type=int, default=600, help="evaluations per run of idlg")
    parser.add_argument("--gpu", action="store_true", help="run only 512 victims at once on a CUDA device")
    options = parser.parse_args(arguments)
    if min(options.images, options.runs, options.evaluations) < 1:
        parser.error("expected at least 1 image, run and evaluation")
    if options.gpu:
        if not torch.cuda.is_available():
            print("expected a CUDA device, got none")
            return 1
        torch.backends.cudnn.allow_tf32 = False  # its 10 bits stop a search long before the image is found
        many(512, 6000, "cuda")
        return 0
    chosen = parts if options.part == "all" else (options.part,)
    return _verdict([bar for part in chosen for bar in _run(part, options)])


def _run(part: str, options: argparse.Namespace) -> list[Bar]:
    """Print one part and return its bars."""
    if part == "finite":
        return finite(options.runs, options.evaluations, options.classes)
    if part == "labels":
        labels(KEY.child("labels"))
        return []
    if part == "aware":
        return aware(AWARE_IMAGES, CASES)
    by_classes: dict[str, Callable[[int], list[Bar]]] = {
        "loops": lambda classes: reconstructions(options.images, classes),
        "engine": lambda classes: engine(options.images, classes),
        "closed": lambda classes: closed(CLOSED_MODELS, CLOSED_IMAGES, classes),
    }
    return [bar for classes in options.classes for bar in by_classes[part](classes)]


def _verdict(bars: Sequence[Bar]) -> int:
    """Print the bars; return 1 if one is missed."""
    print()
    for bar in bars:
        print(f"{bar.name:<62}{bar.value:9.2f}  bar {bar.least:.3g}{'  MISSED' if bar.missed else ''}")
    missed = [bar.name for bar in bars if bar.missed]
    print(f"{len(missed)} bars missed: {'; '.join(missed) or 'none'}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""MAP compared with another project's code, `breaching` 0.1.2, on the same models, images and gradients.

Each gradient is of one CIFAR-10 test image, without a defense, behind ReLU and max-pooling: `lenet5`, fresh and after
two passes over the training images, and a fresh `cnn2`. `breaching` runs its attack `modern` with fewer iterations,
knows the label and uses standardized pixels, as in its own examples; MAP infers the label. Prints the mean SSIM with a
95 % interval and processor seconds per image, then the ratios of both. Needs `cifar10` (see README) and `breaching`:

    pip install --target PEER --no-deps breaching==0.1.2 hydra-core omegaconf antlr4-python3-runtime==4.9.3 \
        lpips tqdm pyyaml
    PYTHONPATH=PEER python benchmarks/peer.py [FOLDER] [--images 16] [--iterations 400]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from _victims import Victims, judge, observed, opened, sent
from torch import Tensor, nn

from leakgauge.attacks.map import MAP
from leakgauge.attacks.prior import Prior
from leakgauge.defenses.none import NoDefense
from leakgauge.harness.core.contract import Attack, Guess
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import mean_interval
from leakgauge.harness.data.torchvision_shim import torchvision
from leakgauge.harness.learn.batch import LocalPlan, Work, train_clients
from leakgauge.harness.learn.layers import Conv, Dense, Flatten, Relu
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.prior import gaussian_prior
from leakgauge.harness.learn.tasks import ModelTask

FIRST = 200
"""The first attacked test image; earlier images were used for other choices."""

TRAINING = LocalPlan(gradient=False, steps=None, epochs=2, batch=32, lr=0.02, momentum=0.9)
MODELS = (("lenet5", True), ("lenet5", False), ("cnn2", False))


class Standardized(nn.Module):
    """A chain of layers as a module on standardized pixels, with the same parameters in the same order."""

    def __init__(self, task: ModelTask, params: Tensor, middle: Tensor, spread: Tensor) -> None:
        super().__init__()
        assert task.structure is not None
        self.middle, self.spread = middle[:, None, None], spread[:, None, None]
        self.layers = nn.Sequential(*map(module, task.structure.layers))
        nn.utils.vector_to_parameters(params, self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        """[b, classes] scores of standardized x [b, c, h, w]."""
        scores: Tensor = self.layers(x * self.spread + self.middle)
        return scores


def module(layer: Any) -> nn.Module:
    """One of our layers as a torch module."""
    if isinstance(layer, Conv):
        return nn.Conv2d(layer.inputs, layer.outputs, layer.kernel, layer.stride, layer.padding)
    if isinstance(layer, Dense):
        return nn.Linear(layer.inputs, layer.outputs)
    return nn.Flatten() if isinstance(layer, Flatten) else nn.ReLU() if isinstance(layer, Relu) else nn.MaxPool2d(2)


def theirs(victims: Victims, gradients: Tensor, images: Tensor, iterations: int) -> list[Guess]:
    """The guesses of `breaching`; pixels are standardized with the mean and deviation of `images`."""
    torchvision()  # `breaching` imports torchvision, which needs our declarations with a torch without CUDA
    import breaching

    middle, spread = images.mean((0, 2, 3)), images.std((0, 2, 3))
    config = breaching.get_attack_config("modern", [f"optim.max_iterations={iterations}", "optim.callback=100000"])
    network = Standardized(victims.task, victims.params, middle, spread)
    setup = {"dtype": torch.float, "device": torch.device("cpu")}
    guesses = []
    for number, (gradient, label) in enumerate(zip(gradients, victims.y, strict=True)):
        torch.manual_seed(number)  # noqa: TID251  # `breaching` draws from the global generator
        attacker = breaching.attacks.prepare_attack(network, nn.CrossEntropyLoss(), config, setup)
        shape = tuple(victims.x.shape[1:])
        about = SimpleNamespace(shape=shape, mean=middle, std=spread, classes=victims.task.classes, modality="vision")
        server = [{"parameters": list(network.parameters()), "buffers": list(network.buffers()), "metadata": about}]
        parts = list(torch.split(gradient, [one.numel() for one in network.parameters()]))
        parts = [part.view_as(one) for part, one in zip(parts, network.parameters(), strict=True)]
        told = {"num_data_points": 1, "labels": label[None], "local_hyperparams": None}
        found, _ = attacker.reconstruct(server, [{"gradients": parts, "buffers": None, "metadata": told}], {})
        x = found["data"].detach() * spread[:, None, None] + middle[:, None, None]
        guesses.append(Guess(x, label[None], 0.0, iterations))
    return guesses


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=400)
    given, data, x, y, auxiliary = opened(parser, FIRST)
    attacks: dict[str, Attack] = {"floor": Prior(), "map": MAP()}
    gaussian_prior(auxiliary.x, MAP().box)  # cached, so that no attack's time includes it
    for name, trained in MODELS:
        victims = fresh(name, x, y)
        if trained:
            update = train_clients(victims.task, victims.params, [Work(data.train, Key(4))], TRAINING, "loop").updates
            victims = victims._replace(params=victims.params + update[0])
        seen = replace(observed(victims, NoDefense(), Key(6)), auxiliary=auxiliary)
        right = (victims.task.outputs(victims.params, data.test.x).argmax(1) == data.test.y).float().mean()
        print(f"{name}, {'trained' if trained else 'fresh'}, accuracy {float(right):.3f}", flush=True)
        rows = {}
        for who in (*attacks, "breaching"):
            start = time.process_time()
            if who == "breaching":
                guesses = theirs(victims, sent(victims), auxiliary.x, given.iterations)
            else:
                guesses = list(attacks[who].run(seen, Key(7)).guesses)  # type: ignore[union-attr]
            seconds, quality = (time.process_time() - start) / len(y), judge(victims, guesses)
            low, high = mean_interval(quality.each_ssim)
            rows[who] = quality.ssim, seconds
            text = f"SSIM {quality.ssim:.3f} ({low:.3f} to {high:.3f}), labels {quality.labels}, {seconds:.2f} s"
            print(f"    {who:<10} {text}", flush=True)
        ours, peers = rows["map"], rows["breaching"]
        print(f"    ratio: SSIM {ours[0] / peers[0]:.2f}, seconds {ours[1] / peers[1]:.2f}", flush=True)


def fresh(name: str, x: Tensor, y: Tensor) -> Victims:
    """The images behind a fresh model."""
    task = ModelTask(build(name, tuple(x.shape[1:]), 10))
    return Victims(task, task.init(Key(5)), x, y)


if __name__ == "__main__":
    main()

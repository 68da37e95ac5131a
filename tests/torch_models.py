"""The architectures as torch modules, for images of 3 x 32 x 32 pixels in ten classes."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn


def _groups(channels: int) -> nn.Module:
    return nn.GroupNorm(2, channels)


class Block(nn.Module):
    """A residual block with He's option A."""

    def __init__(self, inputs: int, outputs: int, norm: Callable[[int], nn.Module] = _groups) -> None:
        super().__init__()
        self.stride = 1 if inputs == outputs else 2
        self.inner = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, self.stride, 1, bias=False),
            norm(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            norm(outputs),
        )
        self.new = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, :, :: self.stride, :: self.stride]
        zeros = rows.new_zeros(len(x), self.new, *rows.shape[2:])
        return torch.relu(self.inner(x) + torch.cat([rows, zeros], 1))


class Drop(nn.Module):
    """Dropout with a given mask."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


def _resnet(depth: int, norm: Callable[[int], nn.Module] = _groups) -> list[nn.Module]:
    widths = [16] * (depth // 6) + [32] * (depth // 6) + [64] * (depth // 6)
    blocks = [Block(*pair, norm) for pair in zip([16, *widths], widths, strict=False)]
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), norm(16), nn.ReLU()]
    return [*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]


def cnn3(masks: list[nn.Module]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for inputs, outputs, mask in zip((3, 32, 64), (32, 64, 128), masks, strict=True):
        layers += [nn.Conv2d(inputs, outputs, 3), nn.ReLU(), nn.MaxPool2d(2), mask]
    head = [nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU()]
    return [*layers, nn.Flatten(), *head, nn.Linear(32, 10)]


TWINS = {
    "linear": [nn.Flatten(), nn.Linear(3072, 10)],
    "mlp-32": [nn.Flatten(), nn.Linear(3072, 32), nn.ReLU(), nn.Linear(32, 10)],
    "mlp-32-tanh": [nn.Flatten(), nn.Linear(3072, 32), nn.Tanh(), nn.Linear(32, 10)],
    "mlp-small": [nn.Flatten(), nn.Linear(3072, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10)],
    "mlp": [nn.Flatten(), nn.Linear(3072, 256), nn.ReLU(), nn.Linear(256, 10)],
    "cnn2": [
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(150, 50), nn.ReLU(), nn.Linear(50, 10)),
    ],
    "cnn3": cnn3([nn.Identity()] * 3),
    "lenet-dlg": [
        *(nn.Conv2d(3, 12, 5, 2, 2), nn.Sigmoid(), nn.Conv2d(12, 12, 5, 2, 2), nn.Sigmoid()),
        *(nn.Conv2d(12, 12, 5, 1, 2), nn.Sigmoid(), nn.Flatten(), nn.Linear(768, 10)),
    ],
    "lenet5": [
        *(nn.Conv2d(3, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(576, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    ],
    "cnn-udp": [nn.Conv2d(3, 16, 5, padding=4), nn.ReLU(), nn.Flatten(), nn.Linear(36 * 36 * 16, 10)],
    "resnet20": _resnet(20),
    "resnet20-bn": _resnet(20, nn.BatchNorm2d),
    "resnet110": _resnet(110),
    "svm": [nn.Flatten(), nn.Linear(3072, 10, bias=False)],
    "linear-regression": [nn.Flatten(), nn.Linear(3072, 1, bias=False)],
}


def owned(net: nn.Module) -> Iterator[Tensor]:
    """Parameters and running statistics in the order of our layout."""
    for module in net.modules():
        yield from module.parameters(recurse=False)
        yield from (buffer for name, buffer in module.named_buffers(recurse=False) if name.startswith("running_"))


def fill(net: nn.Module, params: Tensor) -> None:
    """Copy a flat vector into `owned`."""
    with torch.no_grad():
        for tensor in owned(net):
            part, params = params[: tensor.numel()], params[tensor.numel() :]
            tensor.copy_(part.view(tensor.shape))
    assert not len(params)


class Turned(nn.Module):
    """A network whose last layer was made first."""

    def __init__(self):
        super().__init__()
        self.head, self.trunk = nn.Linear(6, 10), nn.Linear(64, 6)

    def forward(self, x):
        return self.head(torch.sigmoid(self.trunk(x.flatten(1))))

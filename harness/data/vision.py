"""The benchmark image sets of torchvision, read from their files.

torchvision's own readers need unpacked, complete and writable files, and unpickle without restriction. These readers
accept packed `.gz` files and missing training batches, and a pickle can build only arrays. They search two layouts:
torchvision's (`ROOT/MNIST/raw`) and one folder per set (`ROOT/mnist/MNIST/raw`).
"""

from __future__ import annotations

import codecs
import functools
import io
import json
import pickle
import pickletools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.files import content, regular, text
from leakgauge.harness.data import DataMissing, DataSet, DataUnreadable, Source, check_unpacked, find, reading, unpacked

Bytes = npt.NDArray[np.uint8]


class Idx(NamedTuple):
    """An image set in idx files.

    Attributes:
        name, title: the name in this package, and the name of torchvision's class and folder.
        summary: one line for lists.
        starts: first part of the file names of the training and the test split.
        classes: class names, in the order of the labels.
        is_transposed: whether the files hold the images with rows and columns exchanged.
        arguments: arguments of torchvision's class in the download command.
    """

    name: str
    title: str
    summary: str
    starts: tuple[str, str] = ("train", "t10k")
    classes: tuple[str, ...] = tuple("0123456789")
    is_transposed: bool = False
    arguments: str = ""


class Cifar(NamedTuple):
    """An image set in pickled batches; `name`, `title` and `summary` as in `Idx`.

    Attributes:
        folder: folder of the files.
        train, test, meta: files of the training batches, the test batch and the class names.
        labels, label_names: keys of the labels in a batch, and of the class names in `meta`.
    """

    name: str
    title: str
    summary: str
    folder: str
    train: tuple[str, ...]
    test: str
    meta: str
    labels: str
    label_names: str


def read_idx_set(kind: Idx, root: Path) -> DataSet:
    """[n, 1, height, width] images from four idx files, packed or not.

    Raises:
        DataMissing, DataUnreadable: see `harness.data.load`.
    """
    hint = _download(kind.title, root, kind.arguments)
    folders = [root / kind.name / kind.title / "raw", root / kind.title / "raw"]
    splits = []
    for start in kind.starts:
        arrays = []
        for axes, ending in ((3, "images-idx3-ubyte"), (1, "labels-idx1-ubyte")):
            path = find(f"{kind.title} file", folders, [f"{start}-{ending}", f"{start}-{ending}.gz"], hint)
            folders = [path.parent]  # the other files must lie beside the first
            arrays.append(_read_idx(path, axes))
        images, labels = arrays
        splits.append(_examples((images.transpose(0, 2, 1) if kind.is_transposed else images)[:, None], labels))
    train, test = splits
    with reading(folders[0]):
        return DataSet(kind.name, train, test, kind.classes, public=True)


def _read_idx(path: Path, axes: int) -> Bytes:
    """The bytes of an idx file with this number of axes, in the shape that its header states."""
    with reading(path):
        data = unpacked(path)
    magic = int.from_bytes(data[:4], "big")
    # idx: two zero bytes, 8 for unsigned bytes, the number of axes; then one big-endian int32 per axis
    if len(data) < 4 * (1 + axes) or magic != 0x0800 + axes:
        raise DataUnreadable(f"cannot read {path}: expected the idx magic number {0x0800 + axes}, got {magic}")
    shape = tuple(int(size) for size in np.frombuffer(data, ">i4", axes, offset=4))
    content = np.frombuffer(data, np.uint8, offset=4 * (1 + axes))
    if content.size != np.prod(shape, dtype=np.int64):
        raise DataUnreadable(f"cannot read {path}: expected {shape} bytes after the header, got {content.size}")
    return content.reshape(shape)


def read_cifar_set(kind: Cifar, root: Path) -> DataSet:
    """[n, 3, 32, 32] images from the pickled batches; some training batches may be missing.

    Images listed in `jpeg_filled.json` beside the folder are left out: they are JPEG copies.

    Raises:
        DataMissing, DataUnreadable: see `harness.data.load`.
    """
    hint = _download(kind.title, root)
    folders = [root / kind.name / kind.folder, root / kind.folder]
    folder = find(f"{kind.title} test batch", folders, [kind.test], hint).parent
    with reading(folder):
        present = [batch for batch in kind.train if (folder / batch).exists()]
    if not present:
        raise DataMissing(f"no {kind.title} training batch: looked for {' or '.join(kind.train)} in {folder}; {hint}")
    meta = unpickle(find(f"{kind.title} class names", [folder], [kind.meta], hint))
    parts = [_read_batch(kind, folder / batch) for batch in present]
    train = Examples(torch.cat([batch.x for batch in parts]), torch.cat([batch.y for batch in parts]))
    test = _read_batch(kind, folder / kind.test)
    notes = []
    if len(present) < len(kind.train):
        notes.append(f"{len(present)} of {len(kind.train)} training batches ({', '.join(present)})")
    filled = sum(len(indices) for name, indices in _jpeg_filled(folder).items() if name in (*present, kind.test))
    if filled:
        notes.append(f"{filled} images left out: only JPEG copies exist")
    with reading(folder / kind.meta):
        classes = tuple(str(name) for name in meta[kind.label_names])
        return DataSet(kind.name, train, test, classes, public=True, note="; ".join(notes))


def unpickle(path: Path) -> dict[str, Any]:
    """The dictionary in a pickle file of Python 2 or 3.

    Raises:
        DataUnreadable: the file is not a pickle, not a dictionary, needs more than arrays and plain data, or may unpack
            to billions of entries because it uses parts of it again.
    """
    with reading(path):
        packed = content(path)
        again = sum(kind.name in ("GET", "BINGET", "LONG_BINGET", "DUP") for kind, _, _ in pickletools.genops(packed))
        if again > _MOST_AGAIN:
            raise ValueError(f"expected at most {_MOST_AGAIN} uses of earlier parts, got {again}; pickle plain arrays")
        data = _ArraysOnly(io.BytesIO(packed), encoding="latin1").load()
        if not isinstance(data, dict):
            raise DataUnreadable(f"cannot read {path}: expected a pickled dictionary, got {type(data).__name__}")
        return data


# Maximum uses of earlier parts in a pickle: n uses expand it by at most e^(n/e), here 7,000. The real files have 0
_MOST_AGAIN = 24


class _ArraysOnly(pickle.Unpickler):
    """Resolves only the names in a pickled array, because loading a file must not run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ARRAY_NAMES:
            raise pickle.UnpicklingError(f"expected arrays and plain data only, got {module}.{name}")
        return _ARRAY_NAMES[module, name]


def _dtype(name: str, *flags: object) -> np.dtype[Any]:
    """np.dtype(name) without its flags, which are integers in old pickles, and about which numpy 2.4 warns."""
    return np.dtype(name)


_ARRAY_NAMES = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _dtype,
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("_codecs", "encode"): codecs.encode,
}


def _read_batch(kind: Cifar, path: Path) -> Examples:
    entry = unpickle(path)
    with reading(path):
        data = np.asarray(entry["data"])
        check_unpacked(data.nbytes, regular(path))
        images = data.astype(np.uint8).reshape(-1, 3, 32, 32)
        labels = np.asarray(entry[kind.labels], dtype=np.int64)
        if len(images) != len(labels):
            raise ValueError(f"expected one label per image, got {len(images)} images and {len(labels)} labels")
        keep = np.ones(len(images), dtype=bool)
        keep[_jpeg_filled(path.parent).get(path.name, [])] = False
        return _examples(images[keep], labels[keep])


def _jpeg_filled(folder: Path) -> dict[str, list[int]]:
    """Indices of the JPEG copies by batch, from `jpeg_filled.json` beside the folder; empty without this file."""
    path = folder.parent / "jpeg_filled.json"
    with reading(path):
        if not path.exists():
            return {}
        listed = json.loads(text(path))
        return {batch: [int(index) for index in entry["indices_filled_from_jpeg"]] for batch, entry in listed.items()}


def _examples(images: Bytes, labels: npt.NDArray[Any]) -> Examples:
    """Bytes as float32 in [0, 1], labels as int64."""
    x = torch.from_numpy(images.astype(np.float32, order="C")).div_(255)
    return Examples(x, torch.from_numpy(labels.astype(np.int64)))


def _download(title: str, root: Path, arguments: str = "") -> str:
    call = f"torchvision().datasets.{title}({str(root)!r}, {arguments}download=True)"
    return f'get it: python -c "from leakgauge.harness.data.torchvision_shim import torchvision; {call}"'


FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")

IDX = (
    Idx("mnist", "MNIST", "MNIST: 60,000 + 10,000 handwritten digits, 28x28 gray"),
    Idx("fashion_mnist", "FashionMNIST", "Fashion-MNIST: 60,000 + 10,000 clothes, 28x28 gray", classes=FASHION),
    # the split of EMNIST with MNIST's size and classes (Cohen et al. 2017, arXiv:1702.05373)
    Idx(
        "emnist",
        "EMNIST",
        "EMNIST, split `mnist`: 60,000 + 10,000 handwritten digits, 28x28 gray, turned upright",
        starts=("emnist-mnist-train", "emnist-mnist-test"),
        is_transposed=True,
        arguments="split='mnist', ",
    ),
)

CIFAR = (
    Cifar(
        "cifar10",
        "CIFAR10",
        "CIFAR-10: 50,000 + 10,000 photographs in 10 classes, 32x32 color; fewer if batches are missing",
        folder="cifar-10-batches-py",
        train=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test="test_batch",
        meta="batches.meta",
        labels="labels",
        label_names="label_names",
    ),
    Cifar(
        "cifar100",
        "CIFAR100",
        "CIFAR-100: 50,000 + 10,000 photographs in 100 classes, 32x32 color",
        folder="cifar-100-python",
        train=("train",),
        test="test",
        meta="meta",
        labels="fine_labels",
        label_names="fine_label_names",
    ),
)

SETS = {kind.name: Source(kind.summary, functools.partial(read_idx_set, kind)) for kind in IDX} | {
    kind.name: Source(kind.summary, functools.partial(read_cifar_set, kind)) for kind in CIFAR
}

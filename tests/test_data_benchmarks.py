"""The benchmark image sets, from small files made here and from the real ones."""

import codecs
import gzip
import hashlib
import json
import pickle
import re

import numpy as np
import pytest
import torch

from leakgauge.harness import data
from leakgauge.harness.data import DataMissing, DataUnreadable, vision
from leakgauge.harness.data.torchvision_shim import torchvision
from tests.by_rows import by_rows
from tests.data_files import one_line, pixels, real


def idx(array):
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return (0x0800 + array.ndim).to_bytes(4, "big") + sizes + array.tobytes()


def packed(content):
    """Without the time of day, which would give the tests of two workers different names."""
    return gzip.compress(content, mtime=0)


def write_idx(folder, starts=("train", "t10k"), end=".gz"):
    folder.mkdir(parents=True)
    for start in starts:
        for kind, array in (("images-idx3", pixels(10, 4, 5)), ("labels-idx1", np.arange(10, dtype=np.uint8))):
            (folder / f"{start}-{kind}-ubyte{end}").write_bytes(packed(idx(array)) if end else idx(array))


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("layout", ["MNIST/raw", "mnist/MNIST/raw"])
def test_idx_files_are_read_packed_or_not_in_both_layouts(tmp_path, layout, end):
    write_idx(tmp_path / layout, end=end)
    before = sorted(tmp_path.rglob("*"))
    loaded = data.load("mnist", tmp_path)
    assert torch.equal(loaded.train.x * 255, torch.from_numpy(pixels(10, 4, 5)).float()[:, None])
    assert loaded.test.y.tolist() == list(range(10))
    assert sorted(tmp_path.rglob("*")) == before  # nothing was unpacked there


def test_emnist_is_turned_upright(tmp_path):
    write_idx(tmp_path / "EMNIST/raw", starts=("emnist-mnist-train", "emnist-mnist-test"))
    loaded = data.load("emnist", tmp_path)
    assert loaded.input_shape == (1, 5, 4)
    assert torch.equal(loaded.train.x[0, 0] * 255, torch.from_numpy(pixels(10, 4, 5)[0].T.copy()).float())


LABELS, IMAGES = "t10k-labels-idx1-ubyte.gz", "t10k-images-idx3-ubyte.gz"


@by_rows(
    (IMAGES, packed(idx(pixels(10, 4, 5)))[:-20], "EOFError"),
    (IMAGES, b"no gzip", "BadGzipFile"),
    (IMAGES, packed(idx(pixels(200))), "expected the idx magic number 2051, got 2049"),
    (IMAGES, packed(idx(pixels(10, 4, 5))[:-1]), "expected (10, 4, 5) bytes after the header, got 199"),
    (IMAGES, packed(b""), "expected the idx magic number 2051, got 0"),
    (LABELS, packed(idx(np.arange(9, dtype=np.uint8))), "got 10 x and 9 y"),
    (LABELS, packed(idx(np.arange(1, 11, dtype=np.uint8))), "labels from 0 to 9, got 1 to 10"),
)
def test_a_broken_idx_file_is_named_in_one_line(name, content, message, tmp_path):
    raw = tmp_path / "MNIST/raw"
    write_idx(raw)
    (raw / name).write_bytes(content)
    with pytest.raises(DataUnreadable, match=re.escape(message)) as error:
        data.load("mnist", tmp_path)
    assert str(raw) in one_line(error)


def test_a_missing_or_inaccessible_file_is_named_in_one_line(tmp_path):
    raw = tmp_path / "MNIST/raw"
    write_idx(raw)
    (raw / LABELS).unlink()
    with pytest.raises(DataMissing) as error:
        data.load("mnist", tmp_path)
    for part in (LABELS, str(raw), "get it: python -c", f"MNIST('{tmp_path}', download=True)"):
        assert part in one_line(error)
    (raw / LABELS).mkdir()  # a folder instead of a file, because root can open any file
    with pytest.raises(DataUnreadable, match="expected a regular file, got a folder"):
        data.load("mnist", tmp_path)


def test_class_names_and_folders_are_those_of_torchvision():
    datasets = torchvision().datasets
    assert list(vision.FASHION) == datasets.FashionMNIST.classes
    assert list(vision.IDX[2].classes) == datasets.EMNIST.classes_split_dict["mnist"]
    for kind in vision.CIFAR:
        reader = getattr(datasets, kind.title)
        assert kind.folder == reader.base_folder
        assert [name for name, _ in reader.train_list + reader.test_list] == [*kind.train, kind.test]
        assert (kind.meta, kind.label_names) == (reader.meta["filename"], reader.meta["key"])


def write_cifar10(root, batches=(1, 2, 3, 4, 5)):
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in [f"data_batch_{number}" for number in batches] + ["test_batch"]:
        entry = {"data": pixels(10, 3072, name=name), "labels": list(range(10))}
        (folder / name).write_bytes(pickle.dumps(entry, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}, protocol=2))
    return folder


@by_rows(
    (".", (1, 2, 3, 4, 5), ""),
    ("cifar10", (1, 2, 3, 4, 5), ""),
    (".", (1, 3), "2 of 5 training batches (data_batch_1, data_batch_3)"),
)
def test_cifar_batches_are_read_in_order_in_both_layouts_and_the_note_names_a_part(layout, batches, note, tmp_path):
    write_cifar10(tmp_path / layout, batches)
    loaded = data.load("cifar10", tmp_path)
    expected = np.concatenate([pixels(10, 3072, name=f"data_batch_{number}") for number in batches])
    assert torch.equal((loaded.train.x * 255).round(), torch.from_numpy(expected).float().view(-1, 3, 32, 32))
    assert loaded.classes == tuple("abcdefghij")
    assert loaded.note == note


def test_images_that_are_jpeg_copies_are_left_out(tmp_path):
    write_cifar10(tmp_path)
    listed = {"data_batch_2": {"indices_filled_from_jpeg": [3, 4]}, "test_batch": {"indices_filled_from_jpeg": [0]}}
    (tmp_path / "jpeg_filled.json").write_text(json.dumps(listed))
    loaded = data.load("cifar10", tmp_path)
    assert loaded.train.y.tolist() == [*range(10), 0, 1, 2, *range(5, 10), *range(10), *range(10), *range(10)]
    assert loaded.test.y.tolist() == list(range(1, 10))
    assert loaded.note == "3 images left out: only JPEG copies exist"


def test_cifar100_has_fine_labels(tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    entry = {"data": pixels(100, 3072), "fine_labels": list(range(100)), "coarse_labels": [0] * 100}
    for name in ("train", "test"):
        (folder / name).write_bytes(pickle.dumps(entry, protocol=2))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [f"c{i}" for i in range(100)]}, protocol=2))
    loaded = data.load("cifar100", tmp_path)
    assert loaded.train.y.tolist() == list(range(100))
    assert loaded.classes[99] == "c99"


def test_cifar_without_a_training_batch_is_missing(tmp_path):
    write_cifar10(tmp_path, batches=())
    with pytest.raises(DataMissing, match="looked for data_batch_1 or data_batch_2"):
        data.load("cifar10", tmp_path)


@by_rows(
    (pickle.dumps(print), "expected arrays and plain data only, got builtins.print"),
    (b"cos\nsystem\n(S'exit 1'\ntR.", "expected arrays and plain data only, got os.system"),
    (pickle.dumps([1], protocol=2), "expected a pickled dictionary, got list"),
    (pickle.dumps({"labels": []}, protocol=2), "KeyError: 'data'"),
    (pickle.dumps({"data": [0] * 3071, "labels": [0]}, protocol=2), "cannot reshape"),
    (pickle.dumps({"data": [0] * 3072, "labels": [0, 1]}, protocol=2), "got 1 images and 2 labels"),
    (b"", "pickle exhausted before seeing STOP"),
    (b"\x80\x02}q\x00(", "pickle exhausted before seeing STOP"),
)
def test_a_broken_or_hostile_batch_is_named_in_one_line(content, message, tmp_path):
    folder = write_cifar10(tmp_path)
    (folder / "data_batch_4").write_bytes(content)
    with pytest.raises(DataUnreadable, match=re.escape(message)) as error:
        data.load("cifar10", tmp_path)
    assert str(folder / "data_batch_4") in one_line(error)


class OldType:
    """Pickles like np.uint8's dtype under Python 2: its flags are integers, and numpy 2.4 warns about them."""

    def __reduce__(self):
        return np.dtype, ("u1", 0, 1), (3, "|", None, None, None, -1, -1, 0)


class OldArray:
    """Pickles like an array of 6 bytes under Python 2."""

    def __reduce__(self):
        rebuild = np.empty(0).__reduce__()[0]
        return rebuild, (np.ndarray, (0,), b"b"), (1, (2, 3), OldType(), False, codecs.encode("abcdef", "latin1"))


def test_an_array_pickled_by_python_2_is_read_without_a_warning(tmp_path):
    path = tmp_path / "old"
    path.write_bytes(pickle.dumps({"data": OldArray()}, protocol=2).replace(b"numpy._core", b"numpy.core"))
    assert vision.unpickle(path)["data"].tobytes() == b"abcdef"


@pytest.mark.matrix
def test_mnist_is_the_original():
    mnist = real("mnist")
    # the counts of LeCun's files
    assert mnist.train.y.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert mnist.test.y.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert mnist.input_shape == (1, 28, 28)
    # the md5 of the unpacked originals, from the data's README
    for (x, y), images_md5, labels_md5 in (
        (mnist.train, "6bbc9ace898e44ae57da46a324031adb", "a25bea736e30d166cdddb491f175f624"),
        (mnist.test, "2646ac647ad5339dbf082846283269ea", "27ae3e4e09519cfbb04c329615203637"),
    ):
        images = (x[:, 0] * 255).round().to(torch.uint8).numpy()
        assert hashlib.md5(idx(images)).hexdigest() == images_md5
        assert hashlib.md5(idx(y.to(torch.uint8).numpy())).hexdigest() == labels_md5


def test_fashion_mnist_has_equally_many_of_each():
    fashion = real("fashion_mnist")
    assert fashion.train.y.bincount().tolist() == [6000] * 10
    assert fashion.test.y.bincount().tolist() == [1000] * 10
    assert fashion.input_shape == (1, 28, 28)
    assert fashion.classes[9] == "Ankle boot"


def test_cifar10_is_one_batch_and_the_test_batch_without_thirty_images():
    cifar = real("cifar10")
    assert (len(cifar.train.x), len(cifar.test.x)) == (9990, 9980)
    # 1,000 of each in the original test batch; 19 ships and a horse are left out
    assert cifar.test.y.bincount().tolist() == [1000] * 7 + [999, 981, 1000]
    assert cifar.input_shape == (3, 32, 32)
    assert cifar.classes[8] == "ship"
    assert cifar.note.startswith("1 of 5 training batches (data_batch_1); 30 images left out")


@pytest.mark.matrix
def test_adult_has_the_counts_of_its_readme():
    adult = real("adult")
    assert adult.train.y.bincount().tolist() == [24_720, 7_841]
    assert adult.test.y.bincount().tolist() == [12_435, 3_846]
    # 6 numbers; 9 + 16 + 7 + 15 + 6 + 5 + 2 + 42 values of categories, `?` counted
    assert adult.input_shape == (108,)
    numbers = [0, 10, 27, 63, 64, 65]  # where they stand: 1 + 9, 1 + 16, 1 + 7 + 15 + 6 + 5 + 2
    categories = [column for column in range(108) if column not in numbers]
    for split in (adult.train, adult.test):
        assert torch.equal(split.x[:, categories].sum(dim=1), torch.full((len(split.x),), 8.0))
    assert torch.equal(adult.train.x.amin(dim=0), torch.zeros(108))
    assert torch.equal(adult.train.x.amax(dim=0), torch.ones(108))
    # the first row: 39 years of 17 to 90, 13 years of education of 1 to 16, 40 hours a week of 1 to 99
    first = adult.train.x[0]
    assert first[[0, 27, 65]].tolist() == pytest.approx([22 / 73, 12 / 15, 39 / 98])

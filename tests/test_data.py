"""Data sets: counts, splits, layouts on disk, and what is said when a file is missing or broken."""

import codecs
import gzip
import hashlib
import itertools
import json
import pickle
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from harness import data, rng
from harness.contract import Examples
from harness.data import DataMissing, DataSet, DataUnreadable, embedded, vision
from harness.data.torchvision_shim import torchvision
from harness.rng import Key

REAL = Path(__file__).parents[2] / "shared" / "data"
KEY = Key(0, ("test_data",))


def real(name):
    """A data set beside the checkout."""
    if not (REAL / name).is_dir():
        pytest.skip("real data not beside the checkout")
    return data.load(name, REAL)


def pixels(*shape, name="pixels"):
    return rng.integers(KEY.child(name, *shape), int(np.prod(shape)), 256).astype(np.uint8).reshape(shape)


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    return text


# names


def test_every_name_has_a_summary_and_a_reader(tmp_path):
    for name, summary in data.names():
        assert summary
        if name not in ("digits", "photos"):
            with pytest.raises(DataMissing):
                data.load(name.replace("PATH", str(tmp_path / "nothing")), tmp_path)


def test_an_unknown_name_is_answered_with_the_nearest_and_all_known():
    with pytest.raises(LookupError, match="'cifra10'; did you mean 'cifar10'") as error:
        data.load("cifra10", REAL)
    assert all(name in one_line(error) for name, _ in data.names())


@pytest.mark.parametrize("name", ["folder:", "npz:"])
def test_a_form_without_a_path_is_refused(name):
    with pytest.raises(ValueError, match=f"expected {name}PATH"):
        data.load(name, REAL)


def test_the_root_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LEAKGAUGE_DATA", str(tmp_path))
    assert data.default_root() == tmp_path
    monkeypatch.delenv("LEAKGAUGE_DATA")
    assert data.default_root() == Path.home() / ".cache" / "leakgauge"


def test_importing_is_cheap():
    code = (
        "import sys, pathlib; from harness import data; data.names(); "
        "print({'torchvision', 'sklearn', 'skimage', 'PIL'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


# the value


def small(**changes):
    x, y = torch.zeros(4, 1, 2, 2), torch.tensor([0, 1, 0, 1])
    fields = {"train": Examples(x, y), "test": Examples(x, y), "classes": ("a", "b"), "is_image": True, "public": True}
    return DataSet("small", **(fields | changes))


def test_the_digest_sees_every_pixel_and_label_of_both_splits():
    digests = {small().digest}
    for split, part in itertools.product(("train", "test"), (0, 1)):
        tensors = [tensor.clone() for tensor in getattr(small(), split)]
        tensors[part].view(-1)[-1] = 1 - tensors[part].view(-1)[-1]
        digests.add(small(**{split: Examples(*tensors)}).digest)
    assert len(digests) == 5
    assert all(re.fullmatch("[0-9a-f]{16}", digest) for digest in digests)


def test_the_digest_is_sha256_of_the_bytes():
    x, y = bytes(4 * 4 * 4), b"".join(int(label).to_bytes(8, "little") for label in (0, 1, 0, 1))
    assert small().digest == hashlib.sha256(x + y + x + y).hexdigest()[:16]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(4, 1, 2, 2).double(), torch.zeros(4).long(), "float32 x and int64 y"),
        (torch.zeros(4, 1, 2, 2), torch.zeros(3).long(), "got 4 x and 3 y"),
        (torch.zeros(0, 1, 2, 2), torch.zeros(0).long(), "got 0 x and 0 y"),
        (torch.full((4, 1, 2, 2), 1.5), torch.zeros(4).long(), "in [0, 1], got 1.5 to 1.5"),
        (torch.full((4, 1, 2, 2), torch.nan), torch.zeros(4).long(), "in [0, 1], got nan to nan"),
        (torch.zeros(4, 1, 2, 2), torch.tensor([0, 1, 2, -1]), "labels from 0 to 1, got -1 to 2"),
        (torch.zeros(4, 4), torch.zeros(4).long(), "expected 4 axes in train x, got (4, 4)"),
        (torch.zeros(4, 1, 2, 3), torch.zeros(4).long(), "one shape, got (1, 2, 3) and (1, 2, 2)"),
    ],
)
def test_examples_that_are_not_as_declared_are_refused(x, y, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        small(train=Examples(x, y))


def test_the_fixed_split_takes_every_fifth_of_each_class():
    y = torch.tensor([0, 1] * 11)
    train, test = data.split_by_class(torch.arange(22.0)[:, None], y)
    assert test.x.flatten().tolist() == [8, 9, 18, 19]
    assert test.y.tolist() == [0, 1, 0, 1]
    assert len(train.x) == 18


# embedded


def test_digits_are_those_of_scikit_learn():
    digits = data.load("digits", Path("nowhere"))
    assert (len(digits.train.x), len(digits.test.x)) == (1442, 355)
    assert digits.input_shape == (1, 8, 8)
    # the counts in the description that comes with the data
    counts = digits.train.y.bincount() + digits.test.y.bincount()
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert set((torch.cat([digits.train.x, digits.test.x]) * 16).unique().tolist()) == set(range(17))
    assert digits.digest == data.load("digits", Path("nowhere")).digest


@pytest.fixture(scope="module")
def photos():
    return data.load("photos", Path("nowhere"))


def test_photos_have_the_stated_counts(photos):
    assert photos.input_shape == (3, 32, 32)
    assert photos.classes == tuple(embedded.FACTORS)
    # on the grid, less the flat ones, at most 400 and 100; chelsea and rocket have fewer
    assert photos.train.y.bincount().tolist() == [400, 225, 400, 400, 400, 400, 400, 230]
    assert photos.test.y.bincount().tolist() == [100, 89, 100, 100, 100, 100, 100, 33]


def shared_pixels(crops):
    """How many pixels of the photographs are in a training and in a test crop."""
    seen = {(photo, split): np.zeros((512, 512), bool) for photo in embedded.FACTORS for split in ("train", "test")}
    for photo, split, top, left in crops:
        seen[photo, split][top : top + 32, left : left + 32] = True
    return sum(int((seen[photo, "train"] & seen[photo, "test"]).sum()) for photo in embedded.FACTORS)


def test_no_pixel_is_in_a_training_and_in_a_test_crop():
    crops = embedded.photo_crops()
    assert shared_pixels(crops) == 0
    # the twin: one test crop moved one pixel to the left, to where the training crops end, is seen
    edge = embedded.reduced_photo("ihc").shape[1] * 2 // 3
    assert shared_pixels([*crops, embedded.Crop("ihc", "train", 0, edge - 31)]) > 0


def test_crops_lie_where_they_are_said_to(photos):
    in_order = [crop for split in ("train", "test") for crop in embedded.photo_crops() if crop.split == split]
    x_all, y_all = (torch.cat(pair) for pair in zip(photos.train, photos.test, strict=True))
    for crop, x, y in zip(in_order, x_all, y_all, strict=True):
        source = embedded.reduced_photo(crop.photo)[crop.top : crop.top + 32, crop.left : crop.left + 32]
        assert photos.classes[y] == crop.photo
        assert np.array_equal(x.permute(1, 2, 0).numpy(), source.astype(np.float32))


def test_no_crop_is_flat(photos):
    for split in (photos.train, photos.test):
        assert split.x.flatten(2).std(dim=2, correction=0).mean(dim=1).min() >= 0.05 - 1e-6


def test_a_reduced_photograph_holds_the_means_of_blocks():
    import skimage

    with Image.open(Path(skimage.__file__).parent / "data" / "coffee.png") as image:
        block = np.asarray(image)[10:12, 20:22].astype(float) / 255
    assert embedded.reduced_photo("coffee")[5, 10] == pytest.approx(block.mean(axis=(0, 1)), abs=1e-12)


def test_photos_need_no_network(monkeypatch):
    monkeypatch.delattr(socket, "socket")
    embedded.reduced_photo.cache_clear()
    embedded.photo_crops.cache_clear()
    assert len(data.load("photos", Path("nowhere")).classes) == 8


# benchmark sets, from files made here


def idx(array):
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return (0x0800 + array.ndim).to_bytes(4, "big") + sizes + array.tobytes()


def write_idx(folder, starts=("train", "t10k"), end=".gz"):
    folder.mkdir(parents=True)
    for start in starts:
        for kind, array in (("images-idx3", pixels(10, 4, 5)), ("labels-idx1", np.arange(10, dtype=np.uint8))):
            content = idx(array)
            path = folder / f"{start}-{kind}-ubyte{end}"
            path.write_bytes(gzip.compress(content) if end else content)


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


LABELS = "t10k-labels-idx1-ubyte.gz"
IMAGES = "t10k-images-idx3-ubyte.gz"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (IMAGES, gzip.compress(idx(pixels(10, 4, 5)))[:-20], "EOFError"),
        (IMAGES, b"no gzip", "BadGzipFile"),
        (IMAGES, gzip.compress(idx(pixels(200))), "expected the idx magic number 2051, got 2049"),
        (IMAGES, gzip.compress(idx(pixels(10, 4, 5))[:-1]), "expected (10, 4, 5) bytes after the header, got 199"),
        (IMAGES, gzip.compress(b""), "expected the idx magic number 2051, got 0"),
        (LABELS, gzip.compress(idx(np.arange(9, dtype=np.uint8))), "got 10 x and 9 y"),
        (LABELS, gzip.compress(idx(np.arange(1, 11, dtype=np.uint8))), "labels from 0 to 9, got 1 to 10"),
    ],
)
def test_a_broken_idx_file_is_named_in_one_line(tmp_path, name, content, message):
    raw = tmp_path / "MNIST/raw"
    write_idx(raw)
    (raw / name).write_bytes(content)
    with pytest.raises(DataUnreadable, match=re.escape(message)) as error:
        data.load("mnist", tmp_path)
    assert str(raw) in one_line(error)


def test_a_missing_file_is_answered_with_where_and_how(tmp_path):
    write_idx(tmp_path / "MNIST/raw")
    (tmp_path / "MNIST/raw" / LABELS).unlink()
    with pytest.raises(DataMissing) as error:
        data.load("mnist", tmp_path)
    for part in (LABELS, str(tmp_path / "MNIST/raw"), "get it: python -c", f"MNIST('{tmp_path}', download=True)"):
        assert part in one_line(error)


def test_a_file_that_may_not_be_opened_is_named_in_one_line(tmp_path):
    write_idx(tmp_path / "MNIST/raw")
    path = tmp_path / "MNIST/raw" / IMAGES
    path.unlink()
    path.mkdir()  # a folder in its place, as root may open any file
    with pytest.raises(DataUnreadable, match="IsADirectoryError"):
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


@pytest.mark.parametrize("layout", [".", "cifar10"])
def test_all_cifar_batches_are_read_in_order_in_both_layouts(tmp_path, layout):
    write_cifar10(tmp_path / layout)
    loaded = data.load("cifar10", tmp_path)
    expected = np.concatenate([pixels(10, 3072, name=f"data_batch_{number}") for number in range(1, 6)])
    assert torch.equal((loaded.train.x * 255).round(), torch.from_numpy(expected).float().view(50, 3, 32, 32))
    assert loaded.classes == tuple("abcdefghij")
    assert loaded.note == ""


def test_a_part_of_cifar_says_so(tmp_path):
    write_cifar10(tmp_path, batches=(1, 3))
    loaded = data.load("cifar10", tmp_path)
    assert len(loaded.train.x) == 20
    assert loaded.note == "2 of 5 training batches (data_batch_1, data_batch_3)"


def test_images_that_are_jpeg_copies_are_left_out(tmp_path):
    write_cifar10(tmp_path)
    listed = {"data_batch_2": {"indices_filled_from_jpeg": [3, 4]}, "test_batch": {"indices_filled_from_jpeg": [0]}}
    (tmp_path / "jpeg_filled.json").write_text(json.dumps(listed))
    loaded = data.load("cifar10", tmp_path)
    assert loaded.train.y.tolist() == [*range(10), 0, 1, 2, *range(5, 10), *range(10), *range(10), *range(10)]
    assert loaded.test.y.tolist() == list(range(1, 10))
    assert loaded.note == "3 images left out, of which only JPEG copies are there"


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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(print), "expected arrays and plain data only, got builtins.print"),
        (b"cos\nsystem\n(S'exit 1'\ntR.", "expected arrays and plain data only, got os.system"),
        (pickle.dumps([1], protocol=2), "expected a pickled dictionary, got list"),
        (pickle.dumps({"labels": []}, protocol=2), "KeyError: 'data'"),
        (pickle.dumps({"data": [0] * 3071, "labels": [0]}, protocol=2), "cannot reshape"),
        (pickle.dumps({"data": [0] * 3072, "labels": [0, 1]}, protocol=2), "got 1 images and 2 labels"),
        (b"", "EOFError"),
        (b"\x80\x02}q\x00(", "EOFError"),
    ],
)
def test_a_broken_or_hostile_batch_is_named_in_one_line(tmp_path, content, message):
    folder = write_cifar10(tmp_path)
    (folder / "data_batch_4").write_bytes(content)
    with pytest.raises(DataUnreadable, match=re.escape(message)) as error:
        data.load("cifar10", tmp_path)
    assert str(folder / "data_batch_4") in one_line(error)


class OldType:
    """Pickles as np.uint8's dtype did under Python 2: with integers for flags, which numpy 2.4 warns of."""

    def __reduce__(self):
        return np.dtype, ("u1", 0, 1), (3, "|", None, None, None, -1, -1, 0)


class OldArray:
    """Pickles as an array of 6 bytes did."""

    def __reduce__(self):
        rebuild = np.empty(0).__reduce__()[0]
        return rebuild, (np.ndarray, (0,), b"b"), (1, (2, 3), OldType(), False, codecs.encode("abcdef", "latin1"))


def test_an_array_pickled_by_python_2_is_read_without_a_warning(tmp_path):
    path = tmp_path / "old"
    path.write_bytes(pickle.dumps({"data": OldArray()}, protocol=2).replace(b"numpy._core", b"numpy.core"))
    assert vision.unpickle(path)["data"].tobytes() == b"abcdef"


# benchmark sets, from the real files


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


def test_fashion_mnist_has_as_many_of_each():
    fashion = real("fashion_mnist")
    assert fashion.train.y.bincount().tolist() == [6000] * 10
    assert fashion.test.y.bincount().tolist() == [1000] * 10
    assert fashion.input_shape == (1, 28, 28)
    assert fashion.classes[9] == "Ankle boot"


def test_cifar10_is_one_batch_and_the_test_batch_less_thirty():
    cifar = real("cifar10")
    assert (len(cifar.train.x), len(cifar.test.x)) == (9990, 9980)
    # 1,000 of each in the original test batch; 19 ships and a horse are left out
    assert cifar.test.y.bincount().tolist() == [1000] * 7 + [999, 981, 1000]
    assert cifar.input_shape == (3, 32, 32)
    assert cifar.classes[8] == "ship"
    assert cifar.note.startswith("1 of 5 training batches (data_batch_1); 30 images left out")


def test_adult_has_the_counts_of_its_readme():
    adult = real("adult")
    assert adult.train.y.bincount().tolist() == [24_720, 7_841]
    assert adult.test.y.bincount().tolist() == [12_435, 3_846]
    # 6 numbers; 9 + 16 + 7 + 15 + 6 + 5 + 2 + 42 values of categories, `?` counted
    assert adult.input_shape == (108,)
    assert not adult.is_image
    numbers = [0, 10, 27, 63, 64, 65]  # where they stand: 1 + 9, 1 + 16, 1 + 7 + 15 + 6 + 5 + 2
    categories = [column for column in range(108) if column not in numbers]
    for split in (adult.train, adult.test):
        assert torch.equal(split.x[:, categories].sum(dim=1), torch.full((len(split.x),), 8.0))
    assert torch.equal(adult.train.x.amin(dim=0), torch.zeros(108))
    assert torch.equal(adult.train.x.amax(dim=0), torch.ones(108))
    # the first row: 39 years of 17 to 90, 13 years of education of 1 to 16, 40 hours a week of 1 to 99
    first = adult.train.x[0]
    assert first[[0, 27, 65]].tolist() == pytest.approx([22 / 73, 12 / 15, 39 / 98])


# adult, from rows made here

ROW = "39, State-gov, 77516, Bachelors, 13, Never-married, Sales, Not-in-family, White, Male, 2174, 0, 40, Cuba, "


def write_adult(root, train, test):
    (root / "adult").mkdir()
    (root / "adult" / "adult.data").write_text(train)
    (root / "adult" / "adult.test.gz").write_bytes(gzip.compress(test.encode()))


def test_adult_scales_by_the_training_rows_and_knows_the_unknown(tmp_path):
    other = ROW.replace("39", "49").replace("State-gov", "?")
    write_adult(tmp_path, f"{ROW}<=50K\n{other}>50K\n\n", f"|1x3 Cross validator\n{ROW.replace('39', '59')}>50K.\n\n")
    adult = data.load("adult", tmp_path)
    # age, `?`, State-gov, then what is the same in both rows: numbers 0, categories 1
    assert adult.train.x[:, :3].tolist() == [[0, 0, 1], [1, 1, 0]]
    assert adult.test.x[:, :3].tolist() == [[1, 0, 1]]  # 59 is clipped to the training rows' 49
    assert adult.train.x[0, 3:].tolist() == [0, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1]
    assert (adult.train.y.tolist(), adult.test.y.tolist()) == ([0, 1], [1])


@pytest.mark.parametrize(
    ("test", "message"),
    [
        (f"{ROW.replace('Cuba', 'Peru')}>50K.\n", "expected a native-country of the training rows, got Peru"),
        (f"{ROW}rich\n", "expected incomes <=50K and >50K, got rich"),
        (f"{ROW}extra, >50K.\n", "expected 15 columns, got 16 in row 1"),
        (f"{ROW.replace('39', 'old')}>50K.\n", "could not convert string to float: "),
        ("", "expected rows, got none"),
    ],
)
def test_broken_rows_of_adult_are_named_in_one_line(tmp_path, test, message):
    write_adult(tmp_path, f"{ROW}<=50K\n", test)
    with pytest.raises(DataUnreadable, match=re.escape(message)) as error:
        data.load("adult", tmp_path)
    assert str(tmp_path / "adult") in one_line(error)


# a user's own


def write_images(folder, classes=("cat", "dog"), count=5, shape=(6, 4, 3)):
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(pixels(*shape, name=f"{name}{number}")).save(folder / name / f"{number}.png")


def test_a_folder_without_splits_is_split_by_sorted_index(tmp_path):
    write_images(tmp_path)
    loaded = data.load(f"folder:{tmp_path}", Path("nowhere"))
    assert loaded.classes == ("cat", "dog")
    assert loaded.input_shape == (3, 6, 4)
    assert (loaded.train.y.tolist(), loaded.test.y.tolist()) == ([0] * 4 + [1] * 4, [0, 1])
    last_dog = torch.from_numpy(pixels(6, 4, 3, name="dog4")).permute(2, 0, 1)
    assert torch.equal((loaded.test.x[1] * 255).round(), last_dog.float())
    assert not loaded.public


def test_a_folder_with_splits_keeps_them(tmp_path):
    write_images(tmp_path / "train", count=3, shape=(6, 4))
    write_images(tmp_path / "test", count=2, shape=(6, 4))
    loaded = data.load(f"folder:{tmp_path}", Path("nowhere"))
    assert (len(loaded.train.x), len(loaded.test.x)) == (6, 4)
    assert loaded.input_shape == (1, 6, 4)


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        (pixels(6, 5, 3), "the first image's (6, 4, 3) (height, width, channels), got (6, 5, 3)"),
        (pixels(6, 4), "the first image's (6, 4, 3) (height, width, channels), got (6, 4, 1)"),
        (pixels(6, 4).astype(np.uint16), "expected 8 bits a channel, got an image of mode I;16"),
    ],
)
def test_the_first_image_that_differs_is_named(tmp_path, picture, message):
    write_images(tmp_path)
    Image.fromarray(picture).save(tmp_path / "dog" / "2.png")
    with pytest.raises(DataUnreadable, match=re.escape(message)) as error:
        data.load(f"folder:{tmp_path}", Path("nowhere"))
    assert str(tmp_path / "dog" / "2.png") in one_line(error)


def test_a_broken_image_is_named(tmp_path):
    write_images(tmp_path)
    (tmp_path / "dog" / "2.png").write_bytes(b"no picture")
    with pytest.raises(DataUnreadable, match=r"2\.png: UnidentifiedImageError"):
        data.load(f"folder:{tmp_path}", Path("nowhere"))


def test_a_class_without_images_and_unequal_classes_are_refused(tmp_path):
    write_images(tmp_path / "train")
    write_images(tmp_path / "test", classes=("cat", "cow"))
    with pytest.raises(DataUnreadable, match=re.escape("got ('cat', 'dog') and ('cat', 'cow')")):
        data.load(f"folder:{tmp_path}", Path("nowhere"))
    (tmp_path / "train" / "eel").mkdir()
    with pytest.raises(DataUnreadable, match="no valid file for the classes eel"):
        data.load(f"folder:{tmp_path}", Path("nowhere"))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((10, 6, 4), (1, 6, 4)), ((10, 6, 4, 3), (3, 6, 4)), ((10, 1, 6, 4), (1, 6, 4)), ((10, 7), (7,))],
)
def test_npz_arrays_get_their_channels_second(tmp_path, shape, expected):
    x = pixels(*shape)
    np.savez(tmp_path / "own.npz", x=x, y=np.arange(10) % 2)
    loaded = data.load(f"npz:{tmp_path}/own.npz", Path("nowhere"))
    assert loaded.input_shape == expected
    assert loaded.is_image == (len(expected) == 3)
    # the fifth of each class are 8 and 9
    last = x[8].transpose(2, 0, 1) if shape[-1] == 3 else x[8].reshape(expected)
    assert torch.equal((loaded.test.x[0] * 255).round(), torch.from_numpy(last.copy()).float())
    assert (len(loaded.train.x), len(loaded.test.x), loaded.classes) == (8, 2, ("0", "1"))
    assert not loaded.public


def test_npz_keeps_its_own_test_arrays_and_floats(tmp_path):
    x, y = np.linspace(0, 1, 12).reshape(3, 4), np.array([0, 1, 2])
    np.savez(tmp_path / "own.npz", x=x, y=y, x_test=x[:2], y_test=y[:2])
    loaded = data.load(f"npz:{tmp_path}/own.npz", Path("nowhere"))
    assert torch.equal(loaded.test.x, torch.from_numpy(x[:2].astype(np.float32)))
    assert loaded.classes == ("0", "1", "2")


GOOD = np.zeros((10, 4))
ODD = np.arange(10) % 2


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": GOOD}, "expected x and y, with both or none of x_test and y_test, got x"),
        ({"x": GOOD, "y": ODD, "x_test": GOOD}, "with both or none of x_test and y_test, got x, y, x_test"),
        ({"x": GOOD - 3, "y": ODD}, "expected train x in [0, 1], got -3 to -3"),
        ({"x": GOOD.astype(int), "y": ODD}, "expected x of uint8 or floats, got int64"),
        ({"x": np.zeros((10, 3, 5, 3)), "y": ODD}, "channels second or last, and not both, got shape (10, 3, 5, 3)"),
        ({"x": np.zeros((10, 2, 5, 2)), "y": ODD}, "channels second or last, and not both, got shape (10, 2, 5, 2)"),
        ({"x": np.zeros(10), "y": ODD}, "expected x with 2, 3 or 4 axes, got shape (10,)"),
        ({"x": GOOD, "y": ODD / 2}, "expected y with one axis of integers, got shape (10,) of float64"),
        ({"x": GOOD, "y": ODD[:9]}, "expected one label an example, got 10 x and 9 y"),
        ({"x": GOOD[:4], "y": ODD[:4]}, "1 or more test examples, got 0 x and 0 y"),
        ({"x": GOOD, "y": ODD * 10**12}, "expected y up to 99999, got 1000000000000"),
        ({"x": GOOD, "y": ODD - 1}, "labels from 0 to 0, got -1 to 0"),
        ({"x": np.array([None]), "y": ODD}, "Object arrays cannot be loaded when allow_pickle=False"),
    ],
)
def test_an_npz_that_is_not_as_expected_is_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(DataUnreadable, match=re.escape(message)) as error:
        data.load(f"npz:{tmp_path}/own.npz", Path("nowhere"))
    assert "own.npz" in one_line(error)


def test_a_file_that_is_no_npz_is_refused(tmp_path):
    (tmp_path / "own.npz").write_bytes(b"no archive")
    with pytest.raises(DataUnreadable, match=r"own\.npz"):
        data.load(f"npz:{tmp_path}/own.npz", Path("nowhere"))

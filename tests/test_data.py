"""Data sets: counts, splits, layouts on disk, and the errors for missing or broken files."""

import gzip
import hashlib
import itertools
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from leakgauge.harness import data
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.errors import UnknownNameError
from leakgauge.harness.data import DataMissing, DataSet, DataUnreadable, embedded, sequences
from tests.by_rows import by_rows
from tests.data_files import REAL, one_line, pixels


def test_every_name_has_a_summary_and_a_reader(tmp_path):
    for name, summary in data.names():
        assert summary
        if name not in embedded.SETS | sequences.SETS:
            named = name.replace("PATH", str(tmp_path / "nothing"))
            named = named.replace("features:DATA", "features:mnist?axes=9&public=mnist")
            with pytest.raises(UnknownNameError if name in ("given:NAME", "module:factory") else DataMissing):
                data.load(named, tmp_path)


def test_an_unknown_name_and_a_form_without_a_path_are_refused():
    with pytest.raises(LookupError, match="'cifra10'; did you mean 'cifar10'") as error:
        data.load("cifra10", REAL)
    assert all(name in one_line(error) for name, _ in data.names())
    for name in ("folder:", "npz:"):
        with pytest.raises(ValueError, match=f"expected {name}PATH"):
            data.load(name, REAL)


def test_the_root_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LEAKGAUGE_DATA", str(tmp_path))
    assert data.default_root() == tmp_path
    monkeypatch.delenv("LEAKGAUGE_DATA")
    assert data.default_root() == Path.home() / ".cache" / "leakgauge"


@pytest.mark.matrix
def test_importing_is_cheap():
    used = "print({'torchvision', 'sklearn', 'skimage', 'PIL'} & set(sys.modules))"
    code = f"import sys; from leakgauge.harness import data; data.names(); {used}"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def small(**changes):
    x, y = torch.zeros(4, 1, 2, 2), torch.tensor([0, 1, 0, 1])
    fields = {"train": Examples(x, y), "test": Examples(x, y), "classes": ("a", "b"), "public": True}
    return DataSet("small", **(fields | changes))


def test_the_digest_is_sha256_of_every_pixel_and_label_of_both_splits():
    x, y = bytes(4 * 4 * 4), b"".join(int(label).to_bytes(8, "little") for label in (0, 1, 0, 1))
    assert small().digest == hashlib.sha256(x + y + x + y).hexdigest()[:16]
    digests = {small().digest}
    for split, part in itertools.product(("train", "test"), (0, 1)):
        tensors = [tensor.clone() for tensor in getattr(small(), split)]
        tensors[part].view(-1)[-1] = 1 - tensors[part].view(-1)[-1]
        digests.add(small(**{split: Examples(*tensors)}).digest)
    assert len(digests) == 5


@by_rows(
    (torch.zeros(4, 1, 2, 2).double(), torch.zeros(4).long(), "float32 x and int64 y"),
    (torch.zeros(4, 1, 2, 2), torch.zeros(3).long(), "got 4 x and 3 y"),
    (torch.zeros(0, 1, 2, 2), torch.zeros(0).long(), "got 0 x and 0 y"),
    (torch.full((4, 1, 2, 2), 1.5), torch.zeros(4).long(), "in [0, 1], got 1.5 to 1.5"),
    (torch.full((4, 1, 2, 2), torch.nan), torch.zeros(4).long(), "in [0, 1], got nan to nan"),
    (torch.zeros(4, 1, 2, 2), torch.tensor([0, 1, 2, -1]), "labels from 0 to 1, got -1 to 2"),
    (torch.zeros(4, 1, 1, 2, 2), torch.zeros(4).long(), "expected 2, 3 or 4 axes in train x, got (4, 1, 1, 2, 2)"),
    (torch.zeros(4, 1, 2, 3), torch.zeros(4).long(), "one shape, got (1, 2, 3) and (1, 2, 2)"),
)
def test_examples_that_are_not_as_declared_are_refused(x, y, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        small(train=Examples(x, y))


def test_the_fixed_split_takes_every_fifth_of_each_class():
    y = torch.tensor([0, 1] * 11)
    train, test = data.split_by_class(torch.arange(22.0)[:, None], y)
    assert (test.x.flatten().tolist(), test.y.tolist()) == ([8, 9, 18, 19], [0, 1, 0, 1])
    assert len(train.x) == 18


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
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(socket, "socket")  # they need no network
        embedded.reduced_photo.cache_clear()
        embedded.photo_crops.cache_clear()
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
    # the twin: a test crop that overlaps the training crops by one pixel is seen
    edge = embedded.reduced_photo("ihc").shape[1] * 2 // 3
    assert shared_pixels([*crops, embedded.Crop("ihc", "train", 0, edge - 31)]) > 0


def test_crops_are_the_stated_parts_of_the_photographs_and_not_flat(photos):
    in_order = [crop for split in ("train", "test") for crop in embedded.photo_crops() if crop.split == split]
    x_all, y_all = (torch.cat(pair) for pair in zip(photos.train, photos.test, strict=True))
    for crop, x, y in zip(in_order, x_all, y_all, strict=True):
        source = embedded.reduced_photo(crop.photo)[crop.top : crop.top + 32, crop.left : crop.left + 32]
        assert photos.classes[y] == crop.photo
        assert np.array_equal(x.permute(1, 2, 0).numpy(), source.astype(np.float32))
    assert x_all.flatten(2).std(dim=2, correction=0).mean(dim=1).min() >= 0.05 - 1e-6


def test_a_reduced_photograph_holds_the_means_of_blocks():
    import skimage

    with Image.open(Path(skimage.__file__).parent / "data" / "coffee.png") as image:
        block = np.asarray(image)[10:12, 20:22].astype(float) / 255
    assert embedded.reduced_photo("coffee")[5, 10] == pytest.approx(block.mean(axis=(0, 1)), abs=1e-12)


def test_faces_are_the_portraits_and_backgrounds_of_the_wheel(monkeypatch):
    import skimage

    monkeypatch.delattr(socket, "socket")
    faces = data.load("faces", Path("nowhere"))
    assert (faces.classes, faces.public, faces.input_shape) == (("background", "face"), True, (1, 25, 25))
    wheel = np.load(Path(skimage.__file__).parent / "data" / "lfw_subset.npy").astype(np.float32)
    for split, count, label, start in (
        ("train", 60, 1, 0),
        ("train", 60, 0, 100),
        ("test", 40, 1, 60),
        ("test", 40, 0, 160),
    ):
        x, y = getattr(faces, split)
        assert np.array_equal(x[y == label][:, 0].numpy(), wheel[start : start + count])
    assert len(faces.train.y) + len(faces.test.y) == 200


ROW = "39, State-gov, 77516, Bachelors, 13, Never-married, Sales, Not-in-family, White, Male, 2174, 0, 40, Cuba, "


def write_adult(root, train, test):
    (root / "adult").mkdir()
    (root / "adult" / "adult.data").write_text(train)
    (root / "adult" / "adult.test.gz").write_bytes(gzip.compress(test.encode()))


def test_adult_scales_by_the_training_rows_and_knows_the_unknown(tmp_path):
    other = ROW.replace("39", "49").replace("State-gov", "?")
    write_adult(tmp_path, f"{ROW}<=50K\n{other}>50K\n\n", f"|1x3 Cross validator\n{ROW.replace('39', '59')}>50K.\n\n")
    adult = data.load("adult", tmp_path)
    # age, `?`, State-gov, then the columns that are equal in both rows: numbers 0, categories 1
    assert adult.train.x[:, :3].tolist() == [[0, 0, 1], [1, 1, 0]]
    assert adult.test.x[:, :3].tolist() == [[1, 0, 1]]  # 59 is clipped to the training rows' 49
    assert adult.train.x[0, 3:].tolist() == [0, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1]
    assert (adult.train.y.tolist(), adult.test.y.tolist()) == ([0, 1], [1])


@by_rows(
    (f"{ROW.replace('Cuba', 'Peru')}>50K.\n", "expected a native-country of the training rows, got Peru"),
    (f"{ROW}rich\n", "expected incomes <=50K and >50K, got rich"),
    (f"{ROW}extra, >50K.\n", "expected 15 columns, got 16 in row 1"),
    (f"{ROW.replace('39', 'old')}>50K.\n", "could not convert string to float: "),
    ("", "expected rows, got none"),
)
def test_broken_rows_of_adult_are_named_in_one_line(test, message, tmp_path):
    write_adult(tmp_path, f"{ROW}<=50K\n", test)
    with pytest.raises(DataUnreadable, match=re.escape(message)) as error:
        data.load("adult", tmp_path)
    assert str(tmp_path / "adult") in one_line(error)


def write_images(folder, classes=("cat", "dog"), count=5, shape=(6, 4, 3)):
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(pixels(*shape, name=f"{name}{number}")).save(folder / name / f"{number}.png")


def load_folder(path):
    return data.load(f"folder:{path}", Path("nowhere"))


def load_npz(folder, **arrays):
    np.savez(folder / "own.npz", **arrays)
    return data.load(f"npz:{folder}/own.npz", Path("nowhere"))


def test_a_folder_without_splits_is_split_by_sorted_index(tmp_path):
    write_images(tmp_path)
    loaded = load_folder(tmp_path)
    assert (loaded.classes, loaded.input_shape) == (("cat", "dog"), (3, 6, 4))
    assert (loaded.train.y.tolist(), loaded.test.y.tolist()) == ([0] * 4 + [1] * 4, [0, 1])
    last_dog = torch.from_numpy(pixels(6, 4, 3, name="dog4")).permute(2, 0, 1)
    assert torch.equal((loaded.test.x[1] * 255).round(), last_dog.float())
    assert not loaded.public


def test_a_folder_with_splits_keeps_them(tmp_path):
    write_images(tmp_path / "train", count=3, shape=(6, 4))
    write_images(tmp_path / "test", count=2, shape=(6, 4))
    loaded = load_folder(tmp_path)
    assert (len(loaded.train.x), len(loaded.test.x), loaded.input_shape) == (6, 4, (1, 6, 4))


@by_rows(
    (pixels(6, 5, 3), "the first, (3, 6, 4), got (3, 6, 5) (channels, height, width); add ?size=64 to resize"),
    (pixels(6, 4).astype(np.uint16), "expected 8 bits per channel, got an image of mode I;16"),
    (None, "2.png: UnidentifiedImageError"),
)
def test_the_first_image_that_differs_or_is_broken_is_named(picture, message, tmp_path):
    write_images(tmp_path)
    path = tmp_path / "dog" / "2.png"
    path.write_bytes(b"no picture") if picture is None else Image.fromarray(picture).save(path)
    with pytest.raises(DataUnreadable, match=re.escape(message)) as error:
        load_folder(tmp_path)
    assert str(path) in one_line(error)


def test_a_class_without_images_and_unequal_classes_are_refused(tmp_path):
    write_images(tmp_path / "train")
    write_images(tmp_path / "test", classes=("cat", "cow"))
    with pytest.raises(DataUnreadable, match=re.escape("got ('cat', 'dog') and ('cat', 'cow')")):
        load_folder(tmp_path)
    (tmp_path / "train" / "eel").mkdir()
    with pytest.raises(DataUnreadable, match="no valid file for the classes eel"):
        load_folder(tmp_path)


@by_rows(((10, 6, 4), (1, 6, 4)), ((10, 6, 4, 3), (3, 6, 4)), ((10, 1, 6, 4), (1, 6, 4)), ((10, 7), (7,)))
def test_npz_arrays_get_their_channels_second(shape, expected, tmp_path):
    x = pixels(*shape)
    loaded = load_npz(tmp_path, x=x, y=np.arange(10) % 2)
    assert loaded.input_shape == expected
    # the fifth of each class are 8 and 9
    last = x[8].transpose(2, 0, 1) if shape[-1] == 3 else x[8].reshape(expected)
    assert torch.equal((loaded.test.x[0] * 255).round(), torch.from_numpy(last.copy()).float())
    assert (len(loaded.train.x), len(loaded.test.x), loaded.classes) == (8, 2, ("0", "1"))
    assert not loaded.public


def test_npz_keeps_its_own_test_arrays_and_floats(tmp_path):
    x, y = np.linspace(0, 1, 12).reshape(3, 4), np.array([0, 1, 2])
    loaded = load_npz(tmp_path, x=x, y=y, x_test=x[:2], y_test=y[:2])
    assert torch.equal(loaded.test.x, torch.from_numpy(x[:2].astype(np.float32)))
    assert loaded.classes == ("0", "1", "2")


GOOD = np.zeros((10, 4))
ODD = np.arange(10) % 2


@by_rows(
    ({"x": GOOD}, "both or none of x_test and y_test, got the keys 'x'; name them: npz:PATH?x=KEY&y=KEY"),
    ({"x": GOOD, "y": ODD, "x_test": GOOD}, "none of x_test and y_test, got the keys 'x', 'y', 'x_test'; name them"),
    ({"x": GOOD.astype(str), "y": ODD}, "expected x of numbers, got <U32; encode categories as numbers, such as"),
    ({"x": GOOD + np.nan, "y": ODD}, "expected finite x, got 40 of 40 values that are NaN, infinite or huge"),
    ({"x": GOOD + 1e300, "y": ODD}, "expected finite x, got 40 of 40 values that are NaN, infinite or huge"),
    ({"x": GOOD[:, :0], "y": ODD}, "expected 1 or more x with entries, got shape (10, 0)"),
    ({"x": np.zeros((10, 3, 4, 4, 4)), "y": ODD}, "expected x with 2, 3 or 4 axes, got shape (10, 3, 4, 4, 4)"),
    ({"x": np.zeros((10, 3, 5, 3)), "y": ODD}, "channels second or last, and not both, got shape (10, 3, 5, 3)"),
    ({"x": np.zeros((10, 2, 5, 2)), "y": ODD}, "channels second or last, and not both, got shape (10, 2, 5, 2)"),
    ({"x": np.zeros(10), "y": ODD}, "expected x with 2, 3 or 4 axes, got shape (10,)"),
    ({"x": GOOD, "y": np.ones((10, 2, 2))}, "[n, 2] of 0 and 1 for several classes, or of numbers, got float64"),
    ({"x": GOOD, "y": ODD + 1j}, "expected y of integers, texts, or floats for a regression, got complex128"),
    ({"x": GOOD, "y": ODD + np.inf}, "expected finite y, got 10 of 10 that are NaN, infinite or huge"),
    ({"x": GOOD, "y": ODD, "x_test": GOOD, "y_test": ODD / 2}, "got integers in train and floats in test"),
    ({"x": GOOD, "y": ODD[:9]}, "expected one label per example, got x (10, 4) and y (9,)"),
    ({"x": GOOD[:4], "y": ODD[:4]}, "1 or more test examples with labels, got 0 x and 0 y"),
    ({"x": GOOD, "y": -(10**5) - ODD - np.arange(10)}, "expected y up to 99999, got 6 different labels up to 100010"),
    ({"x": GOOD, "y": np.uint64(2**64 - 1) - ODD.astype(np.uint64)}, "expected y of int64, got larger numbers"),
    ({"x": np.array([None]), "y": ODD}, "Object arrays cannot be loaded when allow_pickle=False"),
)
def test_an_npz_that_is_not_as_expected_is_refused(arrays, message, tmp_path):
    with pytest.raises(DataUnreadable, match=re.escape(message)) as error:
        load_npz(tmp_path, **arrays)
    assert "own.npz" in one_line(error)
    (tmp_path / "own.npz").write_bytes(b"no archive")
    with pytest.raises(DataUnreadable, match=r"own\.npz"):
        data.load(f"npz:{tmp_path}/own.npz", Path("nowhere"))

"""A user's own data: objects, files with any keys, sizes and ranges, and labels of any kind."""

import doctest
import random
import re
import sys

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from leakgauge.harness import data
from leakgauge.harness.core.errors import StudyError, UnknownNameError
from leakgauge.harness.core.rng import Key, integers, uniform
from leakgauge.harness.data import DataUnreadable
from leakgauge.harness.data import given as given_module
from leakgauge.harness.data.given import given
from leakgauge.harness.data.torchvision_shim import torchvision
from leakgauge.harness.learn.gradients import gradients
from leakgauge.harness.learn.models import build, names, scaled
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import resolve
from tests.by_rows import by_rows
from tests.data_files import one_line, pixels
from tests.doubles import study_table

KEY = Key(0, ("own data",))
ODD = np.arange(20) % 2
X = uniform(KEY.child("x"), (20, 3)).numpy()


def load(name):
    return data.load(name, None)


def loaded(what, name="mine"):
    return load(given(name, what))


def of_npz(folder, query="", **arrays):
    np.savez(folder / "own.npz", **arrays)
    return load(f"npz:{folder}/own.npz{query}")


def refused(make, words, kind=DataUnreadable):
    with pytest.raises(kind, match=re.escape(words)) as error:
        make()
    one_line(error)


class Items(Dataset):
    """Items from a function of their number."""

    def __init__(self, make, count=20, classes=None):
        self.make, self.count = make, count
        if classes is not None:
            self.classes = classes

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        return self.make(number)


# --- scale


def test_a_table_of_any_range_is_brought_to_0_and_1_feature_by_feature_and_back():
    x = np.stack([X[:, 0], 1e4 * X[:, 1] - 300, np.full(20, 7.0), ODD, -X[:, 2]], 1)
    mine = loaded((x, ODD, 2 * x[:6], ODD[:6]))
    stored = torch.cat([mine.train.x, mine.test.x])
    assert (stored.amin(0)[1:].tolist(), stored.amax(0).tolist()) == ([0.0] * 4, [1.0] * 5)
    whole = torch.from_numpy(np.concatenate([x, 2 * x[:6]]).astype(np.float32))
    assert torch.allclose(mine.original(stored), whole, rtol=1e-6, atol=1e-3)
    # what is in [0, 1] stays, and what is constant becomes 0
    alone = loaded((x, ODD))
    assert torch.equal(alone.train.x[:, 0], torch.from_numpy(X[np.r_[:8, 10:18], 0]))
    assert (alone.low[0], alone.span[0], alone.span[2], alone.low[2], alone.low[3]) == (0, 1, 1, 7, 0)
    assert not alone.train.x[:, 2].any()


@pytest.mark.parametrize("dtype", [np.int16, np.int64, np.uint16, np.float16, np.float64])
def test_images_of_any_range_are_scaled_channel_by_channel(dtype):
    x = (pixels(20, 3, 5, 6) * np.arange(1, 4)[:, None, None] // 3).astype(dtype)
    mine = loaded((torch.from_numpy(x.astype(np.float64)) if dtype == np.float16 else x, ODD))
    assert (mine.low.shape, mine.span.flatten().tolist()) == ((3, 1, 1), (x.max((0, 2, 3)) - x.min((0, 2, 3))).tolist())
    assert torch.allclose(mine.original(mine.test.x), torch.from_numpy(x[[8, 9, 18, 19]].astype(np.float32)), atol=1e-3)


def test_inputs_in_0_and_1_stay_bit_for_bit_and_have_no_scale():
    for x in (X, X.astype(np.float64), ODD[:, None] == 1, np.eye(20, dtype=int)):
        mine = loaded((x, ODD, x, ODD))
        assert (mine.low, mine.span) == (None, None)
        assert torch.equal(mine.train.x, torch.from_numpy(x.astype(np.float32)))
        assert mine.original(mine.train.x) is mine.train.x


def test_the_digest_knows_the_scale():
    assert loaded((2 * X, ODD)).digest != loaded((4 * X, ODD)).digest
    assert loaded((2 * X, ODD)).digest == loaded((2 * X, ODD)).digest


@pytest.mark.parametrize("name", [name for name, _ in names() if name not in ("resnet110", "cnn3")])
def test_a_scaled_model_is_the_model_on_the_inputs_as_they_were(name):
    shape, low, span = (3, 16, 16), torch.tensor([-1.0, 0, 5])[:, None, None], torch.tensor([2.0, 1, 3])[:, None, None]
    plain = build(name, shape, 4)
    task, raw = ModelTask(scaled(plain, low, span)), ModelTask(plain)
    params, x = task.init(KEY), uniform(KEY, (2, 3, *shape))
    y = torch.eye(4)[torch.arange(6) % 4].view(2, 3, 4)
    if raw.softmax:
        assert torch.allclose(
            gradients(task, params, x, y), gradients(raw, params, x * span + low, y), rtol=1e-3, atol=1e-5
        )
    assert torch.equal(task.outputs(params, x[0]), raw.outputs(params, x[0] * span + low))
    assert torch.equal(task.in_training(params, x[0]).scores, raw.in_training(params, x[0] * span + low).scores)
    assert scaled(plain, None, None) is plain


# --- npz


@by_rows(
    (("X", "labels"), ""),
    (("images", "Y"), ""),
    (("data", "target"), ""),
    (("Features", "TARGETS", "notes"), ""),
    (("x_train", "y_train", "x_test", "y_test"), ""),
    (("train_images", "train_labels", "test_images", "test_labels", "val_images"), ""),
    (("a", "b", "x", "y"), "?x=a&y=b"),
    (("a=b", "c", "e", "d"), "?x=a=b&y=c&x_test=e&y_test=d"),
    (("x", "fine", "x_test", "coarse"), "?y=fine"),
)
def test_an_npz_has_its_arrays_under_any_keys(keys, query, tmp_path):
    arrays = (X, ODD, X[:4], ODD[:4], X)
    mine = of_npz(tmp_path, query, **dict(zip(keys, arrays, strict=False)))
    has_test = "test" in "".join(keys) + query and query != "?y=fine"
    expected = (
        arrays if has_test else (X[np.r_[:8, 10:18]], ODD[np.r_[:8, 10:18]], X[[8, 9, 18, 19]], ODD[[8, 9, 18, 19]])
    )
    for tensor, array in zip((*mine.train, *mine.test), expected, strict=False):
        assert torch.equal(tensor, torch.from_numpy(array))


@by_rows(
    ("", "one x and one y, with both or none of x_test and y_test, got the keys 'x', 'data', 'y'; name them"),
    ("?x=nope", "no key 'nope'; expected one x and one y"),
    ("?x=data&x_test=x", "with both or none of x_test and y_test"),
)
def test_an_npz_whose_keys_are_unclear_names_its_keys_and_the_option(query, words, tmp_path):
    refused(lambda: of_npz(tmp_path, query, x=X, data=X, y=ODD), words)


@by_rows(
    ("npz:own.npz?z=3", "got the option 'z=3', but its options are x=..., y=..., x_test=..., y_test=..."),
    ("npz:own.npz?x=", "got the option 'x=', but its options are x=..."),
    ("npz:own.npz?x=a&x=b", "got the option 'x=b', but its options"),
    ("folder:own?sise=64", "got the option 'sise=64', but its options are size=..."),
    ("given:mine?size=64", "got the option 'size=64', but its options are classes=..."),
    ("pathlib:Path?size=64", "got the option 'size=64', but its options are classes=..."),
    *((f"folder:own?size={size}", f"up to 4096, got size={size}") for size in ("0", "5000", "8x", "-3", "8x8x8", "٣")),
)
def test_unknown_and_wrong_options_list_what_there_is(name, words):
    refused(lambda: load(name), words, ValueError)


def test_a_path_may_hold_a_question_mark(tmp_path):
    (tmp_path / "what?").mkdir()
    np.savez(tmp_path / "what?" / "own.npz", X=X, y=ODD)
    assert len(load(f"npz:{tmp_path}/what?/own.npz?").train.x) == 16
    assert load(f"npz:{tmp_path}/what?/own.npz?x=X&y=y").input_shape == (3,)


# --- labels


@by_rows(
    (np.array(["eel", "cat"])[ODD], ("cat", "eel"), [1, 0, 1]),
    (np.array([b"eel", b"cat"])[ODD], ("cat", "eel"), [1, 0, 1]),
    (np.array(["eel", "cat"], object)[ODD], ("cat", "eel"), [1, 0, 1]),
    (np.array(["10", "9"])[ODD], ("9", "10"), [1, 0, 1]),
    (np.array(["0.5", "-2"])[ODD], ("-2", "0.5"), [1, 0, 1]),
    (np.array(["10", "9a"])[ODD], ("10", "9a"), [0, 1, 0]),
    (ODD == 1, ("0", "1"), [0, 1, 0]),
    (ODD.astype(np.uint8)[:, None], ("0", "1"), [0, 1, 0]),
    (ODD / 4, (), [0.0, 0.25, 0.0]),
    (ODD[:, None].astype(np.float16), (), [0.0, 1.0, 0.0]),
)
def test_labels_are_integers_texts_or_the_numbers_of_a_regression(y, classes, first):
    mine = loaded((X, y))
    assert mine.classes == classes
    assert mine.train.y[:3].tolist() == first
    assert mine.train.y.dtype == (torch.int64 if classes else torch.float32)


def coded(low, high):
    return f"labels {low}, {high} became the classes 0 to 1 in ascending order"


@by_rows(
    (2 * ODD - 1, ("-1", "1"), [0, 1, 0], coded(-1, 1)),
    (1 - 2 * ODD.astype(np.int8), ("-1", "1"), [1, 0, 1], coded(-1, 1)),
    (ODD + 1, ("1", "2"), [0, 1, 0], coded(1, 2)),
    (255 * ODD.astype(np.uint8), ("0", "255"), [0, 1, 0], coded(0, 255)),
    (ODD * 10**12, ("0", "1000000000000"), [0, 1, 0], coded(0, 10**12)),
    (np.arange(20) % 4 * 3 - 5, ("-5", "-2", "1", "4"), [0, 1, 2], "labels -5, -2, 1, 4 became the classes 0 to 3"),
    (3 - np.arange(20) % 5 // 2, tuple("123"), [2, 2, 1], "labels 1, 2, 3 became the classes 0 to 2"),
    (ODD * 3, ("0", "1", "2", "3"), [0, 3, 0], ""),
    (2.0 * ODD - 1, (), [-1, 1, -1], "labels are two floats, which make a regression (integers make classes)"),
)
def test_integers_that_number_no_classes_become_classes_in_ascending_order_with_a_note(
    y, classes, first, note, tmp_path
):
    for mine in (loaded((X, y)), of_npz(tmp_path, x=X, y=y), loaded(Items(lambda i: (X[i], y[i])))):
        assert (mine.classes, mine.train.y[:3].tolist()) == (classes, first)
        assert mine.note.startswith(note)
        assert bool(mine.note) == bool(note)
    apart = loaded((X, y, X[:5], y[:5]))
    assert torch.equal(apart.test.y, apart.train.y[:5])


def test_names_of_classes_say_which_integers_number_them():
    def named(classes):
        return loaded(Items(lambda i: (X[i], 2 + 7 * int(ODD[i])), classes=classes))

    names = [str(n) for n in range(10)]
    few, both = named(names), named(["low", "high"])
    assert (few.classes, few.train.y[:2].tolist(), few.note) == (tuple(names), [2, 9], "")
    assert (both.classes, both.train.y[:2].tolist()) == (("low", "high"), [0, 1])
    assert both.note.startswith("labels 2, 9 became")


def test_every_fifth_example_of_a_regression_is_for_testing():
    mine = loaded((X, X[:, 0]))
    assert torch.equal(mine.test.y, torch.from_numpy(X[4::5, 0]))
    assert len(mine.train.y) == 16


# --- folders


def photo(width, height, mode="RGB"):
    return Image.fromarray(pixels(height, width, 3, name=mode)).convert(mode)


@pytest.mark.parametrize("shape", [(90, 50), (51, 77), (40, 40), (64, 200), (33, 31), (64, 64)])
def test_a_square_size_is_the_resize_and_the_crop_of_torchvision(tmp_path, shape):
    transforms = torchvision().transforms
    image = photo(*shape)
    expected = transforms.CenterCrop(64)(transforms.Resize(64)(image))
    for name in "abcde":
        (tmp_path / "cat").mkdir(exist_ok=True)
        image.save(tmp_path / "cat" / f"{name}.png")
    mine = load(f"folder:{tmp_path}?size=64")
    assert torch.equal(mine.test.x[0], transforms.functional.to_tensor(expected))


def test_images_of_mixed_sizes_and_colors_become_alike(tmp_path):
    for name, image in {"a": photo(30, 20), "b": photo(20, 50, "L"), "c": photo(9, 9, "P"), "d": photo(16, 12)}.items():
        for part in ("train", "test"):
            (tmp_path / part / "cat").mkdir(parents=True, exist_ok=True)
            image.save(tmp_path / part / "cat" / f"{name}.png")
    refused(lambda: load(f"folder:{tmp_path}"), "add ?size=64 to resize")
    mine = load(f"folder:{tmp_path}?size=16x12")
    assert mine.input_shape == (3, 12, 16)
    gray = mine.train.x[1]
    assert torch.equal(gray[0], gray[1])
    assert torch.equal(mine.train.x[3], torch.from_numpy(np.array(photo(16, 12)).transpose(2, 0, 1).copy()) / 255)


def test_a_thin_image_is_refused_before_it_is_resized(tmp_path):
    (tmp_path / "cat").mkdir()
    Image.new("L", (1, 60_000)).save(tmp_path / "cat" / "a.png")
    refused(lambda: load(f"folder:{tmp_path}?size=4000"), "LEAKGAUGE_MAX_UNPACKED")


# --- objects


IMAGES = pixels(20, 6, 4, 3)
FORMS = {
    "tensors": TensorDataset(torch.from_numpy(IMAGES).permute(0, 3, 1, 2).float() / 255, torch.from_numpy(ODD)),
    "images of Pillow": Items(lambda i: (Image.fromarray(IMAGES[i]), int(ODD[i]))),
    "dictionaries": Items(lambda i: {"Image": Image.fromarray(IMAGES[i]), "label": ODD[i], "path": "x.png"}),
    "a list": [(Image.fromarray(image), torch.tensor([label])) for image, label in zip(IMAGES, ODD, strict=True)],
    "arrays": (IMAGES, ODD),
    "tensors of arrays": (torch.from_numpy(IMAGES.transpose(0, 3, 1, 2).copy()), torch.from_numpy(ODD)),
    "texts": Items(lambda i: (Image.fromarray(IMAGES[i]), ["no", "yes"][ODD[i]])),
    "classes": Items(lambda i: [Image.fromarray(IMAGES[i]), ODD[i]], classes=["no", "yes"]),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_same_images_is_the_same_data_set(form):
    mine = loaded(FORMS[form])
    assert mine.digest == loaded(FORMS["arrays"]).digest
    assert mine.classes == (("no", "yes") if form in ("texts", "classes") else ("0", "1"))
    assert (mine.name, mine.public, mine.note, mine.stated) == ("given:mine", False, "", None)
    again = loaded(mine, "again")
    assert (again.digest, again.name) == (mine.digest, "given:again")


def test_pairs_are_training_and_test_sets_and_vectors_are_a_table():
    table = Items(lambda i: (X[i], float(i)))
    mine = loaded((table, Items(table.make, 3)))
    assert (mine.input_shape, len(mine.train.x), len(mine.test.x), mine.classes) == ((3,), 20, 3, ())
    assert torch.equal(mine.test.x, torch.from_numpy(X[:3]))
    assert loaded((X, ODD, X[:3], ODD[:3])).test.y.tolist() == [0, 1, 0]


def test_gray_and_color_items_become_color():
    mine = loaded(Items(lambda i: (photo(4, 3, "L" if i % 2 else "RGB"), i % 2)))
    assert mine.input_shape == (3, 3, 4)


class Stream(IterableDataset):
    """Has no length."""

    def __iter__(self):
        return iter([])


def fails(number):
    raise SystemExit("out of\ntape")


@by_rows(
    (Stream(), "expected items (x, y), got none from a Stream"),
    (3, "expected a torch Dataset with a length, a pair (train, test) of them, arrays (x, y)"),
    ("mnist", "or a leakgauge DataSet, got str"),
    (None, "got NoneType"),
    (Dataset(), "got Dataset"),
    ((X, ODD, X), "got 3 arrays"),
    (Items(fails), "train item 0: SystemExit: out of tape"),
    (Items(lambda i: (X[i], 0, 0)), "train item 0: expected (x, y), or a dictionary with an input"),
    (Items(lambda i: X[i]), "train item 0: expected (x, y), or a dictionary"),
    (Items(lambda i: {"a": 1, "b": 2}), "expected one input and one label, as in {'image': ..., 'label': "),
    (Items(lambda i: (X[i], None)), "train item 0: expected a label of one number or text, got NoneType"),
    (Items(lambda i: (X[i], X[i])), "expected a label of one number or text, got ndarray of shape (3,)"),
    (Items(lambda i: (X[i], "a" if i else 0)), "expected train labels of one kind, got numbers and texts"),
    (
        Items(lambda i: (photo(4 + i, 4), 0)),
        "train item 1: expected the shape of the first, (3, 4, 4), got (3, 4, 5); resize them in the dataset's transf",
    ),
    ((Items(lambda i: (X[i], 0)), Items(fails)), "test item 0: SystemExit"),
    (Items(fails, 0), "expected"),
    (Items(fails, 10**12), "got 1,000,000,000,000 items, expected at most 1,000,000; take fewer, or set"),
    (Items(lambda i: (np.zeros(10**6), 0), 10**6), "the inputs take 4,000,000,000,000 bytes or more"),
    (Items(lambda i: (np.zeros((2, 3, 4, 4)), 0)), "expected x with 2, 3 or 4 axes, got shape (20, 2, 3, 4, 4)"),
    ((X * np.nan, ODD), "expected finite x, got 60 of 60 values that are NaN, infinite or huge"),
    ((np.array([None] * 20)[:, None], ODD), "expected x of numbers, got object"),
)
def test_objects_that_are_no_data_are_refused_in_one_line(what, words):
    refused(lambda: given("bad", what), words)
    refused(lambda: load("given:bad"), "no data 'given:bad' in this process", UnknownNameError)


def test_limits_of_items_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("LEAKGAUGE_MAX_ITEMS", "19")
    refused(lambda: given("many", (X, ODD)), "got 20 items, expected at most 19")
    monkeypatch.setenv("LEAKGAUGE_MAX_ITEMS", "20")
    monkeypatch.setenv("LEAKGAUGE_MAX_UNPACKED", "239")
    refused(lambda: given("many", (X, ODD)), "the inputs take 240 bytes or more, expected at most 239")


def noisy(number):
    return torch.rand(3) * random.random() * np.random.rand(), number % 2  # noqa: NPY002


def test_random_items_are_drawn_once_from_the_same_start_and_the_note_says_so():
    torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    one = loaded(Items(noisy))
    assert (torch.equal(torch.get_rng_state(), before[0]), random.getstate()) == (True, before[1])
    assert np.random.get_state()[1].tolist() == before[2]  # noqa: NPY002
    torch.manual_seed(2)
    assert loaded(Items(noisy)).digest == one.digest
    assert one.note == "the items are drawn at random, as by a transform: one draw of each was taken"
    own = np.random.default_rng()  # seen by the second reading alone
    assert loaded(Items(lambda i: (own.random(3), i % 2))).note == one.note


CODE = """
import torch
from torch.utils.data import TensorDataset
y = torch.arange(20) % 2
def table(): return TensorDataset(torch.rand(20, 3), y)
def pair(): return table(), table()
arrays = (torch.zeros(20, 3), y)
ready = table()
def fails(): raise ZeroDivisionError("of a\\nfactory")
def exits(): raise SystemExit(3)
def nothing(): pass
def needs(folder): pass
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "own_factory.py").write_text(CODE)
    (tmp_path / "own_torn.py").write_text("def (:")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("own_factory", "own_torn"):
        sys.modules.pop(name, None)


def test_a_factory_returns_data_or_the_attribute_is_data(module):
    for name in ("table", "pair", "arrays", "ready"):
        assert load(f"own_factory:{name}").input_shape == (3,)
    one = load("own_factory:table")
    assert (one.digest, one.name, one.note) == (load("own_factory:table").digest, "own_factory:table", "")
    assert load("own_factory:pair").train.x[0, 0] != load("own_factory:pair").test.x[0, 0]


@by_rows(
    ("own_factory:fails", "cannot read 'own_factory:fails': ZeroDivisionError: of a factory", DataUnreadable),
    ("own_factory:exits", "SystemExit: 3", DataUnreadable),
    ("own_factory:nothing", "got NoneType", DataUnreadable),
    ("own_factory:needs", "TypeError: needs() missing 1 required positional argument: 'folder'", DataUnreadable),
    ("own_torn:x", "SyntaxError", DataUnreadable),
    ("own_factory:gone", "has no attribute 'gone'", UnknownNameError),
    ("fodler:x", "no data set 'fodler:x'; did you mean 'folder:PATH'?", UnknownNameError),
    ("./own.py:x", "no data set './own.py:x'", UnknownNameError),
    (":x", "no data set ':x'", UnknownNameError),
    ("recording:x", "no data set 'recording:x'", UnknownNameError),
    ("own_factory:", "expected own_factory:", ValueError),
)
def test_a_factory_that_fails_is_one_line(name, words, kind, module):
    refused(lambda: load(name), words, kind)


def test_only_what_is_no_form_is_code():
    assert [
        name for name in ("digits", "npz:a", "folder:a", "given:a", "recording:a", "a:b") if data.is_code(name)
    ] == ["a:b"]


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
ARRAYS = st.builds(
    lambda shape, kind: np.zeros(shape, kind),
    st.lists(st.integers(0, 5), max_size=5),
    st.sampled_from(["u1", "i8", "f4", "f8", "?", "U3", "S2", "c8", "O", "M8[s]"]),
)
THINGS = st.recursive(
    SCALARS | ARRAYS,
    lambda inner: st.lists(inner, max_size=6) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@drawn(THINGS)
def test_whatever_is_given_is_data_or_one_line(thing):
    said = ""
    try:
        loaded(thing)
    except DataUnreadable as error:
        said = str(error)
    assert "\n" not in said


def study_of(name, threats=("server",), model="linear"):
    attacks, more = [{"name": "prior", "target": {"count": 2}}], {"name": "own", "threats": list(threats)}
    return resolve(study_table({"clients": 2, "rounds": 1}, ["none"], attacks, data=name, model=model, **more))


def test_errors_of_a_study_name_the_key_before_anything_runs(tmp_path):
    wide, other = given("wide", (9 * X, ODD)), given("other", (8 * X, ODD))
    for study, words in (
        (study_of("npz:gone.npz"), "own: tasks.data: no npz file"),
        (study_of("given:gone"), "own: tasks.data: no data 'given:gone' in this process"),
        (study_of(wide, model="cnn2"), "own: tasks.model: model 'cnn2' expects (channels, height, width)"),
        (study_of(wide, [f"server+auxiliary={other}"]), "its inputs are scaled to [0, 1] otherwise than those of"),
    ):
        refused(lambda study=study: run_study(study, tmp_path / "out", workers=0), words, StudyError)
    words = "only this process has 'given:wide': expected workers=0, got workers=2"
    refused(lambda: run_study(study_of(wide), tmp_path / "out", workers=2), words, StudyError)
    assert not (tmp_path / "out").exists()


def test_numbers_too_large_for_classes_are_told_to_become_floats():
    y = integers(KEY, 20, 10**6) + 10**5
    refused(lambda: given("ids", (X, y)), "expected y up to 99999", DataUnreadable)
    refused(lambda: given("ids", (X, y)), "for a regression, make them floats", DataUnreadable)
    assert loaded((X, y.astype(float))).classes == ()


def test_the_example_of_given_runs():
    assert doctest.testmod(given_module) == (0, 2)

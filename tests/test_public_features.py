"""Fixed public features of a data set."""

import dataclasses

import numpy as np
import pytest
import torch

from leakgauge.harness.core import rng
from leakgauge.harness.core.code import task_code
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.data import features, load
from leakgauge.harness.data.given import given

AXES, PATCHES = "features:digits?axes=20&public=given:public-digits", "features:photos?patches=8&public=photos"


@pytest.fixture(autouse=True)
def _public():
    digits = load("digits")
    x, y = digits.train  # other data, as the order differs
    given("public-digits", dataclasses.replace(digits, train=Examples(x.flip(0), y.flip(0))))


def test_axes_are_those_of_the_public_data():
    data, digits = load(AXES), load("digits")
    assert data.input_shape == (20,)
    shown = digits.original(digits.train.x).flatten(1).double().numpy()
    values, vectors = np.linalg.eigh(np.cov(shown.T, bias=True))
    expected = (shown - shown.mean(0)) @ (vectors[:, -20:] / values[-20:] ** 0.25)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    found = data.original(data.train.x).numpy()
    signs = np.sign((found * expected).sum(0))
    assert np.abs(found - signs * expected).max() < 1e-4


def test_a_record_has_its_features_whatever_the_other_private_records_are():
    digits = load("digits")
    few = dataclasses.replace(digits, train=digits.train._replace(x=digits.train.x[:7], y=digits.train.y[:7]))
    given("few-digits", few)
    alone = load("features:given:few-digits?axes=20&public=given:public-digits")
    assert torch.equal(alone.train.x, load(AXES).train.x[:7])


def test_data_that_are_their_own_public_set_lose_the_public_records():
    digits, data = load("digits"), load("features:digits?axes=20&public=digits")
    assert len(data.train.y) == len(digits.train.y) - len(digits.train.y) // 10
    shown = features._KEY.child("own")
    public = rng.subset(shown, len(digits.train.y), len(digits.train.y) // 10)
    rest = np.delete(np.arange(len(digits.train.y)), public)
    assert torch.equal(data.train.y, digits.train.y[rest])
    changed = digits.train.x.clone()
    changed[rest[1:]] = 0.5  # the other private records
    given("changed-digits", dataclasses.replace(digits, train=digits.train._replace(x=changed)))
    again = load("features:given:changed-digits?axes=20&public=given:changed-digits")
    assert torch.equal(again.train.x[0], data.train.x[0])
    given("again", digits)  # another name of the same data
    assert len(load("features:digits?axes=20&public=given:again").train.y) == len(data.train.y)


def test_patches_have_eight_numbers_each_and_repeat():
    data, again = load(PATCHES), load(PATCHES)
    assert data.input_shape == (64,)
    assert data.digest == again.digest
    assert data.original(data.train.x).norm(dim=1).mean() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("features:digits?axes=20", "axes=K&public=DATA"),
        ("features:digits?axes=20&patches=8&public=digits", "axes=K&public=DATA"),
        ("features:digits?axes=65&public=digits", "1 to 64 axes, got 65"),
        ("features:digits?patches=8&public=digits", "images of 12 pixels or more"),
        ("features:digits?axes=9&public=photos", "expected public inputs"),
        ("features:?axes=9&public=photos", "DATA"),
    ],
)
def test_refusals(name, message):
    with pytest.raises(ValueError, match=message):
        load(name)


def test_the_form_is_listed():
    assert set(features.FORMS) == {"features"}


@pytest.mark.parametrize(
    ("data", "code"),
    [
        ("features:digits?axes=9&public=digits", []),
        ("features:folder:here?axes=9&public=npz:there", []),
        ("features:module:factory?axes=9&public=digits", ["module:factory"]),
        ("features:digits?axes=9&public=module:factory", ["module:factory"]),
        ("features:features:module:factory?axes=9&public=digits?axes=3&public=digits", ["module:factory"]),
    ],
)
def test_features_name_code_only_where_their_data_sets_do(data, code):
    assert task_code("linear", data) == code

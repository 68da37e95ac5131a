"""Without the package of an extra, what needs it says what to install; everything else works.

The tests with Flower are in tests/flower, those with Ray in tests/test_ray.py.
"""

import importlib
import importlib.metadata
import importlib.util
import sys

import pytest

from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.study import engines
from leakgauge.harness.study.engine import open_engine
from leakgauge.harness.study.run import run_study
from tests.by_rows import by_rows
from tests.command import call, refused
from tests.test_run import contents, study


@pytest.mark.skipif(importlib.util.find_spec("flwr") is not None, reason="Flower is installed")
def test_without_flower_its_module_says_what_to_install():
    with pytest.raises(ImportError, match=r"Flower: from a checkout, pip install '\.\[flower\]'"):
        importlib.import_module("leakgauge.flower")


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_its_engine_says_what_to_install():
    with pytest.raises(StudyError, match=r"^engine: Ray is not installed: from a checkout, pip install '\.\[ray\]'$"):
        open_engine("ray", None, None)


def test_without_cryptography_a_signature_is_refused_with_what_to_install_and_all_else_works(tmp_path, monkeypatch):
    run_study(study(seeds=[0]), tmp_path / "out", workers=0)
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "leakgauge.harness.study.signed", raising=False)
    monkeypatch.delattr("leakgauge.harness.study.signed", raising=False)
    for words in (("verify", tmp_path / "out", "--key", "me.pub.pem"), ("sign", "--new-key", tmp_path / "me.pem")):
        assert refused(*words) == "leakgauge: cryptography is not installed: from a checkout, pip install '.[sign]'"
    assert call("verify", tmp_path / "out").exit_code == 0


@by_rows(
    (("dask", None, None), "expected workers or ray, got 'dask'"),
    (("workers", "10.0.0.1:6379", None), "workers takes no address, got --address 10.0.0.1:6379"),
    (("ray", None, 0), "ray needs worker processes: expected workers >= 1, got workers=0"),
    (("_preload", None, None), "expected workers or ray, got '_preload'"),
    (("mine:Engine", None, None), "'mine:Engine' names code to import; pass --allow-code if you trust it"),
)
def test_an_engine_that_does_not_fit_is_refused_in_one_line(asked, text, monkeypatch):
    monkeypatch.delenv("LEAKGAUGE_ALLOW_CODE", raising=False)
    with pytest.raises(StudyError) as raised:
        open_engine(*asked)
    assert str(raised.value) == f"engine: {text}"


TOY = """
from leakgauge.harness.study.engine import Ended
from leakgauge.harness.study.jobs import perform

class Toy:
    def __init__(self, place, slots=None):
        self.place, self.slots, self.jobs = place, slots or 1, {}

    def start(self, slot, job):
        self.jobs[slot] = job

    def wait(self, seconds):
        slot, job = self.jobs.popitem()
        return [Ended(slot, perform(job, self.place))]

    def megabytes(self, slot):
        return None

    def kill(self, slot):
        del self.jobs[slot]

    def close(self):
        self.jobs.clear()
"""


def test_an_engine_is_one_file_found_by_its_name_or_by_module_and_class(tmp_path, monkeypatch):
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.setattr(engines, "__path__", [*engines.__path__, str(tmp_path)])
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StudyError, match=r"^engine: expected workers or ray or toy, got 'tyo'$"):
        open_engine("tyo", None, None)
    with pytest.raises(StudyError, match=r"^engine: toy takes no address, got --address 10.0.0.1:6379$"):
        open_engine("toy", "10.0.0.1:6379", None)
    with pytest.raises(StudyError, match=r"^engine: no engine 'toy:Other': AttributeError: module 'toy' has no"):
        open_engine("toy:Other", None, None, allow_code=True)
    point = importlib.metadata.EntryPoint("mine", "toy:Toy", "leakgauge.engines")
    every = importlib.metadata.entry_points
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda *, group: [point] if group == "leakgauge.engines" else every(group=group),
    )
    run_study(study(seeds=[0]), tmp_path / "here", workers=0)
    for name, folder in (("toy", tmp_path / "found"), ("toy:Toy", tmp_path / "named"), ("mine", tmp_path / "entered")):
        run_study(study(seeds=[0]), folder, engine=open_engine(name, None, 2, allow_code=":" in name))
        assert contents(folder) == contents(tmp_path / "here")


def test_the_default_engine_is_none_of_these():
    assert open_engine("workers", None, 3) is None

"""The membership benchmark: no shadow reveals a target, the rates and bars are right, and all parts run."""

import csv
import dataclasses
import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

from leakgauge import Key, rng
from leakgauge.attacks._members.shadowing import halves
from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.stats import mean, tpr_at_fpr
from tests.by_rows import by_rows

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    membership, pools = (importlib.import_module(name) for name in ("membership", "membership_pools"))

KEY = Key(0)
RUNS, RECORDS, ASIDE = 66, 200, 20
STATISTICS = pytest.mark.parametrize("name", membership.STATISTICS)


def noise(gain=0.0):
    """Models whose log odds are noise, plus `gain` for records inside."""
    inside = halves(KEY.child("halves"), RUNS, RECORDS, RECORDS // 2)
    phi = rng.normal(KEY.child("phi"), (RUNS, RECORDS), dtype=torch.float64) + gain * inside
    phi = torch.cat([phi, rng.normal(KEY.child("aside"), (RUNS, ASIDE), dtype=torch.float64)], 1)
    return membership.Runs(inside, torch.stack([phi, torch.zeros_like(phi)], -1), torch.zeros(RECORDS + ASIDE).long())


def rates_of(auc, low):
    values = {"auc": auc, "low": low, "lowest": None}
    return membership.Rates(*(mean(name, [value]) for name, value in values.items()))


@pytest.mark.parametrize("count", [0, 1, 4, 16, 63, 64])
def test_neither_a_target_nor_its_complement_is_its_shadow(count):
    runs = noise()
    for target in range(RUNS):
        assert torch.equal(runs.inside[target], ~runs.inside[target ^ 1])
        used = membership.look(runs, target, count).shadows
        assert len(set(used)) == count
        assert not {target, target ^ 1} & set(used)


@STATISTICS
def test_the_complements_outputs_change_no_score(name):
    runs, target, statistic = noise(), 6, membership.STATISTICS[name]
    planted = runs._replace(table=runs.table.clone())
    planted.table[7, :, 0] = 1e3
    scores = [statistic(membership.look(one, target, 63)) for one in (runs, planted)]
    assert torch.equal(*scores)
    planted.table[8, :, 0] = 1e3  # a run of another pair changes the scores of statistics with shadows
    assert torch.equal(scores[0], statistic(membership.look(planted, target, 63))) == (name == "loss")


def test_more_shadows_than_other_runs_are_refused():
    with pytest.raises(ValueError, match="expected at most 64 shadows of 66 runs, got 65"):
        membership.others(0, 65, RUNS)


@pytest.mark.parametrize("gain", [0.0, 1.0], ids=["nothing", "twin"])
def test_noise_gives_chance_and_a_gain_does_not(gain, monkeypatch):
    monkeypatch.setattr(membership, "SHADOWS", (4,))
    # the AUC of 100 against 100 has standard deviation sqrt(201 / 120000); 5 of these for the mean of 32: alpha 6e-7.
    # With a gain of one standard deviation, the best AUC is Phi(1 / sqrt(2)) = 0.76.
    bound = 5 * (201 / 120_000) ** 0.5 / 32**0.5
    for scored in membership.leave_one_out(noise(gain)).values():
        assert len(scored) == 32
        assert (abs(membership.rates(scored).auc.value - 0.5) < bound) == (gain == 0)


def test_members_are_those_of_the_targets_own_half(monkeypatch):
    monkeypatch.setattr(membership, "STATISTICS", {"loss": membership.STATISTICS["loss"]})
    runs = noise()
    runs = runs._replace(table=torch.stack([runs.inside.double(), torch.zeros(RUNS, RECORDS)], -1))
    for members, others in membership.leave_one_out(runs)["loss", 0]:
        assert len(members) == len(others) == RECORDS // 2
        assert members.min() > others.max()


def scored(targets=4, members=300):
    parts = (rng.normal(KEY.child("scores", i), (2, members), dtype=torch.float64).numpy() for i in range(targets))
    return [(1 + inside, outside) for inside, outside in parts]


def test_the_rate_at_one_in_a_thousand_is_that_of_all_targets_together():
    pairs = scored()
    found = membership.rates(pairs)
    inside, outside = (np.concatenate(side) for side in zip(*pairs, strict=True))
    assert found.lowest.value == pytest.approx(tpr_at_fpr(inside, outside, 0.001).value, rel=1e-12)
    assert found.lowest.low < found.lowest.value < found.lowest.high
    assert found.low.value == pytest.approx(np.mean([tpr_at_fpr(*pair, 0.01).value for pair in pairs]), rel=1e-12)
    assert (found.auc.n, found.low.n, found.lowest.n) == (4, 4, 4)


def test_a_rate_without_enough_records_is_not_shown():
    found = membership.rates(scored(targets=3))
    assert found.lowest.value is None
    assert membership.text_of(found.lowest) == "n/a"
    single = membership.rates(scored(targets=1)).low
    assert membership.text_of(single).replace(".", "").isdigit()  # one value has no interval


def test_the_curve_is_written_at_logarithmically_spaced_rates(tmp_path):
    pairs = scored()
    membership.write_roc(tmp_path / "roc.csv", {("RMIA", 4): pairs})
    with (tmp_path / "roc.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {(line["statistic"], line["shadows"]) for line in lines} == {("RMIA", "4")}
    fpr, tpr = (np.array([float(line[name]) for line in lines]) for name in ("fpr", "tpr"))
    assert (fpr[0], fpr[-1], tpr[-1]) == (pytest.approx(1 / 1200, rel=1e-5), 1, 1)
    np.testing.assert_allclose(np.diff(np.log(fpr)), np.log(1200) / (len(fpr) - 1), rtol=1e-3)
    assert (np.diff(tpr) >= 0).all()
    inside, outside = (np.concatenate(side) for side in zip(*pairs, strict=True))
    for at in (0, 50, 120):
        above = [rate for rate in (np.mean(outside >= t) for t in inside) if rate <= fpr[at] * (1 + 1e-6)]
        assert tpr[at] == pytest.approx(len(above) / len(inside), rel=1e-4)


@by_rows(
    ((0.65, 0.07), (0.5, 0.01), 0),
    ((0.5, 0.01), (0.66, 0.2), 0),
    ((0.70, 0.069), (0.649, 0.20), 1),  # neither has both
    ((0.70, None), (0.5, 0.01), 1),
)
def test_one_statistic_must_reach_both_parts_of_a_bar(lira, rmia, code, monkeypatch, capsys):
    monkeypatch.setattr(membership, "BARS", (membership.Bar(4, 0.65, 0.07),))
    assert membership.verdict({("LiRA", 4): rates_of(*lira), ("RMIA", 4): rates_of(*rmia)}) == code
    assert ("MISSED" in capsys.readouterr().out) == bool(code)


def test_the_bars_are_fixed():
    assert [tuple(bar) for bar in membership.BARS] == [(4, 0.65, 0.07), (63, 0.65, 0.1)]
    assert {bar.shadows for bar in membership.BARS} <= set(membership.SHADOWS)
    assert (membership.POOL, membership.INSIDE) == (1000, 500)


def test_a_tenth_of_the_labels_is_wrong_in_the_pool_and_in_the_rest():
    (pool, rest), (again, _) = (membership.records(KEY) for _ in range(2))
    assert (pool.x.shape, rest.x.shape) == ((1000, 1, 28, 28), (797, 1, 28, 28))
    assert torch.equal(pool.x, again.x)
    assert torch.equal(pool.y, again.y)
    wrong = true_labels(torch.cat([pool.x, rest.x])) != torch.cat([pool.y, rest.y])
    assert int(wrong.sum()) == 180  # of 1,797
    assert 70 < int(wrong[:1000].sum()) < 130  # 100 expected, standard deviation 6


def true_labels(images):
    """The original labels, looked up by the enlarged image."""
    digits = membership.digits(Path())
    x, y = (torch.cat(parts) for parts in zip(digits.train, digits.test, strict=True))
    enlarged = membership.interpolate(x, (28, 28), mode="bilinear").numpy()
    known = {image.tobytes(): int(label) for image, label in zip(enlarged, y, strict=True)}
    return torch.tensor([known[image.tobytes()] for image in images.numpy()])


@pytest.fixture
def tiny(monkeypatch):
    """Shrink the benchmark to 200 records and 8 models of a few steps."""
    spec = FederationSpec(clients=2, samples=100, rounds=1, local_epochs=1, batch=50, lr=0.05)
    small = dataclasses.replace(membership.PLAN, epochs=1)
    sizes = {"POOL": 200, "INSIDE": 100, "TARGETS": 3, "SHADOWS": (2, 6), "PLAN": small, "FEDERATIONS": {"two": spec}}
    for name, value in sizes.items():
        monkeypatch.setattr(membership, name, value)


def test_every_part_runs_and_is_printed(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(membership, "BARS", (membership.Bar(2, 0.0, 0.0), membership.Bar(6, 0.0, 0.0)))
    assert membership.main(["--seeds", "1", "--roc", str(tmp_path / "roc.csv")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("8 models in ")
    assert "MISSED" not in out
    printed = [line.split("  ")[1] for line in out.splitlines() if line.startswith("  ")]
    assert set(printed) >= {*membership.STATISTICS, *membership.ATTACKS}
    assert (tmp_path / "roc.csv").read_text().count("\n") == 1 + 200 * (1 + 2 * 8)


def test_a_missed_bar_ends_with_an_error(tiny, monkeypatch, capsys):
    monkeypatch.setattr(membership, "BARS", (membership.Bar(2, 0.0, 0.0), membership.Bar(6, 1.01, 0.0)))
    assert membership.main(["--seeds", "0"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("6 shadows: MISSED by LiRA and RMIA")


def test_the_same_key_trains_the_same_models(tiny):
    pool, rest = membership.records(KEY)
    one, two = (membership.train_runs(Examples(*pool), rest, KEY) for _ in range(2))
    assert torch.equal(one.table, two.table)
    assert one.inside.shape == (8, 200)
    assert one.table.shape == (8, 200 + 1597, 10)
    assert not torch.equal(one.table[0], one.table[2])


def test_pools_are_compared_with_the_bars(tiny, monkeypatch, capsys):
    monkeypatch.setattr(pools, "EPOCHS", {"digits": 1})
    monkeypatch.setattr(pools, "BARS", {"digits": {2: (0.0, 0.0), 4: (1.01, 0.0)}})
    assert pools.main(["digits", "7", "8"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 5
    assert lines[0].endswith("reached")
    assert lines[5].endswith("MISSED")


def test_the_peers_score_counts_other_records():
    runs = noise()
    seen = membership.look(runs, 0, 4)
    p = (runs.table[..., 0] / 2).sigmoid()
    ratio = p[0] / (p[seen.shadows].mean(0) + 1e-6)
    expected = [(2 * ratio[RECORDS:] < one).sum() for one in ratio[:RECORDS]]
    assert pools.peer(seen).tolist() == expected

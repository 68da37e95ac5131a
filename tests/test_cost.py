from leakgauge.harness.study.cost import estimate
from leakgauge.harness.study.study import resolve


def study(**attack):
    return resolve(
        {
            "name": "c",
            "tasks": [{"data": "photos", "model": "lenet-dlg"}],
            "federations": [{"clients": 10, "rounds": 100, "algorithm": "fedsgd"}],
            "defenses": [{"name": "none"}],
            "attacks": [{"name": "idlg", "target": {"count": 8}, **attack}],
        }
    )


def test_the_bound_grows_with_the_budget_and_names_its_unit():
    # 100 rounds x 10 clients x 2 ms; 8 victims x 1000 evaluations x 1.6 ms
    assert estimate(study(restarts=1, evaluations=1000)).startswith("at most about 2 s of training and 13 s of attacks")
    assert "4 min of attacks" in estimate(study(restarts=2, evaluations=10_000))
    assert "35.6 h of attacks" in estimate(study(restarts=10, evaluations=1_000_000))

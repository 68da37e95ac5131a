"""What a gate looks at."""

import dataclasses

from leakgauge.harness.gate.measure import measured
from tests.report_fixtures import GAUSSIAN, MATCHING, NONE, PROBE, grid, make_run


def test_a_task_without_accuracy_has_no_measure_of_it():
    run = make_run(grid([NONE, GAUSSIAN[0]], [(MATCHING, PROBE, "server")]))
    metrics = [one.metric for one in measured(run).measures]
    assert metrics.count("accuracy") == 2
    without = {
        key: dataclasses.replace(
            record, evaluations=tuple(dataclasses.replace(one, accuracy=None) for one in record.evaluations)
        )
        for key, record in run.trainings.items()
    }
    found = measured(dataclasses.replace(run, trainings=without)).measures
    assert [one.metric for one in found] == [name for name in metrics if name != "accuracy"]
    assert not [one.problem for one in found if one.problem]

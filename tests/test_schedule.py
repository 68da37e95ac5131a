"""The order of jobs, what becomes of jobs whose worker dies, and parts: split, joined, lost and resumed."""

import dataclasses
import heapq
import shutil

import pytest

from leakgauge.attacks._engine import matching
from leakgauge.harness.core.cell import TaskSpec
from leakgauge.harness.data import default_root
from leakgauge.harness.study import schedule
from leakgauge.harness.study.attack import run_attack, run_part
from leakgauge.harness.study.cost import Pace
from leakgauge.harness.study.engine import Died, Ended, Here, Interrupted
from leakgauge.harness.study.jobs import Job, Outcome, RunContext, limit_id, named, perform, shares, victims_of
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.schedule import Progress, Schedule, supervise
from leakgauge.harness.study.store import Store
from tests.test_run import COIN, ECHO, contents, study

IDLG = {"name": "idlg", "evaluations": 5, "restarts": 1, "target": {"count": 5}}


class Simulated:
    """An engine on a clock of its own: a job takes `seconds(job)`, and writes nothing. `log`: (start, end, job)."""

    def __init__(self, slots, seconds, deaths=None):
        self.slots, self.seconds, self.deaths = slots, seconds, dict(deaths or {})
        self.now, self.queue, self.log = 0.0, [], []

    def start(self, slot, job):
        end = self.now + self.seconds(job)
        self.log.append((self.now, end, job))
        heapq.heappush(self.queue, (end, slot, len(self.log), job))

    def wait(self, seconds):
        self.now, slot, _, job = heapq.heappop(self.queue)
        if self.deaths.get(job.writes):
            self.deaths[job.writes] -= 1
            return [Died(slot, "the worker died")]
        return [Ended(slot, Outcome(job, self.seconds(job), "", ""))]

    def megabytes(self, slot):
        return None


def simulate(folder, cells, slots, seconds, deaths=None, stored=(), learned=(), batches=False):
    """The engine and the progress after all jobs; `learned`: jobs that ended before."""
    trainings = {cell.training.id: cell.training for cell in cells}
    of = {name: tuple(cell for cell in cells if cell.training.id == name) for name in trainings}
    jobs = [Job("training", spec, of[name]) for name, spec in trainings.items() if name not in stored]
    attacks = [Job("attack", cell.training, (cell,)) for cell in cells if cell.training.id in stored]
    known = Pace({})
    for job in learned:
        known.learn(job, seconds(job))
    progress = Progress(len(cells))
    asked = (Store(folder), progress, lambda *_: None, [*jobs, *attacks])
    made = Schedule(*asked, pace=known, slots=slots, batches=batches)
    engine = Simulated(slots, seconds, deaths)
    supervise(made, engine)
    return engine, progress


def attacks_of(asked):
    return [Job("attack", cell.training, (cell,)) for cell in asked]


def test_an_attack_starts_when_its_training_has_ended_and_not_all(tmp_path):
    asked = study(seeds=[0, 1, 2]).cells
    engine, progress = simulate(tmp_path, asked, 2, lambda job: 3.0 if job.kind == "training" else 1.0)
    ends = {job.training.id: end for _, end, job in engine.log if job.kind == "training"}
    first = {}
    for start, _, job in engine.log:
        if job.kind == "attack":
            assert start >= ends[job.training.id]
            first.setdefault(job.training.id, start)
    assert min(first.values()) == 3.0 < max(ends.values())
    assert (progress.done, progress.running, engine.now) == (18, [], 6 * (3 + 3) / 2)


def test_the_longest_chain_starts_first_as_soon_as_the_cost_is_known(tmp_path):
    attacks = [{"name": COIN, "target": {"kind": "members", "count": count}} for count in range(5, 25)]
    attacks += [{"name": "tests.doubles:Stuck", "target": {"kind": "members", "count": 5}}]
    asked = study(attacks=attacks, seeds=[0], defenses=[{"name": "none"}, {"name": "sdq"}, {"name": "t-noise"}]).cells
    long = asked[-1]  # of the last training

    def seconds(job):
        return 1.0 if job.kind == "training" else 31.0 if job.cells == (long,) else 0.5

    learned = attacks_of(asked)
    known = {cell.training.id for cell in asked}
    engine, _ = simulate(tmp_path, asked, 2, seconds, stored=known, learned=learned)
    assert engine.now == 31.0  # the other 62 take as long
    surprise, _ = simulate(tmp_path, asked, 2, seconds, stored=known, learned=())
    assert surprise.now > engine.now


def test_other_attacks_stay_with_the_worker_that_ran_their_training(tmp_path):
    engine, _ = simulate(tmp_path, study(seeds=list(range(8))).cells, 4, lambda job: 1.0)
    at, moves = {}, 0
    slots = {}
    for start, _, job in engine.log:
        slots.setdefault(start, []).append(job)
    for jobs in slots.values():
        for number, job in enumerate(jobs):
            moves += job.kind == "attack" and at.get(number) != job.training.id
            at[number] = job.training.id
    assert moves <= 4


def test_a_job_is_done_again_after_its_worker_died_and_fails_after_three(tmp_path):
    asked = study(defenses=[{"name": "none"}]).cells
    training, first, second = ((f"trainings/{asked[0].training.id}",), *((f"cells/{cell.id}",) for cell in asked[:2]))
    deaths = {training: 2, first: 2, second: 5}
    engine, progress = simulate(tmp_path, asked, 2, lambda job: 1.0, deaths)
    assert (progress.done, progress.failed, progress.running) == (2, 1, [])
    started = [job.writes for _, _, job in engine.log]
    assert [started.count(one) for one in (training, first, second)] == [3, 3, 3]
    failure = Store(tmp_path).read_failure(asked[1].id)
    assert (failure.kind, failure.message) == ("WorkerDied", "the worker died; tried 3 times")
    assert len(progress.notes) == 6


def test_the_pace_is_that_of_the_same_kind_else_of_a_wider_one():
    asked = study(attacks=[{"name": ECHO, "target": {"count": count}} for count in (2, 4)], seeds=[0]).cells
    jobs, known = attacks_of(asked), Pace({})
    before = known.expected(jobs[0])
    known.learn(jobs[0], 10 * before)
    assert known.expected(jobs[0]) == pytest.approx(10 * before)
    other = jobs[0]._replace(training=dataclasses.replace(jobs[0].training, task=TaskSpec("mnist", "mlp")))
    assert known.expected(other) == pytest.approx(10 * before)


@pytest.mark.parametrize(("count", "size", "parts"), [(24, 8, 2), (24, 8, 9), (5, 2, 2), (5, 1, 3), (3, 8, 4)])
def test_parts_are_whole_groups_and_cover_every_victim_once(count, size, parts):
    found = shares(range(count), size, parts)
    assert [i for one in found for i in one] == list(range(count))
    assert all(one.start % size == 0 for one in found)
    assert len(found) == min(parts, -(-count // size))


@pytest.fixture
def small_groups(monkeypatch):
    """Searches take two victims at once, and everything counts as long."""
    monkeypatch.setattr(matching, "_TOGETHER", 2)
    monkeypatch.setattr(schedule, "_PART", 1e-6)


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """The store of a run whose searches take two victims at once, and its cell."""
    monkeypatch.setattr(matching, "_TOGETHER", 2)
    asked = study(attacks=[IDLG], defenses=[{"name": "gaussian", "noise_std": 0.01}])
    run_study(asked, tmp_path, workers=0)
    return Store(tmp_path), asked.cells[0]


def parts_of(store, cell):
    """Compute a cell in parts; their names."""
    context = RunContext(store.folder, default_root())
    for victims in (range(2, 5), range(2)):
        for kind in ("search", "limit"):
            run_part(Job(kind, cell.training, (cell,), (victims.start, victims.stop)), context)
    return [named(whole, victims) for whole in (cell.id, limit_id(cell)) for victims in (range(2, 5), range(2))]


@pytest.mark.parametrize("harm", ["none", "missing", "damaged", "other code"])
def test_joined_parts_are_the_result_of_the_whole_and_a_part_that_cannot_be_used_is_computed(trained, harm):
    store, cell = trained
    whole, names = contents(store.folder / "cells"), parts_of(store, cell)
    for name in names[::2]:
        if harm == "missing":
            shutil.rmtree(store.part(name))
        elif harm == "damaged":
            path = store.part(name) / "part.npz"
            path.write_bytes(path.read_bytes()[:-9])
        elif harm == "other code":
            arrays = {"objective": [0.0] * 3, "evaluations": [1] * 3, "failure": ["x"] * 3, "prior": ""}
            store.write_part(name, arrays, 0.0, "other")
    shutil.rmtree(store.folder / "cells")
    run_attack(cell, RunContext(store.folder, default_root()), names)
    assert contents(store.folder / "cells") == whole


def test_the_parts_are_really_read(trained):
    store, cell = trained
    whole, names = contents(store.folder / "cells"), parts_of(store, cell)
    arrays = store.read_part(names[0], store.examine(store.cell(cell.id)).code)
    store.write_part(names[0], arrays | {"x 0": 0 * arrays["x 0"]}, 0.0, store.examine(store.cell(cell.id)).code)
    run_attack(cell, RunContext(store.folder, default_root()), names)
    assert contents(store.folder / "cells") != whole


class Turns:
    """An engine of three slots in this process, of which the last started goes first; stops after `most` jobs."""

    slots = 3

    def __init__(self, context, most=None):
        self.context, self.most, self.jobs, self.kinds, self.limits = context, most, {}, [], []

    def start(self, slot, job):
        self.jobs[slot] = job

    def wait(self, seconds):
        if self.most == len(self.kinds):
            raise Interrupted
        slot, job = self.jobs.popitem()
        self.kinds.append(job.kind)
        if job.kind == "attack":
            self.limits.append(sum(name.startswith(limit_id(job.cells[0])) for name in job.parts))
        return [Ended(slot, perform(job, self.context))]

    def megabytes(self, slot):
        return None

    def kill(self, slot):
        raise AssertionError

    def close(self):
        pass


def many():
    return study(attacks=[IDLG, {**IDLG, "name": "map", "warm": 0}], defenses=[{"name": "gaussian", "noise_std": 0.01}])


@pytest.mark.parametrize(("slots", "least", "limits"), [(3, 1e6, 1), (1, 1e6, 0), (1, 0.0, 1)])
def test_a_limit_that_several_attacks_read_is_shared_by_slots_and_on_one_slot_if_long(
    slots, least, limits, tmp_path, monkeypatch
):
    monkeypatch.setattr(schedule, "_PART", 1e6)
    monkeypatch.setattr(schedule, "_SHARED", least)
    monkeypatch.setattr(Turns, "slots", slots)
    engines = []
    run_study(many(), tmp_path / "turns", engine=lambda context: engines.append(Turns(context)) or engines[-1])
    assert sorted(engines[0].kinds) == ["attack", "attack", *["limit"] * limits, "training"]
    assert engines[0].limits == [limits, limits]  # the last attack reads the limit, too
    run_study(many(), tmp_path / "here", engine=Here)
    assert contents(tmp_path / "turns") == contents(tmp_path / "here")


def test_a_split_study_gives_the_bytes_of_an_unsplit_one_also_if_it_was_stopped_at_any_job(tmp_path, small_groups):
    run_study(many(), tmp_path / "whole", engine=Here)
    whole, engines = contents(tmp_path / "whole"), []

    def opened(most):
        return lambda context: engines.append(Turns(context, most)) or engines[-1]

    run_study(many(), tmp_path / "split", engine=opened(None))
    kinds = engines[0].kinds
    assert {kind: kinds.count(kind) for kind in kinds} == {"training": 1, "limit": 5, "search": 6, "attack": 2}
    assert contents(tmp_path / "split") == whole
    for most in range(1, len(kinds), 3):
        with pytest.raises(Interrupted):
            run_study(many(), tmp_path / str(most), engine=opened(most))
        run_study(many(), tmp_path / str(most), engine=opened(None))
        assert len(engines[-1].kinds) == len(kinds) - most
        assert contents(tmp_path / str(most)) == whole


def test_a_failed_part_fails_its_cell_alone_and_once(tmp_path, small_groups):
    asked = study(attacks=[IDLG, {"name": "tests.doubles:Pairs"}], defenses=[{"name": "none"}])
    run = run_study(asked, tmp_path, engine=Turns)
    (failure,) = run.failures.values()
    assert (failure.kind, failure.message) == ("RuntimeError", "victim 2")
    assert len(run.results) == 1
    assert not (tmp_path / "parts").exists()


def test_jobs_name_what_they_read_and_write():
    cell = many().cells[0]
    limit = Job("limit", cell.training, (cell,), (0, 3))
    attack = Job("attack", cell.training, (cell,), parts=(named(limit_id(cell), range(3)),))
    assert attack.reads == (f"trainings/{cell.training.id}", *limit.writes)
    assert (limit.reads, attack.writes) == ((f"trainings/{cell.training.id}",), (f"cells/{cell.id}",))
    assert Pace({}).expected(limit) > 0
    assert victims_of(limit.writes[0]) == range(3)

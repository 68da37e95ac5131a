"""The action, the template for GitLab, the Dockerfile and the hooks, as far as they run without their hosts."""

import json
import re
import resource
import shlex
import shutil
import subprocess
import sys
import zipfile

import pytest
import yaml
from typer.main import get_command

from leakgauge.harness.cli.main import app
from tests.ci_case import (
    ACTION,
    DEFENSE,
    HOOKS,
    PAGE,
    TEMPLATE,
    WEAKER,
    Job,
    dockered,
    git,
    leakgauge,
    merge_request,
    run,
)
from tests.page_case import PAGES, ROOT, blocks
from tests.test_install import packaged

INIT = ("init", "--have", "repository", "--defense", "mine.defenses:Rounded")
MAKE = ("baseline", "make", "study.toml", "--reason", "first numbers", "--allow-code")
GATE = ("gate", "study.toml", "-o", "runs/gate", "--baseline", "baselines/study.json", "--allow-code")
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8").replace("\\\n", " ")


def write(text, at):
    (at / "mine").mkdir(exist_ok=True)
    (at / "mine" / "defenses.py").write_text(text)


def commit(at):
    (at / ".gitignore").write_text("runs/\n__pycache__/\n")
    git("init", "--quiet", "--initial-branch", "main", at=at)
    git("add", "--all", at=at)
    git("commit", "--quiet", "-m", "a defense, and what it leaks", at=at)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """The repository of somebody with a defense: a study, a baseline, a branch with the weaker defense, an origin."""
    at = tmp_path_factory.mktemp("foreign")
    write(DEFENSE, at)
    for words in (INIT, MAKE):
        done = leakgauge(*words, at=at)
        assert done.returncode == 0, done.stdout + done.stderr
    commit(at)
    git("switch", "--quiet", "-c", "change", at=at)
    git("commit", "--quiet", "--allow-empty", "-m", "nothing yet", at=at)
    git("switch", "--quiet", "-c", "weaker", at=at)
    write(WEAKER, at)
    git("commit", "--quiet", "-a", "-m", "less noise", at=at)
    return at


@pytest.fixture
def checkout(foreign, tmp_path):
    """A function that clones the repository and checks out a branch, as CI does."""

    def made(branch):
        git("clone", "--quiet", foreign, tmp_path / "clone", at=tmp_path)
        git("checkout", "--quiet", "--detach", f"origin/{branch}", at=tmp_path / "clone")
        return tmp_path / "clone"

    return made


@pytest.mark.matrix
def test_three_commands_lead_from_an_empty_folder_to_the_first_red(tmp_path):
    write(DEFENSE, tmp_path)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for words in (INIT, MAKE):
        done = leakgauge(*words, at=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    commit(tmp_path)
    write(WEAKER, tmp_path)
    red = leakgauge(*GATE, at=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert red.returncode == 1, red.stdout + red.stderr
    assert re.search(r"the noise's energy is 0\.06\d* times what it was", red.stdout)
    assert after.ru_utime - before.ru_utime < 2 * 180  # three minutes on two cores


@pytest.mark.matrix
def test_the_action_is_red_where_the_defense_got_weaker_and_keeps_one_comment(checkout, tmp_path):
    job = Job(tmp_path / "job", checkout("weaker"))
    asked = {"study": "study.toml", "allow_code": "true", "comment": "true"}
    assert job.act(**asked) == 1
    assert job.installed == ["--quiet", "--constraint", f"{ROOT}/constraints.txt", str(ROOT)]
    (by, body) = job.comments[-1]
    assert by == "github-actions[bot]"
    assert body.startswith("<!-- leakgauge study -->\n## ✕ leakgauge: ")
    assert body.partition("\n")[2].strip() == job.shown.read_text("utf-8").strip()
    assert (job.temp / "leakgauge" / "report" / "index.html").exists()
    assert json.loads((job.temp / "leakgauge" / "check.json").read_text())["exit_code"] == 1
    assert [name.partition("@")[0] for name, _ in job.uses] == [
        f"actions/{name}" for name in ("setup-python", "cache", "upload-artifact")
    ]
    git("checkout", "--quiet", "--detach", "origin/change", at=job.repository)
    assert job.act(**asked) == 0
    assert len(job.comments) == 2
    assert job.comments[0] == ["somebody", "<!-- leakgauge study --> mine"]
    assert "No increase detected" in job.comments[1][1]


@pytest.mark.matrix
def test_the_template_is_red_where_the_defense_got_weaker_and_else_green(checkout, tmp_path):
    at = checkout("weaker")
    git("update-ref", "-d", "refs/remotes/origin/main", at=at)  # GitLab fetches the merge request only
    (at / "dist").mkdir()
    (at / "dist" / "leakgauge-0-py3-none-any.whl").touch()
    done, words = merge_request(tmp_path / "job", at, LEAKGAUGE_ALLOW_CODE="1", TORCH_INDEX="/torch")
    assert done.returncode == 1, done.stdout + done.stderr
    assert words == ["--quiet", "--extra-index-url", "/torch", "dist/leakgauge-0-py3-none-any.whl"]
    found = {str(path.relative_to(at)) for path in (at / "leakage").iterdir()}
    assert {*TEMPLATE["leakage"]["artifacts"]["paths"], "leakage/leakage.xml"} <= found
    git("checkout", "--quiet", "--detach", "origin/change", at=at)
    done, _ = merge_request(tmp_path / "job", at, LEAKGAUGE_ALLOW_CODE="1")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.matrix
def test_the_hooks_pass_where_nothing_changed(checkout):
    at = checkout("change")
    for name, words in {"leakgauge-study": ["study.toml", "--allow-code"], "leakgauge-gate": GATE[1:]}.items():
        entry = shlex.split(HOOKS[name]["entry"])
        assert (entry[0], HOOKS[name]["pass_filenames"], HOOKS[name]["language"]) == ("leakgauge", False, "system")
        done = leakgauge(*entry[1:], *words, at=at)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.matrix
def test_the_action_says_why_nothing_was_judged_and_where_it_may_not_comment_says_so(tmp_path):
    job = Job(tmp_path / "job", tmp_path)
    (tmp_path / "study.toml").write_text("name = '@team <b>'")
    (tmp_path / "job" / "comments.json").unlink()
    assert job.act(study="study.toml", comment="true", python_version="", torch_index="/torch") == 4
    assert [name.partition("@")[0] for name, _ in job.uses] == ["actions/cache", "actions/upload-artifact"]
    assert job.installed[-3:] == ["--extra-index-url", "/torch", str(ROOT)]
    first, _, *rest = job.shown.read_text("utf-8").splitlines()
    assert first == "## leakgauge: exit code 4"
    assert rest
    assert all(line.startswith("    leakgauge: ") for line in rest)
    assert "::warning::no comment" in job.said.stdout


def test_a_comment_calls_nobody_and_is_never_too_long(tmp_path):
    job = Job(tmp_path / "job", tmp_path)
    (job.temp / "leakgauge").mkdir()
    (job.temp / "leakgauge" / "summary.md").write_text("@team " + "é" * 70_000)
    for _ in range(2):
        assert job.act("comment", study="x/--> @you/study.toml", comment="true") == 0
    assert len(job.comments) == 2
    body = job.comments[1][1]
    assert body.startswith("<!-- leakgauge study -->\n@\u200bteam é")
    assert 50_000 < len(body.encode()) < 65_536


@pytest.mark.parametrize(("number", "comment"), [("", "true"), ("7", "false")])
def test_no_comment_is_written_without_a_pull_request_or_if_nobody_asked(number, comment, tmp_path):
    job = Job(tmp_path / "job", tmp_path, number)
    job.act("comment", study="study", comment=comment)
    assert len(job.comments) == 1


def test_scripts_of_the_files_are_shell_and_their_commands_have_these_options():
    job = TEMPLATE["leakage"]
    scripts = [step["run"] for step in ACTION["runs"]["steps"] if "run" in step]
    scripts += ["\n".join([*job["before_script"], *job["script"]])]
    lines = re.findall(r"^RUN (.*)$", DOCKERFILE, re.MULTILINE)
    for text, shell in [*((text, "bash") for text in scripts), *((line, "sh") for line in lines)]:
        assert subprocess.run([shell, "-n"], input=text, text=True).returncode == 0
    known = get_command(app).commands
    options = {option for name in ("gate", "report") for one in known[name].params for option in one.opts}
    ours = re.findall(r"^ *(?:words|leakgauge|\$\{ACC|--summ).*$", "\n".join(scripts), re.MULTILINE)
    said = re.findall(r"(?<![\w-])--[a-z][a-z-]+", "\n".join(ours))
    assert len(said) > 8
    assert {*said} <= options


def test_the_pages_set_what_the_files_have():
    shown = [yaml.safe_load(block.code) for page in PAGES for block in blocks(page, "yaml")]
    steps = [step for flow in shown if "jobs" in flow for step in flow["jobs"]["leakage"]["steps"]]
    here, action = (step for step in steps if "study" in step["with"])
    assert here["uses"] == "./"
    assert here["with"].keys() <= ACTION["inputs"].keys()
    (template,) = (flow for flow in shown if "include" in flow)
    (hooks,) = (flow["repos"][0]["hooks"] for flow in shown if "repos" in flow)
    assert action["with"].keys() <= ACTION["inputs"].keys()
    assert template["leakage"]["variables"].keys() <= TEMPLATE["leakage"]["variables"].keys()
    assert [one["file"] for one in template["include"]] == ["/ci/gitlab.yml"]
    assert {hook["id"] for hook in hooks} == HOOKS.keys()
    page = PAGE.read_text("utf-8")
    assert all(f"`{name}`" in page or f" {name}: " in page for name in ACTION["inputs"])


@pytest.mark.slow
def test_the_dockerfile_copies_what_its_wheel_needs(tmp_path):
    source = dockered(tmp_path / "source")
    copied = re.findall(r"^COPY (?!--from)(\S+) ", DOCKERFILE, re.MULTILINE)
    assert all((source / name).exists() for name in copied)
    (line,) = re.findall(r"^RUN (pip wheel .*)$", DOCKERFILE, re.MULTILINE)
    line = line.replace("/wheel", str(tmp_path / "wheel")).replace("/source", str(source))
    done = run(["sh", "-ec", f"{sys.executable} -m {line}"], tmp_path, PIP_NO_BUILD_ISOLATION="false")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "wheel").iterdir()
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names - {"leakgauge/harness/core/_native.so"} == packaged()
    assert ("leakgauge/harness/core/_native.so" in names) == (shutil.which("cc") is not None)
    assert json.loads(DOCKERFILE.partition("ENTRYPOINT ")[2]) == ["leakgauge"]

"""The files for other people's CI, run as their hosts run them: the action's steps, and the template's script."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

from tests.page_case import ROOT, blocks

PAGE = ROOT / "docs" / "how-to" / "ci-elsewhere.md"
ACTION = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
TEMPLATE = yaml.safe_load((ROOT / "ci" / "gitlab.yml").read_text("utf-8"))
HOOKS = {hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))}
DEFENSE, WEAKER = (block.code for block in blocks(PAGE, "python") if block.title == "mine/defenses.py")

_PYTHON = """#!/bin/bash
if [ "$*" = "-m pip cache dir" ]; then echo /pip; exit; fi
if [ "$2 $3" = "pip install" ]; then printf '%s\\n' "${@:4}" > "$PIP_WORDS"; exit; fi
exec EXECUTABLE "$@"
"""
_GH = '''#!EXECUTABLE
"""The part of GitHub's client that the action uses; comments are in a file."""
import json, os, pathlib, re, sys
words = sys.argv[1:]
file = pathlib.Path(os.environ["COMMENTS"])
comments = json.loads(file.read_text())
assert words.pop(0) == "api" and os.environ["GH_TOKEN"] == "token"
if "--jq" in words:
    login, mark = re.findall(r'"([^"]*)"', words[-1])
    assert words[:2] == ["--paginate", "repos/me/mine/issues/7/comments"]
    print(*(at for at, (by, body) in enumerate(comments) if by == login and body.startswith(mark)), sep="\\n")
    sys.exit()
body = pathlib.Path(words[-1].removeprefix("body=@")).read_text()
if words[:2] == ["--method", "PATCH"]:
    comments[int(re.fullmatch("repos/me/mine/issues/comments/(.*)", words[2])[1])][1] = body
else:
    assert words[0] == "repos/me/mine/issues/7/comments"
    comments.append(["github-actions[bot]", body])
file.write_text(json.dumps(comments))
'''


def run(words, at, **environment):
    """The finished process of a command in a folder, in an environment where CI's variables are only those given."""
    unset = ("CI", "GITHUB_", "LEAKGAUGE_ALLOW")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(unset)}
    clean |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    return subprocess.run(list(map(str, words)), cwd=at, env=clean | environment, capture_output=True, text=True)


def leakgauge(*words, at):
    return run([sys.executable, "-m", "leakgauge", *words], at)


def git(*words, at):
    done = run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false", *words], at)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def tools(folder):
    """The PATH with commands in place of python, which installs nothing, of gh, and of leakgauge: this checkout's."""
    folder.mkdir(exist_ok=True)
    call = f'#!/bin/bash\nexec {sys.executable} -m leakgauge "$@"\n'
    for name, text in {"python": _PYTHON, "gh": _GH, "leakgauge": call}.items():
        (folder / name).write_text(text.replace("EXECUTABLE", sys.executable))
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


class Job:
    """A job of GitHub that uses the action, once or more often; `shown`: the job's page, `uses`: actions it used."""

    def __init__(self, folder, repository, number="7"):
        folder.mkdir()
        self.folder, self.repository, self.number, self.uses = folder, repository, number, []
        self.path, self.shown, self.temp = tools(folder / "bin"), folder / "page.md", folder / "temp"
        self.temp.mkdir()
        (folder / "comments.json").write_text(json.dumps([["somebody", "<!-- leakgauge study --> mine"]]))

    @property
    def comments(self):
        return json.loads((self.folder / "comments.json").read_text("utf-8"))

    @property
    def installed(self):
        return (self.folder / "pip.txt").read_text("utf-8").splitlines()

    def act(self, *only, **inputs):
        """Run the steps, or only those named; the exit code of the last one that failed, 0 if none did."""
        given = {name: str(entry.get("default", "")) for name, entry in ACTION["inputs"].items()}
        assert inputs.keys() <= {name.replace("-", "_") for name in given}
        given |= {name.replace("_", "-"): value for name, value in inputs.items()}
        known = {f"inputs.{name}": value for name, value in given.items()}
        known |= {"github.token": "token", "github.event.pull_request.number": self.number}
        known |= {"runner.temp": str(self.temp), "steps.packages.outputs.folder": "", "steps.packages.outputs.key": ""}
        known["steps.gate.outputs.exit-code"] = "0" if only else ""
        code = 0
        for step in ACTION["runs"]["steps"]:
            if not _wanted(str(step.get("if", "success()")), known, code) or (only and step.get("id") not in only):
                continue
            if "uses" in step:
                self.uses.append((step["uses"], {key: _filled(value, known) for key, value in step["with"].items()}))
                continue
            assert (step["shell"], "${{" in step["run"]) == ("bash", False)  # inputs are no part of a script
            code = self._step(step, {key: _filled(value, known) for key, value in step.get("env", {}).items()}) or code
            for name, value in re.findall("^(.*?)=(.*)$", (self.folder / "output").read_text("utf-8"), re.M):
                known[f"steps.{step['id']}.outputs.{name}"] = value
        return code

    def _step(self, step, environment):
        (self.folder / "output").write_text("")
        github = {"ACTION_PATH": ROOT, "OUTPUT": self.folder / "output", "STEP_SUMMARY": self.shown}
        github |= {"ACTIONS": "true", "REPOSITORY": "me/mine", "BASE_REF": "main"}
        set_ = {f"GITHUB_{name}": str(value) for name, value in github.items()} | {"CI": "true", "PATH": self.path}
        set_ |= {"RUNNER_TEMP": str(self.temp), "RUNNER_OS": "Linux", "RUNNER_ARCH": "X64"}
        set_ |= {"COMMENTS": str(self.folder / "comments.json"), "PIP_WORDS": str(self.folder / "pip.txt")}
        (self.folder / "step.sh").write_text(step["run"])
        words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", self.folder / "step.sh"]
        self.said = run(words, self.repository, **set_, **environment)
        return self.said.returncode


def _filled(value, known):
    return re.sub(r"\$\{\{ (.*?) \}\}", lambda found: known[found[1]], str(value))


def _wanted(condition, known, code):
    """Whether a step runs: its condition joins equalities and `always()` with `&&`."""
    terms = [term.strip() for term in condition.split("&&")]
    met = [term for term in terms if term in ("always()", "success()")]
    for name, sign, value in (term.rsplit(" ", 2) for term in terms if term not in met):
        if (known[name] == value.strip("'")) != (sign == "=="):
            return False
    return code == 0 or "always()" in terms


def merge_request(folder, repository, **variables):
    """The finished process of the template's job in a checkout as GitLab makes it, and the words that pip got."""
    folder.mkdir(exist_ok=True)
    job = TEMPLATE["leakage"]
    given = job["variables"] | {"CI": "true", "CI_MERGE_REQUEST_TARGET_BRANCH_NAME": "main"} | variables
    given["PIP_CACHE_DIR"] = str(folder / "cache")
    (folder / "job.sh").write_text("\n".join([*job["before_script"], *job["script"]]))
    set_ = given | {"PATH": tools(folder / "bin"), "PIP_WORDS": str(folder / "pip.txt")}
    done = run(["bash", "-eo", "pipefail", folder / "job.sh"], repository, **set_)
    return done, (folder / "pip.txt").read_text("utf-8").splitlines()


def dockered(at):
    """Copy what `.dockerignore` lets the Dockerfile see into a folder; the links of `leakgauge/` stay links."""
    first, *rest = (ROOT / ".dockerignore").read_text("utf-8").split()
    seen = [line.removeprefix("!") for line in rest if line.startswith("!")]
    assert (first, [line for line in rest if line[0] != "!"]) == ("*", ["**/__pycache__", "**/*.so"])
    left = [word for pattern in ("__pycache__", "*.so") for word in ("--exclude", pattern)]
    at.mkdir()
    packed = subprocess.run(["tar", "-c", *left, *seen], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "-x"], cwd=at, input=packed, check=True)
    return Path(at)

"""The command, called in this process."""

from typer.testing import CliRunner

from leakgauge.harness.cli.main import app


def call(*words, **environment):
    return CliRunner().invoke(app, [str(word) for word in words], env=environment)

"""The command, called in this process."""

from typer.testing import CliRunner

from leakgauge.harness.cli.main import app


def call(*words, **environment):
    return CliRunner().invoke(app, [str(word) for word in words], env=environment)


def refused(*words, most=400):
    """The one line, of at most so many characters, on standard error of a call that ends with code 2."""
    done = call(*words)
    assert (done.exit_code, "Traceback" in done.output) == (2, False), done.output
    (line,) = done.stderr.splitlines()
    assert len(line) <= most
    return line

"""The commands `claim` and `audit`: claimed epsilon, proved epsilon, and a measured lower bound of a defense."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from leakgauge.harness.cli import options as cli
from leakgauge.harness.core.code import import_from, named_code
from leakgauge.harness.core.sinks import say


def _seconds(text: str) -> float:
    """Parse a time such as 30, 30s or 2m into seconds."""
    unit = 60.0 if text.endswith("m") else 1.0
    try:
        return unit * float(text.removesuffix("m").removesuffix("s"))
    except ValueError:
        raise typer.BadParameter(f"got {text!r}, expected a time such as 30s or 2m") from None


def claim(
    defense: cli.DefenseArgument,
    set_: cli.SetOption = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds that the claim covers.")] = None,
    delta: Annotated[
        float | None, typer.Option(help="Delta of the proved epsilon; default: the delta of the claim.")
    ] = None,
    setting: cli.SettingOption = None,
    as_json: cli.JsonOption = False,
) -> None:
    """Show the epsilon that a defense claims, the epsilon that is proved, and the verdict."""
    from leakgauge.harness.cli.known import known
    from leakgauge.harness.study.environment import shipped

    def computed() -> dict[str, Any]:
        from leakgauge.harness.audit import claims
        from leakgauge.harness.audit.claims import assignments

        with cli.user_errors():
            return claims.claim(
                defense, assignments(set_ or [], "--set"), assignments(setting or [], "--setting"), rounds, delta
            )

    if named_code([defense]):
        import_from(Path.cwd())
    asked = ["claim", defense, set_, setting, rounds, delta]
    _print_claim(known(asked, computed) if shipped("defense", defense) else computed(), as_json)


def audit(
    defense: cli.DefenseArgument,
    set_: cli.SetOption = None,
    by: Annotated[
        str, typer.Option(help="trials; messages (of a training); one-run (canary clients); cosine (only an estimate).")
    ] = "trials",
    rounds: Annotated[int | None, typer.Option(help="Rounds of a trial, or of the training.")] = None,
    trials: Annotated[int | None, typer.Option(help="Trials with each input; default: 1000 to 3000.")] = None,
    budget: Annotated[
        float | None, typer.Option(parser=_seconds, metavar="TIME", help="As many trials as fit in 30s or 2m.")
    ] = None,
    confidence: Annotated[float | None, typer.Option(help="Confidence of the lower bound; default: 0.95.")] = None,
    threat: Annotated[
        str | None, typer.Option(help="The adversary; default: the one in the claim that sees most.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where clients train and likelihoods are computed: cpu (the default) or cuda.")
    ] = None,
    setting: cli.SettingOption = None,
    seed: Annotated[int, typer.Option(help="Seed of every random draw.")] = 0,
    as_json: cli.JsonOption = False,
) -> None:
    """Audit a defense: show a measured lower bound of epsilon beside the claimed and the proved epsilon."""
    from leakgauge.harness.audit import standalone
    from leakgauge.harness.audit.claims import assignments

    if named_code([defense]):
        import_from(Path.cwd())
    with cli.user_errors():
        found = standalone.audit(
            defense,
            assignments(set_ or [], "--set"),
            assignments(setting or [], "--setting"),
            rounds,
            by=by,
            trials=trials,
            budget=budget,
            confidence=confidence,
            threat=threat,
            device=device,
            seed=seed,
        )
    _print_claim(found, as_json)


def _print_claim(found: dict[str, Any], as_json: bool) -> None:
    """Print the claimed, proved and audited epsilon, and the verdict."""
    from leakgauge.harness.core.labels import odds
    from leakgauge.harness.core.threats import Threat

    if as_json:
        cli.print_json(found)
        return
    claimed, proved = found["claimed"], found["proved"]
    parameters = ", ".join(f"{key}={value}" for key, value in found["parameters"].items() if value is not None)
    say(f"{found['defense']}({parameters})")
    source = f"{claimed['source']}, {claimed['adjacency']}" if claimed["source"] else ""
    rows = [("claimed", claimed, source, ""), ("proved", proved, proved["method"], "")]
    rows += [("attained", one, one["method"], f": {one['reason']}") for one in (found.get("attained"),) if one]
    rows += [("", proof, proof["method"], f": {proof['reason']}") for proof in found["further"]]
    for label, row, how, note in rows:
        epsilon = row["epsilon"] if row["epsilon"] == "inf" else f"{row['epsilon']:.6g} ({odds(row['chance'])})"
        names = "everybody" if len(row["against"]) == len(Threat) else ", ".join(row["against"])
        against = f", against {names}" if names else ""
        say(
            f"  {label:<8} epsilon {epsilon} per {row['unit']}, delta {row['delta']:g}, {claimed['horizon']}{against}"
            f"{f' ({how})' if how else ''}{note}"
        )
    if "audited" in found:
        from leakgauge.harness.audit.standalone import lines

        say(*lines(found["audited"]), *_belongs(found))
    for assumption in claimed["assumes"]:
        say(f"  assumes  {assumption}")
    say(f"  {found['verdict']}: {found['reason']}")


def _belongs(found: dict[str, Any]) -> list[str]:
    """The federation of an audit, and the bound that decides on the verdict."""
    from leakgauge.harness.core.stats import STRICT

    row, size = found["audited"], "clients {clients}, rounds {rounds}, d {dim}".format(**found["setting"])
    rows = [f"           claimed, proved and audited in the same federation: {size}"]
    if "strict" in row:
        most = "" if row["ceiling"] == "inf" else f" (at most {row['ceiling']:.4g} by these trials)"
        bound = f"epsilon >= {float(row['strict']):.4g}{most}, confidence {max(row['confidence'], STRICT):g}"
        rows.append(f"  verdict  by {bound}, by {row['threat']}")
    return rows

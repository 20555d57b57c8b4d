"""`ampwatch diagnose`: the verdict and the findings of recorded runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ampwatch import spool

from ._json import as_json
from ._places import RECORDED, tell_damaged

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ampwatch.diagnosis.engine import Diagnosis
    from ampwatch.diagnosis.findings import Finding

COLOURS = {"fatal": "red", "error": "red", "warning": "yellow", "info": "cyan"}
COLOURS_OF_WORDS = {"healthy": "green", "warning": "yellow", "failing": "red", "no data": "dim"}


def diagnose(
    path: Annotated[
        Path, typer.Argument(help="Folder of one recorded run, or of several; or a trace, .csv or .jsonl.")
    ] = RECORDED,
    policy: Annotated[str, typer.Option(help="Policy of the scaler that a trace is of.")] = "torch",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what the records prove: the verdict of each run, its findings, their evidence and advice."""
    from ampwatch.diagnosis import diagnose_run

    if path.is_file():
        _diagnose_trace(path, policy, json_)
        return
    directories = spool.run_directories(path)
    tell_damaged(path)
    diagnosed = {run: diagnose_run(where) for run, where in directories.items()}
    if json_:
        rows = [_as_dict(run, diagnosis) for run, diagnosis in diagnosed.items()]
        typer.echo(as_json(rows[0] if len(rows) == 1 else {"runs": rows}))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for run, diagnosis in diagnosed.items():
        _print_run(console, run, diagnosis)
        if not spool.is_whole(directories[run]):
            _print_partial(console)


def _diagnose_trace(path: Path, policy: str, json_: bool) -> None:
    """The same of a trace, and what it does not hold."""
    from rich.console import Console
    from rich.text import Text

    from ampwatch.diagnosis import Diagnosis, read_trace

    trace = read_trace(path, policy)
    diagnosis = Diagnosis.from_batches(trace.batches)
    if json_:
        typer.echo(
            as_json({**_as_dict(path.name, diagnosis), "not_judged": trace.not_judged, "read": trace.read})
        )
        return
    console = Console(highlight=False)
    _print_run(console, path.name, diagnosis)
    if trace.read:
        _print(console, Text(trace.read, "dim"))
    _print(console, Text("Not judged:", "bold"))
    for missing in trace.not_judged:
        _print(console, Text(f"· {missing}", "dim"), indent=2)


def _as_dict(run: str, diagnosis: Diagnosis) -> dict[str, object]:
    findings = [finding.as_dict() for finding in diagnosis.findings()]
    return {"run": run, "verdict": diagnosis.verdict().as_dict(), "findings": findings}


def _print_run(console: Console, run: str, diagnosis: Diagnosis) -> None:
    from rich.text import Text

    from ampwatch.joblog import after_word

    verdict, findings = diagnosis.verdict(), diagnosis.findings()
    heading = Text.assemble((run, "bold"), " ", (verdict.word, COLOURS_OF_WORDS[verdict.word]))
    if verdict.sentence not in {finding.headline for finding in findings}:  # else it stands right below
        heading.append(f": {after_word(verdict)}")
    _print(console, heading)
    if verdict.not_judged:
        _print(console, Text(f"Not judged: {verdict.not_judged}", "yellow"), indent=2)
    for finding in findings:
        _print_finding(console, finding)


def _print_partial(console: Console) -> None:
    from rich.text import Text

    why = "a server has them, or there was no room for them (a `dropped` event says so)"
    _print(
        console,
        Text(f"The first records of this run are not in this folder any more: {why}.", "dim"),
        indent=2,
    )


def _print_finding(console: Console, finding: Finding) -> None:
    from rich.text import Text

    from ampwatch.diagnosis.texts import at_step

    title = Text(f"{finding.severity} {finding.kind}: ", COLOURS[finding.severity]) + finding.headline
    _print(console, title, indent=2)
    for fact in finding.evidence:
        _print(console, Text(f"· {fact.text}", "dim"), indent=4)
    if finding.chain:
        order = " → ".join(f"{link.text} ({at_step(link.step, link.attempt)})" for link in finding.chain)
        _print(console, Text(f"· Order of events: {order}.", "dim"), indent=4)
    for advice in finding.advice:
        _print(console, Text(f"→ {advice.text}"), indent=4)
        for line in advice.code.splitlines():
            _print(console, Text(line, "bold"), indent=8, wrap=False)


def _print(console: Console, text: Text, *, indent: int = 0, wrap: bool = True) -> None:
    """A paragraph; wrapped for who reads it in a terminal, a line for `grep`, and code as it must be copied."""
    from rich.padding import Padding
    from rich.text import Text

    if wrap and console.is_terminal:
        console.print(Padding(text, (0, 0, 0, indent)))
    else:
        console.print(Text(" " * indent) + text, soft_wrap=True)

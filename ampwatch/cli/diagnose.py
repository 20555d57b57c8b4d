"""`ampwatch diagnose`: the verdict and the findings of recorded runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ampwatch import spool

from ._json import as_json

if TYPE_CHECKING:
    from rich.console import Console

    from ampwatch.diagnosis.engine import Diagnosis
    from ampwatch.diagnosis.findings import Finding

COLOURS = {"fatal": "red", "error": "red", "warning": "yellow", "info": "cyan"}
COLOURS_OF_WORDS = {"healthy": "green", "warning": "yellow", "failing": "red", "no data": "dim"}


def diagnose(
    path: Annotated[Path, typer.Argument(help="Folder of one recorded run, or of several.")],
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what the records prove: the verdict of each run, its findings, their evidence and advice."""
    from ampwatch.diagnosis import diagnose_run

    diagnosed = {run: diagnose_run(where) for run, where in spool.run_directories(path).items()}
    if json_:
        rows = [_as_dict(run, diagnosis) for run, diagnosis in diagnosed.items()]
        typer.echo(as_json(rows[0] if len(rows) == 1 else {"runs": rows}))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for run, diagnosis in diagnosed.items():
        _print_run(console, run, diagnosis)


def _as_dict(run: str, diagnosis: Diagnosis) -> dict[str, object]:
    findings = [finding.as_dict() for finding in diagnosis.findings()]
    return {"run": run, "verdict": diagnosis.verdict().as_dict(), "findings": findings}


def _print_run(console: Console, run: str, diagnosis: Diagnosis) -> None:
    from rich.text import Text

    from ampwatch.joblog import after_word

    verdict = diagnosis.verdict()
    console.print(
        Text(run, "bold"), Text(f"{verdict.word}: ", COLOURS_OF_WORDS[verdict.word]) + after_word(verdict)
    )
    for finding in diagnosis.findings():
        _print_finding(console, finding)


def _print_finding(console: Console, finding: Finding) -> None:
    from rich.padding import Padding
    from rich.text import Text

    title = Text(f"{finding.severity} {finding.kind}: ", COLOURS[finding.severity]) + finding.headline
    lines = [(title, 2)]
    lines += [(Text(f"· {fact.text}", "dim"), 4) for fact in finding.evidence]
    for advice in finding.advice:
        lines.append((Text(f"→ {advice.text}"), 4))
        lines += [(Text(line, "bold"), 8) for line in advice.code.splitlines()]
    for text, indent in lines:
        console.print(Padding(text, (0, 0, 0, indent)))

"""A run as one HTML file that needs nothing else: to send to someone, to keep beside the weights.

Pure text in, text out. The file's own policy allows the two scripts in it, by their hashes, and no request at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from string import Template
from typing import Any, Final

from ._theme import Theme

Json = Mapping[str, Any]

_FOLDER: Final = Path(__file__).parent / "report_page"
_WORDS: Final = {"healthy": "Healthy", "warning": "Warning", "failing": "Failing", "no data": "No data"}
_MOST_DETAILS: Final = 300  # letters
_MOST_PRETTY: Final = 20_000
_MOST_NAMED: Final = 1000  # processes
_POWER: Final = re.compile(r"2\^([-−]?\d+)")


def report(
    run: Json,
    findings: Sequence[Json],
    events: Json,
    figures: Mapping[str, Json],
    plotly_js: str,
    theme: Theme = "light",
) -> str:
    """The report of a run.

    Arguments:
        run, findings, events: as docs/rest.md has them; of the events a page.
        figures: Plotly figures by the heading above them, in the colours of `theme`.
        plotly_js: the text of plotly.min.js.
    """
    scripts = [_script(plotly_js), _script((_FOLDER / "draw.js").read_text(encoding="utf-8"))]
    sections = (_findings(findings), _plots(figures), _events(events), _about(run))
    page = Template((_FOLDER / "report.html").read_text(encoding="utf-8"))
    return page.substitute(
        title=escape(f"{_WORDS[run['verdict']['word']]}: {run['name'] or run['run']}"),
        theme=theme,
        policy=" ".join(f"'sha256-{_hash(script)}'" for script in scripts),
        style=(_FOLDER / "report.css").read_text(encoding="utf-8"),
        head=_head(run),
        body="\n".join(sections),
        figures=_data(figures),
        plotly=scripts[0],
        draw=scripts[1],
    )


def _script(text: str) -> str:
    """Text that may stand in a script element: in a string or a regular expression `<\\/` means `</`."""
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _data(value: Any) -> str:
    """JSON that may stand in a script element, whatever names are in it."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _head(run: Json) -> str:
    verdict = run["verdict"]
    named = f" · <code>{escape(run['run'])}</code>" if run["name"] not in ("", run["run"]) else ""
    skipped = f"{run['skipped']:,} of {run['attempts']:,}"
    facts = {
        "Attempts": f"{run['attempts']:,}",
        "Steps skipped": f"{_percent(run['skipped'], run['attempts'])} <small>{skipped}</small>",
        "Loss scale now": _number(run["scale"]),
        "Loss now": _number(run["loss"]),
        "Step now": _number(run["step"]),
        "Ranks": _number(run["world_size"]),
    }
    shown = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    about = f"{escape(run['project'])} · {run['status']} · last record {_time(run['last_seen'])}{named}"
    return (
        f"<h1>{escape(run['name'] or run['run'])}</h1><p class=muted>{about}</p>"
        f'<section class=verdict data-word="{verdict["word"]}"><p class=word>{_WORDS[verdict["word"]]}</p>'
        f"<p class=sentence>{_prose(verdict['sentence'])}</p></section><dl class=facts>{shown}</dl>"
    )


def _findings(findings: Sequence[Json]) -> str:
    cards = "".join(map(_finding, findings)) or "<p class=muted>Nothing was found.</p>"
    return f"<h2>Findings</h2>{cards}"


def _finding(finding: Json) -> str:
    evidence = "".join(f"<li>{_prose(item['text'])}</li>" for item in finding["evidence"])
    advice = "".join(
        f"<li>{_prose(item['text'])}{_code(item.get('code', ''))}</li>" for item in finding["advice"]
    )
    kind = f"{finding['severity']} · {finding['kind'].replace('_', ' ')}"
    steps = (
        f"step {finding['first_step']:,} to {finding['last_step']:,}" if finding["first_step"] >= 0 else ""
    )
    sure = f"{100 * finding['confidence']:.0f} % sure"
    about = " · ".join(filter(None, (finding["state"], steps, sure)))
    return (
        f'<article data-severity="{finding["severity"]}"><p class=kind>{escape(kind)}</p>'
        f"<h3>{_prose(finding['headline'])}</h3><p class=muted>{escape(about)}</p>"
        + (f"<h4>Evidence</h4><ul>{evidence}</ul>" if evidence else "")
        + (f"<h4>What to do</h4><ol>{advice}</ol>" if advice else "")
        + "</article>"
    )


def _plots(figures: Mapping[str, Json]) -> str:
    return "".join(
        f'<h2>{escape(name)}</h2><div class=plot data-figure="{escape(name)}" role=figure '
        f'aria-label="{escape(name)}"></div>'
        for name in figures
    )


def _events(events: Json) -> str:
    rows = (
        (_number(e["step"]), _number(e["attempt"]), escape(e["type"].replace("_", " ")), _details(e))
        for e in events["items"]
    )
    more = "<p class=muted>There are more of them.</p>" if events["next"] else ""
    return f"<h2>Events</h2>{_table(('Step', 'Attempt', 'Event', 'Details'), rows)}{more}"


def _details(event: Json) -> str:
    text = json.dumps(event["data"], ensure_ascii=False)
    return f"<code>{escape(text if len(text) <= _MOST_DETAILS else f'{text[:_MOST_DETAILS]} …')}</code>"


def _about(run: Json) -> str:
    head = ("Rank", "Process", "Host", "Device", "Attempts")
    processes = (
        (
            p["rank"],
            f"<code>{p['producer'][:8]}</code>",
            escape(p["host"]),
            escape(p["device"]),
            f"{p['attempts']:,}",
        )
        for p in run["producers"][:_MOST_NAMED]
    )
    told = {name: run[name] for name in ("versions", "config", "scalers", "optimizers") if run[name]}
    sections = (f"<h3>{name.title()}</h3><pre>{_pretty(value)}</pre>" for name, value in told.items())
    return f"<h2>About this run</h2>{_table(head, processes)}{''.join(sections)}"


def _pretty(value: Any) -> str:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return escape(text if len(text) <= _MOST_PRETTY else f"{text[:_MOST_PRETTY]}\n…")


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table of cells that are HTML already."""
    titles = "".join(f"<th scope=col>{name}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table></div>"


def _prose(text: str) -> str:
    """A sentence, its `2^16` set as powers."""
    return _POWER.sub(lambda power: f"2<sup>{power[1].replace('-', '−')}</sup>", escape(text))


def _code(code: str) -> str:
    return f"<pre><code>{escape(code)}</code></pre>" if code else ""


def _number(value: Any) -> str:
    """A real or a count of the API; a step or attempt below 0 is none."""
    if value is None or (isinstance(value, int) and value < 0):
        return "–"
    return (
        escape(value)
        if isinstance(value, str)
        else f"{value:,.6g}"
        if isinstance(value, float)
        else f"{value:,}"
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2g} %" if whole else "–"


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M} UTC"

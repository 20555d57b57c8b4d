"""How often the diagnosis is right: real training loops with a known fault, and the same loops without it.

    python benchmarks/diagnosis.py [--seeds N] [--first SEED] [--set first|second|third|fourth|fifth|sixth|grid|long] [--only NAME …] [--jobs 2] [--plain] [--json]
    python benchmarks/diagnosis.py --healthy [--set …] [--seeds N]
    python benchmarks/diagnosis.py --trace NAME [--healthy] [--first SEED]

Each loop (benchmarks/loops) trains in a process of its own under float16 autocast on the CPU; its records are then
diagnosed. A line on stderr tells how far it is every 20 runs, and each false alarm as it comes. A loop with its fault is *right* if the first finding is of the expected kind and severity and no finding
above info is of another kind; *missed* if the kind is not among the findings; else *wrong*. It is then run once more
and ended at the attempt by which the verdict is due: *late* if the kind is not there yet. Where the onset or the
place is known, `step` and `place` count the verdicts that name another. The loop without its fault, and every
healthy loop, must have no finding above info: each that has is a false alarm. `--healthy` runs these alone, and ends with a table of what they went through: skips, growths and the largest loss. `--plain` also trains under torch's
own scaler and compares all weights. `--trace` prints what happened, attempt by attempt, and the findings.
"""

import argparse
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec
import torch
import torch._dynamo  # the first step of an optimizer imports it; once here, not once in each process
from loops import LOOPS, Happened, Lab, Loop

import ampwatch

EVERY = 20  # runs between two lines of progress, where nobody looks at a terminal


@dataclass(frozen=True)
class Task:
    name: str
    seed: int
    fault: bool
    mode: str = "watched"  # or "plain", or "due": watched, and ended when the verdict is due
    limit: int | None = None


@dataclass
class Outcome:
    task: Task
    findings: list[dict[str, Any]] = field(default_factory=list)
    happened: Happened | None = None
    digest: str = ""
    raised: str = ""
    notes: list[str] = field(default_factory=list)  # warnings and log lines
    path: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    scales: list[tuple[float, float]] = field(default_factory=list)  # before and after each attempt
    before: dict[str, int] = field(default_factory=dict)  # attempts of the run before each producer's first

    @property
    def loud(self) -> list[dict[str, Any]]:
        return [f for f in self.findings if f["severity"] != "info"]


class Lines(logging.Handler):
    def __init__(self, kept: list[str]) -> None:
        super().__init__()
        self.kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(f"log {record.levelname}: {record.getMessage()}")


def perform(task: Task) -> Outcome:
    """Run one loop in this process, which does nothing else, and diagnose what it recorded."""
    loop, outcome = LOOPS[task.name], Outcome(task)
    torch.set_num_threads(1)
    torch.manual_seed(1000 + task.seed)
    logging.getLogger("ampwatch").addHandler(Lines(outcome.notes))
    with (
        tempfile.TemporaryDirectory(prefix="loops-") as folder,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        lab = Lab(Path(folder), task.name, task.seed, limit=task.limit, plain=task.mode == "plain")
        try:
            outcome.happened = loop.body(lab, task.fault)
        except Exception as error:  # noqa: BLE001 - a loop that breaks is reported, the others go on
            meant = task.fault and isinstance(error, loop.raises)
            outcome.raised = repr(error) if meant else "unexpected: " + traceback.format_exc()
        if not lab.plain:
            ampwatch.finish()
            outcome.scales, outcome.before = _recorded(lab.dir / lab.run)
            try:
                outcome.findings = [
                    dict(msgspec.to_builtins(f))
                    for f in ampwatch.diagnose(lab.trace or lab.dir / lab.run, lab.policy)
                ]
            except ampwatch.RunNotFound:
                outcome.notes.append("nothing was recorded")
            except Exception:  # noqa: BLE001 - as above
                outcome.raised = "unexpected: " + traceback.format_exc()
        outcome.digest, outcome.losses = lab.digest(), lab.losses
        outcome.path = [s for scaler in lab.scalers for s in getattr(scaler, "path", [])]
        outcome.notes += sorted({f"{w.category.__name__}: {w.message}" for w in caught})
    return outcome


def _recorded(run: Path) -> tuple[list[tuple[float, float]], dict[str, int]]:
    """Scales of each recorded attempt, and of each producer the attempts of jobs of its rank before it."""
    batches = [b for b in ampwatch.spool.read(run) if b.kind == "attempts"] if run.exists() else []
    scales, jobs = [], defaultdict[tuple[int, str], list[float]](list)
    for batch in batches:
        table = batch.table()
        scales += [(float(a), float(b)) for a, b in zip(table["scale"], table["scale_after"], strict=True)]
        jobs[batch.rank, batch.producer] += table["time"].tolist()
    before = {
        producer: sum(len(t) for (r, _), t in jobs.items() if r == rank and max(t) < min(times))
        for (rank, producer), times in jobs.items()
    }
    return scales, before


def run(tasks: list[Task], jobs: int) -> Iterator[Outcome]:
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
        for count, outcome in enumerate(pool.imap_unordered(perform, tasks, chunksize=1), 1):
            alarm = [] if outcome.task.fault else outcome.loud
            if sys.stderr.isatty() or alarm or count % EVERY == 0:
                said = "".join(f"\n  {outcome.task.name} seed {outcome.task.seed}: {brief(f)}" for f in alarm)
                end = "" if sys.stderr.isatty() and not said else "\n"
                print(f"\r{count} of {len(tasks)} runs{said}", end=end, file=sys.stderr, flush=True)
            yield outcome


@dataclass
class Score:
    """One loop with one seed, its fault in place."""

    name: str
    seed: int
    kind: str
    claimed: bool
    verdict: str = ""  # right, wrong or missed
    late: bool | None = None
    step_off: int | None = None
    place: bool | None = None  # right
    said: str = ""
    detail: str = ""


def brief(finding: dict[str, Any]) -> str:
    place = finding["module"] or finding["tensor"]
    return (
        f"{finding['kind']}/{finding['severity']}"
        f"@{finding['first_attempt']}" + (f"({place})" if place else "") + f" {finding['headline']}"
    )


def judge(loop: Loop, outcome: Outcome, due: Outcome | None) -> Score:
    assert loop.kind is not None
    task, score = outcome.task, Score(loop.name, outcome.task.seed, loop.kind, loop.claimed)
    fitting = {loop.kind, *loop.accept}
    named = [f for f in outcome.findings if f["kind"] in fitting]
    beside = [f for f in outcome.loud if f["kind"] not in fitting]
    informative = loop.severity == ("info",)
    if not named:
        score.verdict = "wrong" if beside else "missed"
    elif (
        beside
        or (not informative and outcome.findings[0]["kind"] not in fitting)
        or not any(f["severity"] in loop.severity or f["kind"] in loop.accept for f in named)
    ):
        score.verdict = "wrong"
    else:
        score.verdict = "right"
    score.said = "; ".join(brief(f) for f in (outcome.loud or outcome.findings)) or "nothing"
    if named and outcome.happened and outcome.happened.onset is not None:
        score.step_off = _first_of(named, outcome) - outcome.happened.onset
    if named and loop.where:
        score.place = bool({named[0]["module"], named[0]["tensor"]} & set(loop.where))
    if due is not None:
        score.late = not any(f["kind"] in fitting for f in due.findings)
    if outcome.raised.startswith("unexpected"):
        score.detail = outcome.raised
    onset = outcome.happened.onset if outcome.happened else None
    score.detail = f"onset {onset}; seed {task.seed}" + ("; " + score.detail if score.detail else "")
    return score


def _first_of(named: list[dict[str, Any]], outcome: Outcome) -> int:
    """The attempt of the run, over all its jobs, at which the headline was first true."""
    same = (f for f in named if f["severity"] == named[0]["severity"])
    return min(int(f["first_attempt"]) + outcome.before.get(f["producer"], 0) for f in same)


def due_at(loop: Loop, outcome: Outcome) -> int | None:
    """The number of iterations after which the verdict must stand."""
    happened = outcome.happened
    if happened is None or happened.onset is None:
        return None
    if happened.by is not None:
        return -(-(happened.by + 1) // loop.per_step)
    if loop.within is not None:
        return -(-(happened.onset + loop.within + 1) // loop.per_step)
    return None


def trace(name: str, seed: int, fault: bool) -> None:
    plain, watched = run([Task(name, seed, fault, "plain"), Task(name, seed, fault)], 1)
    print("scale", " ".join(f"{s:g}" for s in plain.path))
    print("loss ", " ".join(f"{x:.4g}" for x in plain.losses))
    print("happened", watched.happened, "| raised", watched.raised or plain.raised)
    print("same weights as torch's:", plain.digest == watched.digest)
    for note in watched.notes:
        print("note", note)
    for finding in watched.findings:
        print(brief(finding))
        for line in finding["evidence"]:
            print("    ", json.dumps(line))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--set",
        choices=("first", "second", "third", "fourth", "fifth", "sixth", "grid", "long"),
        help="the loops that were written together",
    )
    parser.add_argument("--only", nargs="+", default=[], help="loops, or kinds")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--plain", action="store_true", help="compare with torch's own scaler")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trace", metavar="NAME")
    parser.add_argument("--healthy", action="store_true", help="only without the fault")
    options = parser.parse_args()
    if options.trace:
        trace(options.trace, options.first, not options.healthy)
        return
    chosen = options.set or (None if options.only else "first")
    loops = [
        p
        for p in LOOPS.values()
        if chosen in (None, p.set) and (not options.only or {p.name, p.kind} & set(options.only))
    ]
    if not loops:
        parser.error("no such loop: " + " ".join(options.only))
    if options.healthy:
        loops = [replace(p, kind=None) for p in loops]
    seeds = range(options.first, options.first + options.seeds)
    tasks = [
        Task(p.name, s, fault) for p in loops for s in seeds for fault in (True, False) if p.kind or not fault
    ]
    if options.plain:
        tasks += [replace(t, mode="plain") for t in tasks]
    done = {(o.task.name, o.task.seed, o.task.fault, o.task.mode): o for o in run(tasks, options.jobs)}
    later = [
        Task(p.name, s, True, "due", limit)
        for p in loops
        for s in seeds
        if p.kind and (limit := due_at(p, done[p.name, s, True, "watched"])) is not None
    ]
    done |= {(o.task.name, o.task.seed, True, "due"): o for o in run(later, options.jobs)}
    scores = [
        judge(p, done[p.name, s, True, "watched"], done.get((p.name, s, True, "due")))
        for p in loops
        if p.kind
        for s in seeds
    ]
    silent = [done[p.name, s, False, "watched"] for p in loops for s in seeds]
    alarms = [o for o in silent if o.loud]
    differing = [
        key
        for key, o in done.items()
        if key[3] == "plain" and o.digest != done[key[0], key[1], key[2], "watched"].digest
    ]
    broken = [o for o in done.values() if o.raised.startswith("unexpected")]
    if options.json:
        print(
            json.dumps(
                {
                    "scores": [asdict(s) for s in scores],
                    "false_alarms": [
                        {"loop": o.task.name, "seed": o.task.seed, "said": [brief(f) for f in o.loud]}
                        for o in alarms
                    ],
                    "healthy": len(silent),
                    "differing": differing,
                    "notes": {
                        f"{o.task.name}:{o.task.seed}:{o.task.mode}": o.notes
                        for o in done.values()
                        if o.notes
                    },
                    "broken": [[o.task.name, o.raised] for o in broken],
                },
                indent=1,
            )
        )
        return
    report(loops, scores, alarms, len(silent))
    if options.healthy:
        happenings(loops, silent)
    for o in broken:
        print(f"\ncrash {o.task}\n{o.raised}")
    for key in differing:
        print("weights differ from torch's:", *key[:3])
    if options.plain:
        print(f"{len(differing)} of {sum(k[3] == 'plain' for k in done)} runs differ from torch's own scaler")


def report(loops: list[Loop], scores: list[Score], alarms: list[Outcome], healthy: int) -> None:
    kinds: dict[str, list[Score]] = defaultdict(list)
    for score in scores:
        kinds[score.kind].append(score)
    twins = {p.name: p.kind for p in loops}
    head = f"{'kind':22}{'claimed':>8}{'cases':>6}{'right':>6}{'wrong':>6}{'missed':>7}{'late':>6}{'place':>7}  first - onset"
    print(head)
    print("-" * len(head))
    for kind, group in sorted(kinds.items(), key=lambda k: (not k[1][0].claimed, k[0])):
        counts = {v: sum(s.verdict == v for s in group) for v in ("right", "wrong", "missed")}
        due = [s for s in group if s.late is not None]
        placed = [s for s in group if s.place is not None]
        late = f"{sum(bool(s.late) for s in due)}/{len(due)}" if due else ""
        place = f"{sum(bool(s.place) for s in placed)}/{len(placed)}" if placed else ""
        offsets = " ".join(str(s.step_off) for s in group if s.step_off is not None)
        print(
            f"{kind:22}{'yes' if group[0].claimed else 'no':>8}{len(group):>6}{counts['right']:>6}"
            f"{counts['wrong']:>6}{counts['missed']:>7}{late:>6}{place:>7}  {offsets}"
        )
    print("\nnot right, late or misplaced:")
    for s in scores:
        if s.verdict != "right" or s.late or s.place is False:
            marks = s.verdict + (", late" if s.late else "") + (", misplaced" if s.place is False else "")
            print(f"  {s.name} ({s.kind}) {marks}; {s.detail}\n      said: {s.said}")
    print(f"\nfalse alarms on healthy loops: {len(alarms)} of {healthy}")
    for o in alarms:
        twin = f" (twin of {twins[o.task.name]})" if twins[o.task.name] else ""
        print(f"  {o.task.name}{twin} seed {o.task.seed}: " + "; ".join(brief(f) for f in o.loud))
    for title, group in (("claimed kinds", [s for s in scores if s.claimed]), ("all kinds", scores)):
        right = sum(s.verdict == "right" for s in group)
        beside = sum(s.verdict == "wrong" for s in group)
        share = f"{100 * right / len(group):.1f} %" if group else "-"
        print(
            f"{title}: {right} of {len(group)} right ({share}), {beside} wrong, {len(group) - right - beside} missed"
        )
    print(f"total: {len(scores)} faults, {healthy} healthy runs, {len(alarms)} false alarms")


def happenings(loops: list[Loop], outcomes: list[Outcome]) -> None:
    """What healthy loops went through, least and most over their seeds: what is silent beside nothing proves nothing."""
    print(f"\n{'loop':45}{'attempts':>10}{'skips':>8}{'later':>8}{'growths':>9}{'spike':>12}")
    for loop in loops:
        its = [o for o in outcomes if o.task.name == loop.name]
        columns = [
            [len(o.scales) for o in its],
            [sum(after < before for before, after in o.scales) for o in its],
            [_later(o.scales) for o in its],
            [sum(after > before for before, after in o.scales) for o in its],
        ]
        spikes = [_spike(o.losses) for o in its]
        cells = "".join(f"{_span(c):>{w}}" for c, w in zip(columns, (10, 8, 8, 9), strict=True))
        print(f"{loop.name:45}{cells}{f'{min(spikes):.1f}–{max(spikes):.1f} ×':>12}")


def _span(counts: list[int]) -> str:
    return str(counts[0]) if min(counts) == max(counts) else f"{min(counts)}–{max(counts)}"


def _later(scales: list[tuple[float, float]]) -> int:
    """Skips after the first attempt that was none: not those of the first descent."""
    first = next((i for i, (before, after) in enumerate(scales) if after >= before), len(scales))
    return sum(after < before for before, after in scales[first:])


def _spike(losses: list[float]) -> float:
    """The largest loss in units of the median of the ten around it."""
    around = [losses[max(0, i - 5) : i] + losses[i + 1 : i + 6] for i in range(len(losses))]
    return max(
        (x / m for x, near in zip(losses, around, strict=True) if near and (m := median(near)) > 0),
        default=0.0,
    )


if __name__ == "__main__":
    main()

"""The tables. `migrations/` creates them; a test holds the two together.

A reader of columns, not of rows: what grows with training lies in `chunks`, 1,024 attempts each. Only what
people search or count is a row. Bodies are msgpack, which keeps NaN and infinities; text holds no NUL.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    false,
)

metadata = MetaData()
RowId = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts up only a column called INTEGER


def _key(target: str) -> Column[int]:
    return Column(
        target.split(".", maxsplit=1)[0][:-1], RowId, ForeignKey(target, ondelete="CASCADE"), primary_key=True
    )


def _run_key() -> Column[str]:
    return Column("run", Text, ForeignKey("runs.run", ondelete="CASCADE"), primary_key=True)


runs = Table(
    "runs",
    metadata,
    Column("run", Text, primary_key=True),
    Column("project", Text, nullable=False),  # project, given_*: from the run's own description
    Column("given_name", Text, nullable=False),
    Column("given_tags", Text, nullable=False),  # tags: a list in JSON
    Column("name", Text),  # name, tags: what a person made of them; null until then
    Column("tags", Text),
    Column("notes", Text, nullable=False),
    Column("archived", Boolean, nullable=False),
    Column("ended", Boolean, nullable=False),  # every rank's last producer has said that it ends
    Column("complete", Boolean, nullable=False),  # and nothing that it sent is missing or unread
    Column("started", Float(53), nullable=False),  # as the run says, at most when its first record came
    Column("last_seen", Float(53), nullable=False),  # by the server's clock, as the one below
    Column("last_attempt", Float(53), nullable=False),
    Column("received", Float(53)),  # when the server had it, however old it was then; null: as last_seen
    Column(
        "bound", Boolean, nullable=False, server_default=false()
    ),  # to the project of the token it came by
    Index("runs_by_last_seen", "last_seen", "run"),
)

run_state = Table(  # what a server knows about a run under the run's lease; can be made again from the rest
    "run_state",
    metadata,
    _run_key(),
    Column("holder", Text, nullable=False),
    Column("lease_until", Float(53), nullable=False),
    Column("revision", BigInteger, nullable=False),  # counts changes that a reader can see
    Column("changed", Float(53), nullable=False),
    Column("summary", LargeBinary, nullable=False),
    Column("verdict", LargeBinary, nullable=False),
    Column("attempt_s", Float(53), nullable=False, server_default="0"),  # the usual time between two attempts
    Column("engine", BigInteger, nullable=False, server_default="0"),  # version of that which judged it …
    Column("judged", BigInteger, nullable=False, server_default="-1"),  # … at this revision: outdated.py
    Index("run_state_by_changed", "changed"),
)

producers = Table(
    "producers",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("producer", Text, nullable=False, unique=True),
    Column("run", Text, ForeignKey("runs.run", ondelete="CASCADE"), nullable=False, index=True),
    Column("rank", Integer, nullable=False),
    Column("first_seen", Float(53), nullable=False),
    Column("last_seen", Float(53), nullable=False),
    Column("last_seq", BigInteger, nullable=False),
    Column("received", BigInteger, nullable=False),  # distinct sequence numbers; less than last_seq + 1: gaps
    Column("end_attempt", BigInteger, nullable=False),  # one past the last attempt seen
    Column("rolled", BigInteger, nullable=False),  # below it every complete window has its roll-ups
    Column("attempts", BigInteger, nullable=False),
    Column("skipped", BigInteger, nullable=False),
    Column("finished", Boolean, nullable=False),
    Column("announced", BigInteger, nullable=False),  # attempts that it counted at its end; 0 until then
    Column("host", Text, nullable=False),
    Column("device", Text, nullable=False),
    # below these attempts level 0 is gone by age (retention.py); the levels above stay
    Column("attempts_from", BigInteger, nullable=False, server_default="0"),
    Column("tensors_from", BigInteger, nullable=False, server_default="0"),
)

receipts = Table(  # every sequence number ever stored, with its digest: delivery is idempotent for good
    "receipts",
    metadata,
    _key("producers.id"),
    Column("seq", BigInteger, primary_key=True),
    Column("digest", LargeBinary, nullable=False),
)

inbox = Table(  # acknowledged bodies that are not in chunks or rows yet
    "inbox",
    metadata,
    _key("producers.id"),
    Column("seq", BigInteger, primary_key=True),
    Column("run", Text, nullable=False, index=True),
    Column("kind", Text, nullable=False),
    Column("first", BigInteger, nullable=False),  # first and last attempt of a table; -1 for events
    Column("last", BigInteger, nullable=False),
    Column("folded", BigInteger, nullable=False),  # attempts below it are in chunks already
    Column("digest", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
)

chunks = Table(
    "chunks",
    metadata,
    _key("producers.id"),
    Column("kind", Text, primary_key=True),
    Column("stream", BigInteger, primary_key=True),
    Column("level", SmallInteger, primary_key=True),
    Column("first", BigInteger, primary_key=True),  # first attempt of the window, recorded or not
    Column("count", BigInteger, nullable=False),  # rows in the chunk
    Column("codec", SmallInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Column("hist", LargeBinary),  # of tensors, beside the other columns; before codec 3 among them
)

parts = Table(  # points of one window, until the 16 of a parent lie in its chunk
    "parts",
    metadata,
    _key("producers.id"),
    Column("kind", Text, primary_key=True),
    Column("stream", BigInteger, primary_key=True),
    Column("level", SmallInteger, primary_key=True),  # of the points: the window is one of the level below
    Column("first", BigInteger, primary_key=True),
    Column("codec", SmallInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Column("hist", LargeBinary),  # of tensors, beside the other columns; before codec 3 among them
)

watches = Table(  # which runs somebody watches, on whichever server: their clients come soon
    "watches",
    metadata,
    Column("run", Text, primary_key=True),  # empty: the list of all
    Column("until", Float(53), nullable=False),  # told again while it goes on
)

formats = Table(  # what may be written so that every server that shares the database reads it
    "formats",
    metadata,
    Column("name", Text, primary_key=True),
    Column("version", SmallInteger, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("producer", RowId, ForeignKey("producers.id", ondelete="CASCADE"), nullable=False),
    Column("run", Text, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("place", Integer, nullable=False),  # index in its batch
    Column("type", Text, nullable=False),
    Column("time", Float(53), nullable=False),  # a copy to order by, finite
    Column("attempt", BigInteger, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("last", BigInteger),  # attempt of the last repetition; null: of the first
    Index("events_by_time", "run", "time", "id"),
    Index("events_by_type", "run", "type", "time", "id"),
    Index("events_once", "producer", "seq", "place", unique=True),
)

tensors = Table(
    "tensors",
    metadata,
    _key("producers.id"),
    Column("tensor", BigInteger, primary_key=True),
    Column("name", Text, nullable=False),
    Column("origin", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
)

findings = Table(
    "findings",
    metadata,
    _run_key(),
    Column("key", Text, primary_key=True),
    Column("place", Integer, nullable=False),  # the worst first
    Column("kind", Text, nullable=False),
    Column("severity", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
)

finding_marks = Table(  # what a person said of a finding; stands however often the run is diagnosed anew
    "finding_marks",
    metadata,
    _run_key(),
    Column("key", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("mark", Text, nullable=False),  # acknowledged, muted
    Column("who", Text, nullable=False),
    Column("time", Float(53), nullable=False),
)

outbox = Table(  # alerts, each once for a finding and a destination, also where several servers diagnose
    "outbox",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("run", Text, ForeignKey("runs.run", ondelete="CASCADE"), nullable=False),
    Column("key", Text, nullable=False),  # of the finding
    Column("destination", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),  # the finding as it was when the alert was raised
    Column("created", Float(53), nullable=False),
    Column("due", Float(53)),  # when it is tried next; null: done
    Column("tries", Integer, nullable=False),
    Column("outcome", Text, nullable=False),  # of the last try; never what the destination said
    Index("outbox_once", "run", "key", "destination", unique=True),
    Index("outbox_by_due", "due"),
)

tokens = Table(  # tokens of programs, sessions of browsers, and one-time links: only their hashes
    "tokens",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("hash", Text, nullable=False, unique=True),
    Column("scopes", Text, nullable=False),  # of "read write admin", separated by spaces
    Column("project", Text),  # whose runs it is for; null: every one
    Column("created", Float(53), nullable=False),
    Column("expires", Float(53)),
    Column("last_used", Float(53)),  # to about a minute
)

audit = Table(
    "audit",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("time", Float(53), nullable=False),
    Column("who", Text, nullable=False),  # kind and name of the token
    Column("action", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Index(
        "audit_by_use", "action", "who", "subject", "time"
    ),  # asked for each token and address, once an hour
    Index("audit_by_time", "action", "time"),
)

"""Writes docs/findings.md from the catalogue of texts: `python tests/diagnosis/catalogue.py`."""

from pathlib import Path

from ampwatch.diagnosis import texts
from ampwatch.diagnosis.findings import Advice
from ampwatch.diagnosis.precedence import PRECEDENCE

PAGE = Path(__file__).parents[2] / "docs" / "findings.md"
HEAD = """\
# What the diagnosis says

Written from `ampwatch/diagnosis/texts/`; words in braces are filled in. Kinds stand from the most specific to the \
least: where several fit, the first is the headline and the others become its evidence.
"""


def page() -> str:
    """The page as it should be."""
    kinds = "\n".join(_kind(kind) for kind in PRECEDENCE)
    lists = [("How it goes on: `{recovery}`", texts.RECOVERY), ("Calls: `{fault}`", texts.FAULTS)]
    return f"{HEAD}\n{kinds}\n" + "\n".join(f"## {title}\n\n{_items(said)}\n" for title, said in lists)


def _kind(kind: str) -> str:
    said = {key: text for key, text in texts.HEADLINES.items() if key.partition(".")[0] == kind}
    advice = [a for key, some in texts.ADVICE.items() if key.partition(".")[0] == kind for a in some]
    return f"## [{kind}](faults/{kind}.md)\n\n{_items(said)}\n" + "".join(map(_advice, advice))


def _items(said: dict[str, str]) -> str:
    return "\n".join(f"* `{key}`: {text}" for key, text in said.items()) + "\n"


def _advice(advice: Advice) -> str:
    code = f"\n```python\n{advice.code}\n```\n" if advice.code else ""
    return f"> {advice.text}\n{code}\n"


if __name__ == "__main__":
    PAGE.write_text(page())

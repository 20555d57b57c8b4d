"""Nothing that people read gives the advice that docs/numerics.md, section 9, shows to be wrong.

A rule is caught where a sentence gives it, and not where one warns of it. Examples in the docs are faults on purpose,
so that only their prose is read; the code of an advice is to be pasted, and is read too.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ampwatch.diagnosis import texts

ROOT = Path(__file__).parents[2]
TABLE = "## 9. Advice that is often given"
WARNS = re.compile(r"\b(not|never|no|nothing|only|hides?|instead|wrong|helps here)\b", re.IGNORECASE)
FEWER, MORE = r"(decreas|lower|reduc|smaller|halv)\w*", r"(increas|rais|higher|larger|doubl)\w*"
RULES = {
    "Frequent overflow: increase init_scale or growth_factor": rf"overflow.*{MORE}.{{0,30}}(init_scale|growth_factor|initial scale|growth factor)",
    "Zero gradients mean over-scaling; decrease init_scale": rf"over-scal|(zero|underflow).*{FEWER}.{{0,20}}(init_scale|scale\b)",
    "A small scale causes NaN; force a minimum of 128": r"minimum of 128|min_scale|small(er)? scale (causes|gives|makes|is why).{0,20}(nan|inf)",
    "growth_interval = 5–10 % of all steps": r"growth.interval`? ?(=|to|of) .{0,15}\d ?%",
    "ViTs start at 2^14, CNNs at 2^16": r"\b(vit|cnn|transformer)s?\b.{0,30}2\^1\d",
    "A summed loss with scale < 1 is a bug": r"scale (<|below) 1 is (a |an )?(bug|fault|error|wrong)",
    "Gradient overflow messages are normal": r"(overflow|skip)\w*( message| warning)?s? (are|is) (always )?(normal|harmless)",
    "Clip gradients to cure overflow": r"clip.{0,30}(cure|against|prevent|avoid|stop|mend).{0,20}(overflow|inf|nan|range)",
    "Replace NaN gradients by zero in a hook": r"(replac|set|turn|mak)\w* (nan|inf).{0,25}(by|to|with|of) (zero|0\b)|nan_to_num_?\(",
    "Set Adam eps to 1e-4 for AMP": rf"\beps\b.{{0,20}}1e-[34]|{MORE} eps|{MORE} adam.{{0,10}}eps",
    "The scale changed, so the step was skipped": r"scale (has |was )?changed.{0,30}skip|get_scale\(\) ?!=",
    "Keep GradScaler on with bf16 to be safe": r"(keep|leave|use|turn).{0,15}scaler (on )?.{0,10}(bf16|bfloat16)",
    "Gradient scaling lowers the learning rate, so multiply it by 8–32": rf"(multipl\w*|{MORE}).{{0,30}}(learning rate|\blr\b)|learning rate.*multipl",
    "Call scale(loss).backward() once per layer with a scaler each": r"scaler for each layer|once (per|for each) layer",
    "Catch RuntimeError('overflow') around step()": r"catch.{0,20}(runtimeerror|overflow)|except (runtime|overflow)error",
}


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?|])\s+|\n\n", text)


def given(text: str) -> list[str]:
    """The rules that a text gives, each with its sentence."""
    return [
        f"{rule}: {sentence}"
        for sentence in sentences(text)
        if not WARNS.search(sentence)
        for rule, pattern in RULES.items()
        if re.search(pattern, sentence, re.IGNORECASE | re.DOTALL)
    ]


def prose(page: Path) -> str:
    """A page without its examples, and without the table of what is said."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return text.partition(TABLE)[0]


def strings(texts_of: object) -> list[str]:
    """Everything in a table of texts, advice with its code."""
    if isinstance(texts_of, dict):
        return [s for value in texts_of.values() for s in strings(value)]
    if isinstance(texts_of, list):
        return [s for value in texts_of for s in strings(value)]
    return [texts_of] if isinstance(texts_of, str) else [texts_of.text, texts_of.code]  # type: ignore[attr-defined]


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_in_the_docs_and_would_be_caught(rule):
    assert f'"{rule}"' in (ROOT / "docs" / "numerics.md").read_text()
    assert given(rule) == [f"{rule}: {rule}"]


@pytest.mark.parametrize("name", [name for name in dir(texts) if name.isupper()])
def test_no_text_of_the_catalogue_gives_a_folk_rule(name):
    assert [rule for text in strings(getattr(texts, name)) for rule in given(text)] == []


PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "faults").glob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_page_gives_a_folk_rule(page):
    assert given(prose(page)) == []


def test_a_lower_learning_rate_is_advised_where_training_diverges_and_nowhere_else():
    advised = {
        key.partition(".")[0]
        for key, advice in texts.ADVICE.items()
        for text in strings(advice)
        for sentence in sentences(text)
        if re.search(rf"{FEWER}.{{0,30}}(learning rate|\blr\b)", sentence, re.IGNORECASE)
        and not WARNS.search(sentence)
    }
    assert advised == {"divergence"}

import math

import catalogue
import pytest

from ampwatch.diagnosis import Advice, texts
from ampwatch.diagnosis.moments import Moment
from ampwatch.diagnosis.precedence import PRECEDENCE


def test_the_page_of_texts_is_up_to_date():
    assert catalogue.PAGE.read_text() == catalogue.page(), "run: python tests/diagnosis/catalogue.py"


def test_steps_stand_alone_where_attempts_are_the_same():
    assert texts.at(Moment(7, 7)) == "step 7"
    assert texts.at(Moment(9, 7)) == "step 7 (attempt 9)"
    assert texts.at(Moment(9, -1)) == "attempt 9"


@pytest.mark.parametrize(
    ("scale", "said"),
    [(65536.0, "2^16"), (1.0, "2^0"), (2.0**-24, "2^-24"), (1000.0, "1000"), (0.0, "0"), (math.inf, "inf")],
)
def test_scales_are_powers_of_two(scale: float, said: str):
    assert texts.power(scale) == said


def test_one_tensor_is_not_the_first_of_several():
    assert [texts.first_of("head.bias", count) for count in (1, 2)] == ["head.bias", "head.bias first"]


def test_code_keeps_its_own_braces():
    (advice,) = texts.fill([Advice("by {k}", "{other: {k}}")], k=3)
    assert (advice.text, advice.code) == ("by 3", "{other: 3}")


def test_every_kind_has_a_short_text():
    assert set(texts.SHORT) == set(PRECEDENCE)

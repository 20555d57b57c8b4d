import math

import pytest
from build import Run

ORIGIN = {
    "module": "blocks.1.attention",
    "module_type": "Attention",
    "input_max_abs": 3.5,
    "input_n_nonfinite": 0,
    "output_n_inf": 0,
    "output_n_nan": 2048,
    "output_max_abs": 0.0,
    "children_max_abs": 60.0,
}
SEARCH = {
    "origin": ORIGIN,
    "path": [ORIGIN],
    "inputs_finite": True,
    "parameters_finite": True,
    "outputs_finite": False,
}


def searched(**changes: object) -> Run:
    """A run that breaks at attempt 100, searched at the third broken attempt."""
    run = Run().clean(100).broken(2)
    return run.event("forward_search", **(SEARCH | changes)).broken(4)


def test_one_nonfinite_loss_is_a_bad_batch():
    assert Run().clean(100).broken(1).kinds() == [("bad_batch", "warning", "open")]
    run = Run().clean(100).broken(1).clean(5)
    assert run.kinds() == [("bad_batch", "warning", "recovered")]
    assert "at step 100, for one attempt only" in run.findings()[0].headline


def test_two_nonfinite_losses_in_a_row_are_fatal():
    (finding,) = Run().clean(100).broken(2).findings()
    assert (finding.kind, finding.severity, finding.first_attempt) == ("nonfinite_forward", "fatal", 100)


def test_finite_inputs_and_nonfinite_output_are_forward_overflow():
    (finding,) = searched().findings()
    assert (finding.kind, finding.severity, finding.state) == ("forward_overflow", "fatal", "open")
    assert (finding.module, finding.first_step, finding.last_attempt) == ("blocks.1.attention", 100, 105)
    assert finding.confidence == 0.95
    texts = [e.text for e in finding.evidence]
    assert "The inputs of blocks.1.attention are finite, the largest magnitude is 3.5." in texts
    assert any("halved 6 times, from 2^16 to 2^10, to no avail" in text for text in texts)


def test_overflow_that_ended_is_told_as_recovered():
    (finding,) = searched().clean(3).findings()
    assert finding.state == "recovered"
    assert finding.headline.endswith("It recovered at step 100 (attempt 106).")


def test_a_loss_that_was_finite_as_observers_looked_is_told_by_when_it_breaks_again():
    run = Run().clean(100).broken(2).clean(3).broken(1).event("forward_search", **SEARCH).broken(2)
    (finding,) = run.findings()
    assert (finding.kind, finding.first_attempt, finding.confidence) == ("forward_overflow", 100, 0.95)
    assert finding.evidence[-1].text == "Seen 2 times, first at step 100."
    (finding,) = run.clean(2).findings()
    assert (finding.kind, finding.first_attempt, finding.confidence) == ("forward_overflow", 100, 0.8)
    assert "was seen at step 103 (attempt 106)" in finding.evidence[0].text
    run = Run().clean(100).broken(2).clean(65).broken(1).event("forward_search", **SEARCH).broken(2)
    assert [f.kind for f in run.findings()] == ["forward_overflow", "nonfinite_forward"]


def test_small_magnitudes_prove_no_overflow():
    (finding,) = searched(origin=ORIGIN | {"children_max_abs": 3.0}).findings()
    assert finding.kind == "nonfinite_forward"


def test_nonfinite_inputs_are_not_overflow():
    (finding,) = searched(origin=ORIGIN | {"input_n_nonfinite": 7}).findings()
    assert finding.kind == "nonfinite_forward"
    (finding,) = searched(inputs_finite=False, origin=None).findings()
    assert (finding.kind, finding.headline.count("the inputs of the model")) == ("nonfinite_forward", 1)


def test_inputs_of_which_nothing_is_known_are_not_spoken_of():
    (finding,) = searched(inputs_finite=None).findings()
    assert (finding.kind, finding.module) == ("forward_overflow", "blocks.1.attention")
    (finding,) = searched(inputs_finite=None, origin=None).findings()
    said = [finding.headline, *(e.text for e in finding.evidence), *(a.text for a in finding.advice)]
    assert (finding.kind, [text for text in said if "inputs of the model" in text]) == (
        "nonfinite_forward",
        [],
    )


def test_a_loss_that_breaks_by_itself_is_not_overflow_of_the_model():
    (finding,) = searched(outputs_finite=True, origin=None).findings()
    assert (finding.kind, "the loss itself" in finding.headline) == ("nonfinite_forward", True)


OPERATIONS = {
    "loss": {"finite": False, "inputs_finite": True, "float16": ["Mean", "Log", "Softmax"]},
    "softmax": None,
}


def looked_into(search: dict[str, object], **operations: object) -> Run:
    """As `searched`, with the operations beside it."""
    run = Run().clean(100).broken(2).event("forward_search", **(SEARCH | search))
    return run.event("operations", **(OPERATIONS | operations)).broken(4)


def test_a_float16_loss_of_finite_outputs_is_named():
    (finding,) = looked_into({"outputs_finite": True, "origin": None}).findings()
    assert (finding.kind, finding.severity, finding.confidence) == ("loss_in_fp16", "fatal", 0.8)
    assert finding.evidence[1].text == "Computed in float16 after them: Softmax, Log, Mean."


@pytest.mark.parametrize("float16", [[], ["Mul", "Sub"]])
def test_operations_that_make_no_inf_are_not_blamed(float16: list[str]):
    loss = OPERATIONS["loss"] | {"float16": float16}
    (finding,) = looked_into({"outputs_finite": True, "origin": None}, loss=loss).findings()
    assert finding.kind == "nonfinite_forward"


def test_a_module_that_returns_the_loss_is_not_overflow():
    assert [f.kind for f in looked_into({}).findings()] == ["loss_in_fp16"]


def softmax(module: str, masked: int, overflowed: int) -> list[str]:
    seen = {"module": module, "rows": 64, "masked": masked, "overflowed": overflowed}
    run = looked_into({}, loss={"finite": False, "inputs_finite": False, "float16": []}, softmax=seen)
    return [f.kind for f in run.findings()]


def test_rows_that_are_masked_throughout_are_a_mask_and_not_overflow():
    assert softmax("blocks.1.attention", masked=3, overflowed=0) == ["mask_constant"]
    assert softmax("blocks.1.attention.softmax", masked=3, overflowed=0) == ["mask_constant"]


def test_rows_that_overflow_or_belong_elsewhere_are_no_mask():
    assert softmax("blocks.1.attention", masked=3, overflowed=1) == ["forward_overflow"]
    assert softmax("blocks.1.attention2", masked=3, overflowed=0) == ["forward_overflow"]


SMALL = {
    "input_max_abs": 3.2,
    "children_max_abs": 3.2,
    "output_n_inf": 0,
    "output_n_nan": 9,
    "output_max_abs": 1.0,
}


def scores(infinite: int, undefined: int, **origin: object) -> list[str]:
    """A softmax with 5 rows that hold NaN or inf, in a module that was given small numbers unless told otherwise."""
    search = {"origin": SEARCH["origin"] | SMALL | origin}
    seen = {"module": "blocks.1.attention", "rows": 64, "masked": 0, "overflowed": 5}
    seen |= {"infinite": infinite, "undefined": undefined}
    run = looked_into(search, loss={"finite": False, "inputs_finite": False, "float16": []}, softmax=seen)
    return [f.kind for f in run.findings()]


def test_nan_beside_minus_infinity_is_a_mask_times_a_constant_where_nothing_was_large():
    assert scores(infinite=0, undefined=2) == ["mask_constant"]
    assert scores(infinite=1, undefined=2) == ["forward_overflow"]
    assert scores(infinite=0, undefined=2, input_max_abs=300.0) == ["forward_overflow"]


def test_nan_of_small_numbers_alone_proves_no_overflow():
    assert scores(infinite=0, undefined=0) == ["nonfinite_forward"]
    assert scores(infinite=0, undefined=0, output_n_inf=1) == ["forward_overflow"]
    assert scores(infinite=0, undefined=0, module_type="Linear") == ["forward_overflow"]  # by its weights
    (finding,) = looked_into(
        {"origin": SEARCH["origin"] | SMALL}, loss={"finite": False, "inputs_finite": False}
    ).findings()
    assert (finding.kind, finding.module) == ("nonfinite_forward", "blocks.1.attention")
    assert finding.headline.startswith("NaN appears inside blocks.1.attention from step 100 on")


def left_out(search: dict[str, object], softmax: object) -> list[tuple[str, str, int]]:
    """Skips with a finite loss from attempt 100 on, of which the fifth was searched."""
    run = Run().clean(100).skip(4).event("forward_search", **(SEARCH | search))
    run = run.event(
        "operations", loss={"finite": True, "inputs_finite": False, "float16": []}, softmax=softmax
    )
    return [(f.kind, f.severity, f.first_attempt) for f in run.skip(2).findings()]


ALL_MASKED = {
    "module": "blocks.1.attention",
    "rows": 64,
    "masked": 3,
    "overflowed": 0,
    "infinite": 0,
    "undefined": 0,
}


def test_nan_that_the_loss_leaves_out_is_named_by_what_makes_it():
    assert left_out({}, ALL_MASKED) == [("mask_constant", "fatal", 100)]
    assert left_out({}, ALL_MASKED | {"overflowed": 5, "infinite": 5}) == [("forward_overflow", "fatal", 100)]


@pytest.mark.parametrize(
    "search",
    [
        {"outputs_finite": True, "origin": None},
        {"origin": ORIGIN | {"output_n_inf": 9, "output_n_nan": 0}},  # actions masked with -inf
        {"inputs_finite": False},
        {"parameters_finite": False},
    ],
)
def test_a_finite_loss_of_a_model_that_makes_no_nan_is_not_laid_to_its_forward_pass(search):
    assert not {"mask_constant", "forward_overflow"} & {kind for kind, *_ in left_out(search, ALL_MASKED)}


def test_advice_never_lowers_the_scale():
    said = " ".join(a.text for a in searched().findings()[0].advice)
    assert "Not a cure: a lower loss scale" in said
    assert "float32" in said
    assert "bfloat16" in said


def penalised(run: Run, n: int) -> Run:
    """Attempts in which a loss made of scaled gradients was infinite: two losses, one accumulation."""
    run.skip(n, loss=math.inf)
    for row in run.rows:
        row |= {"losses": 2, "micro_batches": 1}
    return run


def test_a_gradient_penalty_may_overflow_by_the_scale():
    assert penalised(Run(), 3).clean(20).kinds() == [("calibration", "info", "explained")]
    assert penalised(Run().clean(300), 1).kinds() == [("growth_probe", "info", "explained")]


def test_a_gradient_penalty_that_no_scale_mends_is_a_fault():
    assert [f.kind for f in penalised(Run(), 18).findings()] == ["nonfinite_forward"]
    assert [f.kind for f in penalised(Run().clean(300), 3).findings()] == ["nonfinite_forward"]

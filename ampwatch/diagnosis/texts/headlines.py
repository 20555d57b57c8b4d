"""Headlines: one sentence each, what, since which step, whether it recovers by itself.

Placeholders are filled by the rule that says the sentence; `{first}` is a step, with the attempt where it differs.
"""

from __future__ import annotations

from typing import Final

HEALTHY: Final = "Healthy: {taken} steps taken, {skipped} skipped{why}; loss scale {scale}."
HEALTHY_UNSCALED: Final = "Healthy: {taken} steps taken, without a loss scaler."
NO_DATA: Final = "No attempts recorded yet."

HEADLINES: Final = {
    "calibration.open": (
        "The loss scale is still coming down to what these gradients allow: {skips} since {first}, scale "
        "now {scale}. It ends by itself at the first step taken."
    ),
    "calibration": (
        "The loss scale came down from {scale_first} to {scale} in {skips}, {span}. Healthy, nothing to do."
    ),
    "growth_probe": (
        "{skips} at the ceiling of the loss scale, {span}, {share} of all: as many as loss scaling costs. "
        "Healthy, nothing to do."
    ),
    "spike": (
        "At {first} gradients were larger than before for a moment: {skips}, with a finite loss, that loss scaling "
        "does not explain. {recovery}"
    ),
    "spike.loss": (
        "The loss was {ratio} × the largest of the 64 before it at {first}. Steps were taken, so this batch is in the "
        "weights. {recovery}"
    ),
    "bad_batch": (
        "The loss was {loss} at {first}, for one attempt only. The step was skipped, so the weights are "
        "unharmed; {recovery}"
    ),
    "bad_batch.taken": (
        "The loss was {loss} at {first}, for one attempt only. Its gradients were finite, and the step was taken; {recovery}"
    ),
    "bad_batch.times": (
        "The loss was not finite {count} times since {first}, for one attempt each time. {harm}; {recovery}"
    ),
    "bad_batch.batch": (
        "Batch {batch} gives a loss that is not finite: {times} times, first at {first}. {harm}, and it comes again with "
        "that batch."
    ),
    "bad_batch.place": (
        "The loss is not finite at the same place in every epoch, attempt {place} of it: {times} times, first at {first}. "
        "The same data comes there again and again; it does not end by itself."
    ),
    "bad_batch.period": (
        "The loss is not finite every {period} attempts: {count} times, first at {first}. Data that comes in that period is "
        "the likely cause; it does not end by itself."
    ),
    "nonfinite_forward": "The loss is not finite from {first} on{where}. {recovery}",
    "nonfinite_forward.born": (
        "NaN appears inside {module} from {first} on, out of finite inputs; nothing proves that values there exceed float16. "
        "{recovery}"
    ),
    "mask_constant.product": (
        "A mask times a constant beyond float16 makes NaN of attention scores in {module} from {first} on: 0 · -inf. {recovery}"
    ),
    "forward_overflow": (
        "Values inside {module} exceed float16 (65504) in the forward pass from {first} on. {recovery}"
    ),
    "low_precision_params.error": (
        "{optimizer} trains parameters in {dtype}, which GradScaler refuses with an error at {first}: it does not recover "
        "by itself."
    ),
    "low_precision_params.warning": (
        "{optimizer} trains parameters in {dtype} from {first} on, with a GradScaler, which is made for float32 "
        "parameters: it goes on until the dtype is changed."
    ),
    "low_precision_params.rounded": (
        "Since {first} no step has changed a weight of those compared in {tensor} and others: {dtype} rounds away what "
        "{optimizer} adds to them. It does not recover by itself."
    ),
    "shared_parameter": (
        "{optimizer} and {other} both hold {tensor}, whose gradient is divided by the loss scale twice from {first} on; it "
        "goes on until one of them lets go of it."
    ),
    "no_gradients.some": (
        "The loss has not reached {count} of {optimizer} since {first} ({tensor}): what has no gradient stays what it "
        "is. No harm if that is meant."
    ),
    "no_gradients": (
        "No parameter of {optimizer} has a gradient at {first}: {why}. It does not recover by itself."
    ),
    "no_gradients.zero": (
        "Backward has brought nothing but zeros to {count} ({tensor}) in every look from {first} on, and more than "
        "zeros to others. No harm if that is meant."
    ),
    "no_gradients.meta": (
        "{optimizer} holds {count} on the meta device, which stores no numbers, from {first} on ({tensor}): no step "
        "can train what is not there. It does not recover by itself."
    ),
    "no_gradients.replaced": (
        "{foreign} of {total} parameters of {optimizer} are not the model's, and {tensor}, which the model trains, is in no "
        "optimizer: seen at {first}, it stays what it is until an optimizer holds it."
    ),
    "missing_scaler": (
        "Autocast runs with float16 and no GradScaler is on: small gradients become zero unnoticed, from the first step "
        "until one is."
    ),
    "backend_limit.off": (
        "The GradScaler is off, because it was made for {device}, which this machine does not have: its scale of 1.0 is "
        "no scale, from the first step until it is made for the device in use."
    ),
    "backend_limit.device": (
        "The GradScaler was made for {device} and the parameters of {optimizer} are on {other}: it works here, from "
        "the first step on, since torch scales where the loss is; on a machine without CUDA a scaler for cuda is off."
    ),
    "backend_limit.captured": (
        "The scaler is called while a CUDA graph is captured, at {first}: what the replays of the graph do is not "
        "seen, and nothing can be said of it until the loop calls the scaler outside of the graph."
    ),
    "backend_limit.compiled": (
        "Steps are taken and scale() is never seen, from {first} on: it is compiled into a graph, and losses cannot "
        "be observed until it is called outside of it."
    ),
    "backend_limit.saturating": (
        "Gradients stop at 65504 from {first} on and are never inf: float16 saturates there, so that the scaler cannot see an "
        "overflow. It goes on until the scale is kept below that, or the clamp is taken out."
    ),
    "device_fault": (
        "{module} gives NaN in float16 from {first} on, of finite inputs and weights whose float32 result is small: the device "
        "or its kernel is at fault, not the model. It does not recover by itself."
    ),
    "sparse_overflow": (
        "The sparse float16 gradient of {tensor} overflows from {first} on: values of equal indices are each finite, "
        "and their sum is not. It recovers by itself once the scale has come down, for all tensors alike."
    ),
    "epsilon_underflow.fatal": (
        "The eps of {optimizer}, {eps}, is 0 in its float16 {what}: the step of {first} divides by zero. It does not "
        "recover by itself."
    ),
    "epsilon_underflow.warning": (
        "The eps of {optimizer}, {eps}, is 0 in its float16 {what} from {first} on: where a gradient is small, its "
        "step divides by zero. It goes on until eps or the dtype is changed."
    ),
    "fused_optimizer.twice": (
        "{optimizer} divides gradients by the loss scale once more than unscale_() did, from {first} on: they are "
        "{scale} times too small. It goes on until the optimizer leaves that out."
    ),
    "fused_optimizer.moved": (
        "{optimizer} took a step at {first} that was to be skipped, with gradients that were not finite. The weights "
        "do not recover by themselves."
    ),
    "fused_optimizer.state": (
        "{optimizer} took gradients that were not finite into its state at {first}, in a step that was to be skipped. "
        "It does not recover by itself: later steps use that state."
    ),
    "fused_optimizer.count": (
        "{optimizer} counts steps that were skipped, first at {first}, and leaves weights and moments as they are: "
        "what depends on the count, such as a bias correction, is off, and less so with each step taken."
    ),
    "fused_optimizer.unfilled": (
        "The first step of {optimizer}, at {first}, was skipped, and left a momentum buffer of uninitialised memory. It is "
        "applied with the next step that is taken, and the weights do not recover by themselves."
    ),
    "fused_optimizer.applied": (
        "{optimizer} applied gradients that were not finite at {first}, although the step was to be skipped. The weights "
        "do not recover, {tensor} first."
    ),
    "clip_scaled": (
        "Gradients are clipped while they are scaled, from {first} on: their {measured} is held at {value}, at loss scale "
        "{scale}. It goes on until the clip comes after unscale_()."
    ),
    "grads_not_cleared": (
        "Gradients are not cleared before the next backward pass from {first} on: once one is inf or NaN, every step after "
        "it is skipped. It goes on until zero_grad() is called."
    ),
    "grads_not_cleared.unscaled": (
        "Gradients are not cleared before the next backward pass from {first} on: each step is made of all gradients so far. "
        "It goes on until zero_grad() is called."
    ),
    "cleaned_gradients.unscaled": (
        "Something replaces inf and NaN in the gradients by numbers before the optimizer sees them, from {first} on: "
        "steps are taken that mean nothing. It goes on until that is taken out."
    ),
    "cleaned_gradients": (
        "Something replaces inf and NaN in the gradients by numbers before the scaler sees them, from {first} on: "
        "steps are taken that should be skipped. It goes on until that is taken out."
    ),
    "norm_overflow": (
        "The gradient norm that the loop logs is not finite at {first}, although every gradient is: the norm itself "
        "overflows. It goes on until it is computed in float32."
    ),
    "rank_disagreement": (
        "Ranks {low} and {high} differ in loss scale or skipped steps from {first} on: their weights drift apart from there. It "
        "does not recover by itself."
    ),
    "rank_disagreement.gradients": (
        "Ranks {low} and {high} step by different gradients from {first} on, which DistributedDataParallel should have averaged: "
        "their weights drift apart. It does not recover by itself."
    ),
    "rank_disagreement.weights": (
        "Ranks {low} and {high} have different weights, seen at {first}, though they should be copies: the gradients that "
        "they average belong to two models. It does not recover by itself."
    ),
    "rank_disagreement.alone": (
        "Ranks {low} and {high} each train the same model by themselves from {first} on: their gradients are never "
        "averaged. It goes on until they are; no harm where each is meant to have weights of its own."
    ),
    "rank_fault": (
        "Rank {rank} alone has a loss that is not finite, from {first} on, and spoils the step of all: look at its "
        "data, its device or its copy of the model. It does not recover by itself."
    ),
    "rank_fault.gradients": (
        "Rank {rank} alone has gradients that are not finite, from {first} on, though its loss is finite, and spoils "
        "the step of all. It does not recover by itself."
    ),
    "mask_constant": (
        "Rows of attention scores are masked altogether in {module} from {first} on, and their softmax is NaN. "
        "{recovery}"
    ),
    "loss_in_fp16": (
        "The loss makes inf or NaN of finite model outputs from {first} on, in float16 operations. {recovery}"
    ),
    "weights_poisoned": "Parameters are inf or NaN from {first} on, {tensor} first. {recovery}",
    "weights_poisoned.applied": "An infinite gradient was applied to the weights at {first}. {recovery}",
    "weights_poisoned.unscaled": "Gradients that are inf or NaN were applied to the weights at {first}. {recovery}",
    "buffers_poisoned": "Buffers of the model are inf or NaN from {first} on, {tensor} first. {recovery}",
    "scale_floor": (
        "The loss scale is held at {scale} and nothing is learned: {skips} in a row since {first}. It does not recover "
        "by itself."
    ),
    "dead_zone": (
        "The loss scale has fallen to {scale} since {first}: {when} the first healthy batch destroys the weights. "
        "{recovery}"
    ),
    "many_optimizers.starved": (
        "{name} is skipped in every attempt from {first} on while {other} goes on: its gradients overflow by themselves, and "
        "the loss scale that both share falls until small gradients are lost. It does not recover by itself."
    ),
    "many_optimizers.lazy": (
        "{name} is skipped each time it is due, {skips} times since {first}: other losses of the scaler raise the scale "
        "again in between. It does not recover by itself."
    ),
    "many_optimizers.period": (
        "One attempt in every {period} is skipped, from {first} on: what is computed in that period overflows each "
        "time, and the scale has grown back before the next. It does not recover by itself."
    ),
    "schedule_ahead": (
        "The learning rate schedule is {ahead} ahead of the optimizer from {first} on, because it goes on when a step "
        "is skipped; it does not fall back by itself."
    ),
    "schedule_ahead.warm_up": (
        "The warm-up of the learning rate was over before the first step was taken, at {taken}: every attempt before "
        "it was skipped, and the schedule went on. It does not come again by itself."
    ),
    "scaler_state_lost": (
        "A new GradScaler took the place of one that had settled at {before} and began at {after}, at {first}: the scale "
        "has to come down again, at a skipped step for each halving. It recovers by itself, until the next time."
    ),
    "scaler_state_lost.reset": (
        "load_state_dict() gave the GradScaler, which had settled at {before}, the state of a new one: it began at {after} "
        "again, at {first}, while the training goes on. It recovers by itself, until the next time."
    ),
    "scaler_state_lost.resumed": (
        "The training was resumed without the state of its GradScaler: it ended at {before} and began at {after}, at "
        "{first}. It recovers by itself after some skipped steps, until the next time."
    ),
    "divergence": ("Training diverges from {first} on: {grown}. {recovery}"),
    "divergence.early": (
        "Loss and gradient norm grow together from {first} on: {grown}. If it goes on, training diverges; nothing is lost yet."
    ),
    "divergence.rate": (
        "{steps} threw the model out of float16's range: each weight was moved by about the learning rate, {rate}, and the "
        "loss is not finite from {first} on. {recovery}"
    ),
    "no_updates": (
        "Nothing has been learned since {first}: {skips} in a row, loss scale down to {scale}. It does not "
        "recover by itself."
    ),
    "no_updates.rate": (
        "Nothing is learned from {first} on: {steps} taken at a learning rate of 0, at which no weight moves. It goes on until "
        "the schedule or the loop raises it."
    ),
    "no_updates.zero": (
        "Every gradient has been exactly zero since {first}, in {attempts}{loss}: nothing is learned. It goes on until "
        "something that is not zero reaches the weights."
    ),
    "no_updates.kept": (
        "Every gradient has been exactly zero since {first}, in {attempts}{loss}: nothing more is learned of this data. "
        "No harm where it is a margin that every sample keeps."
    ),
    "no_updates.scale": (
        "Nothing is learned from {first} on: the loss scale is {scale}, which makes inf or NaN of every gradient and which no "
        "backoff mends, {skips} in a row. It does not recover by itself."
    ),
    "underflow": (
        "Gradients underflow from {first} on: {share} of the elements computed in float16 are lost{bound}, most in "
        "{tensor}. {recovery}"
    ),
    "underflow.all": (
        "Every gradient is exactly zero from {first} on although the loss is not, at loss scale {scale}: they "
        "underflow. {recovery}"
    ),
    "accumulation": (
        "The gradient grows with the number of micro-batches in a window, seen from {first} on: the loss is not divided by "
        "that number, so that windows of different length count differently. It goes on until it is."
    ),
    "narrow_range": (
        "No single loss scale serves all tensors from {first} on: {low} loses {share} of its elements to underflow, and at a "
        "larger scale {high} overflows. It does not recover by itself."
    ),
    "summed_loss": (
        "The loss scale has been below 1 since {first} and is {scale} now, while steps are taken and the loss falls: "
        "the loss is a sum over many elements. Healthy, nothing to do."
    ),
    "unscaled_by_new_scale": (
        "Gradients are divided by the scale of the next step: at each growth, first at {first}, the applied gradient is half "
        "of the true one. Known of this framework, nothing to do."
    ),
    "useless_scaler": (
        "A GradScaler runs with {dtype} autocast, where it protects nothing, from the first step on. Training is not "
        "harmed, but every step pays a pass over the gradients until the scaler is turned off."
    ),
    "useless_scaler.growths": (
        "The loss scale grew {growths} times without one overflow, first at {first}, and the gradients are bfloat16: "
        "the GradScaler protects nothing. Training is not harmed, but every step pays a pass over the gradients."
    ),
    "useless_scaler.device": (
        "Autocast is on for {other}, and the model computes on {device}, where it is not: everything runs in float32 from the "
        "first step on, and the GradScaler protects nothing."
    ),
    "call_order": "The training loop calls the scaler in a wrong order from {first} on: {fault}. {raised}",
    "scaler_bypassed": "The training loop goes past the scaler from {first} on: {fault}. {raised}",
}

HARM: Final = {
    "skipped": "Steps are skipped, so the weights are unharmed",
    "taken": "Its gradients were finite, so that steps were taken",
}

RECOVERED: Final = "It recovered"

RECOVERY: Final = {
    "never": "It does not recover by itself: every step since then is skipped and nothing is learned.",
    "recovered": f"{RECOVERED} at {{closed}}.",
    "again": f"{RECOVERED} and came again, {{times}} by {{last}}.",
    "taken": "Its gradients are finite, and steps are taken all the same.",
    "unknown": "The next attempt will tell whether it recovers.",
    "went on": "training went on at {closed}.",
    "open": "the next attempt will tell whether it recovers.",
    "weights_poisoned": "It does not recover by itself: go back to a checkpoint from before {first}.",
    "buffers_poisoned": (
        "They do not recover by themselves: training may go on, yet evaluation and checkpoints are NaN from {first} on."
    ),
    "dead_zone": "Stop the run: it does not recover by itself.",
    "diverged": "It does not recover by itself: stop and go back to a checkpoint from before {first}.",
    "fixed": "It does not recover by itself: the scale does not grow.",
    "grows": "The scale grows by itself, but needs about {attempts} clean attempts to get there.",
}

FAULTS: Final = {
    "unscale_twice": "unscale_() was called twice for {optimizer} before update()",
    "unscale_after_step": "unscale_() was called for {optimizer} after its step()",
    "step_twice": "step() was called twice for {optimizer} before update()",
    "update_without_step": "update() was called although no optimizer was stepped or unscaled",
    "unscale_without_scale": "unscale_() was called for {optimizer} although no loss went through scale()",
    "step_without_scale": "step() was called for {optimizer} although no loss went through scale()",
    "unscale_in_accumulation": "unscale_() is called inside an accumulation window, so that {optimizer} adds scaled gradients to unscaled ones",
    "update_in_accumulation": "update() is called inside an accumulation window, so that gradients of two scales may be added",
    "divided_again": "unscale_() and update() are called inside an accumulation window, so that gradients are divided by the scale once more in each of its parts",
    "step_after_update": "{optimizer} is stepped after update() with gradients of a loss scaled before it, which are divided by another scale",
    "stepped_again": "{optimizer} is stepped directly after its step() through the scaler, so that gradients are applied twice, and inf or NaN once",
    "scale_without_step": "losses go through scale(), and neither step() nor update() of the scaler ever follows, so that gradients stay scaled",
    "scale_unused": "losses go through scale(), what it answers is never used, and neither step() nor update() of the scaler ever follows, so that gradients are those of the loss as it is: what underflows is lost, and inf and NaN are applied",
    "unscaled_step": "{optimizer} is stepped directly with float16 gradients of a loss that is not scaled: what underflows is lost, and inf and NaN are applied",
    "unscaled_backward": "gradients of {optimizer} come from backward() of a loss that did not go through scale(), and are divided by the scale all the same",
    "divided_by_hand": "the loop divides gradients of {optimizer} by the loss scale, and the scaler does so once more, so that they are smaller than the true ones by it",
    "step_after_unscale": "{optimizer} is stepped directly after unscale_(), past the scaler's own step(), which would skip it where gradients are inf or NaN",
    "step_outside_scaler": "{optimizer} is stepped directly, with gradients that are still scaled",
    "scaled_by_hand.times": "the loss is multiplied by the loss scale before scale() does so, so that gradients are larger than the true ones by it",
    "scaled_by_hand.by": "gradients are divided by the loss scale once more than they were multiplied, so that they are smaller than the true ones by it",
    "missing_update": "update() is missing after step() of {optimizer}, so that the scale never adapts",
    "closure_wanted": "step() of {optimizer} wants a closure, which GradScaler does not support",
    "closure": "step() of {optimizer} was given a closure, which GradScaler does not support",
}

WHY_NONE: Final = {
    "frozen": "all of them are frozen",
    "foreign": "it holds other tensors than the model",
    "detached": "the loss is not made of them, its graph is cut",
    "unknown": "the loss does not depend on them, or backward was not called",
}

CLEANED: Final = {
    "raw": "A gradient was inf or NaN as backward left it, and finite as it was unscaled.",
    "cleaned": "The loss is NaN, and every gradient is finite.",
    "unhurt": "The loss is infinite, and every gradient is finite.",
    "saturated": "The largest gradient is the largest number of its dtype, which is what nan_to_num and clamp make of inf.",
}
KEPT_FINITE: Final = {
    "whole": "The gradient that was looked at as backward left it was finite, so nothing has cleaned it: this loss is made of nothing, as a mean over no target is.",
    "unknown": "Its gradients are finite. The data cannot tell whether backward made them so, as of a mean over no target, or whether the loop cleaned them; the recorded gradients of the next such attempt would.",
}
LEFT_OVER: Final = "A gradient was neither None nor zero as the first backward pass of the attempt began."
NOT_CLEARED: Final = {
    "always": "It is so in nearly every attempt: zero_grad() is missing.",
    "skips": "It is so after some attempts only: zero_grad() may depend on whether the step was taken.",
}
SEEN_LATER: Final = "What is said of where it starts was seen at {at}, when the loss broke again."
HIDDEN: Final = {
    "captured": "The scaler was called while a CUDA graph was captured; torch's own calls were captured, and none of ours.",
    "compiled": "Optimizers are stepped through the scaler, and no call of scale() was seen in any of these attempts.",
}
OVERFLOWN_NORM: Final = "The logged norm is inf or NaN, and no gradient is."

NOT_JUDGED: Final = {
    "found_inf": "Without `found_inf` a skip is seen only where the scale fell.",
    "hysteresis": "With hysteresis not every skip lowers the scale, so that some are not seen.",
    "loss": "Without `loss`: losses that are not finite, divergence, sums that explain a scale below 1.",
    "norm": "Without `grad_norm`: divergence, clipping of scaled gradients, accumulation.",
    "lr": "Without `lr`: schedules that run ahead.",
    "batch_id": "Without `batch_id`: which batch a loss belongs to.",
    "gaps": "Only {rows} of {span} attempts are in the trace: what happened between them is not seen.",
    "repeats": "Attempts repeat in the trace, so that its rows are counted in their order.",
    "unread": "`{column}` is no number in {count}, as {word!r}.",
    "lines": "{lines} of the log tell no attempt, and are left out.",
    "cut": "The last line is cut off, and left out.",
    "instrumentation": (
        "A trace never tells where: modules, tensors, dtypes, poisoned weights, underflow and the order of calls need a "
        "recorded run (ampwatch.GradScaler or ampwatch.watch)."
    ),
}

TIED: Final = (
    "Through {attempts} in a row, in which the weights stay what they are, the loss that scale() was given fell with the "
    "loss scale: {loss} at {scale}, {loss_last} at {scale_last}."
)

APART: Final = {
    "gradients": "At {first} the norm of the true gradient is {low} on rank {lower} and {high} on rank {higher}.",
    "weights": (
        "At {first} the largest magnitudes of all trained parameters sum up to {low} on rank {lower} and {high} on rank "
        "{higher}."
    ),
    "alone": (
        "From {first} on no loss, no norm and no tensor's largest gradient is the same on ranks {lower} and {higher}; the "
        "norm of the first is {low} and {high}. No DistributedDataParallel was seen."
    ),
}

READ: Final = {"as": "Read: {names}.", "free": "Not used: {names}."}

ONLY_SKIPS: Final = (
    "the log tells in {lines} that a step was skipped, and nothing of the others: where each attempt has its scale, loss and "
    "norm, more can be said. Write a row for each: print(f'{{step}},{{scaler.get_scale()}},{{loss.item()}}'), under the header "
    "step,scale,loss"
)

ALONE: Final = {
    "loss": "{count} in which the loss of rank {rank} is not finite and that of {others} is.",
    "gradients": (
        "{count} in which the gradients of rank {rank} are not finite before they are reduced and those of {others} are."
    ),
}

LOST: Final = {
    "attempts": "Lost from {first} on: {attempts}. Nothing is said of them, and no row of attempts is read across.",
    "tensors": "Some tensor statistics were dropped: underflow, and where an overflow started, may have gone unseen.",
    "events": "Some events were dropped: calls, searches and checks may have gone unseen.",
}

RAISED: Final = {
    True: "torch refuses it with an error.",
    False: "torch does not complain, and it goes on until the loop is mended.",
}

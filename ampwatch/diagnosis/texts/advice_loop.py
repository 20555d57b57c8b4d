"""Advice where the training loop, its optimizers or its dtypes are at fault."""

from __future__ import annotations

from typing import Final

from ampwatch.diagnosis.findings import Advice

_LOOP: Final = """\
optimizer.zero_grad()
for micro_batch in window:                        # one, without accumulation
    with torch.autocast(device, dtype=torch.float16):
        loss = model(micro_batch) / len(window)
    scaler.scale(loss).backward()
scaler.unscale_(optimizer)                        # only to clip, once, after the last backward
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()                                   # once, after every optimizer's step, also if you skip step"""

_CALLS: Final = [
    Advice(
        "Call scale → backward → (unscale_ → clip) → step → update, each once for each update of the weights.",
        _LOOP,
    )
]

_WATCH: Final = Advice(
    "A scaler that is off records nothing: watch the optimizer, so that loss, gradients and weights are still looked at.",
    "ampwatch.watch_optimizer(optimizer, model=model)",
)

LOOP: Final[dict[str, list[Advice]]] = {
    "call_order": _CALLS,
    "scaler_bypassed": [
        *_CALLS,
        Advice(
            "Steps are then of the true gradient's size, and none is taken where it is inf or NaN. A learning rate that was "
            "found with the fault in place, and an optimizer's moments from before, are those of other gradients."
        ),
    ],
    "call_order.closure": [
        Advice("Take an optimizer without a closure, or train without a scaler: in bfloat16 or float32."),
    ],
    "low_precision_params": [
        Advice(
            "Keep the parameters that are trained in float32, and let autocast compute in low precision. Frozen ones may "
            "stay in {dtype}.",
            "for p in model.parameters():                      # before the optimizer is built\n"
            "    if p.requires_grad:\n        p.data = p.data.float()",
        ),
        Advice("If all of the model is to stay in bfloat16, drop the scaler: bfloat16 has float32's range."),
    ],
    "low_precision_params.rounded": [
        Advice(
            "Keep the parameters that are trained in float32, and let autocast compute in {dtype}: an update then counts "
            "down to 6e-8 of its weight. It takes 4 bytes a parameter in place of 2, and the optimizer's state as much more.",
            "for p in model.parameters():                      # before the optimizer is built\n"
            "    if p.requires_grad:\n        p.data = p.data.float()",
        ),
        Advice(
            "Where float32 weights do not fit: an optimizer that keeps a float32 copy of them, that rounds stochastically, or "
            "that carries on what was rounded away (Kahan summation)."
        ),
        Advice(
            "A higher learning rate does not mend it: of each weight an update below 0.2 to 0.4 % of it is lost in bfloat16, "
            "and one below 0.02 to 0.05 % in float16, so that the largest weights stay and the smallest move."
        ),
    ],
    "shared_parameter": [
        Advice(
            "Give each parameter to one optimizer: unscale_() divides every gradient of an optimizer, and this one twice.",
            "mine = {id(p) for g in first.param_groups for p in g['params']}\n"
            "second = torch.optim.AdamW([p for p in model.parameters() if id(p) not in mine])",
        ),
        Advice("Or one optimizer with two groups of parameters, where they want different learning rates."),
    ],
    "no_gradients.some": [
        Advice(
            "If they are to be trained, look for what cuts the graph behind them: detach(), no_grad(), item(), argmax, or a "
            "branch that is never taken."
        ),
        Advice("If they are not, freeze them, or leave them out.", "p.requires_grad_(False)"),
    ],
    "no_gradients.frozen": [
        Advice("Unfreeze what is to be trained, or leave this optimizer out.", "p.requires_grad_(True)"),
    ],
    "no_gradients.zero": [
        Advice(
            "If they are to be trained, look at what lies between them and the loss: units that are all dead, a mask without "
            "an entry, a weight of 0, an output that is multiplied by 0.",
        ),
        Advice("If they are not, freeze them, or leave them out.", "p.requires_grad_(False)"),
    ],
    "no_gradients.meta": [
        Advice(
            "Build the optimizer after the model has its numbers: to_empty() and load_state_dict(assign=True) put new "
            "parameters in the place of those that the optimizer holds.",
            "model.to_empty(device=device)\nmodel.load_state_dict(weights)\n"
            "optimizer = torch.optim.AdamW(model.parameters())",
        ),
    ],
    "no_gradients.foreign": [
        Advice(
            "Build the optimizer from the model that is trained, after it was copied, moved or wrapped.",
            "optimizer = torch.optim.AdamW(model.parameters())",
        ),
    ],
    "no_gradients.detached": [
        Advice(
            "Look for what cuts the graph: detach(), no_grad(), item(), argmax, or a loss made anew where all samples were "
            "dropped. A batch without a loss is better skipped before scale().",
            "if not loss.requires_grad or loss.grad_fn is None:\n    continue",
        ),
    ],
    "no_gradients.unknown": [
        Advice(
            "Look at what the loss is made of: these parameters take no part in it, or zero_grad() came after backward().",
            "[name for name, p in model.named_parameters() if p.grad is None]",
        ),
    ],
    "missing_scaler": [
        Advice(
            "Turn a scaler on. It costs a pass over the gradients, and a few skipped steps until its scale has settled.",
            "scaler = ampwatch.GradScaler(device, model=model)",
        ),
        Advice(
            "Or use bfloat16, which needs none. On CUDA, autocast without a dtype means float16.",
            "with torch.autocast(device, dtype=torch.bfloat16): ...",
        ),
    ],
    "backend_limit.off": [
        Advice(
            "Make it for the device in use.",
            "scaler = ampwatch.GradScaler(next(model.parameters()).device.type)",
        ),
        Advice(
            "If this machine is meant to train without one, say so: enabled=False.",
            "enabled=torch.cuda.is_available()",
        ),
    ],
    "backend_limit.hidden": [
        Advice(
            "Capture or compile forward and backward only, and call the scaler outside: then every attempt is seen. It costs "
            "a handful of kernel launches a step.",
            "loss = compiled_model(x)\nscaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
        ),
        Advice("Or leave it: training is not harmed by it, it is only not watched."),
    ],
    "backend_limit.saturating": [
        Advice(
            "Look for a clamp at 65504 in the model's own backward code first: the records cannot tell it from a device that "
            "saturates. A run of the same batch on another machine would."
        ),
        Advice(
            "If it is the device, stay below its limit with a fixed scale that leaves headroom; the scaler cannot find it.",
            "scaler = ampwatch.GradScaler(device, init_scale=2.0**10, growth_interval=2**31 - 1, model=model)",
        ),
    ],
    "device_fault": [
        Advice(
            "Train in float32 or bfloat16 on this device, or update the driver and the libraries that hold its float16 kernels.",
            "with torch.autocast(device, dtype=torch.bfloat16): ...",
        ),
        Advice(
            "Keep {module} alone out of float16, if the others are well.",
            "with torch.autocast(device, enabled=False):\n    x = layer(x.float())  # {module}",
        ),
        Advice("Not a cure: another loss scale. The NaN is there before the loss is scaled."),
    ],
    "sparse_overflow": [
        Advice(
            "Keep the embedding and its gradient in float32, where the sums do not overflow.",
            "model.embedding.float()",
        ),
        Advice(
            "Or use dense gradients: they are added in float32.",
            "torch.nn.Embedding(rows, width, sparse=False)",
        ),
    ],
    "epsilon_underflow": [
        Advice(
            "Keep the {what} of the optimizer in float32, and let autocast compute in float16.",
            "model.float()  # before the optimizer is built",
        ),
        Advice(
            "Where float16 {what} must stay, an eps of 1e-7 and above does not vanish; it changes the update."
        ),
    ],
    "clip_scaled.norm": [
        Advice(
            "Call unscale_() before clipping. Until then the limit is divided by the loss scale, and every gradient is cut to "
            "a norm of {value} / scale. Steps that go with the gradient, as SGD's, are as small; those of optimizers that "
            "divide by its size, as Adam, are not, but all batches count alike and eps weighs more.",
            "scaler.scale(loss).backward()\n"
            "scaler.unscale_(optimizer)\n"
            "torch.nn.utils.clip_grad_norm_(model.parameters(), {value})\n"
            "scaler.step(optimizer)",
        ),
        Advice(
            "With SGD look at the learning rate again afterwards: it may have been raised to make up for the small steps."
        ),
    ],
    "clip_scaled.value": [
        Advice(
            "Call unscale_() before clipping. Until then the limit is divided by the loss scale, and most elements are cut "
            "to their sign.",
            "scaler.scale(loss).backward()\n"
            "scaler.unscale_(optimizer)\n"
            "torch.nn.utils.clip_grad_value_(model.parameters(), {value})\n"
            "scaler.step(optimizer)",
        ),
    ],
    "cleaned_gradients": [
        Advice(
            "Take out what does it: nan_to_num, clamp or torch.where over gradients, in a hook or after backward. The scaler "
            "skips such steps by itself and lowers the scale; with them cleaned it does neither.",
        ),
        Advice("Then mend what makes inf or NaN, if steps are skipped all the time."),
    ],
    "grads_not_cleared": [
        Advice(
            "Clear gradients before every window of backward passes, whether the step before was taken or skipped.",
            "scaler.step(optimizer)\nscaler.update()\noptimizer.zero_grad()",
        ),
    ],
    "norm_overflow": [
        Advice(
            "Compute the norm in float32 or float64: squares above 65504 are inf in float16.",
            "norm = torch.linalg.vector_norm(torch.stack([p.grad.float().norm() for p in model.parameters()]))",
        ),
        Advice("Do not clip by such a norm: the clip coefficient is 0, and inf times 0 is NaN."),
    ],
    "many_optimizers.starved": [
        Advice(
            "Find what makes the gradients of that optimizer inf or NaN: its loss, or an operation before it."
        ),
        Advice(
            "Give it a scaler of its own, so that its overflows leave the others alone. One scaler, one update an iteration.",
            "scalers = [ampwatch.GradScaler(device, model=model) for _ in optimizers]",
        ),
        Advice(
            "Not a cure: a minimum of the scale. At it that optimizer is skipped for ever, and nothing says so."
        ),
    ],
    "many_optimizers.lazy": [
        Advice(
            "Give the loss that comes now and then a scaler of its own: its scale stays where it settled.",
            "lazy_scaler = ampwatch.GradScaler(device, model=model)",
        ),
        Advice(
            "Or a growth_interval longer than its period, so that the scale does not grow back in between."
        ),
    ],
    "many_optimizers.period": [
        Advice(
            "Look at what the loop does every {period} attempts: a loss that is weighted up, a regulariser, a batch."
        ),
        Advice(
            "Give that loss a smaller weight or a scaler of its own, or set a growth_interval longer than its period, so that "
            "the scale does not grow back in between.",
        ),
    ],
    "schedule_ahead": [
        Advice(
            "Step the schedule only where the step was taken: the scale falls where it was not. get_scale() waits for the "
            "device, once a step.",
            "before = scaler.get_scale()\nscaler.step(optimizer)\nscaler.update()\n"
            "if scaler.get_scale() >= before:\n    schedule.step()",
        ),
        Advice("Do not test whether the scale changed: it changes when it grows, too."),
        Advice(
            "Start at a lower scale, so that the warm-up does not pass before the first step.",
            "init_scale=2.0**12",
        ),
    ],
    "scaler_state_lost": [
        Advice(
            "Make the scaler once, save its state with the checkpoint, and load it on resume.",
            "checkpoint['scaler'] = scaler.state_dict()\n...\nscaler.load_state_dict(checkpoint['scaler'])",
        ),
    ],
    "scaler_state_lost.reset": [
        Advice(
            "Load a state of the scaler only together with those of model and optimizer, from one checkpoint; leave the call "
            "out where training goes on."
        ),
    ],
    "rank_disagreement": [
        Advice(
            "Stop, and start all ranks again from one checkpoint from before: their weights are no longer the same."
        ),
        Advice(
            "See that gradients, or found_inf, are reduced over all ranks: DistributedDataParallel reduces gradients in "
            "backward; with FSDP1 take ampwatch's ShardedGradScaler or torch's; plain tensors are not reduced.",
            "model = torch.nn.parallel.DistributedDataParallel(model)",
        ),
    ],
    "rank_disagreement.gradients": [
        Advice(
            "Stop, and start all ranks again from one checkpoint from before: their weights are no longer the same."
        ),
        Advice(
            "Let the last backward pass of every window run inside the wrapper and outside of no_sync(), and call the wrapper, "
            "not the model in it: then gradients are averaged before unscale_() and step().",
            "ddp = torch.nn.parallel.DistributedDataParallel(model)\n"
            "with contextlib.nullcontext() if is_last else ddp.no_sync():\n"
            "    scaler.scale(loss_of(ddp(x)) / len(window)).backward()",
        ),
        Advice(
            "Look for what changes gradients on one rank only, between backward and step(): a clip, a mask, a hook."
        ),
    ],
    "rank_disagreement.weights": [
        Advice(
            "Stop. Load one checkpoint on every rank before the model is wrapped: DistributedDataParallel copies the weights of "
            "the first rank to the others as it is made, and never again.",
            "model.load_state_dict(torch.load(path, map_location=device))\n"
            "ddp = torch.nn.parallel.DistributedDataParallel(model)",
        ),
        Advice(
            "If it began later, look for what one rank alone does to weights, or to its learning rate: averaging, clamping, a "
            "reload, a schedule of its own."
        ),
        Advice("Not a cure: averaging the weights of the ranks and going on. They are two models by now."),
    ],
    "rank_disagreement.alone": [
        Advice(
            "If they are to train one model, wrap it, and call the wrapper in the forward pass. Steps then go by the mean "
            "gradient of all ranks; look at the batch size that your learning rate was meant for.",
            "ddp = torch.nn.parallel.DistributedDataParallel(model)\nloss = loss_of(ddp(x))",
        ),
        Advice(
            "If each is to have weights of its own (an ensemble, a search, local steps that are averaged later), leave it; "
            "a run of its own for each rank keeps them apart here too."
        ),
    ],
    "rank_fault": [
        Advice(
            "Look at the data of rank {rank}: run its batches on another rank. If they break there, it is the data."
        ),
        Advice(
            "If they do not, it is the device or what was loaded on it: take that machine out and start again."
        ),
    ],
    "rank_fault.gradients": [
        Advice(
            "Look at what the loss of rank {rank} is made of that can be empty there: the square root, norm or quotient of "
            "nothing is finite, and its gradient is not; where() and a mask do not stop it.",
            "penalty = (masked.square().sum() + 1e-12).sqrt()",
        ),
        Advice(
            "Run its batches on another rank: if gradients are finite there, it is the device or what was loaded on it."
        ),
    ],
    "fused_optimizer.twice": [
        Advice(
            "Take the optimizer without fusing, or a version that divides only if torch says so: after unscale_() "
            "`grad_scale` is None.",
            "if self.grad_scale is not None:\n    grad = grad / self.grad_scale",
        ),
        Advice(
            "Or leave unscale_() out, and clip inside the optimizer, where it offers that.",
        ),
        Advice(
            "If its steps go with the gradient, look at the learning rate again afterwards: it may have been raised to make up."
        ),
    ],
    "fused_optimizer.unfilled": [
        Advice(
            "Start again, from the beginning or a checkpoint, without fusing: then the scaler skips the step, and the buffer is made of the "
            "first gradient that is applied. (torch.optim.SGD with momentum and fused=True, up to torch 2.13 at least.)",
            "optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, foreach=True)",
        ),
        Advice(
            "Or begin at a scale at which the first step is taken; the scale grows by itself from there.",
            "scaler = ampwatch.GradScaler(device, init_scale=2.0**8, model=model)",
        ),
        Advice(
            "Or forget the buffer as long as no step was taken, after update().",
            "if scaler.get_scale() < scale_before and not has_stepped:\n    optimizer.state.clear()",
        ),
    ],
    "fused_optimizer.applied": [
        Advice("Go back to a checkpoint from before {first}: weights that are not finite do not recover."),
        Advice(
            "Use the optimizer without fusing; then the scaler decides whether it steps. Or one that heeds found_inf.",
            "optimizer = torch.optim.AdamW(model.parameters(), fused=False)",
        ),
    ],
    "fused_optimizer.counted": [
        Advice(
            "Count only steps that are taken. With Adam's default betas first steps that come after many skips are about half as "
            "large as they should be, and after a thousand steps nothing of it is left: no checkpoint is needed.",
            "state['step'] += 1 - self.found_inf",
        ),
    ],
    "useless_scaler.device": [
        Advice(
            "Enter autocast for the device that computes.",
            "device = next(model.parameters()).device.type  # {device}\n"
            "with torch.autocast(device, dtype=torch.float16): ...",
        ),
        Advice(
            "Or leave the scaler out, if float32 is meant.",
            "scaler = ampwatch.GradScaler(device, enabled=False)",
        ),
        _WATCH,
    ],
    "useless_scaler": [
        Advice(
            "Enable the scaler with float16 autocast only. {dtype} has float32's range and needs none.",
            "scaler = ampwatch.GradScaler(device, enabled=dtype is torch.float16, model=model)",
        ),
        _WATCH,
        Advice(
            "If you kept it to skip steps that are not finite: it does, and thereby hides the fault those skips are."
        ),
    ],
}

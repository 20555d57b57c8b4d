"""The Trainer of Transformers, with the callback and without: the same bits."""

import pytest
import torch
from recorded import MemoryRecorder

pytest.importorskip("transformers")

from accelerate.state import AcceleratorState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from ampwatch.integrations.transformers import Callback
from ampwatch.records import is_missing

STEPS = 10
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
DATA = [{"input_ids": torch.arange(8) + i % 7, "labels": torch.arange(8) + i % 7} for i in range(32)]


def train(folder, recorder=None, *, scaler=None, **arguments):
    AcceleratorState._reset_state(True)
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **SIZES))
    settings = TrainingArguments(
        str(folder), use_cpu=True, max_steps=STEPS, save_strategy="no", report_to="none", disable_tqdm=True,
        learning_rate=1e-2, logging_steps=1, dataloader_pin_memory=False, **arguments,
    )  # fmt: skip
    callbacks = [] if recorder is None else [Callback(recorder=recorder)]
    trainer = Trainer(model, settings, train_dataset=DATA, callbacks=callbacks)
    if arguments.get("fp16"):  # Accelerate makes one for GPUs only
        made = scaler or torch.amp.GradScaler("cpu", init_scale=2.0**24)
        trainer.accelerator.native_amp, trainer.accelerator.scaler = True, made
    trainer.train()
    left = trainer.accelerator.scaler
    return model.state_dict(), trainer.optimizer.state_dict(), left and left.state_dict()


@pytest.mark.parametrize(
    "loop",
    [
        {"fp16": True},
        {"fp16": True, "optim": "adamw_torch", "gradient_accumulation_steps": 2},
        {"bf16": True},
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0},
    ],
    ids=str,
)
def test_it_trains_to_the_same_bits(tmp_path, loop):
    recorder = MemoryRecorder()
    ours, theirs = train(tmp_path, recorder, **loop), train(tmp_path, **loop)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert recorder.column("attempt") == list(range(STEPS))
    assert (sum(recorder.column("skipped")) > 0) == ("fp16" in loop)
    assert recorder.events("fault", "call_fault") == []


def test_losses_are_known_without_a_scaler(tmp_path):
    recorder = MemoryRecorder()
    train(tmp_path, recorder, bf16=True)
    assert not any(is_missing(loss) for loss in recorder.column("loss"))
    assert recorder.column("losses") == [1] * STEPS


def test_the_model_is_named(tmp_path):
    recorder = MemoryRecorder()
    train(tmp_path, recorder, fp16=True)
    first = recorder.data("tensors")[0]["tensors"][0]
    assert (first["name"], first["module_type"]) == ("model.embed_tokens.weight", "Embedding")

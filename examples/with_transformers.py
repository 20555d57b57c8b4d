"""A Trainer of Transformers in float16, watched by a callback. Records go to ./ampwatch_runs."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ampwatch.integrations.transformers import Callback

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
data = [{"input_ids": torch.arange(16) + i % 7, "labels": torch.arange(16) + i % 7} for i in range(64)]

arguments = TrainingArguments(
    "out", fp16=True, max_steps=30, logging_steps=10, save_strategy="no", report_to="none"
)
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Callback()])
if trainer.accelerator.device.type == "cpu":  # for a CPU Accelerate makes no scaler, though torch has one
    trainer.accelerator.native_amp, trainer.accelerator.scaler = True, torch.amp.GradScaler("cpu")
trainer.train()

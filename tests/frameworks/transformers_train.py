"""A small language model with the Trainer of Transformers, on two processes: ``transformers_train.py BACKEND``."""

from __future__ import annotations

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

torch.distributed.init_process_group(sys.argv[1])
set_seed(1)
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2))
tokens = torch.randint(50, (64, 16))
data = [{"input_ids": row, "labels": row} for row in tokens]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, use_cpu=True, max_steps=8, per_device_train_batch_size=4, report_to=[], save_strategy="no", seed=1
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    result = trainer.train()
assert arguments.world_size == 2
if arguments.process_index == 0:
    print("backend", torch.distributed.get_backend())
    print("loss", f"{result.training_loss:.6f}")
torch.distributed.destroy_process_group()

"""A small training with Accelerate, on two processes: ``accelerate_train.py BACKEND``.

On CPUs Accelerate knows gloo and MPI only, and takes a process group that is there already.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

torch.distributed.init_process_group(sys.argv[1])
accelerator = Accelerator(cpu=True)
set_seed(1)
inputs = torch.randn(64, 8)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)), 8)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
for _ in range(3):
    for batch, targets in data:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(batch), targets)
        accelerator.backward(loss)
        optimizer.step()
mean = accelerator.gather(loss.detach()).mean()
assert accelerator.num_processes == 2
accelerator.print("backend", torch.distributed.get_backend())
accelerator.print("loss", f"{mean.item():.6f}")
accelerator.end_training()

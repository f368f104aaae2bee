"""Two lines turn an FSDP2 script into one whose gradients take a seventh of the bytes.

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import thinwire as tw

STEPS = 50

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
parameters = sum(p.numel() for p in model.parameters())
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)
link = tw.attach(model, tw.Routed(tw.Quantized("nvfp4", feedback="error")))

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(dist.get_rank())
for _ in range(STEPS):
    x = torch.randn(64, 256, generator=generator)
    loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

if dist.get_rank() == 0:
    ranks = dist.get_world_size()
    scattered = (ranks - 1) / ranks * 4 * parameters * STEPS  # bytes of FSDP2's own, in float32
    print(f"loss {loss.item():.4f}; sent {link.ledger.sent_bytes() / scattered:.3f} x the bytes of float32")
dist.destroy_process_group()

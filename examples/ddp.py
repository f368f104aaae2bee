"""Two lines turn a DDP script into one that sends a quarter of the bytes.

torchrun --nproc-per-node 2 examples/ddp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw

STEPS = 50

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)))
link = tw.attach(model, tw.Routed(tw.Quantized("fp8_e4m3", feedback="error")))

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(dist.get_rank())
for _ in range(STEPS):
    x = torch.randn(64, 256, generator=generator)
    loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

link.verify()  # all ranks hold the same bits
if dist.get_rank() == 0:
    ranks = dist.get_world_size()
    ring = 2 * (ranks - 1) / ranks * 4 * sum(p.numel() for p in model.parameters()) * STEPS  # bytes of plain DDP
    print(f"loss {loss.item():.4f}; sent {link.ledger.sent_bytes() / ring:.3f} x the bytes of float32")
dist.destroy_process_group()

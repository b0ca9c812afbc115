"""Pretrain a small language model whose weights are sharded over the ranks (fully_shard).

    torchrun --nproc_per_node 2 recipes/pretrain_fsdp.py --checkpoint-every 20
    torchrun --nproc_per_node 2 recipes/pretrain_fsdp.py --checkpoint-every 20 --resume

Killed at any moment, the second command goes on exactly; SIGTERM saves first and ends it with exit
code 75. Text, model and options are those of train_ddp.py.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import collate, cut, deal, hold_out, number_characters, read_documents
from model import LanguageModel
from options import AGAIN, training_options, warm_up_and_decay
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

from accumplug import Accumulator, Checkpointer, plan

LENGTH = 128  # characters in a sequence
LEARNING_RATE = 5e-3  # the peak


def main() -> int:
    parser = training_options(__doc__, output_dir="runs/pretrain_fsdp")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("sharding needs ranks: torchrun --nproc_per_node 2 recipes/pretrain_fsdp.py")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=10))
    rank, world_size = dist.get_rank(), dist.get_world_size()

    # The data. Every rank has the same number of micro-batches, as fully_shard needs it.
    documents = read_documents(args.data)
    train_documents, held_out_documents = hold_out(documents)
    ids = number_characters(documents)
    train = cut(train_documents, ids, LENGTH)
    sampler = DistributedSampler(train, seed=args.seed, drop_last=True)
    loader = DataLoader(train, args.micro_batch, sampler=sampler, collate_fn=collate)

    # The model: the same weights on all ranks, then each keeps its shards.
    torch.manual_seed(args.seed)
    model = LanguageModel(len(ids) + 1).to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = LambdaLR(optimizer, lambda updates: warm_up_and_decay(updates, args.max_updates))

    # The window. sync="every" reduces each micro-batch and keeps shards of the sum;
    # sync="last" reduces once and keeps the gradients of the whole model meanwhile.
    accum = Accumulator(
        plan(args.effective_batch, args.micro_batch, world_size),
        optimizer=optimizer,
        scheduler=scheduler,
        max_grad_norm=1.0,
        sync="every",
    )
    checkpoint = None
    if args.checkpoint_every or args.resume:
        checkpoint = Checkpointer(
            args.output_dir / "checkpoints",
            accum,
            model=model,
            loader=loader,
            every=args.checkpoint_every,
            signals=(signal.SIGTERM, signal.SIGUSR1),
        )
        if args.resume and (position := checkpoint.resume()) is not None and rank == 0:
            print(f"going on in update {position.update + 1}, micro-batch {position.pending}")

    # The loop.
    while accum.updates < args.max_updates:
        sampler.set_epoch(accum.epoch)
        for inputs, targets, characters in accum.batches(loader):
            inputs, targets = inputs.to(device), targets.to(device)
            with accum(model, weight=characters) as micro:
                accum.backward(F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()))
            if micro.closes and rank == 0 and accum.updates % 10 == 0:
                last = accum.last
                print(f"update {accum.updates}: loss {last.loss:.4f}, norm {last.grad_norm:.3f}")
            if accum.updates == args.max_updates:
                break
        if checkpoint is not None and checkpoint.interrupted:
            break
    if checkpoint is not None:
        checkpoint.close()
        if checkpoint.interrupted:
            if rank == 0:
                print(f"saved {accum.pending} micro-batches into update {accum.updates + 1}")
            return AGAIN

    # The result. All ranks run each forward together, so each scores the same number of batches.
    held_out = cut(held_out_documents, ids, LENGTH)
    share = deal(held_out, args.micro_batch, rank, world_size)
    longest = math.ceil(len(held_out) / args.micro_batch / world_size)
    model.eval()
    total = torch.zeros((), device=device)
    for number in range(longest):
        inputs, targets, _ = share[min(number, len(share) - 1)]
        with torch.no_grad():
            scores = model(inputs.to(device)).flatten(0, 1)
        if number < len(share):
            total += F.cross_entropy(scores, targets.to(device).flatten(), reduction="sum")
    dist.all_reduce(total)
    if rank == 0:
        characters = sum(map(len, held_out_documents))
        print(f"held-out loss {total.item() / characters:.4f} nats per character")
    return 0


if __name__ == "__main__":
    code = main()
    if dist.is_initialized():
        gc.collect()  # a sharded model is a cycle, and must be gone before its process group
        dist.destroy_process_group()
    sys.exit(code)

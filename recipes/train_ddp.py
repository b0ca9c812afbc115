"""Train a small transformer language model on real text, with plain PyTorch and accumplug.

    python recipes/train_ddp.py
    torchrun --nproc_per_node 2 recipes/train_ddp.py

The same training as train.py without Accelerate: ranks, DistributedDataParallel, autocast and
GradScaler by hand. It shares the model and the text with train.py, not the loop.
"""

from __future__ import annotations

import math
import os
import signal
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import RankBatches, collate, cut, deal, hold_out, number_characters, read_documents
from metrics import append, describe, open_log, place
from model import LanguageModel, nats
from options import AGAIN, Settings, training_options, warm_up_and_decay
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from tqdm import tqdm

from accumplug import Accumulator, Checkpointer, NoiseScale, plan, report

LENGTH = 128  # characters in a sequence
LEARNING_RATE = 5e-3  # the peak


def main() -> int:
    parser = training_options(__doc__, output_dir="runs/train_ddp")
    args = parser.parse_args()
    checkpoints = args.output_dir / "checkpoints"
    if args.checkpoint_every and not args.resume and checkpoints.exists():
        parser.error(f"{checkpoints} is of an earlier run; go on from it by --resume, or remove it")

    # The ranks: one process, or those that torchrun started.
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)

    # The data.
    try:
        steps = plan(args.effective_batch, args.micro_batch, world_size)
        documents = read_documents(args.data)
        train_documents, held_out_documents = hold_out(documents)
    except ValueError as error:
        parser.error(str(error))
    ids = number_characters(documents)
    train = cut(train_documents, ids, LENGTH)
    held_out = cut(held_out_documents, ids, LENGTH)
    order = RankBatches(
        len(train), args.micro_batch, seed=args.seed, rank=rank, world_size=world_size
    )
    loader = DataLoader(train, batch_sampler=order, collate_fn=collate)

    # The model.
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(args.seed)
    plain = LanguageModel(len(ids) + 1).to(device)
    model = DistributedDataParallel(plain) if world_size > 1 else plain
    optimizer = AdamW(plain.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = LambdaLR(optimizer, lambda updates: warm_up_and_decay(updates, args.max_updates))
    half = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16}[args.mixed_precision]
    scaler = torch.amp.GradScaler(device.type, enabled=half is torch.float16)
    accum = Accumulator(
        steps,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        max_grad_norm=1.0,
        nonfinite="skip_window" if scaler.is_enabled() else "raise",
    )
    if args.noise_scale:
        accum.noise_scale = NoiseScale()

    # The checkpoints, if asked for: at any micro-batch, and when a signal says that time is up.
    checkpoint = None
    if args.checkpoint_every or args.resume:
        checkpoint = Checkpointer(
            checkpoints,
            accum,
            model=model,
            loader=loader,
            every=args.checkpoint_every,
            signals=(signal.SIGTERM, signal.SIGUSR1),
            settings=Settings(
                args,
                {
                    "number of characters": sum(map(len, documents)),
                    "number of ranks": world_size,  # a Checkpointer can't deal RankBatches anew
                },
            ),
        )
    if args.resume:
        try:
            checkpoint.resume()
        except (ValueError, RuntimeError) as error:
            parser.error(str(error))

    if rank == 0:
        print(
            f"{world_size} rank(s) on {device.type}, precision {args.mixed_precision}; "
            f"{world_size} x {args.micro_batch} sequences x {steps} micro-batches = "
            f"effective batch {args.effective_batch}"
        )
        if accum.micro_batches:
            print("going on", place(accum))
    args.output_dir.mkdir(parents=True, exist_ok=True)
    log = open(os.devnull, "w")  # noqa: SIM115
    if rank == 0:
        log = open_log(args.output_dir / "metrics.jsonl", accum, scheduler)
    progress = tqdm(total=args.max_updates, initial=accum.updates, unit="window", disable=rank != 0)

    # The loop. Each window's gradient is the mean over all its characters on all ranks.
    while accum.updates < args.max_updates:
        order.set_epoch(accum.epoch)
        for inputs, targets, characters in accum.batches(loader):
            inputs, targets = inputs.to(device), targets.to(device)
            with accum(model, weight=characters) as micro:
                with torch.autocast(device.type, half, enabled=half is not None):
                    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                accum.backward(loss)
            if not micro.closes:
                continue
            line = describe(accum, scheduler)
            append(log, line)
            progress.set_postfix(loss=line["loss"], skipped=accum.skipped, refresh=False)
            progress.update(accum.updates - progress.n)
            if accum.updates == args.max_updates:
                break
        if checkpoint is not None and checkpoint.interrupted:
            break
    progress.close()
    log.close()
    if checkpoint is not None:
        checkpoint.close()
        if checkpoint.interrupted:
            if rank == 0:
                print("saved", place(accum) + "; to go on: the same command, with --resume")
            return AGAIN

    # The result, in full precision. Each held-out sequence is scored by one rank.
    share = deal(held_out, args.micro_batch, rank, world_size)
    scores = [nats(plain, share)] * world_size
    if world_size > 1:
        dist.all_gather_object(scores, scores[0])
    characters = sum(map(len, held_out_documents))
    held_out_loss = math.fsum(score for of_rank in scores for score in of_rank) / characters
    if rank == 0:
        save_file(plain.state_dict(), args.output_dir / "model.safetensors")
        print(report(args.output_dir / "metrics.jsonl"))
        print(f"held-out loss {held_out_loss:.4f} nats per character")
    return 0


if __name__ == "__main__":
    code = main()  # the model is gone when it returns, and must be before its process group
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(code)

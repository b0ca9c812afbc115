"""Train a small transformer language model on real text, with Accelerate and accumplug.

    accelerate launch recipes/train.py
    torchrun --nproc_per_node 2 recipes/train.py

It reads from top to bottom: data, model, the loop, the result. Under --output-dir it leaves
metrics.jsonl (a line per window), report.png (drawn from it) and model.safetensors.
"""

from __future__ import annotations

import functools
import math
import os
import signal
import sys
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, gather_object, parse_flag_from_env
from corpus import collate, cut, deal, hold_out, number_characters, read_documents
from machines import learn_rank_from_launcher
from metrics import append, describe, open_log, place
from model import LanguageModel, nats
from options import AGAIN, Settings, training_options, warm_up_and_decay
from safetensors.torch import save_file
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from tqdm import tqdm

from accumplug import Accumulator, Checkpointer, NoiseScale, plan, report

LENGTH = 128  # characters in a sequence
LEARNING_RATE = 5e-3  # the peak


def main() -> int:
    parser = training_options(__doc__, output_dir="runs/train")
    parser.add_argument("--track", choices=["tensorboard", "wandb", "trackio"])
    parser.set_defaults(mixed_precision=os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
    args = parser.parse_args()
    checkpoints = args.output_dir / "checkpoints"
    if args.checkpoint_every and not args.resume and checkpoints.exists():
        parser.error(f"{checkpoints} is of an earlier run; go on from it by --resume, or remove it")
    if args.track and find_spec(args.track) is None:
        parser.error(f"--track {args.track} needs a package: pip install {args.track}")

    # The ranks. Accelerate sees the other ranks on CPUs only if it is told to use the CPU, and
    # trains in fp32 there if asked for fp16: autocast and scaler are then the recipe's own.
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    if on_cpu:
        try:
            learn_rank_from_launcher()
        except ValueError as error:
            parser.error(str(error))
    fp16_on_cpu = on_cpu and args.mixed_precision == "fp16"
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision="no" if fp16_on_cpu else args.mixed_precision,
        dataloader_config=DataLoaderConfiguration(
            even_batches=False,  # no sample twice; accum.batches lets the ranks end unevenly
            use_seedable_sampler=True,  # the order is a function of seed and epoch
            data_seed=args.seed,
        ),
        log_with=args.track,
        project_dir=args.output_dir,
    )
    scaler = torch.amp.GradScaler("cpu") if fp16_on_cpu else None
    autocast = accelerator.autocast
    if fp16_on_cpu:
        autocast = functools.partial(torch.autocast, "cpu", torch.float16)
    rank, world_size = accelerator.process_index, accelerator.num_processes

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
    loader = DataLoader(train, args.micro_batch, shuffle=True, collate_fn=collate)

    # The model.
    torch.manual_seed(args.seed)
    model = LanguageModel(len(ids) + 1)
    optimizer = AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scheduler = LambdaLR(  # not prepared: Accelerate would let it tick once for each rank
        optimizer.optimizer, lambda updates: warm_up_and_decay(updates, args.max_updates)
    )
    accum = Accumulator(
        steps,
        accelerator=accelerator,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        max_grad_norm=1.0,
        nonfinite="skip_window" if args.mixed_precision == "fp16" else "raise",
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
            settings=Settings(args, {"number of characters": sum(map(len, documents))}),
        )
    if args.resume:
        try:
            checkpoint.resume()
        except (ValueError, RuntimeError) as error:
            parser.error(str(error))

    accelerator.print(
        f"{world_size} rank(s) on {accelerator.device.type}, precision {args.mixed_precision}; "
        f"{world_size} x {args.micro_batch} sequences x {steps} micro-batches = "
        f"effective batch {args.effective_batch}\n"
        f"{sum(map(len, train_documents))} characters of {len(train_documents)} documents to "
        f"train on, {sum(map(len, held_out_documents))} of {len(held_out_documents)} held out; "
        f"{sum(p.numel() for p in model.parameters())} parameters"
    )
    if accum.micro_batches:
        accelerator.print("going on", place(accum))
    args.output_dir.mkdir(parents=True, exist_ok=True)
    if args.track:
        settings = {name: str(value) for name, value in vars(args).items()}
        accelerator.init_trackers("accumplug", config=settings)
    log = open(os.devnull, "w")  # noqa: SIM115
    if rank == 0:
        log = open_log(args.output_dir / "metrics.jsonl", accum, scheduler)
    progress = tqdm(total=args.max_updates, initial=accum.updates, unit="window", disable=rank != 0)

    # The loop. Each window's gradient is the mean over all its characters on all ranks.
    while accum.updates < args.max_updates:
        for inputs, targets, characters in accum.batches(loader):
            with accum(model, weight=characters) as micro:
                with autocast():
                    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                accum.backward(loss)
            if not micro.closes:
                continue
            line = describe(accum, scheduler)
            append(log, line)
            accelerator.log(line, step=accum.windows)
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

    # The result, in full precision. Each held-out sequence is scored by one rank.
    interrupted = checkpoint is not None and checkpoint.interrupted
    if interrupted:
        accelerator.print("saved", place(accum) + "; to go on: the same command, with --resume")
    else:
        plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        share = deal(held_out, args.micro_batch, rank, world_size)
        scores = gather_object(nats(plain, share))
        held_out_loss = math.fsum(scores) / sum(map(len, held_out_documents))
        accelerator.log({"held_out_loss": held_out_loss}, step=accum.windows)
        if rank == 0:
            save_file(plain.state_dict(), args.output_dir / "model.safetensors")
            print(report(args.output_dir / "metrics.jsonl"))
            print(f"held-out loss {held_out_loss:.4f} nats per character")
    model = plain = micro = None  # a DDP module that outlives its process group may hang
    accelerator.free_memory()
    accelerator.end_training()
    return AGAIN if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())

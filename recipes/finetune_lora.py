"""Fine-tune a small Llama with LoRA adapters, in transformers' Trainer with accumplug's window.

    python recipes/finetune_lora.py
    torchrun --nproc_per_node 2 recipes/finetune_lora.py     (on CPUs: ACCELERATE_USE_CPU=true)

The base is random (nothing is downloaded) and frozen; adapters, embedding and head are trained on
the texts of Python's own help system. SIGTERM saves the open window and ends it with exit code 75;
the same command with --resume goes on inside of that window.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from corpus import IGNORED, START, cut, hold_out, number_characters, read_documents
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from accumplug.integrations.transformers import AccumTrainer

AGAIN = 75  # the exit code of a run that the same command goes on with
LENGTH = 128  # characters in a sequence


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=Path("runs/finetune_lora"))
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences in a forward pass")
    parser.add_argument("--steps", type=int, default=8, help="micro-batches in a window")
    parser.add_argument("--max-updates", type=int, default=100)
    parser.add_argument("--save-updates", type=int, default=50)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    options = parser.parse_args()

    # The data: sequences of uneven length. The model shifts the labels by itself.
    set_seed(0)
    documents = read_documents(None)
    train_documents, held_out_documents = hold_out(documents)
    ids = number_characters(documents)
    train = cut(train_documents, ids, LENGTH)
    held_out = cut(held_out_documents, ids, LENGTH)[:200]

    # The model: a frozen base, adapters in the attention, its embedding and head in full.
    config = LlamaConfig(
        vocab_size=len(ids) + 1,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH + 1,
    )
    adapters = LoraConfig(
        r=8,
        lora_alpha=16,
        lora_dropout=0.05,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"],
        modules_to_save=["embed_tokens", "lm_head"],
    )
    model = get_peft_model(LlamaForCausalLM(config), adapters)

    # Trainer's own arguments, and one of accum's. Whatever the window, its loss is the mean over
    # all its target characters on all ranks, though PEFT's wrapper hides what the model takes.
    arguments = TrainingArguments(
        output_dir=str(options.output_dir),
        per_device_train_batch_size=options.micro_batch,
        per_device_eval_batch_size=16,
        gradient_accumulation_steps=options.steps,
        max_steps=options.max_updates,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        warmup_steps=min(10, options.max_updates // 5),
        logging_steps=10,
        save_strategy="steps",
        save_steps=options.save_updates,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
    )
    trainer = AccumTrainer(
        model,
        arguments,
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=sequences,
        checkpoint_window=True,
    )
    trainer.train(resume_from_checkpoint=options.resume or None)
    if trainer.interrupted:
        if trainer.is_world_process_zero():
            pending = trainer.accum.pending
            print(f"saved after {pending} micro-batches of update {trainer.state.global_step + 1}")
        return AGAIN

    # The result. Beside the adapters, Trainer's checkpoints hold the optimizer and the window.
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        trained, everything = model.get_nb_trainable_parameters()
        print(f"{trained:,} of {everything:,} parameters trained")
        print(f"held-out loss {loss:.4f} nats per character")
    return 0


def sequences(rows: list[Tensor]) -> dict[str, Tensor]:
    """A micro-batch: sequences filled up to the longest, with labels that leave that out."""
    inputs = pad_sequence(rows, batch_first=True, padding_value=START)
    labels = pad_sequence(rows, batch_first=True, padding_value=IGNORED)
    return {"input_ids": inputs, "labels": labels, "attention_mask": (labels != IGNORED).long()}


if __name__ == "__main__":
    code = main()
    if dist.is_initialized():
        gc.collect()  # the trainer is a cycle, and must be gone before its process group
        dist.destroy_process_group()
    sys.exit(code)

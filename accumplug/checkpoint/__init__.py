"""Checkpoints at any micro-batch: the files, and what is put into them."""

"""Reads results, measures and proves; nothing here is needed to train."""

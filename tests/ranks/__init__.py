"""Tests that need several ranks."""

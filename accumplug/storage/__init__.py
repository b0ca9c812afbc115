"""Files on disk; knows no Accumulator."""

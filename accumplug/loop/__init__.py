"""The life of a block, from enter to update."""

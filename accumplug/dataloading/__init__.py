"""Where a run is in its data, and how another process gets to the same place."""

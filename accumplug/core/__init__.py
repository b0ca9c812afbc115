"""The state of a window and what is computed from it; knows no ranks and no loaders."""

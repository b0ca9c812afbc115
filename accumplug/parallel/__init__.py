"""The only files that know the wrappers of data-parallel models."""

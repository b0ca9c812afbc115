"""Says that a resumed pass gives another item than the one that was saved, and what to do."""

from __future__ import annotations

import warnings
from typing import Literal

from accumplug.dataloading.generators import Generators
from accumplug.errors import CheckpointError

VerifyData = Literal["raise", "warn", False]


class StreamCheck:
    """What a `Fetcher` calls with the number of a fetch that gave another item.

    It refers to no iterator, which would keep the workers of a loader alive.
    """

    def __init__(self, generators: Generators, verify: VerifyData) -> None:
        if verify not in ("raise", "warn", False):
            raise ValueError(f'verify_data is "raise", "warn" or False; got {verify!r:.40}')
        self.verify = verify
        self.base = 0
        """Items of this pass that come before the first fetch."""
        self.per_item = 1
        """Fetches for each item."""
        self._generators = generators

    def __call__(self, number: int) -> None:
        position = self.base + number // self.per_item
        known = ", ".join(self._generators.names) or "none besides Python's, NumPy's and torch's"
        if missing := ", ".join(sorted(self._generators.missing)):
            known += f" (and {missing}, where there is none here when the loader has been built)"
        told = (
            f"item {position} of this pass is not the one that the run that saved was given. The "
            f"order or the noise of its data depends on something that was not saved (the data "
            f"themselves, the time, a random generator that the loader doesn't show, a state_dict "
            f"without the loader's buffer). Saved are the generators: {known}. Name others with "
            f"Checkpointer(..., generators=[...]); for items that hold times or ids, or to go on "
            f'with other data, give verify_data="warn" or False'
        )
        if self.verify == "raise":
            raise CheckpointError(told)
        warnings.warn(told, stacklevel=2)

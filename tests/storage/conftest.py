"""Functions of `os` that a test replaces are those that pathlib calls."""

from __future__ import annotations

import os
import pathlib
import sys
from typing import Any

if sys.version_info < (3, 11):  # its pathlib keeps the functions that it found when it was imported

    def _as_it_is_now(name: str) -> Any:
        return staticmethod(lambda *args, **options: getattr(os, name)(*args, **options))

    for _name in ("mkdir", "rename", "replace", "rmdir", "unlink"):
        setattr(pathlib._NormalAccessor, _name, _as_it_is_now(_name))

"""Exact gradient accumulation for training loops that already exist."""

from accumplug._version import __version__ as __version__
from accumplug.accumulator import Accumulator as Accumulator
from accumplug.close import NonFiniteError as NonFiniteError
from accumplug.micro import MicroBatch as MicroBatch
from accumplug.result import WindowResult as WindowResult
from accumplug.window import TornWindowError as TornWindowError

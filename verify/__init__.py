"""Who is checked, where and how: adapters, the judge, workers, the interpreter, reproduction, reports, the command line."""

from verify.adapter import Adapter as Adapter
from verify.adapter import Domain as Domain

__version__ = "0.1.0"

"""A GDN layer with tensor, sequence and context parallelism, our own: an implementation to be verified like any other."""

from verify.adapters.gdn.layer import Choices as Choices
from verify.adapters.gdn.layer import GatedDeltaNet as GatedDeltaNet

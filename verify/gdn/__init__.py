"""A GDN layer with tensor, sequence and context parallelism, our own: an implementation to be verified like any other."""

from verify.gdn.layer import Choices as Choices
from verify.gdn.layer import GatedDeltaNet as GatedDeltaNet

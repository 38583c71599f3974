"""A test suite of one's own, tried on wrong implementations: which of them would it notice?

    gdn-verify zoo --rule examples/zoo_suite.py:Mine

The inputs and the tolerance are those of a common kind of kernel test: random inputs of one width, two
lengths, gates that forget within a few tokens, and one tolerance for a whole tensor.
"""

import torch
from torch.nn.functional import logsigmoid, normalize

from verify.zoo.suite import Suite


class Mine(Suite):
    """Two lengths, gates of about -0.8, one tolerance of 2% of the largest entry."""

    def cases(self):
        for length in (64, 100):
            generator = torch.Generator().manual_seed(length)

            def random(*shape, generator=generator):
                return torch.randn(shape, generator=generator)

            yield {
                "q": normalize(random(1, length, 2, 32), dim=-1),
                "k": normalize(random(1, length, 2, 32), dim=-1),
                "v": random(1, length, 2, 32),
                "g": logsigmoid(random(1, length, 2)),
                "beta": random(1, length, 2).sigmoid(),
                "state": random(1, 2, 32, 32),
            }

    def accepts(self, got, reference, inputs):  # noqa: ARG002 - a rule may also use the inputs
        return all((got[name] - right).abs().max() <= 0.02 * right.abs().max() for name, right in reference.items())

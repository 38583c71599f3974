"""A limit on autotuning, so that a quick measurement does not spend its time on it."""

import gc


def limit_tuning(most: int) -> None:
    """Limit autotuning of flash-linear-attention's kernels to `most` configurations, spread evenly over each kernel's list."""
    import fla.modules.causal_conv1d
    import fla.modules.l2norm
    import fla.ops.gated_delta_rule  # noqa: F401 - the import creates the autotuners
    from triton.runtime.autotuner import Autotuner

    for tuner in [candidate for candidate in gc.get_objects() if issubclass(type(candidate), Autotuner)]:
        count = len(tuner.configs)
        tuner.configs = [tuner.configs[place * count // most] for place in range(most)] if count > most else tuner.configs

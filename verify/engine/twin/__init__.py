"""Whether two implementations may train and serve the same model: `cases`, `measures` of a difference, its `causes`, and `pairs`."""

"""Whether two implementations may train and serve the same model.

`cases` has the calls, `measures` how far two outputs are apart, `causes` what explains that, and `pairs` asks both sides.
"""

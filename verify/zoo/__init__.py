"""The zoo: wrong implementations by hand, and the hunt that shows which laws kill them.

An animal is an Adapter or PathAdapter in a module of this package with a `letter`, its class of defect in the field's record of
incidents, perhaps the rows of that record whose twin it is (`incident`), and a story of one line, its docstring.
"""

"""The zoo: hand-written wrong implementations ("animals"), and the hunt that shows which laws detect ("kill") them.

An animal is an adapter in a module `wrong_*.py` of this package. Its `letter` is its class of defects in the record of incidents.
Its `incident` lists the rows of that record whose defect it repeats, if any. Its docstring tells in one line what is wrong.
"""

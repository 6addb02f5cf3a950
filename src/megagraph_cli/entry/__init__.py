"""The commands' flags: one function each, from options to one call. Command modules are imported inside them.

``--help``, ``fit`` and ``search`` must not wait for torch or numba.
"""

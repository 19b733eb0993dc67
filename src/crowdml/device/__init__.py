"""The device's runtime: senses, computes, lets out what its owner allowed, and keeps the ledger. NumPy only.

Nothing is imported before it is asked for: see `runner`, `folder`, `client`, `sources`, `conditions` and `fleet`.
"""

"""The wire: keys, signed envelopes, receipts, requests and problems. It knows bytes, not what they mean.

Everything that a peer may get wrong raises a `Problem` with a 4xx status and a sentence. docs/protocol.md is the same
contract in words, and spec/ in test vectors.
"""

"""Secure aggregation: the server learns a cohort's sum and nothing else. Functions of keys and arrays; no network."""

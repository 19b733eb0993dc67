"""Crowd-ML: private learning by crowds of devices."""

__version__ = "0.1.0"

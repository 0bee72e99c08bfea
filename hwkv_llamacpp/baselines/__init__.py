"""Policies made by hand, and baselines that calibrated ones are compared with."""

"""Calibration methods, one file each."""

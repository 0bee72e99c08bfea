"""Rows to tables and pages."""

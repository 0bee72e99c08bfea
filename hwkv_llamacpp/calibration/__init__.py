"""Model and text to policy."""

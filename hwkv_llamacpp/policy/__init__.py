"""The table of windows, and its arithmetic: what it keeps, what it takes, what a budget allows."""

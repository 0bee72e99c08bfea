"""Pictures: heatmaps of policies, charts of measurements and records."""

"""What is in a model file: its metadata, its geometry, the policy that it carries."""

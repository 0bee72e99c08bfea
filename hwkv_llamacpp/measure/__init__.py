"""Fresh servers to rows: memory, throughput and capacity."""

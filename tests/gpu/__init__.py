"""What the connector asks of a GPU, counted without one."""

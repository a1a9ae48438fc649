"""What every service and the CLI have to agree on about documents."""

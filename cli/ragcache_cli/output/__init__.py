"""What commands print with: the console, durations, and lines of logs."""

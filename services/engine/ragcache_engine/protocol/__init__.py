"""What the scheduler and worker halves of the connector share: messages and engine roles."""
